"""Nodes that sign, and what becomes of messages that lie about who wrote them, on a real broker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.signing import Algorithm, Keyring
from duly.core.units import SECOND
from duly.errors import Malformed, UnknownKey
from duly.identity import keyring as keys
from duly.wire import fd
from duly.wire.fd_signatures import FdSignatures
from tests.clients.node.nodes import Brokered, own_name, until
from tests.guard import GUARD


@pytest.fixture(params=["embedded", "mosquitto"])
def at(request: pytest.FixtureRequest) -> Brokered:
    return Brokered(request.getfixturevalue(f"{request.param}_server"))


class People:
    """A and B trust each other; M is known to both, and lies."""

    def __init__(self, at: Brokered) -> None:
        self.at, self.m = at, own_name("M")
        names = (at.a, at.b, self.m)
        own = {name: keys.new_key() for name in names}
        self.rings = {name: Keyring(name, own=own[name]) for name in names}
        for name in names:
            for other in names:
                if other != name:
                    self.rings[name] = self.rings[name].trust(other, own[other])
        self.signatures = {name: FdSignatures(ring) for name, ring in self.rings.items()}
        self.ran: list[str] = []

    def node(self, name: str, **more: Any) -> Node:
        return self.at.node(name, keys=self.rings[name], require_signed=True, **more)

    def lamp(self, **more: Any) -> Node:
        node = self.node(self.at.b, **more)

        @node.task("turn_on")
        async def turn_on(task: Task) -> dict[str, bool]:
            self.ran.append(task.id)
            return {"on": True}

        return node

    def task(self, id: str, signer: str, to: str, **more: Any) -> dict[str, Any]:
        """As it stands on the wire, signed by this one."""
        task = fd.FdPending(signer, to, id, "turn_on", exp=9_999_999_999 * SECOND)
        text: dict[str, Any] = json.loads(self.signatures[signer].encode(task, to))
        return text | more


@pytest.fixture
def people(at: Brokered) -> People:
    return People(at)


async def refused(node: Node, word: str, count: int = 1) -> None:
    """Counted, and recorded in the node's own ledger with a reason."""
    await until(lambda: node.refused[word] >= count)
    assert node.refused[word] == count
    assert node._ledger is not None

    async def recorded() -> list[str]:
        rows = await node._ledger.refusals() if node._ledger is not None else []
        return [row.reason for row in rows if row.word == word]

    async with asyncio.timeout(GUARD):
        while len(await recorded()) < count:
            await asyncio.sleep(0.01)
    assert all(await recorded())


async def test_signed_nodes_work_together(people: People) -> None:
    async with people.lamp() as b, people.node(people.at.a) as a:
        assert await a.call(people.at.b, "turn_on") == {"on": True}
        status = await a.status(people.at.b)
        assert status is not None
        assert status.online
        assert not a.refused
        assert not b.refused


async def test_unsigned_tasks_are_refused_and_recorded(people: People) -> None:
    at = people.at
    async with people.lamp() as b, at.peer(at.a) as stranger:
        stranger.ask(at.b, "1")
        await refused(b, "unsigned")
        stranger.say(at.b, "pending", people.task("2", at.a, at.b))  # and the node lives on
        await stranger.hear("complete")
    assert people.ran == ["2"]


async def test_forged_tasks_are_refused_and_recorded(people: People) -> None:
    at = people.at
    async with people.lamp() as b, at.peer(at.a) as stranger:
        good = people.task("1", at.a, at.b)
        stranger.say(at.b, "pending", good | {"action": "turn_off"})
        stranger.say(at.b, "pending", good | {"msg_id": "2"})
        stranger.say(at.b, "pending", good | {"exp": 9_999_999_998})
        stranger.say(at.b, "pending", good | {"payload": "aGk="})
        await refused(b, "forged", 4)
        stranger.say(at.b, "pending", people.task("3", people.m, at.b, sender=at.a))  # M signs as A
        stranger.say(at.b, "pending", good | {"sender": people.m})  # A's words as M's
        await refused(b, "unknown_key", 2)
        assert people.ran == []
        assert not [kind for kind, _ in stranger.heard], "a liar gets no answer"


