"""A link with an `answer_within` leaves a broker that answers nothing, and keeps one that is only slow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from duly.errors import ConnectionLost
from duly.transports.mqtt.link import MqttLink
from tests.servers import Mosquitto
from tests.transports.mqtt.test_link import QUICK, Ear, LinkBroker, until

WITHIN = 0.5
PINGREQ, PINGRESP = b"\xc0\x00", b"\xd0\x00"


@pytest.fixture
async def frozen() -> AsyncIterator[tuple[LinkBroker, int]]:
    """A Mosquitto of our own, and its process, which a test may freeze."""
    server = Mosquitto()
    await asyncio.to_thread(server.start)
    broker = LinkBroker(server)
    yield broker, server.pid
    os.kill(server.pid, signal.SIGCONT)
    await broker.clean()
    await asyncio.to_thread(server.remove)


async def test_a_frozen_broker_is_left_while_nothing_is_sent(frozen: tuple[LinkBroker, int]) -> None:
    broker, pid = frozen
    lost: list[str] = []
    link = await broker.link("hub", on_disconnect=lost.append, answer_within=WITHIN)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: lost)
    assert lost == ["the broker did not answer within 0.5 s"]
    assert not link.up
    os.kill(pid, signal.SIGCONT)
    await link.connected()


async def test_what_a_frozen_broker_does_not_confirm_is_reported_soon(frozen: tuple[LinkBroker, int]) -> None:
    broker, pid = frozen
    link = await broker.link("hub", answer_within=WITHIN)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ConnectionLost, match="did not answer within"):
        await link.publish(broker.topic("lock"), b"open")


class SlowBroker:
    """Confirms the login at once, and answers everything else so many seconds late."""

    def __init__(self, late: float) -> None:
        self._late = late
        self.pings = 0
        self.connections = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        return f"mqtt://hub@127.0.0.1:{self._server.sockets[0].getsockname()[1]}?version=3"

    async def stop(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            await self._packet(reader)
            writer.write(b"\x20\x02\x00\x00")
            while packet := await self._packet(reader):
                await asyncio.sleep(self._late)
                if packet[:1] == PINGREQ[:1]:
                    self.pings += 1
                    writer.write(PINGRESP)
                elif packet[:1] == b"\x32":
                    writer.write(b"\x40\x02" + packet[4:6])

    async def _packet(self, reader: asyncio.StreamReader) -> bytes:
        """One packet without its length; the topic of a PUBLISH is one letter long."""
        first, length, shift = await reader.readexactly(1), 0, 0
        while True:
            (byte,) = await reader.readexactly(1)
            length += (byte & 127) << shift
            shift += 7
            if byte < 128:
                return first + await reader.readexactly(length)


@pytest.fixture
async def slow(request: pytest.FixtureRequest) -> AsyncIterator[tuple[SlowBroker, MqttLink]]:
    """A broker that is so slow, and a link to it."""
    broker = SlowBroker(request.param)
    link = MqttLink(await broker.start(), Ear(), retry=QUICK, answer_within=WITHIN)
    await link.start()
    await link.connected()
    yield broker, link
    await link.stop()
    await broker.stop()


@pytest.mark.parametrize("slow", [WITHIN / 2], indirect=True)
async def test_a_broker_that_answers_late_is_kept(slow: tuple[SlowBroker, MqttLink]) -> None:
    broker, link = slow
    await until(lambda: broker.pings > 4)
    assert link.up
    assert broker.connections == 1


@pytest.mark.parametrize("slow", [3 * WITHIN], indirect=True)
async def test_a_large_message_has_the_time_that_a_slow_network_takes(
    slow: tuple[SlowBroker, MqttLink],
) -> None:
    """256 KiB at 32 KiB a second are eight seconds."""
    broker, link = slow
    await link.publish("a", bytes(256 * 1024))
    assert broker.connections == 1
