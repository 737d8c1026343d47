"""One lane: what is under way in it, and what waits for its turn.

The law: what has ended while it waited takes no turn, and no room to speak of.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import Struct

from duly.core.messages import Message

TIDY_AFTER: Final = 32
"""Messages that have ended and may lie in a lane's queue, besides half of what is queued."""


class Release(Struct, frozen=True, gc=False):
    """This message's turn. `n` and `ms` are what its lane's mark is raised to; `after` is the number
    that went before it in the lane, -1 if none is known."""

    message: Message
    mark: str
    n: int
    ms: int
    after: int


class Lane:
    """A lane that has something under way, or queues."""

    __slots__ = ("_over", "holders", "queue", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        """how many may be under way at once; 0: nobody counts"""
        self.holders: set[bytes] = set()
        self.queue: deque[Release] = deque()
        self._over: set[bytes] = set()
        """keys of what is still queued and has ended"""

    def drop(self, key: bytes) -> None:
        """A queued message has ended: it expired, or was cancelled."""
        if self.queue:
            self._over.add(key)
            if len(self._over) > len(self.queue) // 2 + TIDY_AFTER:
                self.queue = deque(queued for queued in self.queue if queued.message.key not in self._over)
                self._over.clear()

    def next(self) -> Release | None:
        """The next that has not ended."""
        while self.queue:
            queued = self.queue.popleft()
            if queued.message.key not in self._over:
                return queued
            self._over.discard(queued.message.key)
        self._over.clear()
        return None

    @property
    def free(self) -> bool:
        return not self.width or len(self.holders) < self.width
