"""What the middlewares for ASGI, WSGI and Django have in common: their options, what they say to a request by
its head, and how a handler's response is stored before it is sent.

A framework's own file says how a request is read, how its handler is called, and how a response is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from inspect import isawaitable
from typing import ClassVar, Protocol

from duly.errors import Malformed, ProgramError
from duly.idempotency.blocking import BlockingTransaction, blocking, blocking_within
from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import Run
from duly.integrations.idempotency_key import (
    INCOMPLETE,
    METHODS,
    MISSING,
    CallerOf,
    IdempotencyGuard,
    IdempotencyPolicy,
    KeyedRequest,
    RequestHead,
    StoredResponse,
    caller_named,
    caller_of,
    end,
    fail,
    malformed_key,
    read_key,
    too_large,
)
from duly.runtime.tasks import report
from duly.storage.ledger import Transaction


class BlockingHandler(Protocol):
    """The handler of one request, for the time of its run. Both methods let it answer, and return its
    response as it is stored; None if it is a stream, or too large."""

    def answer(self) -> StoredResponse | None:
        """Let it answer."""

    def answer_within(self, tx: BlockingTransaction) -> StoredResponse | None:
        """Let it answer within a transaction."""


class AsyncHandler(Protocol):
    """The same, of an async handler."""

    async def answer(self) -> StoredResponse | None:
        """Let it answer."""

    async def answer_within(self, tx: Transaction) -> StoredResponse | None:
        """Let it answer within a transaction."""


class GuardedApplication:
    """An application behind an `IdempotencyGuard`."""

    needs_url: ClassVar[str] = ""
    """why the ledger has to be named by its URL; empty if it may be an open one"""

    def __init__(
        self,
        app: Callable[..., object],
        *,
        ledger: LedgerSource,
        routes: Mapping[str, IdempotencyPolicy] | None = None,
        default: IdempotencyPolicy | None = None,
        methods: Iterable[str] = METHODS,
        scope: CallerOf = caller_of,
        name: str = "http",
    ) -> None:
        if self.needs_url and not isinstance(ledger, str):
            raise Malformed(self.needs_url)
        if not callable(scope):
            raise ProgramError(
                f"scope={scope!r} is not a function; it gets the head of a request and names its caller, for "
                'example scope=lambda head: head.headers["x-user"]'
            )
        self._app = app
        self._caller_of = scope
        self._guard = IdempotencyGuard(ledger, routes=routes, default=default, methods=methods, name=name)
        self._going: set[asyncio.Task[StoredResponse | None]] = set()

    def key_of(
        self, policy: IdempotencyPolicy, shown: Sequence[str], length: str
    ) -> str | StoredResponse | None:
        """Return the key of a request, by the values of its headers `Idempotency-Key` and `Content-Length`;
        or the response that refuses it. None: it has no key, and needs none."""
        if not shown:
            return MISSING if policy.required else None
        try:
            key = read_key(shown)
        except Malformed as problem:
            return malformed_key(str(problem))
        if length.isdecimal() and int(length) > policy.request_limit:
            return too_large(policy.request_limit)
        return key

    def refusal_of(self, policy: IdempotencyPolicy, body: bytes, length: str) -> StoredResponse | None:
        """Return the response that refuses a payload, if it is too large, or shorter than it was to be."""
        if len(body) > policy.request_limit:
            return too_large(policy.request_limit)
        if length.isdecimal() and len(body) < int(length):
            return INCOMPLETE
        return None

    def caller(self, head: RequestHead) -> str:
        """Return the caller of a request that is served without an event loop."""
        named = self._caller_of(head)
        return caller_named(blocking(_awaited(named)) if isawaitable(named) else named)

    async def caller_async(self, head: RequestHead) -> str:
        """Return the caller of a request."""
        named = self._caller_of(head)
        return caller_named(await named if isawaitable(named) else named)

    def serve(
        self, policy: IdempotencyPolicy, request: KeyedRequest, handler: BlockingHandler
    ) -> StoredResponse | None:
        """Let a plain handler serve a request, unless it is a repeat; its response is stored. Returns the
        response that is sent, or None: the handler's own."""
        if policy.effect == "exactly_once":
            return blocking_within(
                lambda body: self._guard.transact(policy, request, body), handler.answer_within
            )
        begun = blocking(self._guard.begin(policy, request))
        if isinstance(begun, StoredResponse):
            return begun
        try:
            try:
                response = handler.answer()
            except BaseException as problem:
                begun.leave()
                blocking(fail(begun, policy, problem))
                raise
            begun.leave()
            return blocking(end(begun, policy, response, request.cookies))
        finally:
            begun.close()

    async def serve_async(
        self, policy: IdempotencyPolicy, request: KeyedRequest, handler: AsyncHandler
    ) -> StoredResponse | None:
        """Do the same with an async handler. It goes on if its caller is cancelled, since that is what some
        servers do when a client has gone: the client's repeat gets the response then."""
        if policy.effect == "exactly_once":
            return await self._guard.transact(policy, request, handler.answer_within)
        begun = await self._guard.begin(policy, request)
        if isinstance(begun, StoredResponse):
            return begun
        going = asyncio.create_task(_run(begun, policy, request, handler))
        self._going.add(going)
        going.add_done_callback(self._going.discard)
        try:
            return await asyncio.shield(going)
        except asyncio.CancelledError:
            going.add_done_callback(report("a request whose client has gone"))
            raise


async def _run(
    run: Run, policy: IdempotencyPolicy, request: KeyedRequest, handler: AsyncHandler
) -> StoredResponse | None:
    try:
        try:
            response = await handler.answer()
        except BaseException as problem:
            run.leave()
            await fail(run, policy, problem)
            raise
        run.leave()
        return await end(run, policy, response, request.cookies)
    finally:
        run.close()


async def _awaited(named: Awaitable[object]) -> object:
    return await named
