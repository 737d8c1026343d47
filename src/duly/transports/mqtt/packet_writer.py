"""Writes the packets of an MQTT connection.

The law: what is written in one turn of the loop goes out together, in one call to the system, with the
acknowledgements that are due by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class PacketWriter:
    """Writes to one connection, once it has a transport. `due` returns the acknowledgements to send now."""

    def __init__(self, due: Callable[[], bytes]) -> None:
        self._due = due
        self._flushing = False
        """a flush follows at the end of this turn"""
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.wrote_at = self._loop.time()
        """when something last went out, on the loop's clock"""
        self.written = 0
        """bytes"""

    def write(self, packet: bytes) -> None:
        """Send a packet at the end of this turn of the loop."""
        self._outgoing.append(packet)
        if not self._flushing:
            self.wake()

    def wake(self) -> None:
        """Flush at the end of this turn of the loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send now what was written and what is due."""
        self._flushing = False
        out, self._outgoing = self._outgoing, []
        if self.transport is None or self.transport.is_closing():
            return
        if acknowledgements := self._due():
            out.insert(0, acknowledgements)
        if out:
            self.wrote_at = self._loop.time()
            data = b"".join(out)
            self.written += len(data)
            self.transport.write(data)
