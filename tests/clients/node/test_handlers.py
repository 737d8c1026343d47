"""How a node runs what it is sent: how many at once, in which order, how long, and what a crash means."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from duly.clients.node import incoming
from duly.clients.node.node import Node
from duly.clients.node.tasks import SentTask, Task
from duly.core.units import SECOND
from duly.errors import Malformed, ProgramError, TaskFailed, Unknown
from duly.wire import fd
from tests.clients.node.nodes import Brokered, until
from tests.guard import GUARD


@pytest.fixture
def at(at_mosquitto: Brokered) -> Brokered:
    return at_mosquitto


async def test_no_more_than_so_many_run_at_once(at: Brokered) -> None:
    b = at.node(at.b, concurrency=3)
    now, most = 0, 0

    @b.task("work")
    async def work(task: Task) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    async with b, at.node(at.a) as a:
        await asyncio.gather(*(a.call(at.b, "work") for _ in range(30)))
    assert most == 3


async def test_in_order_means_one_by_one_for_each_sender_in_its_order(at: Brokered) -> None:
    b = at.node(at.b, ordered=True)
    began: list[tuple[str, int]] = []
    busy: set[str] = set()

    @b.task("work")
    async def work(task: Task) -> None:
        assert task.sender not in busy
        busy.add(task.sender)
        began.append((task.sender, task.payload))
        await asyncio.sleep(0.005)
        busy.discard(task.sender)

    c = f"{at.a}-2"
    async with b, at.node(at.a) as a, at.node(c) as other:
        tasks = []
        for n in range(10):
            tasks += [await a.send(at.b, "work", n), await other.send(at.b, "work", n)]
        async with asyncio.timeout(GUARD):
            for task in tasks:
                await task.result
    for sender in (at.a, c):
        assert [n for who, n in began if who == sender] == list(range(10))


async def test_a_handler_that_takes_too_long_is_stopped_and_has_failed(at: Brokered) -> None:
    b = at.node(at.b)
    stopped = asyncio.Event()

    @b.task("work", deadline=0.05)
    async def work(task: Task) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with b, at.node(at.a) as a:
        with pytest.raises(TaskFailed, match="it took longer than"):
            await a.call(at.b, "work")
    assert stopped.is_set()


async def test_an_exception_is_a_failure_with_its_name(at: Brokered) -> None:
    b = at.node(at.b)

    @b.task("divide")
    async def divide(task: Task) -> float:
        return 1 / int(task.payload)

    @b.task("own timeout")
    async def own(task: Task) -> None:
        raise TimeoutError

    @b.task("unheard of")
    async def strange(task: Task) -> object:
        return object()

    @b.task("huge")
    async def huge(task: Task) -> str:
        return "x" * 300_000

    async with b, at.node(at.a) as a:
        with pytest.raises(TaskFailed, match="ZeroDivisionError"):
            await a.call(at.b, "divide", 0)
        with pytest.raises(TaskFailed, match="TimeoutError"):
            await a.call(at.b, "own timeout")
        with pytest.raises(TaskFailed, match="TypeError"):
            await a.call(at.b, "unheard of")
        with pytest.raises(TaskFailed, match="limit"):
            await a.call(at.b, "huge")


@pytest.mark.parametrize(("effect", "runs"), [("at_least_once", 2), ("at_most_once", 1)])
async def test_after_a_crash_in_the_middle_it_is_run_again_or_not_as_declared(
    at: Brokered, tmp_path: Path, effect: Any, runs: int
) -> None:
    started: list[int] = []
    crash = asyncio.Event()

    def make() -> Node:
        node = at.node(at.b, store=str(tmp_path / "b.db"))

        @node.task("work", effect=effect)
        async def work(task: Task) -> int:
            started.append(task.attempt)
            if not crash.is_set():
                crash.set()
                await asyncio.Event().wait()
            return task.attempt

        return node

    async with at.node(at.a) as a:
        first = make()
        await first.start()
        task = await a.send(at.b, "work", expires=60)
        await crash.wait()
        await die(first)
        async with make(), asyncio.timeout(GUARD):
            if runs == 2:
                assert await task.result == 2
            else:
                with pytest.raises(Unknown, match="stopped in the middle"):
                    await task.result
    assert len(started) == runs


async def test_what_waits_for_its_turn_is_not_lost_by_a_crash_even_at_most_once(
    at: Brokered, tmp_path: Path
) -> None:
    started: list[str] = []
    let_go = False

    def make() -> Node:
        node = at.node(at.b, store=str(tmp_path / "b.db"), concurrency=1)

        @node.task("work")
        async def work(task: Task) -> None:
            started.append(task.id)
            if not let_go:
                await asyncio.Event().wait()

        return node

    async with at.node(at.a) as a:
        first = make()
        await first.start()
        tasks = [await a.send(at.b, "work", expires=60) for _ in range(5)]
        for task in tasks:
            await asyncio.wait_for(_delivered(task), GUARD)
        await until(lambda: started)
        await die(first)
        let_go = True
        async with make(), asyncio.timeout(GUARD):
            ends = [await end(task) for task in tasks]
    assert sorted(ends) == ["done"] * 4 + ["unknown"]
    assert sorted(started) == sorted(task.id for task in tasks)


async def test_when_a_node_stops_its_handlers_may_finish_and_their_answers_go_out(at: Brokered) -> None:
    b = at.node(at.b)
    began = asyncio.Event()

    @b.task("work")
    async def work(task: Task) -> str:
        began.set()
        await asyncio.sleep(0.1)
        return "finished"

    async with at.node(at.a) as a:
        async with b:
            task = await a.send(at.b, "work", expires=60)
            await began.wait()
        async with asyncio.timeout(GUARD):
            assert await task.result == "finished"


def test_a_handler_is_an_async_function_with_a_known_effect(at: Brokered) -> None:
    node = at.node(at.b)
    with pytest.raises(ProgramError, match="async function"):
        node.task("work")(lambda task: None)  # type: ignore[arg-type, return-value]  # the mistake
    with pytest.raises(Malformed, match="effect"):
        node.task("work", effect="twice")  # type: ignore[arg-type]  # the mistake


async def test_a_handler_that_is_declared_too_late_is_refused_and_not_silently_ignored(at: Brokered) -> None:
    async with at.node(at.a) as a, at.node(at.b, serve=True) as b:
        with pytest.raises(ProgramError, match="before it starts, or make the node with serve=True"):

            @a.task("work")
            async def work(task: Task) -> None: ...

        @b.task("late")
        async def late(task: Task) -> str:
            return "done"

        assert await a.call(at.b, "late") == "done"


async def die(node: Node) -> None:
    """As kill -9: nothing is finished, nothing is said."""
    assert node._ledger is not None
    node._incoming.engine.kill()
    node._outgoing.engine.kill()
    node._incoming.tasks.kill()
    node.tasks.kill()
    node._mailbox.link._stopping.set()
    session = node._mailbox.link._session
    if session is not None:
        assert session._transport is not None
        session._transport.abort()
    await node._mailbox.link.stop()
    await node._ledger.close()


async def _delivered(task: SentTask) -> None:
    await task.delivered


async def end(task: SentTask) -> str:
    with suppress(TaskFailed, Unknown):
        await task.result
    return task.state


async def test_what_is_too_much_is_left_to_the_broker_until_there_is_room(
    at: Brokered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "BACKLOG", 20)
    b = at.node(at.b, concurrency=2)
    go_on, most = asyncio.Event(), 0

    @b.task("work")
    async def work(task: Task) -> None:
        nonlocal most
        most = max(most, b._incoming._inbox.live)
        await go_on.wait()

    async with b, at.node(at.a) as a:
        tasks = [await a.send(at.b, "work", expires=60) for _ in range(100)]
        await until(lambda: len(b._incoming._held) >= 80)
        go_on.set()
        async with asyncio.timeout(GUARD):
            for task in tasks:
                await task.result
    assert most <= 20 + 2


async def test_a_reconnect_makes_no_room_for_more_than_the_backlog(
    at: Brokered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken in before the connection broke is stored after it, and still counts."""
    monkeypatch.setattr(incoming, "BACKLOG", 20)
    b = at.node(at.b, concurrency=2)
    go_on = asyncio.Event()

    @b.task("work")
    async def work(task: Task) -> None:
        await go_on.wait()

    async with b:
        arrivals, exp = b._incoming, b._incoming._ledger.clock.now() + 60 * SECOND

        def arrive(first: int, last: int) -> None:
            for n in range(first, last):
                task = fd.FdPending(at.a, at.b, f"task-{n}", "work", exp=exp)
                arrivals.hear(fd.encode(task), lambda: None)

        arrive(0, 20)
        arrivals.reconnected()
        await until(lambda: len(arrivals._asked) == 2)
        arrive(20, 60)
        assert len(arrivals._held) == 40
        go_on.set()
        await until(lambda: not arrivals._held and not arrivals._inbox.live)


async def test_whatever_a_handler_does_its_task_ends(at: Brokered) -> None:
    b = at.node(at.b)

    @b.task("long")
    async def long(task: Task) -> None:
        raise TaskFailed("x" * 300_000)

    @b.task("odd")
    async def odd(task: Task) -> None:
        raise TaskFailed(object())

    @b.task("lost")
    async def lost(task: Task) -> None:
        other = asyncio.ensure_future(asyncio.sleep(60))
        other.cancel()
        await other

    async with b, at.node(at.a) as a:
        for action, why in (("long", "the limit is"), ("odd", "object"), ("lost", "CancelledError")):
            with pytest.raises(TaskFailed, match=why):
                await a.call(at.b, action, expires=30)
