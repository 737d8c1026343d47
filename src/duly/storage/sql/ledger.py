"""The common part of the SQL ledgers: reading by named queries, paging, and forgetting.

A subclass provides the connection (`_read`, `transaction`), the flush (`_start`), and two functions that pass
many values to one statement. The queries of both dialects have the same names and the same columns.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from duly.core import operations as w
from duly.core.trusted_time import Floor
from duly.errors import DulyError, ProgramError
from duly.runtime.clock import Clock
from duly.storage import sql
from duly.storage.group_commit import CommitBatch, GroupCommit
from duly.storage.ledger import (
    NEWEST,
    AgedMessage,
    Description,
    Ledger,
    Record,
    Refusal,
    Size,
    StreamEntry,
    StreamRange,
)
from duly.storage.message_filter import MessageFilter
from duly.storage.sql import rows


class SqlLedger(Ledger):
    """Base of the ledgers that keep their rows in an SQL database."""

    dialect: ClassVar[str]
    """the folder of the queries and migrations"""

    def __init__(self, clock: Clock | None, *, hot: int) -> None:
        super().__init__(clock, hot=hot)
        self._group_commit = GroupCommit(self._start, self._learn)
        self._queries = sql.queries(self.dialect)

    # ── what a dialect brings ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _start(self, batches: list[CommitBatch]) -> None:
        """Start a flush of these batches; it calls `GroupCommit.flushed` when it is over."""

    @abstractmethod
    async def _read(self, name: str, *args: Any) -> Sequence[Sequence[Any]]:
        """Run a named query outside of any transaction and return its rows."""

    @abstractmethod
    def _key_list(self, keys: Sequence[bytes]) -> object:
        """Return many keys as a single argument of a statement."""

    @abstractmethod
    def _ref_lists(self, refs: Sequence[w.DeliveryRef]) -> tuple[object, ...]:
        """Return many delivery references as the arguments of a single statement."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def commit(self, groups: Sequence[w.Group]) -> asyncio.Future[list[w.Results]]:
        """Submit groups to the next flush."""
        self._group_commit.not_within()
        return self._group_commit.add(CommitBatch(groups))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def find(self, key: bytes) -> Record | None:
        """Return the record of a message."""
        found = await self._read("find", key)
        return rows.record_of(found[0]) if found else None

    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        found = await self._read("key_below", top, count - 1)
        return found[0][0] if found else None

    async def _between(self, end: bytes, top: bytes, wanted: MessageFilter, limit: int) -> list[Record]:
        found = await self._read(
            "between", end, top, wanted.lead, wanted.tail, wanted.recipient, wanted.kind, wanted.state_bits,
            wanted.since, wanted.until, limit,
        )  # fmt: skip
        return [rows.record_of(row) for row in found]

    async def of_kind(self, kind: str, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        """Return listed messages of a kind, the newest first."""
        return [rows.record_of(row) for row in await self._read("of_kind", kind, *before, limit)]

    async def open_deliveries(self, channel: str) -> list[w.OpenDelivery]:
        """Return all deliveries of a channel that have not ended."""
        return [rows.open_of(row) for row in await self._read("open", channel)]

    async def deliveries(self, key: bytes) -> list[w.Delivery]:
        """Return the deliveries of a message."""
        return [rows.delivery_of(row) for row in await self._read("deliveries", key)]

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        """Return entries of a stream."""
        return [StreamEntry(*row) for row in await self._read("entries", stream, after, limit)]

    async def extent(self, stream: str) -> StreamRange:
        """Return which entries a stream holds."""
        ((first, last),) = await self._read("extent", stream)
        last = last or 0
        return StreamRange(first or last + 1, last)

    async def cursor(self, stream: str, reader: str) -> int:
        """Return the position of a reader in a stream."""
        found = await self._read("cursor", stream, reader)
        return int(found[0][0]) if found else 0

    async def cursors(self, stream: str) -> dict[str, int]:
        """Return the positions of all readers of a stream."""
        found = await self._read("cursors", stream)
        return {str(reader): int(n) for reader, n in found}

    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        """Return the high-water marks whose names begin with `lead`."""
        return {mark: (n, ms) for mark, n, ms in await self._read("marks", lead)}

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        """Return everything in a bucket."""
        return dict(map(tuple, await self._read("bucket", bucket)))

    async def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        found = await self._read("item", bucket, name)
        return found[0][0] if found else None

    async def refusals(self, limit: int = 100, *, of: tuple[str, str] | None = None) -> list[Refusal]:
        """Return the latest refusals."""
        if of is None:
            found = await self._read("refusals", limit)
        else:
            found = await self._read("refusals_of", *of, limit)
        return [Refusal(*row) for row in found]

    async def size(self) -> Size:
        """Return how many messages, deliveries and bytes the ledger holds."""
        return Size(*(await self._read("size"))[0])

    async def describe(self) -> Description:
        """Return the database's version and the schema's number."""
        return Description(*(await self._read("describe"))[0])

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    async def prunable(self, limit: int = 1_000) -> list[Record]:
        """Return the messages that `prune` would forget now."""
        by = (await self._would_raise()).until
        return [rows.record_of(row) for row in await self._read("prunable", by, limit)]

    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        """Raise the floor and forget the messages below it, in one transaction."""
        queries = self._queries
        async with self.transaction() as tx:
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
        async with self.transaction() as tx:
            await tx.execute(self._queries["forget_deliveries"], asked)
            await tx.execute(self._queries["forget"], asked)

    async def floor(self) -> Floor:
        """Return the floor."""
        return Floor(*(await self._read("floor"))[0])

    async def _set_floor(self, floor: Floor) -> None:
        async with self.transaction() as tx:
            await tx.execute(self._queries["set_floor"], *rows.floor_row(floor))

    async def aged(
        self, kind: str, after: tuple[int, bytes], until: int, limit: int = 100
    ) -> list[AgedMessage]:
        """Return listed messages of a kind, the oldest first, with their deliveries that have ended."""
        return rows.aged_of(await self._read("aged", kind, *after, until, limit))

    async def forget_deliveries(self, refs: Sequence[w.DeliveryRef]) -> int:
        """Forget the deliveries among these that have ended."""
        if not refs:
            return 0
        async with self.transaction() as tx:
            return len(await tx.fetch(self._queries["forget_ended_deliveries"], *self._ref_lists(refs)))

    async def trim(self, stream: str, through: int) -> None:
        """Drop the entries of a stream up to a number."""
        async with self.transaction() as tx:
            await tx.execute(self._queries["trim"], stream, through)


def as_duly(problem: Exception) -> DulyError:
    """Return the error of a flush as a duly error; any other error means that an operation was impossible."""
    if isinstance(problem, DulyError):
        return problem
    trouble = ProgramError(f"the ledger refused a write: {problem!r}")
    trouble.__cause__ = problem
    return trouble
