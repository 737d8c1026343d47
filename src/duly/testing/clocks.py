"""Clocks for tests: time passes when the test says so."""

from __future__ import annotations

from duly.core.units import SECOND


class ManualClock:
    """A clock that stands still until it is moved, forwards or backwards.

    >>> clock = ManualClock()
    >>> before = clock.now()
    >>> clock.advance(1.5)
    >>> clock.now() - before
    1500000
    """

    def __init__(self, now: int = 1_700_000_000 * SECOND) -> None:
        self._now = now
        self._passed = 0

    def now(self) -> int:
        """Return the wall time, in microseconds."""
        return self._now

    def steady(self) -> int:
        """Return the time that has passed, in microseconds; it never goes back."""
        return self._passed

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += round(seconds * SECOND)
        self._passed += max(0, round(seconds * SECOND))

    def set(self, now: int) -> None:
        """Set the wall clock; no time passes."""
        self._now = now
