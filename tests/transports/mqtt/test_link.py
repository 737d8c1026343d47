"""One contract for a link, kept with every broker; and what a link does with brokers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.errors import ConnectionLost, ConnectionRefused, Malformed
from duly.transports.mqtt import session as mqtt_session
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink, Will
from duly.wire.session import Acknowledge
from tests import servers
from tests.certificates import Authority
from tests.guard import GUARD
from tests.transports.mqtt.wire import Proxy

QUICK = RetryPolicy.fixed(20 * MS, tries=None)
_counter = itertools.count(random.randrange(1 << 30))


class Ear:
    """Hears what a link receives; acknowledges it if told so."""

    def __init__(self, acks: bool = True) -> None:
        self.heard: list[tuple[str, bytes, bool]] = []
        self.acks: list[Acknowledge] = []
        self._acks = acks
        self._news = asyncio.Event()

    def __call__(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        self.heard.append((topic, payload, old))
        self.acks.append(ack)
        if self._acks:
            ack()
        self._news.set()

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _ in self.heard]

    async def until(self, count: int, within: float = GUARD) -> None:
        async with asyncio.timeout(within):
            while len(self.heard) < count:
                self._news.clear()
                await self._news.wait()


async def until(true: Callable[[], Any], within: float = GUARD) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.01)


def with_version(url: str, version: int | None) -> str:
    return url if version is None else f"{url}{'&' if '?' in url else '?'}version={version}"


class LinkBroker:
    """A broker, and names nobody else uses on it."""

    def __init__(self, server: servers.MqttServer, version: int | None = None) -> None:
        self.server = server
        self.version = version
        """of MQTT; None: whichever the broker speaks"""
        self.mark = f"t{next(_counter)}"
        self._links: list[MqttLink] = []

    def url(self, name: str, port: int | None = None) -> str:
        url = with_version(self.server.url(f"{self.mark}-{name}"), self.version)
        return url if port is None else url.replace(f":{self.server.port}", f":{port}")

    def topic(self, name: str) -> str:
        return f"nodes/{self.mark}-{name}/pending"

    async def link(self, name: str, on_message: Any = None, port: int | None = None, **more: Any) -> MqttLink:
        link = MqttLink(self.url(name, port), on_message or Ear(), retry=QUICK, **more)
        self._links.append(link)
        await link.start()
        await link.connected(GUARD)
        return link

    async def clean(self) -> None:
        for link in self._links:
            await link.stop()


@pytest.fixture(params=["embedded", "mosquitto", "mosquitto 3.1.1", "rabbitmq"], scope="session")
def server(request: pytest.FixtureRequest) -> tuple[servers.MqttServer, int]:
    """A broker, and the version of MQTT to speak with it: the newest that it knows, unless it is named."""
    name = request.param.partition(" ")[0]
    return request.getfixturevalue(f"{name}_server"), 5 if request.param == "mosquitto" else 3


@pytest.fixture
async def broker(server: tuple[servers.MqttServer, int]) -> AsyncIterator[LinkBroker]:
    broker = LinkBroker(*server)
    yield broker
    await broker.clean()


@pytest.fixture
async def mosquitto(mosquitto_server: servers.Mosquitto) -> AsyncIterator[LinkBroker]:
    broker = LinkBroker(mosquitto_server)
    yield broker
    await broker.clean()


# ── the contract ─────────────────────────────────────────────────────────────────────────────────


async def test_carries_bytes(broker: LinkBroker) -> None:
    ear = Ear()
    await broker.link("bob", ear, subscriptions=[broker.topic("bob")])
    alice = await broker.link("alice")
    sent = [b"{}", bytes(range(256)), "短信 ✓".encode(), b"x" * 200_000, b"last"]
    for payload in sent:
        await alice.publish(broker.topic("bob"), payload)
    await ear.until(len(sent))
    assert ear.heard == [(broker.topic("bob"), payload, False) for payload in sent]


async def test_names_need_not_be_ascii(broker: LinkBroker) -> None:
    ear = Ear()
    bob = await broker.link("b.öb-锁", ear, subscriptions=[broker.topic("b.öb-锁")])
    await bob.publish(broker.topic("b.öb-锁"), b"!")
    await ear.until(1)
    await bob.unsubscribe(broker.topic("b.öb-锁"))
    await bob.publish(broker.topic("b.öb-锁"), b"?")
    await asyncio.sleep(0.1)
    assert ear.payloads == [b"!"]
    assert bob.connections == 1


async def test_keeps_order_and_loses_nothing_in_a_crowd(broker: LinkBroker) -> None:
    ear = Ear()
    await broker.link("bob", ear, subscriptions=[broker.topic("bob")])
    alice = await broker.link("alice", in_flight=100)
    await asyncio.gather(*(alice.publish(broker.topic("bob"), b"%d" % n) for n in range(2000)))
    await ear.until(2000)
    assert ear.payloads == [b"%d" % n for n in range(2000)]


async def test_keeps_messages_for_who_is_away(broker: LinkBroker) -> None:
    bob = await broker.link("bob", subscriptions=[broker.topic("bob")])
    await bob.stop()
    alice = await broker.link("alice")
    for n in range(50):
        await alice.publish(broker.topic("bob"), b"%d" % n)
    ear, present = Ear(), list[bool]()
    await broker.link("bob", ear, subscriptions=[broker.topic("bob")], on_connect=present.append)
    await ear.until(50)
    assert ear.payloads == [b"%d" % n for n in range(50)]
    assert present == [True]


async def test_tells_whether_the_session_was_kept(broker: LinkBroker) -> None:
    present: list[bool] = []
    for _ in range(2):
        bob = await broker.link("bob", subscriptions=[broker.topic("bob")], on_connect=present.append)
        await bob.stop()
    assert present == [False, True]


async def test_nothing_is_acknowledged_before_the_handler_says_so(broker: LinkBroker) -> None:
    async with Proxy(broker.server.port) as proxy:
        ear = Ear(acks=False)
        await broker.link("bob", ear, proxy.port, subscriptions=[broker.topic("bob")])
        alice = await broker.link("alice")
        for n in range(5):
            await alice.publish(broker.topic("bob"), b"%d" % n)
        await ear.until(5)
        await asyncio.sleep(0.1)
        assert proxy.pubacks(1) == []
        for late in (4, 1, 3, 0):
            ear.acks[late]()
        await until(lambda: len(proxy.pubacks(1)) == 2)
        await asyncio.sleep(0.1)
        assert proxy.pubacks(1) == proxy.arrivals(1)[:2], "0 and 1; 3 and 4 wait for 2"
        ear.acks[2]()
        ear.acks[2]()
        await until(lambda: len(proxy.pubacks(1)) == 5)
        await asyncio.sleep(0.1)
        assert proxy.pubacks(1) == proxy.arrivals(1)


async def test_what_was_not_acknowledged_comes_again_and_only_that(broker: LinkBroker) -> None:
    async with Proxy(broker.server.port) as proxy:
        ear = Ear(acks=False)
        bob = await broker.link("bob", ear, proxy.port, subscriptions=[broker.topic("bob")])
        alice = await broker.link("alice")
        for n in range(4):
            await alice.publish(broker.topic("bob"), b"%d" % n)
        await ear.until(4)
        ear.acks[0]()
        ear.acks[1]()
        await until(lambda: len(proxy.pubacks(1)) == 2)
        # The broker reads the two before it notices the cut.
        await asyncio.sleep(0.2)
        proxy.cut()
        await until(lambda: bob.connections == 2)
        await ear.until(6)
        assert ear.payloads[4:] == [b"2", b"3"]
        assert [old for *_, old in ear.heard[4:]] == [True, True], "they may have been said long ago"


async def test_a_late_ack_does_not_reach_the_next_connection(broker: LinkBroker) -> None:
    async with Proxy(broker.server.port) as proxy:
        ear = Ear(acks=False)
        bob = await broker.link("bob", ear, proxy.port, subscriptions=[broker.topic("bob")])
        alice = await broker.link("alice")
        await alice.publish(broker.topic("bob"), b"0")
        await ear.until(1)
        proxy.cut()
        await until(lambda: bob.connections == 2)
        await ear.until(2)
        ear.acks[0]()
        await asyncio.sleep(0.2)
        assert proxy.pubacks(2) == []
        ear.acks[1]()
        await until(lambda: proxy.pubacks(2) == proxy.arrivals(2))


@pytest.mark.parametrize("server", ["embedded", "mosquitto", "rabbitmq"], indirect=True)
async def test_killed_in_the_handler_it_is_delivered_again(broker: LinkBroker, tmp_path: Path) -> None:
    """A process of its own, SIGKILL inside its handler, before the ack."""
    log = tmp_path / "log"
    bob = await broker.link("bob", subscriptions=[broker.topic("bob")])
    await bob.stop()
    alice = await broker.link("alice")
    await alice.publish(broker.topic("bob"), b"task")

    async def life(what: str, until_log: str) -> None:
        process = _receiver(broker.url("bob"), broker.topic("bob"), log, what)
        try:
            await until(lambda: log.exists() and until_log in log.read_text())
            await asyncio.sleep(0.2)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(GUARD)

    await life("die", "task\n")
    assert log.read_text().count("task") == 1
    log.unlink()
    await life("ack", "task\n")
    assert log.read_text().count("task") == 1, "delivered again"
    log.unlink()
    await life("ack", "listening\n")
    assert "task" not in log.read_text(), "acknowledged: not delivered again"


def _receiver(url: str, topic: str, log: Path, what: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("receiver.py")
    return subprocess.Popen([sys.executable, script, url, topic, log, what])


async def test_an_unconfirmed_publish_fails_when_the_connection_is_lost(broker: LinkBroker) -> None:
    async with Proxy(broker.server.port) as proxy:
        lost: list[str] = []
        alice = await broker.link("alice", None, proxy.port, on_disconnect=lost.append)
        proxy.flowing.clear()
        waiting = [asyncio.create_task(alice.publish(broker.topic("bob"), b"?")) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(future.done() for future in waiting)
        proxy.cut()
        for future in waiting:
            with pytest.raises(ConnectionLost, match="send it again"):
                await future
        proxy.flowing.set()
        await until(lambda: alice.connections == 2)
        await alice.publish(broker.topic("bob"), b"!")
        assert len(lost) == 1


async def test_no_more_than_so_many_wait_for_their_confirmation(broker: LinkBroker) -> None:
    async with Proxy(broker.server.port) as proxy:
        alice = await broker.link("alice", None, proxy.port, in_flight=3)
        proxy.flowing.clear()
        waiting = [asyncio.create_task(alice.publish(broker.topic("bob"), b"?")) for _ in range(3)]
        patient = asyncio.create_task(alice.publish(broker.topic("bob"), b"!"))
        await asyncio.sleep(0.05)
        assert [n for _, out, kind, n in proxy.packets if out and kind == 3] == [1, 2, 3]
        assert not patient.done()
        proxy.flowing.set()
        await patient
        await asyncio.gather(*waiting)


async def test_retained_and_removed(broker: LinkBroker) -> None:
    alice = await broker.link("alice")
    await alice.publish(broker.topic("alice"), b"here", retain=True)
    ear = Ear()
    bob = await broker.link("bob", ear)
    await bob.subscribe(broker.topic("alice"))
    await ear.until(1)
    assert ear.heard == [(broker.topic("alice"), b"here", True)]
    await alice.publish(broker.topic("alice"), b"", retain=True)
    await ear.until(2)
    await bob.unsubscribe(broker.topic("alice"))
    late = Ear()
    await broker.link("carol", late, subscriptions=[broker.topic("alice")])
    await asyncio.sleep(0.2)
    assert late.heard == []


async def test_of_what_only_the_latest_counts_nothing_waits(broker: LinkBroker) -> None:
    ear = Ear()
    bob = await broker.link("bob", ear, subscriptions=[broker.topic("bob")], latest=[broker.topic("alice")])
    alice = await broker.link("alice")
    await alice.publish(broker.topic("alice"), b"1", retain=True)
    await ear.until(1)
    await bob.stop()
    for payload in (b"2", b"3"):
        await alice.publish(broker.topic("alice"), payload, retain=True)
    back = Ear()
    await broker.link("bob", back, subscriptions=[broker.topic("bob")], latest=[broker.topic("alice")])
    await back.until(1)
    await alice.publish(broker.topic("bob"), b"last")
    await back.until(2)
    assert back.payloads == [b"3", b"last"], "2 was not kept for him"
    await alice.publish(broker.topic("alice"), b"", retain=True)


async def test_the_will_is_for_accidents_only(broker: LinkBroker) -> None:
    ear = Ear()
    await broker.link("bob", ear, subscriptions=[broker.topic("alice")])
    count = itertools.count()
    async with Proxy(broker.server.port) as proxy:
        alice = await broker.link(
            "alice", None, proxy.port, will=lambda: Will(broker.topic("alice"), b"gone %d" % next(count))
        )
        proxy.cut()
        await ear.until(1)
        assert ear.payloads == [b"gone 0"], "as it was asked for at that connect"
        await until(lambda: alice.connections == 2)
        await alice.publish(broker.topic("alice"), b"back")
        await ear.until(2)
        await alice.stop()
        await asyncio.sleep(0.3)
        assert ear.payloads == [b"gone 0", b"back"]


async def test_stop_waits_for_what_is_under_way(broker: LinkBroker) -> None:
    ear = Ear()
    await broker.link("bob", ear, subscriptions=[broker.topic("bob")])
    alice = await broker.link("alice")
    waiting = [asyncio.create_task(alice.publish(broker.topic("bob"), b"%d" % n)) for n in range(200)]
    await asyncio.sleep(0)
    await alice.stop()
    assert all(future.done() and future.exception() is None for future in waiting)
    await ear.until(200)
    with pytest.raises(ConnectionLost, match="stopped"):
        await alice.publish(broker.topic("bob"), b"")


async def test_a_handler_that_fails_is_reported_and_gets_it_again(broker: LinkBroker) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    heard: list[bytes] = []

    def buggy(topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        heard.append(payload)
        if len(heard) == 1:
            raise ZeroDivisionError
        ack()

    bob = await broker.link("bob", buggy, subscriptions=[broker.topic("bob")])
    alice = await broker.link("alice")
    await alice.publish(broker.topic("bob"), b"1")
    await until(lambda: heard == [b"1", b"1"])
    await until(lambda: bob.connections == 2)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


# ── a broker that dies ───────────────────────────────────────────────────────────────────────────


async def test_comes_back_when_the_broker_does(tmp_path: Path) -> None:
    server = servers.Mosquitto()
    broker = LinkBroker(server)
    try:
        server.start()
        ear = Ear()
        bob = await broker.link("bob", ear, subscriptions=[broker.topic("bob")])
        alice = await broker.link("alice")
        server.stop(signal.SIGKILL)
        await until(lambda: not bob.up and not alice.up)
        with pytest.raises(ConnectionLost):
            await alice.publish(broker.topic("bob"), b"?")
        await asyncio.sleep(0.1)
        assert "cannot reach" in bob.problem
        server.start()
        await bob.connected(GUARD)
        await alice.connected(GUARD)
        await alice.publish(broker.topic("bob"), b"!")
        await ear.until(1)
        assert ear.payloads == [b"!"], "subscribed again, though the broker had forgotten everything"
    finally:
        await broker.clean()
        server.remove()


async def test_two_programs_with_one_name_do_not_spin(mosquitto: LinkBroker) -> None:
    calm = RetryPolicy.exponential(20 * MS, 10_000 * MS, jitter=0.0)
    links = [MqttLink(mosquitto.url("bob"), Ear(), retry=calm) for _ in range(2)]
    for link in links:
        await link.start()
    await asyncio.sleep(1)
    assert sum(link.connections for link in links) < 16
    for link in links:
        await link.stop()


# ── brokers that misbehave ───────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def fake_broker(
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[tuple[str, list[int]]]:
    visits: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(len(visits))
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await behave(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"mqtt://bob@127.0.0.1:{server.sockets[0].getsockname()[1]}?version=3", visits
    finally:
        server.close()


async def test_says_why_it_is_refused() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x02\x00\x05")
        await reader.read(100)

    async with fake_broker(refuse) as (url, visits):
        link = MqttLink(url, Ear(), retry=QUICK)
        await link.start()
        with pytest.raises(ConnectionRefused, match="not authorised"):
            await link.connected(GUARD)
        await until(lambda: len(visits) > 2)
        await link.stop()


async def test_a_question_that_is_refused_ends_no_subscription_that_was_granted() -> None:
    asked: list[bytes] = []

    async def grant_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x02\x00\x00")
        for granted in (b"\x01", b"\x80"):
            packet = await reader.read(100)
            asked.append(packet[4:])
            writer.write(b"\x90\x03" + packet[2:4] + granted)
        await reader.read(100)

    async with fake_broker(grant_once) as (url, _):
        link = MqttLink(url, Ear(), subscriptions=["news"], retry=QUICK)
        await link.start()
        await link.connected(GUARD)
        with pytest.raises(ConnectionRefused, match="refuses the subscription to news"):
            await link.subscribe("news")
        link.reconnect("to subscribe anew")
        await until(lambda: len(asked) > 2)
        assert set(asked) == {b"\x00\x04news\x01"}
        await link.stop()


async def test_says_in_plain_words_why_a_broker_cannot_be_reached() -> None:
    for host in ("127.0.0.1", "localhost"):
        link = MqttLink(f"mqtt://bob@{host}:{servers.free_port()}", Ear(), retry=RetryPolicy.never())
        await link.start()
        with pytest.raises(ConnectionLost, match=r": Connection refused$"):
            await link.connected(GUARD)
        await link.stop()


async def test_who_does_not_try_again_says_so_at_once() -> None:
    link = MqttLink(f"mqtt://bob@127.0.0.1:{servers.free_port()}", Ear(), retry=RetryPolicy.never())
    await link.start()
    async with asyncio.timeout(GUARD):
        with pytest.raises(ConnectionLost, match="cannot reach"):
            await link.connected(60)
    await link.stop()


def visited(visits: list[int], times: int) -> bool:
    return len(visits) > times


async def test_does_not_wait_for_a_broker_that_hangs_up_or_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mqtt_session, "CONNECT_WITHIN", 0.1)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        await reader.read(100)

    for behave, why in ((hang_up, "closed"), (say_nothing, "did not answer")):
        async with fake_broker(behave) as (url, visits):
            link = MqttLink(url, Ear(), retry=QUICK)
            await link.start()
            await until(partial(visited, visits, 2))
            with pytest.raises(ConnectionLost, match=why):
                await link.connected(0.05)
            await link.stop()


async def test_a_broker_that_confirms_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_session, "CONFIRM_WITHIN", 0.2)

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x02\x00\x00")
        while await reader.read(1000):
            pass

    async with fake_broker(swallow) as (url, _):
        link = MqttLink(url, Ear(), retry=QUICK)
        await link.start()
        await link.connected(GUARD)
        with pytest.raises(ConnectionLost, match="did not confirm"):
            await link.publish("a", b"")
        await until(lambda: link.connections > 1)
        await link.stop()


async def test_a_broker_that_falls_silent_is_asked_and_then_left() -> None:
    heard = bytearray()

    async def fall_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x02\x00\x00")
        while data := await reader.read(100):
            heard.extend(data)

    async with fake_broker(fall_silent) as (url, _):
        lost: list[str] = []
        link = MqttLink(f"{url}&keepalive=1", Ear(), retry=QUICK, on_disconnect=lost.append)
        await link.start()
        await until(lambda: heard.startswith(b"\xc0\x00"))
        await until(lambda: link.connections > 1)
        await link.stop()
    assert lost[0] == "the broker has been silent for 2 s"


async def test_a_connection_where_nothing_happens_is_kept(mosquitto: LinkBroker) -> None:
    """Mosquitto hangs up on who says nothing for one and a half times the keepalive, and so on a client that
    has no processor for so long: the next connection is kept then."""
    ear = Ear()
    async with Proxy(mosquitto.server.port) as proxy:
        url = f"mqtt://bob@127.0.0.1:{proxy.port}?keepalive=1"
        link = MqttLink(url, ear, subscriptions=["idle"], retry=QUICK)
        await link.start()
        await until(lambda: max(Counter(proxy.pings()).values(), default=0) > 4)  # for more than two seconds
        await link.publish("idle", b"still here")
        await ear.until(1)
        await link.stop()


@pytest.mark.parametrize("seed", range(20))
async def test_survives_garbage(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_session, "CONNECT_WITHIN", 0.2)
    draw = random.Random(seed)

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        if draw.random() < 0.7:
            writer.write(b"\x20\x02\x00\x00")
        for _ in range(draw.randrange(8)):
            body = draw.randbytes(draw.randrange(20))
            writer.write(bytes([draw.randrange(256), len(body)]) + body if draw.random() < 0.7 else body)
        # a publish whose topic is no text, and one that is cut short
        writer.write(b"\x32\x07\x00\x02\xff\xfe\x00\x01!" + b"\x32\x03\x00\x09a")

    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with fake_broker(babble) as (url, visits):
        link = MqttLink(url, Ear(), subscriptions=["a"], retry=QUICK)
        await link.start()
        await until(lambda: len(visits) > 3)
        await link.stop()
    assert unseen == []


async def test_acknowledges_a_topic_that_is_no_text() -> None:
    """Else it would come again for ever."""
    answers: list[bytes] = []

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x20\x02\x00\x00" + b"\x32\x07\x00\x02\xff\xfe\x00\x07!")
        while data := await reader.read(100):
            answers.append(data)

    async with fake_broker(send) as (url, _):
        ear = Ear()
        link = MqttLink(url, ear, retry=QUICK)
        await link.start()
        await until(lambda: answers)
        await link.stop()
    assert answers[0].startswith(b"\x40\x02\x00\x07")
    assert (link.garbage, ear.heard) == (1, [])


# ── TLS, addresses ───────────────────────────────────────────────────────────────────────────────


async def test_tls(tmp_path: Path) -> None:
    port = servers.free_port()
    authority = Authority(tmp_path)
    cert, key = authority.issue("broker", "127.0.0.1")
    server = servers.Mosquitto(f"listener {port} 127.0.0.1", f"certfile {cert}", f"keyfile {key}")
    url = f"mqtts://bob@127.0.0.1:{port}"
    try:
        server.start()
        ear = Ear()
        link = MqttLink(f"{url}?cafile={authority.ca}", ear, subscriptions=["a"])
        await link.start()
        await link.connected(GUARD)
        await link.publish("a", b"secret")
        await ear.until(1)
        await link.stop()

        stranger = MqttLink(url, ear)
        await stranger.start()
        with pytest.raises(ConnectionRefused, match="check the certificates"):
            await stranger.connected(GUARD)
        await stranger.stop()
    finally:
        server.remove()


def test_addresses() -> None:
    a = BrokerAddress.parse("mqtt://b%C3%B6b:p%40ss@[::1]?keepalive=7")
    assert (a.host, a.port, a.username, a.password, a.client_id) == ("::1", 1883, "böb", "p@ss", "böb")
    assert (a.keepalive, a.tls) == (7, False)
    b = BrokerAddress.parse("mqtts://broker.example/?client_id=c")
    assert (b.port, b.tls, b.client_id) == (8883, True, "c")
    assert "p@ss" not in repr(a)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://a",
        "mqtt://",
        "mqtt://a:99999",
        "mqtt://a?what=1",
        "mqtt://a?keepalive=0",
        "mqtt://a?cafile=/no",
    ],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(Malformed):
        BrokerAddress.parse(url)


async def test_a_session_needs_a_name() -> None:
    with pytest.raises(Malformed, match="client_id"):
        MqttLink("mqtt://127.0.0.1", Ear())


async def test_bad_topics(mosquitto: LinkBroker) -> None:
    alice = await mosquitto.link("alice")
    for topic in ("", "a/+", "#", "a\0", "a" * 70_000):
        with pytest.raises(Malformed):
            await alice.publish(topic, b"")
    with pytest.raises(Malformed):
        await alice.subscribe("")
    assert alice.up


async def test_no_delay_is_set(mosquitto: LinkBroker) -> None:
    alice = await mosquitto.link("alice")
    assert alice._session is not None
    assert alice._session._transport is not None
    sock = alice._session._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
