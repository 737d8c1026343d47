"""Behind a proxy: limits by address count each client for itself, and only a listed proxy is believed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from duly.server.dashboard.visitors import DashboardRole
from tests.end_to_end.conftest import HubUnderTest, Open
from tests.end_to_end.raw import Response, curl
from tests.guard import GUARD

HERE = ["127.0.0.1", "::1"]


async def log_in(local: HubUnderTest, *forwarded: str, password: str = "wrong password") -> Response:
    options = [each for address in forwarded for each in ("-H", f"X-Forwarded-For: {address}")]
    wanted = {"name": "eve", "password": password}
    return await curl(f"{local.url}/v1/login", None, *options, body=wanted)


async def lock_out(local: HubUnderTest, *forwarded: str) -> None:
    """Guess until an address has to wait."""
    for _ in range(20):
        if (await log_in(local, *forwarded)).status == 429:
            return
    raise AssertionError("it was never told to wait")


async def behind_a_proxy(open_local: Open, **settings: Any) -> HubUnderTest:
    local = await open_local(trusted_proxies=HERE, **settings)
    await local.hub.people.register("eve", "correct horse battery", "203.0.113.1")
    return local


async def test_each_client_behind_a_listed_proxy_is_limited_for_itself(open_local: Open) -> None:
    local = await behind_a_proxy(open_local)
    await lock_out(local, "203.0.113.9")
    right = await log_in(local, "198.51.100.7", password="correct horse battery")
    assert right.status == 200
    claimed = await log_in(local, "198.51.100.7, 203.0.113.9", password="correct horse battery")
    assert claimed.status == 429, "what a client writes itself stands further left"


async def test_a_proxy_that_is_not_listed_is_not_believed(open_local: Open) -> None:
    local = await open_local(trusted_proxies=["192.0.2.0/24"])
    await local.hub.people.register("eve", "correct horse battery", "203.0.113.1")
    await lock_out(local, "203.0.113.9")
    assert (await log_in(local, "198.51.100.7", password="correct horse battery")).status == 429


async def test_a_proxy_holds_the_connections_of_all_its_clients_and_each_client_its_own(
    open_local: Open,
) -> None:
    """A WebSocket counts for its client. Those that have logged in make no room for others."""
    local = await behind_a_proxy(open_local, connections_per_address=2)
    token = {"Authorization": f"Bearer {local.tokens['phone']}"}
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    async with aiohttp.ClientSession() as http, AsyncExitStack() as closing:

        async def connect(client: str) -> aiohttp.ClientWebSocketResponse:
            headers = {"X-Forwarded-For": client} | token
            socket = await closing.enter_async_context(http.ws_connect(f"{local.url}/v1/ws", headers=headers))
            async with asyncio.timeout(GUARD):
                await socket.receive()
            return socket

        others = [await connect(f"203.0.113.{n}") for n in range(3)]
        second = await connect("203.0.113.0")
        asked = [each for line in (*upgrade, key, "X-Forwarded-For: 203.0.113.0") for each in ("-H", line)]
        refused = await curl(f"{local.url}/v1/ws", local.tokens["phone"], *asked)
        assert (refused.status, refused.headers["retry-after"]) == (503, "3")
        await second.close()
        async with asyncio.timeout(GUARD):
            while local.hub.visitors._per_network.get("203.0.113.0") != 1:
                await asyncio.sleep(0.01)
        assert not (await connect("203.0.113.0")).closed
        assert not any(other.closed for other in others)


async def test_the_audit_names_the_client(open_local: Open) -> None:
    local = await behind_a_proxy(open_local)
    link = await local.hub.dashboard.access.make_link("ann", DashboardRole.ADMIN)
    client = ("-H", "X-Forwarded-For: 203.0.113.9")
    assert (await curl(f"{local.url}/page/login", None, *client, body={"link": link})).status == 200
    begun = [entry for entry in await audit_of(local) if entry["action"] == "session.begin"]
    assert [entry["detail"] for entry in begun] == ["by link from 203.0.113.9"]


async def audit_of(local: HubUnderTest) -> list[dict[str, Any]]:
    found = await curl(f"{local.url}/v1/admin/audit.list", local.tokens["root"], body={})
    assert found.status == 200, found.body
    entries: list[dict[str, Any]] = found.json["entries"]
    return entries


async def test_an_ipv6_client_is_its_network(open_local: Open) -> None:
    local = await behind_a_proxy(open_local)
    await lock_out(local, "2a00::1")
    assert (await log_in(local, "2a00::2", password="correct horse battery")).status == 429
    assert (await log_in(local, "2a00:0:0:1::2", password="correct horse battery")).status == 200