async def test_replayed_tasks_run_once(people: People) -> None:
    at = people.at
    async with people.lamp() as b, at.peer(at.a) as stranger:
        for count in (1, 2, 3):
            stranger.say(at.b, "pending", people.task("1", at.a, at.b))
            await stranger.hear("complete", count)
        assert b.refused["forged"] == 0
    assert people.ran == ["1"]


async def test_a_replay_from_before_it_was_forgotten_has_expired(people: People) -> None:
    at = people.at
    old = fd.FdPending(at.a, at.b, "1", "turn_on", exp=1_000 * SECOND)
    text = json.loads(people.signatures[at.a].encode(old, at.b))
    async with people.lamp() as b, at.peer(at.a) as stranger:
        stranger.say(at.b, "pending", text)
        await refused(b, "expired")
        stranger.say(at.b, "pending", text | {"exp": 9_999_999_999})
        await refused(b, "forged")
    assert people.ran == []


async def test_readdressed_tasks_are_refused_and_recorded(people: People) -> None:
    at = people.at
    async with people.lamp() as b, at.peer(at.a) as stranger:
        for_m = people.task("1", at.a, people.m)
        stranger.say(at.b, "pending", for_m)
        await refused(b, "other_receiver")
        stranger.say(at.b, "pending", for_m | {"receiver": at.b})
        del for_m["receiver"]
        stranger.say(at.b, "pending", for_m)
        await refused(b, "forged", 2)
    assert people.ran == []


async def test_answers_count_only_if_the_tasks_receiver_signed_them(people: People) -> None:
    at = people.at
    async with people.node(at.a) as a, at.peer(at.b) as b:
        task = await a.send(at.b, "turn_on", expires=600)
        (asked, *_) = await b.hear("pending")
        id_ = asked["msg_id"]
        done = fd.FdComplete(id_, fd.Content(b"true"))
        sealed = json.loads(people.signatures[at.b].encode(done, at.a))
        b.say(at.a, "complete", {"msg_id": id_, "value": "dHJ1ZQ=="})
        await refused(a, "unsigned")
        b.say(at.a, "complete", json.loads(people.signatures[people.m].encode(done, at.a)))
        await refused(a, "unknown_key")
        b.say(at.a, "complete", sealed | {"value": "ZmFsc2U="})
        b.say(at.a, "failed", sealed)
        b.say(at.a, "complete", json.loads(people.signatures[at.b].encode(fd.FdAck(id_), at.a)))
        b.say(at.a, "complete", json.loads(people.signatures[at.b].encode(done, people.m)))
        b.say(
            at.a,
            "complete",
            json.loads(people.signatures[at.b].encode(fd.FdComplete("other"), at.a)) | {"msg_id": id_},
        )
        await refused(a, "forged", 5)
        assert task.state in ("accepted", "sent")
        b.say(at.a, "complete", sealed)
        assert await asyncio.wait_for(_result(task), GUARD) is True


async def _result(task: Any) -> Any:
    return await task.result


async def test_what_others_say_about_a_node_is_not_believed(people: People) -> None:
    at = people.at
    async with people.lamp() as b, people.node(at.a) as a, at.peer(people.m) as liar:
        seen = a.watch_status(at.b)
        assert (await anext(seen)).online
        liar.say(at.b, "status", {"time": 1, "online": False}, retain=True)
        liar.say(
            at.b,
            "status",
            json.loads(people.signatures[people.m].encode(fd.FdStatus(SECOND, False))),
            retain=True,
        )
        liar.say(at.b, "status", b"", retain=True)
        await until(lambda: a.refused["unsigned"] >= 2 and a.refused["unknown_key"] >= 1)
        b.report(version="2")
        async with asyncio.timeout(GUARD):
            async for status in seen:
                assert status.online
                if status.version == "2":
                    break
        await seen.aclose()


