"""MQTT over WebSocket: a link keeps its contract with the WebSocket ports of real brokers, whatever the
messages of the WebSocket look like, and says what is wrong with a server that is none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from duly.broker.acl_dialects import BrokerUser
from duly.broker.embedded import EmbeddedBroker
from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink, Will
from duly.wire.session import Acknowledge
from tests import servers
from tests.certificates import Authority
from tests.guard import GUARD

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
QUICK = RetryPolicy.fixed(20 * MS, tries=None)


class WebSocketEar:
    """A link and what it heard."""

    def __init__(self, url: str, *topics: str, will: Callable[[], Will] | None = None) -> None:
        self.heard: list[bytes] = []
        self._news = asyncio.Event()
        self.link = MqttLink(url, self._hear, subscriptions=topics, retry=QUICK, will=will)

    def _hear(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        self.heard.append(payload)
        ack()
        self._news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(GUARD):
            while len(self.heard) < count:
                self._news.clear()
                await self._news.wait()

    async def __aenter__(self) -> WebSocketEar:
        await self.link.start()
        await self.link.connected(GUARD)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.stop()


# ── real brokers ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[tuple[int, int]]:
    """Mosquitto at two ports: MQTT, and MQTT over WebSocket."""
    port = servers.free_port()
    server = servers.Mosquitto(f"listener {port} 127.0.0.1", "protocol websockets")
    server.start()
    yield server.port, port
    server.remove()


@pytest.fixture(params=["embedded", "mosquitto"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a broker's WebSocket, with a place for the name."""
    if request.param == "mosquitto":
        _, port = request.getfixturevalue("mosquitto")
        yield f"ws://{{}}@127.0.0.1:{port}/mqtt"
        return
    embedded = EmbeddedBroker(tmp_path, websocket_port=0)
    await embedded.set_users([BrokerUser(name, "secret", ["#"], ["#"]) for name in ("alice", "bob")])
    await embedded.start()
    yield embedded.websocket_url.replace("://", "://{}:secret@")
    await embedded.stop()


async def test_a_link_keeps_its_contract(broker: str) -> None:
    """Every payload arrives, in its order; a session that was kept gets what it missed; a will is
    published."""
    large = bytes(range(256)) * (1_200 if "secret" in broker else 20)  # Mosquitto sends 4 KB every 0.1 s
    payloads = [b"", b"x", large, *(b"%d" % n for n in range(300))]
    alice = WebSocketEar(broker.format("alice"), will=lambda: Will("status", b"gone", retain=False))
    async with alice, WebSocketEar(broker.format("bob"), "to/bob", "status") as bob:
        await asyncio.gather(*(alice.link.publish("to/bob", payload) for payload in payloads))
        await bob.until(len(payloads))
        assert bob.heard == payloads
        await bob.link.stop()
        await alice.link.publish("to/bob", b"missed")
        async with WebSocketEar(broker.format("bob"), "to/bob", "status") as again:
            await again.until(1)
            assert again.heard == [b"missed"]
            session = alice.link._session
            assert session is not None
            assert session._transport is not None
            session._transport.abort()
            await again.until(2)
            assert again.heard[1] == b"gone"


# ── messages of every shape ──────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def serving(answer: Handler) -> AsyncIterator[int]:
    """An HTTP server with this handler, at a free port."""
    app = web.Application()
    app.router.add_get("/mqtt", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def test_packets_need_not_fit_into_messages(mosquitto: tuple[int, int]) -> None:
    """A relay before Mosquitto that cuts the broker's bytes into messages of one to seven bytes, with an
    empty message and a ping in between."""

    async def relay(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("mqtt",))
        await socket.prepare(request)
        reader, writer = await asyncio.open_connection("127.0.0.1", mosquitto[0])

        async def down() -> None:
            for size in itertools.cycle(range(1, 8)):
                data = await reader.read(size)
                if not data:
                    break
                await socket.send_bytes(data)
                if size == 3:
                    await socket.send_bytes(b"")
                    await socket.ping()

        passing = asyncio.create_task(down())
        async for message in socket:
            writer.write(message.data)
        writer.close()
        await passing
        return socket

    payloads = [b"%d" % n * 20 for n in range(50)]
    async with serving(relay) as port, WebSocketEar(f"ws://cut@127.0.0.1:{port}", "to/cut") as cut:
        for payload in payloads:
            cut.link.post("to/cut", payload)
        await cut.until(len(payloads))
        assert cut.heard == payloads


# ── servers that are no broker ───────────────────────────────────────────────────────────────────


async def problem_of(url: str) -> str:
    """Why a link does not come up, after its first attempt."""
    link = MqttLink(url, lambda topic, payload, old, ack: ack())
    await link.start()
    async with asyncio.timeout(GUARD):
        while not link.tried:
            await asyncio.sleep(0.01)
    await link.stop()
    return link.problem


async def chat(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.receive()
    return socket


async def text(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(protocols=("mqtt",))
    await socket.prepare(request)
    await socket.send_str("hello")
    await socket.receive()
    return socket


async def away(request: web.Request) -> web.Response:
    return web.Response(status=502)


async def page(request: web.Request) -> web.Response:
    return web.Response(text="hello")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chat, "not one for MQTT"),
        (page, "HTTP status 200; check the path"),
        (away, "HTTP status 502"),
        (text, "does not speak MQTT: a TEXT message"),
    ],
)
async def test_what_is_wrong_is_said(answer: Handler, words: str) -> None:
    async with serving(answer) as port:
        assert words in await problem_of(f"ws://a@127.0.0.1:{port}")


async def test_a_server_that_does_not_listen_or_is_not_trusted(tmp_path: Path) -> None:
    assert "Connection refused" in await problem_of(f"ws://a@127.0.0.1:{servers.free_port()}")
    authority = Authority(tmp_path)
    cert, key = authority.issue("hub", "127.0.0.1")
    broker = EmbeddedBroker(tmp_path, websocket_port=0, tls_cert=str(cert), tls_key=str(key))
    await broker.set_users([BrokerUser("a", "secret", ["#"], ["#"])])
    await broker.start()
    try:
        url = broker.websocket_url.replace("://", "://a:secret@")
        assert url.startswith("wss://")
        assert "check the certificates" in await problem_of(url)
        async with WebSocketEar(f"{url}?cafile={authority.ca}", "t") as trusting:
            await trusting.link.publish("t", b"over TLS")
            await trusting.until(1)
    finally:
        await broker.stop()


# ── addresses ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "websocket"),
    [
        ("ws://a:secret@broker.example", "ws://broker.example:80/mqtt"),
        ("wss://a@broker.example/", "wss://broker.example:443/mqtt"),
        ("mqtt+ws://a@broker.example:15675/ws", "ws://broker.example:15675/ws"),
        ("mqtt+wss://a@[::1]:8084", "wss://[::1]:8084/mqtt"),
    ],
)
def test_addresses(url: str, websocket: str) -> None:
    address = BrokerAddress.parse(url)
    assert address.websocket_url == websocket
    assert (address.username, address.client_id) == ("a", "a")
    assert "secret" not in repr(address)


def test_a_broker_is_meant_to_be_found_by_its_own_address() -> None:
    again = BrokerAddress.parse(repr(BrokerAddress.parse("mqtt+wss://a@broker.example/x")))
    assert (again.path, again.tls, again.port) == ("/x", True, 443)
