"""What strangers may take of a hub: short bodies, ten seconds, no more connections than there is room for."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from unittest.mock import Mock

import pytest

from duly.runtime.tasks import cancel
from duly.transports import connections as visitors
from duly.transports.connections import ClientConnections
from duly.transports.http import bodies
from tests.end_to_end.processes import resident
from tests.end_to_end.raw import Bare, address, bare, curl, join
from tests.guard import GUARD
from tests.local_hub import LocalHub

HEAD = "POST /v1/{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"


async def says(one: Bare) -> bytes:
    async with asyncio.timeout(GUARD):
        return await one.reader.readline()


def memory() -> int:
    """What this process holds, in MB."""
    return resident(os.getpid()) >> 20


@pytest.mark.parametrize("path", ["login", "people"])
async def test_a_long_body_of_a_stranger_is_refused_before_it_is_read(local: LocalHub, path: str) -> None:
    async with bare(local.url) as one:
        await one.send(HEAD.format(path, 8 << 20).encode())
        assert b" 413 " in await says(one)
    async with bare(local.url) as one:  # one that does not say how long it is
        await one.send(
            f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        with suppress(ConnectionError):
            for _ in range(20):
                await one.send(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        assert b" 413 " in await says(one)
    said = await curl(f"{local.url}/v1/{path}", None, body=b"{" + b" " * 20_000 + b"}")
    assert (said.status, said.json["error"]) == (413, "too_large")


@pytest.mark.parametrize("path", ["messages", "admin/list", "logout", "password"])
async def test_without_a_token_no_body_is_read(local: LocalHub, path: str) -> None:
    async with bare(local.url) as one:
        await one.send(HEAD.format(path, 8 << 20).encode())
        assert b" 401 " in await says(one)


async def test_120_long_bodies_at_once_take_no_memory(local: LocalHub) -> None:
    before = memory()
    async with AsyncExitStack() as stack:
        many = [await stack.enter_async_context(bare(local.url)) for _ in range(120)]
        part = b"x" * (256 << 10)

        async def pour(one: Bare) -> None:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(2):
                    await one.send(HEAD.format("login", 8 << 20).encode())
                    for _ in range(32):
                        await one.send(part)

        await asyncio.gather(*(pour(one) for one in many))
        assert memory() - before < 100
        async with join(local.url, local.tokens["phone"]):
            pass


async def test_a_login_that_comes_byte_by_byte_ends(local: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GUEST_SECONDS", 0.3)
    async with bare(local.url) as one:
        await one.send(HEAD.format("login", 100).encode() + b"{")
        assert b" 408 " in await says(one)
        await one.gone()


async def test_a_silent_stranger_is_hung_up_on_and_a_silent_app_is_not(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "GUEST_SECONDS", 0.4)
    async with join(local.url, local.tokens["phone"]) as phone, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(bare(local.url)) for _ in range(20)]
        for one in silent[10:]:
            await one.send(b"GET /v1/health HTTP/1.1\r\nHost: loc")
        for one in silent:
            assert await one.gone() == b""
        await phone.command("lock")
        await phone.hear()
    assert local.hub.visitors.guests == {}


async def test_large_bodies_of_one_account_keep_no_other_out(local: LocalHub) -> None:
    """It holds all that one account may; the rest of the memory is for the others."""
    size, token = bodies.BODY_LIMIT, local.tokens["lock"]
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    async with AsyncExitStack() as stack:
        many = [await stack.enter_async_context(bare(local.url)) for _ in range(17)]

        async def hold(one: Bare) -> None:
            with suppress(ConnectionError):
                await one.send(f"{head}Content-Length: {size}\r\n\r\n".encode())
                await one.send(b"[" + b" " * (size - 2))

        await asyncio.gather(*(hold(one) for one in many))
        said = await curl(f"{local.url}/v1/messages?wait=1", local.tokens["phone"], body={"type": "query"})
        assert said.json["error"] == "malformed", "it was read"
        said = await curl(f"{local.url}/v1/login", None, body={"name": "eve", "password": "wrong"})
        assert said.status == 401, "it was read, too"


@pytest.mark.parametrize("piece", [1 << 20, 5_000])
async def test_the_head_of_a_request_is_bounded(local: LocalHub, piece: int) -> None:
    """aiohttp alone would keep 128 lines of 8 KiB for every connection."""
    async with bare(local.url) as one:
        head = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n" + b"a: %b\r\n" % (b"x" * 7_000) * 20
        with suppress(ConnectionError):
            for at in range(0, len(head), piece):
                await one.send(head[at : at + piece])
                await asyncio.sleep(0)
        assert b" 431 " in await says(one)
    async with bare(local.url) as one:
        for end in (b"\r", b"\n\r", b"\n\r\n"):  # the end of a head may come in pieces
            head = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n" + b"a: %b\r\n" % (b"x" * 6_000) * 5
            whole = head + b"\r\n"
            await one.send(whole[: -len(end)])
            await asyncio.sleep(0.02)
            await one.send(whole[-len(end) :])
            answer = await one.reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in answer
            await one.reader.readuntil(b"}")
    token = local.tokens["phone"]
    said = await curl(f"{local.url}/v1/messages?wait=1", token, body=b"[" + b" " * 500_000 + b"]")
    assert said.status == 200, "a body is no head"


@pytest.mark.parametrize("token", [None, "phone"])
async def test_frames_that_never_come_whole_take_little_memory(local: LocalHub, token: str | None) -> None:
    before, size = memory(), 1_000_000
    upgrade = (
        "GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    if token is not None:
        upgrade += f"Authorization: Bearer {local.tokens[token]}\r\n"
    frame = b"\x81\xff" + size.to_bytes(8, "big") + bytes(4) + b" " * (size - 1)
    async with AsyncExitStack() as stack:
        many = [await stack.enter_async_context(bare(local.url)) for _ in range(300)]
        for one in many:
            await one.send(f"{upgrade}\r\n".encode())
            await one.reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError):
                await one.send(frame)

        async def is_over(one: Bare) -> None:
            with suppress(ConnectionError):  # what it has sent since may reset it before it reads why
                await one.reader.read()

        reading = [asyncio.create_task(is_over(one)) for one in many]
        await until(lambda: sum(task.done() for task in reading) >= 260)  # the others hold all that one may
        assert memory() - before < 150
        async with join(local.url, local.tokens["phone"]) as phone:
            seq_id = await phone.command("lock", data={"note": "x" * 200_000})
            assert (await phone.hear_of(seq_id))["error"] == "offline"
        await cancel(*reading)


async def test_one_address_holds_so_many_and_the_next_is_told(local: LocalHub) -> None:
    local.hub.visitors.each = 5
    async with AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(join(local.url, local.tokens["phone"]))
        await until(lambda: not local.hub.visitors.guests)
        async with bare(local.url) as sixth:
            said = await sixth.gone()
        assert b" 503 " in said
        assert b"Retry-After" in said
    await until(lambda: local.hub.visitors._count == 0)
    assert (await curl(f"{local.url}/v1/health")).status == 200


@pytest.mark.parametrize("kind", ["silent", "websocket", "slow body"])
@pytest.mark.parametrize("limit", ["each", "room"])
async def test_strangers_of_an_address_make_room_for_its_next_the_oldest_first(
    local: LocalHub, kind: str, limit: str
) -> None:
    """The oldest goes, not the next one: that has just come, and has had no time to ask for anything."""
    head = b"POST /v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(bare(local.url)) for _ in range(5)]
        for one in held:
            if kind == "websocket":
                await one.upgrade(local.url)
            elif kind == "slow body":
                await one.send(head)
        await until(lambda: len(local.hub.visitors.guests) == 5)
        if kind == "slow body":
            await until(lambda: all(one.awaited for one in local.hub.visitors.guests))
        setattr(local.hub.visitors, limit, 5)
        newcomer = await stack.enter_async_context(bare(local.url))
        assert await held[0].gone() == b""
        last = await stack.enter_async_context(bare(local.url))
        assert await held[1].gone() == b""
        for one in (newcomer, last):
            await one.send(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await says(one)
        assert local.hub.visitors._count == 5
        setattr(local.hub.visitors, limit, 500)


async def test_when_there_is_no_room_strangers_go_first_and_the_oldest_before_the_others(
    local: LocalHub,
) -> None:
    async with join(local.url, local.tokens["phone"]) as phone, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(bare(local.url)) for _ in range(10)]
        await until(lambda: len(local.hub.visitors.guests) == 10)
        local.hub.visitors.room = 11
        async with join(local.url, local.tokens["lock"]) as lock:
            assert await silent[0].gone() == b""
            await phone.command("lock")
            assert (await lock.hear())["type"] == "lock_control"
        local.hub.visitors.room = 16


async def test_websockets_that_do_not_log_in_keep_no_client_out(local: LocalHub) -> None:
    async with join(local.url, local.tokens["phone"]) as phone, AsyncExitStack() as stack:
        nameless = [await stack.enter_async_context(bare(local.url)) for _ in range(10)]
        for one in nameless:
            await one.upgrade(local.url)
        local.hub.visitors.room = 11
        async with join(local.url, local.tokens["lock"]) as lock:
            assert await nameless[0].gone() == b""
            await phone.command("lock")
            assert (await lock.hear())["type"] == "lock_control"
        local.hub.visitors.room = 16


@pytest.mark.parametrize("limit", ["each", "room"])
async def test_an_account_with_many_connections_keeps_no_other_account_out(
    local: LocalHub, limit: str
) -> None:
    """Connections beyond an account's share make room for the next one, as those of strangers do."""
    local.hub.visitors.share = 3
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(bare(local.url)) for _ in range(6)]
        for one in held:
            await one.upgrade(local.url, local.tokens["phone"])
        setattr(local.hub.visitors, limit, 6)
        lock = await stack.enter_async_context(join(local.url, local.tokens["lock"]))
        await held[3].gone()
        assert [one.reader.at_eof() for one in held] == [False, False, False, True, False, False]
        await lock.say("event_report", seq_id=lock.ids(), data={})
        assert (await lock.hear())["code"] == 0
        setattr(local.hub.visitors, limit, 500)


