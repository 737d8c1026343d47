"""Read positions: how far a person has read each conversation, and how far the hub knows that.

The laws. A line counts as read when the program asks for the next one, so that it is delivered again after a
crash in between. The first line is acknowledged at once; of many in a row only the last one is, every 50 ms
and every 200 lines. Acknowledgements on a connection that broke are sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from duly.clients.base import lowered
from duly.storage.restored_streams import GENERATION

ACK_SECONDS: Final = 0.05
ACK_LINES: Final = 200
"""The most lines without an acknowledgement; the hub stops after a thousand."""


class ChatPositions:
    """The positions in each conversation. `tell(conv, n)` acknowledges up to `n`; `save` stores `read_to`."""

    def __init__(self, tell: Callable[[str, int], None], save: Callable[[], None]) -> None:
        self._tell, self._save = tell, save
        self.heard_to: dict[str, int] = {}
        """the last line of each conversation that has arrived"""
        self.read_to: dict[str, int] = {}
        """the last line of each conversation that the program has read"""
        self._due: dict[str, int] = {}
        """positions still to be acknowledged"""
        self._acknowledged: dict[str, int] = {}
        """positions acknowledged on this connection, which may be lost with it"""
        self._pause: asyncio.TimerHandle | None = None
        """collects further lines until it ends"""
        self._unacknowledged = 0
        self.restores = 0
        """how often the hub was restored from a backup meanwhile; lines that arrived before have lost their
        numbers"""

    def load(self, cursors: dict[str, int]) -> None:
        """Continue where an earlier run stopped."""
        self.read_to, self.heard_to = cursors, dict(cursors)

    def arrived(self, conv: str, n: int) -> bool:
        """Return whether an arriving line is the next one of its conversation."""
        if n == self.heard_to.get(conv, n - 1) + 1:
            self.heard_to[conv] = n
            return True
        if n <= self.read_to.get(conv, 0):
            self._due.setdefault(conv, self.read_to[conv])  # the acknowledgement was lost
            self.acknowledge()
        return False

    def sent(self, conv: str, n: int) -> None:
        """Note the number of a line of our own. If it is the next one, it is not delivered to us. In a
        conversation that we have not heard of, only the first line is the next one: others may be on their
        way to us."""
        if self.heard_to.get(conv, 0) == n - 1:
            self.heard_to[conv] = n
            if self.read_to.get(conv, 0) == n - 1:
                self.read_to[conv] = n

    def read(self, conv: str, n: int) -> None:
        """Note that the program has processed a line."""
        self.read_to[conv] = self._due[conv] = max(n, self.read_to.get(conv, 0))
        self._unacknowledged += 1
        if self._pause is None or self._unacknowledged >= ACK_LINES:
            self.acknowledge()

    def reconnected(self, cursors: dict[str, int]) -> None:
        """Note how far the hub knows each conversation to be read, on a new connection. If it was restored
        from a backup, it gives later numbers out again."""
        self._due, self._acknowledged = self._acknowledged | self._due, {}
        lower = lowered(self.heard_to, cursors)
        for conv, n in lower.items():
            for positions in (self.heard_to, self.read_to, self._due):
                if n is None:
                    positions.pop(conv, None)
                elif conv in positions:
                    positions[conv] = min(n, positions[conv])
        if GENERATION in cursors:
            self.read_to[GENERATION] = cursors[GENERATION]
        for conv, n in cursors.items():
            self.heard_to[conv] = max(n, self.heard_to.get(conv, 0))
        if lower:
            self.restores += 1
            self._save()
        self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge everything that is due, and collect further lines for a moment."""
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
