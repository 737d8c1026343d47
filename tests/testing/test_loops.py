from __future__ import annotations

import asyncio
import threading

import pytest

from duly.core.units import SECOND
from duly.errors import ProgramError
from duly.testing.loops import Deadlock, Livelock, LoopClock, VirtualLoop


def test_a_day_passes_at_once() -> None:
    loop = VirtualLoop()
    loop.play(asyncio.sleep(86_400))
    assert loop.time() == pytest.approx(86_400)


def test_timers_fire_in_the_order_of_their_time() -> None:
    async def program() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        for delay, name in ((3, "c"), (1, "a"), (2, "b")):
            loop.call_later(delay, seen.append, name)
        await asyncio.sleep(4)
        return seen

    assert VirtualLoop().play(program()) == ["a", "b", "c"]


def test_waiting_for_what_can_never_come_is_an_error_not_a_hang() -> None:
    async def program() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        VirtualLoop().play(program())


def test_going_round_without_waiting_is_an_error_not_a_hang() -> None:
    async def program() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match=r"time does not pass.*asyncio\.sleep\(0\)"):
        VirtualLoop().play(program())


def test_going_round_is_no_error_while_time_passes() -> None:
    async def program() -> None:
        for _ in range(30):
            for _ in range(10_000):
                await asyncio.sleep(0)
            await asyncio.sleep(1)

    VirtualLoop().play(program())


def test_a_real_socket_is_refused_since_it_would_never_be_ready() -> None:
    async def program() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    with pytest.raises(ProgramError, match="a real socket does not work in virtual time"):
        VirtualLoop().play(program())


def test_what_is_meant_for_a_thread_runs_at_once() -> None:
    async def program() -> tuple[int, float]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        result = await asyncio.to_thread(threading.get_ident)
        return result, asyncio.get_running_loop().time()

    assert VirtualLoop().play(program()) == (threading.get_ident(), 0)


def test_a_clock_runs_with_the_loop_and_can_be_set() -> None:
    async def program() -> tuple[int, int]:
        clock = LoopClock(asyncio.get_running_loop(), skew=5 * SECOND, epoch=0)
        await asyncio.sleep(10)
        before = clock.now()
        clock.step(-3 * SECOND)
        return before, clock.now()

    assert VirtualLoop().play(program()) == (15 * SECOND, 12 * SECOND)
