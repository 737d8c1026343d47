"""The addresses at which a hub listens."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from duly.clients.device import Device
from duly.errors import Malformed
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.raw import curl
from tests.guard import GUARD
from tests.servers import free_port

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
async def test_every_address_means_ipv4_as_well(tmp_path: Path) -> None:
    hub = Hub(Settings(data=str(tmp_path), port=0, mqtt_port=0, listen="::", insecure=True))
    await hub.start()
    try:
        port = hub.url.rpartition(":")[2]
        token = await hub.accounts.add(Role.DEVICE, "lamp")
        mqtt = hub.mqtt_url.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            assert (await curl(f"http://{host}:{port}/v1/health")).status == 200, host
            async with asyncio.timeout(GUARD), Device(f"mqtt://lamp:{token}@{host}:{mqtt}"):
                pass
        said = await curl(f"http://127.0.0.1:{port}/v1/messages", "wrong", body={"type": "query"})
        assert said.status == 401
    finally:
        await hub.stop()


@needs_ipv6
async def test_any_free_port_is_one_that_is_free_at_every_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, taken = asyncio.get_running_loop(), list[socket.socket]()
    create_server = loop.create_server

    async def while_another_program_takes_the_port(factory: Any, host: str, port: int, **more: Any) -> Any:
        if port and len(taken) < 2:
            taken.append(socket.create_server((host, port)))
        return await create_server(factory, host, port, **more)

    monkeypatch.setattr(loop, "create_server", while_another_program_takes_the_port)
    hub = Hub(Settings(data=str(tmp_path), port=0, no_mqtt=True, listen="::", insecure=True))
    await hub.start()
    try:
        port = hub.url.rpartition(":")[2]
        assert len(taken) == 2
        assert int(port) not in [one.getsockname()[1] for one in taken]
        for host in ("127.0.0.1", "[::1]"):
            assert (await curl(f"http://{host}:{port}/v1/health")).status == 200, host
    finally:
        await hub.stop()
        for one in taken:
            one.close()


@needs_ipv6
async def test_a_port_that_ipv4_clients_cannot_reach_is_taken(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("0.0.0.0", port)):
        hub = Hub(Settings(data=str(tmp_path), port=port, no_mqtt=True, listen="::", insecure=True))
        with pytest.raises(Malformed, match=f"port {port} on :: is taken"):
            await hub.start()
