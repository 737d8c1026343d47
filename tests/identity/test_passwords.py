"""Hashes are worked out a few at a time, those of people who were here before first."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from duly.errors import Overloaded
from duly.identity.passwords import PasswordHashing
from tests.guard import GUARD


class Work:
    """Work that waits until it is told to end, and notes the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._go = threading.Semaphore(0)

    def of(self, name: str) -> str:
        self.begun.append(name)
        assert self._go.acquire(timeout=10)
        return name

    def end(self, count: int = 1) -> None:
        self._go.release(count)


async def settled(work: Work, count: int) -> None:
    async with asyncio.timeout(GUARD):
        while len(work.begun) < count:
            await asyncio.sleep(0.001)


async def test_those_who_were_here_before_go_first_and_are_never_refused_for_strangers() -> None:
    queue, work = PasswordHashing(1, 0, waiting=3), Work()
    tasks = [asyncio.create_task(queue.run(partial(work.of, f"stranger{n}"), f"net{n}")) for n in range(6)]
    await settled(work, 1)
    known = asyncio.create_task(queue.run(lambda: work.of("ann"), "home", first=True))
    await asyncio.sleep(0)
    work.end(10)
    assert await known == "ann"
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert work.begun[:3] == ["stranger0", "ann", "stranger1"]
    assert sum(isinstance(end, Overloaded) for end in ended) == 2
    queue.close()


async def test_one_network_has_only_a_few_places() -> None:
    queue, work = PasswordHashing(1, 0, per_network=2), Work()
    tasks = [asyncio.create_task(queue.run(lambda: work.of("x"), "flood")) for _ in range(10)]
    await settled(work, 1)
    other = asyncio.create_task(queue.run(lambda: work.of("y"), "other"))
    work.end(10)
    assert await other == "y"
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(end, Overloaded) for end in ended) == 8
    with pytest.raises(Overloaded) as refused:
        raise next(end for end in ended if isinstance(end, Overloaded))
    assert refused.value.wait > 0
    assert not queue._networks
    queue.close()


async def test_who_gives_up_leaves_the_thread_to_its_work_and_the_turn_to_the_next() -> None:
    queue, work = PasswordHashing(1, 0), Work()
    running = asyncio.create_task(queue.run(lambda: work.of("running"), "a"))
    await settled(work, 1)
    waiting = [asyncio.create_task(queue.run(lambda: work.of("waiting"), f"n{n}")) for n in range(2)]
    await asyncio.sleep(0)
    running.cancel()
    waiting[0].cancel()
    await asyncio.gather(running, waiting[0], return_exceptions=True)
    assert work.begun == ["running"], "its thread is not free yet"
    work.end(2)
    assert await waiting[1] == "waiting"
    async with asyncio.timeout(GUARD):
        while queue._free != 1:
            await asyncio.sleep(0.001)
    queue.close()


async def test_one_thread_is_kept_for_those_who_were_here_before() -> None:
    queue, work = PasswordHashing(2, 1), Work()
    strangers = [asyncio.create_task(queue.run(lambda: work.of("stranger"), f"n{n}")) for n in range(3)]
    await settled(work, 1)
    known = asyncio.create_task(queue.run(lambda: work.of("ann"), "home", first=True))
    await settled(work, 2)
    assert work.begun == ["stranger", "ann"]
    work.end(4)
    await asyncio.gather(known, *strangers)
    assert queue._free == 2
    queue.close()
