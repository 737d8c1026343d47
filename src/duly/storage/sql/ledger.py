"""The common part of the SQL ledgers: commits in groups, and forgetting.

A subclass provides the connection (`_read`, `transaction`), the flush (`_start`), and two functions that pass
many values to one statement. What is read is in `ledger_queries`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from duly.core import operations as w
from duly.core.trusted_time import Floor
from duly.errors import DulyError, ProgramError
from duly.runtime.clock import Clock
from duly.storage.group_commit import CommitBatch, GroupCommit
from duly.storage.ledger import Transaction
from duly.storage.sql import rows
from duly.storage.sql.ledger_queries import SqlQueries


class SqlLedger(SqlQueries):
    """Base of the ledgers that keep their rows in an SQL database."""

    def __init__(self, clock: Clock | None, *, recent: int) -> None:
        super().__init__(clock, recent=recent)
        self._group_commit = GroupCommit(self._start, self._learn)

    # ── what a dialect brings ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _start(self, batches: list[CommitBatch]) -> None:
        """Start a flush of these batches; it calls `GroupCommit.flushed` when it is over."""

    @abstractmethod
    def _ref_lists(self, refs: Sequence[w.DeliveryRef]) -> tuple[object, ...]:
        """Return many delivery references as the arguments of a single statement."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def commit(self, groups: Sequence[w.Group]) -> asyncio.Future[list[w.Results]]:
        """Submit groups to the next flush."""
        self._group_commit.not_within()
        return self._group_commit.add(CommitBatch(groups))

    def maintenance(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the ledger's own statements, which may change its tables."""
        return self.transaction()

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        """Raise the floor and forget the messages below it, in one transaction."""
        queries = self._queries
        async with self.maintenance() as tx:
            (row,) = await tx.fetch(queries["hold_floor"])
            floor = self._raised(Floor(*row))
            await tx.execute(queries["set_floor"], *rows.floor_row(floor))
            if keys is None:
                found = await tx.fetch(queries["prunable_keys"], floor.until, limit)
            else:
                asked = self._key_list(keys[:limit])
                found = await tx.fetch(queries["prunable_keys_of"], floor.until, asked)
            old = self._key_list([key for (key,) in found])
            await tx.execute(queries["forget_deliveries"], old)
            await tx.execute(queries["forget"], old)
        return len(found)

    async def _drop(self, keys: Sequence[bytes]) -> None:
        asked = self._key_list(keys)
        async with self.maintenance() as tx:
            await tx.execute(self._queries["forget_deliveries"], asked)
            await tx.execute(self._queries["forget"], asked)

    async def set_floor(self, floor: Floor) -> None:
        """Store the floor."""
        async with self.maintenance() as tx:
            await tx.execute(self._queries["set_floor"], *rows.floor_row(floor))

    async def forget_deliveries(self, refs: Sequence[w.DeliveryRef]) -> int:
        """Forget the deliveries among these that have ended."""
        if not refs:
            return 0
        async with self.maintenance() as tx:
            return len(await tx.fetch(self._queries["forget_ended_deliveries"], *self._ref_lists(refs)))

    async def trim(self, stream: str, through: int) -> None:
        """Drop the entries of a stream up to a number."""
        async with self.maintenance() as tx:
            await tx.execute(self._queries["trim"], stream, through)


def as_duly(problem: Exception) -> DulyError:
    """Return the error of a flush as a duly error; any other error means that an operation was impossible."""
    if isinstance(problem, DulyError):
        return problem
    trouble = ProgramError(f"the ledger refused a write: {problem!r}")
    trouble.__cause__ = problem
    return trouble