async def test_an_unsigned_old_peer_still_works_where_signing_is_not_required(people: People) -> None:
    at = people.at
    node = at.node(at.b, keys=people.rings[at.b])

    @node.task("turn_on")
    async def turn_on(task: Task) -> dict[str, bool]:
        return {"on": True}

    async with node, at.peer(at.a) as old:
        old.ask(at.b, "1")
        (answer,) = await old.hear("complete")
        assert answer["value"] == {"on": True}
        assert people.signatures[at.a].check(fd.decode_complete(msgspec.json.encode(answer)), by=at.b)
        old.say(at.b, "pending", people.task("2", at.a, at.b, action="turn_off"))
        await refused(node, "forged")  # what claims to be signed must be


async def test_an_old_node_takes_signed_tasks_and_its_answers_count_unless_signing_is_required(
    people: People,
) -> None:
    at = people.at
    async with at.node(at.a, keys=people.rings[at.a]) as a, at.peer(at.b) as old:
        task = await a.send(at.b, "turn_on")
        (asked,) = await old.hear("pending")
        assert {"sig", "kid"} <= asked.keys()
        old.say(at.a, "complete", {"msg_id": asked["msg_id"], "value": "done"})
        assert await asyncio.wait_for(_result(task), GUARD) == "done"


async def test_a_device_with_a_shared_secret_needs_no_other_key(people: People) -> None:
    """By HMAC, written out as a small device would."""
    at, tiny = people.at, own_name("T")
    secret = keys.new_key(Algorithm.HMAC)
    people.rings[at.b] = people.rings[at.b].trust(tiny, secret)
    theirs = FdSignatures(Keyring(tiny).trust(at.b, secret), required=True)
    async with people.lamp() as b, at.peer(tiny) as device:
        task = fd.FdPending(tiny, at.b, "1", "turn_on", exp=9_999_999_999 * SECOND)
        device.say(at.b, "pending", theirs.encode(task, at.b))
        (answer,) = await device.hear("complete")
        assert theirs.check(fd.decode_complete(msgspec.json.encode(answer)), by=at.b)
        assert not b.refused
    assert people.ran == ["1"]


async def test_a_task_signed_before_a_restart_goes_on(people: People, tmp_path: Path) -> None:
    at = people.at
    store = str(tmp_path / "a.db")
    async with people.node(at.a, store=store) as a:
        id_ = (await a.send(at.b, "turn_on", expires=600)).id
    async with people.lamp() as b, people.node(at.a, store=store) as a:
        assert await asyncio.wait_for(_result(await a.find(id_)), GUARD) == {"on": True}
        assert not b.refused
    assert people.ran == [id_]


def test_keys_must_be_ones_own_and_must_be_able_to_sign(people: People) -> None:
    at = people.at
    with pytest.raises(Malformed, match=f"keys of {at.b}, not of {at.a}"):
        at.node(at.a, keys=people.rings[at.b])
    with pytest.raises(Malformed, match="has no key of its own to sign with"):
        at.node(at.a, require_signed=True)
    with pytest.raises(Malformed, match="duly keys new"):
        at.node(at.a, keys="nowhere.json")


async def test_whom_nothing_can_be_signed_for_nothing_is_sent(people: People) -> None:
    seal = FdSignatures(Keyring("A"), required=True)
    with pytest.raises(UnknownKey):
        seal.encode(fd.FdPending("A", "B", "1", "go"), "B")


async def test_of_two_processes_of_one_signed_node_one_stands_by(people: People) -> None:
    at = people.at
    async with people.lamp(), people.node(at.a) as a:
        second = people.lamp()
        await second.start()
        try:
            await until(lambda: second.standby)
            assert await a.call(at.b, "turn_on") == {"on": True}
        finally:
            await second.stop()
    assert len(people.ran) == 1


async def test_a_forged_rival_keeps_no_node_from_its_mailbox(people: People) -> None:
    at = people.at
    async with at.peer(people.m) as liar, people.node(at.a) as a:
        liar.say(at.b, "status", {"time": 1, "online": True, "session": "rival.1"}, retain=True)
        async with people.lamp() as b:
            assert not b.standby
            assert await a.call(at.b, "turn_on") == {"on": True}
