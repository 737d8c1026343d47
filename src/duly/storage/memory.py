"""A ledger in memory: all rows are in dictionaries, and the interpreter changes them.

It is the reference implementation for the contract suite, and the ledger of the simulation. A `Disk` survives
a simulated crash: a test drops the ledger and opens another on the same disk, which holds only what was
committed. The rows are lost when the process ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.core.trusted_time import Floor
from duly.errors import ProgramError
from duly.runtime.clock import Clock
from duly.storage.interpreter import Interpreter, earliest
from duly.storage.ledger import (
    NEWEST,
    RECENT_KEPT,
    REFUSALS_KEPT,
    AgedMessage,
    Description,
    Ledger,
    Record,
    Refusal,
    Size,
    StreamEntry,
    StreamPosition,
    StreamRange,
    Transaction,
)
from duly.storage.message_filter import MessageFilter
from duly.storage.records import TIMED


class Disk:
    """All rows of a memory ledger; they survive a simulated crash."""

    def __init__(self) -> None:
        self.messages: dict[bytes, Record] = {}
        self.listed: set[bytes] = set()
        """keys of the messages that can be found by their kind"""
        self.deliveries: dict[w.DeliveryRef, w.Delivery] = {}
        self.streams: dict[str, list[StreamEntry]] = {}
        self.lasts: dict[str, int] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.marks: dict[str, tuple[int, int]] = {}
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.refusals: list[Refusal] = []
        self.floor = Floor()

    # ── as the interpreter asks for them and changes them (`duly.storage.interpreter.Rows`) ───────

    def message(self, key: bytes) -> Record | None:
        """Return the record of a message."""
        return self.messages.get(key)

    def admit(self, admit: w.Admit) -> None:
        """Store a new message."""
        record = Record(admit.message, admit.state, None, admit.until, admit.at, admit.at)
        self.messages[admit.message.key] = record
        if admit.listed:
            self.listed.add(admit.message.key)

    def move(self, key: bytes, to: State, answer: Answer | None, at: int) -> None:
        """Put a message into another state."""
        self.messages[key] = replace(self.messages[key], state=to, answer=answer, moved_at=at)

    def withdraw(self, key: bytes) -> None:
        """Remove a message and its deliveries."""
        del self.messages[key]
        self.listed.discard(key)
        for ref in [ref for ref in self.deliveries if ref.key == key]:
            del self.deliveries[ref]

    def delivery(self, ref: w.DeliveryRef) -> w.Delivery | None:
        """Return a delivery."""
        return self.deliveries.get(ref)

    def put_delivery(self, delivery: w.Delivery) -> None:
        """Store a delivery, new or changed."""
        self.deliveries[delivery.ref] = delivery

    def discard_delivery(self, ended: w.Delivery) -> None:
        """Remove a delivery that has ended."""
        del self.deliveries[ended.ref]

    def due(self, channel: str, now: int, limit: int) -> list[w.Delivery]:
        """Return the deliveries that a claim takes."""
        return earliest(self.deliveries.values(), channel, now, limit)

    def last(self, stream: str) -> int:
        """Return the number of a stream's last entry."""
        return self.lasts.get(stream, 0)

    def append(self, n: int, entry: w.AppendEntry) -> None:
        """Add an entry under its number."""
        self.lasts[entry.stream] = n
        self.streams.setdefault(entry.stream, []).append(StreamEntry(n, entry.body, entry.at, entry.key))

    def entry_body(self, stream: str, n: int) -> bytes | None:
        """Return the body of an entry, if it was not trimmed."""
        return next((entry.body for entry in self.streams.get(stream, ()) if entry.n == n), None)

    def rewrite(self, stream: str, n: int, body: bytes) -> None:
        """Replace the body of an entry."""
        kept = self.streams[stream]
        self.streams[stream] = [replace(each, body=body) if each.n == n else each for each in kept]

    def cursor(self, stream: str, reader: str) -> int:
        """Return the position of a reader in a stream."""
        return self.cursors.get((stream, reader), 0)

    def put_cursor(self, stream: str, reader: str, n: int) -> None:
        """Set the position of a reader in a stream."""
        self.cursors[stream, reader] = n

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return a high-water mark."""
        return self.marks.get(name)

    def put_mark(self, name: str, n: int, ms: int) -> None:
        """Store a high-water mark."""
        self.marks[name] = (n, ms)

    def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        return self.buckets.get(bucket, {}).get(name)

    def put_item(self, bucket: str, name: str, body: bytes) -> None:
        """Store an item, new or replaced."""
        self.buckets.setdefault(bucket, {})[name] = body

    def drop_item(self, bucket: str, name: str) -> None:
        """Remove an item."""
        del self.buckets[bucket][name]

    def refuse(self, refusal: w.RecordRefusal) -> None:
        """Record a refusal; beyond a limit the oldest are dropped."""
        self.refusals.append(Refusal(refusal.scope, refusal.id, refusal.word, refusal.reason, refusal.at))
        del self.refusals[:-REFUSALS_KEPT]


class MemoryQueries(Ledger):
    """The queries of a ledger in memory: they read the rows on its `Disk`."""

    def __init__(
        self, clock: Clock | None = None, *, disk: Disk | None = None, recent: int = RECENT_KEPT
    ) -> None:
        super().__init__(clock, recent=recent)
        self.disk = disk or Disk()
        self._witness.begin(self.disk.floor)

    async def find(self, key: bytes) -> Record | None:
        """Return what is remembered of a message."""
        return self.disk.messages.get(key)

    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        below = sorted((key for key in self.disk.messages if key < top), reverse=True)
        return below[count - 1] if len(below) >= count else None

    async def _between(self, end: bytes, top: bytes, wanted: MessageFilter, limit: int) -> list[Record]:
        found = [
            (key, record)
            for key, record in self.disk.messages.items()
            if end <= key < top and wanted.fits(record)
        ]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [record for _, record in found[:limit]]

    async def _untimed_between(
        self, end: bytes, top: bytes, wanted: MessageFilter, limit: int
    ) -> list[Record]:
        untimed = (record for key, record in self.disk.messages.items() if key < TIMED)
        found = [record for record in untimed if end <= record.place < top and wanted.fits(record)]
        found.sort(key=lambda record: record.place, reverse=True)
        return found[:limit]

    async def of_kind(self, kind: str, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        """Return listed messages of a kind, the newest first."""
        found = [
            ((record.accepted_at, key), record)
            for key, record in self.disk.messages.items()
            if key in self.disk.listed and record.message.kind == kind and (record.accepted_at, key) < before
        ]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [record for _, record in found[:limit]]

    async def open_deliveries(self, channel: str) -> list[w.OpenDelivery]:
        """Return all deliveries of a channel that have not ended."""
        found = [
            (record, delivery)
            for delivery in self.disk.deliveries.values()
            if delivery.ref.channel == channel and not delivery.state.terminal
            if (record := self.disk.messages.get(delivery.ref.key)) is not None
        ]
        found.sort(
            key=lambda pair: (pair[0].accepted_at, pair[1].ref.key, pair[1].ref.recipient, pair[1].ref.round)
        )
        return [
            w.OpenDelivery(record.message, record.state, delivery, record.accepted_at)
            for record, delivery in found
        ]

    async def deliveries(self, key: bytes) -> list[w.Delivery]:
        """Return the deliveries of a message."""
        found = [d for d in self.disk.deliveries.values() if d.ref.key == key]
        return sorted(found, key=lambda d: (d.ref.channel, d.ref.recipient, d.ref.round))

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        """Return entries of a stream."""
        return [entry for entry in self.disk.streams.get(stream, ()) if entry.n > after][:limit]

    async def extent(self, stream: str) -> StreamRange:
        """Return which entries a stream holds."""
        last = self.disk.lasts.get(stream, 0)
        kept = self.disk.streams.get(stream)
        return StreamRange(kept[0].n if kept else last + 1, last)

    async def cursor(self, stream: str, reader: str) -> int:
        """Return how far a reader has come."""
        return self.disk.cursors.get((stream, reader), 0)

    async def cursors(self, stream: str) -> dict[str, int]:
        """Return how far every reader of a stream has come."""
        return {reader: n for (of, reader), n in self.disk.cursors.items() if of == stream}

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return the last numbers of streams and the positions of readers in them."""
        lasts, cursors = self.disk.lasts, self.disk.cursors
        return [StreamPosition(lasts.get(place[0], 0), cursors.get(place)) for place in places]

    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        """Return the high-water marks whose names begin with `lead`."""
        return {mark: at for mark, at in self.disk.marks.items() if mark.startswith(lead)}

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        """Return everything in a bucket."""
        return dict(sorted(self.disk.buckets.get(bucket, {}).items()))

    async def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        return self.disk.buckets.get(bucket, {}).get(name)

    async def refusals(self, limit: int = 100, *, of: tuple[str, str] | None = None) -> list[Refusal]:
        """Return the latest refusals."""
        if of is None:
            return self.disk.refusals[: -limit - 1 : -1]
        return [one for one in self.disk.refusals[::-1] if (one.scope, one.id) == of][:limit]

    async def size(self) -> Size:
        """Return how many messages, deliveries and bytes the ledger holds."""
        return Size(len(self.disk.messages), len(self.disk.deliveries), 0)

    async def prunable(self, limit: int = 1_000) -> list[Record]:
        """Return the messages that `prune` would forget now."""
        by = (await self._would_raise()).until
        old = [r for r in self.disk.messages.values() if r.until <= by and r.state.terminal]
        old.sort(key=lambda record: (record.until, record.message.key))
        return old[:limit]

    async def floor(self) -> Floor:
        """Return the floor."""
        return self.disk.floor

    async def aged(
        self, kind: str, after: tuple[int, bytes], until: int, limit: int = 100
    ) -> list[AgedMessage]:
        """Return listed messages of a kind, the oldest first."""
        found = sorted(
            (record.accepted_at, key)
            for key, record in self.disk.messages.items()
            if key in self.disk.listed
            and record.message.kind == kind
            and (record.accepted_at, key) > after
            and record.accepted_at < until
        )
        return [AgedMessage(at, key, await self._ended(key)) for at, key in found[:limit]]

    async def _ended(self, key: bytes) -> list[w.Delivery]:
        over = self.disk.messages[key].state.terminal
        return [one for one in await self.deliveries(key) if over and one.state.terminal]

    async def describe(self) -> Description:
        """Return a description that names memory as the engine."""
        return Description("memory", 0)


