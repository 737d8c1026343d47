"""A small MQTT 3.1.1 broker in this process. It keeps sessions, retained messages and wills; a script can cut
every connection, publish anything, and see what a client has asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from msgspec import Struct

from duly.testing.conform.transcript import Transcript
from duly.transports.mqtt import packets

CONNECT: Final = 0x10
SUBSCRIBE: Final = 0x80
PINGREQ: Final = 0xC0
DISCONNECT: Final = 0xE0
_CLEAN: Final = 0x02
_WILL: Final = 0x04
_WILL_RETAINED: Final = 0x20
_PASSWORD: Final = 0x40
_USERNAME: Final = 0x80
_REFUSALS: Final = {
    1: "it does not speak MQTT 3.1.1",
    2: "a persistent session needs a client id",
    4: "it sends no username and password",
}
"""Why a connection is refused, by the code of the CONNACK."""


class MqttMessage(Struct, frozen=True):
    """A message that a client has published, or its will."""

    topic: str
    payload: bytes
    retained: bool = False
    qos: int = 1


class MqttClient:
    """What the broker knows of one client id."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.filters: dict[str, int] = {}
        self.clean = True
        self.username = ""
        self.will: MqttMessage | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.waiting: deque[MqttMessage] = deque()
        """the messages that arrived while it was away"""
        self.unacknowledged: dict[int, MqttMessage] = {}
        self._number = 0

    def deliver(self, message: MqttMessage) -> None:
        """Send a message, or keep it while the client is away."""
        if self.writer is None:
            if not self.clean:
                self.waiting.append(message)
            return
        self._number = self._number % packets.LAST_NUMBER + 1
        self.unacknowledged[self._number] = message
        self._publish(self._number, message, again=False)

    def resume(self) -> None:
        """Send what was not acknowledged, and what arrived meanwhile."""
        for number, message in list(self.unacknowledged.items()):
            self._publish(number, message, again=True)
        while self.waiting and self.writer is not None:
            self.deliver(self.waiting.popleft())

    def _publish(self, number: int, message: MqttMessage, *, again: bool) -> None:
        if self.writer is not None:
            packet = packets.publish(
                packets.text(message.topic), number, message.payload, retain=message.retained
            )
            self.writer.write(bytes((packet[0] | (packets.DUP if again else 0),)) + packet[1:])


