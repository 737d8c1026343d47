"""People who chat, in a process of their own: `python -m bench.chat_load` with one line of JSON on stdin.

The law: what is measured is the server. So all contenders' people are the same bare sockets: no library,
a message is found in what arrives by its marks, and a WebSocket frame is masked with zeros.

talk    everybody has one line under way to the next one; the next goes out when that has arrived.
drain   somebody comes and finds ten thousand lines.
crowd   one talks to a group, some lines ahead of the slowest.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar, cast
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Struct

from bench.load import allow_many_files
from duly.clients.chat_positions import ACK_LINES, ACK_SECONDS

WARM_SECONDS = 0.5
TEXT = "x" * 100


class Person(Struct):
    name: str
    token: str = ""


class Work(Struct):
    url: str
    people: list[Person]
    mode: str = "talk"
    seconds: float = 2.0
    count: int = 10_000
    group: str = ""
    ahead: int = 8


class Found(Struct):
    rate: float
    p50: float = 0.0
    p99: float = 0.0
    count: int = 0
    all: int = 0
    """also while warming up"""


class Client(asyncio.Protocol):
    """One person's connection. `heard(mark)` is called for every line that arrives."""

    def __init__(self, person: Person) -> None:
        self.person = person
        self.buffer = b""
        self.ready = asyncio.get_running_loop().create_future()
        self.heard: Callable[[str], None] = lambda mark: None
        self.acks: dict[bytes, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.greet()

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(
                RuntimeError(f"{self.person.name} was hung up on: {self.buffer[:300]!r}")
            )

    def greet(self) -> None:
        raise NotImplementedError

    def send(self, to: str, mark: str) -> None:
        raise NotImplementedError


_mark = re.compile(rb"mark(\w+)/")


class Duly(Client):
    """Frames over a WebSocket, acknowledged as `duly.Chat` does: the first at once, what follows together."""

    n = 0
    acking: ClassVar[bool] = True
    upgraded = False
    resting = False
    unsaid = 0

    def greet(self) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self.transport.write(
            f"GET /v1/ws HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
            f"Authorization: Bearer {self.person.token}\r\n\r\n".encode()
        )

    def frame(self, payload: bytes) -> bytes:
        size = len(payload)
        head = bytes((0x81, 0x80 | size)) if size < 126 else b"\x81\xfe" + size.to_bytes(2, "big")
        return head + b"\0\0\0\0" + payload

    def send(self, to: str, mark: str) -> None:
        kind = "group_chat" if to.startswith("#") else "one_chat"
        seq_id = f"{time.time_ns() // 1_000_000}_{self.n}"
        self.n += 1
        self.transport.write(
            self.frame(
                f'{{"type":"{kind}","seq_id":"{seq_id}","to":"{to}",'
                f'"data":{{"text":"mark{mark}/{TEXT}"}}}}'.encode()
            )
        )

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        if not self.upgraded:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                self.buffer = buffer
                return
            assert b" 101 " in buffer[:20], buffer
            self.upgraded, buffer = True, buffer[end + 4 :]
        at, size = 0, len(buffer)
        acks = self.acks
        while size - at >= 2:
            length, start = buffer[at + 1], at + 2
            if length == 126:
                length, start = int.from_bytes(buffer[at + 2 : at + 4], "big"), at + 4
            elif length == 127:
                length, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
            if size - start < length:
                break
            if buffer[at] == 0x81:
                self.text(buffer, start, start + length, acks)
            elif buffer[at] == 0x89:  # a ping wants a pong
                self.transport.write(b"\x8a\x80\0\0\0\0")
            at = start + length
        self.buffer = buffer[at:]
        if acks and self.acking and (not self.resting or self.unsaid >= ACK_LINES):
            self.acknowledge()

    def acknowledge(self) -> None:
        self.resting, self.unsaid = False, 0
        if self.acks and not self.transport.is_closing():
            frames = [self.frame(b'{"type":"ack","conv":"%b","n":%b}' % ack) for ack in self.acks.items()]
            self.transport.write(b"".join(frames))
            self.acks.clear()
            self.resting = True
            asyncio.get_running_loop().call_later(ACK_SECONDS, self.acknowledge)

    def text(self, buffer: bytes, start: int, end: int, acks: dict[bytes, bytes]) -> None:
        found = _mark.search(buffer, start, end)
        if found:
            conv = buffer.rfind(b'"conv":"', start, end) + 8
            n = buffer.find(b'","n":', conv, end)
            stop = buffer.find(b",", n + 6, end)
            acks[buffer[conv:n]] = buffer[n + 6 : stop]
            self.unsaid += 1
            self.heard(found[1].decode())
        elif not self.ready.done():
            assert b'"welcome"' in buffer[start:end], buffer[start:end]
            self.ready.set_result(None)
        elif b'"code":' in buffer[start:end] and b'"code":0' not in buffer[start:end]:
            raise RuntimeError(buffer[start:end])


class Bare(Duly):
    """The same frames, to a server that only passes them on."""

    acking = False


class Xmpp(Client):
    """XMPP, as little of it as there must be: register, log in, be present."""

    OPEN: ClassVar = (
        b"<?xml version='1.0'?><stream:stream to='localhost' xmlns='jabber:client' "
        b"xmlns:stream='http://etherx.jabber.org/streams' version='1.0'>"
    )

    def greet(self) -> None:
        self.stage = 0.0
        self.transport.write(self.OPEN)

    def send(self, to: str, mark: str) -> None:
        body = f"<body>mark{mark}/{TEXT}</body>"
        self.transport.write(
            f"<message to='{to}@localhost' type='chat' id='{mark}'>{body}</message>".encode()
        )

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        if self.stage < 4:
            self.buffer = self.log_in(buffer)
            return
        end = buffer.rfind(b"</message>")
        if end < 0:
            self.buffer = buffer
            return
        for found in _mark.finditer(buffer, 0, end):
            self.heard(found[1].decode())
        self.buffer = buffer[end + 10 :]

    def log_in(self, buffer: bytes) -> bytes:
        name = self.person.name
        if self.stage == 0 and b"</stream:features>" in buffer:
            self.stage = 1
            self.transport.write(
                f"<iq type='set' id='reg'><query xmlns='jabber:iq:register'><username>{name}</username>"
                "<password>secret</password></query></iq>".encode()
            )
        elif self.stage == 1 and b"reg" in buffer and (b"</iq>" in buffer or b"/>" in buffer):
            self.stage = 2
            plain = base64.b64encode(f"\0{name}\0secret".encode()).decode()
            auth = f"<auth xmlns='urn:ietf:params:xml:ns:xmpp-sasl' mechanism='PLAIN'>{plain}</auth>"
            self.transport.write(auth.encode())
        elif self.stage == 2 and b"<success" in buffer:
            self.stage = 3
            self.transport.write(self.OPEN)
        elif self.stage == 3 and b"</stream:features>" in buffer:
            self.transport.write(
                b"<iq type='set' id='bind'><bind xmlns='urn:ietf:params:xml:ns:xmpp-bind'/></iq>"
            )
            self.stage = 3.5
        elif self.stage == 3.5 and b"</iq>" in buffer:
            self.stage = 4
            session = b"<session xmlns='urn:ietf:params:xml:ns:xmpp-session'/>"
            self.transport.write(b"<iq type='set' id='s'>%b</iq><presence/>" % session)
            self.ready.set_result(None)
            return buffer[buffer.rfind(b"</iq>") + 5 :]
        else:
            return buffer
        return b""


KINDS = {"http": Duly, "xmpp": Xmpp, "bare": Bare}


async def join(work: Work, person: Person) -> Client:
    parts = urlsplit(work.url)
    assert parts.hostname is not None
    assert parts.port is not None
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: KINDS[parts.scheme](person), parts.hostname, parts.port
    )
    return client


