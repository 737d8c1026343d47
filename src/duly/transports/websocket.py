"""WebSocket at `/v1/ws`: frames both ways on one connection.

The laws. A client authenticates first, within ten seconds; the hub reads no other frame before that. Frames
go out in the order in which they were pushed. The hub waits for a client that reads slowly: it pushes no
frame that can wait, and reads the client's own frames only as fast as the client reads. If a client reads
nothing, or its queue still becomes far too long, the hub closes the connection: other clients are not
affected, and the client gets everything that it missed when it reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from duly.core.networks import network_of
from duly.errors import DulyError, Malformed, NotAuthenticated, RateLimited, SenderError, TooLarge
from duly.identity.accounts import Principal
from duly.runtime.logs import RateLimitedLog
from duly.runtime.tasks import is_cancelled
from duly.transports.connections import address_of, turn_away, visitor_of, waiting_for
from duly.transports.frame_socket import TOO_LARGE, FrameSocket
from duly.wire import frames
from duly.wire.frames import ServerCode
from duly.wire.outgoing import BUG, FrameEncoder, OutgoingFrame, ServerAck, trouble

LOG: Final = logging.getLogger("duly.websocket")
LOG.addFilter(RateLimitedLog())

AUTH_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 1.0
ROOM_FRAMES: Final = 1_000
ROOM_BYTES: Final = 1024 * 1024
"""How many bytes may be queued for a client before it counts as congested."""
QUEUE_FRAMES: Final = 100_000
QUEUE_BYTES: Final = 64 * 1024 * 1024
"""The most bytes that are queued. Beyond `ROOM_BYTES` these are answers to the client's own requests, since
all other frames wait for room."""
STILL_SECONDS: Final = 10.0
"""How many seconds a congested client may read nothing at all."""
WRITE_BYTES: Final = 64 * 1024
"""About how many bytes are written at once."""
NOT_TEXT: Final = "frames are text, not binary"


class WebSocketBackend(Protocol):
    """The part of a hub that a WebSocket uses."""

    async def login(self, token: str | None, address: str) -> Principal:
        """Return the owner of a token; raise `NotAuthenticated` if there is none."""
        ...

    async def connected(
        self, session: WebSocketSession, who: Principal, cursors: dict[str, int] | None
    ) -> None:
        """Greet a session that has logged in, and send what it missed since its cursors."""
        ...

    def receiver(
        self, session: WebSocketSession, who: Principal
    ) -> Callable[[bytes], bool | Awaitable[object]]:
        """Return the function that takes the frames of a session; it returns an awaitable if the next frame
        has to wait."""
        ...

    async def refuse(
        self, session: WebSocketSession, who: Principal, raw: bytes, problem: SenderError
    ) -> object:
        """Count, record and answer what came on a session but is not a frame."""
        ...

    async def disconnected(self, session: WebSocketSession, who: Principal) -> None:
        """Remove a session that has ended."""
        ...

    def failed(self, name: str, problem: BaseException) -> None:
        """Log and count a bug in this part of the hub."""
        ...


class TurnWrites:
    """Writes what sessions have queued in a turn of the event loop, all of them in one callback at its
    end."""

    def __init__(self) -> None:
        self._due: list[WebSocketSession] = []

    def add(self, session: WebSocketSession) -> None:
        """Write the queue of a session at the end of this turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write)
        self._due.append(session)

    def _write(self) -> None:
        due, self._due = self._due, []
        for session in due:
            try:
                session.write_queue()
            except Exception:
                session.fail()  # the others are written all the same


