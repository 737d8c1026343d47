"""Writes the packets of an MQTT connection.

The law: what is written in one turn of the loop goes out together, in one call to the system.
"""

from __future__ import annotations

import asyncio


class PacketWriter:
    """Writes to one connection, once it has a transport."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.wrote_at = self._loop.time()
        """when something last went out, on the loop's clock"""

    def write(self, packet: bytes) -> None:
        """Send a packet at the end of this turn of the loop."""
        if not self._outgoing:
            self._loop.call_soon(self.flush)
        self._outgoing.append(packet)

    def flush(self) -> None:
        """Send now what was written."""
        out, self._outgoing = self._outgoing, []
        if out and self.transport is not None and not self.transport.is_closing():
            self.wrote_at = self._loop.time()
            self.transport.write(b"".join(out))
