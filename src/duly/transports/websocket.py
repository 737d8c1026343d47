"""WebSocket at `/v1/ws`: frames both ways on one connection.

The laws. A client authenticates first, within ten seconds; no other frame of it is read before that. Frames
go out in the order they were pushed. A client that reads slowly is waited for: what can wait is not pushed to
it, and its own frames are read only as fast as it reads. The connection of a client that reads nothing, or
to which far too much is pushed all the same, is closed: it harms no other client, and the client finds
everything again when it reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from itertools import chain
from typing import Final, Protocol

from aiohttp import WSCloseCode, WSMsgType, web

from duly.core.networks import network_of
from duly.errors import DulyError, NotAuthenticated, RateLimited, SenderError
from duly.identity.accounts import Principal
from duly.runtime.logs import RateLimitedLog
from duly.transports.connections import address_of, turn_away, visitor_of, waiting_for
from duly.transports.frame_socket import FrameSocket
from duly.wire import frames
from duly.wire.frames import ServerCode
from duly.wire.outgoing import OutgoingFrame, ServerAck, encode, trouble

LOG: Final = logging.getLogger("duly.websocket")
LOG.addFilter(RateLimitedLog())

AUTH_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 1.0
ROOM_FRAMES: Final = 1_000
ROOM_BYTES: Final = 1024 * 1024
"""What is queued for a client before it counts as congested."""
QUEUE_FRAMES: Final = 100_000
QUEUE_BYTES: Final = 64 * 1024 * 1024
"""What is queued at most: answers to what the client asked itself, since everything else waits for room."""
STILL_SECONDS: Final = 10.0
"""How long a congested client may take nothing at all."""
WRITE_BYTES: Final = 64 * 1024
"""About as much as is written at once."""


class WebSocketBackend(Protocol):
    """The part of a hub that a WebSocket uses."""

    async def login(self, token: str | None, address: str) -> Principal:
        """The owner of a token; raises `NotAuthenticated`."""
        ...

    async def connected(
        self, session: WebSocketSession, who: Principal, cursors: dict[str, int] | None
    ) -> None:
        """Greets a session that has logged in, and sends what it missed since its cursors."""
        ...

    def receiver(
        self, session: WebSocketSession, who: Principal
    ) -> Callable[[bytes], bool | Awaitable[object]]:
        """Returns what takes the frames of a session; it returns what is to be awaited before the next one,
        if anything."""
        ...

    async def disconnected(self, session: WebSocketSession, who: Principal) -> None:
        """Forgets a session that has ended."""
        ...


class WebSocketSession:
    """One WebSocket connection: a queue that is written at the end of the loop's turn, and a task that writes
    when the client does not read so fast."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        self._socket = socket
        self._transport = transport
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._written = 0
        """bytes handed to the transport so far"""
        self.stall_timer: asyncio.TimerHandle | None = None
        """checks that the client reads: the session is congested, or was a moment ago"""
        self._drained: list[asyncio.Future[None]] = []
        self._news = asyncio.Event()
        self._due = False
        """the queue is written at the end of this turn"""
        self._behind = False
        """the task is writing"""
        self._closing: str | None = None
        self._last_resort: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._soon = loop.call_soon
        self._later = loop.call_later
        self._writer = loop.create_task(self._write())

    def push(self, frame: OutgoingFrame) -> None:
        """Queues a frame, as JSON."""
        if self._closing is None:
            text = encode(frame)
            self._queue.append(text)
            self._size += len(text)
            if not self._due:
                self._due = True
                self._soon(self._flush)

    def _congest(self) -> None:
        """The session is congested: a timer checks whether the client reads, and too long a queue ends it."""
        if self.stall_timer is None:
            self.stall_timer = self._later(STILL_SECONDS, self._check_stalled, self._taken)
        if len(self._queue) > QUEUE_FRAMES or self._size > QUEUE_BYTES:
            self._hang_up()

    @property
    def listening(self) -> bool:
        """Whether the connection is open."""
        return self._closing is None

    @property
    def congested(self) -> bool:
        """Whether more is queued than the client takes in a moment."""
        return self._size > ROOM_BYTES or len(self._queue) > ROOM_FRAMES

    async def drained(self, seconds: float | None = None) -> None:
        """Returns when the queue is short again, when the session has ended, or after this time."""
        if self._closing is not None or not self.congested:
            return
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drained.append(room)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await room

    @property
    def _taken(self) -> int:
        """Bytes that have left this process."""
        return self._written - (0 if self._transport is None else self._transport.get_write_buffer_size())

    def _check_stalled(self, before: int) -> None:
        """Closes the connection of a congested client that has read nothing since."""
        self.stall_timer = None
        if self._closing is not None or not self.congested:
            return
        if self._taken == before:
            self._hang_up()
        else:
            self.stall_timer = self._later(STILL_SECONDS, self._check_stalled, self._taken)

    def _hang_up(self) -> None:
        self._queue.clear()
        self._size = 0
        self.close("you do not read what you are sent; reconnect and catch up")

    def _tell_room(self) -> None:
        """Wakes what waits for room."""
        waiting, self._drained = self._drained, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    def close(self, reason: str) -> None:
        """Closes the connection after what is queued, with this reason."""
        if self._closing is None:
            self._closing = reason
            self._news.set()
            self._tell_room()
            if self.stall_timer is not None:
                self.stall_timer.cancel()
            # A client that does not read does not see the close either; the writer waits for it until then.
            if self._transport is not None:
                loop = asyncio.get_running_loop()
                self._last_resort = loop.call_later(CLOSE_SECONDS, self._transport.abort)

    async def finish(self) -> None:
        """The connection is over."""
        self.close("")
        if self._last_resort is not None:
            self._last_resort.cancel()
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    async def _write(self) -> None:
        socket, queue = self._socket, self._queue
        try:
            while True:
                self._behind = True
                while queue:
                    frame = queue.popleft()
                    self._size -= len(frame)
                    self._written += len(frame)
                    if self._drained and not self.congested:
                        self._tell_room()
                    # aiohttp then waits until the other side has taken enough of it.
                    await socket.send_frame(frame, WSMsgType.TEXT)
                    self._write_together()
                self._behind = False
                if self._closing is not None:
                    reason = self._closing.encode()[:120]
                    await socket.close(code=WSCloseCode.GOING_AWAY, message=reason)
                    return
                self._news.clear()
                await self._news.wait()
        except (ConnectionError, RuntimeError):
            return  # the reader notices, too
        except Exception:
            LOG.exception("a bug in writing to a WebSocket")
            if self._transport is not None:
                self._transport.abort()  # the client comes back, and finds everything again

    def _flush(self) -> None:
        self._due = False
        if not self._behind:
            self._write_together()
            if self._queue:
                self._news.set()
        if self.congested:
            self._congest()

    def _write_together(self) -> None:
        """Writes what is queued at once, unless too much is on its way already."""
        transport, queue = self._transport, self._queue
        if transport is None or transport.is_closing() or self._socket.closed:
            return  # the task finds out
        if transport.get_write_buffer_size() > WRITE_BYTES:
            return
        size = self._size
        if size <= WRITE_BYTES:
            transport.write(_framed(queue))
            queue.clear()
        else:
            frames: list[bytes] = []
            size = 0
            while queue and size < WRITE_BYTES:
                frames.append(queue.popleft())
                size += len(frames[-1])
            transport.write(_framed(frames))
        self._size -= size
        self._written += size
        if self._drained and not self.congested:
            self._tell_room()


