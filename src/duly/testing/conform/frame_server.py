"""A WebSocket server that plays a hub: it accepts one client at a time, and sends only what a script tells
it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from aiohttp import WSMsgType, web

from duly.testing.conform.rules import BrokenRule
from duly.testing.conform.transcript import Transcript

CONNECTED: Final = 30.0
"""Seconds within which a client must reconnect."""
_INTRODUCTION: Final = 10.0
UNREADABLE: Final = ("this is not JSON", "null", "17", "[1,2,3]", "{}", '{"type":7}', '{"type":"server_ack"')
"""Texts that are not frames."""

Json = dict[str, object]


class FrameServer:
    """The hub's side of the frames dialect. `welcome` are the fields of its welcome beside name and time."""

    strange_answers: Sequence[str] = (
        *UNREADABLE,
        '{"type":"server_ack","seq_id":"no-such-event","code":0}',
        '{"type":"server_ack","code":2,"error":"malformed"}',
        '{"type":"ack","seq_id":"no-such-event","from":"tower","code":0,"state":"done"}',
        '{"type":"no_such_frame","data":{}}',
    )
    """frames that a sentinel does not expect or cannot decode"""

    def __init__(
        self, transcript: Transcript, name: str, welcome: Mapping[str, object] | None = None
    ) -> None:
        self._transcript = transcript
        self._name = name
        self._welcome = welcome or {}
        self._runner: web.AppRunner | None = None
        self._socket: web.WebSocketResponse | None = None
        self._request: web.Request | None = None
        self._up = asyncio.Event()
        self._tried = asyncio.Event()
        self._heard: asyncio.Queue[Json] = asyncio.Queue()
        self._pong = asyncio.Event()
        self.down = False
        """whether connections are refused, as if the hub were down"""
        self.auth: Json = {}
        """the first frame of the newest connection"""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Start to listen."""
        app = web.Application()
        app.router.add_routes(self._routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        listening = socket.create_server((host, port))
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening).start()

    def _routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/ws", self._serve)]

    async def stop(self) -> None:
        """Stop listening."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=503)
        client = web.WebSocketResponse(autoping=False, max_msg_size=1 << 20)
        await client.prepare(request)
        introduced = await self._introduced(request, client)
        self._tried.set()
        if not introduced:
            return client
        self.cut()
        self._socket, self._request = client, request
        self._say(client, {"type": "welcome", "you": self._name, "time": now_ms(), **self._welcome})
        self._up.set()
        async for message in client:
            if message.type is WSMsgType.PING:
                await client.pong(message.data)
            elif message.type is WSMsgType.PONG:
                self._pong.set()
            elif message.type is WSMsgType.TEXT:
                self._transcript.note("<", message.data)
                self._heard.put_nowait(self._read(message.data))
        if self._socket is client:
            self._transcript.note("!", "the client is gone")
            self._socket = None
            self._up.clear()
        return client

    async def _introduced(self, request: web.Request, client: web.WebSocketResponse) -> bool:
        if request.headers.get("Authorization", "").startswith("Bearer "):
            self.auth = {}
            return True
        try:
            message = await client.receive(_INTRODUCTION)
        except TimeoutError:
            return False
        if message.type is not WSMsgType.TEXT:
            return False
        self._transcript.note("<", message.data)
        self.auth = self._read(message.data)
        if self.auth.get("type") == "auth" and self.auth.get("token"):
            return True
        self._say(client, {"type": "server_ack", "code": 3, "error": "not_authenticated"})
        await client.close()
        return False

    def _read(self, text: str) -> Json:
        try:
            return msgspec.json.decode(text, type=Json)
        except (msgspec.DecodeError, RecursionError):
            return {"type": "", "unreadable": text}

    def _say(self, client: web.WebSocketResponse, frame: Mapping[str, object]) -> None:
        self._write(client, msgspec.json.encode(frame).decode())

    def _write(self, client: web.WebSocketResponse, text: str) -> None:
        self._transcript.note(">", text)
        if not client.closed:
            task = asyncio.ensure_future(client.send_str(text))
            task.add_done_callback(lambda over: over.cancelled() or over.exception())

    # ── for scripts ──────────────────────────────────────────────────────────────────────────────

    async def first_client(self) -> None:
        """Wait for the first client, as long as it takes; a refused client counts as well."""
        await self._tried.wait()

    async def connected(self) -> None:
        """Wait until the client is connected and welcomed."""
        try:
            async with asyncio.timeout(CONNECTED):
                await self._up.wait()
        except TimeoutError:
            raise BrokenRule(
                "connects", f"it did not connect and authenticate within {CONNECTED:g} s"
            ) from None

    def send(self, frame: Mapping[str, object]) -> None:
        """Send a frame; without a connection it is lost."""
        self.send_text(msgspec.json.encode(frame).decode())

    def send_text(self, text: str) -> None:
        """Send a text that need not be a frame."""
        if self._socket is not None:
            self._write(self._socket, text)

    async def hear(self, seconds: float) -> Json | None:
        """Return the next frame; None if none arrives within this time."""
        try:
            async with asyncio.timeout(seconds):
                return await self._heard.get()
        except TimeoutError:
            return None

    def cut(self) -> None:
        """Break the connection without closing it properly."""
        if self._socket is not None and self._request is not None:
            self._transcript.note("!", "cut")
            self._up.clear()
            self._socket = None
            if self._request.transport is not None:
                self._request.transport.abort()

    async def answers_ping(self, seconds: float) -> bool:
        """Return whether a ping is answered within this time."""
        self._pong.clear()
        if self._socket is None:
            return False
        await self._socket.ping(b"conform")
        try:
            async with asyncio.timeout(seconds):
                await self._pong.wait()
        except TimeoutError:
            return False
        return True


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000
