"""One contract for nodes, kept with every broker: the embedded one, Mosquitto, RabbitMQ."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import duly
from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.errors import Conflict, Malformed, Stopped, TaskFailed, Unknown
from duly.storage.records import Record
from tests import servers
from tests.clients.node.nodes import Brokered, until
from tests.guard import GUARD


def lamp(at: Brokered, done: list[str], store: Path | None = None, **more: object) -> Node:
    node = at.node(at.b, store=str(store) if store else None, **more)

    @node.task("turn_on", effect="at_least_once")
    async def turn_on(task: Task) -> dict[str, object]:
        done.append(task.id)
        return {"on": True, "lamp": task.payload and task.payload.get("lamp")}

    @node.task("break")
    async def break_(task: Task) -> None:
        raise TaskFailed({"why": "no bulb"})

    return node


async def test_a_call_returns_what_the_handler_returned(at: Brokered) -> None:
    done: list[str] = []
    async with lamp(at, done), at.node(at.a) as a:
        assert await a.call(at.b, "turn_on", {"lamp": 1}) == {"on": True, "lamp": 1}
    assert len(done) == 1


async def test_a_failure_reaches_the_caller_as_it_was_raised(at: Brokered) -> None:
    async with lamp(at, []), at.node(at.a) as a:
        with pytest.raises(TaskFailed) as failed:
            await a.call(at.b, "break")
        assert failed.value.error == {"why": "no bulb"}
        with pytest.raises(TaskFailed, match="does not know nonsense"):
            await a.call(at.b, "nonsense")


async def test_a_task_that_was_sent_says_how_far_it_is(at: Brokered) -> None:
    go_on = asyncio.Event()
    b = at.node(at.b)

    @b.task("wait")
    async def wait(task: Task) -> str:
        task.progress("half")
        await go_on.wait()
        return "done"

    async with b, at.node(at.a) as a:
        task = await a.send(at.b, "wait", expires=60)
        assert task.state == "sent"
        async with asyncio.timeout(GUARD):
            await task.delivered
            assert task.state == "delivered"
            async for update in task.updates():
                assert update == "half"
                go_on.set()
            assert await task.result == "done"
        assert (task.state, task.progress) == ("done", "half")


async def test_a_task_waits_for_a_node_that_is_away(at: Brokered, tmp_path: Path) -> None:
    done: list[str] = []
    async with at.node(at.a) as a:
        task = await a.send(at.b, "turn_on", {"lamp": 2}, expires=60)
        async with lamp(at, done, tmp_path / "b.db"), asyncio.timeout(GUARD):
            assert (await task.result)["lamp"] == 2
    assert done == [task.id]


async def test_a_task_outlives_its_sender(at: Brokered, tmp_path: Path) -> None:
    done: list[str] = []
    async with at.node(at.a, store=str(tmp_path / "a.db")) as a:
        task = await a.send(at.b, "turn_on", expires=60)
    with pytest.raises(Stopped):
        await task.result
    async with lamp(at, done), at.node(at.a, store=str(tmp_path / "a.db")) as a:
        again = await a.find(task.id)
        async with asyncio.timeout(GUARD):
            assert (await again.result)["on"]
    assert done == [task.id]


async def test_a_task_that_ends_while_it_is_looked_up_is_found_ended(
    at: Brokered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = asyncio.Event()
    async with at.node(at.a, store=str(tmp_path / "a.db")) as a:
        task = await a.send(at.b, "turn_on", expires=60)
    async with at.node(at.a, store=str(tmp_path / "a.db")) as a:
        ledger = a._ledger
        assert ledger is not None
        find, end = ledger.find, a._outgoing._ended

        def report(key: bytes, state: State, answer: Answer) -> None:
            end(key, state, answer)
            reported.set()

        async def find_slowly(key: bytes) -> Record | None:
            """Returns what the ledger said of the task before it ended, after its end was reported."""
            monkeypatch.setattr(ledger, "find", find)
            record = await find(key)
            assert record is not None
            assert not record.state.terminal
            async with lamp(at, []):
                await reported.wait()
            return record

        monkeypatch.setattr(a._outgoing, "_ended", report)
        monkeypatch.setattr(ledger, "find", find_slowly)
        found = await a.find(task.id)
        assert found.state == "done"
        assert (await found.result)["on"]


async def test_a_repeat_gets_the_ack_and_the_stored_answer_and_never_runs(
    at: Brokered, tmp_path: Path
) -> None:
    done: list[str] = []
    async with at.peer(at.a) as peer:
        async with lamp(at, done, tmp_path / "b.db"):
            peer.ask(at.b, "msg001", payload={"lamp": 3})
            (first,) = await peer.hear("complete")
            peer.ask(at.b, "msg001", payload={"lamp": 3})
            assert await peer.hear("complete", 2) == [first, first]
        async with lamp(at, done, tmp_path / "b.db"):
            peer.ask(at.b, "msg001", payload={"lamp": 3})
            assert await peer.hear("complete", 3) == [first] * 3
            assert await peer.hear("ack", 3) == [{"msg_id": "msg001"}] * 3
    assert first == {"msg_id": "msg001", "value": {"on": True, "lamp": 3}}
    assert done == ["msg001"]


async def test_the_same_id_with_other_content_is_never_run(at: Brokered) -> None:
    done: list[str] = []
    async with lamp(at, done) as b, at.peer(at.a) as peer:
        peer.ask(at.b, "msg001", payload={"lamp": 1})
        await peer.hear("complete")
        peer.ask(at.b, "msg001", payload={"lamp": 2})
        await until(lambda: b.refused["conflict"])
    assert done == ["msg001"]


async def test_a_sender_cannot_use_an_id_for_two_tasks(at: Brokered, tmp_path: Path) -> None:
    done: list[str] = []
    async with lamp(at, done):
        for _ in range(2):
            async with at.node(at.a, store=str(tmp_path / "a.db")) as a:
                task = await a.send(at.b, "turn_on", {"lamp": 1}, id="one")
                assert await task.result == {"on": True, "lamp": 1}
                with pytest.raises(Conflict):
                    await a.send(at.b, "turn_on", {"lamp": 2}, id="one")
    assert done == ["one"]


async def test_what_has_expired_or_is_for_another_is_not_run_and_not_answered(
    at: Brokered, tmp_path: Path
) -> None:
    done: list[str] = []
    async with lamp(at, done, tmp_path / "b.db") as b, at.peer(at.a) as peer:
        peer.ask(at.b, "late", exp=1234567890)
        peer.ask(at.b, "ageless", exp=0, time=0)
        peer.ask(at.b, "old", exp=0, time=1234567890)
        peer.ask(at.b, "other", receiver="somebody")
        peer.ask(at.b, "good")
        await peer.hear("complete")
        assert {message["msg_id"] for _, message in peer.heard} == {"good"}
        assert b.refused == {"expired": 1, "ageless": 1, "stale": 1, "other_receiver": 1}
    assert done == ["good"]
    async with await duly.open_ledger(f"sqlite:///{tmp_path / 'b.db'}") as ledger:
        recorded = {(refusal.id, refusal.word) for refusal in await ledger.refusals()}
    assert recorded == {
        ("late", "expired"), ("ageless", "ageless"), ("old", "stale"), ("other", "other_receiver")
    }  # fmt: skip


async def test_one_that_is_never_answered_ends_as_unknown_and_a_late_result_settles_it(at: Brokered) -> None:
    async with at.node(at.a) as a, at.peer(at.b) as peer:
        task = await a.send(at.b, "turn_on", expires=0.2)
        with pytest.raises(Unknown):
            await asyncio.wait_for(_ended(task), GUARD)
        assert task.state == "unknown"
        peer.say(at.a, "complete", {"msg_id": task.id, "value": "done after all"})
        await until(lambda: task.state == "done")
        assert await task.result == "done after all"


async def _ended(task: duly.SentTask) -> object:
    return await task.result


async def test_the_first_end_stands(at: Brokered) -> None:
    async with at.node(at.a) as a, at.peer(at.b) as peer:
        task, other = await a.send(at.b, "turn_on", expires=60), await a.send(at.b, "turn_on", expires=60)
        await peer.hear("pending", 2)
        peer.say(at.a, "failed", {"msg_id": task.id, "error": "no"})
        with pytest.raises(TaskFailed) as failed:
            await asyncio.wait_for(_ended(task), GUARD)
        assert failed.value.error == "no"
        # Topics have no order among each other; on each topic what comes last has seen the rest go by.
        peer.say(at.a, "complete", {"msg_id": task.id, "value": "yes"})
        peer.say(at.a, "ack", {"msg_id": task.id})
        peer.say(at.a, "complete", {"msg_id": other.id, "value": "yes"})
        assert await asyncio.wait_for(_ended(other), GUARD) == "yes"
        assert task.state == "failed"
        assert (await a.find(task.id)).state == "failed"


async def test_a_node_can_send_to_itself(at: Brokered) -> None:
    done: list[str] = []
    async with lamp(at, done) as b:
        assert (await b.call(at.b, "turn_on"))["on"]
    assert len(done) == 1


async def test_a_cancelled_task_is_no_longer_sent_and_can_be_sent_anew(at: Brokered, tmp_path: Path) -> None:
    done: list[str] = []
    async with at.node(at.a) as a:
        task = await a.send(at.b, "turn_on", {"lamp": 4}, expires=60)
        await a.cancel(task.id)
        with pytest.raises(TaskFailed, match="cancelled"):
            await task.result
        with pytest.raises(Malformed, match="has sent no task"):
            await a.cancel("nonsense")
        anew = await a.retry(task.id)
        assert anew.id != task.id
        async with lamp(at, done), asyncio.timeout(GUARD):
            assert (await anew.result)["lamp"] == 4
    assert anew.id in done


@pytest.fixture(
    params=[servers.Embedded, servers.Mosquitto, pytest.param(servers.RabbitMq, marks=pytest.mark.proof)]
)
def at_its_own(request: pytest.FixtureRequest) -> Iterator[Brokered]:
    """Nodes at a broker that no other test uses."""
    server: servers.MqttServer = request.param()
    try:
        server.start()
        yield Brokered(server)
    finally:
        server.remove()


async def test_nodes_survive_a_broker_that_restarts(at_its_own: Brokered, tmp_path: Path) -> None:
    at, done = at_its_own, list[str]()
    async with lamp(at, done, tmp_path / "b.db"), at.node(at.a, store=str(tmp_path / "a.db")) as a:
        before = [await a.send(at.b, "turn_on", {"lamp": n}, expires=300) for n in range(20)]
        await asyncio.to_thread(at.server.stop, signal.SIGKILL)
        during = [await a.send(at.b, "turn_on", {"lamp": n}, expires=300) for n in range(20)]
        await asyncio.to_thread(at.server.start)
        async with asyncio.timeout(GUARD):
            for task in before + during:
                assert (await task.result)["on"]
    assert sorted(done) == sorted(task.id for task in before + during)


async def test_a_node_may_keep_its_memory_in_postgresql(
    at_mosquitto: Brokered, postgres_server: servers.Postgres
) -> None:
    at, done = at_mosquitto, list[str]()
    database = postgres_server.create_database()

    def make() -> Node:
        node = at.node(at.b, store=database)

        @node.task("turn_on")
        async def turn_on(task: Task) -> str:
            done.append(task.id)
            return "on"

        return node

    async with at.peer(at.a) as peer:
        for n in range(2):
            async with make():
                peer.ask(at.b, "msg001")
                assert await peer.hear("complete", n + 1) == [{"msg_id": "msg001", "value": "on"}] * (n + 1)
    assert done == ["msg001"]
