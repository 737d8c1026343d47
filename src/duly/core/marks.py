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
from duly.core.writes import is_later

MARKS_KEPT: Final = 100_000

_FLOOR: Final = b""
"""Stands for what was there before anything that is under way."""
_NOTHING: Final = (-1, 0)


class Marks:
    """The marks of one inbox."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._going: dict[str, dict[bytes, tuple[int, int]]] = {}
        """what is under way under a mark, by key, in the order it was handed over; first the floor"""
        self._last: dict[str, int] = {}
        self._of: dict[str, set[str]] = {}
        """the marks of each recipient"""

    def __contains__(self, mark: str) -> bool:
        return mark in self._at

    def get(self, mark: str) -> tuple[int, int] | None:
        """(number, ms) of the newest message handed over that counts."""
        return self._at.get(mark)

    def last(self, mark: str) -> int:
        """The number last handed over: what a receiver is told came before. -1 if none is known."""
        return self._last.get(mark, -1)

    def follow(self, mark: str, n: int) -> None:
        self._last[mark] = n

    def is_late(self, mark: str, n: int, ms: int) -> bool:
        """Whether something later was handed over, and counts."""
        return not is_later(n, ms, self._at.get(mark))

    def restore(self, mark: str, n: int, ms: int) -> None:
        """What the ledger says. What is under way since before is not known, and counts if it fails, too."""
        self._at[mark] = (n, ms)
        self._last[mark] = n
        self._going.pop(mark, None)
        self._of.setdefault(names_in(mark)[0], set()).add(mark)

    def hand_over(self, mark: str, key: bytes, n: int, ms: int) -> bool:
        """Raise a mark for a message that is handed over; False if something later was before it."""
        before = self._at.get(mark)
        if not is_later(n, ms, before):
            return False
        self._at[mark] = (n, max(ms, before[1]) if before else ms)
        going = self._going.get(mark)
        if going is None:
            self._going[mark] = {_FLOOR: before or _NOTHING, key: (n, ms)}
        else:
            going[key] = (n, ms)
        if before is None:
            self._of.setdefault(names_in(mark)[0], set()).add(mark)
        self._at.move_to_end(mark)
        if len(self._at) > MARKS_KEPT:
            self._forget(next(iter(self._at)))
        return True

    def without(self, mark: str, key: bytes) -> tuple[int, int] | None:
        """Where the mark belongs if this message fails; None if it stays where it is.

        A later time than anything before lets the ledger take a lower number for later, as it does for a
        sender that counts anew.
        """
        going = self._going.get(mark)
        if going is None or next(reversed(going)) != key or len(going) < 2:
            return None
        newest = reversed(going)
        next(newest)
        n, _ = going[next(newest)]
        return n, self._at[mark][1] + 1

    def settled(self, mark: str, key: bytes, *, counts: bool) -> None:
        """A message that was handed over has ended; it counts unless it failed."""
        going = self._going.get(mark)
        if going is None or key not in going:
            return
        if not counts:
            lower = self.without(mark, key)
            del going[key]
            if lower is not None:
                self._at[mark] = lower
        elif next(reversed(going)) == key:
            going.clear()  # nothing before it matters any more
        else:
            done = going[key]
            later = list(going.items())[list(going).index(key) + 1 :]
            going.clear()
            going[_FLOOR] = done
            going.update(later)
        if len(going) < 2:
            del self._going[mark]

    def forget(self, recipient: str) -> set[str]:
        """Drop what is known of a recipient's lanes; their marks."""
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
    """(recipient, order key, scope) of a mark's name."""
    return msgspec.json.decode(mark, type=tuple[str, str, str])


@lru_cache(maxsize=4096)
def name_of(recipient: str, key: str, scope: str) -> str:
    return msgspec.json.encode((recipient, key, scope)).decode()
