"""What all requests to the dashboard share: authentication, CSRF protection, and response headers.

The laws. A request belongs to a session (by its cookie) or to an admin (by a token in its headers). A writing
request of a session needs the session's CSRF token in `X-CSRF-Token`; a cookie alone changes nothing.
Responses are never cached, never framed, and load nothing from other hosts. No input causes a 500.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from aiohttp import web

from duly.errors import Malformed, NotAllowed, NotAuthenticated
from duly.identity.accounts import Role
from duly.identity.authenticator import LOCAL
from duly.server.dashboard.access import csrf_token
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from duly.transports.connections import visitor_of
from duly.transports.http import bodies, messages
from duly.wire import optional_fields

if TYPE_CHECKING:
    from duly.server.dashboard.access import DashboardAccess
    from duly.server.hub import Hub

CSRF: Final = "X-CSRF-Token"
COOKIE: Final = "duly_session"

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADS: Final = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""The headers of every response."""
FRESH: Final = HEADS | {"Cache-Control": "no-store"}
"""The headers of a response that only its visitor may see, and that is not cached."""

T = TypeVar("T")


def cookie_name(request: web.Request) -> str:
    """Return the name of the session's cookie. Browsers share cookies among the ports of a host, so the name
    contains the port: two hubs on one machine have separate sessions."""
    _, _, port = request.host.rpartition(":")
    return f"{COOKIE}_{port}" if port.isdecimal() and len(port) <= 5 else COOKIE


def session_token(request: web.Request) -> str:
    """Return the session's token in the cookie of a request; empty if there is none."""
    return request.cookies.get(cookie_name(request), "")


async def authenticated(hub: Hub, access: DashboardAccess, request: web.Request) -> DashboardVisitor:
    """Return the visitor of this request; raises `NotAuthenticated`. An admin's token counts as the role
    admin."""
    if request.headers.get("Authorization"):
        who = await messages.entered(hub, request)
        if who.role is not Role.ADMIN:
            raise NotAllowed("the dashboard needs an admin's token, or a session; see 'duly dashboard link'")
        account = None if who.name == LOCAL else who
        return DashboardVisitor(who.name, DashboardRole.ADMIN, account=account)
    visitor = await access.visitor(session_token(request))
    if visitor is None:
        raise NotAuthenticated("log in first: 'duly dashboard link' prints a link, or use a password")
    connection = visitor_of(request)
    if connection is not None:
        connection.recognise(f"$dashboard/{visitor.name}")
    return visitor


def check_written_here(request: web.Request, visitor: DashboardVisitor) -> None:
    """Raise `NotAllowed` unless a writing request comes from our own page: it must carry the CSRF token of
    its session. A token in the headers is not a cookie: no other page can have sent it."""
    if not visitor.session:
        return
    given, wanted = request.headers.get(CSRF, ""), csrf_token(session_token(request))
    if not hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode()):
        raise NotAllowed("the request does not carry the page's token; reload the page and try again")
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise NotAllowed("a page of another site may not do that")


async def body_of(request: web.Request, as_: type[T], *, guest: bool = False) -> T:
    """Return the body of a request; raises `Malformed` if it is invalid."""
    if request.content_type != "application/json":
        raise Malformed("the body must be JSON, with Content-Type: application/json")
    raw = await bodies.read(request, guest=guest)
    try:
        return optional_fields.decode(raw, as_)
    except (msgspec.DecodeError, ValueError) as problem:
        raise Malformed(f"the body does not fit: {problem}") from None


def answer(value: object, status: int = 200) -> web.Response:
    """Return a response with this value as JSON."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=FRESH
    )


def with_heads(response: web.Response) -> web.Response:
    """Return the same response with the headers of every dashboard response."""
    response.headers.update(FRESH)
    return response


def text_of(query: object, name: str, longest: int = 200) -> str:
    """Return a short text from a query or a body; raises `Malformed` if it is invalid."""
    value = query.get(name, "") if hasattr(query, "get") else ""
    if not isinstance(value, str):
        raise Malformed(f"{name} must be text")
    if len(value) > longest:
        raise Malformed(f"{name} has more than {longest} characters")
    if "\0" in value:
        raise Malformed(f"{name} must not hold the character NUL: not every ledger can store it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{name} must be text that UTF-8 can carry") from None
    return value
