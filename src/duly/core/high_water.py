"""Marks: how far each sender has come in each lane, and what that would be without what failed.

The law: a mark is raised when a message is handed over, so what only waits does not count. A message that
fails takes its mark down again, to the newest one before it that is done, under way or unknown: an older
message that comes late is superseded by what took effect, never by what did not.

What is here is a copy. The ledger's own mark decides when a message starts, and moves the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Final

import msgspec

from duly.core.messages import Message
from duly.core.operations import is_later

MARKS_KEPT: Final = 100_000

_FLOOR: Final = b""
"""Stands for what was there before anything that is under way."""
_NOTHING: Final = (-1, 0, 0)


class HighWaterMarks:
    """The marks of one inbox."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._going: dict[str, dict[bytes, tuple[int, int, int]]] = {}
        """what is under way under a mark: (number, ms, turn) by key, in the order it was handed over; before
        them the floor, which is the newest that counts of what has ended"""
        self._turn = 0
        """how many were handed over"""
        self._last: dict[str, int] = {}
        self._of: dict[str, set[str]] = {}
        """the marks of each recipient"""

    def get(self, mark: str) -> tuple[int, int] | None:
        """Return (number, ms) of the newest message handed over that counts; None: none is known."""
        return self._at.get(mark)

    def last(self, mark: str) -> int:
        """Return the number last handed over, which the next message comes after; -1: none is known."""
        return self._last.get(mark, -1)

    def follow(self, mark: str, n: int) -> int:
        """Record that this number is handed over, and return the one before it; -1: none is known."""
        last = self._last.get(mark, -1)
        self._last[mark] = n
        return last

    def is_late(self, mark: str, n: int, ms: int) -> bool:
        """Return whether a later message that counts was handed over."""
        return not is_later(n, ms, self._at.get(mark))

    def restore(self, mark: str, n: int, ms: int) -> None:
        """Set a mark to the ledger's value. A message that was under way before is not known, and counts
        even if it fails."""
        self._at[mark] = (n, ms)
        self._last[mark] = n
        self._going.pop(mark, None)
        self._of.setdefault(names_in(mark)[0], set()).add(mark)

    def hand_over(self, mark: str, key: bytes, n: int, ms: int) -> bool:
        """Raise a mark for a message that is handed over; return False if a later one was handed over
        before."""
        before = self._at.get(mark)
        if not is_later(n, ms, before):
            return False
        self._at[mark] = (n, max(ms, before[1]) if before else ms)
        self._turn += 1
        going = self._going.get(mark)
        if going is None:
            floor = (*before, 0) if before else _NOTHING
            self._going[mark] = {_FLOOR: floor, key: (n, ms, self._turn)}
        else:
            going[key] = (n, ms, self._turn)
        if before is None:
            self._of.setdefault(names_in(mark)[0], set()).add(mark)
        self._at.move_to_end(mark)
        if len(self._at) > MARKS_KEPT:
            self._forget(next(iter(self._at)))
        return True

    def without(self, mark: str, key: bytes) -> tuple[int, int] | None:
        """Where the ledger's mark belongs if this message fails; None if it stays where it is.

        A later time than anything before lets the ledger take a lower number for later, as it does for a
        sender that counts anew. Of two with one number, which only their times set apart, it takes one lower.
        """
        before = self._before(mark, key)
        if before is None:
            return None
        n, top = self._at[mark]
        return before[0] - (before[0] == n), top + 1

    def _before(self, mark: str, key: bytes) -> tuple[int, int] | None:
        """(number, ms) of the newest that counts before a message, if that is the newest of all."""
        going = self._going.get(mark)
        if going is None:
            return None
        newest = reversed(going)
        if next(newest) != key or key == _FLOOR:
            return None
        floor, before = going[_FLOOR], going[next(newest)]
        if going[key][2] < floor[2]:
            return None
        n, ms, _ = before if before[2] > floor[2] else floor
        return n, ms

    def settled(self, mark: str, key: bytes, *, counts: bool) -> None:
        """Record the end of a message that was handed over; it counts unless it failed."""
        going = self._going.get(mark)
        ended = None if going is None else going.get(key)
        if going is None or ended is None:
            return
        if counts:
            if ended[2] > going[_FLOOR][2]:
                going[_FLOOR] = ended  # nothing before it matters any more
        elif (before := self._before(mark, key)) is not None:
            n, top = self._at[mark]
            self._at[mark] = before if before[0] == n else (before[0], top + 1)
        del going[key]
        if len(going) < 2:
            del self._going[mark]

    def forget(self, recipient: str) -> set[str]:
        """Drop what is known of a recipient's lanes, and return their marks."""
        marks = self._of.pop(recipient, set())
        for mark in marks:
            self._at.pop(mark, None)
            self._last.pop(mark, None)
            self._going.pop(mark, None)
        return marks

    def _forget(self, mark: str) -> None:
        del self._at[mark]
        self._last.pop(mark, None)
        self._going.pop(mark, None)
        self._of.get(names_in(mark)[0], set()).discard(mark)


def mark_name(message: Message) -> str:
    """The name of the durable high-water mark of one sender in one lane.

    >>> from duly.core.messages import Order
    >>> mark_name(Message("app-1", "x", "k", "lamp", order=Order("power")))
    '["lamp","power","app-1"]'
    """
    order = message.order
    return name_of(message.recipient, "" if order is None else order.key, message.scope)


def names_in(mark: str) -> tuple[str, str, str]:
    """Return (recipient, order key, scope) of a mark's name."""
    return msgspec.json.decode(mark, type=tuple[str, str, str])


@lru_cache(maxsize=4096)
def name_of(recipient: str, key: str, scope: str) -> str:
    """Return the name of the mark of one sender (`scope`) in one lane."""
    return msgspec.json.encode((recipient, key, scope)).decode()
