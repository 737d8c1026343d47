"""Tools for tests of applications: a clock that is moved by hand, and simulated worlds."""

from __future__ import annotations

from duly.testing.clocks import ManualClock

__all__ = ["ManualClock"]
