"""People who chat, in a process of their own: `python -m bench.chat_load` with one line of JSON on stdin.

The law: what is measured is the server. So all contenders' people are the same bare sockets: no library,
a message is found in what arrives by its marks, and a WebSocket frame is masked with zeros.

talk    each person has one line under way to the next one; the next goes out when that has arrived.
drain   a person comes and finds ten thousand lines.
crowd   one talks to a group, some lines ahead of the slowest.
"""

from __future__ import annotations

import asyncio
import base64
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

from bench.load import allow_many_files, be_light
from bench.websocket import frame, pong, read_frames, upgrade

WARM_SECONDS = 0.5
TEXT = "x" * 100
ACK_LINES, ACK_SECONDS = 200, 0.05
"""As `duly.Chat` acknowledges: the first line at once, then so many together, or what came in so long."""


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
    other_url: str = ""
    """where every second person goes, if not to `url`"""


class Found(Struct):
    rate: float
    p50: float = 0.0
    p99: float = 0.0
    count: int = 0
    all: int = 0
    """also while warming up"""
    busy: float = 0.0
    """how much of a core the load itself used"""


class Client(asyncio.Protocol):
    """One person's connection. `heard(mark)` is called for every line that arrives."""

    def __init__(self, person: Person) -> None:
        self.person = person
        self.buffer = b""
        self.host = ""
        self.ready = asyncio.get_running_loop().create_future()
        self.broken: asyncio.Future[None] | None = None
        """what is told if the server closes the connection"""
        self.heard: Callable[[str], None] = lambda mark: None
        self.acks: dict[bytes, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.greet()

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(
                RuntimeError(f"{self.person.name} was hung up on: {self.buffer[:300]!r}")
            )
        elif self.broken is not None and not self.broken.done():
            self.broken.set_exception(RuntimeError(f"the server closed the connection of {self.person.name}"))

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
        self.transport.write(upgrade(self.host, self.person.token))

    def send(self, to: str, mark: str) -> None:
        kind = "group_chat" if to.startswith("#") else "one_chat"
        seq_id = f"{time.time_ns() // 1_000_000}_{self.n}"
        self.n += 1
        self.transport.write(
            frame(
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
        self.buffer = read_frames(buffer, self.text, lambda asked: self.transport.write(pong(asked)))
        if self.acks and self.acking and (not self.resting or self.unsaid >= ACK_LINES):
            self.acknowledge()

    def acknowledge(self) -> None:
        self.resting, self.unsaid = False, 0
        if self.acks and not self.transport.is_closing():
            frames = [frame(b'{"type":"ack","conv":"%b","n":%b}' % ack) for ack in self.acks.items()]
            self.transport.write(b"".join(frames))
            self.acks.clear()
            self.resting = True
            asyncio.get_running_loop().call_later(ACK_SECONDS, self.acknowledge)

    def text(self, buffer: bytes, start: int, end: int) -> None:
        found = _mark.search(buffer, start, end)
        if found:
            conv = buffer.rfind(b'"conv":"', start, end) + 8
            n = buffer.find(b'","n":', conv, end)
            stop = buffer.find(b",", n + 6, end)
            self.acks[buffer[conv:n]] = buffer[n + 6 : stop]
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


async def join(work: Work, person: Person, url: str = "") -> Client:
    """A connection of this person."""
    parts = urlsplit(url or work.url)

    def made() -> Client:
        client = KINDS[parts.scheme](person)
        client.host = parts.netloc
        return client

    _, client = await asyncio.get_running_loop().create_connection(
        made, parts.hostname or "", parts.port or 80
    )
    return client


async def join_all(work: Work, over: asyncio.Future[None]) -> list[Client]:
    """Connections of all people; if the server closes one of them, it is over."""
    urls = (work.url, work.other_url or work.url)
    clients = [await join(work, person, urls[i % 2]) for i, person in enumerate(work.people)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.ready for client in clients))
    for client in clients:
        client.broken = over
    return clients


def leave(clients: list[Client]) -> None:
    """Closes all connections."""
    for client in clients:
        client.broken = None
        client.transport.close()


async def talk(work: Work) -> Found:
    over = asyncio.get_running_loop().create_future()
    clients = await join_all(work, over)
    await asyncio.sleep(0.3)
    began, worked = time.perf_counter(), time.process_time()
    begin = began + WARM_SECONDS
    end = begin + work.seconds
    took: list[float] = []
    sent: dict[int, float] = {}
    all_ = 0
    left = len(clients)

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
    busy = (time.process_time() - worked) / (time.perf_counter() - began)
    leave(clients)
    took.sort()
    p50, p99 = statistics.median(took) * 1e3, took[len(took) * 99 // 100] * 1e3
    return Found(len(took) / work.seconds, p50, p99, len(took), all_, busy)


async def fill(work: Work) -> None:
    """Lines for a person who is not there."""
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
    client.heard, client.broken = arrived, over
    async with asyncio.timeout(50):
        await over
    took = time.perf_counter() - began
    expected = [str(i) for i in range(work.count)]
    if sorted(marks) != sorted(expected) or (marks != expected and not work.url.startswith("xmpp")):
        raise RuntimeError("not everything came, or not in order")  # the others do not promise an order
    leave([client])
    return Found(work.count / took, count=work.count)


async def crowd(work: Work) -> Found:
    """Deliveries a second while one talks; a line counts when the last has it."""
    over = asyncio.get_running_loop().create_future()
    clients = await join_all(work, over)
    speaker, listeners = clients[0], clients[1:]
    begin = time.perf_counter() + WARM_SECONDS
    end = begin + work.seconds
    missing: dict[str, int] = {}
    first = sent = time.time_ns()  # no round's lines are taken for another's
    delivered = 0

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
    leave(clients)
    return Found(delivered / work.seconds, count=delivered)


def main() -> None:
    work = msgspec.json.decode(sys.stdin.readline(), type=Work)
    allow_many_files()
    be_light()
    found = uvloop.run({"talk": talk, "drain": drain, "crowd": crowd}[work.mode](work))
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
