"""Idempotent requests for Django.

    MIDDLEWARE = [..., "django.contrib.auth.middleware.AuthenticationMiddleware",
                  "duly.integrations.django.DjangoIdempotency"]
    DULY_IDEMPOTENCY = {"ledger": "sqlite:////var/lib/shop/idempotency.db"}

It stands behind the authentication, since keys belong to the authenticated user. Async views are served on
their own event loop, plain ones by the ledger's. A streaming response is passed on and not stored.
"""

from __future__ import annotations

from asyncio import iscoroutinefunction
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from duly.core.messages import Message
from duly.errors import ProgramError
from duly.idempotency.blocking import BlockingTransaction, blocking, blocking_within
from duly.idempotency.runs import Run
from duly.integrations.idempotency_key import (
    METHODS,
    TRANSACTION,
    GuardedApplication,
    IdempotencyPolicy,
    RequestHead,
    StoredResponse,
    caller_of,
    end,
    fail,
    response_of,
)
from duly.storage.ledger import Transaction

try:
    from asgiref.sync import markcoroutinefunction
    from django.http import HttpRequest, HttpResponse
    from django.http.response import HttpResponseBase
    from django.utils.module_loading import import_string
except ImportError as missing:
    raise ProgramError("duly.integrations.django needs Django: pip install django") from missing


class DjangoIdempotency(GuardedApplication):
    """Makes the requests of a Django project idempotent by their `Idempotency-Key`; the setting
    `DULY_IDEMPOTENCY` holds its options, which are those of
    `duly.integrations.asgi.IdempotencyMiddleware`. `scope` may be a function or its dotted name."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        options = _options()
        scope = options.pop("scope", user_of)
        options["scope"] = import_string(scope) if isinstance(scope, str) else scope
        super().__init__(get_response, **options)
        self._get_response = get_response
        self._async = iscoroutinefunction(get_response)
        if self._async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Serve one request."""
        if self._async:
            return self._serve_async(request)
        found = self._judge(request)
        if found is None:
            return cast("HttpResponseBase", self._get_response(request))
        if isinstance(found, StoredResponse):
            return response_from(found)
        policy, message = found
        if policy.effect == "exactly_once":
            return response_from(
                blocking_within(
                    lambda body: self._guard.transact(policy, message, body),
                    lambda tx: stored_form(self._get_response(_with(request, tx)), policy),
                )
            )
        begun = blocking(self._guard.begin(policy, message))
        if isinstance(begun, StoredResponse):
            return response_from(begun)
        try:
            try:
                response = self._get_response(request)
            except BaseException as problem:
                begun.leave()
                blocking(fail(begun, policy, problem))
                raise
            begun.leave()
            return self._ended(response, blocking(end(begun, policy, stored_form(response, policy))))
        finally:
            begun.close()

    async def _serve_async(self, request: HttpRequest) -> HttpResponseBase:
        found = self._judge(request)
        if found is None:
            return cast("HttpResponseBase", await self._get_response(request))
        if isinstance(found, StoredResponse):
            return response_from(found)
        policy, message = found
        if policy.effect == "exactly_once":

            async def handle(tx: Transaction) -> StoredResponse | None:
                return stored_form(await self._get_response(_with(request, tx)), policy)

            return response_from(await self._guard.transact(policy, message, handle))
        begun = await self._guard.begin(policy, message)
        if isinstance(begun, StoredResponse):
            return response_from(begun)
        return await self._run(begun, request, policy)

    async def _run(self, begun: Run, request: HttpRequest, policy: IdempotencyPolicy) -> HttpResponseBase:
        try:
            try:
                response = await self._get_response(request)
            except BaseException as problem:
                begun.leave()
                await fail(begun, policy, problem)
                raise
            begun.leave()
            return self._ended(response, await end(begun, policy, stored_form(response, policy)))
        finally:
            begun.close()

    def _ended(self, response: HttpResponseBase, instead: StoredResponse | None) -> HttpResponseBase:
        return response if instead is None else response_from(instead)

    def _judge(self, request: HttpRequest) -> tuple[IdempotencyPolicy, Message] | StoredResponse | None:
        """Return the policy of a request and what stands for it; or the response that refuses it; or None: it
        is served as it is."""
        method = request.method or "GET"
        policy = self._guard.policy(method, request.path)
        shown = request.headers.get("Idempotency-Key")
        if policy is None or (shown is None and not policy.required):
            return None
        key = self.judge(policy, () if shown is None else (shown,), request.META.get("CONTENT_LENGTH") or "")
        if isinstance(key, StoredResponse):
            return key
        headers = {name.lower(): value for name, value in request.headers.items()}
        caller = self._caller_of(RequestHead(method, request.path, headers, request))
        query = request.META.get("QUERY_STRING", "").encode()
        return policy, self._guard.message(str(caller), key, method, request.path, query, request.body)


def _with(request: HttpRequest, tx: Transaction | BlockingTransaction) -> HttpRequest:
    request.META[TRANSACTION] = tx
    return request


def user_of(head: RequestHead) -> str:
    """Return the authenticated user of a request, or else the caller by the `Authorization` header."""
    user = getattr(head.raw, "user", None)
    if user is not None and user.is_authenticated:
        return f"user-{user.pk}"
    return caller_of(head)


def stored_form(response: HttpResponseBase, policy: IdempotencyPolicy) -> StoredResponse | None:
    """Return a response as it is stored; None if it is a stream, or too large."""
    if not isinstance(response, HttpResponse) or len(response.content) > policy.response_limit:
        return None
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
    headers += [(b"Set-Cookie", morsel.OutputString().encode()) for morsel in response.cookies.values()]
    return response_of(response.status_code, headers, response.content)


def response_from(stored: StoredResponse) -> HttpResponse:
    """Return a stored response as Django sends it."""
    response = HttpResponse(stored.body, status=stored.status)
    del response["Content-Type"]
    for name, value in stored.headers:
        if name.lower() == b"set-cookie":
            response.cookies.load(value.decode("latin-1"))
        else:
            response[name.decode("latin-1")] = value.decode("latin-1")
    return response


def _options() -> dict[str, Any]:
    from django.conf import settings

    options = getattr(settings, "DULY_IDEMPOTENCY", None)
    if not isinstance(options, Mapping) or "ledger" not in options:
        raise ProgramError('set DULY_IDEMPOTENCY = {"ledger": "sqlite:////path/to/app.db"} in the settings')
    known = {"ledger", "routes", "default", "methods", "scope", "name"}
    if unknown := set(options) - known:
        raise ProgramError(f"DULY_IDEMPOTENCY does not know {', '.join(sorted(unknown))}")
    return {"methods": METHODS, **options}
