"""The other hubs on the same ledger, as applications see them.

The law: one hub and many hubs are two implementations of the same interface. An application never asks
whether there are other hubs; it reports what happened and asks what it needs to know. The implementation for
a single hub answers that everything is local, and does nothing.

Hints between hubs (`notifier`) only save time. Whatever they announce is also found by `refresh`, once a
second.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from duly.errors import LedgerError, Stopped
from duly.runtime.tasks import Supervisor

POLL_SECONDS: Final = 1.0
"""Seconds between two reads of what the other hubs have written to the ledger."""

T = TypeVar("T")


class RemoteHubs(Protocol):
    """The interface of every application to the other hubs; each application adds its own methods."""

    trouble: LedgerError | None
    """why the last refresh failed; None when all is well"""

    def poll(self, tasks: Supervisor, name: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """Run `refresh` once a second, if another hub can have written what it reads."""
        ...

    async def refresh(self) -> None:
        """Find in the ledger what lost hints would have announced."""
        ...


class NoRemoteHubs:
    """The null object of `RemoteHubs`: this hub does not share its ledger, and everything is local."""

    trouble: LedgerError | None = None

    def poll(self, tasks: Supervisor, name: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """Do nothing: no other hub writes to this ledger."""

    async def refresh(self) -> None:
        """Do nothing: there is nothing to find."""


class PolledRemoteHubs(ABC):
    """Other hubs, polled once a second. A subclass says what is read."""

    def __init__(self) -> None:
        self.trouble: LedgerError | None = None
        self._refreshing = False

    def poll(self, tasks: Supervisor, name: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """Run `refresh` once a second, supervised."""
        tasks.every(name, POLL_SECONDS, refresh)

    async def refresh(self) -> None:
        """Find what lost hints would have announced. A second refresh does not start while one is running."""
        if self._refreshing:
            return
        self._refreshing = True
        try:
            await self._refresh()
            self.trouble = None
        except LedgerError as problem:
            self.trouble = problem
        except Stopped:
            pass
        finally:
            self._refreshing = False

    @abstractmethod
    async def _refresh(self) -> None:
        """Compare the state in memory with the ledger."""


class CoalescedTask(Generic[T]):
    """Runs one job for all names that were requested meanwhile, one batch at a time."""

    def __init__(self, work: Callable[[list[T]], Awaitable[None]], tasks: Supervisor) -> None:
        self._work = work
        self._tasks = tasks
        self._wanted: dict[T, None] = {}
        self._task: asyncio.Task[None] | None = None

    def want(self, thing: T) -> None:
        """Add a name to the next batch."""
        self._wanted[thing] = None
        if self._task is None:
            self._task = self._tasks.do("a hint of another hub", self._run())

    async def _run(self) -> None:
        try:
            while self._wanted:
                things, self._wanted = list(self._wanted), {}
                with suppress(LedgerError, Stopped):  # the next refresh finds it
                    await self._work(things)
        finally:
            self._task = None
