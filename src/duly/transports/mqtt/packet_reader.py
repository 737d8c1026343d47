"""Takes the bytes of an MQTT connection apart into packets.

The laws. What arrives together is taken apart in one pass. At most `RUSH` packets are handled in a row, and
reading is paused until the rest have had their turn. What is not MQTT is reported, and nothing that came with
it is handled any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from duly.errors import Malformed
from duly.transports.mqtt import packets

RUSH: Final = 100
"""Packets handled in a row; then everything else in the process gets a turn. uvloop reads on for as long as
there is more, so a broker that has much for us would keep the process from reading all other connections."""


class PacketReader:
    """Reads one connection. `handle` is called with bytes and the packets in them, in their order; `broken`
    with what is not MQTT, also if `handle` raises that."""

    def __init__(
        self,
        handle: Callable[[bytes, Sequence[packets.Packet]], None],
        broken: Callable[[Malformed], None],
    ) -> None:
        self._handle = handle
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._rest = bytearray()
        """the beginning of a packet that has not arrived whole"""
        self._needed = 0
        self._paused = False
        """packets wait for their turn"""

    def receive(self, data: bytes) -> None:
        """Handle the packets that are complete, and keep the rest until more bytes arrive."""
        if self._rest:
            self._rest += data
            if self._paused or len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
        elif self._paused:
            self._rest += data
            return
        self._split(data)

    def _split(self, data: bytes) -> None:
        """Handle the whole packets in these bytes."""
        try:
            found, rest, self._needed = packets.split(data)
            self._rest = bytearray(data[rest:])
        except Malformed as problem:
            self._broken(problem)
            return
        self._handle_from(data, found, 0)

    def _handle_from(self, data: bytes, found: Sequence[packets.Packet], at: int) -> None:
        """Handle these packets from one of them on; at most `RUSH` in a row."""
        try:
            self._handle(data, found[at : at + RUSH] if len(found) > RUSH else found)
        except Malformed as problem:
            self._broken(problem)
            return
        if at + RUSH < len(found):
            self._pause()
            self._loop.call_soon(self._handle_from, data, found, at + RUSH)
        elif self._paused:
            self._resume()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            if self.transport is not None and not self.transport.is_closing():
                self.transport.pause_reading()

    def _resume(self) -> None:
        self._paused = False
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
        if self._rest and len(self._rest) >= self._needed:
            self._split(bytes(self._rest))
