"""A queue that many senders share fairly.

The law: senders take turns, so that one who floods delays the others by one item each, not by the whole
flood. Within one sender the order is that of arrival. Each has a share, in items and bytes; the queue is full
for a sender whose share is used up, or who has something in it when the whole is.

Items without a sender (answers of recipients, connects and disconnects) get every second turn and have no
share: they end work, where the other items begin it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

NO_SENDER: Final = ""


class FairQueue(Generic[T]):
    """A queue of items by sender.

    >>> queue = FairQueue()
    >>> for sender, item in (("ann", 1), ("ann", 2), ("ann", 3), ("bob", 4)):
    ...     queue.append(sender, item)
    >>> [queue.popleft() for _ in range(4)]
    [1, 4, 2, 3]
    """

    def __init__(
        self, *, capacity: int = 10_000, share: int = 1_000, share_bytes: int = 4 * 1024 * 1024
    ) -> None:
        self._capacity = capacity
        self._share = min(share, capacity)
        self._share_bytes = share_bytes
        self._unsent: deque[T] = deque()
        self._turn = False
        """the next is one without a sender"""
        self._queues: dict[str, deque[tuple[T, int]]] = {}
        self._sizes: dict[str, int] = {}
        self._turns: deque[str] = deque()
        self._length = 0

    def room(self, sender: str) -> int:
        """Return how many more items of this sender fit now."""
        if sender == NO_SENDER:
            return self._capacity - len(self._unsent)
        queue = self._queues.get(sender)
        if queue is None:
            return self._share
        if self._length >= self._capacity or self._sizes[sender] >= self._share_bytes:
            return 0
        return self._share - len(queue)

    def offer(self, sender: str, item: T, size: int, reserved: int) -> bool:
        """Add an item if there is room, and return whether there was. `reserved` is how much of the room
        for items without a sender is kept free."""
        if sender == NO_SENDER:
            if len(self._unsent) + reserved >= self._capacity:
                return False
            self._length += 1
            self._unsent.append(item)
            return True
        queue = self._queues.get(sender)
        if queue is None:
            self.append(sender, item, size)
            return True
        taken = self._sizes[sender]
        if self._length >= self._capacity or taken >= self._share_bytes or len(queue) >= self._share:
            return False
        self._length += 1
        queue.append((item, size))
        self._sizes[sender] = taken + size
        return True

    def append(self, sender: str, item: T, size: int = 0) -> None:
        """Add an item of this sender, whether or not there is room."""
        self._length += 1
        if sender == NO_SENDER:
            self._unsent.append(item)
            return
        queue = self._queues.get(sender)
        if queue is None:
            self._queues[sender] = deque(((item, size),))
            self._sizes[sender] = size
            self._turns.append(sender)
        else:
            queue.append((item, size))
            self._sizes[sender] += size

    def popleft(self) -> T:
        """Remove and return the next item of the sender whose turn it is."""
        turns = self._turns
        self._length -= 1
        if self._unsent and (self._turn or not turns):
            self._turn = False
            return self._unsent.popleft()
        self._turn = True
        sender = turns[0]
        queue = self._queues[sender]
        item, size = queue.popleft()
        if not queue:
            turns.popleft()
            del self._queues[sender], self._sizes[sender]
        else:
            self._sizes[sender] -= size
            if len(turns) > 1:
                turns.rotate(-1)
        return item

    def put_back(self, items: Iterable[T]) -> None:
        """Put items without a sender that were taken out back before the others."""
        again = list(items)
        self._unsent.extendleft(reversed(again))
        self._length += len(again)

    def clear(self) -> None:
        """Remove every item."""
        for part in (self._unsent, self._queues, self._sizes, self._turns):
            part.clear()
        self._length = 0

    def __iter__(self) -> Iterator[T]:
        yield from self._unsent
        for queue in self._queues.values():
            yield from (item for item, _ in queue)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0
