"""Idempotent requests for Django.

    MIDDLEWARE = [..., "django.contrib.auth.middleware.AuthenticationMiddleware",
                  "duly.integrations.django.DjangoIdempotency"]
    DULY_IDEMPOTENCY = {"ledger": "sqlite:////var/lib/shop/idempotency.db"}

It stands behind the authentication, since keys belong to the authenticated user. Async views are served on
their own event loop, plain ones by the ledger's. A streaming response is passed on and not stored.
"""

from __future__ import annotations

from asyncio import get_running_loop, iscoroutinefunction
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from duly.errors import ProgramError
from duly.idempotency.blocking import BlockingTransaction
from duly.integrations.guarded_application import GuardedApplication
from duly.integrations.idempotency_key import (
    METHODS,
    TRANSACTION,
    IdempotencyPolicy,
    KeyedRequest,
    LoopTransaction,
    RequestHead,
    StoredResponse,
    caller_of,
    response_of,
)
from duly.storage.ledger import Transaction

try:
    from asgiref.sync import markcoroutinefunction, sync_to_async
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
        named = import_string(scope) if isinstance(scope, str) else scope
        self._async = iscoroutinefunction(get_response)
        if self._async:
            markcoroutinefunction(self)
            if not iscoroutinefunction(named):
                named = sync_to_async(named)  # it may ask the database who is logged in
        options["scope"] = named
        super().__init__(get_response, **options)
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Serve one request."""
        if self._async:
            return self._serve_async(request)
        judged = self._judge(request)
        if judged is None:
            return cast("HttpResponseBase", self._get_response(request))
        if isinstance(judged, StoredResponse):
            return response_from(judged)
        policy, key, head = judged
        view = _DjangoView(self._get_response, request, policy)
        return view.sent(self.serve(policy, self._keyed(self.caller(head), key, request), view))

    async def _serve_async(self, request: HttpRequest) -> HttpResponseBase:
        judged = self._judge(request)
        if judged is None:
            return cast("HttpResponseBase", await self._get_response(request))
        if isinstance(judged, StoredResponse):
            return response_from(judged)
        policy, key, head = judged
        view = _AsyncView(self._get_response, request, policy)
        keyed = self._keyed(await self.caller_async(head), key, request)
        return view.sent(await self.serve_async(policy, keyed, view))

    def _judge(
        self, request: HttpRequest
    ) -> tuple[IdempotencyPolicy, str, RequestHead] | StoredResponse | None:
        """Return the policy of a request, its key and its head; or the response that refuses it; or None: it
        is served as it is."""
        method = request.method or "GET"
        policy = self._guard.policy(method, request.path)
        if policy is None:
            return None
        shown, length = request.headers.get("Idempotency-Key"), request.META.get("CONTENT_LENGTH") or ""
        key = self.key_of(policy, () if shown is None else (shown,), length)
        if not isinstance(key, str):
            return key
        refusal = self.refusal_of(policy, request.body, length)
        if refusal is not None:
            return refusal
        headers = {name.lower(): value for name, value in request.headers.items()}
        return policy, key, RequestHead(method, request.path, headers, request)

    def _keyed(self, caller: str, key: str, request: HttpRequest) -> KeyedRequest:
        method, query = request.method or "GET", request.META.get("QUERY_STRING", "").encode()
        cookies = request.META.get("HTTP_COOKIE", "")
        return self._guard.request(caller, key, method, request.path, query, request.body, cookies)


class _DjangoCall:
    """One request on its way through the views."""

    def __init__(
        self, get_response: Callable[[HttpRequest], Any], request: HttpRequest, policy: IdempotencyPolicy
    ) -> None:
        self._get_response = get_response
        self._request = request
        self._policy = policy
        self._response: HttpResponseBase | None = None

    def sent(self, instead: StoredResponse | None) -> HttpResponseBase:
        """Return the response that is sent: the view's own, or another instead."""
        if instead is not None:
            return response_from(instead)
        assert self._response is not None
        return self._response

    def _kept(self, response: HttpResponseBase) -> StoredResponse | None:
        self._response = response
        return stored_form(response, self._policy)


class _DjangoView(_DjangoCall):
    """One that is served without an event loop."""

    def answer(self) -> StoredResponse | None:
        """Let the view answer, and return its response; None if it is a stream, or too large."""
        return self._kept(self._get_response(self._request))

    def answer_within(self, tx: BlockingTransaction) -> StoredResponse | None:
        """Do the same within a transaction."""
        self._request.META[TRANSACTION] = tx
        return self.answer()


class _AsyncView(_DjangoCall):
    """One that is served on an event loop."""

    async def answer(self) -> StoredResponse | None:
        """Let the view answer, and return its response; None if it is a stream, or too large."""
        return self._kept(await self._get_response(self._request))

    async def answer_within(self, tx: Transaction) -> StoredResponse | None:
        """Do the same within a transaction."""
        self._request.META[TRANSACTION] = LoopTransaction(tx, get_running_loop())
        return await self.answer()


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
