"""The fast path of HTTP, which gives the same answers as the ordinary one."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from duly.apps.alerts.profiles import ProfileDraft
from duly.identity.accounts import Role
from duly.transports.connections import ClientConnection, ClientConnections
from duly.transports.http import fast_path
from duly.transports.http.fast_path import PIECE, FastAnswer, FastPath, FastReply
from duly.wire import frames
from tests.end_to_end.raw import curl
from tests.guard import GUARD
from tests.local_hub import LocalHub

HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer me\r\nContent-Length: %d\r\n\r\n%b"


def post(body: bytes) -> bytes:
    return HEAD % (len(body), body)


class Other(asyncio.Protocol):
    """Who gets what is not for the fast path."""

    heard: list[bytes]

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)
        self.transport.write(b"other\n")


class Road:
    """A fast path with a handler that a test can hold up, and those to whom the rest is handed over."""

    def __init__(self, idle: float = 30.0) -> None:
        self.served: list[tuple[str | None, bytes]] = []
        self.others: list[Other] = []
        self.go = asyncio.Event()
        self.go.set()
        self.visitors = ClientConnections(100, idle=idle)
        self.bugs: list[str] = []
        self.path = FastPath(self._serve, self._other, self.visitors, count=self.bugs.append)

    async def _serve(self, token: str | None, address: str, body: bytes) -> FastAnswer:
        assert address == "127.0.0.1"
        self.served.append((token, body))
        await self.go.wait()
        if body == b"bug":
            raise ZeroDivisionError
        return FastAnswer(503 if body == b"later" else 202, b"<%b>" % body, 3 * (body == b"later"))

    def _other(self, visitor: ClientConnection) -> Other:
        other = Other()
        other.heard = []
        self.others.append(other)
        return other

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        listener = await asyncio.get_running_loop().create_server(self.path, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()
            listener.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(GUARD):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        heads = dict(line.split(": ", 1) for line in lines)
        return int(first.split()[1]), heads, await reader.readexactly(int(heads["Content-Length"]))


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(GUARD):
        while not true():
            await asyncio.sleep(0.001)


async def test_one_small_post_after_another_is_served_over_one_connection() -> None:
    road = Road()
    async with road.connect() as (reader, writer):
        for body in (b"one", b"two", b"later"):
            writer.write(post(body))
            status, heads, said = await answer(reader)
            assert (status, said) == (503 if body == b"later" else 202, b"<%b>" % body)
            assert heads["Content-Type"] == "application/json"
            assert heads["Date"].endswith("GMT")
            assert heads.get("Retry-After") == ("3" if body == b"later" else None)
    assert road.served == [("me", b"one"), ("me", b"two"), ("me", b"later")]
    assert road.others == []


ORDINARY = HEAD % (2, b"{}")


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/messages HTTP/1.1\r\nHost: hub\r\n\r\n",
        ORDINARY.replace(b"/v1/messages", b"/v1/messages?wait=5"),
        ORDINARY.replace(b"HTTP/1.1", b"HTTP/1.0"),
        ORDINARY.replace(b"Host: hub\r\n", b""),
        ORDINARY.replace(b"Host: hub\r\n", b"Host: hub\r\nHost: hub\r\n"),
        ORDINARY.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 2"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nTransfer-Encoding: chunked"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\nTransfer-Encoding: chunked"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\rTransfer-Encoding: chunked"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\n more"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length : 2"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: +2"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2, 2"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 3"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 1"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nConnection: close"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nExpect: 100-continue"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nIdempotency-Key: 7"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nUser-Agent: \xe4"),
        ORDINARY.replace(b"Content-Length: 2", b"Content-Length: 2\r\nwhat is this"),
        ORDINARY[:20], ORDINARY[:-1], ORDINARY + ORDINARY, post(b"x" * PIECE), b"\r\n\r\n", b"\x00",
    ],
)  # fmt: skip
async def test_anything_else_is_handed_over_with_every_byte_and_for_good(data: bytes) -> None:
    road = Road()
    async with road.connect() as (reader, writer):
        writer.write(ORDINARY)
        assert (await answer(reader))[0] == 202
        writer.write(data)
        assert await reader.readline() == b"other\n"
        (other,) = road.others
        await until(lambda: b"".join(other.heard) == data)
        other.heard.clear()
        writer.write(ORDINARY)
        await until(lambda: b"".join(other.heard) == ORDINARY)
        assert not road.path.connections
    assert road.served == [("me", b"{}")]


async def test_who_does_not_wait_for_his_answer_is_answered_in_his_order() -> None:
    road = Road()
    road.go.clear()
    async with road.connect() as (reader, writer):
        writer.write(post(b"one"))
        await until(lambda: road.served)
        writer.write(post(b"two"))
        (connection,) = road.path.connections
        await until(lambda: connection._kept)
        assert len(road.served) == 1
        road.go.set()
        assert [(await answer(reader))[2] for _ in range(2)] == [b"<one>", b"<two>"]


async def test_who_does_not_read_his_answers_is_not_read_from() -> None:
    road = Road()
    async with road.connect() as (reader, writer):
        await until(lambda: road.path.connections)
        (connection,) = road.path.connections
        connection.pause_writing()
        writer.write(post(b"one"))
        async with road.connect() as (meanwhile, other):
            other.write(post(b"two"))
            assert (await answer(meanwhile))[2] == b"<two>"
        assert road.served == [("me", b"two")]
        connection.resume_writing()
        assert (await answer(reader))[2] == b"<one>"


async def test_who_says_nothing_is_hung_up_on_and_who_waits_for_an_answer_is_not() -> None:
    road = Road(idle=0.05)
    road.go.clear()
    async with road.connect() as (reader, writer):
        writer.write(post(b"one"))
        await until(lambda: road.served)
        (connection,) = road.path.connections
        visitor = connection._visitor
        assert visitor is not None
        visitor.recognise("me")  # a stranger has ten seconds
        visitor.watch()
        timer = visitor._timer
        await until(lambda: visitor._timer is not timer)
        road.go.set()
        assert (await answer(reader))[2] == b"<one>"
        assert await asyncio.wait_for(reader.read(), GUARD) == b""
    assert not road.path.connections


async def test_when_the_hub_stops_who_is_being_served_gets_his_answer() -> None:
    road = Road()
    road.go.clear()
    async with road.connect() as (reader, writer), road.connect() as (idle, _):
        writer.write(post(b"one"))
        await until(lambda: road.served and len(road.path.connections) == 2)
        closing = asyncio.create_task(road.path.close())
        assert await asyncio.wait_for(idle.read(), GUARD) == b""
        road.go.set()
        assert (await answer(reader))[2] == b"<one>"
        assert await asyncio.wait_for(reader.read(), GUARD) == b""
        await closing


async def test_a_bug_is_answered_with_500_and_ends_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    road = Road()
    async with road.connect() as (reader, writer), road.connect() as (other, also):
        writer.write(post(b"bug"))
        status, _, said = await answer(reader)
        assert (status, json.loads(said)["error"]) == (500, "internal")
        assert "ZeroDivisionError" in caplog.text
        assert road.bugs == ["HTTP request"]
        for one, (reading, writing) in ((b"fine", (other, also)), (b"next", (reader, writer))):
            writing.write(post(one))
            assert (await answer(reading))[2] == b"<%b>" % one


@pytest.mark.parametrize("query", ["", "?wait=0"])
async def test_a_bug_in_a_hub_is_answered_logged_and_counted_on_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, query: str
) -> None:
    def broken(*given: object) -> None:
        raise FloatingPointError  # one of a kind: the log leaves repeats within a second out

    local = LocalHub(tmp_path)
    await local.start()
    try:
        await local.add(Role.APP, "phone")
        monkeypatch.setattr(local.hub.router, "begin_all", broken)
        said = await curl(f"{local.url}/v1/messages{query}", local.tokens["phone"], body={"type": "query"})
        assert (said.status, said.json["error"]) == (500, "internal")
        assert "FloatingPointError" in caplog.text
        assert local.hub.tasks.failures == {"HTTP request": 1}
    finally:
        await local.stop()


class Prompt(Road):
    """A fast path that begins to serve without a task: some requests at once, some later, some not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.path.begin = self._begin
        self.replies: list[FastReply] = []

    def _begin(self, token: str | None, body: bytes, reply: FastReply) -> bool | Coroutine[None, None, None]:
        match body:
            case b"at once":
                reply("me", FastAnswer(200, body))
                return True
            case b"later":
                self.replies.append(reply)
                return True
            case b"awaited":
                return self._wait(body, reply)
            case b"bug":
                raise ZeroDivisionError
            case b"late bug":
                return self._wait(body, reply, bug=True)
            case _:
                return False

    async def _wait(self, body: bytes, reply: FastReply, *, bug: bool = False) -> None:
        await asyncio.sleep(0)
        if bug:
            raise ZeroDivisionError
        reply("me", FastAnswer(200, body))


