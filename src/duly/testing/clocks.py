"""Clocks for tests: time passes when the test says so."""

from __future__ import annotations

from duly.core.units import SECOND


class ManualClock:
    """A clock that stands still until it is moved, forwards or (as real ones do) backwards.

    >>> clock = ManualClock()
    >>> before = clock.now()
    >>> clock.advance(1.5)
    >>> clock.now() - before
    1500000
    """

    def __init__(self, now: int = 1_700_000_000 * SECOND) -> None:
        self._now = now

    def now(self) -> int:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += round(seconds * SECOND)

    def set(self, now: int) -> None:
        self._now = now
