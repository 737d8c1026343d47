"""An event loop in virtual time: it never waits, it jumps to the next timer.

Asyncio code runs on it unchanged, hours pass in milliseconds, and without real I/O and threads the same
program does the same thing every time. If nothing is ready and nothing is scheduled, the program would
wait for ever: the loop raises `Deadlock` then.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, TypeVar

from duly.core.units import SECOND

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Raised when every task waits and nothing is scheduled."""


class _Jump(selectors.BaseSelector):
    """A selector that moves the time instead of waiting for sockets."""

    def __init__(self) -> None:
        self.elapsed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let time pass at once instead of waiting."""
        if timeout is None:
            raise Deadlock("everything waits and nothing is scheduled")
        self.elapsed += max(timeout, 0.0)
        return []

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: object = None
    ) -> selectors.SelectorKey:
        """Accept a file that is never ready."""
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """Let go of a file."""
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        """Accept another wish about a file that is never ready."""
        return selectors.SelectorKey(fileobj, 0, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        """Return no files: none is waited for."""
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs a program in virtual time.

    >>> loop = VirtualLoop()
    >>> loop.play(asyncio.sleep(3600))
    >>> round(loop.time())
    3600
    """

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self._jump.elapsed

    def play(self, program: Coroutine[object, None, T]) -> T:
        """Run a program to its end and close the loop."""
        try:
            return self.run_until_complete(program)
        finally:
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.run_until_complete(asyncio.sleep(0))
            self.close()


class LoopClock:
    """A clock whose time passes with a loop; it is wrong by `skew` and can be set."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, skew: int = 0, epoch: int = 1_700_000_000 * SECOND
    ) -> None:
        self._loop = loop
        self._zero = epoch + skew
        self._slept = 0

    def now(self) -> int:
        """The wall time, in microseconds."""
        return self._zero + round(self._loop.time() * SECOND)

    def steady(self) -> int:
        """The time that has passed, in microseconds; it never goes back."""
        return self._slept + round(self._loop.time() * SECOND)

    def step(self, by: int) -> None:
        """Set the clock forwards or backwards."""
        self._zero += by

    def sleep(self, lasts: int) -> None:
        """Let the machine sleep: time passes, but not for the loop."""
        self._zero += lasts
        self._slept += lasts
