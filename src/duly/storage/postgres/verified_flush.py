"""One flush in one statement: carried out on cached rows, which PostgreSQL verifies.

The laws. A row is changed only if it equals the cached row; a row that was absent is inserted only if it is
still absent; an item that was checked is locked and compared. If any row differs, nothing is changed, and the
caller locks and reads the rows instead (`flush.py`). Every row that the flush read is verified in one of
these ways; if that is not possible, the statement is not sent. The statement is a transaction by itself: when
the server has answered it, it is committed and flushed.
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
    """The flush needs a row that is not in the cache, or that cannot be verified."""


class ExpectedRows(LockedRows):
    """The cached rows, with the changes of this flush.

    A message or delivery that is not cached is assumed to be absent; its insertion verifies that.
    """

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache
        self._seen: set[bytes] = set()
        self._seen_deliveries: set[w.DeliveryRef] = set()
        self._seen_marks: set[str] = set()
        self.floor = cache.floor

    def message(self, key: bytes) -> LockedMessage | None:
        """Return a message, if it is cached."""
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
        """Give up: deliveries that are not cached would have to be removed as well."""
        raise NotCached

    def due(self, channel: str, now: int, limit: int) -> NoReturn:
        """Give up: other hubs create deliveries that may be due."""
        raise NotCached

    def last(self, stream: str) -> NoReturn:
        """Give up: other hubs append to streams as well."""
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
        """Give up: storing a refusal also deletes the oldest ones."""
        raise NotCached

    # ── what the server is told ──────────────────────────────────────────────────────────────────

    def changes(self) -> list[list[Any]]:
        """Return the arguments of the statement: the old and the new rows, ordered by their keys."""
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
        """Return the smallest `until` of the new messages, and when and how far the floor was mended."""
        untils = [row.admit.until for row in self.messages.values() if row.admit is not None]
        return [min(untils, default=0), self.floor.mended, self.floor.barrier]

    def _written(self) -> bool:
        """Return whether every row that was read, except items, was also changed."""
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
    """A flush that its constructor carries out on cached rows; raises `NotCached` if that is not possible."""

    def __init__(self, cache: RowCache, groups: Sequence[w.Group]) -> None:
        self._cache = cache
        self._rows = ExpectedRows(cache)
        interpreter = Interpreter(self._rows)
        self.results = [interpreter.execute(group) for group in groups]
        """the results of the operations, valid once `store` has returned True"""
        self._changes = self._rows.changes()

    async def store(self, connection: PostgresConnection) -> bool:
        """Store the changes if all rows are as expected; return whether they were."""
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
