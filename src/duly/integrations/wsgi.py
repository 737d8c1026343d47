"""Idempotent requests for WSGI applications: Flask, Bottle, Pyramid, Django's WSGI handler.

    app.wsgi_app = WsgiIdempotency(app.wsgi_app, ledger="sqlite:///app.db")

The whole response is read and stored before the first byte of it is sent. One that grows over the limit of
its route is let through and not stored: a repeat hears that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from io import BytesIO
from itertools import chain
from typing import Any, TypeAlias

from duly.core.messages import Message
from duly.idempotency.blocking import BlockingTransaction, blocking, blocking_within
from duly.idempotency.runs import Run
from duly.integrations.idempotency_key import (
    TRANSACTION,
    GuardedApplication,
    IdempotencyPolicy,
    RequestHead,
    StoredResponse,
    end,
    fail,
    response_of,
    too_large,
)

Environ: TypeAlias = MutableMapping[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
WsgiApp: TypeAlias = Callable[..., Iterable[bytes]]


class WsgiIdempotency(GuardedApplication):
    """Makes the requests of a WSGI application idempotent by their `Idempotency-Key`; the arguments are those
    of `duly.integrations.asgi.IdempotencyMiddleware`. The ledger is named by its URL."""

    _app: WsgiApp
    needs_url = 'a WSGI application names its ledger by URL: ledger="sqlite:///app.db"'

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        path = _text(environ.get("SCRIPT_NAME", "")) + _text(environ.get("PATH_INFO", ""))
        policy = self._guard.policy(environ["REQUEST_METHOD"], path)
        shown = environ.get("HTTP_IDEMPOTENCY_KEY")
        if policy is None or (shown is None and not policy.required):
            return self._app(environ, start_response)
        found = self._message(environ, path, policy, shown)
        if isinstance(found, StoredResponse):
            return send(start_response, found)
        call = _WsgiCall(self._app, environ, policy)
        if policy.effect == "exactly_once":
            response = blocking_within(lambda body: self._guard.transact(policy, found, body), call.collect)
            return send(start_response, response)
        begun = blocking(self._guard.begin(policy, found))
        if isinstance(begun, StoredResponse):
            return send(start_response, begun)
        return call.run(begun, start_response)

    def _message(
        self, environ: Environ, path: str, policy: IdempotencyPolicy, shown: str | None
    ) -> Message | StoredResponse:
        key = self.judge(policy, () if shown is None else (shown,), environ.get("CONTENT_LENGTH") or "")
        if isinstance(key, StoredResponse):
            return key
        body = _read_body(environ, policy.request_limit)
        if body is None:
            return too_large(policy.request_limit)
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "").encode("latin-1")
        caller = self._caller_of(RequestHead(method, path, _headers(environ), environ))
        return self._guard.message(str(caller), key, method, path, query, body)


class _WsgiCall:
    """One request on its way through the application."""

    def __init__(self, app: WsgiApp, environ: Environ, policy: IdempotencyPolicy) -> None:
        self.policy = policy
        self._app = app
        self._environ = environ
        self._status = ""
        self._headers: list[tuple[str, str]] = []
        self._body = bytearray()
        self._parts: Iterable[bytes] = ()
        self._rest: Iterator[bytes] = iter(())

    def run(self, run: Run, start_response: StartResponse) -> Iterable[bytes]:
        """Let the application answer; its response is stored before it is sent."""
        try:
            try:
                whole = self._call()
            except BaseException as problem:
                run.leave()
                blocking(fail(run, self.policy, problem))
                raise
            run.leave()
            instead = blocking(end(run, self.policy, self._response() if whole else None))
        finally:
            run.close()
        if instead is not None:
            self._close()
            return send(start_response, instead)
        start_response(self._status, self._headers)
        return _Passing(chain([bytes(self._body)], self._rest), self._close)

    def collect(self, tx: BlockingTransaction) -> StoredResponse | None:
        """Let the application answer, and return its response; None if it is too large."""
        self._environ[TRANSACTION] = tx
        try:
            return self._response() if self._call() else None
        finally:
            self._close()

    def _call(self) -> bool:
        """Call the application and read its response; returns False if it is over the limit."""
        self._parts = self._app(self._environ, self._start)
        self._rest = iter(self._parts)
        for part in self._rest:
            self._body += part
            if len(self._body) > self.policy.response_limit:
                return False
        return True

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: object = None
    ) -> Callable[[bytes], object]:
        self._status, self._headers = status, list(headers)
        return self._body.extend

    def _response(self) -> StoredResponse:
        headers = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers)
        return response_of(int(self._status.split(" ", 1)[0]), headers, bytes(self._body))

    def _close(self) -> None:
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()


class _Passing:
    """A response that is passed on, and closed as the server closes it."""

    def __init__(self, parts: Iterator[bytes], close: Callable[[], None]) -> None:
        self._parts = parts
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        return self._parts


def send(start_response: StartResponse, response: StoredResponse) -> Iterable[bytes]:
    """Send a response."""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Status"
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers]
    start_response(f"{response.status} {phrase}", headers)
    return [response.body]


def _read_body(environ: Environ, limit: int) -> bytes | None:
    """Return the payload; None if it is over the limit."""
    length = environ.get("CONTENT_LENGTH") or ""
    if length.isdigit():
        body: bytes = environ["wsgi.input"].read(int(length))
        return body
    if not environ.get("wsgi.input_terminated"):
        return b""
    body = environ["wsgi.input"].read(limit + 1)
    return None if len(body) > limit else body


def _text(path: str) -> str:
    """Return a path of WSGI, whose characters are bytes, as text."""
    return path.encode("latin-1").decode(errors="replace")


def _headers(environ: Environ) -> dict[str, str]:
    named = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if name in environ}
    return {name.replace("_", "-").lower(): value for name, value in named.items()}
