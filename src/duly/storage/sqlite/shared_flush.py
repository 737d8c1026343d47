"""One flush in a SQLite file that several processes write: reads the rows that it touches under the write
lock, carries out the operations on them, and writes back the rows that changed.

A flush runs a fixed number of statements, each with many rows: every statement releases Python's global
interpreter lock and takes it again, which may mean waiting for a busy event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

from duly.core import operations as w
from duly.core.messages import pack_answer
from duly.core.trusted_time import Floor
from duly.storage import sql
from duly.storage.footprint import Footprint
from duly.storage.interpreter import Interpreter
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.locked_rows import LockedMessage, LockedRows
from duly.storage.sql import rows

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""How many rows a statement has: a few sizes, so that each is prepared once. Rows are padded to the next size
with rows of nulls, which equal no key."""

_STATE: Final = 4
_MOVED_AT: Final = 7
"""The index of the state's time in the row of an admission."""

K = TypeVar("K")
V = TypeVar("V")

Row: TypeAlias = tuple[Any, ...]
RunQuery: TypeAlias = Callable[[str, Row], Iterable[Row]]
"""Runs a statement on a connection and returns its rows."""


def flush(run: RunQuery, groups: Sequence[w.Group]) -> Iterator[w.Results]:
    """Carry out groups in order, within the open transaction; return their results."""
    work = _SharedFlush(run, Footprint(groups))
    work.load()
    results = list(map(Interpreter(work.rows).execute, groups))
    work.store()
    return iter(results)


class _SharedFlush:
    """Reads the rows of a footprint, and writes back those that have changed."""

    def __init__(self, run: RunQuery, footprint: Footprint) -> None:
        self._run = run
        self._footprint = footprint
        self._deliveries: dict[w.DeliveryNames, w.Delivery] = {}
        self.rows = LockedRows()

    def _many(self, name: str, values: Iterable[Row]) -> list[Row]:
        """Run a statement on many rows of values; return its rows."""
        all_ = list(values)
        found: list[Row] = []
        for start in range(0, len(all_), ROWS[-1]):
            part = all_[start : start + ROWS[-1]]
            width, size = len(part[0]), next(size for size in ROWS if size >= len(part))
            flat = (*chain.from_iterable(part), *(None,) * (width * (size - len(part))))
            found += self._run(_statement(name, size, width), flat)
        return found

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def load(self) -> None:
        """Read every row that the operations of this flush need."""
        touched, held = self._footprint, self.rows
        keys = touched.recalls.union(touched.admits, touched.moves)
        for key, fingerprint, state, answer in self._many("messages", ((key,) for key in keys)):
            held.messages[key] = LockedMessage(fingerprint, rows.STATES[state], rows.answer_of(answer))
        if touched.admits:
            held.floor = Floor(*next(iter(self._run(sql.queries("sqlite")["floor"], ()))))
        found = self._many("deliveries", touched.deliveries)
        for channel, due in touched.claims.items():
            found += self._run(sql.queries("sqlite")["due"], (channel, due.now, due.limit))
        for delivery in map(rows.delivery_of, found):
            held.put_delivery(delivery)
        self._deliveries = dict(held.deliveries)
        self._load_streams()
        held.marks.update(
            {mark: (n, ms) for mark, n, ms in self._many("marks", ((m,) for m in touched.marks))}
        )
        held.items.update({(bucket, name): body for bucket, name, body in self._many("items", touched.items)})
        self._marks, self._items = dict(held.marks), dict(held.items)

    def _load_streams(self) -> None:
        touched, held = self._footprint, self.rows
        streams = touched.streams.union(stream for stream, _ in touched.cursors)
        held.lasts.update(dict(self._many("streams", ((s,) for s in streams))))
        held.cursors.update({(s, reader): n for s, reader, n in self._many("cursors", touched.cursors)})
        held.bodies.update({(s, n): body for s, n, body in self._many("entries", touched.entries)})
        self._lasts, self._cursors, self._bodies = dict(held.lasts), dict(held.cursors), dict(held.bodies)

    # ── writing back ─────────────────────────────────────────────────────────────────────────────

    def store(self) -> None:
        """Write every row that the operations of this flush have changed."""
        held = self.rows
        self._store_messages()
        self._many("discard_deliveries", held.discarded & self._deliveries.keys())
        self._many("put_deliveries", map(rows.sqlite_row_of, self._changed_deliveries()))
        self._many("put_streams", _changed(self._lasts, held.lasts, lambda stream, n: (stream, n)))
        self._many("put_entries", ((e.stream, n, e.body, e.at, e.key) for (_, n), e in held.appended.items()))
        self._many("rewrite_entries", _changed(self._bodies, held.bodies, lambda at, body: (*at, body)))
        self._many("put_cursors", _changed(self._cursors, held.cursors, lambda at, n: (*at, n)))
        self._many("put_marks", _changed(self._marks, held.marks, lambda mark, at: (mark, *at)))
        self._many("drop_items", (at for at in self._items if at not in held.items))
        self._many("put_items", _changed(self._items, held.items, lambda at, body: (*at, body)))
        if held.refusals:
            self._many("put_refusals", map(rows.refusal_row, held.refusals))
            self._run(sql.queries("sqlite")["forget_refusals"], (REFUSALS_KEPT,))

    def _store_messages(self) -> None:
        held = self.rows
        gone = [(key,) for key in held.withdrawn]
        self._many("drop_messages", gone)
        self._many("drop_deliveries", gone)
        new: list[Row] = []
        moved: list[Row] = []
        for key, row in held.messages.items():
            admit, moved_at = row.admit, row.moved_at
            if admit is not None and moved_at is None:
                new.append((*rows.admission_row(admit), None))
            elif moved_at is not None:
                answer, state = row.answer, rows.STATE_NUMBERS[row.state]
                packed = None if answer is None else pack_answer(answer)
                if admit is None:
                    moved.append((key, state, packed, moved_at))
                else:
                    columns = list(rows.admission_row(admit))
                    columns[_STATE], columns[_MOVED_AT] = state, moved_at
                    new.append((*columns, packed))
        self._many("put_messages", new)
        self._many("move_messages", moved)

    def _changed_deliveries(self) -> list[w.Delivery]:
        before, withdrawn, discarded = self._deliveries, self.rows.withdrawn, self.rows.discarded
        return [
            delivery
            for names, delivery in self.rows.deliveries.items()
            if (before.get(names) is not delivery or names[0] in withdrawn)
            and not (names in discarded and delivery.state.terminal)
        ]


def _changed(before: dict[K, V], after: dict[K, V], row: Callable[[K, V], Row]) -> Iterable[Row]:
    """Yield the rows of the new and the changed entries."""
    return (row(key, value) for key, value in after.items() if before.get(key) != value)


@cache
def _statement(name: str, size: int, width: int) -> str:
    one = f"({', '.join('?' * width)})"
    rows_ = ", ".join([one] * size)
    return sql.queries("sqlite", "shared")[name].replace(":rows", rows_)
