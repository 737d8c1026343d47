"""One MQTT connection, from CONNECT to its end, on a gmqtt client of its own.

The laws are those of `duly.transports.mqtt`. Its own reconnecting is off: it waits a fixed time, and would
carry a late PUBACK over to the new connection, where it acknowledges another message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, TypeAlias

from gmqtt import Client, Subscription  # type: ignore[import-untyped]
from gmqtt import Message as Publication
from gmqtt.mqtt.constants import MQTTv311  # type: ignore[import-untyped]
from gmqtt.mqtt.handler import MQTTConnectError  # type: ignore[import-untyped]
from msgspec import Struct

from duly.errors import ConnectionLost, ConnectionRefused
from duly.transports.address import Address

CONNECT_WITHIN: Final = 10.0

CONFIRM_WITHIN: Final = 20.0
"""Seconds the broker has for a PUBACK; after that the connection is given up and made anew."""

CLOSE_WITHIN: Final = 2.0

_NEVER: Final = -2
"""gmqtt's `reconnect_retries` for none at all: 0 still allows one, -1 means no limit."""

_PUBACK: Final = bytes((0x40, 2))
_QOS: Final = 0x06
_OLD: Final = 0x01 | 0x08
"""RETAIN and DUP: kept by the broker, or sent before; either may have been said long ago"""

# gmqtt logs each lost connection with a traceback; the link itself says what its user must know.
logging.getLogger("gmqtt").addHandler(logging.NullHandler())
logging.getLogger("gmqtt").propagate = False

Done: TypeAlias = Callable[[bool], None]
"""Hears whether the broker has confirmed."""


