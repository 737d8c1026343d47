"""The middleware for Django, in front of real plain and async views."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import django
import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path as route

from duly.errors import ProgramError
from duly.idempotency.ledgers import close_ledgers
from duly.integrations.django import DjangoIdempotency
from duly.integrations.idempotency_key import IdempotencyPolicy, RequestHead, transaction_of
from tests.guard import GUARD

RUNS: list[str] = []
FAILING: list[int] = []
GATES: list[asyncio.Event] = []
"""Two of them: a view that waits has begun, and may go on."""


def pay(request: HttpRequest) -> HttpResponse:
    RUNS.append(request.body.decode())
    if FAILING:
        return HttpResponse(status=FAILING.pop())
    response = JsonResponse({"run": len(RUNS)}, status=201, headers={"x-receipt": "r-1"})
    response.set_cookie("seen", "yes")
    return response


async def pay_async(request: HttpRequest) -> HttpResponse:
    return pay(request)


def stream(request: HttpRequest) -> StreamingHttpResponse:
    RUNS.append("stream")
    return StreamingHttpResponse([b"x"] * 10)


def book(request: HttpRequest) -> HttpResponse:
    tx: Any = transaction_of(request)
    tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
    tx.execute("INSERT INTO bookings VALUES ('o-1')")
    ((count,),) = tx.fetch("SELECT count(*) FROM bookings")
    return HttpResponse(f"{count}", status=FAILING.pop() if FAILING else 200)


async def book_async(request: HttpRequest) -> HttpResponse:
    tx = transaction_of(request)
    await tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
    await tx.execute("INSERT INTO bookings VALUES ('o-1')")
    ((count,),) = await tx.fetch("SELECT count(*) FROM bookings")
    return HttpResponse(f"{count}")


async def wait_async(request: HttpRequest) -> HttpResponse:
    RUNS.append("wait")
    begun, gate = GATES
    begun.set()
    await gate.wait()
    return HttpResponse("waited")


urlpatterns = [
    route("wait-async", wait_async),
    route("payments", pay),
    route("payments-async", pay_async),
    route("stream", stream),
    route("book", book),
    route("book-async", book_async),
]

MIDDLEWARE = ["duly.integrations.django.DjangoIdempotency"]


@pytest.fixture(scope="session", autouse=True)
def project() -> None:
    settings.configure(
        ROOT_URLCONF=__name__,
        SECRET_KEY="test",
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=MIDDLEWARE,
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
    )
    django.setup()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Set the options of the middleware."""
    RUNS.clear()
    FAILING.clear()
    with override_settings():

        def configure(**options: Any) -> None:
            settings.DULY_IDEMPOTENCY = {"ledger": f"sqlite:///{tmp_path}/app.db"} | options

        yield configure


def post(where: str = "/payments", key: str = "k-1", body: str = "o-1", **headers: str) -> Any:
    shown = {"Idempotency-Key": key} | headers
    return Client(raise_request_exception=False).post(where, body, content_type="text/plain", headers=shown)


def test_a_repeat_gets_the_stored_response_and_nothing_runs(shop: Callable[..., None]) -> None:
    shop()
    first, again = post(), post()
    assert (first.status_code, first.json(), first["x-receipt"]) == (201, {"run": 1}, "r-1")
    assert (again.status_code, again.json(), again["x-receipt"]) == (201, {"run": 1}, "r-1")
    assert again.cookies["seen"].value == "yes"
    assert "Idempotent-Replayed" not in first
    assert again["Idempotent-Replayed"] == "true"
    assert RUNS == ["o-1"]


def test_refusals_are_problem_documents(shop: Callable[..., None]) -> None:
    shop(default=IdempotencyPolicy(required=True, request_limit=100))
    without = Client().post("/payments", "o-1", content_type="text/plain")
    assert (without.status_code, without.json()["type"]) == (400, "urn:duly:key-missing")
    assert post(key="a b").status_code == 400
    assert post(body="o" * 200).status_code == 413
    post()
    other = post(body="o-2")
    assert (other.status_code, other.json()["type"]) == (422, "urn:duly:key-reused")
    assert other["Content-Type"] == "application/problem+json"
    assert RUNS == ["o-1"]


def test_a_server_error_frees_the_key(shop: Callable[..., None]) -> None:
    shop()
    FAILING.append(503)
    assert post().status_code == 503
    assert post().json() == {"run": 2}


def test_a_stream_is_passed_on_and_not_kept(shop: Callable[..., None]) -> None:
    shop()
    assert post("/stream").getvalue() == b"x" * 10
    assert post("/stream").json()["type"] == "urn:duly:response-not-stored"
    assert RUNS == ["stream"]


