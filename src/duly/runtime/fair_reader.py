"""Messages of many senders, handled fairly: each sender's in order, and all senders' side by side.

The laws. A sender who says much makes nobody wait but itself. No message can end the reading: what its
handler raises is told to `failed`, and the next one follows. Only a ledger that is away stops a sender's
messages; they wait for it.
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
    """Handles items, in a task for each sender that has some."""

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
        """Handle this after what the same sender has said before."""
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
        """Whether something of this sender waits, or is being handled."""
        return sender in self._queues

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    async def stop(self) -> None:
        """Handle nothing more: what was not acknowledged comes again."""
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
                self._begin(sender)  # this task was ended from outside: what is left is handled all the same
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
