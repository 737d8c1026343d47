"""MQTT 3.1.1: one link to one broker, that comes back by itself.

The laws. PUBACK is ours to send: it goes out when the handler has called `ack`, in the order of arrival, and
only on the connection the message came by, since a packet number means nothing on the next one. What was not
acknowledged comes again: the session is persistent. A publish is confirmed by the broker's PUBACK or fails
with `ConnectionLost`; nothing is resent here, the outbox above does that.

Every connection is a gmqtt client of its own, used once. Its own reconnecting is off: it waits a fixed time,
and would carry a late PUBACK over to the new connection, where it acknowledges another message.

`TCP_NODELAY` is set on every socket, by asyncio and uvloop alike: with Nagle a round trip takes 44 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from gmqtt import Client, Subscription  # type: ignore[import-untyped]
from gmqtt import Message as Publication
from gmqtt.mqtt.constants import MQTTv311  # type: ignore[import-untyped]
from gmqtt.mqtt.handler import MQTTConnectError  # type: ignore[import-untyped]
from msgspec import Struct

from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import ConnectionLost, ConnectionRefused, Malformed, Overloaded, ProgramError
from duly.transport import OnMessage

RECONNECT: Final = RetryPolicy.exponential(100 * MS, 30 * SECOND, jitter=0.5)
"""How soon to try again. Strong jitter: after a broker's restart everybody comes at once."""

STABLE: Final = 10.0
"""Seconds after which a connection counts as a success. Two programs with one client id throw each other out
at once; counting those as failures slows the fight down."""

CONNECT_WITHIN: Final = 10.0

CONFIRM_WITHIN: Final = 20.0
"""Seconds the broker has for a PUBACK; after that the connection is given up and made anew."""

CLOSE_WITHIN: Final = 2.0

IN_FLIGHT: Final = 1024
"""Publishes that may wait for their PUBACK; more wait here, so that a slow broker slows its senders down."""

_UNSAFE: Final = re.compile(r"[\s.*>/%]")
"""What brokers refuse in a client id; written as %2E and so on when a username has it."""

_NEVER: Final = -2
"""gmqtt's `reconnect_retries` for none at all: 0 still allows one, -1 means no limit."""

# gmqtt logs each lost connection with a traceback; the link itself says what its user must know.
logging.getLogger("gmqtt").addHandler(logging.NullHandler())
logging.getLogger("gmqtt").propagate = False


