"""High-water marks: the newest message of each sender in each lane that was handed over and did not fail.

The law: a mark is raised when a message is handed over; waiting messages do not count. When a message fails,
its mark is lowered to the newest earlier one that is done, under way or unknown. So an older message that
arrives late is superseded only by a message that took effect.

These marks are a copy. The ledger's own mark, which moves in the same way, decides when a message starts.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Final

import msgspec

from duly.core.messages import Message
from duly.core.operations import is_later, lowered

MARKS_KEPT: Final = 100_000

_FLOOR: Final = b""
"""The position before every message that is under way."""
_NOTHING: Final = (-1, 0, 0)


class _HighWaterMark:
    """One mark: its position, the last message handed over, and the messages under way."""

    __slots__ = ("at", "going", "last")

    def __init__(self, at: tuple[int, int], last: int) -> None:
        self.at = at
        self.last = last
        self.going: dict[bytes, tuple[int, int, int]] | None = None
        """messages under way: (number, ms, turn) by key, in the order they were handed over; the first entry
        is the floor, the newest ended message that counts"""


class HighWaterMarks:
    """The marks of one inbox."""

    def __init__(self) -> None:
        self._marks: OrderedDict[str, _HighWaterMark] = OrderedDict()
        self._turn = 0
        """how many messages were handed over"""
        self._of: dict[str, set[str]] = {}
        """the marks by recipient"""

    def get(self, mark: str) -> tuple[int, int] | None:
        """Return (number, ms) of the newest message handed over that counts, or None."""
        one = self._marks.get(mark)
        return None if one is None else one.at

    def last(self, mark: str) -> int:
        """Return the number of the message handed over last, or -1 if none is known."""
        one = self._marks.get(mark)
        return -1 if one is None else one.last

    def is_late(self, mark: str, n: int, ms: int) -> bool:
        """Return whether a later message that counts was handed over."""
        return not is_later(n, ms, self.get(mark))

    def restore(self, mark: str, n: int, ms: int) -> None:
        """Set a mark to the ledger's value. Messages that were under way before are not known, and count even
        if they fail."""
        self._marks[mark] = _HighWaterMark((n, ms), n)
        self._of.setdefault(names_in(mark)[0], set()).add(mark)

    def hand_over(self, mark: str, key: bytes, n: int, ms: int) -> int | None:
        """Raise a mark for a message that is handed over, and return the number handed over before it (-1 if
        none is known). Returns None if a later message was handed over already."""
        self._turn = turn = self._turn + 1
        one = self._marks.get(mark)
        if one is None:
            one = self._add(mark, (n, ms), n)
            one.going = {_FLOOR: _NOTHING, key: (n, ms, turn)}
            return -1
        if not is_later(n, ms, one.at):
            return None
        (top, top_ms), last = one.at, one.last
        if one.going is None:
            one.going = {_FLOOR: (top, top_ms, 0)}
        one.going[key] = (n, ms, turn)
        one.at = (n, max(top_ms, ms))
        one.last = n
        self._marks.move_to_end(mark)
        return last

    def _add(self, mark: str, at: tuple[int, int], last: int) -> _HighWaterMark:
        one = self._marks[mark] = _HighWaterMark(at, last)
        self._of.setdefault(names_in(mark)[0], set()).add(mark)
        if len(self._marks) > MARKS_KEPT:
            oldest, _ = self._marks.popitem(last=False)
            self._of.get(names_in(oldest)[0], set()).discard(oldest)
        return one

    def without(self, mark: str, key: bytes) -> tuple[int, int] | None:
        """Return the position to which the ledger's mark is lowered if this message fails; None if it stays.

        If its time is later than all before, the ledger accepts a lower number as the newer one, as it does
        for a sender that starts counting again. Of two messages with the same number and different times, the
        earlier one is returned.
        """
        before = self._before(mark, key)
        if before is None:
            return None
        n, top = self._marks[mark].at
        return before[0] - (before[0] == n), top + 1

    def _before(self, mark: str, key: bytes) -> tuple[int, int] | None:
        """Return (number, ms) of the newest message that counts before this one, if this one is the newest of
        all."""
        one = self._marks.get(mark)
        going = None if one is None else one.going
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

    def settled(self, mark: str, key: bytes, counts: bool) -> None:
        """Record the end of a message that was handed over; it counts unless it failed."""
        one = self._marks.get(mark)
        going = None if one is None else one.going
        if one is None or going is None or key not in going:
            return
        if counts:
            ended = going.pop(key)
            if ended[2] > going[_FLOOR][2]:
                going[_FLOOR] = ended  # earlier messages no longer matter
        else:
            if (before := self._before(mark, key)) is not None:
                n, top = one.at
                one.at = before if before[0] == n else (before[0], top + 1)
            del going[key]
        if len(going) < 2:
            one.going = None

    def lower(self, limit: int) -> None:
        """Lower times that are later than `limit`."""
        for one in self._marks.values():
            before, one.at = one.at[0], lowered(*one.at, limit)
            if one.last == before:
                one.last = one.at[0]
            if one.going is not None:
                one.going = {key: (*lowered(n, ms, limit), turn) for key, (n, ms, turn) in one.going.items()}

    def forget(self, recipient: str) -> set[str]:
        """Drop the marks of a recipient's lanes, and return them."""
        marks = self._of.pop(recipient, set())
        for mark in marks:
            self._marks.pop(mark, None)
        return marks


def mark_name(message: Message) -> str:
    """Return the name of the durable high-water mark of one sender in one lane.

    >>> from duly.core.messages import Order
    >>> mark_name(Message("app-1", "x", "k", "lamp", order=Order("power")))
    '["lamp","power","app-1"]'
    """
    order = message.order
    return name_of(message.recipient, "" if order is None else order.key, message.scope)


def names_in(mark: str) -> tuple[str, str, str]:
    """Return (recipient, order key, scope) from the name of a mark."""
    return msgspec.json.decode(mark, type=tuple[str, str, str])


@lru_cache(maxsize=4096)
def name_of(recipient: str, key: str, scope: str) -> str:
    """Return the name of the mark of one sender (`scope`) in one lane."""
    return msgspec.json.encode((recipient, key, scope)).decode()
