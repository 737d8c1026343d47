"""The WebSocket that hands frames over as they are read: order, waiting, bugs, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import WSMessage, WSMsgType, web

from duly.transports.frame_socket import TURN_MESSAGES, FrameSocket, _FrameQueue
from tests.guard import GUARD

Serve = Callable[[FrameSocket], Awaitable[None]]
HEARTBEAT = 0.5


async def talk(serve: Serve, *texts: str, binary: bytes | None = None) -> int | None:
    """Send frames to a server that serves its socket like this, close, and return its close code."""
    over = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = FrameSocket(heartbeat=20.0)
        await socket.prepare(request)
        try:
            await serve(socket)
        finally:
            over.set()
        return socket

    app = web.Application()
    app.add_routes([web.get("/", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as http, http.ws_connect(f"ws://127.0.0.1:{port}/") as client:
            for text in texts:
                await client.send_str(text)
            if binary is not None:
                await client.send_bytes(binary)
            await client.close()
            async with asyncio.timeout(GUARD):
                await over.wait()
            return client.close_code
    finally:
        await runner.cleanup()


class WillingClient:
    """A client that reads all it is sent, unless it is told to stall."""

    def __init__(self) -> None:
        self.stall_timer: asyncio.TimerHandle | None = None
        self.waits = 0

    async def drained(self, seconds: float | None = None) -> None:
        self.waits += 1
        self.stall_timer = None


async def test_frames_are_handed_over_in_order_and_other_messages_are_yielded() -> None:
    taken: list[bytes] = []
    others: list[WSMsgType] = []

    def receive(frame: bytes) -> bool:
        taken.append(frame)
        return True

    async def serve(socket: FrameSocket) -> None:
        others.extend([message.type async for message in socket.serve(receive, WillingClient())])

    await talk(serve, "one", "two", "three", binary=b"four")
    assert taken == [b"one", b"two", b"three"]
    assert others == [WSMsgType.BINARY]


async def test_the_next_frame_waits_until_the_one_before_is_finished() -> None:
    log: list[str] = []

    async def finish(text: str) -> None:
        await asyncio.sleep(0.01)
        log.append(f"finished {text}")

    def receive(frame: bytes) -> Awaitable[object]:
        log.append(f"took {frame.decode()}")
        return finish(frame.decode())

    async def serve(socket: FrameSocket) -> None:
        async for _ in socket.serve(receive, WillingClient()):
            pass

    await talk(serve, "one", "two", "three")
    assert log == [f"{done} {text}" for text in ("one", "two", "three") for done in ("took", "finished")]


async def test_the_next_frame_waits_for_a_client_that_does_not_read() -> None:
    client = WillingClient()
    taken: list[int] = []

    def receive(_: bytes) -> bool:
        taken.append(client.waits)
        client.stall_timer = asyncio.get_running_loop().call_later(60, print)
        client.stall_timer.cancel()
        return False

    async def serve(socket: FrameSocket) -> None:
        async for _ in socket.serve(receive, client):
            pass

    await talk(serve, "one", "two", "three")
    assert taken == [0, 1, 2]


async def test_a_bug_in_taking_a_frame_is_raised_where_the_connection_is_served() -> None:
    raised: list[str] = []

    def receive(frame: bytes) -> bool:
        raise ZeroDivisionError(frame.decode())

    async def serve(socket: FrameSocket) -> None:
        try:
            async for _ in socket.serve(receive, WillingClient()):
                pass
        except ZeroDivisionError as problem:
            raised.append(str(problem))

    await talk(serve, "one", "two")
    assert raised == ["one"]


async def test_a_frame_after_the_end_of_the_connection_is_not_taken() -> None:
    taken: list[bytes] = []

    def receive(frame: bytes) -> bool:
        taken.append(frame)
        return True

    async def serve(socket: FrameSocket) -> None:
        async def read() -> None:
            async for _ in socket.serve(receive, WillingClient()):
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        await socket.close(message=b"enough")
        await reading

    code = await talk(serve, "late")
    assert taken == []
    assert code == aiohttp.WSCloseCode.OK


async def test_a_client_is_asked_for_a_sign_of_life_only_while_it_gives_none() -> None:
    """It talks: no ping. It is silent: a ping. It says anything instead of a pong: it is asked again later.
    It answers no more: its connection ends."""
    gone = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = FrameSocket(heartbeat=HEARTBEAT)
        await socket.prepare(request)
        async for _ in socket.serve(lambda _: True, WillingClient()):
            pass
        gone.set()
        return socket

    app = web.Application()
    app.add_routes([web.get("/", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"ws://127.0.0.1:{runner.addresses[0][1]}/"
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(url, autoping=False) as client,
            asyncio.timeout(GUARD),
        ):
            asked = asyncio.ensure_future(client.receive())
            loop = asyncio.get_running_loop()
            spoke = loop.time()
            while loop.time() < spoke + 3 * HEARTBEAT and not asked.done():
                await client.send_str("still here")
                said_at = loop.time()
                await asyncio.sleep(HEARTBEAT / 20)
            assert not asked.done() or loop.time() - said_at > HEARTBEAT / 2  # starved: nothing was said
            for _ in range(2):
                assert (await asked).type is WSMsgType.PING
                await client.send_str("not a pong")
                asked = asyncio.ensure_future(client.receive())
            assert (await asked).type is WSMsgType.PING
            assert not gone.is_set()
            await gone.wait()
    finally:
        await runner.cleanup()


TEXT, PING, PONG = b"\x81\x81\0\0\0\0x", b"\x89\x80\0\0\0\0", b"\x8a\x80\0\0\0\0"
"""Frames of a client (RFC 6455, 5.2), masked with zeros."""


@pytest.mark.parametrize("frame", [TEXT, PING, PONG, PING + TEXT])
@pytest.mark.parametrize("greeted", [False, True])
async def test_what_comes_in_one_read_is_taken_in_several_turns(frame: bytes, greeted: bool) -> None:
    socket = FrameSocket(heartbeat=20.0)
    turn, count, most = 0, 0, 0
    read, over = asyncio.Event(), asyncio.Event()

    async def tick() -> None:
        nonlocal turn, count, most
        while not over.is_set():
            turn, most, count = turn + 1, max(most, count), 0
            await asyncio.sleep(0)

    def took(_: object = None) -> bool:
        nonlocal count
        count += 1
        return True

    class CountingQueue(_FrameQueue):
        async def read(self) -> WSMessage:
            message = await super().read()
            took()
            return message

    async def handle(request: web.Request) -> web.StreamResponse:
        await socket.prepare(request)
        ticking = asyncio.create_task(tick())
        read.set()
        if greeted:
            async for _ in socket.serve(took, WillingClient()):
                pass
        else:
            async for _ in socket:
                pass
        over.set()
        await ticking
        return socket

    app = web.Application()
    app.add_routes([web.get("/", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duly.transports.frame_socket._FrameQueue", CountingQueue)
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
            writer.write(
                b"GET / HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            async with asyncio.timeout(GUARD):
                await read.wait()
                writer.write(frame * 5_000 + b"\x88\x80\0\0\0\0")
                while await reader.read(1 << 16):
                    pass
                await over.wait()
            writer.close()
        finally:
            await runner.cleanup()
    assert 0 < most <= 2 * TURN_MESSAGES + 2
