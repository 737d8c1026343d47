"""An event loop in virtual time: instead of waiting, it advances the time to the next timer.

Asyncio code runs on it unchanged, hours pass in milliseconds, and without real I/O and threads the same
program does the same thing every time. If no task is ready and no timer is set, the program would wait for
ever, so the loop raises `Deadlock`. If a task is always ready, time never passes, so the loop raises
`Livelock`. Sockets are refused: they are never ready in virtual time, so a program that waits for one would
never continue, and its test would pass without having tested anything.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar, TypeVarTuple, Unpack

from duly.core.units import SECOND
from duly.errors import ProgramError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


ROUNDS: Final = 100_000
"""How many turns the loop may take without time passing."""

NO_SOCKETS: Final = (
    "a real socket does not work in virtual time: give the program its transport as an argument"
)


class Deadlock(RuntimeError):
    """Raised when every task waits and nothing is scheduled."""


class Livelock(RuntimeError):
    """Raised when tasks keep running and time does not pass."""


class _Jump(selectors.BaseSelector):
    """A selector that moves the time instead of waiting for sockets."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.rounds = 0
        """how many turns the loop has taken since time last passed"""
        self.own: FileDescriptorLike | None = None
        """the loop's own pipe, by which other threads and signals wake it"""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let time pass at once instead of waiting."""
        if timeout is None:
            raise Deadlock("every task waits, and no timer is set: the program would wait for ever")
        if timeout > 0:
            self.elapsed += timeout
            self.rounds = 0
            return []
        self.rounds += 1
        if self.rounds > ROUNDS:
            self.rounds = 0
            raise Livelock(
                "time does not pass: a task runs for ever without waiting for anything, such as "
                "a loop around asyncio.sleep(0)"
            )
        return []

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: object = None
    ) -> selectors.SelectorKey:
        """Accept the loop's own pipe, which is never ready, and refuse every other file."""
        if self.own is None:
            self.own = fileobj
        if fileobj != self.own:
            raise ProgramError(NO_SOCKETS)
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """Remove a file."""
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        """Accept a change of the events for the loop's own pipe."""
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
        """Return the virtual time, in seconds."""
        return self._jump.elapsed

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a thread's function at once: a thread would end at a different time in every run."""
        if executor is not None and not isinstance(executor, ThreadPoolExecutor):
            return super().run_in_executor(executor, func, *args)
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as problem:
            future.set_exception(problem)
        return future

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
        """Return the wall time, in microseconds."""
        return self._zero + round(self._loop.time() * SECOND)

    def steady(self) -> int:
        """Return the time that has passed, in microseconds; it never goes back."""
        return self._slept + round(self._loop.time() * SECOND)

    def step(self, by: int) -> None:
        """Set the clock forwards or backwards."""
        self._zero += by

    def sleep(self, lasts: int) -> None:
        """Let the machine sleep: time passes, but not for the loop."""
        self._zero += lasts
        self._slept += lasts
