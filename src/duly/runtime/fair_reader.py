"""Handles messages of many senders fairly: those of one sender in order, those of different senders side by
side.

A sender with many messages delays only itself. No message can stop the reader: an exception of its handler is
reported to `failed`, and the next message follows. Only if the ledger is unusable do the messages of a sender
wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from duly.core.retry import RetryPolicy
from duly.errors import LedgerError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import Supervisor

Item = TypeVar("Item")


class FairReader(Generic[Item]):
    """Handles items in one task per sender."""

    def __init__(
        self,
        handle: Callable[[Item], Awaitable[None]],
        failed: Callable[[str, Item, Exception], None],
        retry: RetryPolicy,
        tasks: Supervisor | None = None,
    ) -> None:
        self._handle = handle
        self._failed = failed
        self._retry = retry
        self._queues: dict[str, deque[Item]] = {}
        self._supervisor = tasks or Supervisor()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def put(self, sender: str, item: Item) -> None:
        """Handle an item after the earlier ones of the same sender."""
        queue = self._queues.get(sender)
        if queue is not None:
            queue.append(item)
            return
        self._queues[sender] = deque((item,))
        self._begin(sender)

    def _begin(self, sender: str) -> None:
        task = self._supervisor.do("reader of a sender", self._serve(sender))
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def busy(self, sender: str) -> bool:
        """Return whether an item of this sender waits or is being handled."""
        return sender in self._queues

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    async def stop(self) -> None:
        """Handle nothing more; unacknowledged items are sent again by their sender."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, sender: str) -> None:
        queue = self._queues[sender]
        try:
            while queue:
                await self._one(sender, queue[0])
                queue.popleft()
        finally:
            if queue and not self._stopped:
                self._begin(sender)  # this task was cancelled: another one handles what is left
            else:
                del self._queues[sender]

    async def _one(self, sender: str, item: Item) -> None:
        backoff = Backoff(self._retry)
        while True:
            try:
                await self._handle(item)
                return
            except LedgerError:
                await backoff.wait()
            except Exception as problem:
                self._failed(sender, item, problem)
                return
