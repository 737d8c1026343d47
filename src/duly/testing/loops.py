"""An event loop whose time is virtual: it never waits, it jumps to the next timer.

Asyncio code runs on it unchanged, hours pass in milliseconds, and with no real I/O and no threads the
same program does the same thing every time. If nothing is ready and nothing is scheduled, the program
waits for something that can never come: that is an error, not a hang.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from duly.core.units import SECOND

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everything waits and nothing is scheduled."""


class _Jump(selectors.BaseSelector):
    """Instead of waiting for sockets, move the time."""

    def __init__(self) -> None:
        self.elapsed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("everything waits and nothing is scheduled")
        self.elapsed += max(timeout, 0.0)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def get_map(self) -> Mapping[Any, Any]:
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """Run a program in virtual time.

    >>> loop = VirtualLoop()
    >>> loop.play(asyncio.sleep(3600))
    >>> round(loop.time())
    3600
    """

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.elapsed

    def play(self, program: Coroutine[Any, Any, T]) -> T:
        """Run a program to its end and close the loop."""
        try:
            return self.run_until_complete(program)
        finally:
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.run_until_complete(asyncio.sleep(0))
            self.close()


class LoopClock:
    """Wall time that passes with the running loop, off by `skew`, and that can be set like a real one."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, skew: int = 0, epoch: int = 1_700_000_000 * SECOND
    ) -> None:
        self._loop = loop
        self._zero = epoch + skew

    def now(self) -> int:
        return self._zero + round(self._loop.time() * SECOND)

    def steady(self) -> int:
        return round(self._loop.time() * SECOND)

    def step(self, by: int) -> None:
        self._zero += by
