"""Idempotent requests for ASGI applications: FastAPI, Starlette, Litestar, Quart, Django's ASGI handler.

    app.add_middleware(IdempotencyMiddleware, ledger="sqlite:///app.db")

The response is held back until it is stored. The application is not: what it does behind its response
(Starlette's background tasks) is not part of the request. So its call is over, and what it held is free,
while the response waits for the disk. A response that grows over the limit of its route is let through and
not stored: a repeat hears that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

from duly.idempotency.runs import Run
from duly.integrations.guarded_application import GuardedApplication
from duly.integrations.idempotency_key import (
    HEADER,
    TRANSACTION,
    IdempotencyPolicy,
    KeyedRequest,
    LoopTransaction,
    RequestHead,
    ResponseEnd,
    StoredResponse,
    caller_of,
    caller_with,
    fail,
    response_of,
    too_large,
)
from duly.storage.ledger import Transaction

Scope: TypeAlias = MutableMapping[str, Any]
AsgiEvent: TypeAlias = Scope
Receive: TypeAlias = Callable[[], Awaitable[AsgiEvent]]
Send: TypeAlias = Callable[[AsgiEvent], Awaitable[None]]
AsgiApp: TypeAlias = Callable[..., Awaitable[None]]
"""Frameworks type their scopes and events each in their own way."""

_READ: Final = frozenset({HEADER, b"content-length", b"authorization", b"x-api-key", b"cookie"})
"""The headers that are read of every request."""

_BYPASSES: Final = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")
"""Extensions by which a response would go around what stores it."""


class IdempotencyMiddleware(GuardedApplication):
    """Makes the requests of an ASGI application idempotent by their `Idempotency-Key`.

    `ledger` is a URL (or an opened ledger). `routes` maps "POST /payments" or "/orders/{id}" to an
    `IdempotencyPolicy`; `default` holds for all other requests of `methods`. `scope` names the authenticated
    caller of a request; by default it is the hash of the `Authorization` header.
    """

    _app: AsgiApp
    _calls: _Unreturned | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        policy = None
        if scope["type"] == "http":
            policy = self._guard.policy(scope["method"], scope["path"])
        if policy is None:
            return await self._app(scope, receive, send)
        try:
            found = await self._keyed(scope, receive, policy)
        except _ClientGone:
            return None  # in the middle of its payload: there is nothing to run, and no one to answer
        if found is None:
            return await self._app(scope, receive, send)
        if isinstance(found, StoredResponse):
            return await reply(send, found)
        request, body = found
        received = _AppInput(body, receive)
        if policy.effect == "exactly_once":
            inside = _CallInside(self._app, scope, received, policy)
            return await reply(send, await self._guard.transact(policy, request, inside.collect))
        begun = await self._guard.begin(policy, request)
        if isinstance(begun, StoredResponse):
            return await reply(send, begun)
        call = _Call(begun, send, policy, request.cookies, received.answer, self._unreturned())
        return await call.run(_run(self._app, _without_bypasses(scope), received.next, call.store))

    def _unreturned(self) -> _Unreturned:
        loop, calls = asyncio.get_running_loop(), self._calls
        if calls is None or calls.loop is not loop:  # the first one, or another thread's
            calls = self._calls = _Unreturned(loop)
        return calls

    async def _keyed(
        self, scope: Scope, receive: Receive, policy: IdempotencyPolicy
    ) -> tuple[KeyedRequest, bytes] | StoredResponse | None:
        """Return what stands for the request, and its payload; or the response that refuses it. None: it has
        no key, and needs none."""
        head = _KeyHeaders(scope["headers"])
        key = self.key_of(policy, head.keys, head.length)
        if not isinstance(key, str):
            return key
        body = await _read_body(receive, policy.request_limit)
        if body is None:
            return too_large(policy.request_limit)
        method, path = scope["method"], scope["path"]
        if self._caller_of is caller_of:  # which needs no other header
            caller = caller_with(head.authorization, head.api_key)
        else:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            caller = await self.caller_async(RequestHead(method, path, headers, scope))
        query = scope.get("query_string", b"")
        return self._guard.request(caller, key, method, path, query, body, head.cookies), body


class _KeyHeaders:
    """The headers that are read of every request."""

    __slots__ = ("api_key", "authorization", "cookies", "keys", "length")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.keys: list[str] = []
        self.length = ""
        self.authorization: str | None = None
        self.api_key: str | None = None
        self.cookies = ""
        for name, value in headers:
            if name not in _READ:
                continue
            if name == HEADER:
                self.keys.append(value.decode("latin-1"))
            elif name == b"content-length":
                self.length = value.decode("latin-1")
            elif name == b"authorization":
                self.authorization = value.decode("latin-1")
            elif name == b"x-api-key":
                self.api_key = value.decode("latin-1")
            elif name == b"cookie":  # HTTP/2 may send each in a header of its own
                self.cookies += "; " * bool(self.cookies) + value.decode("latin-1")


class _AppInput:
    """What the application receives: the payload, and that the client has gone, but not before its response
    is complete. The response goes to the ledger first; an application that stopped in the middle because no
    one listens would have to be run again."""

    __slots__ = ("_body", "_receive", "_waited_for", "answered")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._waited_for: asyncio.Event | None = None
        self.answered = False
        """whether the response is complete, or is passed on without being stored"""

    async def next(self) -> AsgiEvent:
        """Return the next event."""
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.answered:
            if self._waited_for is None:
                self._waited_for = asyncio.Event()
            await self._waited_for.wait()
        return await self._receive()

    def answer(self) -> None:
        """Note that the response is complete, or is passed on."""
        self.answered = True
        if self._waited_for is not None:
            self._waited_for.set()


class _ClientGone(Exception):
    """The connection ended before the whole payload was there."""


class _CallInside:
    """One request on its way through the application, within a transaction."""

    def __init__(self, app: AsgiApp, scope: Scope, received: _AppInput, policy: IdempotencyPolicy) -> None:
        self._app = app
        self._scope = {**_without_bypasses(scope)}
        self._received = received
        self._limit = policy.response_limit
        self._response = _KeptResponse()

    async def collect(self, tx: Transaction) -> StoredResponse | None:
        """Let the application answer within a transaction, and return its response; None if it is too
        large."""
        self._scope[TRANSACTION] = LoopTransaction(tx, asyncio.get_running_loop())
        await self._app(self._scope, self._received.next, self._keep)
        response = self._response
        if len(response.body) > self._limit:
            return None
        if not self._received.answered:
            raise RuntimeError("the application returned without a complete response")
        return response.stored()

    async def _keep(self, event: AsgiEvent) -> None:
        response, received = self._response, self._received
        if len(response.body) <= self._limit and not received.answered and response.add(event):
            received.answer()


class _KeptResponse:
    """A response that is held back."""

    __slots__ = ("body", "start")

    def __init__(self) -> None:
        self.start: AsgiEvent | None = None
        self.body = bytearray()

    def add(self, event: AsgiEvent) -> bool:
        """Take in what the application sends; returns whether it is complete."""
        if event["type"] == "http.response.start":
            self.start = event
        elif event["type"] == "http.response.body":
            self.body += event.get("body", b"")
            return not event.get("more_body")
        return False

    def stored(self) -> StoredResponse:
        """Return it as it is stored."""
        if self.start is None:
            raise RuntimeError("the application sent a body without the start of a response")
        return response_of(self.start["status"], self.start.get("headers", ()), bytes(self.body))


class _Call:
    """One request on its way through the application.

    Nothing of what the application was given is kept here: it is free when the application has returned.
    """

    __slots__ = (
        "_answered",
        "_answering",
        "_cookies",
        "_end",
        "_passing",
        "_policy",
        "_response",
        "_returned",
        "_run",
        "_send",
        "_unreturned",
    )

    def __init__(
        self,
        run: Run,
        send: Send,
        policy: IdempotencyPolicy,
        cookies: frozenset[bytes],
        answered: Callable[[], None],
        unreturned: _Unreturned,
    ) -> None:
        self._answered = answered
        self._unreturned = unreturned
        self._cookies = cookies
        self._run = run
        self._send = send
        self._policy = policy
        self._response = _KeptResponse()
        self._end: ResponseEnd | None = None
        self._answering: asyncio.Task[None] | None = None
        self._returned = False
        self._passing = False

    async def run(self, application: Awaitable[None]) -> None:
        """Let the application answer; its response is stored before it is sent."""
        try:
            await application
            if self._end is None and not self._passing:
                raise RuntimeError("the application returned without a complete response")
        except BaseException as problem:
            if self._end is not None and isinstance(problem, Exception):
                await self._until_answered()
            elif self._end is None and not self._passing:
                self._run.leave()
                await fail(self._run, self._policy, problem)
            raise
        else:
            if self._end is not None:
                await self._until_answered()
        finally:
            self._run.close()

    async def store(self, event: AsgiEvent) -> None:
        """Keep what the application sends, and hand it to the ledger when it is complete."""
        if self._passing:
            return await self._send(event)
        if self._end is not None:
            raise RuntimeError("the application sent something behind its complete response")
        complete = self._response.add(event)
        if len(self._response.body) > self._policy.response_limit:
            self._answered()
            await self._pass_on(event)
        elif complete:
            self._end = self._ending(self._response.stored())
            self._answered()
            self._unreturned.add(self)
        return None

    def _ending(self, response: StoredResponse | None) -> ResponseEnd:
        self._run.leave()
        return ResponseEnd(self._run, self._policy, response, self._cookies)

    async def _pass_on(self, event: AsgiEvent) -> None:
        """Store that the response is too large to be stored; then send it on, as far as it has arrived."""
        self._passing = True
        response = self._response
        instead = await self._ending(None).instead()
        if instead is not None:
            await reply(self._send, instead)
            self._send = _ignore
            return
        assert response.start is not None
        await self._send(response.start)
        await self._send({**event, "body": bytes(response.body)})
        self._response = _KeptResponse()

    def answer_meanwhile(self) -> None:
        """Answer when the response is stored, unless the application has returned: then `run` does so."""
        if not self._returned and self._end is not None:
            self._end.then(self._stored)

    def _stored(self, _: object) -> None:
        if not self._returned:
            self._answering = asyncio.ensure_future(self._answer())

    def _until_answered(self) -> Awaitable[None]:
        self._returned = True
        return self._answer() if self._answering is None else self._answering

    async def _answer(self) -> None:
        """Send the response, once it is stored."""
        assert self._end is not None
        instead = await self._end.instead()
        if instead is not None:
            return await reply(self._send, instead)
        start, body = self._response.start, self._response.body
        assert start is not None
        await self._send(start)
        await self._send({"type": "http.response.body", "body": bytes(body), "more_body": False})
        return None


class _Unreturned:
    """Calls of one event loop whose response is complete. Most applications return at once then. Those that
    do not, since something comes behind their response, are looked for once for all in the next turn of the
    loop: a callback for each call would cost more than anything else that is done for it here."""

    __slots__ = ("_calls", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: list[_Call] = []

    def add(self, call: _Call) -> None:
        """Look at a call in the next turn of the loop."""
        if not self._calls:
            self.loop.call_soon(self._answer_busy)
        self._calls.append(call)

    def _answer_busy(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call.answer_meanwhile()


async def reply(send: Send, response: StoredResponse) -> None:
    """Send a response."""
    await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _run(app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application."""
    await app(scope, receive, send)


async def _ignore(event: AsgiEvent) -> None:
    """Send nothing: another response has been sent instead."""


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the payload; None if it is over the limit."""
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise _ClientGone
        part = event.get("body", b"")
        limit -= len(part)
        if limit < 0:
            return None
        parts.append(part)
        if not event.get("more_body"):
            return b"".join(parts)


def _without_bypasses(scope: Scope) -> Scope:
    extensions = scope.get("extensions")
    if extensions and any(name in extensions for name in _BYPASSES):
        kept = {name: value for name, value in extensions.items() if name not in _BYPASSES}
        return {**scope, "extensions": kept}
    return scope
