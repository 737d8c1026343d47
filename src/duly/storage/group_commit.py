"""Group commit: what callers hand over while one flush is under way becomes the next flush.

At most one flush is under way. All callers that are ready in one turn of the loop share a flush, since it
costs the same for one message as for a thousand. What was handed over is carried out and learned from,
whether or not its caller still waits. Committing from within a transaction of the same ledger is refused:
the caller would wait for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import ClassVar, Final

from duly.core.operations import Group, Results
from duly.errors import ProgramError, Stopped

GROUP_LIMIT: Final = 4_096
"""Most groups in one flush, so that a flood does not delay its own first answer."""


class CommitBatch:
    """What one caller handed over, and what came of it: `results`, or an `error`."""

    __slots__ = ("error", "future", "groups", "results")

    alone: ClassVar[bool] = False
    """Whether it is flushed by itself."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.future: asyncio.Future[list[Results]] = asyncio.get_running_loop().create_future()
        self.results: list[Results] = []
        self.error: Exception | None = None


class _Within:
    """The transaction some code runs in. Tasks started there inherit it and may outlive it."""

    __slots__ = ("of",)

    def __init__(self, of: GroupCommit) -> None:
        self.of: GroupCommit | None = of


_within: ContextVar[_Within | None] = ContextVar("duly_transaction", default=None)


class GroupCommit:
    """Collects batches and starts flushes. `start` carries one out and then has `flushed` called, on the
    loop; `learn` is given the results of everything that was committed."""

    def __init__(
        self,
        start: Callable[[list[CommitBatch]], object],
        learn: Callable[[Sequence[Results]], None],
    ) -> None:
        self._start = start
        self._learn = learn
        self._waiting: list[CommitBatch] = []
        self._under_way = False
        self._scheduled = False
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, batch: CommitBatch) -> asyncio.Future[list[Results]]:
        """Hand a batch over; return the future of its results."""
        if self._closed:
            raise Stopped("this ledger is closed")
        self._waiting.append(batch)
        if not self._under_way and not self._scheduled:
            # At the end of this turn of the loop, so that all callers that are ready now are in it.
            self._scheduled = True
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._flush)
        return batch.future

    def flushed(self, batches: list[CommitBatch]) -> None:
        """Give the batches of a flush their results, and start the next flush."""
        self._under_way = False
        if self._waiting:
            self._flush()
        else:
            self._idle.set()
        for batch in batches:
            error, future = batch.error, batch.future
            if error is None:
                self._learn(batch.results)
                if not future.done():
                    future.set_result(batch.results)
            elif not future.done():
                future.set_exception(error)

    def _flush(self) -> None:
        self._scheduled = False
        cut = self._cut()
        batches, self._waiting = self._waiting[:cut], self._waiting[cut:]
        self._under_way = True
        self._start(batches)

    def _cut(self) -> int:
        """Return how many of the waiting batches go into the next flush."""
        count = 0
        for i, batch in enumerate(self._waiting):
            if batch.alone:
                return i or 1
            count += len(batch.groups)
            if count >= GROUP_LIMIT:
                return i + 1
        return len(self._waiting)

    async def close(self) -> None:
        """Take nothing more, and finish what was handed over."""
        self.not_within()
        self._closed = True
        await self._idle.wait()

    # ── transactions ─────────────────────────────────────────────────────────────────────────────

    def not_within(self) -> None:
        """Raise if the caller runs in a transaction of this ledger."""
        here = _within.get()
        if here is not None and here.of is self:
            raise ProgramError("a transaction of this ledger is open here; write through it instead")

    @contextmanager
    def within(self) -> Iterator[None]:
        """Mark what runs in this block as running in a transaction."""
        self.not_within()
        if self._closed:
            raise Stopped("this ledger is closed")
        here = _Within(self)
        token = _within.set(here)
        try:
            yield
        finally:
            here.of = None
            with suppress(ValueError):  # left in another context than entered: a fixture, a generator
                _within.reset(token)
