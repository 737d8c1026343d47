"""A man in the middle: what really goes over the wire between a link and its broker, and ways to cut it."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

CONNECT, PUBLISH, PUBACK, PINGREQ = 1, 3, 4, 12


class Proxy:
    """Passes MQTT on to a broker and writes down which packets went by: (connection, out?, type, number)."""

    def __init__(self, port: int) -> None:
        self._broker = port
        self.packets: list[tuple[int, bool, int, int]] = []
        self.flowing = asyncio.Event()
        """cleared: the broker's packets are held back"""
        self.flowing.set()
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """As if a cable was pulled: no goodbye in either direction."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def pubacks(self, connection: int) -> list[int]:
        return [n for c, out, kind, n in self.packets if c == connection and out and kind == PUBACK]

    def arrivals(self, connection: int) -> list[int]:
        return [n for c, out, kind, n in self.packets if c == connection and not out and kind == PUBLISH]

    def pings(self) -> list[int]:
        """The connection of each PINGREQ."""
        return [c for c, out, kind, _ in self.packets if out and kind == PINGREQ]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._broker)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, up_writer]
        for task in (
            asyncio.create_task(self._pass_on(number, True, reader, up_writer)),
            asyncio.create_task(self._pass_on(number, False, up_reader, writer)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, number: int, out: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                packet = await self._packet(reader)
                if not out:
                    await self.flowing.wait()
                self.packets.append((number, out, packet[0] >> 4, _number(packet)))
                writer.write(packet)
        writer.transport.abort()

    async def _packet(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readexactly(2)
        while head[-1] & 0x80:
            head += await reader.readexactly(1)
        length = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(head[1:]))
        return head + await reader.readexactly(length)


def _number(packet: bytes) -> int:
    """The packet's number, 0 if it has none."""
    kind, start = packet[0] >> 4, 2
    while packet[start - 1] & 0x80:
        start += 1
    if kind == PUBACK:
        return int.from_bytes(packet[start : start + 2], "big")
    if kind == PUBLISH and packet[0] & 0x06:
        start += 2 + int.from_bytes(packet[start : start + 2], "big")
        return int.from_bytes(packet[start : start + 2], "big")
    return 0