class Address(Struct, frozen=True, kw_only=True):
    """Where the broker is and who we are.

    >>> Address.parse("mqtt://lamp:secret@broker.local").client_id
    'lamp'
    """

    host: str
    port: int
    tls: bool = False
    username: str = ""
    password: str = ""
    client_id: str = ""
    keepalive: int = 30
    cafile: str = ""
    """who signed the broker's certificate; empty: whom the system trusts"""
    cert: str = ""
    """our own certificate, with `key`, where the broker asks for one"""
    key: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """mqtt://user:password@host:port?client_id=…&keepalive=…&cafile=…&cert=…&key=…, or mqtts://."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise Malformed("the broker's port is not a number from 0 to 65535") from None
        if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname:
            raise Malformed(
                "a broker's address looks like mqtt://user:password@host:1883, or mqtts:// for TLS"
            )
        options = dict(parse_qsl(parts.query))
        strange = options.keys() - {"client_id", "keepalive", "cafile", "cert", "key"}
        if strange:
            raise Malformed(f"the broker's address has an unknown option {min(strange)!r}")
        keepalive = options.pop("keepalive", "30")
        if not (keepalive.isascii() and keepalive.isdigit() and 1 <= int(keepalive) <= 0xFFFF):
            raise Malformed("keepalive is a number of seconds from 1 to 65535")
        for file in ("cafile", "cert", "key"):
            if file in options and not Path(options[file]).is_file():
                raise Malformed(f"{file} {options[file]!r} is not a file")
        username = unquote(parts.username or "")
        return cls(
            host=parts.hostname,
            port=port or (8883 if parts.scheme == "mqtts" else 1883),
            tls=parts.scheme == "mqtts",
            username=username,
            password=unquote(parts.password or ""),
            client_id=options.pop("client_id", "") or _UNSAFE.sub(lambda c: f"%{ord(c[0]):02X}", username),
            keepalive=int(keepalive),
            **options,
        )

    def __repr__(self) -> str:
        who = f"{self.username}@" if self.username else ""
        return f"mqtt{'s' * self.tls}://{who}{self.host}:{self.port}"


class Will(Struct, frozen=True):
    """What the broker publishes for us when we go without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class MqttLink:
    """A persistent session with a broker.

    `will` is asked for at every connect. `on_connect(session_present)` is called when the subscriptions are
    in force; messages of a session that was kept may arrive before that. A handler that raises has a bug: it
    is reported, the message is not acknowledged, and the connection is made anew.
    """

    def __init__(
        self,
        address: str | Address,
        on_message: OnMessage,
        *,
        subscriptions: Iterable[str] = (),
        will: Callable[[], Will] | None = None,
        on_connect: Callable[[bool], None] | None = None,
        on_disconnect: Callable[[str], None] | None = None,
        retry: RetryPolicy = RECONNECT,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        if not self.address.client_id:
            raise Malformed("a persistent session needs a name; give a username or ?client_id=")
        self.problem = "not started"
        """why the link is not up, in a sentence; empty when it is"""
        self.connections = 0
        self.garbage = 0
        """messages whose topic was no text: acknowledged and dropped"""
        self._on_message = on_message
        self._filters = dict.fromkeys(_check_filter(f) for f in subscriptions)
        self._will = will
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._retry = retry
        self._in_flight = in_flight
        self._session: _Session | None = None
        self._ready = asyncio.Event()
        self._settled = asyncio.Event()
        """up, or refused"""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ── outside ──────────────────────────────────────────────────────────────────────────────────

    @property
    def up(self) -> bool:
        return self._ready.is_set()

    async def start(self) -> None:
        """Begin connecting; does not wait for it."""
        if self._task is not None:
            raise ProgramError("this link has been started already")
        self._stopping.clear()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="duly-mqtt")

    async def connected(self, within: float = CONNECT_WITHIN) -> None:
        """Wait until the link is up; `ConnectionRefused` or `ConnectionLost` says why it is not."""
        try:
            async with asyncio.timeout(within):
                await self._settled.wait()
        except TimeoutError:
            raise ConnectionLost(f"no connection to {self.address!r}: {self.problem}") from None
        if not self._ready.is_set():
            raise ConnectionRefused(self.problem)

    async def stop(self) -> None:
        """Wait a moment for what is under way, and say goodbye; what is not acknowledged comes again."""
        session = self._session
        if session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await session.drained()
        self._stopping.set()
        if self._task is not None:
            await self._task
            self._task = None

    def publish_nowait(self, topic: str, payload: bytes, *, retain: bool = False) -> asyncio.Future[None]:
        """Send at QoS 1; the future ends with the broker's PUBACK, or with `ConnectionLost`."""
        session = self._session
        if session is None:
            raise ConnectionLost(f"no connection to {self.address!r}: {self.problem}")
        if len(session.waiting) >= self._in_flight:
            raise Overloaded(
                f"{self._in_flight} messages wait for the broker's confirmation; try again later"
            )
        return session.publish(_check_topic(topic), payload, retain)

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Send at QoS 1, when there is room for it, and wait for the broker's PUBACK."""
        session = self._session
        if session is not None and len(session.waiting) >= self._in_flight:
            await session.queue(_check_topic(topic), payload, retain)
        else:
            await self.publish_nowait(topic, payload, retain=retain)

    async def subscribe(self, *filters: str) -> None:
        """Also listen to these. Without a connection they are noted, and asked for when there is one."""
        wanted = [_check_filter(f) for f in filters]
        self._filters.update(dict.fromkeys(wanted))
        if self._session is not None and self._session.connected:
            try:
                await self._session.subscribe(wanted)
            except ConnectionRefused:
                for each in wanted:
                    self._filters.pop(each, None)
                raise

    async def unsubscribe(self, *filters: str) -> None:
        """No longer listen to these."""
        for each in filters:
            self._filters.pop(each, None)
        if self._session is not None and self._session.connected:
            await self._session.unsubscribe(list(filters))

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        attempt = 0
        while not self._stopping.is_set():
            session = _Session(self.address, self._will() if self._will else None, self._arrived)
            began = loop.time()
            try:
                self._session = session  # usable from CONNACK on: a kept session's messages want answers
                present = await session.open(self._filters)
                self._is_up(present)
                await _first(session.closed.wait(), self._stopping.wait())
                self.problem = session.reason or "stopped"
            except ConnectionLost as problem:
                self.problem = str(problem)
            except ConnectionRefused as problem:
                self.problem = str(problem)
                self._settled.set()
            finally:
                was_up, self._session = self._ready.is_set(), None
                self._ready.clear()
                if was_up:
                    self._settled.clear()
                await session.close(self.problem)
            if was_up and self._on_disconnect is not None:
                self._call(self._on_disconnect, self.problem)
            attempt = 1 if was_up and loop.time() - began > STABLE else attempt + 1
            delay = self._retry.delay(attempt, self.address.client_id.encode())
            if delay is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay / SECOND):
                    await self._stopping.wait()

    def _is_up(self, session_present: bool) -> None:
        self.connections += 1
        self.problem = ""
        self._ready.set()
        self._settled.set()
        if self._on_connect is not None:
            self._call(self._on_connect, session_present)

    def _arrived(self, arrival: _Arrival, topic: str | bytes, payload: bytes, retained: bool) -> None:
        if not isinstance(topic, str):
            self.garbage += 1
            arrival.ack()
            return
        if not self._call(self._on_message, topic, payload, retained, arrival.ack):
            arrival.session.end("the handler of a message failed; it will come again")

    def _call(self, function: Callable[..., None], *args: Any) -> bool:
        try:
            function(*args)
        except Exception as bug:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a handler of {self.address!r} failed", "exception": bug}
            )
            return False
        return True


