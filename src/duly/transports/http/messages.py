"""HTTP: the same frames, one at a time or in an array, by `POST /v1/messages`; outcomes and lists by GET.

The law: 2xx means stored. The body is the `server_ack` (and the `ack`, if the request waited for it); the
HTTP status says the same.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import ceil
from typing import Final, Protocol

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from duly.core.messages import key_of
from duly.core.operations import Delivery
from duly.core.units import FOREVER, MS, SECOND
from duly.errors import (
    DulyError,
    Malformed,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    RateLimited,
    SenderError,
    Stopped,
    TooManyLogins,
)
from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.logs import RateLimitedLog
from duly.storage.ledger import REFUSALS_KEPT, Ledger, Record, Refusal
from duly.storage.message_filter import OPEN_STATES, MessageFilter
from duly.transports.connections import address_of, visitor_of
from duly.transports.http import bodies
from duly.transports.http.fast_path import LATER, FastAnswer, FastReply
from duly.transports.http.frame_batches import (
    FrameBatch,
    PendingRequests,
    WaitingRequest,
    hand_over,
    is_all,
)
from duly.transports.http.openapi import OPENAPI
from duly.transports.http.page_cursors import PageCursors
from duly.transports.http.query_options import number, seconds_in
from duly.transports.http.schemas import ErrorAnswer
from duly.wire import frames, outgoing
from duly.wire.fields import unpack
from duly.wire.frames import ServerCode
from duly.wire.outgoing import ServerAck

AHEAD: Final = (
    "the ledger's floor is in the future, so new messages are refused as stale; set the clock if it is "
    "wrong, then 'duly floor --mend'"
)
PAGE: Final = 1_000
MARGIN: Final = 200
"""How much later a refusal may be recorded than others that happened after it."""
PAGES: Final = 20
"""How many pages are searched for an id without a time; name the sender to search further."""
LOOKS: Final = 10
"""How many stretches of the ledger are searched for one page, if its reader's messages are few among many."""


_STRANGERS: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


def _of_interest(record: logging.LogRecord) -> bool:
    """Return whether a log record is about the hub itself: problems of a request are answered, not logged."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, _STRANGERS)


LOG: Final = logging.getLogger("duly.http")
"""The logger of aiohttp's own problems."""
LOG.addFilter(_of_interest)
LOG.addFilter(RateLimitedLog())


class TokenCheck(Protocol):
    """Checks tokens."""

    async def login(self, token: str | None, address: str) -> Principal:
        """Return the account of a token; raises `NotAuthenticated`."""
        ...


class HealthReport(Protocol):
    """The health of the hub, as HTTP reports it."""

    def state(self) -> dict[str, object]:
        """Return the state of the hub, as an admin sees it."""
        ...

    @property
    def down(self) -> str | None:
        """Why nothing can be accepted now."""
        ...

    @property
    def problems(self) -> dict[str, str]:
        """The parts of the hub that do not run, and why."""
        ...

    @property
    def refuses_as_stale(self) -> bool:
        """Whether new messages are refused, since the ledger's floor is in the future."""
        ...

    @property
    def degraded(self) -> list[str]:
        """What does not work although requests are accepted."""
        ...


class MessagesBackend(TokenCheck, Protocol):
    """The interface of the hub for HTTP."""

    @property
    def ledger(self) -> Ledger:
        """The ledger that outcomes and lists are read from."""
        ...

    def recognise(self, token: str | None) -> Principal | None:
        """Return the account of a token if memory is sure of it; None if `login` has to be asked."""
        ...

    def begin_all(
        self, sessions: Sequence[WaitingRequest], who: Principal, raws: Sequence[bytes]
    ) -> Coroutine[object, None, None] | None:
        """Do `receive_all` as far as nothing has to be awaited, and return the coroutine for the rest."""
        ...

    async def receive_all(
        self, sessions: Sequence[WaitingRequest], who: Principal, raws: Sequence[bytes]
    ) -> None:
        """Handle frames in order, each with its session; each gets a `server_ack` sooner or later."""
        ...

    @property
    def health(self) -> HealthReport:
        """The state of the hub."""
        ...

    @property
    def activity(self) -> ActivityLog:
        """Records refusals."""
        ...

    @property
    def cursors(self) -> PageCursors:
        """Encrypts and decrypts the cursors of lists."""
        ...

    def sees_from(self, who: Principal) -> int:
        """Return when an account was created (µs); older records belong to another account of that name."""
        ...

    async def hops(self, record: Record, *, receipts_too: bool) -> Sequence[object]:
        """Return the events of a message, as far back as the trail reaches; for a chat line also those of its
        recipients."""
        ...

    async def trace_line(self, record: Record, who: Principal) -> dict[str, object] | None:
        """Return the receipts of a chat line; None for any other message."""
        ...


