"""A queue that many senders share fairly.

The law: senders take turns, so that a sender that floods the queue delays each of the others by one item, not
by the whole flood. The items of one sender keep their order of arrival. Each sender has a share, in items and
bytes. The queue is full for a sender that has used up its share; when the whole queue is full, it is full for
every sender that already has an item in it.

Items without a sender (answers of recipients, connects and disconnects) get every second turn and have no
share, because they finish work, whereas the other items start it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

NO_SENDER: Final = ""


class _Share(Generic[T]):
    """The items of one sender in the queue with their sizes, and the sum of the sizes."""

    __slots__ = ("items", "sender", "size")

    def __init__(self, sender: str) -> None:
        self.sender = sender
        self.items: deque[tuple[T, int]] = deque()
        self.size = 0


class FairQueue(Generic[T]):
    """A queue of items by sender.

    >>> queue = FairQueue()
    >>> for sender, item in (("ann", 1), ("ann", 2), ("ann", 3), ("bob", 4)):
    ...     queue.append(sender, item)
    >>> queue.take(4)
    ([1, 4, 2, 3], 0)
    """

    def __init__(
        self, *, capacity: int = 10_000, share: int = 1_000, share_bytes: int = 4 * 1024 * 1024
    ) -> None:
        self._capacity = capacity
        self._share = min(share, capacity)
        self._share_bytes = share_bytes
        self._unsent: deque[tuple[T, int]] = deque()
        self._turn = False
        """whether the next item is one without a sender"""
        self._shares: dict[str, _Share[T]] = {}
        self._turns: deque[_Share[T]] = deque()
        self._length = 0
        self.reserved = 0
        """how much of the room is kept free for items without a sender"""
        self.barred: Container[str] = ()
        """senders whose offers are refused, because earlier items of theirs wait outside for room"""

    def room(self, sender: str) -> int:
        """Return how many more items of this sender fit."""
        if sender == NO_SENDER:
            return self._capacity - len(self._unsent) - self.reserved
        share = self._shares.get(sender)
        if share is None:
            return self._share
        if self._length >= self._capacity or share.size >= self._share_bytes:
            return 0
        return self._share - len(share.items)

    def offer(self, sender: str, item: T, size: int) -> bool:
        """Add an item if there is room, and return whether there was."""
        if sender in self.barred:
            return False
        share = self._shares.get(sender)
        if share is None:
            if sender == NO_SENDER and len(self._unsent) + self.reserved >= self._capacity:
                return False
            self.append(sender, item, size)
            return True
        items = share.items
        if self._length >= self._capacity or share.size >= self._share_bytes or len(items) >= self._share:
            return False
        self._length += 1
        items.append((item, size))
        share.size += size
        return True

    def append(self, sender: str, item: T, size: int = 0) -> None:
        """Add an item of this sender, whether or not there is room."""
        self._length += 1
        if sender == NO_SENDER:
            self._unsent.append((item, size))
            return
        share = self._shares.get(sender)
        if share is None:
            share = self._shares[sender] = _Share(sender)
            self._turns.append(share)
        share.items.append((item, size))
        share.size += size

    def take(self, most: int, most_bytes: int = 1 << 62) -> tuple[list[T], int]:
        """Remove the next items, senders taking turns, and return them with the sum of their sizes. Returns
        at most this many, and stops once the sum has reached `most_bytes`."""
        unsent, turns, turn = self._unsent, self._turns, self._turn
        taken: list[T] = []
        total = 0
        for _ in range(min(most, self._length)):
            if total >= most_bytes:
                break
            if unsent and (turn or not turns):
                turn = False
                item, size = unsent.popleft()
            else:
                turn = True
                share = turns[0]
                item, size = share.items.popleft()
                share.size -= size
                if not share.items:
                    turns.popleft()
                    del self._shares[share.sender]
                elif len(turns) > 1:
                    turns.rotate(-1)
            taken.append(item)
            total += size
        self._turn = turn
        self._length -= len(taken)
        return taken, total

    def put_back(self, items: Iterable[T]) -> None:
        """Put items without a sender that were taken out back at the front."""
        again = [(item, 0) for item in items]
        self._unsent.extendleft(reversed(again))
        self._length += len(again)

    def clear(self) -> None:
        """Remove every item."""
        for part in (self._unsent, self._shares, self._turns):
            part.clear()
        self._length = 0

    def __iter__(self) -> Iterator[T]:
        yield from (item for item, _ in self._unsent)
        for share in self._shares.values():
            yield from (item for item, _ in share.items)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0
