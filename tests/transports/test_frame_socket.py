"""The WebSocket that hands frames over as they are read: order, waiting, bugs, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import WSMsgType, web

from duly.transports.frame_socket import FrameSocket

Serve = Callable[[FrameSocket], Awaitable[None]]


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
            async with asyncio.timeout(10):
                await over.wait()
            return client.close_code
    finally:
        await runner.cleanup()


async def until_closed(socket: FrameSocket) -> list[WSMsgType]:
    """The types of the messages that were not handed over, the last one that of the end."""
    seen = []
    while not seen or seen[-1] not in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
        seen.append((await socket.next_message()).type)
    return seen


async def test_frames_are_handed_over_in_order_and_other_messages_are_returned() -> None:
    taken: list[bytes] = []
    others: list[WSMsgType] = []

    async def serve(socket: FrameSocket) -> None:
        socket.hand_over(taken.append)
        others.extend(await until_closed(socket))

    await talk(serve, "one", "two", "three", binary=b"four")
    returned = [kind for kind in others if kind is WSMsgType.TEXT]
    assert taken == [b"one", b"two", b"three"][len(returned) :], "the first may come before the task waits"
    assert WSMsgType.BINARY in others


async def test_the_next_frame_waits_until_the_one_before_is_finished() -> None:
    log: list[str] = []

    async def finish(text: str) -> None:
        await asyncio.sleep(0.01)
        log.append(f"finished {text}")

    def take(frame: bytes) -> Awaitable[object] | None:
        log.append(f"took {frame.decode()}")
        return finish(frame.decode())

    async def serve(socket: FrameSocket) -> None:
        socket.hand_over(take)
        while True:
            message = await socket.next_message()
            if message.type is WSMsgType.TEXT:
                await (take(message.data) or asyncio.sleep(0))
            elif message.type is not WSMsgType.CONTINUATION:
                return

    await talk(serve, "one", "two", "three")
    assert log == [f"{done} {text}" for text in ("one", "two", "three") for done in ("took", "finished")]


async def test_a_bug_in_taking_a_frame_is_raised_where_the_connection_is_served() -> None:
    raised: list[Exception] = []

    def take(frame: bytes) -> None:
        raise ZeroDivisionError(frame.decode())

    async def serve(socket: FrameSocket) -> None:
        socket.hand_over(take)
        try:
            while (await socket.next_message()).type is WSMsgType.TEXT:
                pass
        except ZeroDivisionError as problem:
            raised.append(problem)

    await talk(serve, "one", "two")
    assert [str(problem) for problem in raised] in (["one"], ["two"])


async def test_a_frame_after_the_end_of_the_connection_is_not_taken() -> None:
    taken: list[bytes] = []

    async def serve(socket: FrameSocket) -> None:
        socket.hand_over(taken.append)
        waiting = asyncio.ensure_future(until_closed(socket))
        await asyncio.sleep(0)
        await socket.close(message=b"enough")
        await waiting

    code = await talk(serve, "late")
    assert taken == []
    assert code == aiohttp.WSCloseCode.OK
