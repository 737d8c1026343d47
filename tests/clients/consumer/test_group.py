"""Consumers of one name on one PostgreSQL share the work, and take over what a dead one had."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import duly
from duly.clients.consumer.queue_message import PARTITIONS
from tests import servers
from tests.guard import GUARD

Message = duly.QueueMessage


@pytest.fixture
def url(postgres_server: servers.Postgres) -> str:
    return postgres_server.create_database()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD):
        while not condition():
            await asyncio.sleep(0.02)


def held(consumer: duly.Consumer) -> frozenset[str]:
    assert consumer._group is not None
    return consumer._group.held


def even(*consumers: duly.Consumer) -> Callable[[], bool]:
    return lambda: all(len(held(one)) == PARTITIONS // len(consumers) for one in consumers)


def switch(n: int, lane: str) -> Message:
    return Message(f"{lane}-{n}", "on" if n % 2 else "off", "remote", lane, n)


async def test_a_lane_keeps_its_order_though_its_messages_come_to_two_consumers(url: str) -> None:
    ran: list[tuple[str, int | None]] = []

    async def handler(message: Message) -> object:
        ran.append((message.lane or "", message.n))
        return message.n

    a, b = (duly.Consumer(url, handler, name="lamps", window=30) for _ in range(2))
    async with a, b:
        await until(even(a, b))
        assert not held(a) & held(b)
        handing = []
        for k, order in enumerate(itertools.permutations(range(4))):
            turns = itertools.cycle((a, b))
            handing += [next(turns).handle(switch(n, f"lamp{k}")) for n in order for _ in range(3)]
        outcomes = await asyncio.gather(*handing)
    assert {outcome.word for outcome in outcomes} == {"done"}
    assert sum(outcome.repeat for outcome in outcomes) == len(outcomes) * 2 // 3
    for k in range(24):
        assert [n for lane, n in ran if lane == f"lamp{k}"] == [0, 1, 2, 3]


async def test_messages_without_a_lane_run_where_they_arrive_and_once(url: str) -> None:
    ran: dict[str, list[str]] = {"a": [], "b": []}

    def of(who: str) -> Callable[[Message], Any]:
        async def handler(message: Message) -> str:
            ran[who].append(message.id)
            return who

        return handler

    a, b = (duly.Consumer(url, of(who), name="mails") for who in ("a", "b"))
    async with a, b:
        ours = await asyncio.gather(*(a.handle(Message(f"a{n}")) for n in range(10)))
        theirs = await asyncio.gather(*(b.handle(Message(f"a{n}")) for n in range(10)))
        await b.handle(Message("b"))
    assert [outcome.result for outcome in (*ours, *theirs)] == ["a"] * 20
    assert ran == {"a": [f"a{n}" for n in range(10)], "b": ["b"]}


async def test_what_a_dead_consumer_had_is_finished_by_another(url: str) -> None:
    """The one that ran when it died is unknown, as its handler declares; those behind it run."""
    begun, ran = asyncio.Event(), []

    async def hang(message: Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def handler(message: Message) -> None:
        ran.append(message.id)

    ledger = await duly.open_ledger(url)
    dying = duly.Consumer(ledger, hang, name="lamps", notifier=url)
    await dying.start()
    await until(even(dying))
    for n in range(3):
        await dying.accept(switch(n, "lamp"))
    await begun.wait()
    async with duly.Consumer(url, handler, name="lamps") as other:
        assert dying._group is not None
        dying._engine.kill()
        dying.tasks.kill()
        outcomes = await asyncio.gather(*(other.handle(switch(n, "lamp")) for n in range(4)))
    assert [outcome.word for outcome in outcomes] == ["unknown", "done", "done", "done"]
    assert ran == ["lamp-1", "lamp-2", "lamp-3"]
    await dying._group._notifier.stop()
    await ledger.close()


async def test_one_that_stops_hands_its_lanes_over_at_once(url: str) -> None:
    ran: list[str] = []

    async def handler(message: Message) -> None:
        ran.append(message.id)

    a, b = (duly.Consumer(url, handler, name="lamps") for _ in range(2))
    async with b:
        async with a:
            await until(even(a, b))
        await until(lambda: len(held(b)) == PARTITIONS)
        await asyncio.gather(*(b.handle(switch(0, f"lamp{k}")) for k in range(20)))
    assert len(ran) == 20
