"""The `Idempotency-Key` header of HTTP, after the IETF draft: what the middlewares for ASGI, WSGI and Django
have in common.

The laws. A request with a key is stored as begun before its handler runs, and its response is stored before
it is sent. A repeat gets the stored response, marked `Idempotent-Replayed: true`; while the first runs it
gets 409; the same key with another payload gets 422, and nothing runs. Keys belong to the authenticated
caller. What cannot be kept is refused before the handler runs, as far as that can be known.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Literal, TypeAlias, cast

import msgspec
from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import NAME_LIMIT, Answer, Message, Verdict, VerdictKind
from duly.core.operations import Advance
from duly.core.units import seconds
from duly.errors import LedgerError, Malformed, ProgramError
from duly.idempotency.blocking import BlockingTransaction, RemoteTransaction, running_loop
from duly.idempotency.ledgers import LedgerSource, check_source, ledger_at, open_ledger_at
from duly.idempotency.runs import OK, UNSTORABLE, DeclaredEffect, Run, RunEnd, Runs, check_options
from duly.idempotency.values import key_text
from duly.storage.ledger import Ledger, Transaction

DAY: Final = 86_400.0
LIMIT: Final = 1024 * 1024
KIND: Final = "http"
HEADER: Final = b"idempotency-key"
TRANSACTION: Final = "duly.transaction"
"""Where a handler finds the ledger's transaction: in the ASGI scope, the WSGI environ, `request.META`."""
METHODS: Final = frozenset({"POST", "PATCH"})
"""Those that HTTP itself does not call idempotent."""

PASSING: Final = frozenset({408, 409, 421, 423, 425, 429})
"""Statuses that say "not now": the same request may be answered otherwise later, so they are not stored."""

_NOT_STORED: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"date", b"server"}
)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_BARE: Final = re.compile(r"[!#-+\--\[\]-~]+")
"""Visible ASCII without quotes, backslashes and commas: servers join two headers of one name by a comma."""
_PLAIN: Final = re.compile(_BARE.pattern[:-1] + f"{{1,{NAME_LIMIT}}}")


class IdempotencyPolicy(Struct, frozen=True, kw_only=True):
    """What holds for one route: what a crash in the middle means, whether a key is required, how long keys
    are kept (seconds; None: for ever), how large a payload and a response may be (bytes)."""

    effect: DeclaredEffect = "at_most_once"
    required: bool = False
    errors: Literal["retry", "store"] = "retry"
    keep: float | None = DAY
    lease: float = 30.0
    request_limit: int = LIMIT
    response_limit: int = LIMIT

    def __post_init__(self) -> None:
        check_options(self.effect, self.errors, self.keep, self.lease)
        for name, given in (("request_limit", self.request_limit), ("response_limit", self.response_limit)):
            if type(given) is not int or given < 0:
                raise Malformed(f"{name}={given!r} is not a number of bytes")

    def stores(self, status: int) -> bool:
        """Say whether a response of this status is the outcome; if not, the key is free again."""
        return status not in PASSING and (status < 500 or self.errors == "store")


class RequestHead(Struct, frozen=True):
    """The argument of a `scope=` function: the head of a request, and the framework's own object."""

    method: str
    path: str
    headers: Mapping[str, str]
    """by lower-case names"""
    raw: object
    """the ASGI scope, the WSGI environ, or Django's request"""


