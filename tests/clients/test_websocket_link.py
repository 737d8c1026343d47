"""The link of a client: made again whenever it breaks, wherever it breaks, also to another hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.clients.websocket_link import Access, WebSocketLink
from duly.errors import Malformed
from duly.wire import frames
from duly.wire.frames import Frame
from tests.end_to_end.many import LocalCluster
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.servers import Postgres, free_port

WELCOME = frames.encode(Frame("welcome", you="phone")).decode()


@asynccontextmanager
async def a_hub(*turns: str) -> AsyncIterator[str]:
    """A hub that does to each connection what its turn says; to the rest as to the last."""
    seen = 0

    async def serve(request: web.Request) -> web.WebSocketResponse:
        nonlocal seen
        turn = turns[min(seen, len(turns) - 1)]
        seen += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if turn == "abort":
            assert request.transport is not None
            request.transport.abort()
            return socket
        await socket.receive()
        if turn == "nonsense":
            await socket.send_str("[]")
        elif turn == "binary":
            await socket.send_bytes(b"\0")
        elif turn == "welcome":
            await socket.send_str(WELCOME)
            await socket.receive()
        await socket.close()
        return socket

    app = web.Application()
    app.add_routes([web.get("/v1/ws", serve)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("url", ["127.0.0.1:7800", "mqtt://127.0.0.1", ""])
async def test_what_is_no_address_is_not_tried_for_ever(url: str, tmp_path: Path) -> None:
    for _ in range(2):  # and its memory is free for the next try
        with pytest.raises(Malformed, match="write http://"):
            async with App(url, "token", store=str(tmp_path / "app.db")):
                pass


async def test_a_client_that_waits_for_a_hub_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    tries = asyncio.Queue[None]()

    async def where() -> tuple[str, str]:
        tries.put_nowait(None)
        return "http://127.0.0.1:1", "token"

    link = WebSocketLink(
        "http://127.0.0.1:1", "", up=lambda _: None, heard=lambda _: None, access=Access(where)
    )
    await link.start()
    for _ in range(4):
        await tries.get()
    await link.stop()
    assert [record.levelname for record in caplog.records if record.name == "duly.link"] == ["WARNING"]
    assert "http://127.0.0.1:1 cannot be reached" in caplog.text


@pytest.mark.parametrize("turn", ["close", "abort", "nonsense", "binary"])
async def test_a_hub_that_dies_before_its_welcome_is_tried_again(turn: str) -> None:
    async with a_hub(turn, turn, "welcome") as url:
        link = WebSocketLink(url, "token", up=lambda welcome: None, heard=lambda frame: None)
        await link.start()
        async with asyncio.timeout(GUARD):
            assert (await link.ready()).you == "phone"
        await link.stop()


async def test_a_hub_that_is_not_there_is_passed_over(local: LocalHub) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    async with asyncio.timeout(GUARD), App(f"{nobody}, {local.url}", local.tokens["phone"]) as app:
        assert app.name == "phone"


async def test_several_hubs_share_their_clients() -> None:
    async with a_hub("welcome") as one, a_hub("welcome") as other:
        reached: set[str] = set()
        for n in range(20):
            link = WebSocketLink(
                f"{one},{other}", f"token {n}", up=lambda welcome: None, heard=lambda frame: None
            )
            await link.start()
            async with asyncio.timeout(GUARD):
                await link.ready()
            assert link._socket is not None
            reached.add(str(link._socket._response.url.origin()))
            await link.stop()
        assert reached == {one, other}


async def test_when_a_hub_goes_its_clients_go_on_at_the_next(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server)
    await cluster.start(2)
    urls = ",".join(hub.url for hub in cluster.hubs)
    device = Device(urls, cluster.tokens["lock"])
    done: list[int] = []

    @device.on("lock_control")
    async def lock_control(command: Command) -> int:
        done.append(command.data)
        return int(command.data)

    try:
        async with device, App(urls, cluster.tokens["phone"]) as app:
            for n in range(6):
                if n == 3:
                    await cluster.hubs.pop(0).stop()
                command = await app.post("lock", "lock_control", n, queue=True, expires=60)
                assert (await asyncio.wait_for(command.ended(), GUARD)).data == n
        assert done == list(range(6))
    finally:
        await cluster.stop()