class WebSocketSession:
    """One WebSocket connection. Its queue is written at the end of the event loop's turn; if the client does
    not read that fast, a task writes it instead."""

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.Transport | None, writes: TurnWrites
    ) -> None:
        self._socket = socket
        self._transport = transport
        self._writes = writes
        self._queue: deque[bytes] = deque()
        """frames with their headers"""
        self._size = 0
        self._written = 0
        """how many bytes were passed to the transport so far"""
        self.stall_timer: asyncio.TimerHandle | None = None
        """checks that the client reads; set while the session is congested, or was a moment ago"""
        self._drained: list[asyncio.Future[None]] = []
        self._news = asyncio.Event()
        self._due = False
        """the queue is written at the end of this turn"""
        self._behind = False
        """the task is writing"""
        self._closing: str | None = None
        self._close_code = WSCloseCode.GOING_AWAY
        self._last_resort: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._later = loop.call_later
        self._writer = loop.create_task(self._write())

    def push(self, frame: OutgoingFrame) -> None:
        """Queue a frame, as JSON."""
        if self._closing is None:
            framed = _encode(frame)
            self._queue.append(framed)
            self._size += len(framed)
            if not self._due:
                self._due = True
                self._writes.add(self)

    def _congest(self) -> None:
        """Start the timer that checks whether a congested client reads; end the session if its queue is too
        long."""
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
        """Whether more than `ROOM_BYTES` is queued for the client."""
        return self._size > ROOM_BYTES or len(self._queue) > ROOM_FRAMES

    async def drained(self, seconds: float | None = None) -> None:
        """Return when the queue is short again, when the session has ended, or after this time."""
        if self._closing is not None or not self.congested:
            return
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drained.append(room)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await room

    @property
    def _taken(self) -> int:
        """Return how many bytes have left this process."""
        return self._written - (0 if self._transport is None else self._transport.get_write_buffer_size())

    def _check_stalled(self, before: int) -> None:
        """Close the connection of a congested client that has read nothing since the last check."""
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
        """Wake the callers that wait for room."""
        waiting, self._drained = self._drained, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    def close(self, reason: str, code: WSCloseCode = WSCloseCode.GOING_AWAY) -> None:
        """Close the connection with this reason, after the queued frames are written."""
        if self._closing is None:
            self._closing = reason
            self._close_code = code
            self._news.set()
            self._tell_room()
            if self.stall_timer is not None:
                self.stall_timer.cancel()
            # A client that does not read would not read the close frame either, and the writer would wait.
            if self._transport is not None:
                loop = asyncio.get_running_loop()
                self._last_resort = loop.call_later(CLOSE_SECONDS, self._transport.abort)

    async def finish(self) -> None:
        """Release the resources of a connection that has ended."""
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
                    # aiohttp then waits until the client has read enough of it.
                    await socket.send_frame(_text_in(frame), WSMsgType.TEXT)
                    self._write_together()
                self._behind = False
                if self._closing is not None:
                    reason = self._closing.encode()[:120]
                    await socket.close(code=self._close_code, message=reason)
                    return
                self._news.clear()
                await self._news.wait()
        except (ConnectionError, RuntimeError):
            return  # the reader notices it as well
        except Exception:
            self.fail()

    def fail(self) -> None:
        """Log the bug that prevents writing, and end the connection; the client reconnects, and gets what it
        missed."""
        LOG.exception("a bug in writing to a WebSocket")
        if self._transport is not None:
            self._transport.abort()

    def write_queue(self) -> None:
        """Write what is queued, or leave it to the task if the client does not read that fast."""
        self._due = False
        if not self._behind:
            self._write_together()
            if not self._queue:
                return
            self._news.set()
        if self.congested:
            self._congest()

    def _write_together(self) -> None:
        """Write all queued frames with one call, unless too much is already unsent."""
        transport, queue = self._transport, self._queue
        if transport is None or transport.is_closing() or self._socket.closed:
            return  # the task notices it
        if transport.get_write_buffer_size() > WRITE_BYTES:
            return
        size = self._size
        if size <= WRITE_BYTES:
            transport.write(b"".join(queue))
            queue.clear()
        else:
            frames: list[bytes] = []
            size = 0
            while queue and size < WRITE_BYTES:
                frames.append(queue.popleft())
                size += len(frames[-1])
            transport.write(b"".join(frames))
        self._size -= size
        self._written += size
        if self._drained and not self.congested:
            self._tell_room()


def _header(length: int) -> bytes:
    """Return the header of a server's text frame (RFC 6455, 5.2): unfragmented, not masked, not compressed.

    >>> _header(5), _header(300)
    (b'\\x81\\x05', b'\\x81~\\x01,')
    """
    if length < 126:
        return bytes((0x81, length))
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")


class _Headers(dict[int, bytes]):
    """The headers of frames by length; headers of short frames, which are nearly all, are made once."""

    def __missing__(self, length: int) -> bytes:
        return _header(length)


_header_of: Final = _Headers((length, _header(length)) for length in range(1_024)).__getitem__

_encode: Final = FrameEncoder(_header_of).encode


def _text_in(framed: bytes) -> bytes:
    """Return the text of a frame with a header, which aiohttp writes itself.

    >>> _text_in(_header(5) + b"hello")
    b'hello'
    """
    length = framed[1]
    return framed[2 if length < 126 else 4 if length == 126 else 10 :]


