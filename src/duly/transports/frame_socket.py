"""A WebSocket that passes its text frames to a receiver as they are read, without a task in between.

The laws. Frames are passed on one after another. The receiver takes a frame at once, or returns an awaitable.
Until that is done, and while the client does not read its own frames, incoming frames are queued, and aiohttp
stops reading from the socket when the queue is full. After the first frame that ends the connection no frame
is passed on. The received part of an incomplete frame counts towards the memory that clients share fairly
(`duly.transports.read_memory`).
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
"""The largest frame that is read, if only to refuse it as too large; a larger one ends the connection."""
TOO_LARGE: Final = f"a frame of more than {READ_BYTES} bytes; the limit is {FRAME_LIMIT}".encode()
FREE_BYTES: Final = 4 * 1024
"""How many bytes of an incomplete frame are not counted as shared memory."""
_QUEUE_BYTES: Final = 64 * 1024
_WHY: Final = WSCloseCode.TRY_AGAIN_LATER.to_bytes(2, "big") + b"the hub is busy with large frames; come back"
_TRY_AGAIN: Final = bytes((0x88, len(_WHY))) + _WHY
"""A close frame (RFC 6455, 5.5.1)."""
_TEXT: Final = WSMsgType.TEXT
_OVER: Final = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED)
_UNFINISHED: Final = WSMessage(WSMsgType.CONTINUATION, None, None)
"""Wakes the task that serves the connection; aiohttp itself queues no message of this type."""
_HARMLESS: Final = frozenset({_TEXT, WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG, _UNFINISHED.type})
"""The message types after which the connection goes on."""

TURN_MESSAGES: Final = 200
"""How many messages of a connection are taken in one turn of the event loop: a read can hold 40,000 pings."""
HEAR_SECONDS: Final = 5.0
"""How often at least, in seconds, a frame is taken from a client that does not read: it may be a
heartbeat."""

Receive: TypeAlias = Callable[[bytes], bool | Awaitable[object]]
"""Takes a frame; returns an awaitable if the next frame has to wait for it, otherwise a bool."""


class ReadingClient(Protocol):
    """The part of a session that decides whether the frames of its client are taken."""

    stall_timer: asyncio.TimerHandle | None
    """checks that the client reads; set if it was congested a moment ago"""

    async def drained(self, seconds: float | None = None) -> None:
        """Return when the client has read enough, or after this time."""
        ...


class _FrameQueue(WebSocketDataQueue):
    """The queue that aiohttp's parser fills. A text frame goes to the receiver; other messages, and frames
    that have to wait, are queued for the task that serves the connection."""

    receive: Receive | None = None
    """the receiver, while frames are passed on as they are read"""
    client: ReadingClient
    over = False
    """the connection has ended"""
    unfinished: Awaitable[object] | None = None
    """the awaitable that has to finish before the next frame is taken"""
    parsed = 0
    """the bytes of frames that were completed since this was last read"""
    passed_on = 0
    """how many frames of the current read went to the receiver at once"""
    _read_in_turn = 0

    def feed_data(self, data: WSMessage, size: int) -> None:  # type: ignore[override]  # texts are bytes here
        """Take a message from the parser. This must not raise, because the C function that calls it cannot
        handle an error."""
        self.parsed += size + (6 if size < 126 else 8 if size < 65_536 else 14)  # with the frame's head
        receive = self.receive
        if receive is None or data[0] is not _TEXT:
            self.receive = None  # later frames queue behind this one, for the task
            self.over = self.over or data[0] not in _HARMLESS
            super().feed_data(data, size)
            return
        try:
            said = receive(data[1])
        except Exception as problem:
            said = _failed(problem)
        self.passed_on += 1
        waits = said is not True and said is not False
        if waits or self.passed_on == TURN_MESSAGES or self.client.stall_timer is not None:
            self.unfinished = self.finish(said)
            self.receive = None
            super().feed_data(_UNFINISHED, 0)

    async def read(self) -> WSMessage:
        """Return the next message, with a turn of the event loop after every `TURN_MESSAGES`."""
        self._read_in_turn += 1
        if self._read_in_turn >= TURN_MESSAGES:
            self._read_in_turn = 0
            await asyncio.sleep(0)
        return cast("WSMessage", await super().read())

    def is_empty(self) -> bool:
        """Return whether no message waits for the task that serves the connection."""
        return not self._buffer

    async def finish(self, said: bool | Awaitable[object]) -> None:
        """Wait until the receiver has taken a frame, and until the client reads."""
        if not isinstance(said, bool):
            await said
        if self.client.stall_timer is not None:
            await self.client.drained(HEAR_SECONDS)


async def _failed(problem: Exception) -> None:
    raise problem


class _CountingReader:
    """Wraps aiohttp's parser, and counts the bytes that it keeps of an incomplete frame."""

    def __init__(self, heard: Callable[[], None], frames: _FrameQueue, request: web.BaseRequest) -> None:
        self._heard = heard
        self._frames = frames
        self._transport = request.transport
        self._parse: Callable[[bytes], tuple[bool, bytes]] = WebSocketReader(
            frames, READ_BYTES, compress=False, decode_text=False
        ).feed_data
        self._kept = 0
        """how many bytes the parser keeps; a fragmented frame counts with the headers of its fragments"""
        self._memory = request.app.get(MEMORY) if isinstance(request, web.Request) else None
        self._reading: Reading | None = None
        self._owner = ""
        """the client to which the bytes are charged"""
        self.feed_eof = frames.feed_eof

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse data that was read, and count the bytes that the parser keeps."""
        self._heard()
        said = self._parse(data)
        frames = self._frames
        self._kept = kept = max(0, self._kept + len(data) - frames.parsed)
        frames.parsed = frames.passed_on = 0
        if kept > FREE_BYTES or self._reading is not None:
            self._count(kept)
        return said

    def settle(self) -> None:
        """Count again: frames that had arrived before were parsed when there was room for them."""
        if self._reading is not None:
            self._kept = max(0, self._kept - self._frames.parsed)
            self._frames.parsed = 0
            self._count(self._kept)

    def belong_to(self, owner: str) -> None:
        """Charge the bytes to this client from now on."""
        self.release()
        self._owner = owner
        self._count(self._kept)

    def release(self) -> None:
        """Release the counted bytes: the connection has ended, or the frame is complete."""
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
        """Close the connection; the client reconnects, and gets what it missed."""
        self._parse = _forget  # frees the parser's bytes now, not when the connection has ended
        self._kept = 0
        self.release()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(_TRY_AGAIN)
            transport.close()
            if transport.get_write_buffer_size():
                transport.abort()  # the client does not even read


def _forget(_: bytes) -> tuple[bool, bytes]:
    return False, b""


class FrameSocket(web.WebSocketResponse):
    """The server's end of a WebSocket; after `heartbeat` seconds of silence it sends the client a ping."""

    def __init__(self, heartbeat: float) -> None:
        # Text is not decoded: its bytes are parsed, stored and passed on as they are.
        super().__init__(max_msg_size=READ_BYTES, heartbeat=heartbeat, compress=False, decode_text=False)
        self._frames: _FrameQueue | None = None
        self._every = heartbeat
        self._time = asyncio.get_running_loop().time
        self._counting: _CountingReader | None = None

    def _post_start(self, request: web.BaseRequest, protocol: str | None, writer: WebSocketWriter) -> None:
        """Start reading, as aiohttp does, but with the queue and the parser of this module."""
        self._ws_protocol = protocol
        self._writer = writer
        self._reset_heartbeat()
        handler = request.protocol
        self._reader = self._frames = _FrameQueue(handler, _QUEUE_BYTES, loop=asyncio.get_running_loop())
        self._counting = _CountingReader(self._on_data_received, self._frames, request)
        handler.set_parser(cast("WebSocketReader", self._counting))
        handler.keep_alive(False)

    def _on_data_received(self) -> None:
        """Postpone the next heartbeat, since the client has sent data. The running timer is not reset; it
        checks the time when it is due. (aiohttp schedules a callback for every read instead.)"""
        if self._heartbeat_cb is None or self._pong_response_cb is not None:
            self._reset_heartbeat()
        else:
            self._heartbeat_when = self._time() + self._every

    def belong_to(self, owner: str) -> None:
        """Charge the bytes of incomplete frames to this client."""
        if self._counting is not None:
            self._counting.belong_to(owner)

    def release(self) -> None:
        """Release the memory of a connection that has ended."""
        if self._counting is not None:
            self._counting.release()

    async def serve(self, receive: Receive, client: ReadingClient) -> AsyncIterator[WSMessage]:
        """Pass the text frames to `receive` until the connection ends, and yield the other messages. Raises
        the errors of `receive`."""
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
        """Close the socket; if the client sent a frame that is too large, the close frame names the limit."""
        if code == WSCloseCode.MESSAGE_TOO_BIG:
            message = message or TOO_LARGE
        return await super().close(code=code, message=message, drain=drain)
