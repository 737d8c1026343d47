"""Tools for tests of applications: programs that run in virtual time with every kind of fault, and a clock
that is moved by hand."""

from __future__ import annotations

from duly.extras import needed_for

with needed_for("duly.testing"):
    from duly.testing.clocks import ManualClock
    from duly.testing.programs.history import (
        History,
        ObservedEvent,
        at_most_once,
        everyone_was_told,
        in_order,
    )
    from duly.testing.programs.process import CallFailed, Process
    from duly.testing.programs.search import PromiseBroken, simulate

__all__ = [
    "CallFailed",
    "History",
    "ManualClock",
    "ObservedEvent",
    "Process",
    "PromiseBroken",
    "at_most_once",
    "everyone_was_told",
    "in_order",
    "simulate",
]