async def entered(server: TokenCheck, request: web.Request, token: str | None = None) -> Principal:
    """Return the account of this request, by the token in its headers unless another one is given; raises
    `NotAuthenticated`."""
    who = await server.login(token or token_in(request), address_of(request))
    request[bodies.ACCOUNT] = who.name
    visitor = visitor_of(request)
    if visitor is not None:
        visitor.recognise(who.name)
    return who


def token_in(request: web.Request) -> str | None:
    """Return the token in the headers of a request."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip() or None


async def _answered(batch: FrameBatch, wait: float = 0.0) -> FastAnswer:
    """Answer a request when its accepted frames have ended, or after `wait` seconds."""
    if wait:
        await batch.ended(wait)
    return _answer(batch, wait)


def _answer(batch: FrameBatch, wait: float = 0.0) -> FastAnswer:
    """Return the answer to a request from the answers to its frames."""
    if batch.single:
        return answer_to(batch.waiters[0], wait)
    return FastAnswer(200, outgoing.encode_all([waiter.answer for waiter in batch.waiters]))


def routes(http: MessagesEndpoint) -> list[web.RouteDef]:
    """Return the routes of frames, outcomes and lists."""
    return [
        web.post("/v1/messages", http.guarded(http.post)),
        web.get("/v1/messages", http.guarded(http.list_messages)),
        web.get("/v1/messages/{scope}/{id}", http.guarded(http.outcome)),
        web.get("/v1/refusals", http.guarded(http.refusals)),
        web.get("/v1/state", http.guarded(http.state)),
        web.get("/v1/health", http.health),
        web.get("/v1/openapi.json", http.openapi),
    ]


class MessagesEndpoint:
    """Accepts frames, and shows messages, refusals and the hub's state."""

    def __init__(self, server: MessagesBackend) -> None:
        self._server = server
        self._pending = PendingRequests(_answer, said_of)

    def guarded(
        self, inner: Callable[[web.Request, Principal], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a handler that authenticates the caller first, and answers errors."""

        async def serve(request: web.Request) -> web.Response:
            try:
                return await inner(request, await entered(self._server, request))
            except DulyError as trouble:
                return problem(trouble)

        return serve

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    async def post(self, request: web.Request, who: Principal) -> web.Response:
        """Accept one frame or a list of frames, and answer with a `server_ack` for each."""
        wait = seconds_in(request.query.get("wait")) if request.query_string else 0.0
        id_ = request.headers.get("Idempotency-Key")
        batch = await self._take(who, await bodies.read(request), wait, id_)
        bodies.give_back(request)
        return response(await _answered(batch, wait))

    async def serve_fast_path(self, token: str | None, address: str, raw: bytes) -> FastAnswer:
        """Serve a request on the fast path: a single body, and no options."""
        account = ""
        try:
            who = await self._server.login(token, address)
            account = who.name
            said = await _answered(await self._take(who, raw))
        except DulyError as trouble:
            said = said_of(trouble)
        return FastAnswer(said.status, said.body, said.later, account)

    def begin_fast_path(
        self, token: str | None, raw: bytes, reply: FastReply
    ) -> bool | Coroutine[object, None, None]:
        """Start a request on the fast path without a task, if memory knows the token and nothing has to be
        awaited."""
        who = self._server.recognise(token)
        if who is None:
            return False
        answer = partial(reply, who.name)
        try:
            raws, single = _frames_in(raw)
        except DulyError as trouble:
            answer(said_of(trouble))
            return True
        batch = FrameBatch(len(raws), single=single)
        rest = self._server.begin_all(batch.waiters, who, raws)
        if rest is not None:
            return self._finish(batch, rest, answer)
        self._pending.add(batch, answer)
        return True

    async def _finish(
        self, batch: FrameBatch, rest: Awaitable[None], answer: Callable[[FastAnswer], None]
    ) -> None:
        """Answer a request when the rest of its frames is accepted and each has its `server_ack`."""
        try:
            await rest
            await batch.said()
            said = _answer(batch)
        except DulyError as trouble:
            said = said_of(trouble)
        finally:
            batch.leave()
        answer(said)

    async def _take(
        self, who: Principal, raw: bytes, wait: float = 0.0, id_: str | None = None
    ) -> FrameBatch:
        """Hand the frames of a body to the hub. When this returns the body is no longer kept."""
        raws, single = _frames_in(raw, id_)
        return await hand_over(self._server, who, raws, wait, single=single)

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def outcome(self, request: web.Request, who: Principal) -> web.Response:
        """Answer with one message, its deliveries and its hops, or 404 if the caller may not see it."""
        scope, id_ = request.match_info["scope"], request.match_info["id"]
        key = key_of(scope, id_)
        record = await self._server.ledger.find(key)
        if record is None or not _may_see(who, record) or record.accepted_at < self._server.sees_from(who):
            return error(
                404, "not_found", f"nothing is known of {scope}/{id_} (any more), or it is not yours"
            )
        deliveries = await self._server.ledger.deliveries(key)
        shown = show(record) | {"deliveries": [show_delivery(one) for one in deliveries]}
        line = await self._server.trace_line(record, who)
        hops = await self._server.hops(record, receipts_too=line is not None)
        return as_json(shown | {"hops": hops} | ({} if line is None else {"line": line}))

    async def list_messages(self, request: web.Request, who: Principal) -> web.Response:
        """Answer with a page of messages and a cursor to the next; with `id`, the messages of that id."""
        if (id_ := request.query.get("id")) is not None:
            return await self._list_under(id_, who)
        limit = number(request.query.get("limit"), 100, 1_000)
        before, cursors = request.query.get("before"), self._server.cursors
        reader = f"messages/{who.name}/{self._server.sees_from(who)}"
        found, following = await self._page(
            who,
            request.query.get("scope") if who.role is Role.ADMIN else who.name,
            request.query.get("open") in ("1", "true"),
            cursors.decrypt(reader, before) if before else None,
            limit,
        )
        begins = None if following is None else cursors.encrypt(reader, following)
        return as_json({"messages": [show(record) for record in found], "next": begins})

    async def _list_under(self, id_: str, who: Principal) -> web.Response:
        """Answer with the messages of this id: an admin gets all, any other account its own."""
        if who.role is Role.ADMIN:
            found = await self._server.ledger.with_id(id_)
        else:
            own = await self._server.ledger.find(key_of(who.name, id_))
            found = [] if own is None else [own]
        born = self._server.sees_from(who)
        return as_json({"messages": [show(one) for one in found if one.accepted_at >= born], "next": None})

    async def _page(
        self, who: Principal, scope: str | None, open_only: bool, place: bytes | None, limit: int
    ) -> tuple[list[Record], bytes | None]:
        """Return messages below `place`, and where the next page begins (None if nothing follows). After a
        long search without a result, the caller has to continue."""
        born = self._server.sees_from(who)
        found: list[Record] = []
        wanted = MessageFilter(scope, states=OPEN_STATES if open_only else frozenset())
        for _ in range(LOOKS):
            page = await self._server.ledger.newest(wanted=wanted, before=place, limit=limit + 1 - len(found))
            found += [record for record in page.records if record.accepted_at >= born]
            if len(found) > limit:
                return found[:limit], found[limit - 1].place
            if page.next is None:
                return found, None
            place = page.next
        return found, place

    async def refusals(self, request: web.Request, who: Principal) -> web.Response:
        """Answer with recent refusals: an admin gets all, any other account its own."""
        limit = number(request.query.get("limit"), 100, 10_000)
        before, cursors, born = (
            request.query.get("before"),
            self._server.cursors,
            self._server.sees_from(who),
        )
        reader = f"refusals/{who.name}/{born}"
        place = cursors.decrypt(reader, before) if before is not None else b""
        await self._server.activity.settle()
        first = who.role is Role.ADMIN and not place
        mine = await self._server.ledger.refusals(limit + MARGIN if first else REFUSALS_KEPT)
        if who.role is not Role.ADMIN:  # those of others in between do not count
            mine = [r for r in mine if r.scope == who.name and r.at >= born]
        page, following = _refusals_after(place, mine, limit)
        shown = [msgspec.to_builtins(r) | {"at": r.at // MS} for r in page]
        begins = None if following is None else cursors.encrypt(reader, following)
        return as_json({"refusals": shown, "next": begins})

    async def state(self, request: web.Request, who: Principal) -> web.Response:
        """Answer an admin with the state of the hub."""
        if who.role is not Role.ADMIN:
            raise NotAllowed("only an admin may ask for the hub's state")
        return as_json(self._server.health.state())

    async def health(self, request: web.Request) -> web.Response:
        """Answer load balancers whether this hub accepts requests. It needs no token."""
        state = self._server.health
        parts, down = sorted(state.problems), state.down
        if not parts and not down:
            degraded = state.degraded
            return as_json({"ok": True} | ({"degraded": degraded} if degraded else {}))
        ahead = state.refuses_as_stale
        detail = [AHEAD if ahead else "nothing can be stored just now"] if down else []
        if parts:
            detail.append(f"not running: {', '.join(parts)}; the hub's log says why")
        named = sorted([*parts, *(["floor"] if ahead else [])])
        return as_json({"error": "internal", "detail": "; ".join(detail), "parts": named}, 503)

    async def openapi(self, request: web.Request) -> web.Response:
        """Answer with the OpenAPI description of these routes; it needs no token."""
        return as_json(OPENAPI)


def _frames_in(raw: bytes, id_: str | None = None) -> tuple[list[bytes], bool]:
    """Return the frames of a body, and whether it is a single one outside an array; `id_` is its id."""
    many = frames.decode_batch(raw)
    if many is None:
        return [raw if id_ is None else _with_id(raw, id_)], True
    return many, False


def _refusals_after(place: bytes, found: list[Refusal], limit: int) -> tuple[list[Refusal], bytes | None]:
    """Return a page of refusals, newest first, and where the next one begins: a time, and how many of that
    time come before."""
    rows = sorted(found, key=lambda one: one.at, reverse=True)
    at, seen = int.from_bytes(place[:8], "big"), int.from_bytes(place[8:], "big")
    if place:
        same = [one for one in rows if one.at == at]
        rows = same[seen:] + [one for one in rows if one.at < at]
    page = rows[:limit]
    if len(rows) <= limit:
        return page, None
    last = page[-1].at
    count = sum(one.at == last for one in page) + (seen if place and last == at else 0)
    return page, last.to_bytes(8, "big") + count.to_bytes(4, "big")


def show(record: Record) -> dict[str, object]:
    """Return a record in a readable form, with times in milliseconds."""
    m, answer = record.message, record.answer
    shown: dict[str, object] = {
        "scope": m.scope,
        "id": m.id,
        "type": m.kind,
        "to": m.recipient,
        "state": record.state.word,
        "accepted_at": record.accepted_at // MS,
        "moved_at": record.moved_at // MS,
    }
    if m.expires:
        shown["exp"] = m.expires // MS
    if answer is not None:
        said = unpack(answer.data)
        shown["ack"] = (
            dict(said.fields)
            | {"code": answer.code, "detail": answer.reason}
            | ({"data": said.data} if said.data else {})
        )
    return shown


def show_delivery(delivery: Delivery) -> dict[str, object]:
    """Return a delivery as JSON values, with times in milliseconds."""
    shown: dict[str, object] = {
        "channel": delivery.ref.channel,
        "recipient": delivery.ref.recipient,
        "round": delivery.ref.round,
        "state": delivery.state.word,
        "attempts": delivery.attempt,
        "error": delivery.error,
    }
    if not delivery.state.terminal and delivery.due < FOREVER:
        shown["next_at"] = delivery.due // MS
    return shown


def _may_see(who: Principal, record: Record) -> bool:
    return who.role is Role.ADMIN or who.name in (record.message.scope, record.message.recipient)


def _with_id(raw: bytes, id_: str) -> bytes:
    frame = frames.decode(raw)
    if frame.seq_id not in (None, id_):
        raise Malformed("the Idempotency-Key and the frame's seq_id differ; send one of them")
    return frames.encode(msgspec.structs.replace(frame, seq_id=id_))


def answer_to(waiter: WaitingRequest, wait: float) -> FastAnswer:
    """Return the answer to one frame, with its HTTP status."""
    frame = waiter.answer
    if waiter.ended is not None:
        return FastAnswer(200, outgoing.encode(frame))
    status = 202 if wait and frame.code == ServerCode.DUPLICATE else _status(frame)
    if is_all(frame):
        status = 200
    if frame.error == RateLimited.word:
        status = 429
    later = LATER if frame.code in (ServerCode.OFFLINE, ServerCode.INTERNAL) else 0
    return FastAnswer(status, outgoing.encode(frame), _whole(frame.retry_after) or later)


def _whole(seconds: float | None) -> int:
    """Return whole seconds for a header, rounded up."""
    return 0 if not seconds else max(1, ceil(seconds))


_JSON: Final = {"Content-Type": "application/json"}


_STATUS: Final = {
    "too_large": 413,
    "id_conflict": 422,
    "not_authenticated": 401,
    "not_allowed": 403,
    "denied": 403,
    "offline": 503,
    "internal": 503,
}


def _status(frame: ServerAck) -> int:
    match frame.code:
        case ServerCode.ACCEPTED:
            return 202
        case ServerCode.DUPLICATE:
            return 409
        case _:
            return _STATUS.get(frame.error or "", 400)


def response(said: FastAnswer) -> web.Response:
    """Turn an answer of the fast path into one of aiohttp."""
    headers = _JSON | {"Retry-After": str(said.later)} if said.later else _JSON
    return web.Response(body=said.body, status=said.status, headers=headers)


def as_json(value: object, status: int = 200) -> web.Response:
    """Return a response with this value as JSON."""
    return response(FastAnswer(status, msgspec.json.encode(value)))


def error(status: int, word: str, detail: str, wait: int = 0) -> web.Response:
    """Return a response with an error as JSON; `wait` (µs) is how long to wait before the next try."""
    return response(_trouble(status, word, detail, wait))


def _trouble(status: int, word: str, detail: str, wait: int = 0) -> FastAnswer:
    """Return an error as JSON; `wait` (µs) is how long to wait before the next try."""
    later = _whole(wait / SECOND) or (LATER if status in (429, 503) else 0)
    code = ServerCode.INTERNAL if status >= 500 else None
    said = ErrorAnswer(word, detail, code, outgoing.seconds_of(wait) if wait else None)
    return FastAnswer(status, msgspec.json.encode(said), later)


def problem(trouble: DulyError) -> web.Response:
    """Return the response that reports this error to the client."""
    return response(said_of(trouble))


def said_of(trouble: DulyError) -> FastAnswer:
    """Return the answer that reports this error, with the HTTP status for its kind."""
    match trouble:
        case TooManyLogins() | RateLimited():
            status = 429
        case NotAuthenticated():
            status = 401
        case NotAllowed():
            status = 403
        case SenderError():
            status = _STATUS.get(trouble.word, 400)
        case Overloaded() | Stopped():
            status = 503
        case _:
            status = 503 if trouble.retry else 500
    return _trouble(status, trouble.word, str(trouble), trouble.wait)
