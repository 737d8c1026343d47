"""Measures how long something took, without the time for which there was no processor for it.

A test may demand that something is fast. On a machine with other work everything takes many times as long, so
it must not count the time in which a process was ready to run and others ran; Linux tells how long that was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


def stalled(pid: int) -> float:
    """For how many seconds the main thread of a process has waited for a processor."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Stopwatch:
    """Runs from the moment it is made. `others` are processes that take part, besides this one."""

    def __init__(self, *others: int) -> None:
        self._stalled = {pid: stalled(pid) for pid in (os.getpid(), *others)}
        self._began = time.monotonic()

    @property
    def wall(self) -> float:
        """All seconds since then."""
        return time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        """The seconds since then in which there was a processor for each of them."""
        # A process that has ended says nothing any more.
        return self.wall - sum(max(0.0, stalled(pid) - before) for pid, before in self._stalled.items())


class MachineStopwatch:
    """Leaves out the time in which anything on this machine waited for a processor.

    For what other processes take part in that come and go, or are not children of this one: brokers,
    databases, `curl`. On a quiet machine it measures all of the time, and beside other work little of it."""

    def __init__(self) -> None:
        self._pressed = _pressed()
        self._began = time.monotonic()

    @property
    def wall(self) -> float:
        """All seconds since it was made."""
        return time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        """The seconds since it was made in which there was a processor for everything."""
        return max(0.0, self.wall - (_pressed() - self._pressed))


def _pressed() -> float:
    """For how many seconds something on this machine was ready to run, and other things ran."""
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(some.rpartition("=")[2]) / 1e6


class FamilyStopwatch:
    """Leaves out the time for which this process, or one of those that it has started, had no processor.

    They come and go, so it has to be read again and again: `seconds` is added up from one reading to the
    next. Of several that waited at the same time, the one that waited longest counts.
    """

    def __init__(self) -> None:
        self._stalled = {pid: stalled(pid) for pid in family(os.getpid())}
        self._read = time.monotonic()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The seconds since it was made in which there was a processor for all of them."""
        before, began = self._stalled, self._read
        self._stalled = {pid: stalled(pid) for pid in family(os.getpid())}
        self._read = time.monotonic()
        waited = max(now - before.get(pid, 0.0) for pid, now in self._stalled.items())
        self._seconds += max(0.0, self._read - began - max(0.0, waited))
        return self._seconds


def family(pid: int) -> Iterator[int]:
    """A process, and all that it or they have started and that still run; on other systems than Linux only
    the process itself is found."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in path.read_text().split():
                yield from family(int(child))
