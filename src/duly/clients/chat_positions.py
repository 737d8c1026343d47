"""Read positions: how far a person has read each conversation, and what of it the hub knows.

The laws. A line counts as read when the program asks for the next one, so that a crash in between brings it
again. The first line is acknowledged at once; of many in a row only the last is, every 50 ms and every 200
lines. What was acknowledged on a connection that broke is acknowledged again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

ACK_SECONDS: Final = 0.05
ACK_LINES: Final = 200
"""The hub waits for an acknowledgement after a thousand lines."""


class ChatPositions:
    """The positions in each conversation. `tell(conv, n)` acknowledges up to `n`; `save` stores `read_to`."""

    def __init__(self, tell: Callable[[str, int], None], save: Callable[[], None]) -> None:
        self._tell, self._save = tell, save
        self.heard_to: dict[str, int] = {}
        """the last line of each conversation that has arrived"""
        self.read_to: dict[str, int] = {}
        """the last line of each conversation that the program has read"""
        self._due: dict[str, int] = {}
        """what is still to be acknowledged"""
        self._acknowledged: dict[str, int] = {}
        """what was acknowledged on this connection: it may be lost with it"""
        self._pause: asyncio.TimerHandle | None = None
        """until it ends, further lines gather"""
        self._unacknowledged = 0

    def load(self, cursors: dict[str, int]) -> None:
        """Continue where an earlier run stopped."""
        self.read_to, self.heard_to = cursors, dict(cursors)

    def arrived(self, conv: str, n: int) -> bool:
        """Whether a line that came is the next one of its conversation."""
        if n == self.heard_to.get(conv, n - 1) + 1:
            self.heard_to[conv] = n
            return True
        if n <= self.read_to.get(conv, 0):
            self._due.setdefault(conv, self.read_to[conv])  # the acknowledgement was lost
            self.acknowledge()
        return False

    def sent(self, conv: str, n: int) -> None:
        """A line of our own has its number. If it is the next one, it is not told to us again."""
        if self.heard_to.get(conv, n - 1) == n - 1:
            self.heard_to[conv] = n
            if self.read_to.get(conv, n - 1) == n - 1:
                self.read_to[conv] = n

    def read(self, conv: str, n: int) -> None:
        """The program is done with a line."""
        self.read_to[conv] = self._due[conv] = max(n, self.read_to.get(conv, 0))
        self._unacknowledged += 1
        if self._pause is None or self._unacknowledged >= ACK_LINES:
            self.acknowledge()

    def reconnected(self, cursors: dict[str, int]) -> None:
        """The hub has said how far it knows each conversation to be read, on a new connection."""
        for conv, n in cursors.items():
            self.heard_to[conv] = max(n, self.heard_to.get(conv, 0))
        self._due, self._acknowledged = self._acknowledged | self._due, {}
        self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge everything that is due, and gather what follows for a moment."""
        self.cancel()
        self._unacknowledged = 0
        if not self._due:
            return
        self._pause = asyncio.get_running_loop().call_later(ACK_SECONDS, self.acknowledge)
        due, self._due = self._due, {}
        for conv, n in due.items():
            self._tell(conv, n)
        self._acknowledged |= due
        self._save()

    def cancel(self) -> None:
        """Stop waiting for further lines."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