async def test_an_http_connection_beyond_the_share_of_its_account_is_served_and_makes_room(
    local: LocalHub,
) -> None:
    local.hub.visitors.share = 1
    head = f"Host: localhost\r\nAuthorization: Bearer {local.tokens['phone']}\r\n"
    simple = f"POST /v1/messages HTTP/1.1\r\n{head}Content-Length: 2\r\n\r\n{{}}".encode()
    async with AsyncExitStack() as stack:
        ours, beyond, other = [await stack.enter_async_context(bare(local.url)) for _ in range(3)]
        for one in (ours, beyond):
            await one.send(simple)
            assert b" 400 " in await says(one), "the frame is none, but the token is good"
        await other.send(f"GET /v1/devices HTTP/1.1\r\n{head}\r\n".encode())
        assert b" 200 " in await says(other)
        await until(lambda: len(local.hub.visitors.evictable.surplus) == 2)
        local.hub.visitors.each = 3
        await stack.enter_async_context(join(local.url, local.tokens["lock"]))
        await beyond.gone()
        assert not ours.reader.at_eof()


async def test_a_client_that_is_turned_away_reads_why_although_it_has_asked_already(local: LocalHub) -> None:
    """Closing a socket with unread bytes resets it, and the client then never sees the answer."""
    local.hub.visitors.each = 3
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(join(local.url, local.tokens["phone"]))
        await until(lambda: not local.hub.visitors.guests)
        client = socket.create_connection(address(local.url))
        client.sendall(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # it is there at the accept
        reader, writer = await asyncio.open_connection(sock=client)
        async with asyncio.timeout(GUARD):
            assert b" 503 " in await reader.read(), "an answer, and no reset"
        writer.close()


async def test_clients_of_ipv4_are_counted_each_for_itself_also_on_an_ipv6_socket() -> None:
    port = ClientConnections(100, 1)
    for client in ("::ffff:192.0.2.7", "::ffff:192.0.2.8", "2001:db8::1"):
        visitor = port.enter(Mock(), client)
        assert visitor is not None
        visitor.recognise("phone")
    for client in ("192.0.2.7", "2001:db8::2"):
        assert port.enter(Mock(), client) is None


async def test_who_has_come_and_gone_takes_no_room(local: LocalHub) -> None:
    for _ in range(50):
        async with bare(local.url) as one:
            await one.send(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await says(one)
    for _ in range(5):
        async with join(local.url, local.tokens["phone"]):
            pass
    await until(lambda: local.hub.visitors._count == 0)
    assert (local.hub.visitors._per_network, local.hub.visitors._strangers) == ({}, {})


def test_by_default_an_address_may_hold_half_of_the_room() -> None:
    assert ClientConnections(1_000_000).each == 500_000
    assert ClientConnections(1_024 - visitors.RESERVE).each == 448
    assert ClientConnections(1_000, 7).each == 7
    assert visitors.raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD):
        while not true():
            await asyncio.sleep(0.01)
