"""One MQTT connection, from CONNECT to its end.

The laws are those of `duly.transports.mqtt.link`. Of the modules beside this one, `packet_reader` takes apart
what arrives, `packet_writer` writes, and `outgoing_publishes` keeps what the broker has not confirmed.

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
from typing import Final, cast

from msgspec import Struct

from duly.errors import ConnectionLost, ConnectionRefused, Malformed, VersionRefused
from duly.transports.mqtt import packets, properties, reason_codes
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.outgoing_publishes import OutgoingPublishes
from duly.transports.mqtt.packet_reader import PacketReader
from duly.transports.mqtt.packet_writer import PacketWriter

CONNECT_WITHIN: Final = 10.0

CONFIRM_WITHIN: Final = 20.0
"""Seconds the broker has for a PUBACK; after that the connection is given up and made anew."""

CLOSE_WITHIN: Final = 2.0

LOOKS: Final = 4
"""How often a link with an `answer_within` looks in that time whether the broker has said something."""

SLOWEST: Final = 32 * 1024
"""Bytes a second that a connection carries at least: a broker answers what is behind a large message late."""

LOG: Final = logging.getLogger("duly.mqtt")

_NUMBER: Final = re.compile(r"\[Errno (\d+)\]")

_OLD: Final = packets.RETAIN | packets.DUP
"""Kept by the broker, or sent before; either may have been said long ago."""


class Will(Struct, frozen=True):
    """The message that the broker publishes when our connection breaks."""

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
        """Mark the message as committed; its PUBACK is sent when all before it are committed as well."""
        if not self.committed:
            self.committed = True
            self.session.release()


class MqttSession(asyncio.Protocol):
    """One connection, used once. `answer_within`: seconds that a silent broker has for a PINGREQ, which it is
    then sent at once; without it the keepalive decides."""

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
        answer_within: float | None = None,
    ) -> None:
        self.version = version
        """of MQTT: 3 (3.1.1) or 5"""
        self._five = version == 5
        self._no_properties = properties.NONE if self._five else b""
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
        self._welcome: asyncio.Future[bytes] = self._loop.create_future()
        """the broker's CONNACK"""
        self._answers: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        """which kind of packet is waited for under which number"""
        self.outgoing = OutgoingPublishes(
            address, self._write, self._answers, version=version, window=in_flight
        )
        self.publish = self.outgoing.publish
        self._heard_at = self._loop.time()
        self._answer_within = answer_within
        self._looked_at = self._heard_at
        self._silent_looks = 0
        """how often in a row the broker had said nothing since the look before; time in which this process
        did not run does not count"""
        self._written_before = 0
        """bytes written before the broker fell silent"""
        self._watch: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self.connected = False
        self.closed = asyncio.Event()
        self._over = False
        """closed, asked for at every packet"""
        self._heard = False
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
            raise ConnectionRefused(f"TLS with {a!r} failed, check the certificates: {problem}") from None
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
            raise ConnectionRefused(
                f"{a!r} accepts only QoS 0, so it does not confirm messages; use another broker"
            )
        return bool(body[0])

    @property
    def hung_up(self) -> bool:
        """Whether the broker has taken the connection and ended it without a word."""
        return self._transport is not None and self._gone.is_set() and not self._heard

    async def _connect(self) -> None:
        a = self._address
        if not a.path:
            try:
                await self._loop.create_connection(lambda: self, a.host, a.port, ssl=a.tls_context() or None)
            except BaseException:
                # It was made, and its time was up in the same turn: the loop has closed the transport. That
                # of uvloop does not say that it is closing, and raises if it is written to.
                self._transport = self._reader.transport = self._writer.transport = None
                raise
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
        """Give the connection up, and fail what waits for an answer of the broker."""
        self.reason = self.reason or reason
        self._over = True
        self.closed.set()
        self.outgoing.stop_waiting()
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
        self._arrivals.clear()
        self.outgoing.abandon(ConnectionLost(self.lost))

    @property
    def lost(self) -> str:
        """The error text for a publish that was not confirmed before the connection ended."""
        return f"{self.reason}; whether the broker has it is not known, send it again"

    def _watch_socket(self) -> None:
        """Keep the connection alive, and leave one that is not."""
        now, keepalive = self._loop.time(), self._keepalive
        oldest = self.outgoing.oldest
        if oldest is not None and now - oldest > CONFIRM_WITHIN:
            self.end(f"the broker did not confirm a message within {CONFIRM_WITHIN:g} s")
        elif now - self._heard_at > 2 * keepalive:
            self.end(f"the broker has been silent for {2 * keepalive} s")
        elif self._answer_within is not None and self._unanswered(now, self._answer_within):
            self.end(f"the broker did not answer within {self._answer_within:g} s")
        else:
            quiet = now - min(self._heard_at, self._writer.wrote_at) >= keepalive / 2
            if quiet or self._silent_looks == 1:
                self._write(packets.PINGREQ)
            look = min(CONFIRM_WITHIN, keepalive) / 4
            if self._answer_within is not None:
                look = min(look, self._answer_within / LOOKS)
            self._watch = self._loop.call_later(look, self._watch_socket)

    def _unanswered(self, now: float, within: float) -> bool:
        """Return whether the broker is silent for longer than it has for an answer to the PINGREQ of the
        first silent look, behind what was written before."""
        written = self._writer.written
        if self._heard_at >= self._looked_at:
            self._silent_looks, self._written_before = 0, written
        else:
            self._silent_looks += 1
        self._looked_at = now
        allowed = within + (written - self._written_before) / SLOWEST
        return (self._silent_looks - 1) * within / LOOKS >= allowed

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
                self.outgoing.acknowledged(data, start, end)
            else:
                self._answered(kind, data[start:end])

    def _no_mqtt(self, problem: Malformed) -> None:
        self.end(f"{self._address!r} does not speak MQTT: {problem}")

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_for_more(self) -> bool:
        """Whether the broker has accepted the connection, and it has not ended."""
        return self.connected and not self._over

    async def drained(self) -> None:
        """Wait until everything is confirmed, or the connection has ended."""
        if not self._over:
            await self.outgoing.drained()

    async def subscribe(self, filters: Mapping[str, int]) -> None:
        """Subscribe, each filter at its QoS; raises `ConnectionRefused` if the broker denies one of them."""
        number = self.outgoing.next_number()
        options = packets.RETAIN_AS_PUBLISHED if self._five and self._as_published else 0
        packet = packets.subscribe(number, filters, self._no_properties, options)
        granted = self._codes(await self._ask(packets.SUBACK, number, packet))
        if len(granted) != len(filters):
            raise ConnectionLost(
                f"{self._address!r} answers {len(filters)} subscriptions with {len(granted)} codes"
            )
        refused = [self._refused(f, code) for f, code in zip(filters, granted, strict=True) if code >= 0x80]
        if refused:
            raise ConnectionRefused(f"{self._address!r} refuses the subscription to {', '.join(refused)}")

    def _codes(self, answer: bytes) -> bytes:
        """Return the codes in a SUBACK, one for each filter."""
        return answer[properties.skip(answer, 2, len(answer)) if self._five else 2 :]

    def _refused(self, filter: str, code: int) -> str:
        return f"{filter}: {reason_codes.words(code)}" if self._five else filter

    async def unsubscribe(self, filters: Sequence[str]) -> None:
        """Unsubscribe, and wait until the broker has confirmed it."""
        number = self.outgoing.next_number()
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
        """Take the first packet of a broker, which is its CONNACK and nothing else."""
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
        self.outgoing.limit(limits)
        self._keepalive = limits.get(properties.SERVER_KEEPALIVE, 0) or self._keepalive

    def _answered(self, kind: int, body: bytes) -> None:
        """Pass on an answer that is waited for; an answer to a PINGREQ is not."""
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

    def _due(self) -> bytes:
        """Return the PUBACKs of what is committed, as far as everything before it is."""
        arrivals, numbers = self._arrivals, []
        while arrivals and arrivals[0].committed and not self._over:
            numbers.append(arrivals.popleft().number)
        return packets.acknowledge(numbers)


def _why(problem: OSError) -> str:
    """Return the reason of a failed connection in the system's words, without asyncio's list of addresses."""
    if isinstance(problem, socket.gaierror):
        return problem.strerror or str(problem)
    found = _NUMBER.search(str(problem))
    return os.strerror(int(found[1])) if found else str(problem)