def _header(length: int) -> bytes:
    """What goes before a text frame of a server (RFC 6455, 5.2): whole, not masked, not compressed.

    >>> _header(5), _header(300)
    (b'\\x81\\x05', b'\\x81~\\x01,')
    """
    if length < 126:
        return bytes((0x81, length))
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")


class _Headers(dict[int, bytes]):
    """The headers of frames by length; those of short frames, nearly all, are made once."""

    def __missing__(self, length: int) -> bytes:
        return _header(length)


_header_of: Final = _Headers((length, _header(length)) for length in range(1_024)).__getitem__


def _framed(texts: Collection[bytes]) -> bytes:
    """Texts as frames, one after another. No step of this is taken in Python for each frame."""
    return b"".join(chain.from_iterable(zip(map(_header_of, map(len, texts)), texts, strict=True)))


class WebSockets:
    """The connections at `/v1/ws`."""

    def __init__(self, server: WebSocketBackend) -> None:
        self._server = server
        self._sessions: set[WebSocketSession] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """The request handler."""
        server = self._server
        if (refusal := turn_away(request)) is not None:
            return refusal
        socket = FrameSocket(HEARTBEAT_SECONDS)
        try:
            await socket.prepare(request)
        except ConnectionError:
            return web.Response()  # the client has gone already
        socket.belong_to(f"from {network_of(address_of(request))}")
        session = WebSocketSession(socket, request.transport)
        self._sessions.add(session)
        who: Principal | None = None
        try:
            who, cursors = await _introduction(server, request, socket, session)
            if who is not None:
                socket.belong_to(who.name)
                await server.connected(session, who, cursors)
                async for message in socket.serve(server.receiver(session, who), session):
                    if message.type is WSMsgType.BINARY:
                        session.push(_not_text(message.data))
        except Exception:
            LOG.exception("a bug in serving a WebSocket")
            session.close("a bug in the hub; come back")
        finally:
            socket.release()
            self._sessions.discard(session)
            if who is not None:
                await server.disconnected(session, who)
            await session.finish()
        return socket

    async def close(self, _: web.Application) -> None:
        """Closes every connection, so that clients look for another hub at once."""
        for session in self._sessions:
            session.close("the hub is stopping; come back soon")


