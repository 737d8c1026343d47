"""HTTP for people: register, log in, log out, change the password.

The law: a password comes in a body, over HTTP only, and is used for nothing but its check.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from duly.errors import DulyError, Malformed
from duly.identity.accounts import Principal
from duly.transports.connections import address_of
from duly.transports.http import bodies
from duly.transports.http.messages import entered, problem, token_in
from duly.transports.http.schemas import Credentials, LogoutRequest, PasswordChange
from duly.wire import optional_fields

T = TypeVar("T")


class PeopleRegistry(Protocol):
    """Registers people and logs them in."""

    async def register(self, name: str, password: str, address: str) -> None:
        """Create a user."""
        ...

    async def log_in(self, name: str, password: str, address: str, device: str = "") -> str:
        """Check a password and begin a session; return its token."""
        ...

    async def log_out(self, token: str) -> bool:
        """End one session; return whether there was one."""
        ...

    async def log_out_everywhere(self, name: str) -> int:
        """End all sessions of a user; return how many there were."""
        ...

    async def change_password(self, name: str, old: str, new: str, address: str) -> None:
        """Replace a user's password, and end all sessions of that user."""
        ...


class LoginsBackend(Protocol):
    """What the login routes need of their hub."""

    @property
    def people(self) -> PeopleRegistry:
        """The registry of users and their sessions."""
        ...

    async def login(self, token: str | None, address: str) -> Principal:
        """Return the account that a token belongs to; raises `NotAuthenticated`."""
        ...


def routes(server: LoginsBackend) -> list[web.RouteDef]:
    """Return the routes to register, log in, log out and change a password."""
    logins = _Logins(server)
    return [
        web.post("/v1/people", _guarded(logins.register)),
        web.post("/v1/login", _guarded(logins.log_in)),
        web.post("/v1/logout", _guarded(logins.log_out)),
        web.post("/v1/password", _guarded(logins.change_password)),
    ]


class _Logins:
    def __init__(self, server: LoginsBackend) -> None:
        self._server = server

    async def register(self, request: web.Request) -> web.Response:
        """Create a user, and answer 201 with its name."""
        wanted = await _body(request, Credentials)
        await self._server.people.register(wanted.name, wanted.password, address_of(request))
        return _json({"name": wanted.name}, 201)

    async def log_in(self, request: web.Request) -> web.Response:
        """Check a password, and answer with the token of a new session."""
        wanted = await _body(request, Credentials)
        token = await self._server.people.log_in(
            wanted.name, wanted.password, address_of(request), wanted.device
        )
        return _json({"name": wanted.name, "token": token})

    async def log_out(self, request: web.Request) -> web.Response:
        """End this session, or all sessions of the user, and answer how many have ended."""
        token, who = await self._who(request)
        leaving = await _body(request, LogoutRequest) if request.can_read_body else LogoutRequest()
        people = self._server.people
        ended = await (people.log_out_everywhere(who.name) if leaving.everywhere else people.log_out(token))
        return _json({"ended": int(ended)})

    async def change_password(self, request: web.Request) -> web.Response:
        """Replace the password of the caller."""
        _, who = await self._who(request)
        wanted = await _body(request, PasswordChange)
        await self._server.people.change_password(who.name, wanted.old, wanted.new, address_of(request))
        return _json({"name": who.name})

    async def _who(self, request: web.Request) -> tuple[str, Principal]:
        who = await entered(self._server, request)
        return token_in(request) or "", who


def _guarded(
    inner: Callable[[web.Request], Awaitable[web.Response]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(request: web.Request) -> web.Response:
        try:
            return await inner(request)
        except DulyError as trouble:
            return problem(trouble)

    return serve


async def _body(request: web.Request, as_: type[T]) -> T:
    raw = await bodies.read(request, guest=True)
    try:
        return optional_fields.decode(raw, as_)
    except (msgspec.DecodeError, ValueError) as trouble:
        raise Malformed(f"the body does not fit: {trouble}") from None


def _address(request: web.Request) -> str:
    return request.remote or "?"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
