"""What sessions are pushed in a turn of the event loop is written at its end, all of it in one callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import cast

import pytest
from aiohttp import WSMsgType, web

from duly.transports.websocket import WRITE_BYTES, TurnWrites, WebSocketSession
from duly.wire.outgoing import ServerAck, encode


class Line(asyncio.Transport):
    """A connection that remembers what was written to it; `unsent` bytes wait for its client."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.unsent = 0
        self.broken = False
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.broken:
            raise ValueError("a bug")
        self.written.append(bytes(data) if not isinstance(data, bytes) else data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class AiohttpSocket:
    """The end of a WebSocket that the task writes to when a client reads slowly."""

    closed = False

    def __init__(self, line: Line) -> None:
        self.line = line
        self.texts: list[bytes] = []

    async def send_frame(self, text: bytes, kind: WSMsgType) -> None:
        assert kind is WSMsgType.TEXT
        self.texts.append(text)
        self.line.unsent = 0  # the client has read

    async def close(self, *, code: int, message: bytes) -> None:
        self.line.abort()


class Sessions(AsyncExitStack):
    """Sessions that share their writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = TurnWrites()

    def open(self) -> tuple[WebSocketSession, Line, AiohttpSocket]:
        line = Line()
        socket = AiohttpSocket(line)
        session = WebSocketSession(cast("web.WebSocketResponse", socket), line, self.writes)
        self.push_async_callback(session.finish)
        return session, line, socket


def frame(n: int, text: str = "") -> ServerAck:
    return ServerAck(f"1_{n}", 0, detail=text or None)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_is_pushed_in_a_turn_is_written_at_once_in_order() -> None:
    async with Sessions() as sessions:
        session, line, _ = sessions.open()
        await turn()
        for n in range(3):
            session.push(frame(n))
        assert line.written == []
        await turn()
        texts = [encode(frame(n)) for n in range(3)]
        assert line.written == [b"".join(bytes((0x81, len(text))) + text for text in texts)]


async def test_a_frame_for_many_sessions_is_framed_once_and_written_in_one_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Sessions() as sessions:
        opened = [sessions.open() for _ in range(5)]
        await turn()
        scheduled: list[Callable[..., object]] = []
        one = frame(1)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_soon", scheduled.append)
            for session, _, _ in opened:
                session.push(one)
        (write,) = scheduled
        write()
        assert len({id(line.written[0]) for _, line, _ in opened}) == 1


async def test_a_session_that_cannot_be_written_does_not_keep_the_others_waiting() -> None:
    async with Sessions() as sessions:
        (one, broken, _), (other, line, _) = sessions.open(), sessions.open()
        await turn()
        broken.broken = True
        one.push(frame(1))
        other.push(frame(2))
        await turn()
        assert broken.aborted
        assert len(line.written) == 1


@pytest.mark.parametrize("length", [1, 200, 70_000])
async def test_a_client_that_reads_slowly_is_written_the_same_texts_by_the_task(length: int) -> None:
    async with Sessions() as sessions:
        session, line, socket = sessions.open()
        await turn()
        line.unsent = WRITE_BYTES + 1
        one = frame(1, "x" * length)
        session.push(one)
        await turn()
        assert socket.texts == [encode(one)]
        assert not any(line.written)
        session.push(frame(2))
        await turn()
        assert line.written[-1].endswith(encode(frame(2)))
