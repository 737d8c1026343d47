"""Carries the bytes of an MQTT connection in the messages of a WebSocket.

The law: to its session a WebSocket is a transport like a TCP socket. Bytes go out in the order in which they
were written, several packets in one message; bytes that come in are handed on as they come, since a packet
may begin in one message and end in the next (MQTT 3.1.1, section 6). An end of the WebSocket, whichever side
makes it, is reported to the session once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final

import aiohttp

from duly.errors import ConnectionLost, ConnectionRefused, Malformed
from duly.runtime.tasks import Supervisor, cancel
from duly.transports.mqtt.address import BrokerAddress

SUBPROTOCOL: Final = "mqtt"
"""The subprotocol that client and broker agree on."""

MESSAGE_LIMIT: Final = 64 << 20
"""Bytes of one message of the WebSocket; a larger one ends the connection."""


CLOSE_WITHIN: Final = 1.0
"""Seconds that the broker has to confirm the end of a WebSocket."""


class WebSocketStream(asyncio.Transport):
    """A WebSocket to a broker, as the transport of one session."""

    def __init__(self, session: asyncio.Protocol) -> None:
        super().__init__()
        self._session = session
        self._tasks = Supervisor()
        self._outgoing: list[bytes] = []
        self._wrote = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._closing = False
        self._close_within = CLOSE_WITHIN
        self._problem: Malformed | None = None

    async def connect(self, address: BrokerAddress) -> None:
        """Connect, and report the connection to the session. Raises `ConnectionRefused` or `ConnectionLost`,
        and the errors of the system and of TLS as they are."""
        http = aiohttp.ClientSession()
        try:
            socket = await self._open(http, address)
        except BaseException:
            await http.close()
            raise
        self._session.connection_made(self)
        self._tasks.do("MQTT over WebSocket", self._live(http, socket))

    async def _open(
        self, http: aiohttp.ClientSession, address: BrokerAddress
    ) -> aiohttp.ClientWebSocketResponse:
        try:
            socket = await http.ws_connect(
                address.websocket_url,
                protocols=(SUBPROTOCOL,),
                ssl=address.tls_context() or True,
                max_msg_size=MESSAGE_LIMIT,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_WITHIN),
            )
        except aiohttp.WSServerHandshakeError as problem:
            text = f"{address!r} opens no WebSocket: HTTP status {problem.status}"
            if problem.status >= 500:  # a proxy before a broker that is away
                raise ConnectionLost(text) from None
            raise ConnectionRefused(f"{text}; check the path, which is /mqtt with most brokers") from None
        except aiohttp.ClientConnectorCertificateError as problem:
            raise ssl.SSLError(1, str(problem.certificate_error)) from None
        except aiohttp.ClientConnectorError as problem:
            raise problem.os_error from None
        except aiohttp.ClientError as problem:
            raise ConnectionLost(f"{address!r} broke the connection off: {problem}") from None
        if socket.protocol != SUBPROTOCOL:
            await socket.close()
            raise ConnectionRefused(f"{address!r} is a WebSocket, but not one for MQTT")
        return socket

    # ── what a session asks of its transport ─────────────────────────────────────────────────────

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send these bytes, after those that were written before."""
        if not self._closing:
            self._outgoing.append(bytes(data))
            self._wrote.set()

    def pause_reading(self) -> None:
        """Hand nothing on until `resume_reading`."""
        self._may_read.clear()

    def resume_reading(self) -> None:
        """Hand on again what comes in."""
        self._may_read.set()

    def is_closing(self) -> bool:
        """Return whether the connection has ended, or is about to."""
        return self._closing

    def close(self) -> None:
        """Send what was written, and then close."""
        self._closing = True
        self._wrote.set()

    def abort(self) -> None:
        """Close at once; what was written may be lost."""
        self._close_within = 0.0
        self._tasks.kill()

    # ── the WebSocket ────────────────────────────────────────────────────────────────────────────

    async def _live(self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Read and write until one side closes; then close everything."""
        reading = self._tasks.do("MQTT over WebSocket, in", self._read(socket))
        try:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._write(socket)
        finally:
            self._closing = True
            if reading is not None:
                await cancel(reading)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._close_within):
                    await socket.close()
            await http.close()
            self._session.connection_lost(self._problem)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Hand on what the broker sends."""
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    self._problem = Malformed(f"a {message.type.name} message on its WebSocket")
                    break
                await self._may_read.wait()
                self._session.data_received(message.data)
        finally:
            self.close()

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send what is written, until the end of it."""
        while self._outgoing or not self._closing:
            await self._wrote.wait()
            self._wrote.clear()
            outgoing, self._outgoing = self._outgoing, []
            if outgoing:
                await socket.send_bytes(b"".join(outgoing))
