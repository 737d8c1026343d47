"""An MQTT broker in a simulated world, and the sockets that lead to it.

It exchanges packets of MQTT 3.1.1 or 5 with the production link, as each client of a world asks. It keeps
sessions, retained messages and wills in memory only: when it dies it forgets everything, as Mosquitto does.
When it restarts it remembers sessions and retained messages, as NATS does, and what was not acknowledged
comes again without a mark that it is a repeat. Connections keep order and break; what was not acknowledged is
sent again, and sometimes more than that. What an account may not publish is confirmed and dropped. A first
subscription may take a moment, as it does at NATS: what is retained is read at its beginning, and what is
retained in that moment is passed on before it, or not at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final

from msgspec import Struct

from duly.testing.loops import VirtualLoop
from duly.testing.sim.gateway import Wire
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.world import World
from duly.transports.mqtt import packets, properties

_CONNECT: Final = 0x10
_SUBSCRIBE: Final = 0x80
_UNSUBSCRIBE: Final = 0xA0
_PINGREQ: Final = 0xC0
_DISCONNECT: Final = 0xE0
_PINGRESP: Final = bytes((0xD0, 0))
_CLEAN, _WILL, _RETAIN_WILL = 0x02, 0x04, 0x20
_FIVE: Final = 5
"""The protocol level of MQTT 5."""


class WiredLoop(VirtualLoop):
    """A virtual loop whose connections lead to a broker; the name of the host is that of the client."""

    def __init__(self, accept: Callable[[asyncio.Protocol, str], asyncio.Transport]) -> None:
        super().__init__()
        self._accept = accept

    async def create_connection(self, *args: Any, **more: object) -> Any:
        """Connect to the broker."""
        factory, host, *_ = args
        protocol = factory()
        return self._accept(protocol, host), protocol


class SimPublish(Struct, frozen=True):
    """A message that was published."""

    topic: str
    payload: bytes
    retained: bool = False
    expires: float | None = None
    """when the broker drops it, by the loop's time"""


class SimSession:
    """The session that the broker keeps for one client id."""

    def __init__(self, *, clean: bool) -> None:
        self.clean = clean
        self.filters: dict[str, int] = {}
        self.waiting: deque[SimPublish] = deque()
        self.unacknowledged: dict[int, SimPublish] = {}
        self.connection: SimConnection | None = None
        self.number = 0
        self.beginning: set[str] = set()
        """the filters to which nothing that is retained is passed on yet"""
        self.unmarked = False
        """the broker has restarted: it does not know what it has sent before"""


