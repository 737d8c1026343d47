"""Measures how long something took, without the time for which there was no processor for it.

A test may demand that something is fast. On a machine with other work everything takes many times as long, so
it must not count the time in which a process was ready to run and others ran; Linux tells how long that was.
"""

from __future__ import annotations

import os
import time
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
