"""Measures the disk, to decide whether the event loop may wait for a flush itself.

Passing a flush to the writer thread and getting the result back takes as long as a good disk takes to
flush. So while the disk is quick, the event loop carries out flushes itself if the thread is idle. One
slow flush is enough to return to the thread, until several in a row are quick there. So a disk that begins
to stall blocks the loop once.
"""

from __future__ import annotations

from typing import Final

QUICK_SECONDS: Final = 0.001
"""The longest time of a quick flush."""
QUICK_IN_A_ROW: Final = 8
"""How many flushes in a row must be quick before the next one is expected to be."""


class DiskPace:
    """Predicts from the latest flushes whether the next one will be quick."""

    def __init__(self) -> None:
        self._in_a_row = 0

    @property
    def quick(self) -> bool:
        """Whether the loop may wait for the next flush."""
        return self._in_a_row >= QUICK_IN_A_ROW

    def note(self, seconds: float) -> None:
        """Record how long a flush took."""
        self._in_a_row = self._in_a_row + 1 if seconds <= QUICK_SECONDS else 0
