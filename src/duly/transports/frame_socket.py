"""A WebSocket that hands its text frames to a receiver as they are read, without a task in between.

The laws. Frames are taken one after another. The receiver of a frame says at once that it has taken it, or
returns what has to be awaited first; until that is done, and while the client does not read what it is sent,
the frames that come are queued, and aiohttp stops reading from the socket when the queue is full. After the
first frame that ends the connection, no frame is taken any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp.http_websocket import WebSocketWriter

from duly.wire.frames import FRAME_LIMIT

READ_BYTES: Final = 4 * FRAME_LIMIT
"""A frame up to here is read, if only to say that it is too large; one beyond ends the connection."""
TOO_LARGE: Final = f"a frame of more than {READ_BYTES} bytes; the limit is {FRAME_LIMIT}".encode()
_QUEUE_BYTES: Final = 64 * 1024
_TEXT: Final = WSMsgType.TEXT
_HARMLESS: Final = frozenset({WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG})
"""The types after which the connection goes on."""
_UNFINISHED: Final = WSMessage(WSMsgType.CONTINUATION, None, None)
"""Wakes the task that serves the connection; aiohttp itself queues no message of this type."""

Take = Callable[[bytes], Awaitable[object] | None]
"""Takes a frame; returns what is to be awaited before the next one, or None."""


class _FrameQueue(WebSocketDataQueue):
    """What aiohttp's parser feeds. A text frame goes to the receiver; any other message, and what has to wait
    its turn, is queued for the task that serves the connection."""

    take: Take | None = None
    """the receiver, while frames are handed over"""
    busy = True
    """the task that serves the connection is at work on a message"""
    unfinished: Awaitable[object] | None = None
    """what has to be awaited before the next frame is taken"""

    def feed_data(self, data: WSMessage, size: int) -> None:  # type: ignore[override]  # texts are bytes here
        """Take what has been read. It must not raise: its caller is a C function that cannot."""
        take, kind = self.take, data[0]
        if take is None or kind is not _TEXT or self.busy or self._buffer:
            if kind not in _HARMLESS:
                self.take = None
            super().feed_data(data, size)
            return
        try:
            unfinished = take(data[1])
        except Exception as problem:
            unfinished = _failed(problem)
        if unfinished is not None:
            self.unfinished = unfinished
            super().feed_data(_UNFINISHED, 0)


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

    def hand_over(self, take: Take) -> None:
        """Hand the text frames that come from now on to `take`, as soon as `next_message` is waited for."""
        assert self._frames is not None
        self._frames.take = take

    async def next_message(self) -> WSMessage:
        """Return the next message that was not handed over; frames are handed over until it comes. Raises
        what taking one of them has raised."""
        frames = self._frames
        assert frames is not None
        frames.busy = False
        message: WSMessage = await self.receive()
        frames.busy = True
        unfinished, frames.unfinished = frames.unfinished, None
        if unfinished is not None:
            await unfinished
        return message

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        """Close the socket; the client learns the limit if it has sent a frame that is too large."""
        if code == WSCloseCode.MESSAGE_TOO_BIG:
            message = message or TOO_LARGE
        return await super().close(code=code, message=message, drain=drain)
