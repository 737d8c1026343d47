"""Group commit: batches that callers submit during one flush are committed by the next flush.

At most one flush is under way. All callers that are ready in one turn of the event loop share a flush, since
a flush costs the same for one message as for a thousand. A submitted batch is committed and its results are
passed to `learn` even if its caller no longer waits. Committing from within a transaction of the same ledger
raises an error, because the caller would wait for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from typing import ClassVar, Final, Self

from duly.core.operations import Group, Results
from duly.errors import ProgramError, Stopped

GROUP_LIMIT: Final = 4_096
"""The most groups in one flush, so that a flood of messages does not delay the first answer to it."""


class CommitBatch:
    """The groups that one caller submits, and their outcome: `results` or an `error`."""

    __slots__ = ("error", "future", "groups", "results")

    alone: ClassVar[bool] = False
    """Whether the batch needs a flush of its own."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.future: asyncio.Future[list[Results]] = asyncio.get_running_loop().create_future()
        self.results: list[Results] = []
        self.error: Exception | None = None


class _Within:
    """Marks code that runs in a transaction. Tasks started there inherit the mark and may outlive the
    transaction."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of: object | None = of
        """what the transaction has locked; None: it has ended"""


_within: ContextVar[_Within | None] = ContextVar("duly_transaction", default=None)


class TransactionMark:
    """Says in another thread, or in another task, that its code runs in a transaction too."""

    def __init__(self) -> None:
        self._mark = _within.get()
        self._token: Token[_Within | None] | None = None

    def __enter__(self) -> Self:
        self._token = _within.set(self._mark)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        with suppress(ValueError):  # entered in another context: a fixture or generator
            _within.reset(self._token)


class GroupCommit:
    """Collects batches and commits them in flushes; at most one flush is under way.

    `start` begins a flush and arranges that `flushed` is called on the event loop when it is over. `learn`
    gets the results of all groups that were committed.
    """

    def __init__(
        self,
        start: Callable[[list[CommitBatch]], object],
        learn: Callable[[Sequence[Results]], None],
    ) -> None:
        self.locked: object = self
        """what a transaction locks: a file, which another event loop of this process may have open as well"""
        self._start = start
        self._learn = learn
        self._waiting: list[CommitBatch] = []
        self._groups = 0
        """how many groups wait; a batch that is `alone` counts as `GROUP_LIMIT`"""
        self._under_way = False
        self._scheduled = False
        self._barred: Callable[[], Exception] | None = None
        """makes the error that `add` raises once no more batches are accepted"""
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, batch: CommitBatch) -> asyncio.Future[list[Results]]:
        """Submit a batch; return the future of its results."""
        if self._barred is not None:
            raise self._barred()
        self._waiting.append(batch)
        self._groups += GROUP_LIMIT if batch.alone else len(batch.groups)
        if not self._under_way and not self._scheduled:
            # The flush starts at the end of this turn of the loop, so that all callers ready now share it.
            self._scheduled = True
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._flush)
        return batch.future

    def flushed(self, batches: list[CommitBatch]) -> None:
        """Give the batches of a flush their results, and start the next flush."""
        self._under_way = False
        committed: list[Results] = []
        for batch in batches:  # callers get their results in a later turn of the loop
            error, future = batch.error, batch.future
            if error is None:
                committed += batch.results
                if not future.done():
                    future.set_result(batch.results)
            elif not future.done():
                future.set_exception(error)
        self._learn(committed)
        if self._waiting:
            self._flush()
        else:
            self._idle.set()

    def _flush(self) -> None:
        self._scheduled = False
        if self._groups < GROUP_LIMIT:
            batches, self._waiting = self._waiting, []
            self._groups = 0
        else:
            batches = self._cut()
        self._under_way = True
        self._start(batches)

    def _cut(self) -> list[CommitBatch]:
        """Remove and return the waiting batches that fit into the next flush."""
        cut, count, waiting = 0, 0, self._waiting
        while cut < len(waiting) and count < GROUP_LIMIT and not (cut and waiting[cut].alone):
            count += GROUP_LIMIT if waiting[cut].alone else len(waiting[cut].groups)
            cut += 1
        batches, self._waiting = waiting[:cut], waiting[cut:]
        self._groups -= count
        return batches

    async def close(self) -> None:
        """Accept no more batches, and wait until those submitted are flushed."""
        self.not_within()
        self.bar(lambda: Stopped("this ledger is closed"))
        await self._idle.wait()

    def bar(self, why: Callable[[], Exception]) -> None:
        """Accept no more batches; from now on `add` raises the error that `why` makes."""
        self._barred = why

    # ── transactions ─────────────────────────────────────────────────────────────────────────────

    def not_within(self) -> None:
        """Raise if the caller runs in a transaction of this ledger."""
        here = _within.get()
        if here is not None and here.of is not None and here.of == self.locked:
            raise ProgramError("a transaction of this ledger is open here; write through it instead")

    @contextmanager
    def within(self) -> Iterator[None]:
        """Mark the code in this block as running in a transaction."""
        self.not_within()
        if self._barred is not None:
            raise self._barred()
        here = _Within(self.locked)
        token = _within.set(here)
        try:
            yield
        finally:
            here.of = None
            with suppress(ValueError):  # entered in another context: a fixture or generator
                _within.reset(token)