class Will(Struct, frozen=True):
    """What the broker publishes for us when we go without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class Arrival:
    """One message on its way in."""

    __slots__ = ("committed", "mid", "session")

    def __init__(self, session: Session, mid: int) -> None:
        self.session = session
        self.mid = mid
        """0: it wants no acknowledgement"""
        self.committed = False

    def ack(self) -> None:
        self.committed = True
        self.session.release()


class Session:
    """One connection, from CONNECT to its end. To gmqtt it is also the store of unconfirmed messages: that is
    how we hear of each PUBACK."""

    def __init__(
        self,
        address: Address,
        will: Will | None,
        arrived: Callable[[Arrival, str | bytes, bytes, bool], None],
        *,
        clean: bool,
    ) -> None:
        self._address = address
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._client = Client(
            address.client_id.encode(),  # bytes: of text it counts the characters
            clean_session=clean,
            optimistic_acknowledgement=False,
            will_message=will and Publication(will.topic, will.payload, qos=1, retain=will.retain),
            persistent_storage=self,
        )
        self._client.set_config({"reconnect_retries": _NEVER})
        if address.username:
            self._client.set_auth_credentials(address.username, address.password)
        # Otherwise gmqtt makes a task of every message, and a future, to wait for its PUBACK.
        self._client._package_handler._handle_publish_packet = self._on_publish
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = lambda *_: self.end("the broker closed the connection")
        self._client.on_subscribe = self._on_subscribe
        self._client.on_unsubscribe = lambda _, mid, granted: self._on_subscribe(_, mid, granted, None)
        self._arrivals: deque[Arrival] = deque()
        self.waiting: dict[int, tuple[Done | None, float]] = {}
        self._answers: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._next: Done | None = None
        """for whom the publish is that gmqtt is about to store"""
        self._queued: deque[tuple[str, bytes, bool, Done | None]] = deque()
        self._protocol: Any = None
        self._write: Callable[[bytes | bytearray], None] = lambda _: None
        self._outgoing = bytearray()
        self._present = False
        self.connected = False
        self._watch: asyncio.TimerHandle | None = None
        self._confirmed_all = asyncio.Event()
        self.closed = asyncio.Event()
        self.reason = ""

    # ── opening and closing ──────────────────────────────────────────────────────────────────────

    async def open(self, filters: Collection[str]) -> bool:
        """Connect and subscribe; whether the broker had kept our session."""
        a = self._address
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                await self._unless_closed(
                    self._client.connect(
                        a.host, a.port, ssl=a.tls_context(), keepalive=a.keepalive, version=MQTTv311
                    )
                )
                if filters:
                    # Always, also in a session that was kept: what we want to hear may have changed since.
                    await self.subscribe(list(filters))
        except MQTTConnectError as refusal:
            raise ConnectionRefused(f"{a!r} refuses us: {refusal.message.partition(': ')[2]}") from None
        except TimeoutError:
            raise ConnectionLost(f"{a!r} did not answer within {CONNECT_WITHIN:g} s") from None
        except ssl.SSLError as problem:
            raise ConnectionRefused(f"no trust between us and {a!r}: {problem}") from None
        except OSError as problem:
            raise ConnectionLost(f"cannot reach {a!r}: {problem.strerror or problem}") from None
        self._watch_confirmations()
        self._protocol = self._client._connection._protocol
        self._write = self._protocol.write_data
        self._protocol.write_data = self._gather
        return self._present

    def end(self, reason: str) -> None:
        """This connection is no longer of use."""
        self.reason = self.reason or reason
        self.closed.set()
        self._confirmed_all.set()

    async def close(self, reason: str) -> None:
        self.end(reason)
        if self._watch is not None:
            self._watch.cancel()
        if self._protocol is not None:
            self._flush()
            self._protocol.write_data = self._write  # a goodbye goes out at once, or not at all
        # A peer that is gone takes no more bytes, and then closing waits for ever.
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._client.disconnect()
        lost = ConnectionLost(self.lost)
        for answered in self._answers.values():
            if not answered.done():
                answered.set_exception(lost)
        unconfirmed = [done for done, _ in self.waiting.values()] + [done for *_, done in self._queued]
        self.waiting.clear()
        self._queued.clear()
        self._arrivals.clear()
        for done in unconfirmed:
            if done is not None:
                done(False)

    @property
    def lost(self) -> str:
        return f"{self.reason}; nobody knows whether the broker has it, send it again"

    def _on_connect(self, _: Client, present: int, code: int, properties: object) -> None:
        self._present = bool(present)
        self.connected = True

    async def _unless_closed(self, work: Coroutine[Any, Any, Any]) -> None:
        """gmqtt waits for ever for the answer to a CONNECT when the broker closes instead."""
        task = self._loop.create_task(work)
        await first(settled(task), self.closed.wait())
        if task.done():
            task.result()
        else:
            task.cancel()
            # With TLS 1.3 a broker that misses our certificate hangs up after the handshake, without a word.
            missed = self._address.tls and not self._address.cert
            hint = "; it may want a certificate of ours (cert and key)" if missed else ""
            raise ConnectionLost(f"{self._address!r} closed the connection{hint}")

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_for_more(self) -> bool:
        return self.connected and not self.closed.is_set()

    def publish(self, topic: str, payload: bytes, retain: bool, done: Done | None) -> None:
        self._next = done
        self._client.publish(topic, payload, qos=1, retain=retain)

    def queue(self, topic: str, payload: bytes, retain: bool, done: Done | None) -> None:
        """Publish when another has been confirmed; first come, first served."""
        self._queued.append((topic, payload, retain, done))

    def _gather(self, data: bytes) -> None:
        """What is written in one turn of the loop goes out together: a call to the system for all of it."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += data

    def _flush(self) -> None:
        if self._outgoing:
            out, self._outgoing = self._outgoing, bytearray()
            self._write(out)

    async def drained(self) -> None:
        """Until everything is confirmed."""
        if self.waiting and not self.closed.is_set():
            self._confirmed_all.clear()
            await self._confirmed_all.wait()

    async def subscribe(self, filters: list[str]) -> None:
        granted = await self._answer(self._client.subscribe([Subscription(f, qos=1) for f in filters]))
        refused = [f for f, qos in zip(filters, granted, strict=False) if qos >= 0x80]
        if refused:
            raise ConnectionRefused(f"{self._address!r} does not let us listen to {', '.join(refused)}")

    async def unsubscribe(self, filters: list[str]) -> None:
        await self._answer(self._client.unsubscribe([f.encode() for f in filters]))

    async def _answer(self, mid: int) -> tuple[int, ...]:
        answered: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        self._answers[mid] = answered
        await first(settled(answered), self.closed.wait())
        self._answers.pop(mid, None)
        if not answered.done():
            raise ConnectionLost(f"{self._address!r} closed the connection")
        return answered.result()

    def _on_subscribe(self, _: Client, mid: int, granted: tuple[int, ...], properties: object) -> None:
        answered = self._answers.get(mid)
        if answered is not None and not answered.done():
            answered.set_result(granted)

    def _watch_confirmations(self) -> None:
        oldest = next(iter(self.waiting.values()), None)
        if oldest is not None and self._loop.time() - oldest[1] > CONFIRM_WITHIN:
            self.end(f"the broker did not confirm a message within {CONFIRM_WITHIN:g} s")
        else:
            self._watch = self._loop.call_later(CONFIRM_WITHIN / 4, self._watch_confirmations)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _on_publish(self, header: int, packet: bytes) -> None:
        """A PUBLISH as MQTT 3.1.1 has it: length and text of the topic, at QoS 1 a number, the payload."""
        if self.closed.is_set():
            return
        start = 2 + int.from_bytes(packet[:2], "big")
        raw, mid = packet[2:start], 0
        if header & _QOS:
            mid = int.from_bytes(packet[start : start + 2], "big")
            start += 2
        arrival = Arrival(self, mid)
        if mid:
            self._arrivals.append(arrival)
        try:
            topic: str | bytes = str(raw, "utf-8")
        except UnicodeDecodeError:
            topic = bytes(raw)
        self._arrived(arrival, topic, bytes(packet[start:]), bool(header & _OLD))

    def release(self) -> None:
        """Acknowledge what is committed, as far as everything before it is."""
        arrivals, out = self._arrivals, bytearray()
        while arrivals and arrivals[0].committed:
            out += _PUBACK
            out += arrivals.popleft().mid.to_bytes(2, "big")
        if out and not self.closed.is_set():
            self._client._connection._protocol.write_data(out)

    # ── what gmqtt calls its storage ─────────────────────────────────────────────────────────────

    def push_message(self, mid: int, raw: bytes) -> None:
        self.waiting[mid] = (self._next, self._loop.time())

    def remove_message_by_mid(self, mid: int) -> None:
        done, _ = self.waiting.pop(mid, (None, 0.0))
        if done is not None:
            done(True)
        if self._queued and not self.closed.is_set():
            self.publish(*self._queued.popleft())
        if not self.waiting:
            self._confirmed_all.set()

    is_empty: Final = True

    def get_all(self) -> list[tuple[int, bytes]]:
        return []

    def clear(self) -> None:
        """Called when the broker has no session of ours: nothing has been sent by then."""

    async def wait_empty(self) -> None:
        """Called at the end of connecting: what was published since need not hold that up."""


async def settled(future: asyncio.Future[Any]) -> None:
    await asyncio.wait({future})


async def first(*waits: Awaitable[Any]) -> None:
    """Until one of them is over; the others are dropped."""
    tasks = {asyncio.ensure_future(w) for w in waits}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
