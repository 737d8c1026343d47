"""A repeat is recognised by its bytes, whatever was learned about how its sender writes in between: it gets
its answer again, is not run again and is no conflict."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from tests.clients.node.nodes import Brokered

PAYLOADS: list[Any] = [
    None, "", {"on": True}, [1], 7, "test", "plain words", "aGVsbG8=", "eyJvbiI6dHJ1ZX0=", "AAECAwQFBgc=",
    base64.b64encode(bytes(range(256))).decode(), "deadbeefdeadbeef",
]  # fmt: skip


@pytest.fixture
def at(at_mosquitto: Brokered) -> Brokered:
    return at_mosquitto


def echo(at: Brokered, runs: list[str], **more: Any) -> Node:
    node = at.node(at.b, **more)

    @node.task("echo")
    async def echo_(task: Task) -> Any:
        runs.append(task.id)
        return task.payload

    return node


def pending(peer: str, receiver: str, n: int, payload: Any) -> dict[str, Any]:
    return {
        "sender": peer, "receiver": receiver, "msg_id": f"m{n}", "action": "echo", "exp": 9999999999,
        "payload": payload,
    }  # fmt: skip


async def test_a_first_task_of_nothing_again_after_a_form_was_learned(at: Brokered) -> None:
    runs: list[str] = []
    async with echo(at, runs) as node, at.peer(at.a) as peer:
        first = pending(peer.name, at.b, 1, None)
        peer.say(at.b, "pending", first)
        await peer.hear("complete")
        peer.say(at.b, "pending", pending(peer.name, at.b, 2, base64.b64encode(b"some text here").decode()))
        await peer.hear("complete", 2)
        peer.say(at.b, "pending", first)
        answers = await peer.hear("complete", 3)
        assert answers[0] == answers[2]
        assert [each["msg_id"] for each in await peer.hear("ack", 3)] == ["m1", "m2", "m1"]
        assert not node.refused
    assert runs == ["m1", "m2"]


async def test_each_copy_in_a_burst_is_acknowledged_and_one_runs(at: Brokered) -> None:
    runs: list[str] = []
    async with echo(at, runs), at.peer(at.a) as peer:
        for _ in range(3):
            peer.say(at.b, "pending", pending(peer.name, at.b, 1, {"n": 1}))
        assert [each["msg_id"] for each in await peer.hear("ack", 3)] == ["m1"] * 3
        await peer.hear("complete")
    assert runs == ["m1"]


@pytest.mark.parametrize("seed", range(6))
async def test_in_any_mixture_of_forms_each_repeat_gets_its_answer(at: Brokered, seed: int) -> None:
    rng = random.Random(seed)
    runs: list[str] = []
    said: list[dict[str, Any]] = []
    async with echo(at, runs) as node, at.peer(at.a) as peer:
        for sent in range(1, 61):
            if said and rng.random() < 0.5:
                task = rng.choice(said)
            else:
                task = pending(peer.name, at.b, len(said), rng.choice(PAYLOADS))
                said.append(task)
            peer.say(at.b, "pending", task)
            await peer.hear("complete", sent)
        answers: dict[str, list[str]] = {}
        for each in await peer.hear("complete", 60):
            answers.setdefault(each["msg_id"], []).append(json.dumps(each))
        assert not node.refused
    assert runs == [task["msg_id"] for task in said], "each has run once"
    for task in said:
        told = answers[task["msg_id"]]
        assert len(set(told)) == 1, f"{task} was answered differently: {told}"


async def test_an_answer_in_base64_is_told_again_in_base64_to_a_peer_that_writes_json_since(
    at: Brokered,
) -> None:
    runs: list[str] = []
    async with echo(at, runs) as node, at.peer(at.a) as peer:

        @node.task("words")
        async def words(task: Task) -> str:
            return "the lamp is on"

        first = pending(peer.name, at.b, 1, None) | {"action": "words"}
        peer.say(at.b, "pending", first)
        await peer.hear("complete")
        peer.say(at.b, "pending", pending(peer.name, at.b, 2, {"so": "json"}))
        await peer.hear("complete", 2)
        peer.say(at.b, "pending", first)
        answers = await peer.hear("complete", 3)
    assert answers[0] == answers[2]
    assert base64.b64decode(answers[2]["value"]) == b"the lamp is on"


async def test_what_was_learned_of_a_peer_is_known_after_a_restart(at: Brokered, tmp_path: Path) -> None:
    runs: list[str] = []
    store = str(tmp_path / "b.db")
    async with at.peer(at.a) as peer:
        async with echo(at, runs, store=store):
            peer.ask(at.b, "1", "echo", payload={"so": "json"})
            await peer.hear("complete")
        async with echo(at, runs, store=store) as node:
            peer.ask(at.b, "2", "echo", payload="aGVsbG8=")
            answers = await peer.hear("complete", 2)
            assert answers[-1]["value"] == "aGVsbG8="
            peer.ask(at.b, "2", "echo", payload="aGVsbG8=")
            await peer.hear("complete", 3)
            assert not node.refused
    assert runs == ["1", "2"]
