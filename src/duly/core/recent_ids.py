"""The recent ids of a sender: a bounded memory that never lets an id run twice, for small devices.

The law: **what we no longer remember, we no longer accept.** A plain FIFO of ids forgets, and then runs a
replay as if it were new. ``RecentIds`` remembers the newest id it has forgotten: an id that is not above that
mark is stale. Ports of duly to other languages follow it, and its verdicts are in the published test vectors.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar

from duly.errors import Malformed

DEFAULT_SIZE: Final = 100


class Ordered(Protocol):
    """Ids that can be compared and hashed: a ``SeqId``, a number, a UUIDv7 as text."""

    def __le__(self, other: Any, /) -> bool: ...
    def __hash__(self) -> int: ...


K = TypeVar("K", bound=Ordered)


class Seen(Enum):
    """What is known of an id."""

    FRESH = "fresh"
    """never seen: it may run"""
    DUPLICATE = "duplicate"
    """seen, and still remembered"""
    STALE = "stale"
    """not above the low-water mark: it may have run already, so it is refused"""


class StoredIds(TypedDict, Generic[K]):
    """The content of a ``RecentIds``: the ids from oldest to newest, and the newest forgotten one."""

    ids: list[K]
    low: K | None


class RecentIds(Generic[K]):
    """The last ``size`` ids of **one** sender, and the newest id that fell out, as a low-water mark.

    It is meant for small devices: fixed memory, no clock. Each sender needs an object of its own, since its
    mark says nothing about another sender's ids; so does each class of messages, or a long download would
    push commands out. The price of forgetting: an id that arrives after more than ``size`` newer ones is
    refused as stale.

    >>> recent = RecentIds[int](size=2)
    >>> [recent.see(id).value for id in (1, 2, 2, 3, 1)]
    ['fresh', 'fresh', 'duplicate', 'fresh', 'stale']
    """

    __slots__ = ("_ids", "_low", "_size")

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        if size < 1:
            raise Malformed(f"at least one id must be remembered, not {size}")
        self._size = size
        self._ids: OrderedDict[K, None] = OrderedDict()
        self._low: K | None = None

    def check(self, id: K) -> Seen:
        """Return what ``see`` would return, without remembering the id: a refused id must not count as
        seen."""
        if id in self._ids:
            return Seen.DUPLICATE
        low = self._low
        if low is not None and id <= low:
            return Seen.STALE
        return Seen.FRESH

    def see(self, id: K) -> Seen:
        """Return what is known of ``id``, and remember it if it is fresh."""
        seen = self.check(id)
        if seen is Seen.FRESH:
            self._ids[id] = None
            if len(self._ids) > self._size:
                self._forget_oldest()
        return seen

    def __len__(self) -> int:
        return len(self._ids)

    def snapshot(self) -> StoredIds[K]:
        """Return everything remembered, to be written to flash before the effect."""
        return {"ids": list(self._ids), "low": self._low}

    def restore(self, snapshot: StoredIds[K]) -> None:
        """Replace the content with a snapshot; a smaller size keeps only the newest ids."""
        self._ids = OrderedDict.fromkeys(snapshot["ids"])
        self._low = snapshot["low"]
        while len(self._ids) > self._size:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest, _ = self._ids.popitem(last=False)
        # Ids may arrive out of order: the mark is the newest forgotten id, not the one forgotten last.
        if self._low is None or self._low <= oldest:
            self._low = oldest
