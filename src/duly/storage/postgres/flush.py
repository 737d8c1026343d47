"""One flush in PostgreSQL: read the rows it touches, carry the writes out on them, write back what changed.

The laws. Rows that may change are locked when they are read, in the order of their keys, and tables in the
order of this file. A row that was absent is inserted only if it still is: if another hub was faster,
`ConcurrentChange` is raised, the transaction is rolled back and done again, and finds the row.

Admission reserves first: it inserts every message that may be admitted, and what was inserted is known to
have been absent. Only then is the floor read: if an id was forgotten between somebody's look and our
insert, whoever forgot it had raised the floor in the same transaction, so we see it now. Nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import pack_answer
from duly.core.trusted_time import Floor
from duly.storage import sql
from duly.storage.interpreter import Footprint, Interpreter, MessageRow
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.sql import rows


class ConcurrentChange(Exception):
    """Another hub changed what we were about to change."""


class PostgresConnection(Protocol):
    async def fetch(self, query: str, *args: Any) -> Sequence[Any]: ...


class FlushResult(NamedTuple):
    results: list[w.Results]
    applied: list[tuple[w.Write, w.Result]]


async def flush(connection: PostgresConnection, groups: Sequence[w.Group]) -> FlushResult:
    """Carry groups out in order, within the transaction that is open on this connection."""
    work = _Flush(connection, Footprint(groups))
    await work.load()
    applied: list[tuple[w.Write, w.Result]] = []
    results = [w.execute(group, work.image.apply, applied) for group in groups]
    await work.store()
    return FlushResult(results, applied)


class _Flush:
    def __init__(self, connection: PostgresConnection, footprint: Footprint) -> None:
        self._connection = connection
        self._footprint = footprint
        self._reserved: dict[bytes, w.Admit] = {}
        self._deliveries: dict[w.DeliveryRef, w.Delivery] = {}
        self.image = Interpreter()

    async def _run(self, name: str, *args: Any) -> Sequence[Any]:
        return await self._connection.fetch(sql.queries("postgres")[name], *args)

    async def _run_many(self, name: str, values: Iterable[tuple[Any, ...]]) -> int:
        """A statement over columns; how many rows it returned."""
        columns = list(zip(*values, strict=True))
        return len(await self._run(name, *columns)) if columns else 0

    async def _insert(self, name: str, values: list[tuple[Any, ...]]) -> None:
        if await self._run_many(name, values) != len(values):
            raise ConcurrentChange

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def load(self) -> None:
        await self._load_messages()
        await self._load_deliveries()
        await self._load_streams()
        await self._load_marks()
        await self._load_items()

    async def _load_messages(self) -> None:
        touched, image = self._footprint, self.image
        asked = touched.recalls
        if touched.admits:
            ordered = sorted(touched.admits)
            values = zip(*(rows.admission_row(touched.admits[key]) for key in ordered), strict=True)
            reserved = [key for (key,) in await self._run("admit", *values)]
            self._reserved = {key: touched.admits[key] for key in reserved}
            asked = asked.union(ordered)
        for name, keys in (
            ("hold", touched.moves.difference(self._reserved)),
            ("known", asked.difference(self._reserved, touched.moves)),
        ):
            if keys:
                for key, fingerprint, state, answer in await self._run(name, sorted(keys)):
                    image.messages[key] = MessageRow(fingerprint, State(state), rows.answer_of(answer))
        if touched.admits:
            if any(key not in image.messages and key not in self._reserved for key in touched.admits):
                raise ConcurrentChange  # it was there when we inserted and is gone now
            image.floor = Floor(*(await self._run("floor"))[0])

    async def _load_deliveries(self) -> None:
        touched = self._footprint
        found: list[Any] = []
        if touched.refs:
            found += await self._run("hold_deliveries", *zip(*map(rows.names, touched.refs), strict=True))
        for channel, due in sorted(touched.claims.items()):
            found += await self._run("hold_due", channel, due.now, due.limit)
        self._deliveries = {d.ref: d for d in map(rows.delivery_of, found)}
        for delivery in self._deliveries.values():
            self.image.put(delivery)

    async def _load_streams(self) -> None:
        touched, image = self._footprint, self.image
        if touched.streams:
            image.lasts.update(await self._run("hold_streams", sorted(touched.streams)))
        if touched.cursors:
            if only_read := {stream for stream, _ in touched.cursors} - touched.streams:
                image.lasts.update(await self._run("lasts", sorted(only_read)))
            found = await self._run("hold_cursors", *zip(*sorted(touched.cursors), strict=True))
            image.cursors.update({(stream, reader): n for stream, reader, n in found})
        if touched.entries:
            found = await self._run("hold_entries", *zip(*sorted(touched.entries), strict=True))
            image.bodies.update({(stream, n): body for stream, n, body in found})
        self._bodies = dict(image.bodies)
        self._lasts, self._cursors = dict(image.lasts), dict(image.cursors)

    async def _load_marks(self) -> None:
        image = self.image
        if self._footprint.marks:
            found = await self._run("hold_marks", sorted(self._footprint.marks))
            image.marks.update({mark: (n, ms) for mark, n, ms in found})
        self._marks = dict(image.marks)

    async def _load_items(self) -> None:
        image = self.image
        if self._footprint.items:
            found = await self._run("hold_items", *zip(*sorted(self._footprint.items), strict=True))
            image.items.update({(bucket, name): body for bucket, name, body in found})
        self._items = dict(image.items)

    # ── writing back ─────────────────────────────────────────────────────────────────────────────

    async def store(self) -> None:
        await self._store_messages()
        await self._store_deliveries()
        await self._store_streams()
        await self._store_marks()
        await self._store_items()
        await self._store_refusals()

    async def _store_messages(self) -> None:
        image, reserved = self.image, self._reserved
        stands = image.messages
        # A reservation is used by the admission it was made for, or given up.
        unused = {k for k, admit in reserved.items() if k not in stands or stands[k].admit is not admit}
        if gone := sorted(unused | image.withdrawn.difference(reserved)):
            await self._run("forget", gone)
            again = [stands[k].admit for k in gone if k in stands]
            await self._insert("admit", [rows.admission_row(admit) for admit in again if admit])
        moved = [
            (key, int(held.state), None if held.answer is None else pack_answer(held.answer), held.moved_at)
            for key, held in stands.items()
            if held.moved_at is not None
        ]
        await self._run_many("move", moved)

    async def _store_deliveries(self) -> None:
        before, withdrawn = self._deliveries, self.image.withdrawn
        if withdrawn:
            await self._run("forget_deliveries", sorted(withdrawn))
        new: list[tuple[Any, ...]] = []
        changed: list[tuple[Any, ...]] = []
        for delivery in self.image.deliveries():
            old = before.get(delivery.ref)
            if old is None or delivery.ref.key in withdrawn:
                new.append(rows.row_of(delivery))
            elif old is not delivery:
                changed.append(rows.row_of(delivery))
        await self._insert("deliver", sorted(new))
        await self._run_many("change_deliveries", changed)

    async def _store_streams(self) -> None:
        image = self.image
        begun, extended = _changes(self._lasts, image.lasts)
        await self._insert("begin_streams", begun)
        await self._run_many("extend_streams", extended)
        await self._run_many("append", [(e.stream, e.n, e.body, e.at, e.key) for e in image.entries])
        _, rewritten = _changes(self._bodies, image.bodies)
        await self._run_many("rewrite", [(*where, body) for where, body in rewritten])
        begun, extended = _changes(self._cursors, image.cursors)
        await self._insert("begin_cursors", [(*where, n) for where, n in begun])
        await self._run_many("move_cursors", [(*where, n) for where, n in extended])

    async def _store_marks(self) -> None:
        begun, raised = _changes(self._marks, self.image.marks)
        await self._insert("begin_marks", [(mark, *at) for mark, at in begun])
        await self._run_many("raise_marks", [(mark, *at) for mark, at in raised])

    async def _store_items(self) -> None:
        stand = self.image.items
        new, replaced = _changes(self._items, stand)
        await self._run_many("drop", [where for where in self._items if where not in stand])
        await self._insert("put_new", [(*where, body) for where, body in new])
        await self._run_many("replace", [(*where, body) for where, body in replaced])

    async def _store_refusals(self) -> None:
        if self.image.refusals:
            await self._run_many("refuse", map(rows.refusal_row, self.image.refusals))
            await self._run("forget_refusals", REFUSALS_KEPT)


def _changes(
    before: dict[Any, Any], after: dict[Any, Any]
) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """What is new, in order, and what has changed."""
    new = sorted((key, value) for key, value in after.items() if key not in before)
    return new, [(key, value) for key, value in after.items() if before.get(key, value) != value]
