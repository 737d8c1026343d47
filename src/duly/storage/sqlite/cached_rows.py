"""A read-through cache of the rows of a SQLite ledger.

`CachedRows` implements `duly.storage.interpreter.Rows`. A row that is not in the cache is read from the
tables. A change is made in the cache, and recorded as a changed row for the journal and later for the tables.

The law: the cache always holds every row that was changed since the tables were last brought up to date; any
other row may be read from the tables. So the cache drops only rows that the tables hold unchanged: see
`forget`.

A key that is not in the cache and is above every key that was stored when the ledger was opened, or dropped
from the cache since, is certainly new and is not looked up. Keys begin with the time in their ids, so this is
the usual case. Keys of ids without a time are looked up together, for all messages that a flush admits.
"""

from __future__ import annotations

from collections.abc import Container, Sequence, Sized
from enum import Enum
from itertools import chain, islice
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer, pack_answer
from duly.core.trusted_time import Floor
from duly.storage.interpreter import earliest
from duly.storage.ledger import Record, StreamEntry
from duly.storage.sql import rows
from duly.storage.sqlite.pending_changes import PendingChanges
from duly.storage.sqlite.table_rows import FIXED_WIDTH, Row, TableChanges, TableReader

K = TypeVar("K")
V = TypeVar("V")

ROWS_KEPT: Final = 20_000
"""How many rows of each kind are cached beyond those that must be: with BYTES_KEPT about 30 MB, regardless of
the ledger's size."""
BYTES_KEPT: Final = 16 << 20
SHARE: Final = 16
"""One in so many rows is dropped at a time, besides those that are too many: the event loop does nothing else
meanwhile. With 2 instead of 16 the longest pause was three times as long."""
TAIL: Final = 100
"""The least number of entries that are cached of a stream in use."""
_LARGEST: Final = (1 << 63) - 1
"""The largest number that a column can hold."""
_NUMBERS: Final = rows.STATE_NUMBERS

ALL: Final = b"\xff" * 8
"""Above every key: with this as the top, no key is certainly new."""


class Unread(Enum):
    """Stands for a row that is not in the cache."""

    UNREAD = "unread"


UNREAD: Final = Unread.UNREAD


class CachedMessage(Struct, gc=False):
    """The row of a message in the cache, with the number of its last flush."""

    fingerprint: bytes
    state: State
    answer: Answer | None
    row: Row
    """the columns that never change, in the order of the table"""
    moved_at: int
    flush: int
    """the number of the flush that changed the message last"""

    def record(self) -> Record:
        """Return the message as a `Record`."""
        key, _, kind, recipient, until, accepted_at, time, expires, position, body, _ = self.row
        message = rows.message_of((key, kind, recipient, body, time, expires, position))
        return Record(message, self.state, self.answer, until, accepted_at, self.moved_at)


class KnownEntries(Struct):
    """The cached part of a range of a stream's entries."""

    whole: bool
    """whether `tail` is the whole range"""
    tail: list[StreamEntry]
    """the cached entries at the end of the range"""
    bodies: dict[int, bytes] = {}
    """the new bodies of rewritten entries before the tail, by number"""