async def _introduction(
    server: WebSocketBackend, request: web.Request, socket: web.WebSocketResponse, session: WebSocketSession
) -> tuple[Principal | None, dict[str, int] | None]:
    """Authenticates a client, by its header or its first frame."""
    address = address_of(request)
    said: bytes = b""
    reason = "not authenticated"
    try:
        header = request.headers.get("Authorization")
        if header is not None:
            who = await server.login(header.removeprefix("Bearer ").strip(), address)
            _recognise(request, who)
            return who, None
        async with asyncio.timeout(AUTH_SECONDS):
            with waiting_for(request):
                message = await socket.receive()
        if message.type is not WSMsgType.TEXT:
            return None, None
        said = message.data
        frame = frames.decode(said)
        if frame.type != "auth":
            raise NotAuthenticated(f"say who you are first: send an auth frame before {frame.type!r}")
        who = await server.login(frame.token, address)
        _recognise(request, who)
        return who, frame.cursors
    except TimeoutError:
        refusal = _trouble(
            "not_authenticated", f"no auth frame within {AUTH_SECONDS:.0f} s", ServerCode.NOT_ALLOWED
        )
    except SenderError as problem:
        refusal = _trouble(problem.word, str(problem), ServerCode.NOT_ALLOWED, said, problem.wait)
    except DulyError as problem:
        word = problem.word if isinstance(problem, RateLimited) else "internal"
        refusal = _trouble(word, str(problem), ServerCode.INTERNAL, said, problem.wait)
        reason = f"try again soon: {problem}"
    session.push(refusal)
    session.close(reason)
    with waiting_for(request):
        async for _ in socket:  # until the client has seen it and closed
            pass
    return None, None


def _recognise(request: web.Request, who: Principal) -> None:
    visitor = visitor_of(request)
    if visitor is not None:
        visitor.recognise(who.name)


def _trouble(word: str, detail: str, code: ServerCode, frame: bytes = b"", wait: int = 0) -> ServerAck:
    """What is wrong with a frame, under its id if that can be read."""
    return trouble(frames.seq_id_in(frame), code, word, detail, wait)


def _not_text(frame: bytes) -> ServerAck:
    return _trouble("malformed", "frames are text, not binary", ServerCode.BAD_PARAMETERS, frame)
