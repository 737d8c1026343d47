"""A WebSocket that hands its text frames to a receiver as they are read, without a task in between.

The laws. Frames are taken one after another. The receiver of a frame says at once that it has taken it, or
returns what has to be awaited first; until that is done, and while the client does not read what it is sent,
the frames that come are queued, and aiohttp stops reading from the socket when the queue is full. After the
first frame that ends the connection, no frame is taken any more. What has come of a frame that is not whole
counts as memory that is shared fairly (`duly.transports.read_memory`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol, TypeAlias, cast

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp.http_websocket import WebSocketWriter

from duly.errors import Overloaded
from duly.transports.read_memory import MEMORY, Reading
from duly.wire.frames import FRAME_LIMIT

READ_BYTES: Final = 4 * FRAME_LIMIT
"""A frame up to here is read, if only to say that it is too large; one beyond ends the connection."""
TOO_LARGE: Final = f"a frame of more than {READ_BYTES} bytes; the limit is {FRAME_LIMIT}".encode()
FREE_BYTES: Final = 4 * 1024
"""What may have come of a frame that is not whole before it is counted."""
_QUEUE_BYTES: Final = 64 * 1024
_WHY: Final = WSCloseCode.TRY_AGAIN_LATER.to_bytes(2, "big") + b"the hub is busy with large frames; come back"
_TRY_AGAIN: Final = bytes((0x88, len(_WHY))) + _WHY
"""A close frame (RFC 6455, 5.5.1)."""
_TEXT: Final = WSMsgType.TEXT
_OVER: Final = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED)
_UNFINISHED: Final = WSMessage(WSMsgType.CONTINUATION, None, None)
"""Wakes the task that serves the connection; aiohttp itself queues no message of this type."""
_HARMLESS: Final = frozenset({_TEXT, WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG, _UNFINISHED.type})
"""The types after which the connection goes on."""

HEAR_SECONDS: Final = 5.0
"""A frame of a client that does not read is taken at least this often: it may be only a sign of life."""

Receive: TypeAlias = Callable[[bytes], bool | Awaitable[object]]
"""Takes a frame; returns what is to be awaited before the next one, or a bool if that is nothing."""


class ReadingClient(Protocol):
    """What of a session decides whether the frames of its client are taken."""

    stall_timer: asyncio.TimerHandle | None
    """checks that the client reads: it was congested a moment ago"""

    async def drained(self, seconds: float | None = None) -> None:
        """Returns when the client has read enough, or after this time."""
        ...


class _FrameQueue(WebSocketDataQueue):
    """What aiohttp's parser feeds. A text frame goes to the receiver; any other message, and what has to wait
    its turn, is queued for the task that serves the connection."""

    receive: Receive | None = None
    """the receiver, while frames are handed over as they come"""
    client: ReadingClient
    over = False
    """the connection has come to its end"""
    unfinished: Awaitable[object] | None = None
    """what has to be awaited before the next frame is taken"""
    parsed = 0
    """bytes of the frames that have come whole since that was last asked"""

    def feed_data(self, data: WSMessage, size: int) -> None:  # type: ignore[override]  # texts are bytes here
        """Take what has been read. It must not raise: its caller is a C function that cannot."""
        self.parsed += size + (6 if size < 126 else 8 if size < 65_536 else 14)  # with the frame's head
        receive = self.receive
        if receive is None or data[0] is not _TEXT:
            self.receive = None  # the task comes first now
            self.over = self.over or data[0] not in _HARMLESS
            super().feed_data(data, size)
            return
        try:
            said = receive(data[1])
        except Exception as problem:
            said = _failed(problem)
        if self.client.stall_timer is not None or (said is not True and said is not False):
            self.unfinished = self.finish(said)
            self.receive = None
            super().feed_data(_UNFINISHED, 0)

    def is_empty(self) -> bool:
        """Whether no message waits for the task that serves the connection."""
        return not self._buffer

    async def finish(self, said: bool | Awaitable[object]) -> None:
        """Wait for what the receiver of a frame waits for, and for a client that does not read."""
        if not isinstance(said, bool):
            await said
        if self.client.stall_timer is not None:
            await self.client.drained(HEAR_SECONDS)


async def _failed(problem: Exception) -> None:
    raise problem


class _CountingReader:
    """aiohttp's parser, and how much it keeps of a frame that has not come whole."""

    def __init__(self, heard: Callable[[], None], frames: _FrameQueue, request: web.BaseRequest) -> None:
        self._heard = heard
        self._frames = frames
        self._transport = request.transport
        self._parse: Callable[[bytes], tuple[bool, bytes]] = WebSocketReader(
            frames, READ_BYTES, compress=False, decode_text=False
        ).feed_data
        self._kept = 0
        """bytes that the parser keeps; those of a frame in many parts count with their heads"""
        self._memory = request.app.get(MEMORY) if isinstance(request, web.Request) else None
        self._reading: Reading | None = None
        self._owner = ""
        """whose memory it takes"""
        self.feed_eof = frames.feed_eof

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse what has been read, and count what is left of it."""
        self._heard()
        said = self._parse(data)
        frames = self._frames
        self._kept = kept = max(0, self._kept + len(data) - frames.parsed)
        frames.parsed = 0
        if kept > FREE_BYTES or self._reading is not None:
            self._count(kept)
        return said

    def settle(self) -> None:
        """Count anew: frames that had come before were parsed when there was room for them."""
        if self._reading is not None:
            self._kept = max(0, self._kept - self._frames.parsed)
            self._frames.parsed = 0
            self._count(self._kept)

    def belong_to(self, owner: str) -> None:
        """From now on it takes the memory of this client."""
        self.release()
        self._owner = owner
        self._count(self._kept)

    def release(self) -> None:
        """The connection is over, or what was begun is whole."""
        if self._reading is not None and self._memory is not None:
            self._memory.end(self._reading)
            self._reading = None

    def _count(self, kept: int) -> None:
        if kept <= FREE_BYTES or self._memory is None:
            self.release()
            return
        if self._reading is None:
            self._reading = Reading(self._owner, self._give_up)
        try:
            self._memory.resize(self._reading, kept)
        except Overloaded:
            self._give_up()

    def _give_up(self) -> None:
        """Close the connection: the client comes back, and finds everything again."""
        self._parse = _forget  # what the parser keeps is freed now, and not when the connection has ended
        self._kept = 0
        self.release()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(_TRY_AGAIN)
            transport.close()
            if transport.get_write_buffer_size():
                transport.abort()  # it does not even read


def _forget(_: bytes) -> tuple[bool, bytes]:
    return False, b""


class FrameSocket(web.WebSocketResponse):
    """The server's end of a WebSocket; `heartbeat` is how often (s) a silent client is asked for a sign of
    life."""

    def __init__(self, heartbeat: float) -> None:
        # Text is left as the bytes it came in: that is what is read, stored and passed on.
        super().__init__(max_msg_size=READ_BYTES, heartbeat=heartbeat, compress=False, decode_text=False)
        self._frames: _FrameQueue | None = None
        self._every = heartbeat
        self._time = asyncio.get_running_loop().time
        self._counting: _CountingReader | None = None

    def _post_start(self, request: web.BaseRequest, protocol: str | None, writer: WebSocketWriter) -> None:
        """Begin to read. aiohttp does the same, with a queue of its own."""
        self._ws_protocol = protocol
        self._writer = writer
        self._reset_heartbeat()
        handler = request.protocol
        self._reader = self._frames = _FrameQueue(handler, _QUEUE_BYTES, loop=asyncio.get_running_loop())
        self._counting = _CountingReader(self._on_data_received, self._frames, request)
        handler.set_parser(cast("WebSocketReader", self._counting))
        handler.keep_alive(False)

    def _on_data_received(self) -> None:
        """Put the next heartbeat off: the client has given a sign of life. The timer that runs is left alone;
        it looks at the time when it is due. (aiohttp does the same in a callback of its own for every
        read.)"""
        if self._heartbeat_cb is None or self._pong_response_cb is not None:
            self._reset_heartbeat()
        else:
            self._heartbeat_when = self._time() + self._every

    def belong_to(self, owner: str) -> None:
        """Count what has come of unfinished frames for this client."""
        if self._counting is not None:
            self._counting.belong_to(owner)

    def release(self) -> None:
        """The connection is over: nothing of it is kept."""
        if self._counting is not None:
            self._counting.release()

    async def serve(self, receive: Receive, client: ReadingClient) -> AsyncIterator[WSMessage]:
        """Hand the text frames to `receive` until the connection ends, and yield the other messages. Raises
        what `receive` has raised."""
        frames, counting = self._frames, self._counting
        assert frames is not None
        assert counting is not None
        frames.client = client
        while True:
            if not frames.over and frames.is_empty():
                counting.settle()
                frames.receive = receive
            message: WSMessage = await self.receive()
            frames.receive = None
            unfinished, frames.unfinished = frames.unfinished, None
            if unfinished is not None:
                await unfinished
            if message.type is _TEXT:
                await frames.finish(receive(message.data))
            elif message.type in _OVER:
                return
            elif message.type is not _UNFINISHED.type:
                yield message

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        """Close the socket; the client learns the limit if it has sent a frame that is too large."""
        if code == WSCloseCode.MESSAGE_TOO_BIG:
            message = message or TOO_LARGE
        return await super().close(code=code, message=message, drain=drain)
