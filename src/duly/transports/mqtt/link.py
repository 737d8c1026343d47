"""A link to an MQTT broker (MQTT 5, or 3.1.1 where the broker speaks no other) that reconnects by itself.

The laws. PUBACK is sent when the handler has called `ack`, in order of arrival, and only on the connection
that the message came by, since a packet number means nothing on the next one. Unacknowledged messages are
sent again, because the session is persistent. A publish is confirmed by the broker's PUBACK or fails with
`ConnectionLost`; the outbox above resends, not the link.

Every connection is a session of its own (`duly.transports.mqtt.session`), used once.

`TCP_NODELAY` is set on every socket, by asyncio and uvloop alike: with Nagle a round trip takes 44 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Final

from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import (
    ConnectionLost,
    ConnectionRefused,
    DulyError,
    Malformed,
    ProgramError,
    VersionRefused,
)
from duly.runtime.backoff import Backoff
from duly.runtime.changes import Changes
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.broker_versions import VERSIONS, BrokerVersions
from duly.transports.mqtt.outgoing_publishes import Done
from duly.transports.mqtt.packets import TEXT_LIMIT, text
from duly.transports.mqtt.session import (
    CLOSE_WITHIN,
    CONNECT_WITHIN,
    IncomingPublish,
    MqttSession,
    Will,
)
from duly.wire.publish_properties import PublishProperties
from duly.wire.session import OnMessage

__all__ = ["MqttLink", "Will"]

RECONNECT: Final = RetryPolicy.exponential(100 * MS, 5 * SECOND, jitter=0.5)
"""How soon to reconnect. The jitter is strong, since after a broker's restart all its clients connect at
once. The delay is never long: the sender of a command waits, and a broker that dies a few times in a row must
not make the link sleep."""

STABLE: Final = 10.0
"""Seconds after which a connection counts as a success. Two programs with one client id disconnect each other
at once; counting those connections as failures slows them down. The first connection to a broker that was
down always counts as a success."""

IN_FLIGHT: Final = 1024
"""How many publishes may wait for their PUBACK; more wait here, so that a slow broker slows its senders
down."""


class MqttLink:
    """A persistent session with a broker.

    `subscriptions` are received at QoS 1. For the topics in `latest` only the last message counts, which the
    broker retains: they are received at QoS 0, without acknowledgements. `before` is awaited before every
    connect, and then `will` is called. `clean`: the broker forgets the session when the connection ends.
    `on_connect(session_present)` is called when the subscriptions are active; messages of a kept session may
    arrive before that. A handler that raises an error has a bug: it is reported, the message is not
    acknowledged, and the link reconnects. `on_retained(topic)` is called instead of `on_message` for messages
    that the broker has retained and, with MQTT 5, is just retaining. `answer_within` is for links to a broker
    that is near: seconds after which one that has stopped answering is noticed, also while nothing is sent;
    without it the keepalive decides, which suits networks that are slow or paid for.
    """

    def __init__(
        self,
        address: str | BrokerAddress,
        on_message: OnMessage,
        *,
        subscriptions: Iterable[str] = (),
        latest: Iterable[str] = (),
        will: Callable[[], Will] | None = None,
        on_retained: Callable[[str], None] | None = None,
        on_connect: Callable[[bool], None] | None = None,
        on_disconnect: Callable[[str], None] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        clean: bool = False,
        retry: RetryPolicy = RECONNECT,
        stable: float = STABLE,
        in_flight: int = IN_FLIGHT,
        answer_within: float | None = None,
        tasks: Supervisor | None = None,
        changes: Changes | None = None,
        versions: BrokerVersions = VERSIONS,
    ) -> None:
        self.address = BrokerAddress.parse(address) if isinstance(address, str) else address
        if not self.address.client_id:
            raise Malformed("a persistent session needs a name; give a username or ?client_id=")
        self.problem = "no answer yet"
        """why the link is not up, in a sentence; empty when it is"""
        self.refused = False
        """the broker refuses the login"""
        self.tried = False
        """an attempt to connect has ended, successfully or not"""
        self.connections = 0
        self.version: int | None = None
        """of MQTT, of the last connection: 3 (3.1.1) or 5"""
        self.garbage = 0
        """messages with an undecodable topic: acknowledged and dropped"""
        self._on_message = on_message
        self._on_retained = on_retained
        self._filters = _wanted(subscriptions, 1) | _wanted(latest, 0)
        """the subscribed filters with their QoS"""
        self._will = will
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._before = before
        self._clean = clean
        self._retry = retry
        self._stable = stable
        self._in_flight = in_flight
        self._answer_within = answer_within
        self._session: MqttSession | None = None
        self._ready = asyncio.Event()
        self._settled = asyncio.Event()
        """up, refused, or given up"""
        self._stopping = asyncio.Event()
        self._tasks = tasks or Supervisor()
        self._life: SupervisedTask | None = None
        self._changes = changes or Changes()
        self._versions = versions
        self._backoff = Backoff(self._retry, self.address.client_id)
        self._unreachable = True
        """the last attempt led to no connection"""

    # ── outside ──────────────────────────────────────────────────────────────────────────────────

    @property
    def up(self) -> bool:
        """Whether the link is connected and its subscriptions are in force."""
        return self._ready.is_set()

    async def start(self) -> None:
        """Begin connecting; does not wait for it."""
        if self._life is not None:
            raise ProgramError("this link has been started already")
        self._stopping.clear()
        self._life = self._tasks.spawn("mqtt link", self._run)

    async def connected(self, within: float = CONNECT_WITHIN) -> None:
        """Wait until the link is up; `ConnectionRefused` or `ConnectionLost` says why it is not."""
        try:
            async with asyncio.timeout(within):
                await self._settled.wait()
        except TimeoutError:
            raise self.lost() from None
        if not self._ready.is_set():
            raise ConnectionRefused(self.problem) if self.refused else self.lost()

    async def stop(self) -> None:
        """Wait a moment for what is under way, and disconnect; unacknowledged messages are sent again."""
        session = self._session
        if session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await session.drained()
        self._stopping.set()
        if self._life is not None:
            await self._life.finish()
            self._life = None

    async def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        properties: PublishProperties | None = None,
    ) -> None:
        """Send at QoS 1, when there is room for it, and wait for the broker's PUBACK. A broker with MQTT 5
        may refuse the message: then `NotAllowed`, `Overloaded`, `TooLarge` or `Malformed` is raised."""
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connected_session().publish(_topic(topic), payload, retain, _telling(confirmed), properties)
        await confirmed

    def post(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        done: Done | None = None,
        properties: PublishProperties | None = None,
    ) -> None:
        """Send at QoS 1 as soon as there is room, without waiting; `done` is called when the broker has
        confirmed it, or with the error. Without a connection the message is lost at once, and the caller has
        to repeat it."""
        session = self._session
        if session is not None and session.open_for_more:
            session.publish(_topic(topic), payload, retain, done, properties)
        elif done is not None:
            done(self.lost())

    def _connected_session(self) -> MqttSession:
        session = self._session
        if session is None or not session.open_for_more:
            raise self.lost()
        return session

    def lost(self) -> ConnectionLost:
        """Return the error for a missing connection, with its reason; it names the broker once."""
        where = repr(self.address)
        return ConnectionLost(
            self.problem if where in self.problem else f"no connection to {where}: {self.problem}"
        )

    def reconnect(self, reason: str) -> None:
        """Reconnect, so that unacknowledged messages are sent again."""
        if self._session is not None:
            self._session.end(reason)

    async def subscribe(self, *filters: str, latest: bool = False) -> None:
        """Subscribe to these as well. Without a connection they are noted, and subscribed to with the next
        one."""
        wanted = _wanted(filters, 0 if latest else 1)
        new = wanted.keys() - self._filters.keys()
        self._filters |= wanted
        if self._session is not None and self._session.connected:
            try:
                await self._session.subscribe(wanted)
            except ConnectionRefused:
                for each in new:
                    self._filters.pop(each, None)
                raise

    async def unsubscribe(self, *filters: str) -> None:
        """Unsubscribe from these."""
        for each in filters:
            self._filters.pop(each, None)
        if self._session is not None and self._session.connected:
            await self._session.unsubscribe(filters)

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        while not self._stopping.is_set():
            if not await self._connect_once():
                return
            if not await self._backoff.wait(self._stopping):
                self._settled.set()
                return

    async def _connect_once(self) -> bool:
        """Make one connection, and keep it for as long as it lasts; return False if we must not connect.

        Whatever ends it, the link reconnects: nothing that a broker sends can end the link.
        """
        began = asyncio.get_running_loop().time()
        try:
            if self._before is not None and not await self._allowed(self._before()):
                return False
            began = asyncio.get_running_loop().time()
            session = await self._open()
            self._is_up(session)
            await _first(session.closed.wait(), self._stopping.wait())
            self.problem = session.reason or "stopped"
        except ConnectionRefused as problem:
            self.problem = str(problem)
            self.refused = True
            self._settled.set()
        except DulyError as problem:
            self.problem = str(problem)
        except Exception as bug:
            self.problem = f"the connection to {self.address!r} failed: {bug!r}"
            self._tasks.failed("mqtt link", bug)
        finally:
            was_up, opened, self._session = self._ready.is_set(), self._session, None
            self.tried = True
            self._ready.clear()
            if was_up:
                self._settled.clear()
            try:
                if opened is not None:
                    await opened.close(self.problem)
            finally:
                self._is_down(was_up, began)
        return True

    async def _open(self) -> MqttSession:
        """Connect with the version that the broker speaks. A broker that disconnects at MQTT 5 without an
        answer, and then accepts 3.1.1, does not speak 5."""
        will = self._will() if self._will else None
        versions = self._versions.to_try(self.address)
        for version in versions:
            session = MqttSession(
                self.address,
                will,
                self._arrived,
                clean=self._clean,
                version=version,
                in_flight=self._in_flight,
                as_published=self._on_retained is not None,
                answer_within=self._answer_within,
            )
            self._session = session  # usable from CONNACK on: messages of a kept session need answers
            try:
                await session.open(self._filters)
            except VersionRefused as problem:
                if version == versions[-1]:
                    raise
                self._versions.speaks_only_3(self.address)
                await session.close(str(problem))
            except ConnectionLost:
                if version == versions[-1] or not session.hung_up or self._stopping.is_set():
                    raise
                await session.close("it hung up at MQTT 5")
            else:
                break
        if version != versions[0]:
            self._versions.speaks_only_3(self.address)
        return session

    def _is_down(self, was_up: bool, began: float) -> None:
        if was_up and self._on_disconnect is not None:
            self._call(self._on_disconnect, self.problem)
        if was_up and (self._unreachable or asyncio.get_running_loop().time() - began > self._stable):
            self._backoff.worked()
        self._unreachable = not was_up
        self._changes.tell()

    async def _allowed(self, before: Awaitable[None]) -> bool:
        """Return whether we may connect; False if we are stopped first."""
        waiting = asyncio.ensure_future(before)
        await _first(asyncio.wait({waiting}), self._stopping.wait())
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})
            return False
        waiting.result()
        return True

    def _is_up(self, session: MqttSession) -> None:
        self.connections += 1
        self.version = session.version
        self.problem = ""
        self.refused = False
        self._ready.set()
        self._settled.set()
        if self._on_connect is not None:
            self._call(self._on_connect, session.present)
        self._changes.tell()

    def _arrived(self, arrival: IncomingPublish, topic: str | bytes, payload: bytes, old: bool) -> None:
        if not isinstance(topic, str):
            self.garbage += 1
            arrival.ack()
            return
        if arrival.retained and payload and self._on_retained is not None:
            self._call(self._on_retained, topic)
            arrival.ack()
            return
        try:
            self._on_message(topic, payload, old, arrival.ack)
        except Exception as bug:
            self._complain(bug)
            arrival.session.end("the handler of a message failed; it will come again")

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception as bug:
            self._complain(bug)

    def _complain(self, bug: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a handler of {self.address!r} failed", "exception": bug}
        )


@lru_cache(4_096)
def _topic(topic: str) -> bytes:
    """Return a topic in its packet form; cached, since most messages go to the same few."""
    if not topic or len(topic.encode(errors="replace")) > TEXT_LIMIT or any(c in topic for c in "+#\0"):
        raise Malformed(
            f"{topic!r} cannot be published to: a topic is not empty, has no + # or NUL, and at most "
            f"{TEXT_LIMIT} bytes"
        )
    return text(topic)


def _wanted(topics: Iterable[str], qos: int) -> dict[str, int]:
    wanted = dict.fromkeys(topics, qos)
    for topic in wanted:
        if not topic or len(topic.encode(errors="replace")) > TEXT_LIMIT or "\0" in topic:
            raise Malformed(
                f"{topic!r} cannot be subscribed to: a topic filter is not empty, has no NUL, and at most "
                f"{TEXT_LIMIT} bytes"
            )
    return wanted


def _telling(confirmed: asyncio.Future[None]) -> Done:
    def done(problem: DulyError | None) -> None:
        if confirmed.done():
            return
        if problem is None:
            confirmed.set_result(None)
        else:
            confirmed.set_exception(problem)
            confirmed.exception()  # seen: who publishes without waiting need not look

    return done


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of them is done, and cancel the others."""
    tasks = {asyncio.ensure_future(w) for w in waits}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
