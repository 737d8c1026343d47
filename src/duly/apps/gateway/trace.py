"""The trace: what happened to each of the newest commands at this hub, hop by hop, in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from duly.core.units import MS
from duly.runtime.clock import Clock

TRACES_KEPT: Final = 5_000
HOPS_KEPT: Final = 50


class Hop(Struct, frozen=True, gc=False):
    """Something that happened to a command, when (ms), and in which attempt."""

    time: int
    what: str
    attempt: int = 0


class TraceLog:
    """The hops of the newest commands, by key. They are kept as they are noted: there are three to a command,
    and few are ever asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._traces: OrderedDict[bytes, list[tuple[int, str, int]]] = OrderedDict()

    def note(self, key: bytes, what: str, attempt: int = 0) -> None:
        """Notes that this happened to a command, now."""
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = []
            if len(self._traces) > TRACES_KEPT:
                self._traces.popitem(last=False)
        if len(trace) < HOPS_KEPT:
            trace.append((self._clock.now(), what, attempt))

    def of(self, key: bytes) -> list[Hop]:
        """What happened to a command, in order."""
        return [Hop(at // MS, what, attempt) for at, what, attempt in self._traces.get(key, ())]