def test_the_caller_is_named_by_a_function_or_its_dotted_name(shop: Callable[..., None]) -> None:
    shop(scope="tests.integrations.test_django.caller")
    post(**{"X-User": "ann"})
    post(**{"X-User": "bob"})
    assert post(**{"X-User": "ann"})["Idempotent-Replayed"] == "true"
    assert len(RUNS) == 2


def caller(head: RequestHead) -> str:
    return head.headers["x-user"]


def test_a_view_joins_the_ledgers_transaction(shop: Callable[..., None]) -> None:
    shop(routes={"/book": IdempotencyPolicy(effect="exactly_once")})
    FAILING.append(500)
    assert post("/book").status_code == 500
    first, again = post("/book"), post("/book")
    assert first.content == again.content == b"1", "the first attempt was rolled back"
    assert again["Idempotent-Replayed"] == "true"


def test_an_async_view_joins_it_in_a_wsgi_application(shop: Callable[..., None]) -> None:
    shop(routes={"/book-async": IdempotencyPolicy(effect="exactly_once")})
    first, again = post("/book-async"), post("/book-async")
    assert (first.status_code, first.content, again.content) == (200, b"1", b"1")
    assert again["Idempotent-Replayed"] == "true"
    assert post("/book-async", key="k-2").content == b"2"


async def test_async_views_are_served_on_their_own_loop(shop: Callable[..., None]) -> None:
    shop(default=IdempotencyPolicy(effect="exactly_once"), routes={"/payments-async": IdempotencyPolicy()})
    client = AsyncClient()

    async def call(where: str) -> Any:
        headers = {"Idempotency-Key": f"k{where}"}
        return await client.post(where, "o-1", content_type="text/plain", headers=headers)

    answers = await asyncio.gather(*(call("/payments-async") for _ in range(5)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert (await call("/payments-async"))["Idempotent-Replayed"] == "true"
    assert RUNS == ["o-1"]
    assert [(await call("/book-async")).content for _ in range(2)] == [b"1", b"1"]
    assert [(await call("/book")).content for _ in range(2)] == [b"2", b"2"], "a plain view, in a thread"
    await close_ledgers()


@pytest.mark.parametrize("options", [None, {}, {"ledger": "memory:", "route": {}}])
def test_missing_or_unknown_settings_are_told(shop: Callable[..., None], options: Any) -> None:
    with override_settings(DULY_IDEMPOTENCY=options), pytest.raises(ProgramError, match="DULY_IDEMPOTENCY"):
        Client().post("/payments", "o-1", content_type="text/plain")


WITH_USERS = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    *MIDDLEWARE,
]


async def test_async_views_keep_the_keys_of_users_apart(shop: Callable[..., None], tmp_path: Path) -> None:
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connections

    shop()

    def made() -> list[Any]:
        connections["default"].settings_dict["NAME"] = f"{tmp_path}/users.db"
        call_command("migrate", verbosity=0)
        return [User.objects.create_user(name) for name in ("ann", "bob")]

    ann, bob = await sync_to_async(made)()
    with override_settings(MIDDLEWARE=WITH_USERS):
        for user, runs in ((ann, 1), (bob, 2), (ann, 2)):
            client = AsyncClient()
            await client.aforce_login(user)
            answer = await client.post(
                "/payments-async", "o-1", "text/plain", headers={"Idempotency-Key": "k"}
            )
            assert answer.status_code == 201
            assert len(RUNS) == runs
    await sync_to_async(connections.close_all)()
    await close_ledgers()


async def test_an_async_view_goes_on_when_its_client_has_gone(shop: Callable[..., None]) -> None:
    shop()
    begun, gate = GATES[:] = [asyncio.Event(), asyncio.Event()]
    received: Iterator[Any] = iter(
        [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        event = next(received)
        if event["type"] == "http.disconnect":
            await begun.wait()
        return event

    async def send(event: Any) -> None:
        raise AssertionError("the client has gone")

    headers = [(b"idempotency-key", b"k-1")]
    scope = {"type": "http", "method": "POST", "path": "/wait-async", "headers": headers, "query_string": b""}
    await get_asgi_application()(scope, receive, send)
    gate.set()
    answer = None
    async with asyncio.timeout(GUARD):
        while answer is None or answer.status_code == 409:
            answer = await AsyncClient().post(
                "/wait-async", "", "text/plain", headers={"Idempotency-Key": "k-1"}
            )
    assert answer.content == b"waited"
    assert answer["Idempotent-Replayed"] == "true"
    assert RUNS == ["wait"]
    await close_ledgers()


def test_a_payload_that_was_cut_off_is_refused_and_its_key_stays_free(shop: Callable[..., None]) -> None:
    shop()
    cut = RequestFactory().post("/payments", "o-1", "text/plain", headers={"Idempotency-Key": "k-1"})
    cut.META["CONTENT_LENGTH"] = "5"
    refused: Any = DjangoIdempotency(pay)(cut)
    assert (refused.status_code, RUNS) == (400, [])
    assert post().status_code == 201
