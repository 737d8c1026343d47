"""A WebSocket that hands its text frames to a receiver as they are read, without a task in between.

The laws. Frames are taken one after another. The receiver of a frame says at once that it has taken it, or
returns what has to be awaited first; until that is done, and while the client does not read what it is sent,
the frames that come are queued, and aiohttp stops reading from the socket when the queue is full. After the
first frame that ends the connection, no frame is taken any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol, TypeAlias

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp.http_websocket import WebSocketWriter

from duly.wire.frames import FRAME_LIMIT

READ_BYTES: Final = 4 * FRAME_LIMIT
"""A frame up to here is read, if only to say that it is too large; one beyond ends the connection."""
TOO_LARGE: Final = f"a frame of more than {READ_BYTES} bytes; the limit is {FRAME_LIMIT}".encode()
_QUEUE_BYTES: Final = 64 * 1024
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

    def feed_data(self, data: WSMessage, size: int) -> None:  # type: ignore[override]  # texts are bytes here
        """Take what has been read. It must not raise: its caller is a C function that cannot."""
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
            self.feed_data(_UNFINISHED, 0)

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


class FrameSocket(web.WebSocketResponse):
    """The server's end of a WebSocket; `heartbeat` is how often (s) a silent client is asked for a sign of
    life."""

    def __init__(self, heartbeat: float) -> None:
        # Text is left as the bytes it came in: that is what is read, stored and passed on.
        super().__init__(max_msg_size=READ_BYTES, heartbeat=heartbeat, compress=False, decode_text=False)
        self._frames: _FrameQueue | None = None

    def _post_start(self, request: web.BaseRequest, protocol: str | None, writer: WebSocketWriter) -> None:
        """Begin to read. aiohttp does the same, with a queue of its own."""
        self._ws_protocol = protocol
        self._writer = writer
        self._reset_heartbeat()
        handler = request.protocol
        self._reader = self._frames = _FrameQueue(handler, _QUEUE_BYTES, loop=asyncio.get_running_loop())
        self._parser = WebSocketReader(self._frames, READ_BYTES, compress=False, decode_text=False)
        handler.set_parser(self._parser, data_received_cb=self._on_data_received)
        handler.keep_alive(False)

    async def serve(self, receive: Receive, client: ReadingClient) -> AsyncIterator[WSMessage]:
        """Hand the text frames to `receive` until the connection ends, and yield the other messages. Raises
        what `receive` has raised."""
        frames = self._frames
        assert frames is not None
        frames.client = client
        while True:
            if not frames.over and frames.is_empty():
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