class SimBroker:
    """The broker of a world."""

    def __init__(
        self,
        world: World,
        heard: Callable[[str, bytes], None],
        may_publish: Callable[[str, str], bool] = lambda client, topic: True,
    ) -> None:
        self._world = world
        self.heard = heard
        self._may_publish = may_publish
        self._sessions: dict[str, SimSession] = {}
        self._retained: dict[str, bytes] = {}
        self._connections: list[SimConnection] = []
        self.recorded: list[SimPublish] = []
        """all messages that were published"""
        self.subscribes_within = 0.0
        """seconds that the first subscription to a filter takes"""
        self.on_connections: Callable[[str, bool], None] = lambda _client, _connected: None
        """called when a client has connected, and when its last connection has ended"""

    def accept(self, protocol: asyncio.Protocol, client: str) -> asyncio.Transport:
        """Accept a connection."""
        if ("hub", client) in self._world.network.cut:
            raise ConnectionRefusedError(111, "cut off")
        connection = SimConnection(self, self._world, protocol, client)
        self._connections.append(connection)
        return connection.socket

    def die(self) -> None:
        """Die and restart at once, without any memory."""
        self._world.faults += 1
        self._world.log.note("broker", "dies")
        self._sessions.clear()
        self._retained.clear()
        self._break_all()

    def restart(self) -> None:
        """Die and restart at once, with all sessions, but without the wills of the connections."""
        self._world.faults += 1
        self._world.log.note("broker", "restarts")
        for session in self._sessions.values():
            session.unmarked = True
        self._break_all()

    def lose(self, client: str) -> None:
        """Lose all connections, and the sessions of this client."""
        self._world.faults += 1
        self._world.log.note("broker", f"forgets the sessions of {client}")
        for session in self.sessions_of(client):
            session.clean = True
        for connection in list(self._connections):
            connection.wire.break_()

    def retained(self, topic: str) -> bytes | None:
        """Return the retained message of a topic."""
        return self._retained.get(topic)

    def sessions_of(self, client: str) -> list[SimSession]:
        """Return the sessions under the client ids of this client."""
        return [s for id_, s in self._sessions.items() if id_.partition("-")[0] == client]

    def _break_all(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.will = None
            connection.wire.break_()

    def hang_up(self, client: str) -> None:
        """Close the connections of a client whose process has died."""
        for connection in [
            connection for connection in self._connections if connection.wire.client == client
        ]:
            connection.wire.break_()

    def opened(self, connection: SimConnection, client_id: str, *, clean: bool) -> bool:
        """Open a session; return whether it existed. Another connection of the same client id is closed."""
        known = self._sessions.get(client_id)
        if known is not None and known.connection is not None:
            known.connection.wire.break_()
        present = known is not None and not known.clean and not clean
        session = known if known is not None and present else SimSession(clean=clean)
        self._sessions[client_id] = connection.session = session
        session.connection = connection
        self.on_connections(connection.wire.client, True)
        return present

    def lost(self, connection: SimConnection) -> None:
        """Forget a connection that broke, and publish its will."""
        if connection in self._connections:
            self._connections.remove(connection)
            if all(other.wire.client != connection.wire.client for other in self._connections):
                self.on_connections(connection.wire.client, False)
        if connection.session is not None and connection.session.connection is connection:
            connection.session.connection = None
        if connection.will is not None:
            will, connection.will = connection.will, None
            self.publish(will.topic, will.payload, retain=will.retained)

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, expires: float | None = None
    ) -> None:
        """Hand a message to all subscribed sessions."""
        self.recorded.append(SimPublish(topic, payload))
        self.heard(topic, payload)
        if retain:
            self._retained[topic] = payload
            if not payload:
                del self._retained[topic]
        for session in list(self._sessions.values()):
            missed = session.beginning if retain else set()
            found = [q for each, q in session.filters.items() if each not in missed and _matches(each, topic)]
            if found:
                self._hand_out(session, SimPublish(topic, payload, expires=expires), max(found))

    def publish_as(
        self, client: str, topic: str, payload: bytes, *, retain: bool = False, expires: float | None = None
    ) -> None:
        """Hand a message of a client to all subscribed sessions, if it may publish there."""
        if self._may_publish(client, topic):
            self.publish(topic, payload, retain=retain, expires=expires)

    def subscribed(self, session: SimSession, filter_: str, qos: int) -> None:
        """Add a subscription, and hand out retained messages."""
        is_first = filter_ not in session.filters
        session.filters[filter_] = qos
        kept = [
            SimPublish(topic, said, True)
            for topic, said in self._retained.items()
            if _matches(filter_, topic)
        ]
        if not is_first or not self.subscribes_within:
            self._begin(session, filter_, qos, kept)
            return
        if self._world.rng.random() < 0.5:
            session.beginning.add(filter_)
        asyncio.get_running_loop().call_later(
            self.subscribes_within, self._begin, session, filter_, qos, kept
        )

    def _begin(self, session: SimSession, filter_: str, qos: int, kept: list[SimPublish]) -> None:
        session.beginning.discard(filter_)
        for message in kept:
            self._hand_out(session, message, qos)

    def _hand_out(self, session: SimSession, message: SimPublish, qos: int) -> None:
        if session.connection is None or not session.connection.welcomed:
            if qos:
                session.waiting.append(message)
        else:
            session.connection.deliver(message, qos)


