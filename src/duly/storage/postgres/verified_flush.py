"""One flush in one statement: carried out on rows as this hub last saw them, which PostgreSQL verifies.

The laws. A row that is written is written only if it is as it was here; a row that was absent is inserted
only if it still is; an item that was checked is locked and compared. If anything is different, nothing is
changed and the caller is told: then the rows are locked and read (`flush.py`). Whatever was looked at is
verified in one of these ways, or the server is not asked at all. The statement is a transaction by itself:
when it has been answered, it is committed and flushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer, pack_answer
from duly.storage import sql
from duly.storage.interpreter import Interpreter
from duly.storage.locked_rows import LockedMessage, LockedRows
from duly.storage.postgres.flush import PostgresConnection
from duly.storage.postgres.row_cache import RowCache
from duly.storage.sql import rows

Row = tuple[Any, ...]
_STATES: Final = rows.STATE_NUMBERS


class NotCached(Exception):
    """A row is needed that is not in the cache, or that cannot be verified."""


class ExpectedRows(LockedRows):
    """Rows as the cache has them, with the changes of this flush.

    A message or delivery that is not cached is taken for absent: that is verified when it is inserted.
    """

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache
        self._seen: set[bytes] = set()
        self._seen_deliveries: set[w.DeliveryRef] = set()
        self._seen_marks: set[str] = set()
        self.floor = cache.floor

    def message(self, key: bytes) -> LockedMessage | None:
        """Return what is known of a message."""
        found = self.messages.get(key)
        if found is None:
            self._seen.add(key)
            found = self._cache.messages.get(key)
        return found

    def move(self, key: bytes, to: State, answer: Answer | None, at: int) -> None:
        """Put a message into another state."""
        row = self.messages.get(key) or self._cache.messages[key]
        self.messages[key] = replace(row, state=to, answer=answer, moved_at=at)

    def delivery(self, ref: w.DeliveryRef) -> w.Delivery | None:
        """Return a delivery."""
        found = super().delivery(ref)
        if found is None:
            self._seen_deliveries.add(ref)
            found = self._cache.deliveries.get(ref)
        return found

    def mark(self, name: str) -> tuple[int, int]:
        """Return a high-water mark."""
        found = self.marks.get(name)
        if found is None:
            self._seen_marks.add(name)
            found = self._cache.marks.get(name)
            if found is None:
                raise NotCached
        return found

    def item(self, bucket: str, name: str) -> bytes:
        """Return an item."""
        place = bucket, name
        found = self.items.get(place)
        if found is None:
            found = self._cache.items.get(place)
            if found is None:
                raise NotCached
            self.items[place] = found
        return found

    # ── what needs locks ─────────────────────────────────────────────────────────────────────────

    def withdraw(self, key: bytes) -> NoReturn:
        """Give up: deliveries that are not cached are removed, too."""
        raise NotCached

    def due(self, channel: str, now: int, limit: int) -> NoReturn:
        """Give up: other hubs make deliveries that are due."""
        raise NotCached

    def last(self, stream: str) -> NoReturn:
        """Give up: other hubs append, too."""
        raise NotCached

    def entry_body(self, stream: str, n: int) -> NoReturn:
        """Give up: entries are not cached."""
        raise NotCached

    def cursor(self, stream: str, reader: str) -> NoReturn:
        """Give up: cursors are not cached."""
        raise NotCached

    def put_item(self, bucket: str, name: str, body: bytes) -> NoReturn:
        """Give up: items change rarely."""
        raise NotCached

    def drop_item(self, bucket: str, name: str) -> NoReturn:
        """Give up: items change rarely."""
        raise NotCached

    def refuse(self, refusal: w.RecordRefusal) -> NoReturn:
        """Give up: the oldest refusals are forgotten when new ones are stored."""
        raise NotCached

    # ── what the server is told ──────────────────────────────────────────────────────────────────

    def changes(self) -> list[list[Any]]:
        """Return the arguments of the statement: rows, as they were and are to be, ordered by their keys."""
        if not self._written():
            raise NotCached
        admitted, moved = self._message_rows()
        created, changed = self._delivery_rows()
        marks = self._cache.marks
        raised = [(mark, *marks[mark], *at) for mark, at in self.marks.items()]
        checked = [(*place, body) for place, body in self.items.items()]
        changes: list[list[Any]] = [admitted, moved, created, changed, raised, checked]
        for each in changes:
            each.sort()
        changes.append(self._judged_by())
        return changes

    def _judged_by(self) -> list[int]:
        """Return the least `until` of the new messages, and when and how far the floor was mended."""
        untils = [row.admit.until for row in self.messages.values() if row.admit is not None]
        return [min(untils, default=0), self.floor.mended, self.floor.barrier]

    def _written(self) -> bool:
        """Whether everything that was looked at, but for items, has been changed."""
        return (
            self._seen <= self.messages.keys()
            and self._seen_marks <= self.marks.keys()
            and all(super(ExpectedRows, self).delivery(ref) for ref in self._seen_deliveries)
        )

    def _message_rows(self) -> tuple[list[Row], list[Row]]:
        """Return the rows of messages that are admitted, and of those that are moved."""
        admitted: list[Row] = []
        moved: list[Row] = []
        for key, row in self.messages.items():
            admit = row.admit
            if admit is not None:
                admitted.append(rows.admission_row(admit))
            if row.moved_at is not None:
                was = self._cache.messages[key].state if admit is None else admit.state
                answer = None if row.answer is None else pack_answer(row.answer)
                moved.append((key, _STATES[was], _STATES[row.state], answer, row.moved_at))
        return admitted, moved

    def _delivery_rows(self) -> tuple[list[Row], list[Row]]:
        """Return the rows of deliveries that are created, and of those that are changed."""
        created: list[Row] = []
        changed: list[Row] = []
        for delivery in self.deliveries.values():
            old = self._cache.deliveries.get(delivery.ref)
            if old is None:
                created.append(rows.row_of(delivery))
            else:
                changed.append((*rows.names(delivery.ref), *_mutable(old), *_mutable(delivery)))
        return created, changed


class VerifiedFlush:
    """A flush that is carried out already, on rows of the cache; raises `NotCached` if it cannot be."""

    def __init__(self, cache: RowCache, groups: Sequence[w.Group]) -> None:
        self._cache = cache
        self._rows = ExpectedRows(cache)
        interpreter = Interpreter(self._rows)
        self.results = [interpreter.execute(group) for group in groups]
        """what the operations have done, if it is stored"""
        self._changes = self._rows.changes()

    async def store(self, connection: PostgresConnection) -> bool:
        """Store what was changed, if everything is as expected; return whether it was."""
        ((stored,),) = await connection.fetch(sql.queries("postgres")["flush"], *self._changes)
        if stored:
            self._cache.learn(self._rows)
        else:
            self._cache.forget(self._rows)
        return bool(stored)


def _mutable(delivery: w.Delivery) -> Row:
    """Return the columns of a delivery that may change."""
    return (
        _STATES[delivery.state],
        delivery.attempt,
        delivery.due,
        delivery.worker,
        rows.plain(delivery.error),
        delivery.in_doubt,
    )
