"""Where time comes from. The core never asks; everyone else asks a `Clock`.

Wall time (`now`) goes into the ledger and over the wire, and may jump. Waiting is measured on the
event loop's monotonic clock, which may not. How much time has passed (`steady`) is measured on one that also
runs while the machine sleeps.
"""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    def now(self) -> int:
        """Microseconds since the epoch."""
        ...

    def steady(self) -> int:
        """Microseconds since some moment, on a clock that nobody sets."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000

    def steady(self) -> int:
        return time.clock_gettime_ns(_STEADY) // 1_000


_STEADY: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
