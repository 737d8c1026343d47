"""The connections to the hub's port, and how many of them there may be.

The laws. An address may hold so many connections and no more, by default half of what there is room for. One
that has not authenticated has ten seconds for each request: silence, or a request that comes byte by byte,
ends it. When descriptors run short, or those of an address, a connection that has not authenticated makes
room for the next: the oldest of those that the hub waits for, be it for a request, for the rest of one, or
for a WebSocket to say whose it is. One that has authenticated is never closed for a stranger's sake, up to
the share of its account, a quarter of the room: those beyond the share make room as strangers do, so that no
account keeps the others out.

The connections of a proxy that is trusted (`duly.core.trusted_proxies`) are those of its clients: the proxy
may hold as many as there is room for, and a WebSocket that comes through it counts for its client's address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from duly.core.networks import network_of
from duly.core.trusted_proxies import TrustedProxies

GUEST_SECONDS: Final = 10.0
"""How long a client that has not logged in may take for a request, in seconds."""
RESERVE: Final = 128
"""Descriptors that are kept for the ledger, the broker and files."""
LINGER_SECONDS: Final = 1.0
"""How long a client that was turned away may take to read why."""
LINGERING: Final = 32
"""Clients that may do so at the same time; the reserve has room for them."""
HEAD_LIMIT: Final = 32 * 1024
"""The longest head of a request, in bytes: what is kept of one that has not come whole."""
_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
)
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 3\r\nConnection: close\r\n\r\n%b"
)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to what it may have; what it is now."""
    try:
        import resource
    except ImportError:  # a platform without such limits
        return 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class ClientConnection:
    """One connection."""

    __slots__ = (
        "_heard",
        "_loop",
        "_timer",
        "_transport",
        "_visitors",
        "account",
        "address",
        "awaited",
        "busy",
        "known",
        "network",
    )

    def __init__(self, visitors: ClientConnections, transport: asyncio.Transport, address: str) -> None:
        self.address = address
        self.network = network_of(address)
        self.busy = 0
        """requests that are being served"""
        self.awaited = 0
        """requests that cannot be served yet: the rest of them has not come"""
        self.known = False
        """they have said who they are, and it is one of the connections that their account may hold"""
        self.account = ""
        """whose it is, if it is known"""
        self._visitors = visitors
        self._transport = transport
        self._loop = asyncio.get_running_loop()  # asking for it is a call to the system
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def recognise(self, account: str) -> None:
        """Note that the client has proved which account it is. A connection beyond the share of its account
        is served, but makes room for others as a stranger's does."""
        if not self.known:
            self.known = self._visitors.recognised(self, account)

    def client(self, forwarded: Iterable[str]) -> str:
        """The address of the client whose request this is, by its `X-Forwarded-For` headers."""
        return self._visitors.proxies.client(self.address, forwarded)

    def belongs_to(self, address: str) -> bool:
        """Count this connection for the client at this address; False if that has too many."""
        return self._visitors.assign(self, address)

    @property
    def idle(self) -> bool:
        """Whether the hub waits for them, and not they for the hub."""
        return self.busy == self.awaited

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts, what they ask for has not come whole."""
        self.awaited += 1
        try:
            yield
        finally:
            self.awaited -= 1

    def begin(self) -> None:
        """A request has come whole, or as far as its body."""
        self.busy += 1

    def end(self) -> None:
        """It is answered."""
        self.busy -= 1
        self._heard = self._loop.time()

    def watch(self) -> None:
        """Hang up on them when they are silent for too long, or do not come to an end."""
        loop = self._loop
        if self._timer is not None:
            self._timer.cancel()
        lasts = self._visitors.idle if self.known else GUEST_SECONDS
        over = (loop.time() if self.busy else self._heard) + lasts
        if over <= loop.time():
            self._transport.abort()
        else:
            self._timer = loop.call_at(over, self.watch)

    def leave(self) -> None:
        """Stop the timer and remove this connection from the hub's; it has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._visitors.forget(self)

    def dismiss(self, answer: bytes) -> None:
        """Send a last answer, and end the connection."""
        self._visitors.dismiss(self._transport, answer)

    def abort(self) -> None:
        """Close the connection at once, without sending what is still buffered."""
        self._transport.abort()


