"""For users' own tests: a clock that is moved by hand, and whole worlds to run code in."""

from __future__ import annotations

from duly.testing.clocks import ManualClock

__all__ = ["ManualClock"]
