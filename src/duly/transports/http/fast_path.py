"""The fast path of HTTP: small `POST /v1/messages` requests, one after another over a kept connection.

Almost every client that sends over HTTP does that, and a framework spends 47 µs on each request (routes,
streams, headers); this takes 7. The laws. A request is served here only if it has arrived completely, in one
piece, and has only the headers listed below, each once. At the first other request the connection with all
its bytes is handed over to the framework for good, so that only the framework has to read HTTP in all its
forms. Requests are served one at a time; if a client does not read its answers, nothing is read from it.

A request needs no task, unless something has to be awaited before its frames are handed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple, TypeAlias, cast

import msgspec

from duly.runtime.tasks import is_cancelled
from duly.transports.connections import ClientConnection, ClientConnections
from duly.wire import outgoing
from duly.wire.frames import ServerCode

LOG: Final = logging.getLogger("duly.http")

PIECE: Final = 64 * 1024
"""The longest request that is served here."""
STOP_SECONDS: Final = 0.5
"""How long callers that wait for an answer are waited for when the hub stops."""

_FIRST: Final = b"POST /v1/messages HTTP/1.1"
_PLAIN: Final = frozenset({b"accept", b"accept-encoding", b"content-type", b"user-agent"})
"""Headers that do not affect the answer."""


LATER: Final = 3
"""Seconds after which to retry, if nothing more is known."""


class FastAnswer(NamedTuple):
    """An answer: its status, its JSON, and its account, if authenticated. `later`: seconds after which to
    retry."""

    status: int
    body: bytes
    later: int = 0
    account: str = ""


BUG: Final = FastAnswer(
    500, msgspec.json.encode({"error": "internal", "detail": outgoing.BUG, "code": ServerCode.INTERNAL})
)
"""The answer to a request that ended in an unexpected error, whichever way it came."""
REQUEST: Final = "HTTP request"
"""The name under which such errors are counted."""

Serve: TypeAlias = Callable[[str | None, str, bytes], Awaitable[FastAnswer]]
"""(token, address, body); raises only on a bug."""

FastReply: TypeAlias = Callable[[str, FastAnswer], None]
"""(account, answer): answers a request."""

Begin: TypeAlias = Callable[[str | None, bytes, FastReply], bool | Coroutine[object, None, None]]
"""(token, body, reply): starts to serve a request. False: nothing was done, and `Serve` has to be called;
otherwise `reply` is called, and a returned coroutine has to be awaited for that."""


def _never(token: str | None, body: bytes, reply: FastReply) -> bool:
    """Start nothing: every request is served by a task."""
    return False


class FastPath:
    """The fast path of one hub: its listener and the connections that use only it."""

    def __init__(
        self,
        serve: Serve,
        otherwise: Callable[[ClientConnection], asyncio.BaseProtocol],
        visitors: ClientConnections,
        answers_to: Callable[[str], bool] = lambda _: True,
        count: Callable[[str], None] = lambda _: None,
        begin: Begin = _never,
    ) -> None:
        self.serve = serve
        self.begin = begin
        self.otherwise = otherwise
        self.visitors = visitors
        self.answers_to = answers_to
        self.count = count
        self.connections: set[KeepAliveConnection] = set()
        self._day = (0, b"")

    def __call__(self) -> KeepAliveConnection:
        return KeepAliveConnection(self)

    async def close(self) -> None:
        """Close the connections; those being served, after their answer."""
        for one in list(self.connections):
            one.close()
        busy = {one.answered(): one for one in self.connections if one.serving}
        if busy:
            _, late = await asyncio.wait(busy, timeout=STOP_SECONDS)
            for answer in late:
                busy[answer].abort()

    def date(self) -> bytes:
        """Return the date as HTTP writes it; it changes once a second."""
        now = int(time.time())
        if now != self._day[0]:
            self._day = (now, formatdate(now, usegmt=True).encode())
        return self._day[1]


class KeepAliveConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, path: FastPath) -> None:
        self._path = path
        self._text = b""
        self._head: Head | None = None
        self._kept = b""
        self._closing = self._stalled = False
        self._visitor: ClientConnection | None = None
        self.serving = False
        """a request is not answered yet"""
        self._task: asyncio.Task[None] | None = None
        """serves the request, if something has to be awaited"""
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection with the hub, which may refuse it, and start its timer."""
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else "?"
        self._visitor = self._path.visitors.enter(self._transport, self._address)
        if self._visitor is not None:
            self._path.connections.add(self)
            self._visitor.watch()

    def connection_lost(self, problem: Exception | None) -> None:
        """Remove the connection from the hub's."""
        self._path.connections.discard(self)
        if self._visitor is not None:
            self._visitor.leave()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Start serving a request that is complete and simple; hand any other to the framework.

        Bytes that come while a request is being served are kept until it is answered.
        """
        visitor = self._visitor
        if visitor is None:
            return  # turned away
        if self.serving:
            self._kept += data
            self._transport.pause_reading()  # one at a time
            return
        text, found, body = data.partition(b"\r\n\r\n")
        if text != self._text:  # they are mostly the same
            self._text, self._head = text, read_head(text)
        head = self._head
        if (
            not found
            or head is None
            or head.length != len(body)
            or len(data) > PIECE
            or not self._path.answers_to(head.host)
        ):
            self._hand_over(data, visitor)
        else:
            visitor.begin()
            self.serving = True
            self._begin(head.token, body)

    def _hand_over(self, data: bytes, visitor: ClientConnection) -> None:
        self._path.connections.discard(self)
        other = self._path.otherwise(visitor)
        self._transport.set_protocol(other)
        other.connection_made(self._transport)
        cast("asyncio.Protocol", other).data_received(data)

    def _begin(self, token: str | None, body: bytes) -> None:
        """Serve a request; with a task if something has to be awaited before its frames are handed over."""
        try:
            begun = self._path.begin(token, body, self._reply)
        except Exception:
            self._fail(last=True)
            return
        if begun is not True:
            serving = self._serve(token, body) if begun is False else self._await(begun)
            self._task = self._loop.create_task(serving)

    async def _serve(self, token: str | None, body: bytes) -> None:
        try:
            said = await self._path.serve(token, self._address, body)
        except (Exception, asyncio.CancelledError):
            if is_cancelled():
                raise
            self._fail()
        else:
            self._reply(said.account, said)

    async def _await(self, begun: Awaitable[None]) -> None:
        try:
            await begun
        except (Exception, asyncio.CancelledError):
            if is_cancelled():
                raise
            self._fail(last=True)

    def _fail(self, *, last: bool = False) -> None:
        """Report a bug in serving the request. `last`: its frames may have been handed over and may be
        answered later, so the connection ends."""
        LOG.exception("a bug in serving %s", _FIRST.decode())
        self._path.count(REQUEST)
        if self.serving:
            self._closing |= last
            self._reply("", BUG)
        else:  # it was answered already
            self.abort()

    def _end_of_request(self) -> None:
        self.serving = False
        self._task = None
        if self._visitor is not None:
            self._visitor.end()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _reply(self, account: str, said: FastAnswer) -> None:
        """Answer the request that is being served."""
        self._end_of_request()
        if account and self._visitor is not None:
            self._visitor.recognise(account)
        if self._transport.is_closing():
            return
        self._transport.write(self._written(said))
        if self._closing:
            self._transport.close()
        elif self._kept:
            self._go_on()

    def answered(self) -> asyncio.Future[None]:
        """Return a future that is done when the present request is answered."""
        self._answered = self._loop.create_future()
        return self._answered

    def _go_on(self) -> None:
        """Handle the bytes that arrived while a request was served or the client did not read its answers."""
        if not self.serving and not self._stalled:
            data, self._kept = self._kept, b""
            self._transport.resume_reading()
            if data:
                self.data_received(data)

    def _written(self, said: FastAnswer) -> bytes:
        later = b"Retry-After: %d\r\n" % said.later if said.later else b""
        length, date = len(said.body), self._path.date()
        return _ANSWER % (said.status, _PHRASES[said.status], length, date, later, said.body)

    # ── the other side reads, or does not ────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        """Stop reading: the client does not read its answers."""
        self._stalled = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again: the client has read its answers."""
        self._stalled = False
        self._go_on()

    def close(self) -> None:
        """Close the connection, after the pending answer if there is one."""
        self._closing = True
        if not self.serving:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without sending what is still buffered."""
        self._transport.abort()


_ANSWER: Final = (
    b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nDate: %b\r\n%b\r\n%b"
)
_PHRASES: Final = {int(status): status.phrase.encode() for status in HTTPStatus}


class Head(NamedTuple):
    """The relevant parts of a request's head."""

    token: str | None
    length: int
    host: str


def read_head(head: bytes) -> Head | None:
    """Return the head of a request that may take the fast path, or None.

    >>> read_head(b"POST /v1/messages HTTP/1.1\\r\\nHost: hub\\r\\nContent-Length: 2")
    Head(token=None, length=2, host='hub')
    >>> read_head(b"POST /v1/messages HTTP/1.1\\r\\nHost: hub\\r\\nExpect: 100-continue")
    """
    first, *lines = head.split(b"\r\n")
    if first != _FIRST or not head.isascii():
        return None
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
        return None
    seen: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in _PLAIN:
            continue
        if name in seen:
            return None
        seen[name] = value.strip(b" \t")
    length, host = seen.pop(b"content-length", b""), seen.pop(b"host", b"")
    if not length.isdigit() or len(length) > 6 or not host:
        return None
    if seen.pop(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    token = seen.pop(b"authorization", b"").decode().removeprefix("Bearer ").strip()
    return None if seen else Head(token or None, int(length), host.decode())
