"""Runs a coroutine that never waits, without an event loop.

A state machine that Hypothesis drives asks its ledger thousands of times in one test. `asyncio.run` makes a
loop for each, and at its end walks over every task that is alive in the process. A worker that has run many
other tests has many, so the test gets slower the later it runs, and ends by its time limit. That breaks into
a step, and Hypothesis reports it as "Inconsistent data generation".
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns; it fails if it has to wait for anything."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        work.close()
    raise AssertionError(f"{getattr(work, '__qualname__', work)} waited, and there is no loop to wait in")
