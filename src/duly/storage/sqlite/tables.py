"""The tables of a SQLite ledger: what changes make of them, and how single rows are read.

Many changes are brought into the tables at once, each row once: a message that was admitted, sent and ended
meanwhile is one row that is inserted. They are a few statements of many rows each, since a statement per row
would take the interpreter's lock and let go of it for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final, TypeAlias

import apsw
import msgspec
from msgspec.structs import astuple

from duly.core.operations import Delivery
from duly.core.trusted_time import Floor
from duly.storage import sql
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.sql import rows
from duly.storage.sqlite import journal
from duly.storage.sqlite.journal import Change, Row

Statement: TypeAlias = tuple[str, Row]
Values: TypeAlias = list[Any]
"""The columns of many rows, one after the other."""

ROWS: Final = (256, 64, 16, 4, 1)
"""How many rows a statement has: a few sizes, so that each is prepared once."""

MESSAGE_WIDTH: Final = 14
FIXED_WIDTH: Final = 11
"""How many of a message's columns never change; they come first."""


class TableChanges:
    """What changes make of the tables: each row once, as it stands in the end.

    `duly.storage.sqlite.cached_rows` notes the rows that it changes. What a journal holds is added change by
    change.
    """

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self.messages: dict[bytes, Row] = {}
        """the columns of new messages"""
        self.moved: dict[bytes, Row] = {}
        """other messages: their last columns are state, moved_at and answer"""
        self.gone: dict[bytes, None] = {}
        """messages that are deleted with their deliveries, before anything else"""
        self.deliveries: dict[tuple[bytes, str, str, int], Delivery] = {}
        self.entries: dict[tuple[str, int], Row] = {}
        """body, at and key of new entries"""
        self.bodies: dict[tuple[str, int], bytes] = {}
        """of entries that are rewritten"""
        self.lasts: dict[str, int] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.marks: dict[str, Row] = {}
        self.items: dict[tuple[str, str], bytes | None] = {}
        self.refusals: list[Row] = []
        for change in changes:
            kind = change[0]
            if kind == journal.MOVE:
                new = self.messages.get(change[1])
                if new is None:
                    self.moved[change[1]] = change[2:]
                else:
                    self.messages[change[1]] = (*new[:FIXED_WIDTH], *change[2:])
            elif kind == journal.ADMIT:
                row = change[1]
                self.messages[row[0]] = (*row, change[2], row[5], None)
            elif kind == journal.DELIVERY:
                delivery = change[1]
                if type(delivery) is not Delivery:  # as the journal gives it back
                    delivery = msgspec.convert(delivery, Delivery)
                self.deliveries[rows.names(delivery.ref)] = delivery
            elif kind == journal.MARK:
                self.marks[change[1]] = change[2:]
            else:
                self._add_rare(kind, change)

    def _add_rare(self, kind: int, change: Change) -> None:
        match kind:
            case journal.APPEND:
                _, stream, n, *rest = change
                self.lasts[stream] = n
                self.entries[stream, n] = rest
            case journal.REWRITE:
                self.rewrite(*change[1:])
            case journal.CURSOR:
                self.cursors[change[1], change[2]] = change[3]
            case journal.ITEM:
                self.items[change[1], change[2]] = change[3]
            case journal.REFUSE:
                self.refusals.append(change[1:])
            case journal.WITHDRAW:
                self.withdraw(change[1])
            case _:
                raise ValueError(f"a journal of this version has no change {kind}")

    def rewrite(self, stream: str, n: int, body: bytes) -> None:
        """Note that an entry has another body."""
        new = self.entries.get((stream, n))
        if new is None:
            self.bodies[stream, n] = body
        else:
            self.entries[stream, n] = (body, *new[1:])

    def withdraw(self, key: bytes) -> None:
        """Note that a message and its deliveries are gone."""
        self.messages.pop(key, None)
        self.moved.pop(key, None)
        self.gone[key] = None
        for names in [names for names in self.deliveries if names[0] == key]:
            del self.deliveries[names]

    def statements(self) -> Iterator[Statement]:
        """Yield what brings the tables up to date, in order."""
        if self.gone:
            yield from self._all("drop_messages", list(self.gone), 1)
            yield from self._all("drop_deliveries", list(self.gone), 1)
        if self.messages:
            new = self.messages
            yield from self._all("insert_messages", _flat(new[key] for key in sorted(new)), MESSAGE_WIDTH)
        if self.moved:
            moved = _flat((key, *row[-3:]) for key, row in self.moved.items())
            yield from self._all("move_messages", moved, 4)
        if self.deliveries:
            delivered: Values = []
            for delivery in self.deliveries.values():
                delivered += astuple(delivery.ref)
                delivered += astuple(delivery)[1:]
            yield from self._all("put_deliveries", delivered, 12)
        if self.marks:
            yield from self._all("put_marks", _flat((m, *at) for m, at in self.marks.items()), 3)
        if self.lasts:
            yield from self._all("put_lasts", _flat(self.lasts.items()), 2)
            yield from self._all("insert_entries", _keyed(self.entries), 5)
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
        """Yield a statement over all these rows, each of so many values, in parts."""
        count, start = len(flat) // width, 0
        for size in ROWS:
            while count - start >= size:
                yield statement(name, size), flat[start * width : (start + size) * width]
                start += size


def _flat(values: Iterable[Iterable[object]]) -> Values:
    return list(chain.from_iterable(values))


def _keyed(values: Mapping[tuple[str, int], Row]) -> Values:
    return _flat((*where, *rest) for where, rest in values.items())


@cache
def statement(name: str, size: int) -> str:
    """Return the statement of one row, for many."""
    head, values, tail = sql.queries("sqlite")[name].partition("VALUES")
    row, close, rest = tail.partition(")")
    return head + values + ",".join([row + close] * size) + rest


class TableReader:
    """Reads single rows from the tables, on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._run = db.cursor().execute  # one for all: making one costs a tenth of a question
        self._sql = sql.queries("sqlite")

    def _fetch(self, name: str, *args: Any) -> list[Any]:
        return self._run(self._sql[name], args).fetchall()

    def message(self, key: bytes) -> Row | None:
        """Return the columns of a message."""
        found = self._fetch("message", key)
        return found[0] if found else None

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
        """Return how far a reader has come; None: it never said."""
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

    def journal(self) -> list[Change]:
        """Return the changes that are not in the tables yet."""
        return journal.changes_in((n, body) for n, body in self._fetch("journal"))
