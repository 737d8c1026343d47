"""The connections to the hub's port, and their limits.

The laws. The number of connections per address is limited, by default to half of the room. An unauthenticated
connection has ten seconds for each request: silence, or a request that arrives byte by byte, ends it. When
descriptors, or those of an address, run short, an unauthenticated connection makes room for the next one: the
oldest of those that the hub waits for, be it for a request, for the rest of one, or for the login of a
WebSocket. An authenticated connection is never closed for an unauthenticated one, up to the share of its
account, a quarter of the room: connections beyond the share make room as well, so that no account shuts out
the others.

The connections of a trusted proxy (`duly.core.trusted_proxies`) belong to its clients: the proxy may use the
whole room, and a WebSocket through it counts for its client's address.
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
"""Descriptors that are reserved for the ledger, the broker and files."""
LINGER_SECONDS: Final = 1.0
"""How long a refused client may take to read the reason."""
LINGERING: Final = 32
"""How many clients may do so at the same time; the reserve has room for them."""
HEAD_LIMIT: Final = 32 * 1024
"""The longest head of a request in bytes, which limits what is kept of an incomplete one."""
_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
)
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 3\r\nConnection: close\r\n\r\n%b"
)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to the allowed maximum; return the limit."""
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
        """requests being served"""
        self.awaited = 0
        """requests that are incomplete and cannot be served yet"""
        self.known = False
        """authenticated, and within the share of its account"""
        self.account = ""
        """its account, if it is known"""
        self._visitors = visitors
        self._transport = transport
        self._loop = asyncio.get_running_loop()  # getting it each time would be a system call
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def recognise(self, account: str) -> None:
        """Record that the client has authenticated as this account. A connection beyond the share of its
        account is served, but may be closed to make room, like an unauthenticated one."""
        if not self.known:
            self.known = self._visitors.recognised(self, account)

    def client(self, forwarded: Iterable[str]) -> str:
        """Return the address of the client that made this request, by its `X-Forwarded-For` headers."""
        return self._visitors.proxies.client(self.address, forwarded)

    def belongs_to(self, address: str) -> bool:
        """Count this connection for the client at this address; return False if that has too many."""
        return self._visitors.assign(self, address)

    @property
    def idle(self) -> bool:
        """Whether the hub waits for the client, and not the client for the hub."""
        return self.busy == self.awaited

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the request as incomplete while this context lasts."""
        self.awaited += 1
        try:
            yield
        finally:
            self.awaited -= 1

    def begin(self) -> None:
        """Record that a request has arrived, completely or up to its body."""
        self.busy += 1

    def end(self) -> None:
        """Record that a request is answered."""
        self.busy -= 1
        self._heard = self._loop.time()

    def watch(self) -> None:
        """Close the connection if the client is silent for too long, or a request does not end."""
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
    """Connections that make room for the next one: first those beyond the share of their account, then
    guests."""

    __slots__ = ("guests", "surplus")

    def __init__(self) -> None:
        self.guests: dict[ClientConnection, None] = {}
        """unauthenticated connections, the oldest first"""
        self.surplus: dict[ClientConnection, None] = {}
        """connections beyond the share of their account, the oldest first"""

    def remove(self, visitor: ClientConnection) -> None:
        """Remove a connection, so that it no longer makes room; harmless if it is not one of these."""
        self.guests.pop(visitor, None)
        self.surplus.pop(visitor, None)

    def exceed(self, visitor: ClientConnection) -> None:
        """Move a guest to the surplus: it authenticated as an account that already has its share."""
        if visitor in self.guests:
            del self.guests[visitor]
            self.surplus[visitor] = None

    def first(self) -> ClientConnection | None:
        """Return the connection to close first. A guest that is being served is returned only if there is no
        other."""
        idle = (one for one in self.guests if one.idle)
        return next(iter(self.surplus), None) or next(idle, None) or next(iter(self.guests), None)

    def __len__(self) -> int:
        return len(self.guests) + len(self.surplus)


class ClientConnections:
    """All connections of one hub. `room` is how many there may be, `each` how many per address; 0 means half
    of the room. `proxies` are trusted to name the client of a request."""

    def __init__(
        self, room: int, each: int = 0, idle: float = 75.0, proxies: TrustedProxies | None = None
    ) -> None:
        self.proxies = proxies or TrustedProxies()
        self.room = max(room, 16)
        self.each = each or max(self.room // 2, 8)
        self.share = max(self.room // 4, 8)
        """how many connections an account may hold, however many clients there are"""
        self.idle = idle
        self.refused = 0
        self.evictable = Evictable()
        self._count = 0
        self._lingering = 0
        self._accounts: Counter[str] = Counter()
        self._per_network: dict[str, int] = {}
        self._strangers: dict[str, Evictable] = {}
        """by address: the connections that make room for its next one"""

    @property
    def guests(self) -> dict[ClientConnection, None]:
        """Return the unauthenticated connections, the oldest first."""
        return self.evictable.guests

    def enter(self, transport: asyncio.Transport, address: str) -> ClientConnection | None:
        """Accept a connection; returns None if it was refused."""
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
        """Count a connection that came through a proxy for its client's address; return False if that address
        has too many."""
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
        """Count a connection for its account, unless that has its share; return whether it is no longer a
        guest."""
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
        """Remove a connection from those that make room for others."""
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
        """Close the first of these connections; return whether there was one."""
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
        """Send a last answer, and close the connection when the client has had time to read it. The caller
        must ignore data that the client still sends."""
        transport.write(answer)
        if self._lingering >= LINGERING or not transport.can_write_eof():
            transport.close()
            return
        # Closing now would reset the connection if a request has arrived, and the client would not read the
        # answer.
        transport.write_eof()
        self._lingering += 1
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._part, transport)

    def _part(self, transport: asyncio.Transport) -> None:
        self._lingering -= 1
        transport.abort()


class VisitorHandler(RequestHandler):
    """aiohttp's handler of a connection. It reports the end of the connection, and limits the size of request
    heads: aiohttp limits only the length and the number of lines, which allows a MiB."""

    __slots__ = ("_head", "_last", "visitor")

    def __init__(self, server: web.Server, visitor: ClientConnection) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **server._kwargs)
        self.visitor = visitor
        self._head = 0
        """bytes of an incomplete head"""
        self._last = b""
        """the last of these bytes, in which the end of the head may begin"""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the transport from asyncio, and start the timer for silent clients."""
        super().connection_made(transport)
        self.visitor.watch()

    def data_received(self, data: bytes) -> None:
        """Pass data to aiohttp, unless it makes a head too long."""
        if self._force_close:
            return
        if self._waiter is None and self._request_count:
            self._head = 0  # a request is being served: this is its body, or the next request
        elif self._is_too_long(data):
            self._refuse_head()
            return
        super().data_received(data)

    def _is_too_long(self, data: bytes) -> bool:
        """Count the bytes of a head; return whether there are too many."""
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
        """Return the answer when aiohttp itself fails before the hub's handler is called, for example on an
        `Expect` header that is not text."""
        if isinstance(exc, UnicodeError):
            self.force_close()
            said = {"error": "malformed", "detail": "the head of this request is not text"}
            return web.json_response(said, status=400)
        return super().handle_error(request, status, exc, message)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End aiohttp's work on this connection, and remove it from the hub's."""
        super().connection_lost(exc)
        self.visitor.leave()


def visitor_of(request: web.Request) -> ClientConnection | None:
    """Return the connection that a request came over."""
    return getattr(cast("Any", request.protocol), "visitor", None)


def address_of(request: web.Request) -> str:
    """Return the address of the client that made this request."""
    visitor = visitor_of(request)
    if visitor is None:
        return request.remote or "?"
    return visitor.client(request.headers.getall("X-Forwarded-For", ()))


def turn_away(request: web.Request) -> web.Response | None:
    """Count the connection of a WebSocket for its client's address; return the refusal if that has too
    many."""
    visitor, address = visitor_of(request), address_of(request)
    if visitor is None or visitor.belongs_to(address):
        return None
    detail = f"too many connections from {network_of(address)}; close some first"
    said = {"error": "overloaded", "detail": detail}
    return web.json_response(said, status=503, headers={"Retry-After": "3"})


def waiting_for(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """Mark the request as incomplete while this context lasts."""
    visitor = visitor_of(request)
    return contextlib.nullcontext() if visitor is None else visitor.waiting()
