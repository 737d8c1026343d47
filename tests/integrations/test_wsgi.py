"""The middleware for WSGI applications, in front of a real Flask application."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from flask import Flask, Response, request
from werkzeug.test import Client, TestResponse

from duly.errors import Malformed, ProgramError
from duly.idempotency.blocking import BlockingTransaction
from duly.integrations.idempotency_key import IdempotencyPolicy, RequestHead, transaction_of
from duly.integrations.wsgi import WsgiIdempotency
from tests.guard import GUARD


class FlaskShop:
    """A Flask application behind the middleware, and what it did."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.runs: list[Any] = []
        self.statuses: list[int] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.app = Flask("shop")
        self.app.post("/payments")(self.pay)
        self.app.post("/stream")(self.stream)
        self.app.post("/book")(self.book)
        self.app.post("/book-async")(self.book_async)
        wrapped = WsgiIdempotency(self.app.wsgi_app, ledger=f"sqlite:///{path}/app.db", **options)
        self.app.wsgi_app = wrapped  # type: ignore[method-assign]  # as Flask's own guide does

    def pay(self) -> Response:
        self.runs.append(request.get_json())
        self.begun.set()
        assert self.gate.wait(GUARD)
        status = self.statuses.pop(0) if self.statuses else 201
        if status == 599:
            raise RuntimeError("the card reader is on fire")
        return Response(f"run {len(self.runs)}", status, {"x-receipt": "r-1"})

    def stream(self) -> Response:
        self.runs.append(request.get_json())

        def parts() -> Iterator[bytes]:
            for _ in range(4):
                yield b"x" * 1_000

        return Response(parts())

    def book(self) -> dict[str, int]:
        tx: Any = transaction_of(request.environ)
        assert isinstance(tx, BlockingTransaction)
        tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
        tx.execute("INSERT INTO bookings VALUES (?)", request.get_json()["order"])
        if self.statuses:
            raise RuntimeError("after the booking")
        ((count,),) = tx.fetch("SELECT count(*) FROM bookings")
        return {"bookings": count}

    async def book_async(self) -> dict[str, int]:
        tx = transaction_of(request.environ)
        await tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
        forgotten = tx.execute("INSERT INTO bookings VALUES ('o-1')")
        if request.get_json()["order"] != "forgetful":
            await forgotten
        ((count,),) = await tx.fetch("SELECT count(*) FROM bookings")
        return {"bookings": count}

    def post(self, key: str | None = "k-1", path: str = "/payments", order: str = "o-1") -> TestResponse:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.app.test_client().post(path, json={"order": order}, headers=headers)


def kind(answer: TestResponse) -> tuple[int, str]:
    said = answer.get_json(force=True)
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, said["type"]


def test_a_repeat_gets_the_stored_response_and_nothing_runs(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path)
    first, again = shop.post(), shop.post()
    assert (first.status_code, first.data, first.headers["x-receipt"]) == (201, b"run 1", "r-1")
    assert (again.status_code, again.data, again.headers["x-receipt"]) == (201, b"run 1", "r-1")
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert shop.runs == [{"order": "o-1"}]


def test_refusals_are_problem_documents(tmp_path: Path) -> None:
    policy = IdempotencyPolicy(required=True, request_limit=100)
    shop = FlaskShop(tmp_path, routes={"/payments": policy})
    assert kind(shop.post(None)) == (400, "urn:duly:key-missing")
    assert kind(shop.post("a b")) == (400, "urn:duly:key-malformed")
    assert kind(shop.post(order="o" * 100)) == (413, "urn:duly:payload-too-large")
    shop.post()
    assert kind(shop.post(order="o-2")) == (422, "urn:duly:key-reused")
    assert shop.runs == [{"order": "o-1"}]


def test_a_repeat_while_the_first_runs_in_another_thread_is_409(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path)
    shop.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.post)
        assert shop.begun.wait(GUARD)
        assert kind(shop.post()) == (409, "urn:duly:in-progress")
        shop.gate.set()
        assert first.result(20).status_code == 201
    assert shop.post().data == b"run 1"


@pytest.mark.parametrize("status", [429, 503, 599])
def test_an_answer_that_says_not_now_frees_the_key(tmp_path: Path, status: int) -> None:
    shop = FlaskShop(tmp_path)
    shop.statuses = [status]
    assert shop.post().status_code == (500 if status == 599 else status)
    assert shop.post().data == b"run 2"


