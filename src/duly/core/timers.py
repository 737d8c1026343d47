"""The timer queue of all machines: it holds when each key is due.

The laws. A key has at most one timer; setting it again replaces it. Timers that are due at the same moment
fire in the order in which they were set. A cancelled or replaced timer stays in the queue until it comes
first, or until there are as many dead timers as live ones; then the queue is rebuilt.

Most timers have the same length, so each is due after those that were set before it: these are kept in a
line. Only a timer that is due before the last one in the line goes into a heap.

A timer measures a length of time (`when`) and may have a limit on the wall clock (`until`, an expiry). When
the wall clock is set, `shift` moves the lengths and keeps the limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Final, Generic, TypeAlias, TypeVar

from duly.core.units import FOREVER

K = TypeVar("K", bound=Hashable)

SPARE: Final = 64
"""How many timers the line and the heap may each hold, besides twice as many as were alive at the last
cleanup."""

_Timer: TypeAlias = tuple[int, int, K, int, int]
"""Due time, serial number, key, `when`, `until`. The serial number is unique, so keys are never compared."""


class Timers(Generic[K]):
    """Timers by key, in microseconds.

    >>> timers = Timers[str]()
    >>> timers.set("resend", 30)
    >>> timers.set("give up", 100, until=50)
    >>> timers.shift(10)
    >>> timers.next_wake(), list(timers.due(60))
    (40, ['resend', 'give up'])
    """

    __slots__ = ("_heap", "_last", "_line", "_live", "_most", "_serial")

    def __init__(self) -> None:
        self._live: dict[K, _Timer[K]] = {}
        self._line: deque[_Timer[K]] = deque()
        self._last = -FOREVER
        """when the last timer in the line is due"""
        self._heap: list[_Timer[K]] = []
        self._serial = 0
        self._most = SPARE

    def set(self, key: K, when: int, until: int = FOREVER) -> None:
        """Set or replace the timer of `key`. It is due at `when`, which moves with the wall clock, or at
        `until`, which does not. With `FOREVER` for both there is no timer."""
        due = min(until, when)
        if due >= FOREVER:
            self.cancel(key)
            return
        self._serial = serial = self._serial + 1
        self._live[key] = timer = (due, serial, key, when, until)
        if due >= self._last:
            self._last = due
            self._line.append(timer)
            queued = len(self._line)
        else:
            heappush(self._heap, timer)
            queued = len(self._heap)
        if queued > self._most:
            self._tidy()

    def cancel(self, key: K) -> None:
        """Remove the timer of `key`; harmless if it has none."""
        self._live.pop(key, None)

    def get(self, key: K) -> int | None:
        """Return when the timer of `key` is due, or None."""
        timer = self._live.get(key)
        return None if timer is None else timer[0]

    def first(self) -> tuple[K, int] | None:
        """Return the key of the next timer and when it is due, or None."""
        timer = self._first()
        return None if timer is None else (timer[2], timer[0])

    def next_wake(self) -> int | None:
        """Return when the next timer is due, or None."""
        if not self._live:
            return None
        timer = self._first()
        return None if timer is None else timer[0]

    def pop(self, now: int) -> K | None:
        """Remove the next timer that is due at `now` and return its key, or None."""
        timer = self._first()
        if timer is None or timer[0] > now:
            return None
        del self._live[timer[2]]
        return timer[2]

    def due(self, now: int) -> Iterator[K]:
        """Remove and yield the keys that are due at `now`. Timers may be set and cancelled meanwhile."""
        while (key := self.pop(now)) is not None:
            yield key

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set: timers keep their length."""
        for key, (_, serial, _, when, until) in self._live.items():
            moved = when + by if when < FOREVER else FOREVER
            self._live[key] = (min(moved, until), serial, key, moved, until)
        self._tidy()

    def clear(self) -> None:
        """Remove every timer."""
        self._live.clear()
        self._tidy()

    def _first(self) -> _Timer[K] | None:
        """Return the first live timer, after removing the dead ones before it."""
        live, line, heap = self._live, self._line, self._heap
        while line and live.get(line[0][2]) is not line[0]:
            line.popleft()
        while heap and live.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        if not line:
            self._last = -FOREVER
            return heap[0] if heap else None
        return heap[0] if heap and heap[0] < line[0] else line[0]

    def _tidy(self) -> None:
        self._line = deque(sorted(self._live.values()))
        self._last = self._line[-1][0] if self._line else -FOREVER
        self._heap = []
        self._most = 2 * len(self._line) + SPARE

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[K]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)
