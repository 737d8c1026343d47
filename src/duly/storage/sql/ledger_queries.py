"""The queries of the SQL ledgers, by named statements.

The statements of both dialects have the same names and the same columns; a subclass provides the connection
(`_read`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from duly.core import operations as w
from duly.core.trusted_time import Floor
from duly.runtime.clock import Clock
from duly.storage import sql
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
from duly.storage.sql.rows import FetchedRow


class SqlQueries(Ledger):
    """The queries of a ledger in an SQL database."""

    dialect: ClassVar[str]
    """the folder of the queries and migrations"""

    def __init__(self, clock: Clock | None, *, recent: int) -> None:
        super().__init__(clock, recent=recent)
        self._queries = sql.queries(self.dialect)

    @abstractmethod
    async def _read(self, name: str, *args: object) -> Sequence[FetchedRow]:
        """Run a named query outside of any transaction and return its rows."""

    @abstractmethod
    def _key_list(self, keys: Sequence[bytes]) -> object:
        """Return keys as one argument of a query."""

    @abstractmethod
    def _name_list(self, names: Collection[str]) -> object:
        """Return names as one argument of a query."""

    async def find(self, key: bytes) -> Record | None:
        """Return the record of a message."""
        found = await self._read("find", key)
        return rows.record_of(found[0]) if found else None

    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        found = await self._read("key_below", top, count - 1)
        return found[0][0] if found else None

    async def _between(self, end: bytes, top: bytes, wanted: MessageFilter, limit: int) -> list[Record]:
        found = await self._read("between", end, top, *_conditions(wanted), limit)
        return [rows.record_of(row) for row in found]

    async def _untimed_between(
        self, end: bytes, top: bytes, wanted: MessageFilter, limit: int
    ) -> list[Record]:
        bounds = (*_untimed_place(end), *_untimed_place(top))
        found = await self._read("untimed_between", *bounds, *_conditions(wanted), limit)
        return [rows.record_of(row) for row in found]

    async def of_kind(self, kind: str, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        """Return listed messages of a kind, the newest first."""
        return [rows.record_of(row) for row in await self._read("of_kind", kind, *before, limit)]

    async def open_deliveries(self, channel: str) -> list[w.OpenDelivery]:
        """Return all deliveries of a channel that have not ended."""
        return [rows.open_of(row) for row in await self._read("open", channel)]

    async def unheld(self, channel: str) -> dict[str, tuple[int, int]]:
        """Return how many deliveries wait that no worker holds, and since when, by recipient."""
        return {name: (count, oldest) for name, count, oldest in await self._read("unheld", channel)}

    async def deliveries(self, key: bytes) -> list[w.Delivery]:
        """Return the deliveries of a message."""
        return [rows.delivery_of(row) for row in await self._read("deliveries", key)]

    async def deliveries_of(self, keys: Collection[bytes]) -> dict[bytes, list[w.Delivery]]:
        """Return the deliveries of each of these messages."""
        found: dict[bytes, list[w.Delivery]] = {key: [] for key in keys}
        for row in await self._read("deliveries_of_all", self._key_list(list(found))) if found else ():
            delivery = rows.delivery_of(row)
            found[delivery.ref.key].append(delivery)
        return found

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        """Return entries of a stream."""
        return [StreamEntry(*row) for row in await self._read("entries", stream, after, limit)]

    async def newest_entries(self, streams: Collection[str], limit: int = 1) -> dict[str, list[StreamEntry]]:
        """Return the newest entries of each of these streams."""
        found: dict[str, list[StreamEntry]] = {}
        asked = await self._read("newest_entries", self._name_list(streams), limit) if streams else ()
        for stream, *entry in asked:
            found.setdefault(stream, []).append(StreamEntry(*entry))
        return found

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

    async def prunable(self, limit: int = 1_000) -> list[Record]:
        """Return the messages that `prune` would forget now."""
        by = (await self._would_raise()).until
        return [rows.record_of(row) for row in await self._read("prunable", by, limit)]

    async def floor(self) -> Floor:
        """Return the floor."""
        return Floor(*(await self._read("floor"))[0])

    async def aged(
        self, kind: str, after: tuple[int, bytes], until: int, limit: int = 100
    ) -> list[AgedMessage]:
        """Return listed messages of a kind, the oldest first, with their deliveries that have ended."""
        return rows.aged_of(await self._read("aged", kind, *after, until, limit))


def _untimed_place(place: bytes) -> tuple[int, bytes]:
    """Return a place in the list as the time of acceptance (ms) and the key of an id without a time."""
    return int.from_bytes(place[:6], "big"), bytes(6) + place[6:]


def _conditions(wanted: MessageFilter) -> tuple[object, ...]:
    """Return a filter as the arguments of a query."""
    return (
        wanted.lead, wanted.tail, wanted.recipient, wanted.kind, wanted.state_bits, wanted.since, wanted.until
    )  # fmt: skip
