"""The middleware for ASGI applications, in front of real FastAPI, Starlette and Litestar applications."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import BackgroundTasks, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from litestar import Litestar, post
from litestar.middleware import DefineMiddleware
from litestar.params import JSONBody
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse as StarletteJson
from starlette.routing import Route

import duly
from duly.errors import Malformed, ProgramError
from duly.idempotency.ledgers import close_ledgers
from duly.idempotency.runs import DeclaredEffect
from duly.integrations.asgi import IdempotencyMiddleware
from duly.integrations.idempotency_key import IdempotencyPolicy, RequestHead, transaction_of
from tests.guard import GUARD

JSON = {"content-type": "application/json"}


class FastApiPayment(BaseModel):
    """What the application is asked to do."""

    order: str
    amount: int = 1


class FastApiShop:
    """A FastAPI application behind the middleware, what it did, and handles to hold or fail it."""

    def __init__(self, ledger: str, **options: Any) -> None:
        self.runs: list[str] = []
        self.after: list[str] = []
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.statuses: list[int] = []
        self.size = 0
        self.app = FastAPI()
        self.app.post("/payments")(self.pay)
        self.app.post("/stream")(self.stream)
        self.app.post("/book")(self.book)
        self.app.post("/book-plainly")(self.book_plainly)
        self.app.get("/payments")(self.look)
        self.app.add_middleware(IdempotencyMiddleware, ledger=ledger, **options)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def pay(self, payment: FastApiPayment, background: BackgroundTasks) -> Response:
        self.runs.append(payment.order)
        self.begun.set()
        await self.gate.wait()
        background.add_task(self.after.append, payment.order)
        status = self.statuses.pop(0) if self.statuses else 201
        if status == 599:
            raise RuntimeError("the card reader is on fire")
        body = {"paid": payment.order, "run": len(self.runs), "filler": "x" * self.size}
        return JSONResponse(body, status, headers={"x-receipt": "r-1"}, background=background)

    async def stream(self, payment: FastApiPayment) -> Response:
        self.runs.append(payment.order)

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"x" * 1000

        return StreamingResponse(parts(), media_type="text/plain")

    async def book(self, payment: FastApiPayment, request: Request) -> dict[str, int]:
        tx = transaction_of(request)
        await tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
        await tx.execute(f"INSERT INTO bookings VALUES ('{payment.order}')")
        ((count,),) = await tx.fetch("SELECT count(*) FROM bookings")
        self.runs.append(payment.order)
        if self.statuses:
            raise RuntimeError("after the booking")
        return {"bookings": count, "filler": self.size}

    def book_plainly(self, payment: FastApiPayment, request: Request) -> dict[str, int]:
        tx: Any = transaction_of(request)
        tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
        tx.execute(f"INSERT INTO bookings VALUES ('{payment.order}')")
        ((count,),) = tx.fetch("SELECT count(*) FROM bookings")
        return {"bookings": count}

    async def look(self) -> dict[str, int]:
        return {"payments": len(self.runs)}

    async def post(
        self, key: str | None = "k-1", order: str = "o-1", path: str = "/payments", **headers: str
    ) -> httpx.Response:
        shown = JSON | headers | ({} if key is None else {"idempotency-key": key})
        return await self.client.post(path, content=msgspec.json.encode({"order": order}), headers=shown)


@pytest.fixture(params=["sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "postgres":
        yield request.getfixturevalue("postgres_server").create_database()
    else:
        yield f"sqlite:///{tmp_path}/app.db"
    await close_ledgers()


sqlite = pytest.mark.parametrize("ledger", ["sqlite"], indirect=True)


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    said = answer.json()
    assert said["status"] == answer.status_code
    assert said["title"]
    assert said["detail"]
    return answer.status_code, said["type"]


# ── the first request and its repeats ────────────────────────────────────────────────────────────


async def test_a_repeat_gets_the_stored_response_with_status_and_headers_and_nothing_runs(
    ledger: str,
) -> None:
    shop = FastApiShop(ledger)
    first, again = await shop.post(), await shop.post()
    assert (first.status_code, first.json()["run"], first.headers["x-receipt"]) == (201, 1, "r-1")
    assert "idempotent-replayed" not in first.headers
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["x-receipt"] == "r-1"
    assert again.headers["idempotent-replayed"] == "true"
    assert shop.runs == ["o-1"]


@sqlite
async def test_a_quoted_key_is_the_same_as_a_bare_one(ledger: str) -> None:
    shop = FastApiShop(ledger)
    await shop.post("k-1")
    assert (await shop.post('"k-1"')).headers["idempotent-replayed"] == "true"


@sqlite
async def test_without_a_key_and_with_other_methods_all_is_as_it_was(ledger: str) -> None:
    shop = FastApiShop(ledger)
    assert [(await shop.post(None)).status_code for _ in range(2)] == [201, 201]
    assert (await shop.client.get("/payments", headers={"idempotency-key": "k-1"})).json() == {"payments": 2}


@sqlite
async def test_where_a_key_is_required_its_absence_is_400(ledger: str) -> None:
    shop = FastApiShop(ledger, routes={"POST /payments": IdempotencyPolicy(required=True)})
    assert problem(await shop.post(None)) == (400, "urn:duly:key-missing")
    assert shop.runs == []


@sqlite
@pytest.mark.parametrize("key", ["", '""', "a b", "k" * 201, '"ü"'])
async def test_a_malformed_key_is_400(ledger: str, key: str) -> None:
    shop = FastApiShop(ledger)
    answer = await shop.client.post(
        "/payments", content=b'{"order":"o"}', headers=[(b"idempotency-key", key.encode("latin-1"))]
    )
    assert problem(answer) == (400, "urn:duly:key-malformed")
    assert shop.runs == []


@sqlite
async def test_two_keys_in_one_request_are_400(ledger: str) -> None:
    shop = FastApiShop(ledger)
    headers = [("idempotency-key", "a"), ("idempotency-key", "b")]
    answer = await shop.client.post("/payments", content=b"{}", headers=headers)
    assert problem(answer) == (400, "urn:duly:key-malformed")


async def test_the_same_key_with_another_payload_is_422_and_nothing_runs(ledger: str) -> None:
    shop = FastApiShop(ledger)
    await shop.post()
    assert problem(await shop.post(order="o-2")) == (422, "urn:duly:key-reused")
    assert problem(await shop.post(path="/payments?x=1")) == (422, "urn:duly:key-reused")
    assert shop.runs == ["o-1"]


async def test_a_repeat_while_the_first_runs_is_409_and_then_gets_the_response(ledger: str) -> None:
    shop = FastApiShop(ledger)
    shop.gate.clear()
    first = asyncio.create_task(shop.post())
    await shop.begun.wait()
    early = await shop.post()
    assert problem(early) == (409, "urn:duly:in-progress")
    assert int(early.headers["retry-after"]) >= 1
    shop.gate.set()
    assert (await first).status_code == 201
    assert (await shop.post()).json() == (await first).json()
    assert shop.runs == ["o-1"]


async def test_of_many_at_once_one_runs(ledger: str) -> None:
    shop = FastApiShop(ledger)
    answers = await asyncio.gather(*(shop.post() for _ in range(20)))
    assert sorted({answer.status_code for answer in answers}) in ([201], [201, 409])
    assert shop.runs == ["o-1"]


@sqlite
async def test_keys_belong_to_the_authenticated_caller(ledger: str) -> None:
    shop = FastApiShop(ledger)
    answers = [await shop.post(authorization=who) for who in ("Bearer ann", "Bearer bob", "Bearer ann")]
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, None, "true"]
    assert shop.runs == ["o-1", "o-1"]


@sqlite
async def test_the_caller_may_be_named_by_a_function_also_an_async_one(ledger: str) -> None:
    async def user(head: RequestHead) -> str:
        return head.headers["x-user"] * 100

    shop = FastApiShop(ledger, scope=user)
    await shop.post(**{"x-user": "ann", "authorization": "Bearer old"})
    again = await shop.post(**{"x-user": "ann", "authorization": "Bearer new"})
    assert again.headers["idempotent-replayed"] == "true"


# ── what is stored ───────────────────────────────────────────────────────────────────────────────


@sqlite
@pytest.mark.parametrize("status", [200, 404, 422])
async def test_a_final_answer_is_stored(ledger: str, status: int) -> None:
    shop = FastApiShop(ledger)
    shop.statuses = [status]
    assert [(await shop.post()).status_code for _ in range(2)] == [status, status]
    assert len(shop.runs) == 1


@sqlite
@pytest.mark.parametrize("status", [409, 429, 503, 599])
async def test_an_answer_that_says_not_now_frees_the_key(ledger: str, status: int) -> None:
    shop = FastApiShop(ledger)
    shop.statuses = [status]
    assert (await shop.post()).status_code == (500 if status == 599 else status)
    assert (await shop.post()).json()["run"] == 2


@sqlite
async def test_a_failure_is_the_outcome_where_the_route_says_so(ledger: str) -> None:
    shop = FastApiShop(ledger, default=IdempotencyPolicy(errors="store"))
    shop.statuses = [503, 599]
    assert [(await shop.post("a")).status_code for _ in range(2)] == [503, 503]
    assert (await shop.post("b")).status_code == 500
    assert problem(await shop.post("b")) == (500, "urn:duly:failed")
    assert len(shop.runs) == 2


@sqlite
async def test_a_payload_over_the_limit_is_refused_before_the_handler_runs(ledger: str) -> None:
    shop = FastApiShop(ledger, default=IdempotencyPolicy(request_limit=100))
    assert problem(await shop.post(order="o" * 100)) == (413, "urn:duly:payload-too-large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 50

    headers = {"idempotency-key": "k-2"}
    answer = await shop.client.post("/payments", content=chunks(), headers=headers)
    assert problem(answer) == (413, "urn:duly:payload-too-large")
    assert shop.runs == []


@sqlite
async def test_a_response_over_the_limit_is_passed_on_and_a_repeat_hears_that_it_was_not_kept(
    ledger: str,
) -> None:
    shop = FastApiShop(ledger, default=IdempotencyPolicy(response_limit=2_500))
    first = await shop.post(path="/stream")
    assert (first.status_code, len(first.content)) == (200, 4_000)
    assert problem(await shop.post(path="/stream")) == (409, "urn:duly:response-not-stored")
    assert shop.runs == ["o-1"]


@sqlite
async def test_a_stream_within_the_limit_is_stored_whole(ledger: str) -> None:
    shop = FastApiShop(ledger)
    first, again = await shop.post(path="/stream"), await shop.post(path="/stream")
    assert first.content == again.content == b"x" * 4_000
    assert shop.runs == ["o-1"]


@sqlite
async def test_background_tasks_run_once_and_are_no_part_of_the_request(ledger: str) -> None:
    shop = FastApiShop(ledger)
    await shop.post()
    await shop.post()
    assert shop.after == ["o-1"]


class BareAsgi:
    """An application without a framework, and what is sent to its client."""

    def __init__(self, ledger: str) -> None:
        self.app = IdempotencyMiddleware(self.answer, ledger=ledger)
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.behind: list[dict[str, Any]] = []
        self.error: Exception | None = None

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, then do what comes behind the response."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})
        await self.go_on.wait()
        for event in self.behind:
            await send(event)
        if self.error is not None:
            raise self.error

    async def serve(self, key: bytes = b"k-1") -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", key)]}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self.app(scope, receive, self.sent.put)


@sqlite
async def test_a_response_is_sent_when_it_is_stored_also_if_the_application_goes_on(ledger: str) -> None:
    bare = BareAsgi(ledger)
    first = asyncio.create_task(bare.serve())
    assert (await bare.sent.get())["status"] == 200
    assert (await bare.sent.get())["body"] == b"paid"
    assert not first.done()
    await bare.serve()  # a repeat: it is stored
    assert (b"idempotent-replayed", b"true") in (await bare.sent.get())["headers"]
    bare.go_on.set()
    await first


async def test_a_ledger_in_memory_is_enough_for_a_test_of_an_application() -> None:
    bare = BareAsgi("memory:")
    bare.go_on.set()
    await bare.serve()
    await bare.serve()
    events = [bare.sent.get_nowait() for _ in range(4)]
    assert [event["headers"] for event in events[::2]] == [[], [(b"idempotent-replayed", b"true")]]
    assert [event["body"] for event in events[1::2]] == [b"paid", b"paid"]
    await close_ledgers()


@sqlite
async def test_an_application_that_fails_behind_its_response_has_answered(ledger: str) -> None:
    bare = BareAsgi(ledger)
    bare.error = RuntimeError("in a background task")
    bare.go_on.set()
    with pytest.raises(RuntimeError, match="background"):
        await bare.serve()
    assert [(await bare.sent.get())["type"], (await bare.sent.get())["body"]] == [
        "http.response.start",
        b"paid",
    ]


@sqlite
async def test_what_an_application_sends_behind_its_complete_response_is_an_error(ledger: str) -> None:
    bare = BareAsgi(ledger)
    bare.behind = [{"type": "http.response.body", "body": b"twice"}]
    bare.go_on.set()
    with pytest.raises(RuntimeError, match="behind its complete response"):
        await bare.serve()
    assert bare.sent.qsize() == 2


@sqlite
async def test_a_key_is_forgotten_after_its_time(ledger: str) -> None:
    book = await duly.open_ledger(f"{ledger}?mode=shared")
    shop = FastApiShop(ledger, default=IdempotencyPolicy(keep=0.01))
    await shop.post()
    (record,) = (await book.messages()).records
    assert 0 < record.until - record.accepted_at <= 10_000
    await book.close()


# ── crashes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("effect", ["at_most_once", "at_least_once"])
async def test_what_a_request_that_is_cut_short_means_is_declared_by_its_route(
    ledger: str, effect: Any
) -> None:
    shop = FastApiShop(ledger, routes={"/payments": IdempotencyPolicy(effect=effect)})
    shop.gate.clear()
    first = asyncio.create_task(shop.post())
    await shop.begun.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    shop.gate.set()
    again = await shop.post()
    if effect == "at_most_once":
        assert problem(again) == (409, "urn:duly:unknown")
        assert shop.runs == ["o-1"]
    else:
        assert again.json()["run"] == 2


async def test_a_lease_is_renewed_while_the_handler_runs(ledger: str) -> None:
    shop = FastApiShop(ledger, default=IdempotencyPolicy(lease=1.5))
    shop.gate.clear()
    first = asyncio.create_task(shop.post())
    await shop.begun.wait()
    book = await duly.open_ledger(f"{ledger}?mode=shared" if ledger.startswith("sqlite") else ledger)
    (record,) = (await book.messages()).records
    dues: set[int] = set()
    async with asyncio.timeout(GUARD):
        while len(dues) < 2:
            dues |= {each.due for each in await book.deliveries(record.message.key)}
            await asyncio.sleep(0.01)
    assert problem(await shop.post()) == (409, "urn:duly:in-progress")
    shop.gate.set()
    assert (await first).status_code == 201
    await book.close()


# ── exactly once ─────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_joins_the_ledgers_transaction(ledger: str) -> None:
    shop = FastApiShop(ledger, routes={"POST /book": IdempotencyPolicy(effect="exactly_once", required=True)})
    shop.statuses = [500]
    assert (await shop.post(path="/book")).status_code == 500
    shop.statuses = []
    first, again = await shop.post(path="/book"), await shop.post(path="/book")
    assert first.json()["bookings"] == 1, "the first attempt was rolled back"
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert problem(await shop.post(path="/book", order="o-2")) == (422, "urn:duly:key-reused")
    assert shop.runs == ["o-1", "o-1"]


async def test_a_plain_endpoint_joins_the_transaction_without_await(ledger: str) -> None:
    shop = FastApiShop(ledger, default=IdempotencyPolicy(effect="exactly_once"))
    answers = [await shop.post(f"k-{n}", path="/book-plainly") for n in (1, 2, 2)]
    assert [answer.json() for answer in answers] == [{"bookings": 1}, {"bookings": 2}, {"bookings": 2}]


@sqlite
async def test_a_response_that_cannot_be_stored_undoes_the_transaction(ledger: str) -> None:
    policy = IdempotencyPolicy(effect="exactly_once", response_limit=20)
    shop = FastApiShop(ledger, routes={"/book": policy})
    shop.size = 10**12
    assert problem(await shop.post(path="/book")) == (500, "urn:duly:response-too-large")
    shop.size = 1
    assert (await shop.post("k-2", path="/book")).status_code == 500
    big = FastApiShop(ledger, routes={"/book": IdempotencyPolicy(effect="exactly_once")})
    assert (await big.post("k-3", path="/book")).json()["bookings"] == 1


async def test_without_a_transaction_the_error_says_what_to_do() -> None:
    with pytest.raises(ProgramError, match="effect='exactly_once'"):
        transaction_of({"type": "http"})


# ── trouble ──────────────────────────────────────────────────────────────────────────────────────


async def test_while_the_ledger_cannot_be_used_the_answer_is_503_and_nothing_runs(tmp_path: Path) -> None:
    shop = FastApiShop(f"sqlite:///{tmp_path}/missing/app.db")
    answer = await shop.post()
    assert problem(answer) == (503, "urn:duly:ledger-unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert shop.runs == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"ledger": "app.db"}, Malformed, "sqlite:///app.db"),
        ({"ledger": 7}, ProgramError, "by its URL"),
        (
            {"ledger": "memory:", "routes": {"payments": IdempotencyPolicy()}},
            Malformed,
            "write '/orders/{id}'",
        ),
        ({"ledger": "memory:", "routes": {"/payments": "at_most_once"}}, ProgramError, "IdempotencyPolicy"),
        ({"ledger": "memory:", "routes": ["/payments"]}, ProgramError, "routes= is a dict"),
        ({"ledger": "memory:", "default": {"required": True}}, ProgramError, "default= needs an Idemp"),
        ({"ledger": "memory:", "methods": "POST"}, ProgramError, r"write methods=\['POST'\]"),
        ({"ledger": "memory:", "scope": "x-user"}, ProgramError, "scope='x-user' is not a function"),
        ({"ledger": "memory:", "name": ""}, Malformed, "use a short word"),
        ({"ledger": "memory:", "name": "n" * 101}, Malformed, "use a short word"),
    ],
)
async def test_wrong_use_is_told_when_the_application_is_made(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        IdempotencyMiddleware(FastAPI(), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"effect": "at-most-once"}, "effect='at-most-once' is not known; use one of at_most_once"),
        ({"errors": "hide"}, "'retry' or 'store'"),
        ({"keep": 0}, "keep=0 must be a length of time"),
        ({"keep": "1d"}, "length of time in seconds"),
        ({"lease": -1}, "lease=-1 must be"),
        ({"request_limit": -1}, "not a number of bytes"),
        ({"response_limit": "1M"}, "not a number of bytes"),
    ],
    ids=str,
)
def test_a_wrong_policy_is_told_when_it_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Malformed, match=says):
        IdempotencyPolicy(**options)


@pytest.mark.parametrize("route", ["POST", "POST/orders", "orders", "/orders/{id", "/a*b", "POST PUT /a", ""])
def test_a_route_that_would_match_nothing_is_told(route: str) -> None:
    with pytest.raises(Malformed, match=re.escape("write '/orders/{id}' or 'POST /orders/*'")):
        IdempotencyMiddleware(FastAPI(), ledger="memory:", routes={route: IdempotencyPolicy()})


async def test_routes_are_matched_by_method_and_path() -> None:
    from duly.integrations.idempotency_key import IdempotencyGuard

    one, two, three = (IdempotencyPolicy(lease=n) for n in (1, 2, 3))
    guard = IdempotencyGuard("memory:", routes={"put  /orders/{id}": one, "/orders/*": two, "/a.b": three})
    assert guard.policy("PUT", "/orders/7") is one
    assert guard.policy("PUT", "/orders/7/lines") is None
    assert guard.policy("POST", "/orders/7/lines") is two
    assert guard.policy("POST", "/a.b") is three
    assert guard.policy("POST", "/axb") == IdempotencyPolicy()
    assert guard.policy("GET", "/orders/7") is None


# ── other frameworks ─────────────────────────────────────────────────────────────────────────────


@sqlite
async def test_starlette(ledger: str) -> None:
    runs: list[object] = []

    async def pay(request: StarletteRequest) -> StarletteJson:
        runs.append(await request.json())
        return StarletteJson({"run": len(runs)})

    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, ledger=ledger)
    await _twice(app, 200)
    assert runs == [{"order": "o-1"}]


@sqlite
async def test_litestar(ledger: str) -> None:
    runs: list[object] = []

    @post("/payments")
    async def pay(data: JSONBody[dict[str, str]]) -> dict[str, int]:
        runs.append(data)
        return {"run": len(runs)}

    app = Litestar([pay], middleware=[DefineMiddleware(IdempotencyMiddleware, ledger=ledger)])
    await _twice(app, 201)
    assert runs == [{"order": "o-1"}]


async def _twice(app: Any, status: int) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop") as client:
        headers = JSON | {"idempotency-key": "k-1"}
        answers = [
            await client.post("/payments", content=b'{"order":"o-1"}', headers=headers) for _ in range(2)
        ]
    assert [answer.status_code for answer in answers] == [status, status]
    assert [answer.json() for answer in answers] == [{"run": 1}, {"run": 1}]
    assert answers[1].headers["idempotent-replayed"] == "true"


# ── clients that go, and clients that are not who they seem ──────────────────────────────────────


@sqlite
@pytest.mark.parametrize("effect", ["at_most_once", "exactly_once"])
async def test_a_stream_whose_client_has_gone_ends_and_is_not_run_again(
    ledger: str, effect: DeclaredEffect
) -> None:
    runs: list[str] = []
    gone, gate = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        runs.append("run")
        yield b"first "
        gone.set()
        await gate.wait()
        yield b"second"

    async def stream(request: StarletteRequest) -> Response:
        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/", stream, methods=["POST"])])
    guarded = IdempotencyMiddleware(app, ledger=ledger, default=IdempotencyPolicy(effect=effect))
    events: Iterator[Any] = iter(
        [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        event = next(events)
        if event["type"] == "http.disconnect":
            await gone.wait()
        return event

    async def send(event: Any) -> None:
        """The client has gone."""

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": "/"}
    headers = [(b"idempotency-key", b"k-1")]
    first = asyncio.ensure_future(guarded({**scope, "query_string": b"", "headers": headers}, receive, send))
    await gone.wait()
    for _ in range(20):  # turns of the loop in which an application that was told would have stopped
        await asyncio.sleep(0)
    gate.set()
    await first
    transport = httpx.ASGITransport(app=guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        again = await client.post("/", headers={"idempotency-key": "k-1"})
    assert (again.content, again.headers["idempotent-replayed"]) == (b"first second", "true")
    assert runs == ["run"]


@sqlite
async def test_an_answer_is_given_to_no_caller_with_other_cookies_tokens_or_keys(ledger: str) -> None:
    shop = FastApiShop(ledger)
    assert (await shop.post(cookie="session=ann")).status_code == 201
    assert problem(await shop.post(cookie="session=bob")) == (422, "urn:duly:key-reused")
    assert problem(await shop.post()) == (422, "urn:duly:key-reused")
    again = await shop.post(cookie="session=ann; theme=dark")
    assert again.headers["idempotent-replayed"] == "true", "what a response sets meanwhile does not count"
    assert shop.runs == ["o-1"]
    for named in ({"authorization": "Bearer ann"}, {"x-api-key": "a"}, {"x-api-key": "b"}):
        assert "idempotent-replayed" not in (await shop.post(**named)).headers
    rotated = await shop.post(authorization="Bearer ann", cookie="balancer=2")
    assert rotated.headers["idempotent-replayed"] == "true", "a caller with a name is known by it"
    assert len(shop.runs) == 4


@sqlite
@pytest.mark.parametrize("name", [None, ""])
async def test_a_caller_without_a_name_is_anonymous(ledger: str, name: str | None) -> None:
    shop = FastApiShop(ledger, scope=lambda head: name)
    await shop.post(cookie="session=ann")
    assert problem(await shop.post(cookie="session=bob")) == (422, "urn:duly:key-reused")


@sqlite
async def test_a_caller_that_is_named_by_no_text_is_an_error(ledger: str) -> None:
    shop = FastApiShop(ledger, scope=lambda head: object())
    assert (await shop.post()).status_code == 500
    assert shop.runs == []


@sqlite
async def test_a_key_with_a_comma_is_one_only_in_quotes(ledger: str) -> None:
    shop = FastApiShop(ledger)
    assert problem(await shop.post("a,b")) == (400, "urn:duly:key-malformed")
    assert (await shop.post('"a,b"')).status_code == 201
