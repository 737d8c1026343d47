"""Which version of MQTT a link speaks: 5 with a broker that does, 3.1.1 with the others, at the cost of one
connect."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from duly.core.retry import RetryPolicy
from duly.errors import ConnectionLost, ConnectionRefused, Malformed
from duly.transports.mqtt import broker_versions
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.broker_versions import BrokerVersions
from duly.transports.mqtt.link import MqttLink
from tests import servers
from tests.guard import GUARD
from tests.transports.mqtt.wire import Proxy


@pytest.mark.parametrize(
    ("name", "version", "connects"), [("embedded", 3, 3), ("mosquitto", 5, 2), ("rabbitmq", 3, 3)]
)
async def test_a_broker_that_does_not_speak_5_costs_one_connect_more_and_only_the_first_time(
    request: pytest.FixtureRequest, name: str, version: int, connects: int
) -> None:
    server: servers.MqttServer = request.getfixturevalue(f"{name}_server")
    versions = BrokerVersions()
    async with Proxy(server.port) as proxy:
        url = server.url("versions").replace(f":{server.port}", f":{proxy.port}")
        for _ in range(2):
            async with up(url, versions) as link:
                assert link.version == version
                await link.publish("nodes/versions/pending", b"!")
        assert proxy.connections == connects


@pytest.mark.parametrize("version", [3, 5])
async def test_an_address_may_name_the_version(mosquitto_server: servers.Mosquitto, version: int) -> None:
    async with up(f"{mosquitto_server.url('forced')}?version={version}") as link:
        assert link.version == version


async def test_a_version_that_is_forced_and_not_spoken_is_refused(
    embedded_server: servers.Embedded,
) -> None:
    link = MqttLink(f"{embedded_server.url('forced')}&version=5", nothing, retry=RetryPolicy.never())
    await link.start()
    with pytest.raises(ConnectionRefused, match=r"does not speak MQTT 5; leave \?version=5 out"):
        await link.connected(GUARD)
    await link.stop()


def test_clients_of_others_are_refused_by_the_embedded_broker_with_the_code_for_it(
    embedded_server: servers.Embedded,
) -> None:
    """So they know that they have to speak 3.1.1."""
    port = str(embedded_server.port)
    login = ["-h", "127.0.0.1", "-p", port, "-u", "anybody", "-P", "secret"]
    message = ["-t", "nodes/x/pending", "-m", "!", "-q", "1"]
    told = subprocess.run(
        ["mosquitto_pub", "-V", "5", *login, *message],
        check=False,
        capture_output=True,
        text=True,
        timeout=GUARD,
    )
    assert "Unsupported Protocol Version" in told.stderr
    subprocess.run(["mosquitto_pub", "-V", "311", *login, *message], check=True, timeout=GUARD)
    reasons: list[str] = []
    client = paho.Client(CallbackAPIVersion.VERSION2, "five", protocol=MQTTProtocolVersion.MQTTv5)
    client.username_pw_set("anybody", "secret")
    client.on_connect = lambda c, u, f, reason, p: reasons.append(str(reason))
    client.connect("127.0.0.1", embedded_server.port)
    while not reasons and client.loop(1.0) == paho.MQTT_ERR_SUCCESS:
        pass
    assert reasons == ["Unsupported protocol version"]


@pytest.mark.parametrize(
    "answer",
    [b"\x20\x02\x00\x01", b"\x20\x02\x00\x84", b"\x20\x03\x00\x84\x00", b"\x20\x02\x00\x00", b""],
    ids=["3.1.1 refuses", "short", "5 refuses", "takes it for 3.1.1", "hangs up"],
)
async def test_every_way_to_refuse_it_leads_to_3(answer: bytes) -> None:
    asked: list[int] = []
    versions = BrokerVersions()

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.read(100))[8])
        writer.write(answer if asked[-1] == 5 else b"\x20\x02\x00\x00")
        if asked[-1] != 5:
            await reader.read(100)

    async with broker(old) as url:
        for _ in range(2):
            async with up(url, versions) as link:
                assert link.version == 3
    assert asked == [5, 4, 4]


async def test_one_that_hangs_up_at_everything_is_asked_with_5_again() -> None:
    """It may be a proxy before a broker that is away."""
    asked: list[int] = []
    versions = BrokerVersions()

    async def away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.read(100))[8])

    async with broker(away) as url:
        link = MqttLink(url, nothing, retry=RetryPolicy.never(), versions=versions)
        await link.start()
        with pytest.raises(ConnectionLost, match="closed the connection"):
            await link.connected(GUARD)
        await link.stop()
        assert asked == [5, 4]
        assert versions.to_try(BrokerAddress.parse(url)) == (5, 3)


async def test_a_wrong_password_is_not_asked_with_another_version() -> None:
    visits: list[int] = []

    async def strict(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append((await reader.read(100))[8])
        writer.write(b"\x20\x0b\x00\x86\x08\x1f\x00\x05try B")

    async with broker(strict) as url:
        link = MqttLink(url, nothing, retry=RetryPolicy.never(), versions=BrokerVersions())
        await link.start()
        with pytest.raises(ConnectionRefused, match=r"wrong username or password \(0x86\): try B"):
            await link.connected(GUARD)
        await link.stop()
    assert visits == [5]


async def test_it_is_remembered_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    address, versions = BrokerAddress.parse("mqtt://a@b"), BrokerVersions()
    versions.speaks_only_3(address)
    assert versions.to_try(address) == (3,)
    assert versions.to_try(BrokerAddress.parse("mqtt://a@b:1884")) == (5, 3)
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now + broker_versions.REMEMBERED + 1)
    assert versions.to_try(address) == (5, 3)


async def test_only_so_many_brokers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_versions, "BROKERS", 2)
    versions = BrokerVersions()
    addresses = [BrokerAddress.parse(f"mqtt://a@b:{port}") for port in (1, 2, 3)]
    for address in addresses:
        versions.speaks_only_3(address)
    assert [versions.to_try(address) for address in addresses] == [(5, 3), (3,), (3,)]


@pytest.mark.parametrize("wrong", ["version=4", "version=", "session_expiry=0", "session_expiry=x"])
def test_an_option_that_is_none_is_malformed(wrong: str) -> None:
    if wrong == "version=":  # as if it were not there
        assert BrokerAddress.parse(f"mqtt://a@b?{wrong}").version is None
        return
    with pytest.raises(Malformed, match=wrong.partition("=")[0]):
        BrokerAddress.parse(f"mqtt://a@b?{wrong}")


def nothing(topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
    ack()


@asynccontextmanager
async def up(url: str, versions: BrokerVersions | None = None) -> AsyncIterator[MqttLink]:
    link = MqttLink(url, nothing, versions=versions or BrokerVersions())
    await link.start()
    try:
        await link.connected(GUARD)
        yield link
    finally:
        await link.stop()


@asynccontextmanager
async def broker(behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behave(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"mqtt://bob@127.0.0.1:{server.sockets[0].getsockname()[1]}"