class StoredResponse(Struct, frozen=True, array_like=True):
    """A response as it is stored, and replayed."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    cookies: list[bytes] = []
    """of an anonymous caller, as `cookie_digests` has them"""

    def replayed(self) -> StoredResponse:
        """Return the response as a repeat gets it."""
        return StoredResponse(self.status, [*self.headers, (b"idempotent-replayed", b"true")], self.body)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(StoredResponse).decode


def response_of(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> StoredResponse:
    """Return a response as it is stored: without what belongs to one connection or one moment."""
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_STORED]
    return StoredResponse(status, kept, body)


def problem(status: int, word: str, title: str, detail: str, *, wait: int = 0) -> StoredResponse:
    """Return a problem document (RFC 9457) as a response."""
    said = {"type": f"urn:duly:{word}", "title": title, "status": status, "detail": detail}
    headers = [(b"content-type", b"application/problem+json")]
    if wait:
        headers.append((b"retry-after", b"%d" % wait))
    body = msgspec.json.encode(said)
    return StoredResponse(status, [*headers, (b"content-length", b"%d" % len(body))], body)


MISSING: Final = problem(
    400,
    "key-missing",
    "Idempotency-Key is missing",
    "this operation is idempotent and requires the header Idempotency-Key; send one, for example a UUID, and "
    "the same one again with every repeat of this request",
)
RUNNING: Final = problem(
    409,
    "in-progress",
    "A request with this Idempotency-Key is in progress",
    "the first request with this key has not ended yet; send the same request again later",
    wait=1,
)
REUSED: Final = problem(
    422,
    "key-reused",
    "Idempotency-Key was used for another request",
    "this key was used before with another payload, or by a caller with other cookies; nothing was run. Use "
    "a new key for a new request",
)
FORGOTTEN: Final = problem(
    422,
    "key-forgotten",
    "Idempotency-Key may have been forgotten",
    "this key is older than keys are remembered; nothing was run. Use a new key",
)
INCOMPLETE: Final = problem(
    400,
    "payload-incomplete",
    "The payload is not complete",
    "the connection ended before the whole payload was there; nothing was run",
)
NOT_STORED: Final = problem(
    409,
    "response-not-stored",
    "The response of the first request was not stored",
    "the request was carried out, and is not carried out again; its response was too large, or a stream",
)
UNKNOWN: Final = problem(
    409,
    "unknown",
    "It is not known whether the first request took effect",
    "its process died or was stopped in the middle; it is not run again. Find out what happened, then use a "
    "new key; an operator can settle this one with 'duly once settle'",
)
FAILED: Final = problem(
    500,
    "failed",
    "The first request failed",
    "its handler failed, and that is its stored outcome; nothing is run again",
)


def malformed_key(detail: str) -> StoredResponse:
    """Return the answer to a key that cannot be one."""
    return problem(400, "key-malformed", "Idempotency-Key is malformed", detail)


def too_large(limit: int) -> StoredResponse:
    """Return the answer to a payload that is larger than what is compared."""
    return problem(
        413,
        "payload-too-large",
        "The payload is too large for an idempotent request",
        f"a request with an Idempotency-Key has at most {limit} bytes here; nothing was run",
    )


def response_too_large(limit: int) -> StoredResponse:
    """Return the answer to a request whose response cannot be stored in the transaction of its effect."""
    return problem(
        500,
        "response-too-large",
        "The response is too large to be stored",
        f"a response of this route has at most {limit} bytes; everything was rolled back",
    )


def unavailable(trouble: LedgerError) -> StoredResponse:
    """Return the answer while the ledger cannot be used."""
    return problem(
        503,
        "ledger-unavailable",
        "The ledger of idempotent requests cannot be used now",
        f"{trouble}; send the same request again, with the same key",
        wait=1,
    )


def read_key(values: Sequence[str]) -> str:
    """Return the key of a request from the values of its headers. Raises `Malformed`.

    The draft wants a structured string, in quotes; a bare word is taken too, since most clients send one.

    >>> read_key(['"8e03978e-40d5-43dd-bc93-6894a57f9324"']), read_key(["order-7"])
    ('8e03978e-40d5-43dd-bc93-6894a57f9324', 'order-7')
    """
    if len(values) > 1:
        raise Malformed("send one Idempotency-Key, not several")
    if _PLAIN.fullmatch(values[0]):  # as most are
        return values[0]
    text = values[0].strip()
    quoted = _QUOTED.fullmatch(text) if text.startswith('"') else None
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else text
    if not key:
        raise Malformed("an Idempotency-Key must not be empty; a UUID is a good one")
    if len(key) > NAME_LIMIT:
        raise Malformed(f"an Idempotency-Key has at most {NAME_LIMIT} characters; a UUID is a good one")
    if not (key.isascii() and key.isprintable()) or (quoted is None and not _BARE.fullmatch(text)):
        raise Malformed(
            'an Idempotency-Key is one string of visible ASCII, such as "8e03978e-40d5-43dd-bc93"; with a '
            "comma in it, it is in quotes"
        )
    return key


CallerOf: TypeAlias = Callable[[RequestHead], str | Awaitable[str | None] | None]

ANONYMOUS: Final = "anonymous"
"""The caller that nothing names. Cookies may be all that tells two of them apart: so a repeat has to show
those that the first request had, and no browser is given the answer of another."""


def cookie_digests(cookies: str) -> frozenset[bytes]:
    """Return a digest of each cookie of a request.

    >>> cookie_digests("session=1; theme=dark") > cookie_digests("session=1")
    True
    """
    found = {part.strip() for part in cookies.split(";")} - {""}
    return frozenset(blake2b(part.encode(errors="replace"), digest_size=12).digest() for part in found)


class KeyedRequest(Struct, frozen=True):
    """A request with a key."""

    message: Message
    """what stands for it in the ledger"""
    cookies: frozenset[bytes]
    """of an anonymous caller, as `cookie_digests` has them"""


def caller_of(head: RequestHead) -> str:
    """Return the caller by the hash of the headers `Authorization` and `X-API-Key`: the default scope of
    keys."""
    return caller_with(head.headers.get("authorization"), head.headers.get("x-api-key"))


def caller_with(authorization: str | None, api_key: str | None) -> str:
    """Return the caller that shows these headers."""
    if authorization is None and api_key is None:
        return ANONYMOUS
    shown = authorization or ""
    if api_key is not None:
        shown = f"{shown}\0{api_key}"
    return f"caller-{blake2b(shown.encode(), digest_size=16).hexdigest()}"


def caller_named(name: object) -> str:
    """Return the caller that a `scope=` function has named; without a name it is anonymous."""
    if name is None or name == "":
        return ANONYMOUS
    try:
        return key_text(name)
    except Malformed:
        raise ProgramError(
            f"scope= names a caller by {name!r}; let it return text that is the same in each of its requests"
        ) from None


class IdempotencyGuard:
    """Decides over requests: which policy holds, and whether a handler runs."""

    def __init__(
        self,
        ledger: LedgerSource,
        *,
        routes: Mapping[str, IdempotencyPolicy] | None = None,
        default: IdempotencyPolicy | None = None,
        methods: Iterable[str] = METHODS,
        name: str = "http",
    ) -> None:
        self._source = check_source(ledger)
        self._default = _checked("default=", IdempotencyPolicy() if default is None else default)
        if isinstance(methods, str):
            raise ProgramError(f"methods={methods!r} is one text; write methods=[{methods!r}]")
        self._methods = frozenset(method.upper() for method in methods)
        if not isinstance(routes, Mapping | None):
            raise ProgramError(
                'routes= is a dict, such as {"POST /orders": IdempotencyPolicy(required=True)}'
            )
        self._routes = [_route(pattern, policy) for pattern, policy in (routes or {}).items()]
        if not (name and name.isprintable() and len(name.encode()) <= NAME_LIMIT // 2):
            raise Malformed(f"name={name!r} is not a name for the keys of an application; use a short word")
        self._name = name
        self._ledger: Ledger | None = None
        self._runs: dict[int, Runs] = {}
        """of each policy, by its identity: a policy's hash is that of all its fields"""

    def policy(self, method: str, path: str) -> IdempotencyPolicy | None:
        """Return the policy of a request; None: its method needs no key."""
        for wanted, pattern, policy in self._routes:
            if wanted in ("", method) and pattern.fullmatch(path):
                return policy if wanted or method in self._methods else None
        return self._default if method in self._methods else None

    def request(
        self, caller: str, key: str, method: str, path: str, query: bytes, body: bytes, cookies: str
    ) -> KeyedRequest:
        """Return a request as it is judged; method, path, query and payload must be the same in a repeat."""
        same = _request_line(method, path, query) + _SIZE(len(body)) + body
        digest = blake2b(same, digest_size=16).digest()
        shown = cookie_digests(cookies) if cookies and caller == ANONYMOUS else _NO_COOKIES
        return KeyedRequest(Message(_scope(self._name, caller), key, KIND, "run", digest), shown)

    async def runs(self, policy: IdempotencyPolicy) -> Runs:
        """Return the runs of a policy on the ledger of this loop."""
        return self._runs_on(await ledger_at(self._source), policy)

    def _runs_on(self, ledger: Ledger, policy: IdempotencyPolicy) -> Runs:
        if ledger is not self._ledger:
            self._ledger, self._runs = ledger, {}
        runs = self._runs.get(id(policy))
        if runs is None:
            keep = None if policy.keep is None else seconds(policy.keep)
            runs = Runs(ledger, effect=policy.effect, keep=keep, lease=seconds(policy.lease))
            self._runs[id(policy)] = runs
        return runs

    async def begin(self, policy: IdempotencyPolicy, request: KeyedRequest) -> Run | StoredResponse:
        """Begin a request that its handler has to end; or return the response that is sent instead."""
        try:
            ledger = open_ledger_at(self._source)
            runs = await self.runs(policy) if ledger is None else self._runs_on(ledger, policy)
            begun = await runs.begin(request.message, wait=False)
        except LedgerError as trouble:
            return unavailable(trouble)
        if isinstance(begun, Verdict):
            return answer_to(begun, request.cookies)
        begun.start()
        return begun

    async def transact(
        self,
        policy: IdempotencyPolicy,
        request: KeyedRequest,
        handle: Callable[[Transaction], Awaitable[StoredResponse | None]],
    ) -> StoredResponse:
        """Let `handle` serve a request inside the ledger's transaction, unless it is a repeat. Its response
        is stored with its effects; if it is not to be stored, or too large (None), all is rolled back."""
        try:
            runs = await self.runs(policy)
            ledger = runs.ledger
            admit = runs.admission(request.message, ledger.clock.now())
            async with ledger.transaction() as tx:
                verdict = (await tx.write(admit)).of(admit)
                if not verdict.fresh:
                    return answer_to(verdict, request.cookies)
                response = await handle(tx)
                if response is None:
                    raise _RolledBack(response_too_large(policy.response_limit))
                if not policy.stores(response.status):
                    raise _RolledBack(response)
                answer = stored_answer(response, request.cookies)
                await tx.write(Advance(request.message.key, State.DONE, ledger.clock.now(), answer))
                return response
        except _RolledBack as undone:
            return undone.response
        except LedgerError as trouble:
            return unavailable(trouble)