class _Arrival:
    """One message on its way in."""

    __slots__ = ("committed", "released", "session")

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.committed = False
        self.released: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ack(self) -> None:
        self.committed = True
        self.session.release()


class _Session:
    """One connection, from CONNECT to its end. To gmqtt it is also the store of unconfirmed messages: that is
    how we hear of each PUBACK."""

    def __init__(
        self,
        address: Address,
        will: Will | None,
        arrived: Callable[[_Arrival, str | bytes, bytes, bool], None],
    ) -> None:
        self._address = address
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._client = Client(
            address.client_id.encode(),  # bytes: of text it counts the characters
            clean_session=False,
            optimistic_acknowledgement=False,
            will_message=will and Publication(will.topic, will.payload, qos=1, retain=will.retain),
            persistent_storage=self,
        )
        self._client.set_config({"reconnect_retries": _NEVER})
        if address.username:
            self._client.set_auth_credentials(address.username, address.password)
        self._client.on_message = self._on_message
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = lambda *_: self.end("the broker closed the connection")
        self._client.on_subscribe = self._on_subscribe
        self._client.on_unsubscribe = lambda _, mid, granted: self._on_subscribe(_, mid, granted, None)
        self._arrivals: deque[_Arrival] = deque()
        self.waiting: dict[int, tuple[asyncio.Future[None], float]] = {}
        self._answers: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._next: asyncio.Future[None] | None = None
        """for whom the publish is that gmqtt is about to store"""
        self._queued: deque[tuple[str, bytes, bool, asyncio.Future[None]]] = deque()
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
                    self._client.connect(a.host, a.port, ssl=_tls(a), keepalive=a.keepalive, version=MQTTv311)
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
        # A peer that is gone takes no more bytes, and then closing waits for ever.
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._client.disconnect()
        lost = ConnectionLost(f"{self.reason}; nobody knows whether the broker has it, send it again")
        for confirmed, _ in self.waiting.values():
            _fail(confirmed, lost)
        for *_, confirmed in self._queued:
            _fail(confirmed, lost)
        for answered in self._answers.values():
            _fail(answered, lost)
        self.waiting.clear()
        self._queued.clear()
        # gmqtt's tasks for them end by writing to a closed socket: nothing goes out.
        for arrival in self._arrivals:
            arrival.released.set_result(0)
        self._arrivals.clear()

    def _on_connect(self, _: Client, present: int, code: int, properties: object) -> None:
        self._present = bool(present)
        self.connected = True

    async def _unless_closed(self, work: Coroutine[Any, Any, Any]) -> None:
        """gmqtt waits for ever for the answer to a CONNECT when the broker closes instead."""
        task = self._loop.create_task(work)
        await _first(_settled(task), self.closed.wait())
        if task.done():
            task.result()
        else:
            task.cancel()
            raise ConnectionLost(f"{self._address!r} closed the connection")

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def publish(self, topic: str, payload: bytes, retain: bool) -> asyncio.Future[None]:
        if not self.connected or self.closed.is_set():
            raise ConnectionLost(f"no connection to {self._address!r}")
        return self._send(topic, payload, retain, self._loop.create_future())

    def queue(self, topic: str, payload: bytes, retain: bool) -> asyncio.Future[None]:
        """Publish when another has been confirmed; first come, first served."""
        if self.closed.is_set():
            raise ConnectionLost(f"no connection to {self._address!r}")
        confirmed = self._loop.create_future()
        self._queued.append((topic, payload, retain, confirmed))
        return confirmed

    def _send(
        self, topic: str, payload: bytes, retain: bool, confirmed: asyncio.Future[None]
    ) -> asyncio.Future[None]:
        self._next = confirmed
        self._client.publish(topic, payload, qos=1, retain=retain)
        return confirmed

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
        await _first(_settled(answered), self.closed.wait())
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

    async def _on_message(
        self, _: Client, topic: str | bytes, payload: bytes, qos: int, properties: dict[str, Any]
    ) -> int:
        arrival = _Arrival(self)
        if self.closed.is_set():
            return 0
        if qos:
            self._arrivals.append(arrival)
        self._arrived(arrival, topic, bytes(payload), bool(properties.get("retain")))
        if qos:
            await arrival.released
        return 0

    def release(self) -> None:
        """Acknowledge what is committed, as far as everything before it is."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].committed and not self.closed.is_set():
            arrivals.popleft().released.set_result(0)

    # ── what gmqtt calls its storage ─────────────────────────────────────────────────────────────

    def push_message(self, mid: int, raw: bytes) -> None:
        assert self._next is not None
        self.waiting[mid] = (self._next, self._loop.time())

    def remove_message_by_mid(self, mid: int) -> None:
        confirmed, _ = self.waiting.pop(mid, (None, 0.0))
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(None)
        while self._queued:
            topic, payload, retain, waits = self._queued.popleft()
            if not waits.done():
                self._send(topic, payload, retain, waits)
                break
        if not self.waiting:
            self._confirmed_all.set()

    is_empty: Final = True

    def get_all(self) -> list[tuple[int, bytes]]:
        return []

    def clear(self) -> None:
        """Called when the broker has no session of ours: nothing has been sent by then."""

    async def wait_empty(self) -> None:
        """Called at the end of connecting: what was published since need not hold that up."""


def _tls(address: Address) -> ssl.SSLContext | bool:
    if not address.tls:
        return False
    context = ssl.create_default_context(cafile=address.cafile or None)
    if address.cert:
        context.load_cert_chain(address.cert, address.key or None)
    return context


def _check_topic(topic: str) -> str:
    if not topic or len(topic.encode(errors="replace")) > 0xFFFF or any(c in topic for c in "+#\0"):
        raise Malformed(f"{topic!r} is no topic to publish to: not empty, no + # or NUL, at most 65535 bytes")
    return topic


def _check_filter(topic: str) -> str:
    if not topic or len(topic.encode(errors="replace")) > 0xFFFF or "\0" in topic:
        raise Malformed(f"{topic!r} is no topic to listen to: not empty, no NUL, at most 65535 bytes")
    return topic


def _fail(future: asyncio.Future[Any], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
        future.exception()  # seen: who publishes without waiting need not look


async def _settled(future: asyncio.Future[Any]) -> None:
    await asyncio.wait({future})


async def _first(*waits: Awaitable[Any]) -> None:
    """Until one of them is over; the others are dropped."""
    tasks = {asyncio.ensure_future(w) for w in waits}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
