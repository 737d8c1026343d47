"""The embedded broker disconnects clients for packets that it cannot read; `duly why` names the reason."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.identity.accounts import Role
from tests.end_to_end.test_mqtt_strangers import HubWithBroker
from tests.guard import GUARD


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[HubWithBroker]:
    local = HubWithBroker(tmp_path)
    await local.start()
    await local.add(Role.APP, "phone")
    await local.add(Role.DEVICE, "lamp")
    yield local
    await local.stop()


def _text(value: str) -> bytes:
    return struct.pack(">H", len(value.encode())) + value.encode()


def _packet(first: int, rest: bytes) -> bytes:
    length, left = b"", len(rest)
    while True:
        left, digit = divmod(left, 128)
        length += bytes((digit | (128 if left else 0),))
        if not left:
            return bytes((first,)) + length + rest


def _publish(topic: str, size: int = 1) -> bytes:
    return _packet(0x32, _text(topic) + b"\0\1" + b"x" * size)


async def send(local: HubWithBroker, packet: bytes) -> bytes:
    """Connect as the lamp, send a packet, and return what the broker answers before it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", local.port)
    login = _text("MQTT") + b"\x04\xc2\0\x1e"
    login += _text("lamp") + _text("lamp") + _text(local.tokens["lamp"])
    async with asyncio.timeout(GUARD):
        try:
            writer.write(_packet(0x10, login))
            connack = await reader.readexactly(4)
            writer.write(packet)
            try:
                return connack + await reader.read()
            except ConnectionError:
                return connack
        finally:
            writer.close()


@pytest.mark.parametrize(
    ("packet", "word", "reason"),
    [
        (_publish("nodes/la mp/status"), "malformed", "must not contain white space"),
        (_publish("nodes/+/status"), "malformed", "wildcards not allowed"),
        (_publish("nodes/lamp/status", 2 << 20), "too_large", "maximum payload exceeded"),
        (b"\xf0\x00", "malformed", "unknown packet type"),
    ],
)
async def test_a_packet_that_costs_the_connection_is_recorded_with_its_reason(
    local: HubWithBroker, packet: bytes, word: str, reason: str
) -> None:
    """A client that sends it again is disconnected again; without a record nothing says why."""
    assert await send(local, packet) == b"\x20\x02\0\0"
    assert await local.why("mqtt packet", word, reason) == "lamp"


async def test_a_topic_is_recorded_as_it_was_sent(local: HubWithBroker) -> None:
    lamp = await local.client("lamp")
    for topic in ('q/"q"/z', "a//b", "/lead", "trail/"):
        lamp.publish(topic, b"x", qos=1)
        assert await local.why(f"may not publish to {topic};", "not_allowed") == "lamp"
