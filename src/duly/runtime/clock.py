"""Clocks: the sources of time. The core gets the time as an argument; everything else asks a `Clock`.

Wall time (`now`) is stored in the ledger and sent over the wire, and may jump. Waiting is measured on the
monotonic clock of the event loop, which may not. Elapsed time (`steady`) is measured on a clock that also
runs while the machine sleeps.
"""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> int:
        """Return the microseconds since the epoch."""
        ...

    def steady(self) -> int:
        """Return the microseconds since some moment, on a clock that is never set."""
        ...


class SystemClock(Clock):
    """The clock of the machine."""

    def now(self) -> int:
        """Return the time of the operating system, which may be set back or ahead."""
        return time.time_ns() // 1_000

    def steady(self) -> int:
        """Return the time since the machine started, which only goes forward."""
        return time.clock_gettime_ns(_STEADY) // 1_000


_STEADY: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
