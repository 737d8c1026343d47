"""Whatever a broker says, the link lives: it is told nonsense in thousands of sessions, and is up again with
the first one that speaks MQTT."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.transports.mqtt.link import MqttLink
from tests.guard import GUARD
from tests.proof import TWO_SIZES, count

AT_ONCE = RetryPolicy.fixed(MS, 1_000_000)
SESSIONS = 3_000

CONNACK = b"\x20\x02\x00\x00"
CONNACK_5 = b"\x20\x03\x00\x00\x00"
KNOWN = [
    bytes.fromhex(packet)
    for packet in """
    b000 9000 4000 2000 3000 3200 3400 3600 b0020000 b0020001 90020001 9003000180 9003000000
    20020000 20020105 2003000000 2002ffff 40020000 40020001 4003000102 d000 d0020000 e000 0000 1000
    f0ffffff7f 30ffffffff01 3002ffff 320400016100 32050001610000 32050001610001 34050001610001
    30040002fffe 36050001610001 3f050001610001 8000 50020001 62020001
    200400000121 2006000003210000 20080000052701000000 20050000021f00 200400000180 e0018e e003810199
    4004000187ff 4006000187021f00 900400010187 90050001ff0187 3206000161000105 3208000161000180808080
    """.split()  # noqa: SIM905
]


def said(rng: random.Random, five: bool) -> Iterator[bytes]:
    """What a hostile broker says in one session, piece by piece."""
    if rng.random() < 0.6:
        yield CONNACK_5 if five else CONNACK
    if rng.random() < 0.5:
        granted = rng.choice((0, 1, 2, 0x80))
        yield bytes((0x90, 4, 0, 1, 0, granted)) if five else bytes((0x90, 3, 0, 1, granted))
    for _ in range(rng.randrange(4)):
        piece = bytearray(rng.choice(KNOWN) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 40)))
        if piece and rng.random() < 0.3:
            piece[rng.randrange(len(piece))] = rng.randrange(256)
        yield bytes(piece)


class HostileBroker:
    """Answers each connection as the test wants."""

    def __init__(self) -> None:
        self.serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = self.good
        self.sessions = 0
        self.port = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sessions += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self.serve(reader, writer)
        finally:
            writer.transport.abort()

    async def good(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            kind, size = await reader.readexactly(2)
            body = await reader.readexactly(size)
            if kind == 0x10:
                five = body[6] == 5
                writer.write(CONNACK_5 if five else CONNACK)
            elif kind == 0x82:
                granted = b"\0\x01" if five else b"\x01"
                writer.write(bytes((0x90, 2 + len(granted))) + body[:2] + granted)

    def hostile(self, rng: random.Random, five: bool) -> None:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for piece in said(rng, five):
                writer.write(piece)
                await writer.drain()
                if rng.random() < 0.3:
                    await asyncio.sleep(0)

        self.serve = serve


@pytest.fixture
async def broker() -> AsyncIterator[HostileBroker]:
    it = HostileBroker()
    server = await asyncio.start_server(it, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    yield it
    server.close()


def link_to(broker: HostileBroker, version: int) -> MqttLink:
    return MqttLink(
        f"mqtt://hub:x@127.0.0.1:{broker.port}?version={version}",
        lambda topic, payload, old, ack: ack(),
        subscriptions=["nodes/hub/ack"],
        retry=AT_ONCE,
    )


@pytest.mark.parametrize("words", [b"\xb0\x00", *KNOWN], ids=lambda w: w.hex())
async def test_after_each_known_nonsense_the_link_is_up_with_a_good_broker(
    broker: HostileBroker, words: bytes
) -> None:
    for version, first in ((3, b""), (3, CONNACK), (5, b""), (5, CONNACK_5)):

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes = first) -> None:
            writer.write(first + words)
            await writer.drain()

        broker.serve, broker.sessions = serve, 0
        link = link_to(broker, version)
        await link.start()
        async with asyncio.timeout(GUARD):
            while broker.sessions < 3:
                await asyncio.sleep(0.001)
        broker.serve = broker.good
        await up(link)
        await link.stop()


@TWO_SIZES
@pytest.mark.parametrize("version", [3, 5])
async def test_after_thousands_of_hostile_sessions_the_link_is_up_with_a_good_broker(
    broker: HostileBroker, version: int, whole: bool
) -> None:
    broker.hostile(random.Random(version), version == 5)
    link = link_to(broker, version)
    await link.start()
    while broker.sessions < (SESSIONS if whole else SESSIONS // 6):
        await asyncio.sleep(0.01)
    broker.serve = broker.good
    await up(link)
    assert not link._tasks.failures, "only what is malformed was met, no bug of ours"
    count("hostile input", broker.sessions)
    await link.stop()


async def up(link: MqttLink) -> None:
    async with asyncio.timeout(GUARD):
        while not link.up:
            await asyncio.sleep(0.01)
