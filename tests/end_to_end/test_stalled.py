"""Clients that read nothing, or never finish a sentence, harm nobody else.

The law: whoever cannot keep up, or does not say who he is in time, is hung up on; meanwhile everybody else is
served as before, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

from duly.transports import connections as visitors
from duly.transports import websocket
from duly.transports.http import bodies
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Bare, Peer, address, bare, dial, handshake, join, ws_frame
from tests.end_to_end.test_fuzz import world
from tests.guard import GUARD
from tests.stopwatch import Stopwatch


@asynccontextmanager
async def deaf(url: str, token: str) -> AsyncIterator[Bare]:
    """Somebody who has authenticated and then never reads again, with room for little."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address(url))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    it = Bare(reader, writer)
    await it.upgrade(url, token)
    cast("asyncio.Transport", writer.transport).pause_reading()
    try:
        yield it
    finally:
        writer.transport.abort()


async def served(phone: Peer, lock: Peer) -> None:
    took = Stopwatch()
    seq_id = await phone.command("lock")
    assert (await lock.obey())["seq_id"] == seq_id
    assert (await phone.first(lambda f: f.get("seq_id") == seq_id and f["type"] == "ack"))["state"] == "done"
    assert took.seconds < 3


async def test_an_app_that_reads_nothing_is_hung_up_on(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "STILL_SECONDS", 1.0)
    gateway = local.hub.gateway
    async with AsyncExitStack() as stack:
        lamp, phone = [await stack.enter_async_context(local.join(name)) for name in ("lamp", "phone")]
        async with deaf(local.url, local.tokens["tablet"]):
            await local.until(lambda: "tablet" in gateway.sessions.apps)
            (session,) = gateway.sessions.apps["tablet"]
            assert isinstance(session, websocket.WebSocketSession)
            data = "x" * 20_000
            for n in range(1_500):
                await lamp.say("event_report", data=[n, data])
                assert (await phone.first(lambda f: f["type"] == "event_report"))["data"][0] == n
                assert session._size <= 2 * websocket.ROOM_BYTES
            # Not before: a client that does not read answers no pings, and is hung up on as well.
            lock = await stack.enter_async_context(local.join("lock"))
            await served(phone, lock)
            await local.until(lambda: "tablet" not in gateway.sessions.apps)
            await served(phone, lock)


async def test_a_device_that_reads_nothing_goes_offline(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        names = ("lock", "phone", "tablet")
        lock, phone, tablet = [await stack.enter_async_context(local.join(name)) for name in names]
        monkeypatch.setattr(websocket, "HEARTBEAT_SECONDS", 1.0)
        async with deaf(local.url, local.tokens["lamp"]):
            await local.until(lambda: local.hub.gateway.online("lamp"))
            data = "x" * 200_000
            code = 0
            for _ in range(200):
                seq_id = await tablet.command("lamp", data=data)
                code = (await tablet.hear_of(seq_id))["code"]
                if code:
                    break
            await local.until(lambda: not local.hub.gateway.online("lamp"))
            seq_id = await tablet.command("lamp")
            assert (await tablet.hear_of(seq_id))["code"] == 1
            await served(phone, lock)


async def test_the_hubs_memory_stays_bounded(tmp_path: Path) -> None:
    """The same from outside: forty deaf apps, and pushes for all of them."""
    async with world(tmp_path / "hub") as at, AsyncExitStack() as deaf_ones:
        for _ in range(40):
            await deaf_ones.enter_async_context(deaf(at.hub.url, at.tokens["tablet"]))
        async with join(at.hub.url, at.tokens["lamp"]) as lamp:
            for n in range(300):
                await lamp.say("event_report", data=[n, "x" * 4_000])
            await lamp.say("no_such_type", seq_id="the end")
            await lamp.hear_of("the end")
        await at.witness()


async def test_a_header_that_never_ends(local: HubUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "GUEST_SECONDS", 0.5)
    await local.restart()
    async with local.join("lock") as lock, local.join("phone") as phone, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(bare(local.url)) for _ in range(50)]
        for n in range(5):
            for one in slow:
                await one.send(handshake(local.url)[n : n + 1])
            await served(phone, lock)
        for one in slow:
            await one.gone()


async def test_an_introduction_that_never_ends(local: HubUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "AUTH_SECONDS", 0.4)
    auth = ws_frame(json.dumps({"type": "auth", "token": local.tokens["tablet"]}).encode())
    async with local.join("lock") as lock, local.join("phone") as phone, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(bare(local.url)) for _ in range(50)]
        heard: list[asyncio.Task[bytes]] = []
        for one in slow:
            await one.upgrade(local.url)
            # It reads at once: what is sent to a closed connection makes the system forget what came before.
            heard.append(asyncio.create_task(one.gone()))
        for n in range(5):
            for one in slow:
                with suppress(ConnectionError):
                    await one.send(auth[n : n + 1])
            await served(phone, lock)
        assert all(b'"code":3' in said for said in await asyncio.gather(*heard))
        async with dial(local.url) as silent:
            answer = await silent.hear()
            assert (answer["code"], answer["error"]) == (3, "not_authenticated")
            await silent.closed()
        assert "tablet" not in local.hub.gateway.sessions.apps


async def test_a_body_that_never_ends(local: HubUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.3)
    head = (
        f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {local.tokens['tablet']}\r\n"
        "Content-Length: 1000\r\n\r\n{"
    ).encode()
    async with local.join("lock") as lock, local.join("phone") as phone, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(bare(local.url)) for _ in range(20)]
        for one in slow:
            await one.send(head)
        await served(phone, lock)
        for one in slow:
            async with asyncio.timeout(GUARD):
                assert b" 408 " in await one.reader.readline()


async def test_a_frame_that_never_ends(local: HubUnderTest) -> None:
    """Authenticated, but its frames come in bytes and fragments; the hub waits without harm."""
    frame = ws_frame(b'{"type":"event_report","data":"slowly"}')
    async with local.join("lock") as lock, local.join("phone") as phone, bare(local.url) as lamp:
        await lamp.upgrade(local.url, local.tokens["lamp"])
        for n in range(len(frame)):
            await lamp.send(frame[n : n + 1])
            if n % 10 == 0:
                await served(phone, lock)
        assert (await phone.first(lambda f: f["type"] == "event_report"))["data"] == "slowly"
        for n in range(1_200):  # fragments of a message that never ends: 1 MiB is enough
            await lamp.send(ws_frame(b" " * 1_000, 0 if n else 1, final=False))
        await lamp.gone()
        await served(phone, lock)
