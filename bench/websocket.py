"""The client's side of a WebSocket with as few steps as there can be: what is measured is the server.

A frame is masked with zeros, text is not decoded before it is needed, and what is sent while a packet is
being read goes out in one write.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

TEXT, CLOSE, PING = 0x81, 0x88, 0x89


def upgrade(host: str, token: str) -> bytes:
    """The request that opens the connection."""
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET /v1/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()


def frame(payload: bytes) -> bytes:
    """A text frame of a client."""
    size = len(payload)
    head = bytes((TEXT, 0x80 | size)) if size < 126 else b"\x81\xfe" + size.to_bytes(2, "big")
    return head + b"\0\0\0\0" + payload


def pong(payload: bytes) -> bytes:
    """The answer to a ping."""
    return bytes((0x8A, 0x80 | len(payload))) + b"\0\0\0\0" + payload


def read_frames(
    buffer: bytes, text: Callable[[bytes, int, int], None], ping: Callable[[bytes], None]
) -> bytes:
    """Hands every whole frame on, text as a part of the buffer, and returns what is left."""
    at, size = 0, len(buffer)
    while size - at >= 2:
        length, start = buffer[at + 1], at + 2
        if length == 126:
            length, start = int.from_bytes(buffer[at + 2 : at + 4], "big"), at + 4
        elif length == 127:
            length, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
        if size - start < length:
            break
        end = start + length
        if buffer[at] == TEXT:
            text(buffer, start, end)
        elif buffer[at] == PING:
            ping(buffer[start:end])
        at = end
    return buffer[at:]


class WebSocketClient(asyncio.Protocol):
    """A connection that is ready when the server has said `welcome`."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.host = ""
        self.loop = asyncio.get_running_loop()
        self.ready = self.loop.create_future()
        self.closing = False
        self._rest = b""
        self._upgraded = False
        self._sending: list[bytes] = []

    def text(self, payload: bytes) -> None:
        """A frame arrived."""

    def lost(self) -> None:
        """The server closed the connection, and we did not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport.write(upgrade(self.host, self.token))

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"not welcome: {self._rest[:300]!r}"))
        elif not self.closing:
            self.lost()

    def data_received(self, data: bytes) -> None:
        rest = self._rest + data if self._rest else data
        if not self._upgraded:
            head, found, rest = rest.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            if b" 101 " not in head[:20] and not self.ready.done():
                self.ready.set_exception(RuntimeError(f"not welcome: {head[:300]!r} {rest[:300]!r}"))
            self._upgraded = True
        self._rest = read_frames(rest, self._text, lambda payload: self._transport.write(pong(payload)))

    def _text(self, buffer: bytes, start: int, end: int) -> None:
        payload = buffer[start:end]
        if self.ready.done():
            self.text(payload)
        elif b'"welcome"' in payload:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(RuntimeError(f"not welcome: {payload!r}"))

    def send(self, payload: bytes) -> None:
        """Sends a frame at the end of this turn, with all others of it."""
        if not self._sending:
            self.loop.call_soon(self._flush)
        self._sending.append(frame(payload))

    def _flush(self) -> None:
        self._transport.write(b"".join(self._sending))
        self._sending.clear()

    def close(self) -> None:
        """Closes the connection; that it is lost then is no news."""
        self.closing = True
        self._transport.close()


async def connect(url: str, client: WebSocketClient) -> None:
    """Connects, and returns when the server has said `welcome`."""
    parts = urlsplit(url)
    client.host = parts.netloc
    await client.loop.create_connection(lambda: client, parts.hostname or "", parts.port or 80)
    async with asyncio.timeout(60):
        await client.ready
