"""A bounded cache of values that expire; it may forget anything at any time, since the truth is behind it.

The ledger keeps the outcomes of recent messages in one, so that repeats are answered without a read.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from duly.errors import Malformed

V = TypeVar("V")


class ExpiringCache(Generic[V]):
    """A value per key, each until a certain time.

    It holds at most ``capacity`` entries and drops the least recently put one. It is an OrderedDict, since
    popping the oldest entry of a plain dict walks over the holes left by earlier pops: 87 µs measured,
    against 0.5 µs. A miss says nothing: ask the store behind it.

    >>> cache = ExpiringCache[str](capacity=1000)
    >>> cache.put(b"key", "done", until=50)
    >>> cache.get(b"key", now=49), cache.get(b"key", now=50)
    ('done', None)
    """

    __slots__ = ("_capacity", "_entries")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise Malformed(f"a cache must hold at least one entry, not {capacity}")
        self._capacity = capacity
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()

    def put(self, key: bytes, value: V, until: int) -> None:
        """Remember ``value`` for ``key`` until the time ``until``, replacing an earlier value."""
        entries = self._entries
        if key in entries:
            entries.move_to_end(key)
        elif len(entries) >= self._capacity:
            entries.popitem(last=False)
        entries[key] = (value, until)

    def get(self, key: bytes, now: int) -> V | None:
        """Return the value of ``key``, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[1] > now:
            return entry[0]
        del self._entries[key]
        return None

    def drop(self, key: bytes) -> None:
        """Forget ``key``."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)