class Evictable:
    """Connections that make room for the next: first those beyond the share of their account, then guests."""

    __slots__ = ("guests", "surplus")

    def __init__(self) -> None:
        self.guests: dict[ClientConnection, None] = {}
        """those who have not said who they are, the oldest first"""
        self.surplus: dict[ClientConnection, None] = {}
        """those beyond the share of their account, the oldest first"""

    def remove(self, visitor: ClientConnection) -> None:
        """Leave a connection alone from now on; harmless if it is not one of these."""
        self.guests.pop(visitor, None)
        self.surplus.pop(visitor, None)

    def exceed(self, visitor: ClientConnection) -> None:
        """A guest has said who they are, and their account has its share."""
        if visitor in self.guests:
            del self.guests[visitor]
            self.surplus[visitor] = None

    def first(self) -> ClientConnection | None:
        """The one that goes first. A guest that is being served goes only if there is no other."""
        idle = (one for one in self.guests if one.idle)
        return next(iter(self.surplus), None) or next(idle, None) or next(iter(self.guests), None)

    def __len__(self) -> int:
        return len(self.guests) + len(self.surplus)


class ClientConnections:
    """All connections of one hub. `room` is how many there may be, `each` how many of one address; 0 is half
    of the room. `proxies` are believed when they say whose request they pass on."""

    def __init__(
        self, room: int, each: int = 0, idle: float = 75.0, proxies: TrustedProxies | None = None
    ) -> None:
        self.proxies = proxies or TrustedProxies()
        self.room = max(room, 16)
        self.each = each or max(self.room // 2, 8)
        self.share = max(self.room // 4, 8)
        """how many an account may hold, however many clients come"""
        self.idle = idle
        self.refused = 0
        self.evictable = Evictable()
        self._count = 0
        self._lingering = 0
        self._accounts: Counter[str] = Counter()
        self._per_network: dict[str, int] = {}
        self._strangers: dict[str, Evictable] = {}
        """those of each address that make room for its next"""

    @property
    def guests(self) -> dict[ClientConnection, None]:
        """Those who have not said who they are, the oldest first."""
        return self.evictable.guests

    def enter(self, transport: asyncio.Transport, address: str) -> ClientConnection | None:
        """Take a connection in; None if it was turned away."""
        visitor = ClientConnection(self, transport, address)
        here = self._per_network.get(visitor.network, 0)
        crowded = here >= self.each and not self.proxies.trusts(address)
        if crowded and not self._make_room(self._strangers.get(visitor.network)):
            self._turn_away(transport, f"{here} connections from {visitor.network}; close some first")
            return None
        if not crowded and self._count >= self.room and not self._make_room(self.evictable):
            self._turn_away(transport, "all connections are in use; try again soon")
            return None
        self._count += 1
        self._per_network[visitor.network] = here + 1
        for some in (self.evictable, self._strangers.setdefault(visitor.network, Evictable())):
            some.guests[visitor] = None
        return visitor

    def assign(self, visitor: ClientConnection, address: str) -> bool:
        """Count a connection that came through a proxy for its client's address; False if that address has
        its connections already."""
        network = network_of(address)
        if network == visitor.network:
            return True
        here = self._per_network.get(network, 0)
        if here >= self.each and not self._make_room(self._strangers.get(network)):
            self.refused += 1
            return False
        is_guest = visitor in self.evictable.guests
        self._drop_stranger(visitor)
        self._uncount(visitor.network)
        visitor.address, visitor.network = address, network
        self._per_network[network] = self._per_network.get(network, 0) + 1
        if is_guest:
            self._strangers.setdefault(network, Evictable()).guests[visitor] = None
        return True

    def recognised(self, visitor: ClientConnection, account: str) -> bool:
        """Count a connection for its account, unless that has its share; return whether it is a guest no
        longer."""
        if self._accounts[account] >= self.share:
            self.evictable.exceed(visitor)
            if (strangers := self._strangers.get(visitor.network)) is not None:
                strangers.exceed(visitor)
            return False
        self._accounts[account] += 1
        visitor.account = account
        self._keep(visitor)
        return True

    def _keep(self, visitor: ClientConnection) -> None:
        """It makes room for no other."""
        self.evictable.remove(visitor)
        self._drop_stranger(visitor)

    def _drop_stranger(self, visitor: ClientConnection) -> None:
        strangers = self._strangers.get(visitor.network)
        if strangers is not None:
            strangers.remove(visitor)
            if not strangers:
                del self._strangers[visitor.network]

    def forget(self, visitor: ClientConnection) -> None:
        """Remove a connection that has ended, and count it no longer for its address and account."""
        self._keep(visitor)
        if visitor.known:
            self._accounts[visitor.account] -= 1
            if not self._accounts[visitor.account]:
                del self._accounts[visitor.account]
        self._count -= 1
        self._uncount(visitor.network)

    def _uncount(self, network: str) -> None:
        here = self._per_network.get(network, 0) - 1
        if here > 0:
            self._per_network[network] = here
        else:
            self._per_network.pop(network, None)

    def _make_room(self, some: Evictable | None) -> bool:
        """End the connection of the first of these."""
        first = None if some is None else some.first()
        if first is None:
            return False
        self._keep(first)
        first.abort()
        self.refused += 1
        return True

    def _turn_away(self, transport: asyncio.Transport, why: str) -> None:
        self.refused += 1
        body = msgspec.json.encode({"error": "overloaded", "detail": why})
        self.dismiss(transport, _FULL % (len(body), body))

    def dismiss(self, transport: asyncio.Transport, answer: bytes) -> None:
        """Send a last answer, and end the connection when the client has had time to read it. What it still
        sends must be ignored."""
        transport.write(answer)
        if self._lingering >= LINGERING or not transport.can_write_eof():
            transport.close()
            return
        # Closing now would reset the connection if a request has come: the client would not read the answer.
        transport.write_eof()
        self._lingering += 1
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._part, transport)

    def _part(self, transport: asyncio.Transport) -> None:
        self._lingering -= 1
        transport.abort()


class Handler(RequestHandler):
    """aiohttp's end of a connection, that says when it is over, and bounds the heads of requests: aiohttp
    bounds each line and their number, which allows a MiB."""

    __slots__ = ("_head", "_last", "visitor")

    def __init__(self, server: web.Server, visitor: ClientConnection) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **server._kwargs)
        self.visitor = visitor
        self._head = 0
        """bytes of a head that has not come whole"""
        self._last = b""
        """the last of them, in which its end may begin"""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the transport from asyncio, and start the timer for silent clients."""
        super().connection_made(transport)
        self.visitor.watch()

    def data_received(self, data: bytes) -> None:
        """Hand what has been read to aiohttp, unless it makes a head too long."""
        if self._force_close:
            return
        if self._waiter is None and self._request_count:
            self._head = 0  # a request is being served: this is its body, or what follows
        elif self._is_too_long(data):
            self._refuse_head()
            return
        super().data_received(data)

    def _is_too_long(self, data: bytes) -> bool:
        """Count what has come of a head; return whether that is too much."""
        if (self._last + data[: HEAD_LIMIT - self._head]).find(b"\r\n\r\n") >= 0:
            self._head, self._last = 0, b""
            return False
        self._head += len(data)
        self._last = (self._last + data[-3:])[-3:]
        return self._head > HEAD_LIMIT

    def _refuse_head(self) -> None:
        body = b'{"error":"too_large","detail":"the head of this request is over %d bytes"}' % HEAD_LIMIT
        self._force_close = True
        if self.transport is not None and not self.transport.is_closing():
            self.visitor.dismiss(_TOO_LONG % (len(body), body))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is said when aiohttp itself fails before anything of ours is asked: of an `Expect` that is no
        text, for one."""
        if isinstance(exc, UnicodeError):
            self.force_close()
            said = {"error": "malformed", "detail": "the head of this request is no text"}
            return web.json_response(said, status=400)
        return super().handle_error(request, status, exc, message)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End aiohttp's work on this connection, and remove it from the hub's."""
        super().connection_lost(exc)
        self.visitor.leave()


def visitor_of(request: web.Request) -> ClientConnection | None:
    """The connection that a request came over."""
    return getattr(cast("Any", request.protocol), "visitor", None)


def address_of(request: web.Request) -> str:
    """The address of the client whose request this is."""
    visitor = visitor_of(request)
    if visitor is None:
        return request.remote or "?"
    return visitor.client(request.headers.getall("X-Forwarded-For", ()))


def turn_away(request: web.Request) -> web.Response | None:
    """Count the connection of a WebSocket for its client's address; the refusal, if that has too many."""
    visitor, address = visitor_of(request), address_of(request)
    if visitor is None or visitor.belongs_to(address):
        return None
    detail = f"too many connections from {network_of(address)}; close some first"
    said = {"error": "overloaded", "detail": detail}
    return web.json_response(said, status=503, headers={"Retry-After": "3"})


def waiting_for(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """While this lasts, the request is not being served: the rest of it has not come."""
    visitor = visitor_of(request)
    return contextlib.nullcontext() if visitor is None else visitor.waiting()
