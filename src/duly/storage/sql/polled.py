"""The common part of the SQL ledgers that several processes write: polling for messages that another process
has ended."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

from duly.errors import LedgerUnavailable, Stopped
from duly.runtime.clock import Clock
from duly.runtime.tasks import Supervisor
from duly.storage.sql.ledger import SqlLedger


class PolledLedger(SqlLedger):
    """Base of the ledgers that several processes write. One query polls for all callers that wait."""

    sole = False
    poll_seconds: ClassVar[float]
    """the pause between two polls"""

    def __init__(self, clock: Clock | None, *, recent: int) -> None:
        super().__init__(clock, recent=recent)
        self._closed = False
        self._tasks = Supervisor()
        self._poll_timer: asyncio.TimerHandle | None = None

    async def _finish(self) -> None:
        """Finish the submitted commits, and wake the callers that wait."""
        await self._group_commit.close()
        self._closed = True
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._waiters.wake_all()
        await self._tasks.finish()

    @contextmanager
    def watch(self, key: bytes) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done when the message changes; the database is polled during the block."""
        with super().watch(key) as news:
            self._schedule_poll()
            yield news

    def _schedule_poll(self) -> None:
        if self._poll_timer is None and self._waiters.by_key and not self._closed:
            self._poll_timer = asyncio.get_running_loop().call_later(
                self.poll_seconds, lambda: self._tasks.do("a look for news", self._poll())
            )

    async def _poll(self) -> None:
        """Wake the callers whose message another process has ended."""
        try:
            with suppress(LedgerUnavailable, Stopped):
                for key in await self._settled(list(self._waiters.by_key)):
                    self._waiters.wake(key)
        finally:
            self._poll_timer = None
            self._schedule_poll()

    @abstractmethod
    async def _settled(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the messages among these that have ended or no longer exist."""
