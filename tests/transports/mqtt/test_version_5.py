"""What a link has from a broker that speaks MQTT 5: expiries, limits, and reasons in words."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest

from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.errors import ConnectionRefused, DulyError, NotAllowed, Overloaded, TooLarge
from duly.transports.mqtt.broker_versions import BrokerVersions
from duly.transports.mqtt.link import MqttLink
from duly.wire.publish_properties import PublishProperties
from tests import servers
from tests.guard import GUARD
from tests.transports.mqtt.test_broker_versions import broker
from tests.transports.mqtt.test_link import Ear, LinkBroker, until
from tests.transports.mqtt.wire import Proxy

CONNACK = b"\x20\x03\x00\x00\x00"


@pytest.fixture
async def at(mosquitto_server: servers.Mosquitto) -> LinkBroker:
    return LinkBroker(mosquitto_server, 5)


@pytest.fixture(scope="module")
def strict() -> Iterator[servers.Mosquitto]:
    """It takes packets of 2,000 bytes, and only `open/#` may be written and read."""
    server = servers.Mosquitto("max_packet_size 2000", "acl_file {folder}/acl")
    (server.folder / "acl").write_text("pattern readwrite open/#\n")
    yield from running(server)


@pytest.fixture
def narrow() -> Iterator[servers.Mosquitto]:
    """It takes three messages at a time."""
    server = servers.Mosquitto()
    config = server.folder / "mosquitto.conf"
    config.write_text(config.read_text().replace("max_inflight_messages 1000", "max_inflight_messages 3"))
    yield from running(server)


def running(server: servers.Mosquitto) -> Iterator[servers.Mosquitto]:
    try:
        server.start()
        yield server
    finally:
        server.remove()


async def test_sessions_and_messages_that_have_expired_are_gone(at: LinkBroker) -> None:
    async def present(name: str, expiry: int, ear: Ear | None = None) -> bool:
        """Whether the broker had kept the session of this name, which it is to keep for so many seconds."""
        found: list[bool] = []
        link = MqttLink(
            f"{at.url(name)}&session_expiry={expiry}",
            ear or Ear(),
            subscriptions=[at.topic("long")],
            on_connect=found.append,
        )
        await link.start()
        await link.connected(GUARD)
        if ear is not None:
            await ear.until(2)
        await link.stop()
        return found[0]

    unused = [f"short-{n}" for n in range(5)]
    assert not any([await present(name, 1) for name in unused] + [await present("long", 60)])
    alice = await at.link("alice")
    await alice.publish(at.topic("long"), b"short", properties=PublishProperties(expires=1))
    await alice.publish(at.topic("long"), b"long", properties=PublishProperties(expires=60))
    await asyncio.sleep(2.1)  # the broker counts whole seconds
    while await present(unused.pop(), 1):
        await asyncio.sleep(1)  # it looks once a second, if it has time
    ear = Ear()
    await alice.publish(at.topic("long"), b"last")
    assert await present("long", 60, ear)
    assert ear.payloads == [b"long", b"last"]
    await at.clean()


async def test_a_refused_publish_says_why(strict: servers.Mosquitto) -> None:
    at = LinkBroker(strict, 5)
    link = await at.link("bob")
    told: list[DulyError | None] = []
    link.post("open/door", b"!", done=told.append)
    with pytest.raises(NotAllowed, match=r"refuses a message to shut/door: not authorized \(0x87\)"):
        await link.publish("shut/door", b"!")
    assert told == [None]
    await at.clean()


async def refuse_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(CONNACK)
    while packet := await reader.read(100):
        if packet[0] == 0x32:
            writer.write(b"\x40\x03" + packet[5:7] + b"\x87")


async def test_each_reason_is_logged_once_in_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with broker(refuse_all) as url:
        link = MqttLink(f"{url}?version=5", Ear())
        await link.start()
        await link.connected(GUARD)
        with caplog.at_level(logging.WARNING, "duly.mqtt"):
            for _ in range(3):
                with pytest.raises(NotAllowed):
                    await link.publish("a", b"!")
        await link.stop()
        assert link.connections == 1
    (record,) = caplog.records
    assert "refuses a message to a: not authorized (0x87)" in record.message


async def test_what_is_too_large_for_the_broker_is_not_sent_and_ends_no_connection(
    strict: servers.Mosquitto,
) -> None:
    at = LinkBroker(strict, 5)
    link = await at.link("bob")
    with pytest.raises(TooLarge, match=r"a message of 3\d\d\d bytes is not sent: .* takes 2000 at most"):
        await link.publish("open/door", bytes(3_000))
    await link.publish("open/door", bytes(1_900))
    assert link.connections == 1
    await at.clean()


async def test_no_more_than_the_broker_takes_are_on_their_way_and_the_rest_follow_in_order(
    narrow: servers.Mosquitto,
) -> None:
    at, ear = LinkBroker(narrow, 5), Ear()
    await at.link("bob", ear, subscriptions=["open/order"])
    async with Proxy(narrow.port) as proxy:
        link = await at.link("alice", None, proxy.port)
        proxy.flowing.clear()
        waiting = [asyncio.create_task(link.publish("open/order", b"%d" % n)) for n in range(20)]
        await asyncio.sleep(0.05)
        published = [n for _, out, kind, n in proxy.packets if out and kind == 3]
        assert len(published) == 3
        proxy.flowing.set()
        await asyncio.gather(*waiting)
    await ear.until(20)
    assert ear.payloads == [b"%d" % n for n in range(20)]
    await at.clean()


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"\xe0\x01\x8e", r"session taken over .* \(0x8E\)$"),
        (b"\xe0\x09\x98\x07\x1f\x00\x04work", r"ended by an administrator \(0x98\): work$"),
        (b"\xe0\x00", "without a reason$"),
        (b"\xe0\x02\xf7\x00", r"unknown reason \(0xF7\)$"),
    ],
)
async def test_a_broker_that_ends_the_connection_says_why(packet: bytes, words: str) -> None:
    """Mosquitto 2.0.11 says nothing when a session is taken over, so a broker of our own does."""
    lost: list[str] = []

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(CONNACK + packet)

    async with broker(end) as url:
        link = MqttLink(
            url, Ear(), on_disconnect=lost.append, retry=RetryPolicy.never(), versions=BrokerVersions()
        )
        await link.start()
        await until(lambda: lost or link.tried)
        await link.stop()
    assert re.search(f"ended the connection: {words}", (lost or [link.problem])[0])


async def test_a_subscription_that_is_refused_says_why() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(CONNACK)
        packet = await reader.read(100)
        writer.write(b"\x90\x04" + packet[2:4] + b"\0\x87")
        await reader.read(100)

    async with broker(refuse) as url:
        link = MqttLink(
            url, Ear(), subscriptions=["news"], retry=RetryPolicy.never(), versions=BrokerVersions()
        )
        await link.start()
        with pytest.raises(ConnectionRefused, match=r"subscription to news: not authorized \(0x87\)"):
            await link.connected(GUARD)
        await link.stop()


async def test_a_quota_is_told_and_the_keepalive_is_the_brokers() -> None:
    heard = bytearray()

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x06\x00\x00\x03\x13\x00\x01")
        packet = await reader.read(100)
        number = packet[5:7]
        writer.write(b"\x40\x0b" + number + b"\x97\x07\x1f\x00\x04soon")
        while data := await reader.read(100):
            heard.extend(data)

    async with broker(busy) as url:
        link = MqttLink(url, Ear(), retry=RetryPolicy.fixed(20 * MS, tries=None), versions=BrokerVersions())
        await link.start()
        await link.connected(GUARD)
        with pytest.raises(Overloaded, match=r"quota exceeded \(0x97\): soon"):
            await link.publish("a", b"")
        await until(lambda: heard.startswith(b"\xc0\x00"))
        await link.stop()


async def test_a_broker_that_confirms_nothing_is_refused() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x05\x00\x00\x02\x24\x00")
        await reader.read(100)

    async with broker(plain) as url:
        link = MqttLink(url, Ear(), retry=RetryPolicy.never(), versions=BrokerVersions())
        await link.start()
        with pytest.raises(ConnectionRefused, match="accepts only QoS 0"):
            await link.connected(GUARD)
        await link.stop()


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3)])
async def test_a_session_outlives_a_change_of_the_version(
    mosquitto_server: servers.Mosquitto, before: int, after: int
) -> None:
    at = LinkBroker(mosquitto_server, before)
    bob = await at.link("bob", subscriptions=[at.topic("bob")])
    await bob.stop()
    alice = await at.link("alice")
    await alice.publish(at.topic("bob"), b"kept")
    at.version, ear, present = after, Ear(), list[bool]()
    await at.link("bob", ear, on_connect=present.append)
    await ear.until(1)
    assert (present, ear.payloads) == ([True], [b"kept"])
    await at.clean()
