"""Limits how much of a hub's time the questions of one visitor of the dashboard take.

Views that are shown live share a part of the hub's time already (`live_updates`). What is limited here is
what a visitor asks for: pages of lists, filters, searches. Their time is that on the clock, so that on a busy
hub each visitor gets less.
"""

from __future__ import annotations

from collections.abc import Awaitable
from time import monotonic
from typing import Final, TypeVar

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import MS, SECOND
from duly.errors import RateLimited

T = TypeVar("T")

LONGEST: Final = 0.3
"""The longest work time of a question, in seconds; anything beyond is waiting for a ledger that does not
answer, which costs the hub nothing."""
SHARE: Final = Rate(250, SECOND, burst=5_000)
"""In milliseconds: a quarter of the time, and five seconds at once."""


class QueryTime:
    """Counts the time of the questions of each visitor, by name."""

    def __init__(self) -> None:
        self._limits = RateLimits(SHARE)

    def wait(self, name: str) -> int:
        """Return how long a visitor has to wait before the next question, in microseconds."""
        return self._limits.spend(name, _now(), 0)

    def spend(self, name: str, seconds: float) -> None:
        """Count the time of a question that was answered."""
        self._limits.spend(name, _now(), max(1, round(min(seconds, LONGEST) * SECOND / MS)))

    async def spent(self, name: str, question: Awaitable[T]) -> T:
        """Answer a question and count its time; raises `RateLimited` if too much of it was used."""
        wait = self.wait(name)
        if wait:
            close = getattr(question, "close", None)
            if close is not None:
                close()  # a coroutine that is not awaited
            raise RateLimited(
                "the page has asked for more than a quarter of the hub's time; ask less often", wait
            )
        began = monotonic()
        try:
            return await question
        finally:
            self.spend(name, monotonic() - began)


def _now() -> int:
    return round(monotonic() * SECOND)
