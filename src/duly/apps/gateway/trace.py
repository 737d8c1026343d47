"""The trace: what happened to each of the newest commands at this hub, hop by hop, in memory."""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import Struct

from duly.core.units import MS
from duly.runtime.clock import Clock

HOPS_KEPT: Final = 15_000
"""A command has three hops, if all goes well."""


class Hop(Struct, frozen=True, gc=False):
    """Something that happened to a command, when (ms), and in which attempt."""

    time: int
    what: str
    attempt: int = 0


class TraceLog:
    """The newest hops of all commands, in a ring. A command's own are picked out when it is asked for: there
    are three to a command, and few are ever asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hops: deque[tuple[bytes, int, str, int]] = deque(maxlen=HOPS_KEPT)

    def note(self, key: bytes, what: str, attempt: int = 0) -> None:
        """Note that this happened to a command, now."""
        self._hops.append((key, self._clock.now(), what, attempt))

    def of(self, key: bytes) -> list[Hop]:
        """Return what happened to a command, in order."""
        return [Hop(at // MS, what, attempt) for noted, at, what, attempt in self._hops if noted == key]
