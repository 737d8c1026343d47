"""The single timer of an engine, which also notices when the wall clock is set.

The laws. The timer rings no later than the machine has something to do. When the wall clock was set, the
machine's timers, which measure lengths of time, are moved before the time is used. Events at a wall-clock
time (an expiry, a planned notification) may then be due at once. The operating system does not report that
the clock was set, so the timer checks it every few seconds while something waits. Time also passes while a
computer sleeps and the event loop's clock stands still; that does not count as setting the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from duly.core.units import SECOND
from duly.runtime.clock import Clock

CLOCK_STEP: Final = SECOND
"""The wall clock was set if it has moved this much against the steady one; less is normal drift."""

LOOKS_AGAIN: Final = 5.0
"""Seconds after which the wall clock is checked if nothing else happens."""


class TimedMachine(Protocol):
    """The part of a machine that its timer uses."""

    def next_wake(self) -> int | None:
        """Return when something is due next."""
        ...

    def shift(self, by: int) -> None:
        """Move all timers because the wall clock was set."""
        ...


class WakeTimer:
    """The timer of one machine; `ring` is called when it is due."""

    def __init__(self, machine: TimedMachine, clock: Callable[[], Clock], ring: Callable[[], None]) -> None:
        self._machine = machine
        self._clock = clock
        self._ring_out = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """when the timer rings, by the loop's clock"""
        self._ahead: int | None = None
        """wall clock minus steady clock"""

    def now(self) -> int:
        """Return the time, after moving the machine's timers if the wall clock was set."""
        clock = self._clock()
        now = clock.now()
        ahead = now - clock.steady()
        if self._ahead is None:
            self._ahead = ahead
        elif abs(ahead - self._ahead) > CLOCK_STEP:
            self._machine.shift(ahead - self._ahead)
            self._ahead = ahead
        return now

    def set(self, now: int) -> None:
        """Ring no later than the machine's next wake. A timer that rings too early is left alone: most waits
        end before they are due, so resetting it each time would be wasted."""
        wake = self._machine.next_wake()
        if wake is None:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + min(max(0, wake - now) / SECOND, LOOKS_AGAIN)
        if self._timer is None or due < self._due:
            self.cancel()
            self._timer, self._due = loop.call_at(due, self._ring), due

    def cancel(self) -> None:
        """Stop the timer until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def rings_too_late(self) -> bool:
        """Return whether the machine has something to do before the timer rings."""
        wake = self._machine.next_wake()
        if wake is None or self._ahead is None:
            return False
        due = (
            asyncio.get_running_loop().time()
            + (wake - self._ahead - self._clock().steady() + CLOCK_STEP) / SECOND
        )
        return self._timer is None or self._due > due

    def _ring(self) -> None:
        self._timer = None
        self._ring_out()