_SIZE: Final = struct.Struct(">Q").pack
_NO_COOKIES: Final[frozenset[bytes]] = frozenset()


@lru_cache(maxsize=1024)
def _request_line(method: str, path: str, query: bytes) -> bytes:
    """Return method, path and query as bytes, each behind its size, so that no two requests look alike."""
    parts = (method.encode(), path.encode(errors="surrogatepass"), query)
    return b"".join([piece for part in parts for piece in (_SIZE(len(part)), part)])


@lru_cache(maxsize=1024)
def _scope(name: str, caller: str) -> str:
    """Return the scope of a caller's keys."""
    scope = f"{name}/{caller}"
    if len(scope.encode()) > NAME_LIMIT:
        scope = f"{name}/{blake2b(caller.encode(), digest_size=16).hexdigest()}"
    return scope


class _RolledBack(Exception):
    """The transaction of a request is undone, and this response is sent."""

    def __init__(self, response: StoredResponse) -> None:
        super().__init__()
        self.response = response


class ResponseEnd:
    """The response of a request, handed to the ledger's next flush, before it is sent; None: it is too large
    to be stored."""

    __slots__ = ("_cookies", "_end", "_run", "_stores", "_trouble")

    def __init__(
        self,
        run: Run,
        policy: IdempotencyPolicy,
        response: StoredResponse | None,
        cookies: frozenset[bytes],
    ) -> None:
        self._run = run
        self._cookies = cookies
        self._stores = response is None or policy.stores(response.status)
        self._end: RunEnd | None = None
        self._trouble: LedgerError | None = None
        try:
            if response is None:
                self._end = run.ended(State.DONE, Answer(UNSTORABLE))
            elif self._stores:
                self._end = run.ended(State.DONE, stored_answer(response, cookies))
            else:
                self._end = run.freed(f"HTTP status {response.status}")
        except LedgerError as trouble:
            self._trouble = trouble

    def then(self, call: Callable[[object], object]) -> None:
        """Call this once it is stored, or could not be."""
        if self._end is not None:
            self._end.then(call)

    async def instead(self) -> StoredResponse | None:
        """Wait until it is stored; returns another response if that is what has to be sent instead."""
        try:
            if self._end is None:
                return None if self._trouble is None else unavailable(self._trouble)
            if self._end.held(await self._end.flushed) or not self._stores:
                return None
            # This process was thought dead, and the request was taken over: the outcome that stands is the
            # other.
            outcome = await self._run.outcome()
        except LedgerError as trouble:
            return unavailable(trouble)
        return UNKNOWN if outcome is None else answer_to(outcome, self._cookies)


