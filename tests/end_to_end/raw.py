"""Clients that duly did not write: JSON over a plain WebSocket, curl, and bare sockets.

The law: nothing here imports duly. What these clients believe about the wire is what the description of the
protocol says about it, so a mistake that the hub and duly's own clients share cannot hide.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from tests.guard import GUARD

Json = dict[str, Any]

PATIENCE = GUARD


class Ids:
    """Mints seq_ids as the protocol describes them: the time in milliseconds, and a counter from 0."""

    def __init__(self, age: float = 0.0) -> None:
        self._n = -1
        self._age = age

    def __call__(self) -> str:
        self._n += 1
        return f"{time.time_ns() // 1_000_000 - round(self._age * 1000)}_{self._n}"


class Closed(Exception):
    """The hub has hung up."""


class Peer:
    """One WebSocket connection: frames go out as given and come in one by one."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.presence = False
        """hear `device_status` too: it comes when devices come and go, in between everything else"""
        self.ids = Ids()
        self.heard: list[Json] = []
        self._ahead: deque[Json] = deque()

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": type, **fields}))

    async def say_text(self, text: str) -> None:
        await self.socket.send_str(text)

    async def command(self, to: str, type: str = "lock_control", **fields: Any) -> str:
        """Send a command; its id."""
        seq_id = fields.pop("seq_id", None) or self.ids()
        await self.say(type, seq_id=seq_id, to=to, **fields)
        return str(seq_id)

    async def hear(self, patience: float = PATIENCE) -> Json:
        """The next frame."""
        if self._ahead:
            return self._ahead.popleft()
        async with asyncio.timeout(patience):
            while True:
                message = await self.socket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise Closed(self.socket.close_code, message.extra or message.data)
                frame: Json = json.loads(message.data)
                self.heard.append(frame)
                if self.presence or frame["type"] != "device_status":
                    return frame

    async def hear_of(self, seq_id: str, patience: float = PATIENCE) -> Json:
        """The next frame about this command; others are kept for later."""
        return await self.first(lambda frame: frame.get("seq_id") == seq_id, patience)

    async def first(self, fits: Callable[[Json], bool], patience: float = PATIENCE) -> Json:
        for frame in list(self._ahead):
            if fits(frame):
                self._ahead.remove(frame)
                return frame
        kept, self._ahead = self._ahead, deque()
        try:
            async with asyncio.timeout(patience):
                while not fits(frame := await self.hear(patience)):
                    kept.append(frame)
            return frame
        finally:
            self._ahead = kept

    async def hears_nothing(self, seconds: float = 0.15) -> bool:
        try:
            await self.hear(seconds)
        except TimeoutError:
            return True
        return False

    async def ack(self, command: Json, code: int = 0, **fields: Any) -> None:
        """A device's answer to a command it was passed."""
        await self.say("ack", seq_id=command["seq_id"], to=command["from"], code=code, **fields)

    async def obey(self, code: int = 0, **fields: Any) -> Json:
        """Take the next command and answer it."""
        command = await self.hear()
        await self.ack(command, code, **fields)
        return command

    async def obey_all(self) -> None:
        """Answer commands until cancelled."""
        while True:
            await self.obey()

    async def closed(self, patience: float = PATIENCE) -> None:
        """Until the hub hangs up."""
        with contextlib.suppress(Closed):
            async with asyncio.timeout(patience):
                while True:
                    await self.hear(patience)


@contextlib.asynccontextmanager
async def dial(url: str, **options: Any) -> AsyncIterator[Peer]:
    """A connection that has not said who it is."""
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/v1/ws", **options) as socket:
        yield Peer(socket)


@contextlib.asynccontextmanager
async def join(
    url: str, token: str, cursors: dict[str, int] | None = None, **options: Any
) -> AsyncIterator[Peer]:
    """A connection that has said who it is and was welcomed; the welcome is `heard[0]`."""
    async with dial(url, **options) as peer:
        auth = {"token": token} | ({} if cursors is None else {"cursors": cursors})
        await peer.say("auth", **auth)
        welcome = await peer.hear()
        assert welcome["type"] == "welcome", welcome
        yield peer


class Response:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


async def curl(url: str, token: str | None = None, *options: str, body: object = None) -> Response:
    """What curl gets; with a body it is a POST. A body that is not bytes is sent as JSON."""
    command = ["curl", "-s", "-S", "-i", "--max-time", str(GUARD), "-H", "Expect:"]
    if token is not None:
        command += ["-H", f"Authorization: Bearer {token}"]
    given = b""
    if body is not None:
        command += ["--data-binary", "@-", "-H", "Content-Type: application/json"]
        given = body if isinstance(body, bytes) else json.dumps(body).encode()
    process = await asyncio.create_subprocess_exec(
        *command, *options, url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate(given)
    assert process.returncode == 0, errors.decode()
    head, _, rest = out.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Response(int(first.split()[1]), headers, rest)


# ── bare sockets ─────────────────────────────────────────────────────────────────────────────────


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def handshake(url: str) -> bytes:
    """The bytes that turn a TCP connection into a WebSocket."""
    host, port = address(url)
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET /v1/ws HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    ).encode()


def ws_frame(payload: bytes, opcode: int = 1, *, final: bool = True, masked: bool = True) -> bytes:
    """One WebSocket frame as a client sends it, or, unmasked, as it must not."""
    head = bytes([(0x80 if final else 0) | opcode])
    size, flag = len(payload), 0x80 if masked else 0
    if size < 126:
        head += bytes([flag | size])
    elif size < 1 << 16:
        head += bytes([flag | 126]) + struct.pack("!H", size)
    else:
        head += bytes([flag | 127]) + struct.pack("!Q", size)
    return head + (bytes(4) + payload if masked else payload)


class Bare:
    """A TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def upgrade(self, url: str, token: str | None = None) -> None:
        await self.send(handshake(url))
        async with asyncio.timeout(PATIENCE):
            assert b" 101 " in await self.reader.readuntil(b"\r\n\r\n")
        if token is not None:
            await self.send(ws_frame(json.dumps({"type": "auth", "token": token}).encode()))
            async with asyncio.timeout(PATIENCE):
                await self.reader.readuntil(b'"welcome"')
                await self.reader.readuntil(b'"time":')
                await self.reader.readuntil(b"}")

    async def gone(self, patience: float = PATIENCE) -> bytes:
        """Until the hub hangs up; what it had said before."""
        said = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(patience):
                while part := await self.reader.read(1 << 16):
                    said += part
        return said + bytes(self.reader._buffer)  # type: ignore[attr-defined]  # not read before a reset


@contextlib.asynccontextmanager
async def bare(url: str, *, limit: int = 1 << 16) -> AsyncIterator[Bare]:
    reader, writer = await asyncio.open_connection(*address(url), limit=limit)
    try:
        yield Bare(reader, writer)
    finally:
        writer.transport.abort()
