"""The memory of what is being read: bodies of requests, and incomplete frames.

The laws. All of it together is bounded, and so is what one account, or one address that has not
authenticated, holds of it. When it runs short, the client that holds most makes room: the oldest of what is
still being read for it is given up. So a client that asks for little is served, however many others hold
much, and a client that holds most itself is told to come back. What has come whole is worked on, and makes no
room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web

from duly.errors import Overloaded

ALL_LIMIT: Final = 128 * 1024 * 1024
"""The bytes of all clients together."""
SHARES: Final = 4
"""One client may hold this part of it: four bodies of the largest size."""


class Reading:
    """What one request or connection holds; `give_up` ends it, while it is still being read."""

    __slots__ = ("give_up", "is_whole", "owner", "size")

    def __init__(self, owner: str, give_up: Callable[[], None]) -> None:
        self.owner = owner
        self.give_up = give_up
        self.size = 0
        self.is_whole = False


class _Owner:
    """The memory that one client holds."""

    __slots__ = ("size", "unfinished", "unfinished_size")

    def __init__(self) -> None:
        self.size = 0
        self.unfinished_size = 0
        self.unfinished: dict[Reading, None] = {}
        """what is still being read, the oldest first"""


class ReadMemory:
    """The memory of one hub.

    >>> memory = ReadMemory(100)
    >>> memory.resize(Reading("eve", print), 25)
    >>> memory.resize(Reading("eve", print), 1)
    Traceback (most recent call last):
    duly.errors.Overloaded: you are sending too much at the same time; try again in a moment
    """

    def __init__(self, limit: int = ALL_LIMIT) -> None:
        self._limit = limit
        self._share = limit // SHARES
        self._owners: dict[str, _Owner] = {}
        self._by_size: list[dict[str, None]] = [{} for _ in range(self._share.bit_length() + 1)]
        """the owners of what is still being read, by the bits of its size: the largest is found at once"""
        self.taken = 0
        """bytes that are held now"""

    def resize(self, reading: Reading, size: int) -> None:
        """Reserve as much as a reading holds from now on; raises `Overloaded` if there is no room."""
        more = size - reading.size
        if more > 0:
            self._make_room(reading.owner, more)
        owner = self._owners.setdefault(reading.owner, _Owner())
        owner.unfinished[reading] = None
        reading.size = size
        self._change(reading.owner, owner, more, more)

    def complete(self, reading: Reading) -> None:
        """Note that it is complete: it keeps its memory until it is processed."""
        owner = self._owners.get(reading.owner)
        if owner is not None and reading in owner.unfinished:
            del owner.unfinished[reading]
            reading.is_whole = True
            self._change(reading.owner, owner, 0, -reading.size)

    def end(self, reading: Reading) -> None:
        """Release all that a reading holds; harmless if it holds nothing."""
        owner = self._owners.get(reading.owner)
        if owner is not None and (reading.is_whole or reading in owner.unfinished):
            owner.unfinished.pop(reading, None)
            self._change(reading.owner, owner, -reading.size, 0 if reading.is_whole else -reading.size)
            reading.size, reading.is_whole = 0, False

    def _change(self, name: str, owner: _Owner, more: int, more_unfinished: int) -> None:
        self._by_size[owner.unfinished_size.bit_length()].pop(name, None)
        self.taken += more
        owner.size += more
        owner.unfinished_size += more_unfinished
        if owner.unfinished:
            self._by_size[owner.unfinished_size.bit_length()][name] = None
        elif not owner.size:
            del self._owners[name]

    def _make_room(self, name: str, more: int) -> None:
        owner = self._owners.get(name)
        wanted = more if owner is None else owner.size + more
        if wanted > self._share:
            raise Overloaded("you are sending too much at the same time; try again in a moment")
        while self.taken + more > self._limit:
            largest = self._largest()
            if largest is None or largest.unfinished_size <= wanted:
                raise Overloaded("the hub is busy with large requests; try again in a moment")
            first = next(iter(largest.unfinished))
            self.end(first)
            first.give_up()

    def _largest(self) -> _Owner | None:
        """Return one of those that hold most of what is being read: no other holds twice as much."""
        for names in reversed(self._by_size):
            if names:
                return self._owners[next(iter(names))]
        return None


MEMORY: Final = web.AppKey("read_memory", ReadMemory)
