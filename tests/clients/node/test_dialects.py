"""Peers that duly did not write: every form of the seed, older names, bad manners, and nonsense."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.id_budget import IdBudget
from duly.errors import TaskFailed
from tests.clients.node.nodes import Brokered, until
from tests.guard import GUARD


@pytest.fixture
def at(at_mosquitto: Brokered) -> Brokered:
    return at_mosquitto


def b64(value: object) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.b64encode(text).decode()


def echo(at: Brokered, **more: Any) -> Node:
    node = at.node(at.b, **more)

    @node.task("echo")
    async def echo_(task: Task) -> Any:
        return task.payload

    @node.task("fail")
    async def fail(task: Task) -> None:
        raise TaskFailed(task.payload)

    return node


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        ({"lamp": 1}, {"lamp": 1}),
        (b64({"lamp": 1}), b64(b'{"lamp":1}')),
        ("a plain string", "a plain string"),
        ("test", "test"),
        (b64(b"some text here"), b64(b"some text here")),
        ([1, 2], [1, 2]),
        (7, 7),
    ],
)
async def test_a_task_is_answered_in_the_form_it_was_asked(at: Brokered, payload: Any, answer: Any) -> None:
    async with echo(at), at.peer(at.a) as peer:
        peer.ask(at.b, "1", "echo", payload=payload)
        peer.ask(at.b, "2", "fail", payload=payload)
        (done,) = await peer.hear("complete")
        (failed,) = await peer.hear("failed")
    assert (done["value"], failed["error"]) == (answer, answer)


async def test_a_peer_that_writes_json_keeps_its_strings_even_if_they_look_like_base64(at: Brokered) -> None:
    async with echo(at), at.peer(at.a) as peer:
        peer.ask(at.b, "1", "echo", payload={"so": "json"})
        await peer.hear("complete")
        peer.ask(at.b, "2", "echo", payload="aGVsbG8=")
        _, second = await peer.hear("complete", 2)
        assert second["value"] == "aGVsbG8="
        # and one of ours under the same name says itself what it means
        async with at.node(at.a) as a:
            assert await a.call(at.b, "echo", {"lamp": 1}) == {"lamp": 1}


async def test_a_payload_of_nothing_is_none(at: Brokered) -> None:
    async with echo(at), at.peer(at.a) as peer:
        peer.ask(at.b, "1", "echo", payload=None)
        task = {"sender": peer.name, "msg_id": "2", "action": "echo", "exp": 9999999999}
        peer.say(at.b, "pending", task)
        assert [one["value"] for one in await peer.hear("complete", 2)] == [None, None]


async def test_the_older_field_names_are_answered_with_them(at: Brokered) -> None:
    async with echo(at), at.peer(at.a) as peer:
        task = {
            "sender_client_id": peer.name, "receiver_client_id": at.b, "message_id": "old-1",
            "action": "echo", "timestamp": 1234567890, "expiration": 9999999999, "payload": {"lamp": 1},
        }  # fmt: skip
        peer.say(at.b, "pending", task)
        assert await peer.hear("ack") == [{"message_id": "old-1"}]
        assert await peer.hear("complete") == [{"message_id": "old-1", "value": {"lamp": 1}}]


@pytest.mark.parametrize(
    ("value", "read"),
    [("task completed successfully", "task completed successfully"), (b64({"on": True}), {"on": True}),
     ({"on": True}, {"on": True}), (None, None)],
)  # fmt: skip
async def test_an_answer_is_read_in_every_form(at: Brokered, value: Any, read: Any) -> None:
    async with at.node(at.a) as a, at.peer(at.b) as peer:
        tasks = [await a.send(at.b, "x") for _ in range(3)]
        await peer.hear("pending", 3)
        peer.say(at.a, "complete", {"msg_id": tasks[0].id, "value": value})  # and never acks
        peer.say(at.a, "failed", {"message_id": tasks[1].id, "error": value})
        for _ in range(2):
            peer.say(at.a, "ack", {"msg_id": tasks[2].id})
        peer.say(at.a, "complete", {"msg_id": tasks[2].id})
        async with asyncio.timeout(GUARD):
            assert await tasks[0].result == read
            with pytest.raises(TaskFailed) as failed:
                await tasks[1].result
            assert await tasks[2].result is None
    assert failed.value.error == read


async def test_what_we_send_is_what_the_seed_says(at: Brokered) -> None:
    async with at.node(at.a) as a, at.peer(at.b) as peer:
        await a.send(at.b, "turn_on", {"lamp": 1}, id="msg-1")
        await a.send(at.b, "turn_on", {"lamp": 1}, id="msg-2", form="json")
        first, second = await peer.hear("pending", 2)
    assert base64.b64decode(first["payload"]) == b'{"lamp":1}'
    assert second["payload"] == {"lamp": 1}
    assert (first["sender"], first["receiver"], first["msg_id"]) == (at.a, at.b, "msg-1")
    assert first["exp"] - first["time"] in (86_400, 86_401)


NONSENSE = [
    b"", b"nonsense", b"\xff\xfe", b"[]", b"7", b"null", b"{}", b'{"msg_id": 7}', b"x" * 1_000_000,
    b'{"msg_id":"1","sender":"a/b","action":"x"}', b'{"msg_id":"1","sender":"+","action":"x"}',
    b'{"msg_id":"1","sender":"#","action":"x"}', b'{"msg_id":"1","sender":"","action":"x"}',
    b'{"msg_id":"1","sender":"A\\u0000","action":"x"}', b'{"msg_id":"1","sender":"A"}',
    b'{"msg_id":"' + b"i" * 500 + b'","sender":"A","action":"x"}',
    b'{"msg_id":"1","sender":"\\ud800","action":"x"}',
    b'{"msg_id":"1","sender":"A","action":"x","exp":-5}',
    b'{"msg_id":"1","sender":"A","action":"x","exp":"soon"}',
    b'{"msg_id":"1","sender":"A","action":"x","exp":9999999999,"payload":' + b"[" * 100 + b"]" * 100 + b"}",
]  # fmt: skip


async def test_nonsense_on_every_topic_is_counted_recorded_and_harmless(at: Brokered, tmp_path: Path) -> None:
    async with echo(at, store=str(tmp_path / "b.db")) as b, at.peer(at.a) as peer:
        for kind in ("pending", "ack", "complete", "failed"):
            for text in NONSENSE:
                peer.say(at.b, kind, text)
            peer.say(at.b, kind, {"msg_id": "never sent"})
        peer.ask(at.b, "good", "echo", payload={"still": "alive"})
        assert (await peer.hear("complete"))[0]["value"] == {"still": "alive"}
        # What has a msg_id is an answer, if to no task of ours; everything else is malformed or too large.
        await until(lambda: b.refused.total() == 4 * len(NONSENSE) + 4)
        assert b.refused["unknown_task"] >= 3
    with sqlite3.connect(tmp_path / "b.db") as db:
        (recorded,) = db.execute("SELECT count(*) FROM refusals").fetchone()
    assert recorded == 4 * len(NONSENSE) + 4


async def test_ids_that_are_kept_for_long_have_a_budget(
    at: Brokered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdBudget.__init__, "__defaults__", (3,))
    async with echo(at) as b, at.peer(at.a) as peer:
        for n in range(5):
            peer.ask(at.b, f"{n}", "echo")
        peer.ask(at.b, "soon", "echo", exp=0, time=round(time.time()))
        await peer.hear("complete", 4)
        assert b.refused == {"budget": 2}
