"""How quick the disk is: whether the event loop may wait for a flush itself.

To hand a small flush to the writer's thread, and to be told of it, takes as long as a good disk takes to
flush. So while the disk is quick, a flush for which nothing else has to wait is carried out by the loop. One
that takes longer is enough to go back to the thread, until several in a row were quick there: a disk that
begins to stall holds the loop up once.
"""

from __future__ import annotations

from typing import Final

QUICK_SECONDS: Final = 0.001
"""What a quick flush takes at most."""
QUICK_IN_A_ROW: Final = 8
"""So many flushes in a row were quick: then the next one is expected to be."""


class DiskPace:
    """Whether the next flush is expected to be quick, by what the last ones took."""

    def __init__(self) -> None:
        self._in_a_row = 0

    @property
    def quick(self) -> bool:
        """Whether the loop may wait for the next flush."""
        return self._in_a_row >= QUICK_IN_A_ROW

    def note(self, seconds: float) -> None:
        """Count a flush that took so long."""
        self._in_a_row = self._in_a_row + 1 if seconds <= QUICK_SECONDS else 0
