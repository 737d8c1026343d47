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

from duly.idempotency.blocking import BlockingTransaction
from duly.integrations.guarded_application import GuardedApplication
from duly.integrations.idempotency_key import (
    TRANSACTION,
    IdempotencyPolicy,
    KeyedRequest,
    RequestHead,
    StoredResponse,
    response_of,
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
        found = None if policy is None else self._keyed(environ, path, policy)
        if policy is None or found is None:
            return self._app(environ, start_response)
        if isinstance(found, StoredResponse):
            return send(start_response, found)
        call = _WsgiCall(self._app, environ, policy)
        try:
            instead = self.serve(policy, found, call)
        except BaseException:
            call.close()
            raise
        if instead is None:
            return call.pass_on(start_response)
        call.close()
        return send(start_response, instead)

    def _keyed(
        self, environ: Environ, path: str, policy: IdempotencyPolicy
    ) -> KeyedRequest | StoredResponse | None:
        """Return what stands for a request; or the response that refuses it; or None: it is served as it
        is."""
        shown, length = environ.get("HTTP_IDEMPOTENCY_KEY"), environ.get("CONTENT_LENGTH") or ""
        key = self.key_of(policy, () if shown is None else (shown,), length)
        if not isinstance(key, str):
            return key
        body = _read_body(environ, length, policy.request_limit)
        refusal = self.refusal_of(policy, body, length)
        if refusal is not None:
            return refusal
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "").encode("latin-1")
        caller = self.caller(RequestHead(method, path, _headers(environ), environ))
        return self._guard.request(caller, key, method, path, query, body, environ.get("HTTP_COOKIE", ""))


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

    def answer(self) -> StoredResponse | None:
        """Let the application answer, and return its response; None if it is too large."""
        self._parts = self._app(self._environ, self._start)
        self._rest = iter(self._parts)
        for part in self._rest:
            self._body += part
            if len(self._body) > self.policy.response_limit:
                return None
        if not self._status[:3].isdigit():
            raise RuntimeError(f"the application began its response with the status {self._status!r}")
        headers = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers)
        return response_of(int(self._status[:3]), headers, bytes(self._body))

    def answer_within(self, tx: BlockingTransaction) -> StoredResponse | None:
        """Do the same within a transaction."""
        self._environ[TRANSACTION] = tx
        return self.answer()

    def pass_on(self, start_response: StartResponse) -> Iterable[bytes]:
        """Send the response, and what has not been read of it yet."""
        start_response(self._status, self._headers)
        return _Passing(chain([bytes(self._body)], self._rest), self.close)

    def close(self) -> None:
        """Close the response, as its server would."""
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: object = None
    ) -> Callable[[bytes], object]:
        self._status, self._headers = status, list(headers)
        return self._body.extend


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


def _read_body(environ: Environ, length: str, limit: int) -> bytes:
    """Return the payload, as far as it came; of one without a length, no more than a byte over the limit."""
    payload: bytes = b""
    if length.isdecimal():
        payload = environ["wsgi.input"].read(int(length))
    elif environ.get("wsgi.input_terminated"):
        payload = environ["wsgi.input"].read(limit + 1)
    return payload


def _text(path: str) -> str:
    """Return a path of WSGI, whose characters are bytes, as text."""
    return path.encode("latin-1").decode(errors="replace")


def _headers(environ: Environ) -> dict[str, str]:
    named = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if name in environ}
    return {name.replace("_", "-").lower(): value for name, value in named.items()}