class SimConnection:
    """The broker's end of a connection."""

    def __init__(self, broker: SimBroker, world: World, protocol: asyncio.Protocol, client: str) -> None:
        self._broker, self._world, self._protocol = broker, world, protocol
        self.wire = Wire(world, client)
        self.socket = SimSocket(self, protocol)
        self.wire.on_break = [lambda: broker.lost(self), self.socket.broke]
        self.session: SimSession | None = None
        self.will: SimPublish | None = None
        self.welcomed = False
        self._five = False
        self._rest = b""
        asyncio.get_running_loop().call_soon(protocol.connection_made, self.socket)

    def say(self, data: bytes) -> None:
        """Send bytes to the client."""
        self.wire.carry(0, self.socket.receive, data)

    def hear(self, data: bytes) -> None:
        """Receive bytes of the client."""
        data = self._rest + data
        found, rest, _ = packets.split(data)
        self._rest = data[rest:]
        for first, start, end in found:
            self._take(first, data[start:end])

    def deliver(self, message: SimPublish, qos: int, dup: int = 0) -> None:
        """Send a message to the client."""
        session, topic = self.session, packets.text(message.topic)
        assert session is not None
        if message.expires is not None and message.expires <= asyncio.get_running_loop().time():
            return
        about = properties.NONE if self._five else b""
        if not qos:
            self.say(_publish_qos0(topic, about + message.payload, message.retained))
            return
        number = session.number = session.number % packets.LAST_NUMBER + 1
        session.unacknowledged[number] = message
        packet = packets.publish(topic, number, message.payload, retain=message.retained, properties=about)
        self.say(bytes((packet[0] | dup,)) + packet[1:])
        if self._world.faulty and self._world.rng.random() < self._world.plan.repeat:
            self._world.faults += 1
            self.say(bytes((packet[0] | packets.DUP,)) + packet[1:])

    def _take(self, first: int, body: bytes) -> None:
        kind, session = first & packets.KIND, self.session
        if kind == _CONNECT:
            self._connect(body)
        elif session is None:
            self.wire.break_()
        elif kind == packets.PUBLISH:
            self._publish(body, retain=bool(first & packets.RETAIN))
        elif kind == packets.PUBACK:
            session.unacknowledged.pop(int.from_bytes(body[:2], "big"), None)
        elif kind == _SUBSCRIBE:
            wanted, at = [], self._behind(body, 2)
            while at < len(body):
                each, at = _text(body, at)
                wanted.append((each, body[at]))
                at += 1
            self._answer(packets.SUBACK, body[:2], bytes(qos for _, qos in wanted))
            for each, qos in wanted:
                self._broker.subscribed(session, each, qos)
        elif kind == _UNSUBSCRIBE:
            gone, at = 0, self._behind(body, 2)
            while at < len(body):
                each, at = _text(body, at)
                session.filters.pop(each, None)
                gone += 1
            self._answer(packets.UNSUBACK, body[:2], bytes(gone) if self._five else b"")
        elif kind == _PINGREQ:
            self.say(_PINGRESP)
        elif kind == _DISCONNECT:
            self.will = None
            self.wire.break_()

    def _behind(self, body: bytes, at: int) -> int:
        """Return where the properties that begin at `at` end; MQTT 3.1.1 has none."""
        return properties.skip(body, at, len(body)) if self._five else at

    def _answer(self, kind: int, number: bytes, codes: bytes) -> None:
        body = number + (properties.NONE if self._five else b"") + codes
        self.say(bytes((kind, len(body))) + body)

    def _publish(self, body: bytes, *, retain: bool) -> None:
        """Receive a message of the client; with MQTT 5 it may name the seconds after which it expires."""
        topic, at = _text(body, 0)
        self.say(packets.acknowledge([packets.number(body, at, at + 2)]))
        at, expires = at + 2, None
        if self._five:
            about, _, at = properties.read(body, at, len(body))
            if properties.MESSAGE_EXPIRY in about:
                expires = asyncio.get_running_loop().time() + about[properties.MESSAGE_EXPIRY]
        self._broker.publish_as(self.wire.client, topic, body[at:], retain=retain, expires=expires)

    def _connect(self, body: bytes) -> None:
        self._five = body[6] == _FIVE
        flags, at = body[7], self._behind(body, 10)
        client_id, at = _text(body, at)
        if flags & _WILL:
            topic, at = _text(body, self._behind(body, at))
            size = int.from_bytes(body[at : at + 2], "big")
            self.will = SimPublish(topic, body[at + 2 : at + 2 + size], bool(flags & _RETAIN_WILL))
        present = self._broker.opened(self, client_id, clean=bool(flags & _CLEAN))
        self._answer(packets.CONNACK, bytes((present, 0)), b"")
        self.welcomed = True
        session = self.session
        assert session is not None
        again, session.unacknowledged = session.unacknowledged, {}
        mark, session.unmarked = (0 if session.unmarked else packets.DUP), False
        for message in again.values():
            self.deliver(message, 1, mark)
        while session.waiting:
            self.deliver(session.waiting.popleft(), 1)


class SimSocket(asyncio.Transport):
    """The client's end of a connection."""

    def __init__(self, connection: SimConnection, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._connection, self._protocol = connection, protocol
        self._closing = self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes to the broker."""
        if not self._closing:
            self._connection.wire.carry(1, self._connection.hear, bytes(data))

    def close(self) -> None:
        """Close the connection after what was written has arrived."""
        if not self._closing:
            self._closing = True
            self._connection.wire.carry(1, lambda _: self._connection.wire.break_(), b"")
            asyncio.get_running_loop().call_soon(self.broke)

    def abort(self) -> None:
        """Break the connection at once."""
        self._closing = True
        self._connection.wire.break_()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._closing

    def receive(self, data: bytes) -> None:
        """Hand bytes of the broker to the client."""
        if not self._over:
            self._protocol.data_received(data)

    def broke(self) -> None:
        """Tell the client that the connection is lost."""
        self._closing = True
        if not self._over:
            self._over = True
            self._protocol.connection_lost(None)


def version_of(plan: SimPlan, client: str) -> int:
    """Return the version of MQTT that a client speaks in the world of this plan."""
    return Random(f"mqtt version {plan.seed} {client}").choice((3, 5))


def _publish_qos0(topic: bytes, body: bytes, retained: bool) -> bytes:
    """Return a PUBLISH packet at QoS 0, which has no packet number."""
    full = packets.publish(topic, 1, body, retain=retained)
    ((first, start, end),), _, _ = packets.split(full)
    rest = full[start : start + len(topic)] + full[start + len(topic) + 2 : end]
    size = len(rest)
    head = bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7))
    return bytes((first & ~packets.QOS,)) + head + rest


def _text(body: bytes, at: int) -> tuple[str, int]:
    size = int.from_bytes(body[at : at + 2], "big")
    return body[at + 2 : at + 2 + size].decode(), at + 2 + size


def _matches(filter_: str, topic: str) -> bool:
    wanted, levels = filter_.split("/"), topic.split("/")
    return len(wanted) == len(levels) and all(w in ("+", one) for w, one in zip(wanted, levels, strict=True))
