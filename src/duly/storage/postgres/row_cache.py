"""A cache of the rows of open messages, as this hub last saw them committed.

A flush whose rows are all cached is carried out on them, and PostgreSQL verifies the rows while it writes
(`verified_flush.py`): one statement instead of a dozen. Other hubs may change a row at any time, so the cache
is never authoritative. It is bounded and may drop any row: rows that are not cached are read and locked
(`flush.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from duly.core import operations as w
from duly.core.trusted_time import Floor
from duly.storage.locked_rows import UNREAD, LockedMessage, LockedRows

K = TypeVar("K")
V = TypeVar("V")

CAPACITY: Final = 20_000
"""The most cached rows of each table: about 30 MB together."""
LARGEST: Final = 1_024
"""The size of the largest item that is cached, in bytes: an account or a grant is a fifth of that."""


class RowCache:
    """Caches open messages and deliveries, marks and items; drops the least recently written first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self.floor = Floor()
        self.messages: OrderedDict[bytes, LockedMessage] = OrderedDict()
        self.deliveries: OrderedDict[w.DeliveryRef, w.Delivery] = OrderedDict()
        self.marks: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.items: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def learn(self, rows: LockedRows) -> None:
        """Cache the rows of a committed flush."""
        if rows.floor is not UNREAD:
            self.floor = rows.floor
        for key in rows.withdrawn:
            self.messages.pop(key, None)
        for key, message in rows.messages.items():
            if message.state.terminal:
                self.messages.pop(key, None)
            else:
                self._put(self.messages, key, LockedMessage(message.fingerprint, message.state))
        for delivery in rows.deliveries.values():
            if delivery.state.terminal:
                self.deliveries.pop(delivery.ref, None)
            else:
                self._put(self.deliveries, delivery.ref, delivery)
        for mark, at in rows.marks.items():
            self._put(self.marks, mark, at)
        for place, body in rows.items.items():
            if len(body) <= LARGEST:
                self._put(self.items, place, body)
            else:
                self.items.pop(place, None)
        for place in rows.dropped:
            self.items.pop(place, None)

    def forget(self, rows: LockedRows) -> None:
        """Drop the rows of a flush that was refused: some of them differ from the database."""
        for key in rows.messages:
            self.messages.pop(key, None)
        for delivery in rows.deliveries.values():
            self.deliveries.pop(delivery.ref, None)
        for mark in rows.marks:
            self.marks.pop(mark, None)
        for place in rows.items:
            self.items.pop(place, None)

    def _put(self, table: OrderedDict[K, V], key: K, row: V) -> None:
        table[key] = row
        table.move_to_end(key)
        if len(table) > self._capacity:
            table.popitem(last=False)