async def end(
    run: Run, policy: IdempotencyPolicy, response: StoredResponse | None, cookies: frozenset[bytes]
) -> StoredResponse | None:
    """Store the response of a request, before it is sent; None: it is too large. Returns another response if
    that is what has to be sent instead."""
    return await ResponseEnd(run, policy, response, cookies).instead()


async def fail(run: Run, policy: IdempotencyPolicy, problem: BaseException) -> None:
    """Store that the handler of a request raised this."""
    if not isinstance(problem, Exception):
        if not isinstance(problem, GeneratorExit):
            await run.interrupted()
    elif policy.errors == "store":
        await run.end(State.DONE, stored_answer(FAILED))
    else:
        await run.free(f"the handler raised {type(problem).__qualname__}")


def stored_answer(response: StoredResponse, cookies: frozenset[bytes] = _NO_COOKIES) -> Answer:
    """Return the answer that stores a response, with the cookies of the anonymous caller that it belongs
    to."""
    if cookies:
        response = StoredResponse(response.status, response.headers, response.body, list(cookies))
    return Answer(OK, _encode(response))


def answer_to(verdict: Verdict, cookies: frozenset[bytes]) -> StoredResponse:
    """Return the response that a repeat with these cookies gets."""
    if verdict.kind is VerdictKind.CONFLICT:
        return REUSED
    if verdict.kind is not VerdictKind.DUPLICATE:
        return FORGOTTEN
    if verdict.state is None or not verdict.state.terminal:
        return RUNNING
    if verdict.state is not State.DONE or verdict.answer is None:
        return UNKNOWN
    if verdict.answer.code == UNSTORABLE:
        return NOT_STORED
    try:
        stored = _decode(verdict.answer.data)
    except msgspec.DecodeError:  # of a function under `once` with the same scope
        return REUSED
    return stored.replayed() if cookies.issuperset(stored.cookies) else REUSED


