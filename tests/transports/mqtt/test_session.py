"""One connection: what arrives in a flood is handled bit by bit, and everything else gets its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
import uvloop

from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.packet_reader import RUSH
from duly.transports.mqtt.session import CLOSE_WITHIN, IncomingPublish, MqttSession
from tests.guard import GUARD

CONNACK = b"\x20\x02\0\0"


class Wire(asyncio.Transport):
    """Notes whether anything is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


def published(n: int) -> bytes:
    return b"\x30\x07\0\x01t" + b"%04d" % n


def opened(heard: list[bytes]) -> tuple[MqttSession, Wire]:
    def arrived(arrival: IncomingPublish, topic: str | bytes, payload: bytes, old: bool) -> None:
        heard.append(payload)

    session, wire = MqttSession(BrokerAddress.parse("mqtt://a@x"), None, arrived, clean=True), Wire()
    session.connection_made(cast("asyncio.BaseTransport", wire))
    session.data_received(CONNACK)
    return session, wire


async def test_a_flood_leaves_others_their_turns_and_nothing_is_read_meanwhile() -> None:
    heard: list[bytes] = []
    session, wire = opened(heard)
    session.data_received(b"".join(map(published, range(10 * RUSH))) + published(9_999)[:5])
    most = 0
    while len(heard) < 10 * RUSH:
        assert not wire.reading
        before = len(heard)
        await asyncio.sleep(0)
        most = max(most, len(heard) - before)
    assert most == RUSH
    assert wire.reading
    session.data_received(published(9_999)[5:])
    assert heard == [b"%04d" % n for n in (*range(10 * RUSH), 9_999)]


async def test_acknowledgements_of_one_turn_are_one_write_in_the_order_of_arrival() -> None:
    arrivals: list[IncomingPublish] = []
    session = MqttSession(
        BrokerAddress.parse("mqtt://a@x"), None, lambda arrival, *_: arrivals.append(arrival), clean=True
    )
    wire = Wire()
    session.connection_made(cast("asyncio.BaseTransport", wire))
    session.data_received(CONNACK + b"".join(b"\x32\x06\0\x01t\0" + bytes((n,)) + b"x" for n in (7, 8, 9)))
    first, second, third = arrivals
    third.ack()
    await asyncio.sleep(0)
    assert wire.written == []  # those before it are not committed
    second.ack()
    second.ack()
    first.ack()
    session.publish(b"\0\x01t", b"hi", False, None)
    await asyncio.sleep(0)
    acknowledged = b"@\x02\0\x07@\x02\0\x08@\x02\0\x09"
    assert wire.written == [acknowledged + b"2\x07\0\x01t\0\x01hi"]


async def test_what_arrives_all_the_same_comes_after_it() -> None:
    """TLS hands over what it has decrypted, paused or not."""
    heard: list[bytes] = []
    session, wire = opened(heard)
    last = published(3 * RUSH)
    session.data_received(b"".join(map(published, range(3 * RUSH))) + last[:3])
    session.data_received(last[3:7])
    session.data_received(last[7:] + published(3 * RUSH + 1))
    async with asyncio.timeout(GUARD):
        while len(heard) < 3 * RUSH + 2:
            await asyncio.sleep(0)
    assert heard == [b"%04d" % n for n in range(3 * RUSH + 2)]
    assert wire.reading


async def test_what_is_no_mqtt_behind_a_flood_ends_the_connection() -> None:
    heard: list[bytes] = []
    session, _ = opened(heard)
    session.data_received(b"".join(map(published, range(2 * RUSH))) + b"\x30\x00")
    async with asyncio.timeout(GUARD):
        await session.closed.wait()
    assert "does not speak MQTT" in session.reason
    assert len(heard) == 2 * RUSH


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_is_made_as_its_time_is_up_can_be_closed(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """uvloop closes the transport of a connection that is cancelled then, and does not say that it is
    closing."""

    opening: list[asyncio.Future[bool]] = []

    class LateSession(MqttSession):
        """A session whose time is up in the same turn of the loop."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            opening[0].cancel()

    async def scene() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        session = LateSession(
            BrokerAddress.parse(f"mqtt://a@127.0.0.1:{port}"), None, lambda *_: None, clean=True
        )
        opening.append(asyncio.ensure_future(session.open({})))
        with pytest.raises(asyncio.CancelledError):
            await opening[0]
        async with asyncio.timeout(CLOSE_WITHIN / 2):
            await session.close("its time was up")
        server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene())
