"""Idempotent requests for ASGI applications: FastAPI, Starlette, Litestar, Quart, Django's ASGI handler.

    app.add_middleware(IdempotencyMiddleware, ledger="sqlite:///app.db")

The response is held back until it is stored; what the application does after that (Starlette's background
tasks) is no part of the request. A response that grows over the limit of its route is let through and not
stored: a repeat hears that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from inspect import isawaitable
from typing import Any, Final, TypeAlias

from duly.core.messages import Message
from duly.idempotency.runs import Run
from duly.integrations.idempotency_key import (
    HEADER,
    TRANSACTION,
    GuardedApplication,
    IdempotencyPolicy,
    RequestHead,
    StoredResponse,
    caller_of,
    caller_with,
    end,
    fail,
    response_of,
    too_large,
)
from duly.storage.ledger import Transaction

Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = Scope
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
App: TypeAlias = Callable[..., Awaitable[None]]
"""Frameworks type their scopes and events each in their own way."""

_BYPASSES: Final = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")
"""Extensions by which a response would go around what stores it."""
_READ: Final = frozenset({HEADER, b"content-length", b"authorization"})
"""The headers that are read of every request."""


class IdempotencyMiddleware(GuardedApplication):
    """Makes the requests of an ASGI application idempotent by their `Idempotency-Key`.

    `ledger` is a URL (or an opened ledger). `routes` maps "POST /payments" or "/orders/{id}" to an
    `IdempotencyPolicy`; `default` holds for all other requests of `methods`. `scope` names the authenticated
    caller of a request; by default it is the hash of the `Authorization` header.
    """

    _app: App

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        policy = None
        if scope["type"] == "http":
            policy = self._guard.policy(scope["method"], scope["path"])
        if policy is None:
            return await self._app(scope, receive, send)
        head = {name: value for name, value in scope["headers"] if name in _READ}
        if HEADER not in head and not policy.required:
            return await self._app(scope, receive, send)
        try:
            found = await self._message(scope, receive, policy, head)
        except _ClientGone:
            return None  # in the middle of its payload: there is nothing to run, and no one to answer
        if isinstance(found, StoredResponse):
            return await reply(send, found)
        message, body = found
        call = _Call(self._app, scope, _replaying(body, receive), send, policy)
        if policy.effect == "exactly_once":
            return await reply(send, await self._guard.transact(policy, message, call.collect))
        begun = await self._guard.begin(policy, message)
        if isinstance(begun, StoredResponse):
            return await reply(send, begun)
        return await call.run(begun)

    async def _message(
        self, scope: Scope, receive: Receive, policy: IdempotencyPolicy, head: Mapping[bytes, bytes]
    ) -> tuple[Message, bytes] | StoredResponse:
        """Return what stands for the request, and its payload; or the response that refuses it."""
        shown = [value.decode("latin-1") for name, value in scope["headers"] if name == HEADER]
        key = self.judge(policy, shown, head.get(b"content-length", b"").decode("latin-1"))
        if isinstance(key, StoredResponse):
            return key
        body = await _read_body(receive, policy.request_limit)
        if body is None:
            return too_large(policy.request_limit)
        method, path = scope["method"], scope["path"]
        if self._caller_of is caller_of:  # which needs no other header
            authorization = head.get(b"authorization")
            caller = caller_with(None if authorization is None else authorization.decode("latin-1"))
        else:
            caller = await self._named(scope)
        return self._guard.message(caller, key, method, path, scope.get("query_string", b""), body), body

    async def _named(self, scope: Scope) -> str:
        """Return the caller, as the application's own function names it."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        caller = self._caller_of(RequestHead(scope["method"], scope["path"], headers, scope))
        return str(await caller if isawaitable(caller) else caller)


class _ClientGone(Exception):
    """The connection ended before the whole payload was there."""


class _Call:
    """One request on its way through the application."""

    def __init__(
        self, app: App, scope: Scope, receive: Receive, send: Send, policy: IdempotencyPolicy
    ) -> None:
        self.policy = policy
        self.send = send
        self._app = app
        self._scope = _without_bypasses(scope)
        self._receive = receive
        self._start: Event | None = None
        self._body = bytearray()
        self._run: Run | None = None
        self._passing = False
        self._complete = False

    async def run(self, run: Run) -> None:
        """Let the application answer; its response is stored before it is sent."""
        self._run = run
        try:
            try:
                await self._app(self._scope, self._receive, self._store_and_send)
                if not self._complete:
                    raise RuntimeError("the application returned without a complete response")
            except BaseException as problem:
                if not self._complete and not self._passing:
                    run.leave()
                    await fail(run, self.policy, problem)
                raise
        finally:
            run.close()

    async def collect(self, tx: Transaction) -> StoredResponse | None:
        """Let the application answer within a transaction, and return its response; None if it is too
        large."""
        self._scope[TRANSACTION] = tx
        await self._app(self._scope, self._receive, self._keep)
        if self._start is None:
            raise RuntimeError("the application returned without a response")
        if len(self._body) > self.policy.response_limit:
            return None
        return self._response()

    async def _keep(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self._start = event
        elif event["type"] == "http.response.body" and len(self._body) <= self.policy.response_limit:
            self._body += event.get("body", b"")

    async def _store_and_send(self, event: Event) -> None:
        type_ = event["type"]
        if type_ == "http.response.start" and not self._passing:
            self._start = event
            return None
        if type_ != "http.response.body" or self._passing:
            return await self.send(event)
        self._body += event.get("body", b"")
        too_much = len(self._body) > self.policy.response_limit
        if event.get("more_body") and not too_much:
            return None
        response = self._response()
        run = self._run
        assert run is not None
        run.leave()
        self._complete = True
        instead = await end(run, self.policy, None if too_much else response)
        if instead is not None:
            return await reply(self.send, instead)
        self._passing = True
        assert self._start is not None
        await self.send(self._start)
        event = {"type": "http.response.body", "body": bytes(self._body), "more_body": event.get("more_body")}
        self._body = bytearray()
        await self.send(event)
        return None

    def _response(self) -> StoredResponse:
        assert self._start is not None
        return response_of(self._start["status"], self._start.get("headers", ()), bytes(self._body))


async def reply(send: Send, response: StoredResponse) -> None:
    """Send a response."""
    await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the payload; None if it is over the limit."""
    body = b""
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise _ClientGone
        body += bytes(event.get("body", b""))
        if len(body) > limit:
            return None
        if not event.get("more_body"):
            return body


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the payload first."""
    given = False

    async def again() -> Event:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _without_bypasses(scope: Scope) -> Scope:
    extensions = scope.get("extensions") or {}
    if any(name in extensions for name in _BYPASSES):
        kept = {name: value for name, value in extensions.items() if name not in _BYPASSES}
        return {**scope, "extensions": kept}
    return {**scope}
