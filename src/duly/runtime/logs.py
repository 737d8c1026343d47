"""Keeps input from flooding the log: at most one record of each kind is written a second.

The kind of a record is where it is logged and the type of its exception. The next record of a kind says
how many were left out before it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

EVERY: Final = 1.0
"""Seconds between two records of one kind."""
KINDS: Final = 1_000
"""How many kinds are remembered."""


class RateLimitedLog(logging.Filter):
    """Lets one record of each kind through in `EVERY` seconds; add it to a logger."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._kinds: OrderedDict[tuple[object, ...], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written, and add how many were left out before it."""
        problem = record.exc_info[0] if record.exc_info else None
        kind = (record.name, record.levelno, str(record.msg)[:200], problem)
        now = self._now()
        last, left_out = self._kinds.pop(kind, (float("-inf"), 0))
        wanted = now - last >= EVERY
        self._kinds[kind] = (now, 0) if wanted else (last, left_out + 1)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        if wanted and left_out:
            record.msg = f"{record.msg} (and {left_out} more of this kind before it)"
        return wanted
