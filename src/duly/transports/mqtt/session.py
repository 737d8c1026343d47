"""One MQTT connection, from CONNECT to its end.

The laws are those of `duly.transports.mqtt.link`; `duly.transports.mqtt.packet_reader` takes apart what
arrives, and `duly.transports.mqtt.packet_writer` writes.

No client library is under it (docs/adr/0014): they acknowledge before a handler has committed, or carry a
late PUBACK over to the next connection, where it acknowledges another message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, cast

from msgspec import Struct

from duly.errors import ConnectionLost, ConnectionRefused, DulyError, Malformed, TooLarge, VersionRefused
from duly.transports.mqtt import packets, properties, reason_codes
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.packet_reader import PacketReader
from duly.transports.mqtt.packet_writer import PacketWriter
from duly.wire.publish_properties import PublishProperties

CONNECT_WITHIN: Final = 10.0

CONFIRM_WITHIN: Final = 20.0
"""Seconds the broker has for a PUBACK; after that the connection is given up and made anew."""

CLOSE_WITHIN: Final = 2.0

LOG: Final = logging.getLogger("duly.mqtt")

_NUMBER: Final = re.compile(r"\[Errno (\d+)\]")

_OLD: Final = packets.RETAIN | packets.DUP
"""Kept by the broker, or sent before; either may have been said long ago."""

Done: TypeAlias = Callable[[DulyError | None], None]
"""Hears None when the broker has confirmed a message, else why it has not: the connection was lost, or the
broker refuses it, as MQTT 5 lets it say."""


class Will(Struct, frozen=True):
    """What the broker publishes for us when we go without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class IncomingPublish(Struct, eq=False):
    """One message on its way in."""

    session: MqttSession
    number: int
    """0: it wants no acknowledgement"""
    retained: bool
    """the broker has kept it for new subscriptions"""
    committed: bool = False

    def ack(self) -> None:
        """Mark the message as committed; its PUBACK goes out when all before it are committed too."""
        if not self.committed:
            self.committed = True
            self.session.release()


