"""Where time comes from. The core never asks; everyone else asks a `Clock`.

Wall time (`now`) goes into the ledger and over the wire, and may jump. Waiting is measured on the
event loop's monotonic clock, which may not.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> int:
        """Microseconds since the epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000