class MemoryLedger(MemoryQueries):
    """A ledger in memory, opened by `duly.open_ledger("memory:")`."""

    def __init__(
        self, clock: Clock | None = None, *, disk: Disk | None = None, recent: int = RECENT_KEPT
    ) -> None:
        super().__init__(clock, disk=disk, recent=recent)
        self._interpreter = Interpreter(self.disk)

    async def commit(self, groups: Sequence[w.Group]) -> list[w.Results]:
        """Commit groups at once; there is nothing to flush."""
        committed = [self.execute(group) for group in groups]
        self._learn(committed)
        return committed

    def execute(self, group: w.Group) -> w.Results:
        """Carry out one group synchronously, for tests of machines."""
        return self._interpreter.execute(group)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Raise an error: a ledger in memory has no SQL."""
        raise ProgramError("a memory ledger has no SQL; open sqlite:///… or postgresql://… for transactions")

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        """Raise the floor and forget the messages below it."""
        self.disk.floor = self._raised(self.disk.floor)
        old = [record.message.key for record in await self.prunable(len(self.disk.messages))]
        old = [key for key in old if keys is None or key in keys][:limit]
        for key in old:
            self.disk.withdraw(key)
        return len(old)

    async def _drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.disk.withdraw(key)

    async def set_floor(self, floor: Floor) -> None:
        """Store the floor."""
        self.disk.floor = floor

    async def forget_deliveries(self, refs: Sequence[w.DeliveryRef]) -> int:
        """Forget the deliveries among these that have ended."""
        held = self.disk.deliveries
        over = [ref for ref in {*refs} if ref in held and held[ref].state.terminal]
        for ref in over:
            del held[ref]
        return len(over)

    async def trim(self, stream: str, through: int) -> None:
        """Drop the entries of a stream up to a number."""
        kept = self.disk.streams.get(stream)
        if kept:
            self.disk.streams[stream] = [entry for entry in kept if entry.n > through]

    async def close(self) -> None:
        """Do nothing: the rows stay on the `Disk`."""