async def talk(work: Work) -> Found:
    clients = [await join(work, person) for person in work.people]
    await asyncio.gather(*(client.ready for client in clients))
    await asyncio.sleep(0.3)
    begin = time.perf_counter() + WARM_SECONDS
    end = begin + work.seconds
    took: list[float] = []
    sent: dict[int, float] = {}
    all_ = 0
    left = len(clients)
    over = asyncio.get_running_loop().create_future()

    def go(i: int) -> None:
        sent[i] = time.perf_counter()
        clients[i].send(work.people[(i + 1) % len(clients)].name, str(i))

    def arrived(mark: str) -> None:
        nonlocal left, all_
        all_ += 1
        i, now = int(mark), time.perf_counter()
        if begin <= now < end:
            took.append(now - sent[i])
        if now < end:
            go(i)
        else:
            left -= 1
            if not left:
                over.set_result(None)

    for client in clients:
        client.heard = arrived
    for i in range(len(clients)):
        go(i)
    await over
    took.sort()
    for client in clients:
        client.transport.close()
    p50, p99 = statistics.median(took) * 1e3, took[len(took) * 99 // 100] * 1e3
    return Found(len(took) / work.seconds, p50, p99, len(took), all_)


async def fill(work: Work) -> None:
    """Lines for somebody who is not there."""
    sender, reader = work.people
    client = await join(work, sender)
    if work.url.startswith("xmpp"):
        absent = await join(work, reader)  # he must have registered
        await absent.ready
        absent.transport.write(b"</stream:stream>")
        absent.transport.close()
        await asyncio.sleep(0.5)
    await client.ready
    for i in range(work.count):
        client.send(reader.name, str(i))
        if i % 500 == 499:
            await asyncio.sleep(0.05)


async def drain(work: Work) -> Found:
    if work.url.startswith("xmpp") or work.people[0].name:
        await fill(work)
        await asyncio.sleep(work.seconds)
    reader = work.people[1]
    over = asyncio.get_running_loop().create_future()
    marks: list[str] = []

    def arrived(mark: str) -> None:
        marks.append(mark)
        if len(marks) == work.count:
            over.set_result(None)

    began = time.perf_counter()
    client = await join(work, reader)
    client.heard = arrived
    async with asyncio.timeout(120):
        await over
    took = time.perf_counter() - began
    expected = [str(i) for i in range(work.count)]
    if sorted(marks) != sorted(expected) or (marks != expected and not work.url.startswith("xmpp")):
        raise RuntimeError("not everything came, or not in order")  # the others do not promise an order
    client.transport.close()
    return Found(work.count / took, count=work.count)


async def crowd(work: Work) -> Found:
    """Deliveries a second while one talks; a line counts when the last has it."""
    clients = [await join(work, person) for person in work.people]
    await asyncio.gather(*(client.ready for client in clients))
    speaker, listeners = clients[0], clients[1:]
    begin = time.perf_counter() + WARM_SECONDS
    end = begin + work.seconds
    missing: dict[str, int] = {}
    first = sent = time.time_ns()  # no round's lines are taken for another's
    delivered = 0
    over = asyncio.get_running_loop().create_future()

    def go() -> None:
        nonlocal sent
        mark = str(sent)
        sent += 1
        missing[mark] = len(listeners)
        speaker.send(work.group, mark)

    reached = [first - 1] * len(listeners)

    def arrived(who: int, mark: str) -> None:
        nonlocal delivered
        if int(mark) <= reached[who]:
            return  # told again, or of the round before: its acknowledgement was slow; it does not count
        reached[who] = int(mark)
        now = time.perf_counter()
        if begin <= now < end:
            delivered += 1
        missing[mark] -= 1
        if not missing[mark]:
            del missing[mark]
            if now < end:
                go()
            elif not missing:
                over.set_result(None)

    for i, client in enumerate(listeners):
        client.heard = partial(arrived, i)
    for _ in range(work.ahead):
        go()
    await over
    return Found(delivered / work.seconds, count=delivered)


def main() -> None:
    work = msgspec.json.decode(sys.stdin.readline(), type=Work)
    allow_many_files()
    found = uvloop.run({"talk": talk, "drain": drain, "crowd": crowd}[work.mode](work))
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
