"""The timer of an engine, when the wall clock is set while it sleeps."""

from __future__ import annotations

import asyncio

import pytest

from duly.core.timers import Timers
from duly.core.units import FOREVER, HOUR, SECOND
from duly.runtime.wake_timer import WakeTimer
from duly.testing.loops import LoopClock, VirtualLoop


class Waiting:
    """A machine with one timer, and the times at which it was due."""

    def __init__(self, clock: LoopClock, **timer: int) -> None:
        self.timers = Timers[str]()
        self.timers.set("one", timer.get("when", FOREVER), timer.get("until", FOREVER))
        self._timer = WakeTimer(self, lambda: clock, self.look)
        self.rang: list[float] = []
        self.looks = 0

    def next_wake(self) -> int | None:
        return self.timers.next_wake()

    def shift(self, by: int) -> None:
        self.timers.shift(by)

    def look(self) -> None:
        """What an engine does when its timer rings."""
        self.looks += 1
        now = self._timer.now()
        if list(self.timers.due(now)):
            self.rang.append(asyncio.get_running_loop().time())
        self._timer.set(now)


def test_a_moment_of_the_wall_clock_comes_with_the_clock_that_is_set() -> None:
    """A clock that was an hour behind is set right: what was planned for a minute ago is due at once."""

    async def scene() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        machine = Waiting(clock, until=clock.now() + HOUR)
        machine.look()
        await asyncio.sleep(20)
        clock.step(HOUR)
        await asyncio.sleep(10)
        assert len(machine.rang) == 1
        assert 20 <= machine.rang[0] <= 25

    VirtualLoop().play(scene())


@pytest.mark.parametrize("by", [-HOUR, 0, HOUR])
def test_a_length_of_time_stays_as_long_as_it_is(by: int) -> None:
    async def scene() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        machine = Waiting(clock, when=clock.now() + 30 * SECOND)
        machine.look()
        await asyncio.sleep(12)
        clock.step(by)
        await asyncio.sleep(100)
        assert machine.rang == [pytest.approx(30, abs=0.01)]
        assert machine.looks <= 9, "it looks now and then, and not at all when nothing waits"

    VirtualLoop().play(scene())
