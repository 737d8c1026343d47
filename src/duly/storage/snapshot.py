"""Snapshots: the rows of a ledger at one moment, as checks, copies, exports and backups read them.

The tables and columns listed here are the same in both databases. A snapshot yields the rows of a table in
the order of its key, with the same Python values for either database: text, integers, bytes, booleans, None.
So two ledgers with the same content have the same digests, table by table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import msgspec
from msgspec import Struct

StoredRow: TypeAlias = tuple[Any, ...]
"""The columns of a row, in the order of its table."""

BATCH: Final = 500
"""How many rows are read and written at a time."""


class LedgerTable(Struct, frozen=True):
    """A table of the ledger: its columns, and the order in which its rows are read.

    The type of a column is `bytes`, `str`, `int` or `bool`, with a question mark if the column may be null.
    """

    name: str
    columns: Mapping[str, str]
    order: str

    def fits(self, row: StoredRow) -> bool:
        """Return whether every value of a row has the type of its column."""
        kinds = zip(self.columns.values(), row, strict=True)
        return all(type(v).__name__ == k.rstrip("?") or (v is None and k.endswith("?")) for k, v in kinds)

    def key(self, row: StoredRow) -> StoredRow:
        """Return the values that order the rows; none if the table is ordered by what is not in it."""
        names = list(self.columns)
        return tuple(row[names.index(name)] for name in self.order.split(", ") if name in self.columns)

    @property
    def flags(self) -> tuple[int, ...]:
        """The indexes of the boolean columns, which SQLite stores as numbers."""
        return tuple(at for at, kind in enumerate(self.columns.values()) if kind == "bool")


def _table(name: str, order: str, /, **columns: str) -> LedgerTable:
    return LedgerTable(name, columns, order)


MESSAGES: Final = _table(
    "messages", "key",
    key="bytes", fingerprint="bytes", kind="str", recipient="str", state="int", until="int",
    accepted_at="int", moved_at="int", time="int", expires="int", position="bytes?", body="bytes",
    answer="bytes?", listed="bool",
)  # fmt: skip
DELIVERIES: Final = _table(
    "deliveries", "key, channel, recipient, round",
    key="bytes", channel="str", recipient="str", round="int", state="int", attempt="int", due="int",
    expires="int", worker="str", error="str", kind="int", in_doubt="bool",
)  # fmt: skip
STREAMS: Final = _table("streams", "stream", stream="str", last="int")
ENTRIES: Final = _table(
    "entries", "stream, n", stream="str", n="int", body="bytes", at="int", key="bytes"
)  # fmt: skip
CURSORS: Final = _table("cursors", "stream, reader", stream="str", reader="str", n="int")
MARKS: Final = _table("marks", "mark", mark="str", n="int", ms="int")
ITEMS: Final = _table("items", "bucket, name", bucket="str", name="str", body="bytes")
REFUSALS: Final = _table("refusals", "n", scope="str", id="str", word="str", reason="str", at="int")
FLOOR: Final = _table(
    "floor", "until", until="int", trusted="int", claim="int", mended="int", barrier="int", restored="int"
)  # fmt: skip

TABLES: Final = (FLOOR, ITEMS, STREAMS, CURSORS, MARKS, MESSAGES, DELIVERIES, ENTRIES, REFUSALS)
"""All tables of a ledger, small ones first."""


class Snapshot(ABC):
    """A ledger at one moment, open for reading; `async with` closes it."""

    engine: str
    """the database and its version"""
    schema: int

    @abstractmethod
    def rows(self, table: LedgerTable) -> AsyncIterator[Sequence[StoredRow]]:
        """Yield the rows of a table in order, some at a time."""

    @abstractmethod
    async def count(self, table: LedgerTable) -> int:
        """Return how many rows a table has."""

    @abstractmethod
    async def problems(self) -> list[tuple[str, str]]:
        """Return the problems of the database itself: for each, the name of an invariant and a sentence."""

    @abstractmethod
    async def close(self) -> None:
        """Release the ledger."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class TableSummary(Struct, frozen=True):
    """How many rows a table has, and their digest."""

    rows: int
    digest: str


Summaries: TypeAlias = dict[str, TableSummary]
"""The summaries of all tables of a ledger, by name."""


class TableDigest:
    """Counts the rows of a table, and hashes them in order.

    >>> one, two = TableDigest(), TableDigest()
    >>> one.add([("a", 1)]); one.add([("b", 2)]); two.add([("a", 1), ("b", 2)])
    >>> one.summary() == two.summary(), one.summary().rows
    (True, 2)
    """

    def __init__(self) -> None:
        self.rows = 0
        self._hash = blake2b(digest_size=16)

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Count and hash the next rows."""
        self.rows += len(rows)
        encode = _encoder.encode
        for row in rows:
            self._hash.update(encode(row))

    def summary(self) -> TableSummary:
        """Return the count and the hash, as they are printed and stored."""
        return TableSummary(self.rows, self._hash.hexdigest())


_encoder: Final = msgspec.msgpack.Encoder()


async def summarize(snapshot: Snapshot) -> Summaries:
    """Return the count and the hash of every table of a ledger."""
    found: Summaries = {}
    for table in TABLES:
        digest = TableDigest()
        async for rows in snapshot.rows(table):
            digest.add(rows)
        found[table.name] = digest.summary()
    return found