class LoopTransaction(Struct, frozen=True):
    """The transaction of a request that an event loop serves, and that loop: plain handlers run in threads
    beside it."""

    transaction: Transaction
    loop: asyncio.AbstractEventLoop

    def here(self) -> Transaction | BlockingTransaction | RemoteTransaction:
        """Return the transaction as this thread can use it; without an event loop its methods block."""
        running = running_loop()
        if running is self.loop:
            return self.transaction
        if running is None:
            return BlockingTransaction(self.transaction, self.loop)
        return RemoteTransaction(self.transaction, self.loop)


def transaction_of(request: object) -> Transaction:
    """Return the ledger's transaction in a handler whose route is `exactly_once`: from a Starlette, FastAPI,
    Litestar or Django request, an ASGI scope or a WSGI environ. In a handler that is a plain function its
    methods are not awaited; in an async one they are, also where the application is a WSGI one."""
    for place in (request, getattr(request, "scope", None), getattr(request, "META", None)):
        if isinstance(place, Mapping) and TRANSACTION in place:
            return cast("Transaction", place[TRANSACTION].here())
    raise ProgramError(
        "there is no transaction here: the route must be effect='exactly_once', and the request must carry "
        "an Idempotency-Key (required=True makes sure of that)"
    )


def _checked(what: str, policy: object) -> IdempotencyPolicy:
    if not isinstance(policy, IdempotencyPolicy):
        raise ProgramError(f"{what} needs an IdempotencyPolicy, not {policy!r}")
    return policy


_ROUTE: Final = re.compile(r"(?:([A-Za-z]+) +)?(/(?:[^{}*]|\{[^{}/*]*\})*)(\*?)")
"""A method, or none; a path in which `{…}` stands for one segment; and perhaps `*` at its end."""


def _route(pattern: str, policy: object) -> tuple[str, re.Pattern[str], IdempotencyPolicy]:
    """Read "POST /orders/{id}" or "/orders/*": `{…}` stands for one segment, `*` at the end for all that
    follows."""
    found = _ROUTE.fullmatch(pattern)
    if found is None:
        raise Malformed(f"the route {pattern!r} is not known; write '/orders/{{id}}' or 'POST /orders/*'")
    method, path, rest = found.groups()
    parts = "[^/]+".join(map(re.escape, re.split(r"\{[^{}/]*\}", path)))
    compiled = re.compile(parts + (".*" if rest else ""))
    return (method or "").upper(), compiled, _checked(f"the route {pattern!r}", policy)