class MqttSession(asyncio.Protocol):
    """One connection, used once."""

    def __init__(
        self,
        address: BrokerAddress,
        will: Will | None,
        arrived: Callable[[IncomingPublish, str | bytes, bytes, bool], None],
        *,
        clean: bool,
        version: int = 3,
        in_flight: int = packets.LAST_NUMBER,
        as_published: bool = False,
    ) -> None:
        self.version = version
        """of MQTT: 3 (3.1.1) or 5"""
        self._five = version == 5
        self._no_properties = properties.NONE if self._five else b""
        self._window = in_flight
        """publishes that may wait for their PUBACK; more are queued here"""
        self._largest = 0
        """bytes of the largest packet that the broker takes; 0: it did not say"""
        self._keepalive = address.keepalive
        self._address = address
        self._will = will
        self._arrived = arrived
        self._clean = clean
        self._as_published = as_published
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = PacketReader(self._handle, self._no_mqtt)
        self._writer = PacketWriter(self._due)
        self._write = self._writer.write
        self.release = self._writer.wake
        """sends the acknowledgements that are due, at the end of this turn"""
        self._arrivals: deque[IncomingPublish] = deque()
        self.waiting: dict[int, tuple[Done | None, float, bytes]] = {}
        """what is not confirmed: who hears of it, since when, and its topic"""
        self._queued: deque[tuple[bytes, bytes, bool, Done | None, bytes]] = deque()
        self._welcome: asyncio.Future[bytes] = self._loop.create_future()
        """the broker's CONNACK"""
        self._answers: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        """which kind of packet is waited for under which number"""
        self._number = 0
        self._heard_at = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._confirmed_all = asyncio.Event()
        self._gone = asyncio.Event()
        self.connected = False
        self.closed = asyncio.Event()
        self._over = False
        """closed, asked for at every packet"""
        self._heard = False
        self._logged: set[int] = set()
        """when the broker last refused a message"""
        self.present = False
        """the broker had kept our session"""
        self.reason = ""

    # ── opening and closing ──────────────────────────────────────────────────────────────────────

    async def open(self, filters: Mapping[str, int]) -> bool:
        """Connect and subscribe, each filter at its QoS; returns whether the broker had kept our session."""
        a = self._address
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                await self._connect()
                self._write(self._hello())
                self.present = self._welcomed(await asyncio.shield(self._welcome))
                if filters:
                    # Always, also in a session that was kept: what we want to hear may have changed since.
                    await self.subscribe(filters)
        except TimeoutError:
            raise ConnectionLost(f"{a!r} did not answer within {CONNECT_WITHIN:g} s") from None
        except ssl.SSLError as problem:
            raise ConnectionRefused(f"no trust between us and {a!r}: {problem}") from None
        except OSError as problem:
            raise ConnectionLost(f"cannot reach {a!r}: {_why(problem)}") from None
        self._watch_socket()
        return self.present

    def _welcomed(self, body: bytes) -> bool:
        """Take in a CONNACK; whether the broker had kept our session. Raises `ConnectionRefused`."""
        a, code = self._address, body[1]
        answers_as_3 = len(body) == 2 and code < reason_codes.FAILURES
        if self._five and (code == reason_codes.UNSUPPORTED_VERSION or answers_as_3):
            raise VersionRefused(f"{a!r} does not speak MQTT 5; leave ?version=5 out")
        if not self._five:
            if code:
                raise ConnectionRefused(f"{a!r} refuses us: {reason_codes.return_code(code)}")
            return bool(body[0])
        limits, said, _ = properties.read(body, 2, len(body)) if len(body) > 2 else ({}, "", 0)
        if code:
            raise ConnectionRefused(f"{a!r} refuses us: {reason_codes.words(code, said)}")
        if limits.get(properties.MAXIMUM_QOS, 1) == 0:
            raise ConnectionRefused(f"{a!r} confirms no messages (it takes QoS 0 only)")
        return bool(body[0])

    @property
    def hung_up(self) -> bool:
        """Whether the broker has taken the connection and ended it without a word."""
        return self._transport is not None and self._gone.is_set() and not self._heard

    async def _connect(self) -> None:
        a = self._address
        if not a.path:
            await self._loop.create_connection(lambda: self, a.host, a.port, ssl=a.tls_context() or None)
            return
        from duly.transports.mqtt.websocket_stream import WebSocketStream  # aiohttp takes long to import

        await WebSocketStream(self).connect(a)

    def _hello(self) -> bytes:
        a, will = self._address, self._will
        about = None
        if self._five:
            kept = b"" if self._clean else properties.number(properties.SESSION_EXPIRY, a.session_expiry)
            about = properties.packed(kept)
        return packets.connect(
            a.client_id,
            keepalive=a.keepalive,
            clean=self._clean,
            username=a.username,
            password=a.password,
            will=None if will is None else (will.topic, will.payload, will.retain),
            properties=about,
        )

    def end(self, reason: str) -> None:
        """This connection is no longer of use."""
        self.reason = self.reason or reason
        self._over = True
        self.closed.set()
        self._confirmed_all.set()
        for answered in (self._welcome, *(each for _, each in self._answers.values())):
            if not answered.done():
                answered.set_exception(ConnectionLost(self.reason))
                answered.exception()  # retrieved, as there may be no task that awaits it

    async def close(self, reason: str) -> None:
        """Disconnect from the broker, and report every publish that it has not confirmed as lost."""
        self.end(reason)
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._write(packets.DISCONNECT)
            self._writer.flush()
            self._transport.close()
            try:
                async with asyncio.timeout(CLOSE_WITHIN):
                    await self._gone.wait()
            except TimeoutError:
                self._transport.abort()  # a peer that is gone takes no more bytes
        unconfirmed = [done for done, *_ in self.waiting.values()] + [done for *_, done, _ in self._queued]
        self.waiting.clear()
        self._queued.clear()
        self._arrivals.clear()
        for done in unconfirmed:
            if done is not None:
                done(ConnectionLost(self.lost))

    @property
    def lost(self) -> str:
        """The error text for a publish that was not confirmed before the connection ended."""
        return f"{self.reason}; whether the broker has it is not known, send it again"

    def _watch_socket(self) -> None:
        """Keep the connection alive, and leave one that is not."""
        now, keepalive = self._loop.time(), self._keepalive
        oldest = next(iter(self.waiting.values()), None)
        if oldest is not None and now - oldest[1] > CONFIRM_WITHIN:
            self.end(f"the broker did not confirm a message within {CONFIRM_WITHIN:g} s")
        elif now - self._heard_at > 2 * keepalive:
            self.end(f"the broker has been silent for {2 * keepalive} s")
        else:
            if now - min(self._heard_at, self._writer.wrote_at) >= keepalive / 2:
                self._write(packets.PINGREQ)
            self._watch = self._loop.call_later(min(CONFIRM_WITHIN, keepalive) / 4, self._watch_socket)

    # ── what asyncio tells ───────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport that asyncio has connected."""
        connected = cast("asyncio.Transport", transport)
        self._transport = self._reader.transport = self._writer.transport = connected

    def connection_lost(self, problem: Exception | None) -> None:
        """End the session: the broker or the network has closed the connection."""
        self._gone.set()
        if isinstance(problem, Malformed):
            self._no_mqtt(problem)
        # With TLS 1.3 a broker that misses our certificate hangs up after the handshake, without a word.
        missed = self._address.tls and not self._address.cert and not self.connected
        hint = "; it may want a certificate of ours (cert and key)" if missed else ""
        self.end(f"{self._address!r} closed the connection{hint}")

    def data_received(self, data: bytes) -> None:
        """Handle the packets that are complete, and keep the rest until more bytes arrive."""
        self._heard = True
        self._heard_at = self._loop.time()
        self._reader.receive(data)

    def _handle(self, data: bytes, found: Sequence[packets.Packet]) -> None:
        """Handle packets in their order, until the connection ends."""
        for first, start, end in found:
            if self._over:
                return
            kind = first & packets.KIND
            if not self.connected:
                self._greeted(kind, data[start:end])
            elif kind == packets.PUBLISH:
                self._published(first, data, start, end)
            elif kind == packets.PUBACK:
                self._acknowledged(data, start, end)
            else:
                self._answered(kind, data[start:end])

    def _no_mqtt(self, problem: Malformed) -> None:
        self.end(f"{self._address!r} does not speak MQTT: {problem}")

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_for_more(self) -> bool:
        """Whether the broker has accepted the connection, and it has not ended."""
        return self.connected and not self._over

    @property
    def unconfirmed(self) -> int:
        """How many messages were published and not confirmed, or wait to be published."""
        return len(self.waiting) + len(self._queued)

    def publish(
        self,
        topic: bytes,
        payload: bytes,
        retain: bool,
        done: Done | None,
        about: PublishProperties | None = None,
    ) -> None:
        """Publish when there is room; first come, first served. `topic` is a `text` of `packets`."""
        encoded = properties.encode(about) if about is not None and self._five else self._no_properties
        if len(self.waiting) < self._window:
            self._publish(topic, payload, retain, done, encoded)
        else:
            self._queued.append((topic, payload, retain, done, encoded))

    def _publish(self, topic: bytes, payload: bytes, retain: bool, done: Done | None, about: bytes) -> None:
        number = self._next_number()
        packet = packets.publish(topic, number, payload, retain=retain, properties=about)
        if self._largest and len(packet) > self._largest:
            self._refuse_large(len(packet), done)
            return
        self.waiting[number] = (done, self._loop.time(), topic)
        self._write(packet)

    def _refuse_large(self, size: int, done: Done | None) -> None:
        """A broker ends the connection of a client that sends it what is too large."""
        why = f"a message of {size} bytes is not sent: {self._address!r} takes {self._largest} at most"
        LOG.warning("%s", why)
        if done is not None:
            # Not before the caller has what it waits with.
            self._loop.call_soon(done, TooLarge(why))

    def _next_number(self) -> int:
        number = self._number
        while True:
            number = number % packets.LAST_NUMBER + 1
            if number not in self.waiting and number not in self._answers:
                self._number = number
                return number

    async def drained(self) -> None:
        """Until everything is confirmed."""
        if self.waiting and not self._over:
            self._confirmed_all.clear()
            await self._confirmed_all.wait()

    async def subscribe(self, filters: Mapping[str, int]) -> None:
        """Subscribe, each filter at its QoS; raises `ConnectionRefused` if the broker denies one of them."""
        number = self._next_number()
        options = packets.RETAIN_AS_PUBLISHED if self._five and self._as_published else 0
        packet = packets.subscribe(number, filters, self._no_properties, options)
        granted = self._codes(await self._ask(packets.SUBACK, number, packet))
        if len(granted) != len(filters):
            raise ConnectionLost(
                f"{self._address!r} answers {len(filters)} subscriptions with {len(granted)} codes"
            )
        refused = [self._refused(f, code) for f, code in zip(filters, granted, strict=True) if code >= 0x80]
        if refused:
            raise ConnectionRefused(f"{self._address!r} does not let us listen to {', '.join(refused)}")

    def _codes(self, answer: bytes) -> bytes:
        """The codes in a SUBACK, one for each filter."""
        return answer[properties.skip(answer, 2, len(answer)) if self._five else 2 :]

    def _refused(self, filter: str, code: int) -> str:
        return f"{filter}: {reason_codes.words(code)}" if self._five else filter

    async def unsubscribe(self, filters: Sequence[str]) -> None:
        """Unsubscribe, and wait until the broker has confirmed it."""
        number = self._next_number()
        packet = packets.unsubscribe(number, filters, self._no_properties)
        await self._ask(packets.UNSUBACK, number, packet)

    async def _ask(self, kind: int, number: int, packet: bytes) -> bytes:
        """Send a packet, and return the body of the one of this kind that answers it."""
        if self._over:
            raise ConnectionLost(self.reason)
        answered: asyncio.Future[bytes] = self._loop.create_future()
        self._answers[number] = (kind, answered)
        try:
            self._write(packet)
            return await answered
        finally:
            del self._answers[number]

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _greeted(self, kind: int, body: bytes) -> None:
        """The first word of a broker is its CONNACK, and nothing else is."""
        if kind != packets.CONNACK:
            raise Malformed(f"a packet of kind {kind >> 4} before the CONNACK")
        if len(body) != 2 and not (self._five and len(body) > 2):
            raise Malformed(f"a CONNACK of {len(body)} bytes")
        if self._welcome.done():
            raise Malformed("a second CONNACK")
        if self._five and len(body) > 2:
            self._limit(properties.read(body, 2, len(body))[0])
        self.connected = body[1] == 0 and (len(body) > 2 or not self._five)
        self._welcome.set_result(body)

    def _limit(self, limits: properties.Numbers) -> None:
        """Keep to what the broker says that it takes."""
        self._window = min(self._window, limits.get(properties.RECEIVE_MAXIMUM, self._window)) or 1
        self._largest = limits.get(properties.MAXIMUM_PACKET_SIZE, 0)
        self._keepalive = limits.get(properties.SERVER_KEEPALIVE, 0) or self._keepalive

    def _answered(self, kind: int, body: bytes) -> None:
        """Something we wait for, or of no interest: an answer to a PINGREQ."""
        if kind == packets.CONNACK:
            raise Malformed("a second CONNACK")
        if kind == packets.DISCONNECTED and self._five:
            said = properties.read(body, 1, len(body))[1] if len(body) > 1 else ""
            why = reason_codes.words(body[0], said) if body and body[0] else "without a reason"
            self.end(f"{self._address!r} ended the connection: {why}")
            return
        if kind not in (packets.SUBACK, packets.UNSUBACK):
            return
        number = packets.number(body, 0, min(2, len(body)))
        expected, answered = self._answers.get(number, (0, None))
        if answered is not None and expected == kind and not answered.done():
            answered.set_result(body)

    def _published(self, first: int, data: bytes, start: int, end: int) -> None:
        """Take in a PUBLISH."""
        topic, number, body = packets.published(first, data, start, end)
        if self._five:
            body = properties.skip(data, body, end)
        arrival = IncomingPublish(self, number, first & packets.RETAIN != 0)
        if number:
            self._arrivals.append(arrival)
        self._arrived(arrival, topic, data[body:end], first & _OLD != 0)

    def _acknowledged(self, data: bytes, start: int, end: int) -> None:
        """A PUBACK: a number, and in MQTT 5 perhaps a code and properties. Without a failure it confirms."""
        if not self._five or end - start <= 2:
            self._confirmed(packets.number(data, start, end), None)
            return
        number, code = packets.number(data, start, start + 2), data[start + 2]
        said = properties.read(data, start + 3, end)[1] if end - start > 3 else ""
        published = self.waiting.get(number)
        problem = None
        if code >= reason_codes.FAILURES and published is not None:
            problem = self._refusal(published[2][2:].decode(errors="replace"), code, said)
        self._confirmed(number, problem)

    def _refusal(self, topic: str, code: int, said: str) -> DulyError:
        """The error of a message that the broker refuses; each code is logged once in a connection."""
        why = f"{self._address!r} refuses a message to {topic}: {reason_codes.words(code, said)}"
        if code not in self._logged:
            self._logged.add(code)
            LOG.warning("%s", why)
        return reason_codes.publish_error(code, why)

    def _confirmed(self, number: int, problem: DulyError | None) -> None:
        published = self.waiting.pop(number, None)
        if published is None:
            return
        if (done := published[0]) is not None:
            done(problem)
        while self._queued and len(self.waiting) < self._window:
            self._publish(*self._queued.popleft())
        if not self.waiting:
            self._confirmed_all.set()

    def _due(self) -> bytes:
        """The PUBACKs of what is committed, as far as everything before it is."""
        arrivals, numbers = self._arrivals, []
        while arrivals and arrivals[0].committed and not self._over:
            numbers.append(arrivals.popleft().number)
        return packets.acknowledge(numbers)


def _why(problem: OSError) -> str:
    """As the system says it; asyncio says which call failed, and of several addresses all."""
    if isinstance(problem, socket.gaierror):
        return problem.strerror or str(problem)
    found = _NUMBER.search(str(problem))
    return os.strerror(int(found[1])) if found else str(problem)
