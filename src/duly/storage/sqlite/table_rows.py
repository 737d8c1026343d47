"""The tables of a SQLite ledger: how changes are written to them, and how single rows are read.

Many changes are written to the tables at once, each row once: a message that was admitted, sent and ended
meanwhile is one inserted row. The changes are written by a few statements with many rows each, because every
statement takes and releases Python's global interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final, TypeAlias

import apsw
import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from duly.core.operations import Delivery, DeliveryNames
from duly.core.trusted_time import Floor
from duly.storage import sql
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.sql import rows

Row: TypeAlias = Sequence[Any]
"""The columns of a row, or some of them."""
Statement: TypeAlias = tuple[str, Row]
Values: TypeAlias = list[Any]
"""The columns of many rows, one after the other."""

ROWS: Final = (256, 64, 16, 4, 1)
"""How many rows a statement has: a few sizes, so that each is prepared once."""

KEYS: Final = (4, 16, 64, 256)
"""For how many keys a statement reads rows."""

MESSAGE_WIDTH: Final = 14
FIXED_WIDTH: Final = 11
"""How many columns of a message never change; these columns come first."""


class _PackedChanges(Struct, array_like=True):
    """`TableChanges` as the journal holds them."""

    messages: list[tuple[Any, ...]]
    states: dict[bytes, tuple[int, int, bytes | None]]
    gone: list[bytes]
    deliveries: list[Delivery]
    marks: dict[str, tuple[int, int]]
    lasts: dict[str, int]
    entries: list[tuple[str, int, bytes, int, bytes]]
    bodies: list[tuple[str, int, bytes]]
    cursors: list[tuple[str, str, int]]
    items: list[tuple[str, str, bytes | None]]
    refusals: list[tuple[object, ...]]
    discarded: list[DeliveryNames] = []


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_PackedChanges).decode


class TableChanges:
    """The rows that one flush or several have changed, each once, with its final values."""

    def __init__(self) -> None:
        self.messages: dict[bytes, Row] = {}
        """the columns of new messages that never change"""
        self.states: dict[bytes, Row] = {}
        """state, moved_at and answer of messages, new ones and others"""
        self.gone: dict[bytes, None] = {}
        """messages that are deleted with their deliveries, before anything else"""
        self.deliveries: dict[DeliveryNames, Delivery | None] = {}
        """new and changed deliveries; None stands for one that is removed"""
        self.created: set[DeliveryNames] = set()
        """the deliveries that no table holds yet"""
        self.marks: dict[str, tuple[int, int]] = {}
        self.lasts: dict[str, int] = {}
        self.entries: dict[tuple[str, int], Row] = {}
        """body, at and key of new entries"""
        self.bodies: dict[tuple[str, int], bytes] = {}
        """the new bodies of rewritten entries"""
        self.cursors: dict[tuple[str, str], int] = {}
        self.items: dict[tuple[str, str], bytes | None] = {}
        self.refusals: list[Row] = []

    def __len__(self) -> int:
        return sum(map(len, vars(self).values())) - len(self.created)

    def update(self, later: TableChanges) -> None:
        """Add later changes to these."""
        for key in later.gone:
            self.withdraw(key)
        self.messages.update(later.messages)
        self.states.update(later.states)
        self.deliveries.update(later.deliveries)
        self.created |= later.created
        self.marks.update(later.marks)
        self.lasts.update(later.lasts)
        for (stream, n), body in later.bodies.items():
            self.rewrite(stream, n, body)
        self.entries.update(later.entries)
        self.cursors.update(later.cursors)
        self.items.update(later.items)
        self.refusals += later.refusals

    def rewrite(self, stream: str, n: int, body: bytes) -> None:
        """Record that an entry has another body."""
        new = self.entries.get((stream, n))
        if new is None:
            self.bodies[stream, n] = body
        else:
            self.entries[stream, n] = (body, *new[1:])

    def withdraw(self, key: bytes) -> None:
        """Record that a message and its deliveries are removed."""
        self.messages.pop(key, None)
        self.states.pop(key, None)
        self.gone[key] = None
        for names in [names for names in self.deliveries if names[0] == key]:
            del self.deliveries[names]

    # ── for the journal ──────────────────────────────────────────────────────────────────────────

    def pack(self) -> bytes:
        """Return the changes as bytes. Raises if a column cannot hold a value."""
        packed = (
            tuple(self.messages.values()),
            self.states,
            tuple(self.gone),
            [delivery for delivery in self.deliveries.values() if delivery is not None],
            self.marks,
            self.lasts,
            _rows(self.entries),
            [(*at, body) for at, body in self.bodies.items()],
            [(*who, n) for who, n in self.cursors.items()],
            [(*where, body) for where, body in self.items.items()],
            self.refusals,
            [names for names, delivery in self.deliveries.items() if delivery is None],
        )
        return _encode(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> TableChanges:
        """Return the changes that `pack` converted to bytes."""
        found, changes = _decode(packed), cls()
        changes.messages.update((row[0], row) for row in found.messages)
        changes.states.update(found.states)
        changes.gone.update(dict.fromkeys(found.gone))
        changes.deliveries.update((rows.names(delivery.ref), delivery) for delivery in found.deliveries)
        changes.deliveries.update(dict.fromkeys(found.discarded))
        changes.marks.update(found.marks)
        changes.lasts.update(found.lasts)
        changes.entries.update(((row[0], row[1]), row[2:]) for row in found.entries)
        changes.bodies.update(((stream, n), body) for stream, n, body in found.bodies)
        changes.cursors.update(((stream, reader), n) for stream, reader, n in found.cursors)
        changes.items.update(((bucket, name), body) for bucket, name, body in found.items)
        changes.refusals += found.refusals
        return changes

    # ── for the tables ───────────────────────────────────────────────────────────────────────────

    def statements(self) -> Iterator[Statement]:
        """Yield the statements that write these changes to the tables, in order.

        New rows are sorted by their keys: rows that follow each other are then mostly in the same page of the
        tree, and entries of many streams take a third less processor time.
        """
        if self.gone:
            yield from self._all("drop_messages", list(self.gone), 1)
            yield from self._all("drop_deliveries", list(self.gone), 1)
        if self.states:
            new, states = self.messages, self.states
            inserted: Values = []
            for key in sorted(new):
                inserted += new[key]
                inserted += states[key]
            yield from self._all("insert_messages", inserted, MESSAGE_WIDTH)
            moved = _flat((key, *state) for key, state in states.items() if key not in new)
            yield from self._all("move_messages", moved, 4)
        if self.deliveries:
            delivered: Values = []
            discarded: Values = []
            for names in sorted(self.deliveries):
                delivery = self.deliveries[names]
                if delivery is None:
                    if names not in self.created:
                        discarded += names
                else:
                    delivered += astuple(delivery.ref)
                    delivered += astuple(delivery)[1:]
            yield from self._all("put_deliveries", delivered, 12)
            yield from self._all("discard_deliveries", discarded, 4)
        if self.marks:
            yield from self._all("put_marks", _flat((m, *at) for m, at in self.marks.items()), 3)
        if self.lasts:
            yield from self._all("put_lasts", _flat(self.lasts.items()), 2)
            yield from self._all("insert_entries", _flat(sorted(_rows(self.entries))), 5)
        if self.bodies:
            rewritten = _flat((*where, body) for where, body in self.bodies.items())
            yield from self._all("rewrite_entries", rewritten, 3)
        if self.cursors:
            yield from self._all("put_cursors", _flat((*who, n) for who, n in self.cursors.items()), 3)
        if self.items:
            there = _flat((*where, body) for where, body in self.items.items() if body is not None)
            gone = _flat(where for where, body in self.items.items() if body is None)
            yield from self._all("drop_items", gone, 2)
            yield from self._all("put_items", there, 3)
        if self.refusals:
            yield from self._all("insert_refusals", _flat(self.refusals), 5)
            yield sql.queries("sqlite")["forget_refusals"], (REFUSALS_KEPT,)

    def _all(self, name: str, flat: Values, width: int) -> Iterator[Statement]:
        """Yield statements that together cover all these rows of `width` values each."""
        count, start = len(flat) // width, 0
        for size in ROWS:
            while count - start >= size:
                yield statement(name, size), flat[start * width : (start + size) * width]
                start += size


def _flat(values: Iterable[Iterable[object]]) -> Values:
    return list(chain.from_iterable(values))


def _rows(entries: Mapping[tuple[str, int], Row]) -> list[tuple[object, ...]]:
    return [(*where, *rest) for where, rest in entries.items()]


@cache
def statement(name: str, size: int) -> str:
    """Return the statement of this name, extended from one row to `size` rows."""
    head, values, tail = sql.queries("sqlite")[name].partition("VALUES")
    row, close, rest = tail.partition(")")
    return head + values + ",".join([row + close] * size) + rest


@cache
def _statement_of_keys(name: str, size: int) -> str:
    """Return the statement of this name that reads the rows of `size` keys."""
    return sql.queries("sqlite")[name].replace(":keys", ", ".join("?" * size))


class TableReader:
    """Reads rows from the tables, on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._run = db.cursor().execute  # one cursor for all: creating one takes a tenth of a query's time
        self._sql = sql.queries("sqlite")

    def _fetch(self, name: str, *args: Any) -> list[Any]:
        return self._run(self._sql[name], args).fetchall()

    def message(self, key: bytes) -> Row | None:
        """Return the columns of a message."""
        found = self._fetch("message", key)
        return found[0] if found else None

    def _of_keys(self, name: str, keys: Sequence[bytes]) -> Iterator[Row]:
        """Yield the rows of many keys; the keys are padded with nulls to the size of a statement."""
        for start in range(0, len(keys), KEYS[-1]):
            part = keys[start : start + KEYS[-1]]
            size = next(size for size in KEYS if size >= len(part))
            yield from self._run(_statement_of_keys(name, size), (*part, *(None,) * (size - len(part))))

    def messages(self, keys: Sequence[bytes]) -> list[Row]:
        """Return the columns of the stored ones among these messages."""
        return list(self._of_keys("messages_of", keys))

    def deliveries_of(self, keys: Sequence[bytes]) -> list[Delivery]:
        """Return the deliveries of messages."""
        return [rows.delivery_of(row) for row in self._of_keys("deliveries_of", keys)]

    def top(self) -> bytes:
        """Return the highest key that is stored."""
        found: bytes = self._fetch("top")[0][0]
        return found

    def floor(self) -> Floor:
        """Return the floor."""
        return Floor(*self._fetch("floor")[0])

    def deliveries(self, key: bytes) -> list[Delivery]:
        """Return the deliveries of a message."""
        return [rows.delivery_of(row) for row in self._fetch("deliveries", key)]

    def due(self, channel: str, now: int, limit: int) -> list[Delivery]:
        """Return the deliveries of a channel that are due, the oldest first."""
        return [rows.delivery_of(row) for row in self._fetch("due", channel, now, limit)]

    def last(self, stream: str) -> int:
        """Return the number of a stream's last entry."""
        found = self._fetch("last", stream)
        return int(found[0][0]) if found else 0

    def entry_body(self, stream: str, n: int) -> bytes | None:
        """Return the body of an entry."""
        found = self._fetch("entry_body", stream, n)
        return found[0][0] if found else None

    def cursor(self, stream: str, reader: str) -> int | None:
        """Return the position of a reader in a stream; None if it never reported one."""
        found = self._fetch("cursor", stream, reader)
        return int(found[0][0]) if found else None

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return a high-water mark."""
        found = self._fetch("mark", name)
        return (found[0][0], found[0][1]) if found else None

    def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        found = self._fetch("item", bucket, name)
        return found[0][0] if found else None

    def journal(self) -> list[tuple[int, bytes]]:
        """Return the entries of the journal, whose changes are not in the tables yet."""
        return self._fetch("journal")