async def test_a_request_that_needs_no_task_is_answered_without_one() -> None:
    road = Prompt()
    async with road.connect() as (reader, writer):
        for body in (b"at once", b"awaited", b"at once", b"anything else"):
            writer.write(post(body))
            said = (await answer(reader))[2]
            assert said == (b"<%b>" % body if body == b"anything else" else body)
        (connection,) = road.path.connections
        assert connection._visitor is not None
        assert (connection._visitor.account, connection._visitor.busy) == ("me", 0)
        writer.write(post(b"later"))
        await until(lambda: road.replies)
        writer.write(post(b"at once"))
        await until(lambda: connection._kept)
        assert connection._task is None
        road.replies[0]("me", FastAnswer(200, b"first"))
        assert [(await answer(reader))[2] for _ in range(2)] == [b"first", b"at once"]
    assert road.served == [("me", b"anything else")]


@pytest.mark.parametrize("body", [b"bug", b"late bug"])
async def test_a_bug_without_a_task_is_answered_with_500_and_disturbs_nothing_else(
    body: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "LOG", logging.getLogger("test"))  # the hub's own says the same once only
    road = Prompt()
    async with road.connect() as (reader, writer), road.connect() as (other, also):
        writer.write(post(body))
        status, _, said = await answer(reader)
        assert (status, json.loads(said)["error"]) == (500, "internal")
        assert "ZeroDivisionError" in caplog.text
        assert road.bugs == ["HTTP request"]
        assert await asyncio.wait_for(reader.read(), GUARD) == b""  # what was begun may be answered later
        also.write(post(b"at once"))
        assert (await answer(other))[2] == b"at once"


