"""Id windows: a bounded memory of ids that never lets one run twice.

The law: **what we no longer remember, we no longer accept.** A plain FIFO of ids forgets, and then runs
a replay as if it were new. ``CountWindow`` forgets and keeps the newest id it forgot: whatever is not
above that mark is stale. ``TimeWindow`` only makes a duplicate cheap; the ledger behind it is the truth,
so it may forget anything at any time: there `duly.storage.interpreter` decides what an id is.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar

from duly.errors import Malformed

DEFAULT_SIZE: Final = 100


class Ordered(Protocol):
    """Ids that can be compared, and hashed: a ``SeqId``, a number, a UUIDv7 as text."""

    def __le__(self, other: Any, /) -> bool: ...
    def __hash__(self) -> int: ...


K = TypeVar("K", bound=Ordered)
V = TypeVar("V")


class Seen(Enum):
    """The answer of a window about an id."""

    FRESH = "fresh"
    """Never seen: it may run."""
    DUPLICATE = "duplicate"
    """Seen, and still remembered."""
    STALE = "stale"
    """Not above the low-water mark: it may have run, so it never will."""


class CountSnapshot(TypedDict, Generic[K]):
    """A ``CountWindow`` written down: the ids from oldest to newest, and the newest forgotten one."""

    ids: list[K]
    low: K | None


class CountWindow(Generic[K]):
    """The last ``size`` ids of **one** sender, and the newest id that fell out, as a low-water mark.

    For small devices: fixed memory, no clock. One window per sender (and per class of message, so that
    a long download pushes no command out), since one sender's mark says nothing about another's ids.
    The price of forgetting: an id that arrives after more than ``size`` newer ones is refused as stale.

    >>> window = CountWindow[int](size=2)
    >>> [window.see(id).value for id in (1, 2, 2, 3, 1)]
    ['fresh', 'fresh', 'duplicate', 'fresh', 'stale']
    """

    __slots__ = ("_ids", "_low", "_size")

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        if size < 1:
            raise Malformed(f"a window must hold at least one id, not {size}")
        self._size = size
        self._ids: OrderedDict[K, None] = OrderedDict()
        self._low: K | None = None

    def check(self, id: K) -> Seen:
        """What ``see`` would say, remembering nothing: a refused id must not count as seen."""
        if id in self._ids:
            return Seen.DUPLICATE
        low = self._low
        if low is not None and id <= low:
            return Seen.STALE
        return Seen.FRESH

    def see(self, id: K) -> Seen:
        """What the window knows of ``id``; a fresh one is remembered from now on."""
        seen = self.check(id)
        if seen is Seen.FRESH:
            self._ids[id] = None
            if len(self._ids) > self._size:
                self._forget_oldest()
        return seen

    def __len__(self) -> int:
        return len(self._ids)

    def snapshot(self) -> CountSnapshot[K]:
        """Everything remembered, to be written to flash before the effect."""
        return {"ids": list(self._ids), "low": self._low}

    def restore(self, snapshot: CountSnapshot[K]) -> None:
        """Go on from a snapshot, forgetting what is here; a smaller window keeps the newest ids of it."""
        self._ids = OrderedDict.fromkeys(snapshot["ids"])
        self._low = snapshot["low"]
        while len(self._ids) > self._size:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest, _ = self._ids.popitem(last=False)
        # Arrival is not order: the mark is the newest id forgotten, not the last one.
        if self._low is None or self._low <= oldest:
            self._low = oldest


class TimeWindow(Generic[V]):
    """A bounded cache in front of the ledger: what is known of a key, until a time.

    It holds at most ``capacity`` entries and lets the least recently put go. An OrderedDict, since
    popping the oldest entry of a plain dict walks over all the holes left by earlier pops: 87 µs
    measured, against 0.5 µs. A miss means nothing; ask the ledger.

    >>> window = TimeWindow[str](capacity=1000)
    >>> window.put(b"key", "done", until=50)
    >>> window.get(b"key", now=49), window.get(b"key", now=50)
    ('done', None)
    """

    __slots__ = ("_capacity", "_entries")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise Malformed(f"a window must hold at least one entry, not {capacity}")
        self._capacity = capacity
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()

    def put(self, key: bytes, value: V, until: int) -> None:
        """Know ``value`` of ``key`` before the time ``until``, replacing what was known."""
        entries = self._entries
        if key in entries:
            entries.move_to_end(key)
        elif len(entries) >= self._capacity:
            entries.popitem(last=False)
        entries[key] = (value, until)

    def get(self, key: bytes, now: int) -> V | None:
        """What is known of ``key``, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[1] > now:
            return entry[0]
        del self._entries[key]
        return None

    def drop(self, key: bytes) -> None:
        """Know nothing of ``key`` any more."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)
