"""An event loop whose clock stands still while there is no processor for its thread.

Hubs, clients and tests of one process share this loop, with all their timers: how long a device may take to
answer, when something is sent again, for how long a test looks that nothing happens. On a machine with other
work the process gets a fraction of the time, and such a timer would ring although nothing was late but the
processor. Linux tells for how long a thread was ready to run and others ran; that time is left out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Final

from duly.core.units import SECOND
from duly.runtime.clock import SystemClock

BRIEF: Final = 0.002
"""Seconds that are not looked into: reading a waiting time takes as long as a turn of the loop."""


class PatientLoop(asyncio.SelectorEventLoop):
    """The loop of the tests."""

    _schedstat: int | None = None
    """The file with the waiting times of the thread that runs it, while one does."""
    _waited = 0.0
    """How long this thread had waited when that was last read."""
    _read_at = 0.0
    _left_out = 0.0
    _latest = 0.0

    def run_forever(self) -> None:
        """Run until it is stopped, and read the waiting times of this thread meanwhile."""
        if sys.platform != "linux":
            super().run_forever()
            return
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._waited = self._read(self._schedstat)
        try:
            super().run_forever()
        finally:
            os.close(self._schedstat)
            self._schedstat = None

    def time(self) -> float:
        """Seconds of a monotonic clock, without those in which the thread waited for a processor."""
        now = time.monotonic()
        if now - self._read_at > BRIEF and self._schedstat is not None:
            waited = self._read(self._schedstat)
            self._left_out += waited - self._waited
            self._waited, self._read_at = waited, now
        self._latest = max(self._latest, now - self._left_out)
        return self._latest

    @staticmethod
    def _read(schedstat: int) -> float:
        return int(os.pread(schedstat, 64, 0).split()[1]) / 1e9


class PatientPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes such loops, also for `asyncio.run`."""

    _loop_factory = PatientLoop


class PatientClock(SystemClock):
    """A clock of the machine that passes with the running loop: for a hub that waits for a device for less
    time than a busy machine takes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._now, self._steady = super().now(), super().steady()

    def now(self) -> int:
        """The time of the operating system when it was made, and what has passed since."""
        return self._now + self._passed()

    def steady(self) -> int:
        """The time since the machine started when it was made, and what has passed since."""
        return self._steady + self._passed()

    def _passed(self) -> int:
        return round((self._loop.time() - self._began) * SECOND)