class MqttServer:
    """The broker. What clients publish is handed over by `hear`, and goes to subscribers."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._server: asyncio.Server | None = None
        self.clients: dict[str, MqttClient] = {}
        self.retained: dict[str, MqttMessage] = {}
        self._heard: asyncio.Queue[MqttMessage] = asyncio.Queue()
        self._news = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tried = False
        """whether a client was refused"""
        self._unnamed = 0
        """how many clients have connected without a client id"""
        self.down = False
        """whether connections are refused, as if the broker were down"""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        self._writers.add(writer)
        try:
            await self._converse(reader, writer)
        finally:
            self._serving.discard(serving)
            self._writers.discard(writer)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client: MqttClient | None = None
        with suppress(ConnectionError, asyncio.IncompleteReadError, ValueError, IndexError):
            first, body = await _packet(reader)
            if first & packets.KIND == CONNECT:
                client = self._connected(body, writer)
                self._news.set()
            while client is not None and client.writer is writer:
                first, body = await _packet(reader)
                if client.writer is not writer:
                    break  # it was cut meanwhile
                if first & packets.KIND == DISCONNECT:
                    client.will = None
                    break
                await self._take(client, first, body)
                self._news.set()
        writer.close()
        if client is not None and client.writer is writer:
            self._gone(client)

    def _connected(self, body: bytes, writer: asyncio.StreamWriter) -> MqttClient | None:
        protocol, at = _text(body, 0)
        level, flags = body[at], body[at + 1]
        client_id, at = _text(body, at + 4)
        if (code := _refusal(protocol, level, flags, client_id)) is not None:
            self._transcript.note("!", f"a connection is refused with code {code}: {_REFUSALS[code]}")
            writer.write(bytes((packets.CONNACK, 2, 0, code)))
            self._tried = True
            self._news.set()
            return None
        if not client_id:  # a client without a session, such as mosquitto_pub: the broker names it
            self._unnamed += 1
            client_id = f"unnamed-{self._unnamed}"
        client = self.clients.get(client_id)
        kept = client is not None and not client.clean and not flags & _CLEAN
        if client is None or not kept:
            client = self.clients[client_id] = MqttClient(client_id)
        client.clean = bool(flags & _CLEAN)
        client.will = None
        if flags & _WILL:
            topic, at = _text(body, at)
            size = int.from_bytes(body[at : at + 2], "big")
            client.will = MqttMessage(topic, body[at + 2 : at + 2 + size], bool(flags & _WILL_RETAINED))
            at += 2 + size
        if flags & _USERNAME:
            client.username, at = _text(body, at)
        self._transcript.note(
            "!", f"{client_id} connects" + (" with a clean session" if client.clean else "")
        )
        old, client.writer = client.writer, writer
        if old is not None:
            old.transport.abort()
        writer.write(bytes((packets.CONNACK, 2, kept, 0)))
        client.resume()
        return client

    def _gone(self, client: MqttClient) -> None:
        self._transcript.note("!", f"{client.client_id} is gone")
        client.writer = None
        will, client.will = client.will, None
        if will is not None:
            self._published(will)
        if client.clean:
            self.clients.pop(client.client_id, None)

    async def _take(self, client: MqttClient, first: int, body: bytes) -> None:
        writer = client.writer
        assert writer is not None
        match first & packets.KIND:
            case packets.PUBLISH:
                topic, at = _text(body, 0)
                qos = (first & packets.QOS) >> 1
                if qos:
                    writer.write(packets.acknowledge([int.from_bytes(body[at : at + 2], "big")]))
                    at += 2
                self._published(MqttMessage(topic, body[at:], bool(first & packets.RETAIN), qos))
            case packets.PUBACK:
                client.unacknowledged.pop(int.from_bytes(body[:2], "big"), None)
            case 0x80:
                await self._subscribe(client, writer, body)
            case 0xA0:
                writer.write(bytes((packets.UNSUBACK, 2)) + body[:2])
            case 0xC0:
                writer.write(bytes((0xD0, 0)))
            case _:
                pass

    async def _subscribe(self, client: MqttClient, writer: asyncio.StreamWriter, body: bytes) -> None:
        at, granted = 2, b""
        wanted: dict[str, int] = {}
        while at < len(body):
            filter_, at = _text(body, at)
            wanted[filter_] = min(body[at], 1)
            granted += bytes((min(body[at], 1),))
            at += 1
        client.filters |= wanted
        self._transcript.note("!", f"{client.client_id} subscribes to {', '.join(wanted)}")
        writer.write(bytes((packets.SUBACK, 2 + len(granted))) + body[:2] + granted)
        for message in self.retained.values():
            if any(matches(each, message.topic) for each in wanted):
                client.deliver(message)

    def _published(self, message: MqttMessage) -> None:
        self._transcript.note("<", f"{message.topic} {message.payload.decode(errors='replace')}")
        self._heard.put_nowait(message)
        self._hand_out(message)

    def _hand_out(self, message: MqttMessage) -> None:
        if message.retained:
            self.retained[message.topic] = message
        plain = MqttMessage(message.topic, message.payload)
        for client in list(self.clients.values()):
            if any(matches(each, message.topic) for each in client.filters):
                client.deliver(plain)

    # ── for scripts ──────────────────────────────────────────────────────────────────────────────

    def publish(self, topic: str, payload: bytes, *, retained: bool = False) -> None:
        """Publish a message to its subscribers."""
        self._transcript.note(">", f"{topic} {payload.decode(errors='replace')}")
        self._hand_out(MqttMessage(topic, payload, retained))

    async def hear(self, seconds: float) -> MqttMessage | None:
        """Return the next message of a client; None if none arrives within this time."""
        try:
            async with asyncio.timeout(seconds):
                return await self._heard.get()
        except TimeoutError:
            return None

    async def first_client(self) -> None:
        """Wait for the first client, as long as it takes; a refused client counts as well."""
        await self.until(lambda: bool(self.clients) or self._tried)

    async def subscriber(self, topic: str, seconds: float) -> MqttClient | None:
        """Wait for the client that is connected and subscribed to this topic; None if there is none within
        this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until(lambda: self._subscriber(topic) is not None)
        return self._subscriber(topic)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked whenever a client sends something."""
        while not true():
            self._news.clear()
            await self._news.wait()

    def _subscriber(self, topic: str) -> MqttClient | None:
        for client in self.clients.values():
            if client.writer is not None and any(matches(each, topic) for each in client.filters):
                return client
        return None

    def cut(self) -> None:
        """Break every connection without closing it properly."""
        self._transcript.note("!", "cut")
        for client in list(self.clients.values()):
            writer = client.writer
            if writer is not None:
                writer.transport.abort()
                self._gone(client)


def _refusal(protocol: str, level: int, flags: int, client_id: str) -> int | None:
    """Return the code with which a connection is refused."""
    if (protocol, level) != ("MQTT", 4):
        return 1
    if not client_id and not flags & _CLEAN:
        return 2
    return None if flags & _USERNAME and flags & _PASSWORD else 4


async def _packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first = (await reader.readexactly(1))[0]
    size = shift = 0
    while True:
        digit = (await reader.readexactly(1))[0]
        size |= (digit & 0x7F) << shift
        if not digit & 0x80:
            return first, await reader.readexactly(size)
        shift += 7
        if shift > 21:
            raise ValueError("a length has at most four bytes")


def _text(body: bytes, at: int) -> tuple[str, int]:
    size = int.from_bytes(body[at : at + 2], "big")
    return body[at + 2 : at + 2 + size].decode(), at + 2 + size


def matches(filter_: str, topic: str) -> bool:
    """Return whether a filter matches a topic.

    >>> matches("nodes/+/ack", "nodes/a/ack"), matches("nodes/#", "nodes/a/ack"), matches("a", "b")
    (True, True, False)
    """
    wanted, found = filter_.split("/"), topic.split("/")
    for i, level in enumerate(wanted):
        if level == "#":
            return True
        if i >= len(found) or level not in ("+", found[i]):
            return False
    return len(wanted) == len(found)
