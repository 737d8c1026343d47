"""One flush in PostgreSQL: locks the rows that it touches, carries out the operations on them, and writes
back the rows that changed.

The laws. Rows that may change are locked when they are read, in the order of their keys, and tables in the
order of this file. A row that was absent is inserted only if it is still absent: if another hub has inserted
it, `ConcurrentChange` is raised, and the transaction is rolled back and repeated, and finds the row.

Admission reserves first: it inserts every message that may be admitted, and a message that could be inserted
was absent. The floor is read only after that: if another hub forgot an id before the insert, it raised the
floor in the same transaction, so this flush sees the raised floor. No hub waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import pack_answer
from duly.core.trusted_time import Floor
from duly.storage import sql
from duly.storage.footprint import Footprint
from duly.storage.interpreter import Interpreter
from duly.storage.ledger import REFUSALS_KEPT
from duly.storage.locked_rows import LockedMessage, LockedRows, changes_of
from duly.storage.sql import rows


class ConcurrentChange(Exception):
    """Another hub has changed a row that this flush was about to change."""


class PostgresConnection(Protocol):
    """The part of an asyncpg connection that a flush uses."""

    async def fetch(self, query: str, *args: object) -> Sequence[Any]:
        """Run a statement and return its rows."""
        ...


async def flush(
    connection: PostgresConnection, groups: Sequence[w.Group]
) -> tuple[list[w.Results], LockedRows]:
    """Carry out groups in order, within the transaction that is open on this connection.

    Returns their results, and the rows as they are after the commit.
    """
    work = _Flush(connection, Footprint(groups))
    await work.load()
    interpreter = Interpreter(work.rows)
    results = [interpreter.execute(group) for group in groups]
    await work.store()
    return results, work.rows


class _Flush:
    """Reads the rows of a footprint, and writes back those that have changed."""

    def __init__(self, connection: PostgresConnection, footprint: Footprint) -> None:
        self._connection = connection
        self._footprint = footprint
        self._reserved: dict[bytes, w.Admit] = {}
        self._deliveries: dict[w.DeliveryNames, w.Delivery] = {}
        self.rows = LockedRows()

    async def _run(self, name: str, *args: object) -> Sequence[Any]:
        return await self._connection.fetch(sql.queries("postgres")[name], *args)

    async def _run_many(self, name: str, values: Iterable[tuple[object, ...]]) -> int:
        """Run a statement on many rows of values; return how many rows it returned."""
        columns = list(zip(*values, strict=True))
        return len(await self._run(name, *columns)) if columns else 0

    async def _insert(self, name: str, values: Sequence[tuple[object, ...]]) -> None:
        if await self._run_many(name, values) != len(values):
            raise ConcurrentChange

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def load(self) -> None:
        """Read every row that the operations of this flush need."""
        await self._load_messages()
        await self._load_deliveries()
        await self._load_streams()
        await self._load_marks()
        await self._load_items()

    async def _load_messages(self) -> None:
        touched, held = self._footprint, self.rows
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
                    held.messages[key] = LockedMessage(fingerprint, State(state), rows.answer_of(answer))
        if touched.admits:
            if any(key not in held.messages and key not in self._reserved for key in touched.admits):
                raise ConcurrentChange  # the message existed at the insert and is gone now
            held.floor = Floor(*(await self._run("floor"))[0])

    async def _load_deliveries(self) -> None:
        touched = self._footprint
        found: list[Any] = []
        if touched.deliveries:
            found += await self._run("hold_deliveries", *zip(*touched.deliveries, strict=True))
        for channel, due in sorted(touched.claims.items()):
            found += await self._run("hold_due", channel, due.now, due.limit)
        for delivery in map(rows.delivery_of, found):
            self.rows.put_delivery(delivery)
        self._deliveries = dict(self.rows.deliveries)

    async def _load_streams(self) -> None:
        touched, held = self._footprint, self.rows
        if touched.streams:
            held.lasts.update(await self._run("hold_streams", sorted(touched.streams)))
        if touched.cursors:
            if only_read := {stream for stream, _ in touched.cursors} - touched.streams:
                held.lasts.update(await self._run("lasts", sorted(only_read)))
            found = await self._run("hold_cursors", *zip(*sorted(touched.cursors), strict=True))
            held.cursors.update({(stream, reader): n for stream, reader, n in found})
        if touched.entries:
            found = await self._run("hold_entries", *zip(*sorted(touched.entries), strict=True))
            held.bodies.update({(stream, n): body for stream, n, body in found})
        self._bodies = dict(held.bodies)
        self._lasts, self._cursors = dict(held.lasts), dict(held.cursors)

    async def _load_marks(self) -> None:
        held = self.rows
        if self._footprint.marks:
            found = await self._run("hold_marks", sorted(self._footprint.marks))
            held.marks.update({mark: (n, ms) for mark, n, ms in found})
        self._marks = dict(held.marks)

    async def _load_items(self) -> None:
        held = self.rows
        if self._footprint.items:
            found = await self._run("hold_items", *zip(*sorted(self._footprint.items), strict=True))
            held.items.update({(bucket, name): body for bucket, name, body in found})
        self._items = dict(held.items)

    # ── writing back ─────────────────────────────────────────────────────────────────────────────

    async def store(self) -> None:
        """Write every row that the operations of this flush have changed."""
        await self._store_messages()
        await self._store_deliveries()
        await self._store_streams()
        await self._store_marks()
        await self._store_items()
        await self._store_refusals()

    async def _store_messages(self) -> None:
        held, reserved = self.rows, self._reserved
        stands = held.messages
        # A reservation that its admission did not use is deleted.
        unused = {k for k, admit in reserved.items() if k not in stands or stands[k].admit is not admit}
        if gone := sorted(unused | held.withdrawn.difference(reserved)):
            await self._run("forget", gone)
            again = [stands[k].admit for k in gone if k in stands]
            await self._insert("admit", [rows.admission_row(admit) for admit in again if admit])
        moved = [
            (key, int(row.state), None if row.answer is None else pack_answer(row.answer), row.moved_at)
            for key, row in stands.items()
            if row.moved_at is not None
        ]
        await self._run_many("move", moved)

    async def _store_deliveries(self) -> None:
        before, withdrawn = self._deliveries, self.rows.withdrawn
        if withdrawn:
            await self._run("forget_deliveries", sorted(withdrawn))
        new: list[tuple[Any, ...]] = []
        changed: list[tuple[object, ...]] = []
        for names, delivery in self.rows.deliveries.items():
            old = before.get(names)
            if old is None or names[0] in withdrawn:
                new.append(rows.row_of(delivery))
            elif old is not delivery:
                changed.append(rows.row_of(delivery))
        await self._insert("deliver", sorted(new))
        await self._run_many("change_deliveries", changed)

    async def _store_streams(self) -> None:
        held = self.rows
        begun, extended = changes_of(self._lasts, held.lasts)
        await self._insert("begin_streams", begun)
        await self._run_many("extend_streams", extended)
        await self._run_many(
            "append", [(e.stream, n, e.body, e.at, e.key) for (_, n), e in held.appended.items()]
        )
        _, rewritten = changes_of(self._bodies, held.bodies)
        await self._run_many("rewrite", [(*where, body) for where, body in rewritten])
        new_cursors, moved = changes_of(self._cursors, held.cursors)
        await self._insert("begin_cursors", [(*where, n) for where, n in new_cursors])
        await self._run_many("move_cursors", [(*where, n) for where, n in moved])

    async def _store_marks(self) -> None:
        begun, raised = changes_of(self._marks, self.rows.marks)
        await self._insert("begin_marks", [(mark, *at) for mark, at in begun])
        await self._run_many("raise_marks", [(mark, *at) for mark, at in raised])

    async def _store_items(self) -> None:
        stand = self.rows.items
        new, replaced = changes_of(self._items, stand)
        await self._run_many("drop", [where for where in self._items if where not in stand])
        await self._insert("put_new", [(*where, body) for where, body in new])
        await self._run_many("replace", [(*where, body) for where, body in replaced])

    async def _store_refusals(self) -> None:
        if self.rows.refusals:
            await self._run_many("refuse", map(rows.refusal_row, self.rows.refusals))
            await self._run("forget_refusals", REFUSALS_KEPT)