class KnownRows:
    """The rows in the cache: what is known of them without reading a table, and which of them are dropped."""

    rows_kept: int = ROWS_KEPT
    tail: int = TAIL

    def __init__(self, tables: TableReader, top: bytes | None = None) -> None:
        self._tables = tables
        self.flush = 1
        """the number of the current flush"""
        self.durable = 0
        """the number of the last flush that is on the disk"""
        self.reads_one_by_one = False
        """messages had to be read one by one: the next flush reads its messages together"""
        self.clear(top)

    def clear(self, top: bytes | None = None) -> None:
        """Empty the cache, and read again what is always cached. The tables must hold everything stored."""
        self.changes = PendingChanges()
        self.floor: Floor = self._tables.floor()
        self._top = self._tables.top() if top is None else top
        """every key above this one that is in the tables is also in the cache"""
        self.messages: dict[bytes, CachedMessage] = {}
        self._gone: dict[bytes, None] = {}
        """withdrawn messages that the tables may still hold"""
        self._absent: set[bytes] = set()
        """messages that the current flush looked up and did not find in the tables"""
        self._deliveries: dict[bytes, dict[w.DeliveryNames, w.Delivery | None]] = {}
        """all deliveries of the cached messages; None is a removed one that the tables may still hold"""
        self._lasts: dict[str, int] = {}
        self._tails: dict[str, list[StreamEntry]] = {}
        """the end of a stream, without gaps"""
        self._tail_count = 0
        self._bodies: dict[tuple[str, int], bytes] = {}
        """the bodies of entries that may be rewritten"""
        self._cursors: dict[tuple[str, str], int | None] = {}
        self._marks: dict[str, tuple[int, int] | None] = {}
        self.items: dict[tuple[str, str], bytes | None] = {}
        self._bytes = 0
        """the approximate size of the cached messages"""

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    def forget(self) -> None:
        """Drop cached rows that the tables hold unchanged, the oldest of each kind of which there are too
        many."""
        tables = (self.messages, self._deliveries, self._lasts, self._bodies, self._cursors, self._marks)
        most = self.rows_kept
        if self._bytes <= BYTES_KEPT and all(len(t) <= most for t in (*tables, self.items, self._gone)):
            if self._tail_count > most:
                self._shorten_tails(self.changes.together())
            return
        kept = self.changes.together()
        keys = {*kept.states, *kept.gone, *(names[0] for names in kept.deliveries)}
        count = len(self.messages)
        gone = _forget_oldest(self.messages, keys, max(_surplus(self.messages, most), self._too_large()))
        self._bytes -= self._bytes * len(gone) // max(count, 1)
        gone += _forget_oldest(self._deliveries, keys, _surplus(self._deliveries, most))
        self._top = max(self._top, max(gone, default=b""))
        self._gone = dict.fromkeys(key for key in self._gone if key in kept.gone)
        _forget_oldest(self._marks, kept.marks, _surplus(self._marks, most))
        _forget_oldest(self.items, kept.items, _surplus(self.items, most))
        _forget_oldest(self._cursors, kept.cursors, _surplus(self._cursors, most))
        _forget_oldest(self._bodies, kept.bodies, _surplus(self._bodies, most))
        self._shorten_tails(kept)
        _forget_oldest(self._lasts, {*kept.lasts, *self._tails}, _surplus(self._lasts, most))

    def _too_large(self) -> int:
        """Return how many messages, of average size, have to be dropped because of their bytes."""
        if self._bytes <= BYTES_KEPT:
            return 0
        return len(self.messages) * (self._bytes - BYTES_KEPT + BYTES_KEPT // SHARE) // self._bytes

    def _shorten_tails(self, kept: TableChanges) -> None:
        """Keep the end of each stream, and the entries that the tables do not hold."""
        first: dict[str, int] = {}
        for stream, n in chain(kept.entries, kept.bodies):
            first[stream] = min(n, first.get(stream, n))
        for stream in list(self._tails):
            if stream in first:
                tail = self._tails[stream]
                begin = min(first[stream], tail[-1].n - self.tail)
                del tail[: max(0, begin - tail[0].n)]
            else:
                del self._tails[stream]
        self._tail_count = sum(map(len, self._tails.values()))

    # ── questions that no table is read for ──────────────────────────────────────────────────────

    def record(self, key: bytes) -> Record | Unread | None:
        """Return the record of a message, None if there is none, or `Unread` if the cache does not know."""
        found = self.messages.get(key)
        if found is not None:
            return found.record()
        return None if key > self._top or key in self._gone else UNREAD

    def entries(self, stream: str, after: int, limit: int) -> KnownEntries:
        """Return the cached part of the entries of a stream."""
        if self._lasts.get(stream, after + 1) <= after:
            return KnownEntries(True, [])
        tail = self._tails.get(stream)
        if tail and tail[0].n <= after + 1:
            begin = after + 1 - tail[0].n
            return KnownEntries(True, tail[begin : begin + limit])
        bodies = {n: body for (of, n), body in self._bodies.items() if of == stream}
        return KnownEntries(False, tail[:limit] if tail else [], bodies)

    def standing(self, stream: str, reader: str) -> tuple[int | Unread, int | Unread | None]:
        """Return the last number of a stream and the position of a reader, each `Unread` if not cached."""
        return self._lasts.get(stream, UNREAD), self._cursors.get((stream, reader), UNREAD)


class CachedRows(KnownRows):
    """The rows of the ledger: cached ones, others as they are read, and changes that the tables do not hold
    yet."""

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def message(self, key: bytes) -> CachedMessage | None:
        """Return a message."""
        found = self.messages.get(key)
        if found is None and key <= self._top and key not in self._gone and key not in self._absent:
            self.reads_one_by_one = True
            row = self._tables.message(key)
            if row is not None:
                found = self._keep(row)
        return found

    def _keep(self, row: Row) -> CachedMessage:
        """Cache a message that was read."""
        fixed, (state, moved_at, answer) = row[:FIXED_WIDTH], row[FIXED_WIDTH:]
        found = CachedMessage(row[1], rows.STATES[state], rows.answer_of(answer), fixed, moved_at, 0)
        self.messages[row[0]] = found
        self._bytes += len(row[9])
        return found

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Read the messages with these keys that are not cached, and their deliveries, all at once, before a
        flush asks for them one by one. Keys that are not stored are known to be absent until the next
        call."""
        top, known, gone = self._top, self.messages, self._gone
        cold = [key for key in keys if key <= top and key not in known and key not in gone]
        self._absent = set()
        if keys:
            self.reads_one_by_one = len(cold) > 1  # then the next flush probably has some as well
        if len(cold) < 2:
            return
        for row in self._tables.messages(cold):
            self._keep(row)
        self._absent.update(key for key in cold if key not in known)
        unread = [key for key in cold if key not in self._deliveries]
        self._deliveries.update((key, {}) for key in unread)
        for delivery in self._tables.deliveries_of(unread):
            self._deliveries[delivery.ref.key][rows.names(delivery.ref)] = delivery

    def admit(self, admit: w.Admit) -> None:
        """Store a new message."""
        at, state = admit.at, admit.state
        if admit.until > _LARGEST or at > _LARGEST:
            raise OverflowError("a time is too large for the ledger")
        row = rows.fixed_row(admit)
        key = row[0]
        self.messages[key] = CachedMessage(row[1], state, None, row, at, self.flush)
        self._bytes += len(row[9])
        flush = self.changes.flush
        flush.messages[key] = row
        flush.states[key] = (_NUMBERS[state], at, None)

    def move(self, key: bytes, to: State, answer: Answer | None, at: int) -> None:
        """Put a message into another state."""
        if at > _LARGEST:
            raise OverflowError("a time is too large for the ledger")
        row = self.messages[key]
        row.state, row.answer, row.moved_at, row.flush = to, answer, at, self.flush
        packed = None if answer is None else pack_answer(answer)
        self.changes.flush.states[key] = (_NUMBERS[to], at, packed)

    def withdraw(self, key: bytes) -> None:
        """Remove a message and its deliveries."""
        self._bytes -= len(self.messages.pop(key).row[9])
        self._deliveries[key] = {}
        self._gone[key] = None
        self.changes.flush.withdraw(key)

    # ── deliveries ───────────────────────────────────────────────────────────────────────────────

    def delivery(self, ref: w.DeliveryRef) -> w.Delivery | None:
        """Return a delivery."""
        key = ref.key
        of_one = self._deliveries.get(key)
        if of_one is None:
            of_one = self._deliveries[key] = {}
            if key <= self._top and key not in self._gone:
                of_one.update((rows.names(d.ref), d) for d in self._tables.deliveries(key))
        return of_one.get((key, ref.channel, ref.recipient, ref.round)) if of_one else None

    def put_delivery(self, delivery: w.Delivery) -> None:
        """Store a new or changed delivery; the caller has read it before."""
        ref = delivery.ref
        if delivery.due > _LARGEST or delivery.expires > _LARGEST or delivery.attempt > _LARGEST:
            raise OverflowError("a number of a delivery is too large for the ledger")
        if delivery.error and not delivery.error.isprintable():
            delivery = replace(delivery, error=rows.plain(delivery.error))
        names = ref.key, ref.channel, ref.recipient, ref.round
        of_one, flush = self._deliveries[ref.key], self.changes.flush
        if names not in of_one:
            flush.created.add(names)
        of_one[names] = flush.deliveries[names] = delivery

    def discard_delivery(self, ended: w.Delivery) -> None:
        """Remove a delivery that has ended; the caller has read it before."""
        ref = ended.ref
        names = ref.key, ref.channel, ref.recipient, ref.round
        self._deliveries[ref.key][names] = self.changes.flush.deliveries[names] = None

    def due(self, channel: str, now: int, limit: int) -> list[w.Delivery]:
        """Return the deliveries that a claim takes."""
        changed = {
            names: None for changes in self.changes for names in changes.deliveries if names[1] == channel
        }
        stored = self._tables.due(channel, now, limit + len(changed))
        names = changed | dict.fromkeys(rows.names(d.ref) for d in stored)
        found = (self.delivery(w.DeliveryRef(*name)) for name in names)
        return earliest((each for each in found if each is not None), channel, now, limit)

    # ── streams ──────────────────────────────────────────────────────────────────────────────────

    def last(self, stream: str) -> int:
        """Return the number of a stream's last entry."""
        found = self._lasts.get(stream)
        if found is None:
            found = self._lasts[stream] = self._tables.last(stream)
        return found

    def append(self, n: int, entry: w.AppendEntry) -> None:
        """Store a new entry under its number."""
        stream, body, at, key = entry.stream, entry.body, entry.at, entry.key
        if at > _LARGEST:
            raise OverflowError("a time is too large for the ledger")
        self._lasts[stream] = n
        tail = self._tails.get(stream)
        if tail is None:
            tail = self._tails[stream] = []
        tail.append(StreamEntry(n, body, at, key))
        self._tail_count += 1
        self.changes.flush.lasts[stream] = n
        self.changes.flush.entries[stream, n] = (body, at, key)

    def entry_body(self, stream: str, n: int) -> bytes | None:
        """Return the body of an entry."""
        tail = self._tails.get(stream)
        if tail and tail[0].n <= n <= tail[-1].n:
            return tail[n - tail[0].n].body
        found = self._bodies.get((stream, n))
        if found is None:
            found = self._tables.entry_body(stream, n)
            if found is not None:  # an entry that does not exist may be appended later
                self._bodies[stream, n] = found
        return found

    def rewrite(self, stream: str, n: int, body: bytes) -> None:
        """Replace the body of an entry."""
        tail = self._tails.get(stream)
        if tail and tail[0].n <= n <= tail[-1].n:
            old = tail[n - tail[0].n]
            tail[n - tail[0].n] = StreamEntry(n, body, old.at, old.key)
        self._bodies[stream, n] = body
        self.changes.flush.rewrite(stream, n, body)

    def cursor(self, stream: str, reader: str) -> int:
        """Return the position of a reader in a stream."""
        found = self._cursors.get((stream, reader), UNREAD)
        if found is UNREAD:
            found = self._cursors[stream, reader] = self._tables.cursor(stream, reader)
        return found or 0

    def put_cursor(self, stream: str, reader: str, n: int) -> None:
        """Store the position of a reader in a stream."""
        self._cursors[stream, reader] = self.changes.flush.cursors[stream, reader] = n

    # ── marks, items, refusals ───────────────────────────────────────────────────────────────────

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return a high-water mark."""
        found = self._marks.get(name, UNREAD)
        if found is UNREAD:
            found = self._marks[name] = self._tables.mark(name)
        return found

    def put_mark(self, name: str, n: int, ms: int) -> None:
        """Store a high-water mark."""
        if not (n <= _LARGEST and ms <= _LARGEST):
            raise OverflowError("a mark is too large for the ledger")
        self._marks[name] = self.changes.flush.marks[name] = (n, ms)

    def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        found = self.items.get((bucket, name), UNREAD)
        if found is UNREAD:
            found = self.items[bucket, name] = self._tables.item(bucket, name)
        return found

    def put_item(self, bucket: str, name: str, body: bytes) -> None:
        """Store an item, new or replaced."""
        self.items[bucket, name] = self.changes.flush.items[bucket, name] = body

    def drop_item(self, bucket: str, name: str) -> None:
        """Remove an item."""
        self.items[bucket, name] = self.changes.flush.items[bucket, name] = None

    def refuse(self, refusal: w.RecordRefusal) -> None:
        """Record a refusal."""
        if refusal.at > _LARGEST:
            raise OverflowError("a time is too large for the ledger")
        self.changes.flush.refusals.append(rows.refusal_row(refusal))


def _surplus(known: Sized, most: int) -> int:
    """Return how many rows are too many; if any are, with a share more, so that this is rare."""
    surplus = len(known) - most
    return 0 if surplus <= 0 else surplus + most // SHARE


def _forget_oldest(known: dict[K, V], kept: Container[K], count: int) -> list[K]:
    """Drop this many of the oldest rows, except those in `kept`; return the dropped keys."""
    gone = [key for key in islice(known, count) if key not in kept]
    for key in gone:
        del known[key]
    return gone