async def test_when_the_hub_stops_who_waits_without_a_task_gets_the_answer() -> None:
    road = Prompt()
    async with road.connect() as (reader, writer):
        writer.write(post(b"later"))
        await until(lambda: road.replies)
        closing = asyncio.create_task(road.path.close())
        await asyncio.sleep(0)
        road.replies[0]("me", FastAnswer(200, b"late"))
        assert (await answer(reader))[2] == b"late"
        assert await asyncio.wait_for(reader.read(), GUARD) == b""
        await closing


async def test_both_ways_give_the_same_answers(tmp_path: Path) -> None:
    local = LocalHub(tmp_path)
    await local.start()
    try:
        await local.add(Role.SENTINEL, "gate")
        await local.add(Role.DEVICE, "lock")
        await local.add(Role.APP, "phone")
        await local.hub.accounts.grant("phone", "lock")
        await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
        now = time.time_ns() // 1_000_000
        data = {"profile_id": "home", "trigger_reason": "smoke", "timestamp": now}
        alert = {"type": "alert_event", "seq_id": "WAY", "data": data}
        command = {"type": "query", "seq_id": "WAY", "to": "lock"}
        asked: list[tuple[str, Any]] = [
            ("gate", alert), ("gate", alert), ("gate", alert | {"data": data | {"timestamp": now - 1}}),
            ("gate", [alert, alert | {"seq_id": "WAY-2"}]), ("gate", [1] * (frames.BATCH_LIMIT + 1)),
            ("gate", {"type": "x"}),
            ("phone", command), ("lock", alert), ("nobody", alert), ("", alert),
            ("gate", b"{"), ("gate", b""),
        ]  # fmt: skip
        found: dict[bytes, list[tuple[int, dict[str, str | None], bytes]]] = {}
        for way in (b"", b"X-Other: 1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", local.port)
            found[way] = []
            for who, what in asked:
                body = what if isinstance(what, bytes) else json.dumps(what).encode()
                body = body.replace(b"WAY", b"other" if way else b"plain")
                token = local.tokens.get(who, who).encode()
                head = b"Authorization: Bearer %b\r\nContent-Length: %d\r\n%b\r\n" % (token, len(body), way)
                writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n" + head + body)
                status, heads, said = await answer(reader)
                same = {name: heads.get(name) for name in ("Content-Type", "Retry-After")}
                found[way].append((status, same, said.replace(b"other", b"plain")))
            writer.close()
        assert found[b""] == found[b"X-Other: 1\r\n"]
        statuses = [status for status, _, _ in found[b""]]
        assert statuses == [200, 200, 422, 200, 413, 400, 503, 403, 401, 401, 400, 400]
    finally:
        await local.stop()
