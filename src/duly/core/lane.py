"""A lane: the messages to one recipient under one order key, those under way and those queued.

The law: queued messages of one sender are in that sender's order, including late ones; those of different
senders are in order of arrival. A message that has ended while it was queued is skipped, and supersedes none.

`duly.core.ordering` decides which message of a lane may move.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

from msgspec import Struct

from duly.core.messages import Message, Mode
from duly.core.operations import is_later

TIDY_AFTER: Final = 32
"""How many ended messages may remain in a lane's queue, besides as many as wait in it."""


class Release(Struct, frozen=True, gc=False):
    """A message whose turn has come. `n` and `ms` are the position to which the mark of its lane is raised;
    `after` is the number before it in the lane, or -1 if none is known."""

    message: Message
    mark: str
    n: int
    ms: int
    after: int


class Supersede(Struct, frozen=True):
    """A message that must not take effect any more. For a late message `mark` is set, because several hubs
    may raise the mark and only the ledger can decide."""

    message: Message
    reason: str
    mark: str = ""
    n: int = 0
    ms: int = 0


Move: TypeAlias = Release | Supersede


class Lane:
    """The messages under way and the queue of one lane."""

    __slots__ = ("_newest", "_queue", "_waiting", "holders", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        """how many messages may be under way at once; 0: no limit"""
        self.holders: set[bytes] = set()
        self._queue: deque[Release] = deque()
        self._waiting: dict[bytes, Release] = {}
        """the queued messages that have not ended, by key"""
        self._newest: dict[str, tuple[int, int]] = {}
        """the position of the newest queued message, by mark"""

    def add(self, release: Release) -> None:
        """Queue a message behind the others, but before later messages from the same sender."""
        mark, at = release.mark, (release.n, release.ms)
        queue = self._queue
        place = len(queue)
        newest = self._newest.get(mark) if mark else None
        if newest is not None and precedes(at, newest):
            for i in range(len(queue) - 1, -1, -1):
                if queue[i].mark == mark:
                    if not precedes(at, (queue[i].n, queue[i].ms)):
                        break
                    place = i
        else:
            self._newest[mark] = at
        queue.insert(place, release)
        self._waiting[release.message.key] = release

    def drop(self, key: bytes) -> None:
        """Remove a queued message that has ended; harmless if it is not queued."""
        ended = self._waiting.pop(key, None)
        if ended is not None and len(self._queue) > 2 * len(self._waiting) + TIDY_AFTER:
            self._queue = deque(queued for queued in self._queue if self._waits(queued))

    def peek(self, now: int) -> Release | None:
        """Return the message that would be handed over next, without removing it."""
        for queued in self._queue:
            if self._waits(queued) and not is_over(queued, now):
                return queued
        return None

    def pop(self) -> Release:
        """Remove and return the next message that has not ended; the lane must not be empty."""
        while not self._waits(queued := self._queue.popleft()):
            pass
        del self._waiting[queued.message.key]
        return queued

    def _waits(self, queued: Release) -> bool:
        return self._waiting.get(queued.message.key) is queued

    @property
    def waiting(self) -> int:
        """The number of messages queued here."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether no message is queued here."""
        return not self._waiting

    @property
    def free(self) -> bool:
        """Whether another message may be under way."""
        return not self.width or len(self.holders) < self.width


def lane_key(message: Message) -> str | None:
    """Return the order key of a message's lane; None for messages without order, which share one queue."""
    order = message.order
    return None if order is None or order.mode is Mode.ANY else order.key


def is_latest(release: Release) -> bool:
    """Return whether the message's mode is `latest`: only the newest of its order key takes effect."""
    order = release.message.order
    return order is not None and order.mode is Mode.LATEST


def is_over(release: Release, now: int) -> bool:
    """Return whether the message has expired."""
    return 0 < release.message.expires <= now


def precedes(at: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether position `at` comes before `other` in their sender's order."""
    return at != other and not is_later(*at, other)