class WebSockets:
    """The connections at `/v1/ws`."""

    def __init__(self, server: WebSocketBackend) -> None:
        self._server = server
        self._sessions: set[WebSocketSession] = set()
        self._writes = TurnWrites()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Handle a request for a WebSocket."""
        server = self._server
        if (refusal := turn_away(request)) is not None:
            return refusal
        socket = FrameSocket(HEARTBEAT_SECONDS)
        try:
            await socket.prepare(request)
        except ConnectionError:
            return web.Response()  # the client has disconnected already
        socket.belong_to(f"from {network_of(address_of(request))}")
        session = WebSocketSession(socket, request.transport, self._writes)
        self._sessions.add(session)
        who: Principal | None = None
        try:
            who, cursors = await _introduction(server, request, socket, session)
            if who is not None:
                socket.belong_to(who.name)
                await server.connected(session, who, cursors)
                async for message in socket.serve(server.receiver(session, who), session):
                    if message.type is WSMsgType.BINARY:
                        await server.refuse(session, who, message.data, Malformed(NOT_TEXT))
                    elif isinstance(message.data, WebSocketError):
                        # The socket is closed, so this only counts and records it.
                        await server.refuse(session, who, b"", _violation(message.data))
        except (Exception, asyncio.CancelledError) as problem:
            if is_cancelled():
                raise
            server.failed("WebSocket", problem)
            session.push(_trouble("internal", BUG, ServerCode.INTERNAL))
            session.close(f"{BUG}; come back")
            with contextlib.suppress(Exception):
                await _closed(request, socket)
        finally:
            socket.release()
            self._sessions.discard(session)
            if who is not None:
                await server.disconnected(session, who)
            await session.finish()
        return socket

    async def close(self, _: web.Application) -> None:
        """Close every connection, so that clients look for another hub at once."""
        for session in self._sessions:
            session.close("the hub is stopping; come back soon")


def _violation(error: WebSocketError) -> SenderError:
    """Return what a client did that ended its connection: it sent what is not a WebSocket frame, or too
    large a one."""
    if error.code == WSCloseCode.MESSAGE_TOO_BIG:
        return TooLarge(TOO_LARGE.decode())
    return Malformed(f"this is not the WebSocket protocol: {error}")


async def _introduction(
    server: WebSocketBackend, request: web.Request, socket: web.WebSocketResponse, session: WebSocketSession
) -> tuple[Principal | None, dict[str, int] | None]:
    """Authenticate a client by its header or its first frame."""
    address = address_of(request)
    said: bytes = b""
    reason, code = "not authenticated", WSCloseCode.POLICY_VIOLATION
    try:
        header = request.headers.get("Authorization")
        if header is not None:
            who = await server.login(header.removeprefix("Bearer ").strip(), address)
            _recognise(request, who)
            return who, None
        async with asyncio.timeout(AUTH_SECONDS):
            with waiting_for(request):
                message = await socket.receive()
        if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return None, None
        said = message.data
        if message.type is WSMsgType.BINARY:
            raise Malformed(NOT_TEXT)
        frame = frames.decode(said)
        if frame.type != "auth":
            raise NotAuthenticated(f"you are not authenticated; send an auth frame before {frame.type!r}")
        who = await server.login(frame.token, address)
        _recognise(request, who)
        return who, frame.cursors
    except TimeoutError:
        refusal = _trouble(
            "not_authenticated", f"no auth frame within {AUTH_SECONDS:.0f} s", ServerCode.NOT_ALLOWED
        )
    except SenderError as problem:
        refusal = _trouble(problem.word, str(problem), ServerCode.NOT_ALLOWED, said, problem.wait)
        if problem.retry:
            code = WSCloseCode.TRY_AGAIN_LATER
    except DulyError as problem:
        word = problem.word if isinstance(problem, RateLimited) else "internal"
        refusal = _trouble(word, str(problem), ServerCode.INTERNAL, said, problem.wait)
        reason, code = f"try again soon: {problem}", WSCloseCode.TRY_AGAIN_LATER
    session.push(refusal)
    session.close(reason, code)
    await _closed(request, socket)
    return None, None


async def _closed(request: web.Request, socket: web.WebSocketResponse) -> None:
    """Wait until the client has read the close frame and closed."""
    with waiting_for(request):
        async for _ in socket:
            pass


def _recognise(request: web.Request, who: Principal) -> None:
    visitor = visitor_of(request)
    if visitor is not None:
        visitor.recognise(who.name)


def _trouble(word: str, detail: str, code: ServerCode, frame: bytes = b"", wait: int = 0) -> ServerAck:
    """Return the refusal of a frame, with the frame's id if it can be read."""
    return trouble(frames.seq_id_in(frame), code, word, detail, wait)