def test_a_response_over_the_limit_is_passed_on_and_not_kept(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path, default=IdempotencyPolicy(response_limit=2_500))
    assert len(shop.post(path="/stream").data) == 4_000
    assert kind(shop.post(path="/stream")) == (409, "urn:duly:response-not-stored")
    assert len(shop.runs) == 1


def test_a_handler_joins_the_ledgers_transaction(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path, routes={"POST /book": IdempotencyPolicy(effect="exactly_once")})
    shop.statuses = [500]
    assert shop.post(path="/book").status_code == 500
    shop.statuses = []
    first, again = shop.post(path="/book"), shop.post(path="/book")
    assert first.get_json() == again.get_json() == {"bookings": 1}
    assert again.headers["idempotent-replayed"] == "true"


def test_an_async_view_joins_it_too_and_awaits(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path, default=IdempotencyPolicy(effect="exactly_once"))
    first, again = shop.post(path="/book-async"), shop.post(path="/book-async")
    assert first.get_json() == again.get_json() == {"bookings": 1}
    assert again.headers["idempotent-replayed"] == "true"
    with pytest.raises(ProgramError, match="a statement was not awaited"):
        shop.post("k-2", "/book-async", order="forgetful")
    assert shop.post("k-3", "/book-async").get_json() == {"bookings": 2}, "it was rolled back"


async def test_a_plain_view_that_a_coroutine_calls_does_not_await(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path, default=IdempotencyPolicy(effect="exactly_once"))
    assert shop.post(path="/book").get_json() == {"bookings": 1}


def test_an_opened_ledger_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="by URL"):
        WsgiIdempotency(Flask("shop").wsgi_app, ledger=7)  # type: ignore[arg-type]  # that is the point


def test_a_payload_that_was_cut_off_is_refused_and_its_key_stays_free(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path)
    body = b'{"order": "o-1"}'
    head = f"POST /payments HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with (
        make_server("127.0.0.1", 0, shop.app, handler_class=_Silent) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        for sent in (body[:7], body):
            served = pool.submit(server.handle_request)
            with socket.create_connection(("127.0.0.1", server.server_port)) as client:
                client.sendall(f"{head}Idempotency-Key: k-1\r\n\r\n".encode() + sent)
                client.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: client.recv(65_536), b""))
            served.result(GUARD)
            assert (b"payload-incomplete" in answer) == (sent != body)
    assert b"run 1" in answer
    assert shop.runs == [{"order": "o-1"}]


class _Silent(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_async_function_may_name_the_caller(tmp_path: Path) -> None:
    async def user(head: RequestHead) -> str:
        return head.headers["x-user"]

    shop = FlaskShop(tmp_path, scope=user)
    client = shop.app.test_client()
    for name in ("ann", "bob", "ann"):
        client.post("/payments", json={}, headers={"Idempotency-Key": "k-1", "X-User": name})
    assert len(shop.runs) == 2


def test_an_anonymous_caller_is_given_no_answer_of_other_cookies(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path)

    def post(cookies: str) -> TestResponse:
        client = shop.app.test_client(use_cookies=False)
        return client.post("/payments", json={}, headers={"Idempotency-Key": "k-1", "Cookie": cookies})

    post("session=ann")
    assert kind(post("session=bob")) == (422, "urn:duly:key-reused")
    assert post("session=ann; theme=dark").headers["idempotent-replayed"] == "true"
    assert len(shop.runs) == 1


class _Failing:
    """A WSGI application whose response fails on its way, and what became of it."""

    def __init__(self, status: str) -> None:
        self.status = status
        self.closed = 0

    def __call__(self, environ: Any, start_response: Any) -> _Failing:
        if self.status:
            start_response(self.status, [])
        return self

    def __iter__(self) -> Iterator[bytes]:
        yield b"x"
        if self.status == "200 OK":
            raise RuntimeError("the disk is on fire")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("status", ["", "ok", "200 OK"])
def test_a_response_that_fails_is_closed_and_frees_the_key(tmp_path: Path, status: str) -> None:
    failing = _Failing(status)
    app = WsgiIdempotency(failing, ledger=f"sqlite:///{tmp_path}/app.db")
    for closed in (1, 2):
        with pytest.raises(RuntimeError, match=r"on fire|status"):
            Client(app).post("/", headers={"Idempotency-Key": "k-1"})
        assert failing.closed == closed


def test_two_keys_that_a_server_has_joined_are_refused(tmp_path: Path) -> None:
    shop = FlaskShop(tmp_path)
    for joined in ("a,b", "a, b", '"a","b"'):
        assert kind(shop.post(joined)) == (400, "urn:duly:key-malformed")
    assert shop.post('"a,b"').status_code == 201
