"""The pause between tries, in virtual time."""

from __future__ import annotations

import asyncio

from duly.core.retry import RetryPolicy
from duly.core.units import SECOND
from duly.runtime.backoff import Backoff
from duly.testing.loops import VirtualLoop

GROWING = RetryPolicy.exponential(SECOND, 8 * SECOND, jitter=0)


async def pauses(backoff: Backoff, tries: int, *, among: int = 1) -> list[float]:
    loop, found = asyncio.get_running_loop(), []
    for _ in range(tries):
        began = loop.time()
        await backoff.wait(among=among)
        found.append(round(loop.time() - began, 3))
    return found


def test_each_wait_is_longer_up_to_the_longest() -> None:
    assert VirtualLoop().play(pauses(Backoff(GROWING), 5)) == [1, 2, 4, 8, 8]


def test_after_it_worked_it_begins_anew() -> None:
    async def play() -> list[float]:
        backoff = Backoff(GROWING)
        before = await pauses(backoff, 3)
        backoff.worked()
        return before + await pauses(backoff, 2)

    assert VirtualLoop().play(play()) == [1, 2, 4, 1, 2]


def test_where_there_are_several_all_are_tried_before_the_wait_grows() -> None:
    assert VirtualLoop().play(pauses(Backoff(GROWING), 5, among=2)) == [1, 1, 2, 2, 4]


def test_who_is_told_to_stop_does_not_wait() -> None:
    async def play() -> float:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.25, stopping.set)
        await Backoff(GROWING).wait(stopping)
        return loop.time()

    assert VirtualLoop().play(play()) < 0.5


def test_after_the_last_try_there_is_no_wait() -> None:
    async def play() -> list[bool]:
        backoff = Backoff(RetryPolicy.fixed(SECOND, tries=3))
        return [await backoff.wait() for _ in range(3)]

    assert VirtualLoop().play(play()) == [True, True, False]


def test_those_who_failed_together_do_not_come_back_together() -> None:
    policy = RetryPolicy.exponential(SECOND, 8 * SECOND, jitter=0.5)

    async def play() -> set[float]:
        return {(await pauses(Backoff(policy, name), 1))[0] for name in "abcdef"}

    assert len(VirtualLoop().play(play())) > 3
