"""The hub's MQTT over WebSocket: a device in a page, one on paho, and one of ours get commands there; nodes
call each other; what may not be done is refused and recorded as on TCP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import paho.mqtt.client as paho
import pytest
import pytest_asyncio
from msgspec import Struct
from paho.mqtt.enums import CallbackAPIVersion

from duly.broker.clients import BrokerRefusal
from duly.broker.embedded import EmbeddedBroker
from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.clients.node.node import Node
from duly.errors import Malformed
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.clients.test_js_node import node as javascript
from tests.guard import GUARD

ORIGIN = "https://app.example"


class WebSocketHub(Struct):
    """A hub that serves MQTT over WebSocket, and the tokens of its accounts."""

    hub: Hub
    tokens: dict[str, str]
    refusals: list[BrokerRefusal]

    @property
    def url(self) -> str:
        return self.hub.mqtt_websocket_url

    def login(self, name: str, scheme: str = "ws") -> str:
        return self.url.replace("ws://", f"{scheme}://{name}:{self.tokens[name]}@")

    async def online(self, name: str) -> None:
        async with asyncio.timeout(GUARD):
            while not self.hub.gateway.online(name):
                await asyncio.sleep(0.01)

    async def refused(self, words: str) -> None:
        """Until the broker has reported a refusal with these words."""
        async with asyncio.timeout(GUARD):
            while not any(words in one.reason for one in self.refusals):
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WebSocketHub]:
    folder = tmp_path_factory.mktemp("ws") / "hub"
    hub = Hub(Settings(data=str(folder), port=0, mqtt_port=0, mqtt_ws_port=0, origins=[ORIGIN]))
    await hub.start()
    tokens = {"phone": await hub.accounts.add(Role.APP, "phone")}
    for name in ("lock", "lamp", "page"):
        tokens[name] = await hub.accounts.add(Role.DEVICE, name)
        await hub.accounts.grant("phone", name)
    for name in ("a", "b"):
        tokens[name] = await hub.accounts.add(Role.NODE, name)
    assert hub.mqtt is not None
    assert hub.mqtt.broker is not None
    refusals: list[BrokerRefusal] = []
    hub.mqtt.broker.clients.on_refused = refusals.append
    yield WebSocketHub(hub, tokens, refusals)
    await hub.stop()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_device_in_a_page_carries_a_command_out(local: WebSocketHub) -> None:
    script = Path(__file__).with_name("browser_device.mjs")
    page = await asyncio.create_subprocess_exec(
        *javascript(str(script), local.url, "page", local.tokens["page"]), stdout=asyncio.subprocess.PIPE
    )
    await local.online("page")
    async with App(local.hub.url, local.tokens["phone"]) as phone:
        result = await phone.send("page", "lock_control", {"open": True})
    assert result.data == "opened"
    out, _ = await page.communicate()
    assert [json.loads(line) for line in out.splitlines()] == [
        {"connack": 0},
        {"action": "lock_control", "payload": {"open": True}},
    ]


async def test_our_own_device_carries_a_command_out_once(local: WebSocketHub) -> None:
    opened = []
    async with (
        Device(local.login("lock", "mqtt+ws")) as lock,
        App(local.hub.url, local.tokens["phone"]) as phone,
    ):

        @lock.on("lock_control", effect="at_most_once")
        async def control(command: Command) -> Any:
            opened.append(command.data)
            return {"open": True}

        await local.online("lock")
        for _ in range(2):
            await phone.send("lock", "lock_control", {"open": True}, id="1-1")
    assert opened == [{"open": True}]


async def test_nodes_call_each_other(local: WebSocketHub) -> None:
    b = Node(local.login("b"))

    @b.task("echo", effect="at_least_once")
    async def echo(task: Any) -> Any:
        return task.payload

    async with b, Node(local.login("a")) as a:
        assert await a.call("b", "echo", 7) == 7


async def test_permissions_are_those_of_tcp(local: WebSocketHub) -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="lamp", transport="websockets")
    client.username_pw_set("lamp", local.tokens["lamp"])
    where = urlsplit(local.url)
    client.ws_set_options(path=where.path)
    await asyncio.to_thread(client.connect, str(where.hostname), int(where.port or 0))
    client.loop_start()
    client.publish("nodes/lock/status", b"forged", qos=1)
    await local.refused("lamp may not publish to nodes/lock/status")
    client.disconnect()
    client.loop_stop()


@asynccontextmanager
async def opened(url: str, **more: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with aiohttp.ClientSession() as http, http.ws_connect(url, **more) as socket:
        yield socket


async def test_pages_of_other_origins_and_nats_clients_stay_outside(local: WebSocketHub) -> None:
    async with opened(local.url, protocols=("mqtt",), origin=ORIGIN) as socket:
        assert socket.protocol == "mqtt"
    with pytest.raises(aiohttp.WSServerHandshakeError):
        async with opened(local.url, protocols=("mqtt",), origin="https://evil.example"):
            pass
    await local.refused("an origin whose pages may connect is named with --origin")
    # A client that speaks NATS stays outside, also with a token.
    async with opened(local.url.removesuffix("mqtt")) as socket:
        assert (await socket.receive()).data.startswith(b"INFO ")
        login = {"user": "lamp", "pass": local.tokens["lamp"], "verbose": True}
        await socket.send_bytes(b"CONNECT %b\r\nPING\r\n" % json.dumps(login).encode())
        answer = (await socket.receive()).data
        assert b"Authorization Violation" in answer


@pytest.mark.parametrize("origins", [[], [ORIGIN]])
async def test_a_page_whose_own_name_leads_to_this_machine_stays_outside(
    tmp_path: Path, origins: list[str]
) -> None:
    """DNS rebinding: such a page has the same origin as the host that it asks for."""
    broker = EmbeddedBroker(tmp_path, websocket_port=0, origins=origins)
    await broker.start()
    try:
        evil = f"evil.example:{broker.websocket_port}"
        url = broker.websocket_url
        with pytest.raises(aiohttp.WSServerHandshakeError):
            async with opened(url, protocols=("mqtt",), origin=f"http://{evil}", headers={"Host": evil}):
                pass
        for origin in (None, f"http://localhost:{broker.websocket_port}"):
            async with opened(url, protocols=("mqtt",), origin=origin) as socket:
                assert socket.protocol == "mqtt"
    finally:
        await broker.stop()


@pytest.mark.parametrize("also", [{"mqtt": "mqtt://broker.example"}, {"no_mqtt": True}])
async def test_it_needs_the_embedded_broker(also: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match="a port of the embedded broker"):
        Settings(mqtt_ws_port=7884, **also)


async def test_a_port_that_is_taken_is_named(local: WebSocketHub, tmp_path: Path) -> None:
    port = urlsplit(local.url).port
    second = Hub(Settings(data=str(tmp_path), port=0, mqtt_port=0, mqtt_ws_port=port))
    with pytest.raises(Exception, match=f"port {port} .* MQTT over WebSocket, is taken.*--mqtt-ws-port"):
        await second.start()
    await second.stop()
