"""The gate before every HTTP request: checks its origin and its host name, and answers unexpected errors.

The laws. A page of another origin may do nothing unless the hub's `origins` list it: a request that changes
something, or a WebSocket, with a foreign `Origin` is refused. A hub that listens only on this machine answers
only to the names of this machine, so that no page can reach it under another name (DNS rebinding). No input
causes a 500; a bug does, and is logged at most once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import web

from duly.errors import DulyError, NotAllowed
from duly.runtime.tasks import is_cancelled
from duly.transports.connections import visitor_of
from duly.transports.http import bodies
from duly.transports.http.fast_path import BUG, REQUEST
from duly.transports.http.messages import LOG, error, problem, response

OWN_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_SAFE: Final = frozenset({"GET", "HEAD"})
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, content-type, idempotency-key",
    "Access-Control-Max-Age": "600",
}

_Serve: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestGate:
    """Decides which requests are allowed. `origins` are pages of other origins that may use this hub; `names`
    the host names it answers to, None for any. `count` counts a bug by the name of its part; `refused` hears
    why a page was refused."""

    def __init__(
        self,
        origins: Iterable[str],
        names: frozenset[str] | None,
        count: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._count = count
        self._refused = refused
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        also = frozenset(urlsplit(origin).hostname or "" for origin in self._origins)
        self._names = None if names is None else OWN_NAMES | names | also

    def answers_to(self, host: str) -> bool:
        """Return whether a request for this host is for us; one without a host does not come from a page."""
        return self._names is None or not host or host_name(host) in self._names

    def knows(self, origin: str, host: str) -> bool:
        """Return whether a page of this origin may use us: our own, or a listed one."""
        origin = origin.lower()
        if origin in self._origins:
            return True
        parts = urlsplit(origin) if "://" in origin else None
        return parts is not None and bool(host) and parts.netloc == host.lower() and self.answers_to(host)

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Serve) -> web.StreamResponse:
        """Handle every request of aiohttp."""
        visitor = visitor_of(request)
        if visitor is not None:
            visitor.begin()
        try:
            return await self._admit(request, handler)
        finally:
            bodies.give_back(request)
            if visitor is not None:
                visitor.end()

    async def _admit(self, request: web.Request, serve: _Serve) -> web.StreamResponse:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self.answers_to(host):
            name = host_name(host)[:100]
            return self._refuse(f"this hub does not answer to {name!r}; start it with --origin to name it")
        if not _readable(request):
            return _last(error(400, "malformed", "a head of this request is not text that UTF-8 can carry"))
        upgrade = request.headers.get("Upgrade") is not None
        foreign = origin is not None and not self.knows(origin, host)
        if foreign and (upgrade or request.method not in _SAFE):
            page = (origin or "")[:100]
            return self._refuse(f"a page of {page!r} may not use this hub; start it with --origin to let it")
        if request.method == "OPTIONS" and origin is not None:
            answer: web.StreamResponse = web.Response(status=204, headers=_PREFLIGHT)
        else:
            answer = await self._served(request, serve)
        if origin is not None and not foreign and not answer.prepared:
            answer.headers["Access-Control-Allow-Origin"] = origin
            answer.headers["Vary"] = "Origin"
        return answer

    def _refuse(self, reason: str) -> web.Response:
        self._refused(reason)
        return error(403, NotAllowed.word, reason)

    async def _served(self, request: web.Request, serve: _Serve) -> web.StreamResponse:
        try:
            return await serve(request)
        except web.HTTPException as answer:
            if answer.status < 400 or answer.status == 500:
                raise
            said = error(answer.status, answer.reason.lower().replace(" ", "_"), f"{answer.reason}")
            if "Allow" in answer.headers:
                said.headers["Allow"] = answer.headers["Allow"]
            return said
        except bodies.BodyTimeout as late:
            return _last(error(408, "timeout", str(late)))
        except DulyError as trouble:
            return problem(trouble)
        except (ConnectionError, web.RequestPayloadError):
            return _last(error(400, "malformed", "the request did not come whole"))
        except (Exception, asyncio.CancelledError):
            if is_cancelled():
                raise
            LOG.exception("a bug in serving a request")
            self._count(REQUEST)
            return response(BUG)


def _readable(request: web.Request) -> bool:
    """Return whether every header is text. An undecodable token is left to the login, as an unknown one."""
    try:
        for name, value in request.raw_headers:
            if not value.isascii() and name.lower() != b"authorization":
                value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _last(answer: web.Response) -> web.Response:
    """Read nothing more from this connection."""
    answer.force_close()
    return answer


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port.

    >>> host_name("LOCALHOST:7800"), host_name("[::1]:7800"), host_name("a b")
    ('localhost', '::1', 'a b')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
