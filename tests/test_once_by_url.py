"""`duly.once` with a ledger by its URL, for async and plain functions, and what it says to wrong use."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

import duly
from duly.errors import Failed, LedgerInUse, LedgerUnavailable, Malformed, ProgramError, Stopped
from duly.idempotency import ledgers
from duly.idempotency.blocking import BlockingTransaction
from duly.idempotency.ledgers import close_ledgers
from tests.guard import GUARD


class Colour(Enum):
    RED = "red"


class Order(BaseModel):
    """A pydantic model as an argument and as a result."""

    id: str
    total: Decimal
    at: datetime
    lines: list[str] = []


@dataclass
class ReceiptData:
    """A dataclass as a result."""

    order: UUID
    colour: Colour


class Parcel(msgspec.Struct):
    """A msgspec Struct as a result."""

    order: str
    weight: Decimal


ORDER = Order(id="o-1", total=Decimal("12.50"), at=datetime(2026, 11, 17, tzinfo=UTC), lines=["lamp"])


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    yield f"sqlite:///{tmp_path}/app.db"
    await close_ledgers()


def plain(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db"


# ── async functions ──────────────────────────────────────────────────────────────────────────────


async def test_a_function_is_decorated_before_there_is_a_ledger_or_a_loop(url: str, tmp_path: Path) -> None:
    runs: list[str] = []

    @duly.once(url, scope="shop", key=lambda order: order)
    async def charge(order: str) -> str:
        runs.append(order)
        return f"paid {order}"

    assert not list(tmp_path.iterdir()), "it is opened at the first call"
    assert await asyncio.gather(*(charge("o-1") for _ in range(10))) == ["paid o-1"] * 10
    assert runs == ["o-1"]


def test_it_works_in_one_loop_after_another(tmp_path: Path) -> None:
    runs: list[str] = []

    @duly.once(plain(tmp_path), scope="shop", key=lambda order: order)
    async def charge(order: str) -> str:
        runs.append(order)
        return f"paid {order}"

    for _ in range(3):
        assert asyncio.run(charge("o-1")) == "paid o-1"
    abandoned = asyncio.new_event_loop()
    assert abandoned.run_until_complete(charge("o-1")) == "paid o-1"
    abandoned.close()  # without a word to its ledger
    assert asyncio.run(charge("o-1")) == "paid o-1"
    assert runs == ["o-1"]


async def test_a_single_process_may_have_the_file_to_itself(url: str) -> None:
    runs: list[int] = []

    @duly.once(f"{url}?mode=rw", scope="shop", key=str)
    async def charge(n: int) -> int:
        runs.append(n)
        return n

    for _ in range(2):  # the second time its keys are on the disk, and not in memory
        assert await asyncio.gather(*map(charge, range(20))) == [*range(20)]
        with pytest.raises(LedgerInUse):
            await duly.open_ledger(url)
        await close_ledgers()
    assert sorted(runs) == [*range(20)]


async def test_functions_with_one_url_share_one_ledger(url: str) -> None:
    @duly.once(url, scope="shop", key=str)
    async def one(n: int) -> int:
        return n

    @duly.once(url, scope="shop", key=str, meaning=lambda n: {"n": n})
    async def two(n: int) -> int:
        return n

    assert (await one(1), await two(1)) == (1, 1)


async def test_models_structs_dataclasses_and_plain_types_come_back_as_they_were(url: str) -> None:
    runs: list[str] = []

    @duly.once(url, scope="models", key=lambda order: order.id)
    async def model(order: Order) -> Order:
        runs.append("model")
        return order

    @duly.once(url, scope="many", key=lambda order: order.id)
    async def many(order: Order) -> dict[str, list[Order | None]]:
        runs.append("many")
        return {"all": [order, None]}

    @duly.once(url, scope="receipts", key=lambda order: order.id)
    async def receipt(order: Order) -> ReceiptData:
        runs.append("receipt")
        return ReceiptData(UUID(int=7), Colour.RED)

    @duly.once(url, scope="parcels", key=lambda order: order.id)
    async def parcel(order: Order) -> Parcel | None:
        runs.append("parcel")
        return Parcel(order.id, Decimal("1.5"))

    for function in (model, many, receipt, parcel):
        call: Any = function
        first, again = await call(ORDER), await call(ORDER.model_copy())
        assert (type(first), first) == (type(again), again)
    assert runs == ["model", "many", "receipt", "parcel"]


async def test_another_model_under_the_same_key_is_a_conflict(url: str) -> None:
    @duly.once(url, scope="shop", key=lambda order: order.id)
    async def charge(order: Order) -> str:
        return order.id

    await charge(ORDER)
    with pytest.raises(duly.Conflict):
        await charge(ORDER.model_copy(update={"total": Decimal(13)}))


async def test_without_an_annotation_the_first_caller_gets_what_a_repeat_gets(url: str) -> None:
    @duly.once(url, scope="shop", key=str)
    async def charge(n: int):  # type: ignore[no-untyped-def]  # that is the point
        return ReceiptData(UUID(int=n), Colour.RED)

    first = await charge(1)
    assert first == await charge(1) == {"order": str(UUID(int=1)), "colour": "red"}


async def test_methods_are_compared_by_what_they_are_asked(url: str) -> None:
    inside: Any = duly.once(url, scope="book", key=lambda self, order: order, effect="exactly_once")

    class Till:
        def __init__(self) -> None:
            self.runs = 0

        @duly.once(url, scope="till", key=lambda self, order: order)
        async def charge(self, order: str) -> int:
            self.runs += 1
            return self.runs

        @inside  # type: ignore[untyped-decorator]  # `self` comes before the transaction
        async def book(self, tx: duly.Transaction, order: str) -> int:
            ((count,),) = await tx.fetch("SELECT count(*) FROM messages")
            return int(count) and 1

    assert [await Till().charge("o-1") for _ in range(2)] == [1, 1]
    book: Any = Till().book
    assert [await book("o-1") for _ in range(2)] == [1, 1]


# ── plain functions ──────────────────────────────────────────────────────────────────────────────


def test_a_plain_function_runs_once_in_its_callers_thread(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    @duly.once(plain(tmp_path), scope="shop", key=lambda order: order.id)
    def charge(order: Order) -> Order:
        threads.append(threading.current_thread())
        return order

    assert [charge(ORDER) for _ in range(3)] == [ORDER] * 3
    assert threads == [threading.current_thread()]


def test_plain_calls_of_many_threads_wait_for_the_first(tmp_path: Path) -> None:
    runs: list[str] = []
    gate = threading.Barrier(8)

    @duly.once(plain(tmp_path), scope="shop", key=lambda order: order)
    def charge(order: str) -> str:
        runs.append(order)
        return f"paid {order}"

    def call(_: int) -> str:
        gate.wait(GUARD)
        return charge("o-1")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == ["paid o-1"] * 8
    assert runs == ["o-1"]


def test_an_exception_of_a_plain_function_frees_the_key_or_is_stored(tmp_path: Path) -> None:
    failing = [ValueError("no")]

    def work(order: str) -> str:
        if failing:
            raise failing.pop()
        return order

    again = duly.once(plain(tmp_path), scope="again", key=str)(work)
    with pytest.raises(ValueError, match="no"):
        again("o-1")
    assert again("o-1") == "o-1"
    failing.append(ValueError("no"))
    stored = duly.once(plain(tmp_path), scope="stored", key=str, errors="store")(work)
    with pytest.raises(ValueError, match="no"):
        stored("o-1")
    with pytest.raises(Failed, match="ValueError"):
        stored("o-1")


def test_a_plain_function_that_is_interrupted_ends_as_unknown(tmp_path: Path) -> None:
    @duly.once(plain(tmp_path), scope="shop", key=str)
    def charge(order: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        charge("o-1")
    with pytest.raises(duly.Unknown, match="duly once settle"):
        charge("o-1")


def test_a_plain_function_joins_the_ledgers_transaction(tmp_path: Path) -> None:
    failing = [ValueError("no")]

    @duly.once(plain(tmp_path), scope="shop", key=str, effect="exactly_once")
    def book(tx: BlockingTransaction, order: str) -> int:
        tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
        tx.execute("INSERT INTO bookings VALUES (?)", order)
        if failing:
            raise failing.pop()
        ((count,),) = tx.fetch("SELECT count(*) FROM bookings")
        return int(count)

    with pytest.raises(ValueError, match="no"):
        book("o-1")
    assert [book("o-1"), book("o-1"), book("o-2")] == [1, 1, 2]


WITHIN = "a transaction of this ledger is open here"


def test_a_run_within_the_transaction_of_a_plain_function_is_a_program_error(tmp_path: Path) -> None:
    url = plain(tmp_path)
    charge: Any = duly.once(url, scope="card", key=str)(lambda order: order)

    @duly.once(url, scope="shop", key=str, effect="exactly_once")
    def book(tx: BlockingTransaction, order: str) -> str:
        return str(charge(order))

    with pytest.raises(ProgramError, match=WITHIN):
        book("o-1")
    block = duly.once_block(url, scope="block", key="o-1", effect="exactly_once")
    with pytest.raises(ProgramError, match=WITHIN), block:
        charge("o-1")
    assert charge("o-1") == "o-1"


async def test_plain_and_async_runs_within_the_others_transaction_are_program_errors(url: str) -> None:
    plainly: Any = duly.once(url, scope="card", key=str)(lambda order: order)

    @duly.once(url, scope="shop", key=str, effect="exactly_once")
    async def book(tx: duly.Transaction, order: str) -> str:
        return str(plainly(order))

    @duly.once(url, scope="card", key=str)
    async def charge(order: str) -> str:
        return order

    @duly.once(url, scope="threads", key=str, effect="exactly_once")
    def book_plainly(tx: BlockingTransaction, order: str) -> str:
        return asyncio.run(charge(order))

    with pytest.raises(ProgramError, match=WITHIN):
        await book("o-1")
    with pytest.raises(ProgramError, match=WITHIN):
        await asyncio.to_thread(book_plainly, "o-1")
    assert [plainly("o-1"), await charge("o-1")] == ["o-1", "o-1"]


async def test_a_plain_function_may_be_called_from_async_code(url: str) -> None:
    @duly.once(url, scope="shop", key=str)
    def charge(n: int) -> int:
        return n

    assert [charge(1), await asyncio.to_thread(charge, 1)] == [1, 1]


PROGRAM = """
import multiprocessing, sys, duly

@duly.once(sys.argv[1], scope="shop", key=str)
def charge(n: int) -> int:
    print("charged", n, flush=True)
    return n

charge(0)
multiprocessing.set_start_method("fork")
with multiprocessing.Pool(3) as pool:
    assert pool.map(charge, [0, 1, 2, 1, 2, 0] * 3) == [0, 1, 2, 1, 2, 0] * 3
assert charge(2) == 2
"""


def test_a_program_that_forks_after_its_first_call_charges_each_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, plain(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["charged 0", "charged 1", "charged 2"]


# ── wrong use ────────────────────────────────────────────────────────────────────────────────────


def function(order: str) -> str:
    return order


def generator(order: str) -> Iterator[str]:
    yield order


async def asynchronous(order: str) -> str:
    return order


def make(function: Any, order: str) -> object:
    return function(order)


def parameterless() -> None: ...


class Callable_:  # noqa: N801 - it stands for any object
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("ledger", "options", "decorated", "says"),
    [
        ("app.db", {}, function, "sqlite:///app.db"),
        ("sqlite://app.db", {}, function, "names no file"),
        ("sqlite:///app.db?mode=ro", {}, function, "cannot be written"),
        (None, {}, function, "not a NoneType"),
        (Path("app.db"), {}, function, "by its URL"),
        (function, {}, function, "by its URL"),
        ("memory:", {"key": "o-1"}, function, "key='o-1' is not a function"),
        ("memory:", {"key": None}, function, "key=None is not a function"),
        ("memory:", {"meaning": 7}, function, "meaning=7 is not a function"),
        ("memory:", {"scope": ""}, function, "scope is empty"),
        ("memory:", {"effect": "twice"}, function, "at_most_once"),
        ("memory:", {"errors": "hide"}, function, "'retry' or 'store'"),
        ("memory:", {"keep": 0}, function, "length of time"),
        ("memory:", {"keep": "1d"}, function, "length of time in seconds"),
        ("memory:", {"keep": timedelta(days=1)}, function, "length of time in seconds"),
        ("memory:", {"lease": "30"}, function, "length of time in seconds"),
        ("memory:", {"key": asynchronous}, function, "key= is an async function"),
        ("memory:", {"meaning": asynchronous}, function, "meaning= is an async function"),
        ("sqlite:///app.db", {"effect": "exactly_once"}, parameterless, "transaction as its first argument"),
        ("memory:", {}, generator, "is a generator"),
        ("memory:", {}, staticmethod(function), "below @staticmethod"),
        ("memory:", {}, Callable_(), "is not a function"),
        ("memory:", {}, "charge", "is not a function"),
    ],
)
def test_wrong_use_is_told_when_the_function_is_decorated(
    ledger: Any, options: dict[str, Any], decorated: Any, says: str
) -> None:
    chosen: dict[str, Any] = {"scope": "shop", "key": str} | options
    once: Any = duly.once
    with pytest.raises((Malformed, ProgramError), match=says):
        once(ledger, **chosen)(decorated)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///app.db?mod=rw", "the only option is mode"),
        ("sqlite:///app.db?mode=rww", "use mode=rw, mode=ro or mode=shared"),
        ("sqlite:///app.db?mode=rw&cache=shared", "the only option is mode"),
        ("sqlite:///app.db?cache=4", "cache=4 in 'sqlite:///app.db?cache=4' is not known"),
        ("sqlite:///app.db?mode=", "mode= in 'sqlite:///app.db?mode=' is not known"),
        ("sqlite:///:memory:", "for a ledger in memory write memory:"),
    ],
)
async def test_an_address_with_a_slip_makes_no_file(
    url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Malformed, match=re.escape(says)):
        await duly.open_ledger(url)
    assert list(tmp_path.iterdir()) == []


async def test_a_key_that_was_not_awaited_names_no_call(url: str) -> None:
    @duly.once(url, scope="shop", key=functools.partial(make, asynchronous))
    async def charge(order: str) -> None:
        raise AssertionError

    with pytest.raises(Malformed, match="cannot be <coroutine object asynchronous"):
        await charge("order-1")


async def test_a_function_that_calls_itself_with_its_own_key_is_told(url: str) -> None:
    @duly.once(url, scope="shop", key=str)
    async def charge(order: str) -> str:
        return await charge(order)

    @duly.once(url, scope="plain", key=str)
    def pay(order: str) -> str:
        return str(pay(order))

    for again in range(2):  # the key is free again, so a repeat is told the same
        with pytest.raises(ProgramError, match="would wait for its own end"):
            await charge("order-1")
        with pytest.raises(ProgramError, match="would wait for its own end"):
            await asyncio.to_thread(pay, f"order-{again}")


async def test_a_function_may_call_itself_with_another_key_and_a_task_of_it_with_its_own(url: str) -> None:
    waiting: list[asyncio.Task[int]] = []

    @duly.once(url, scope="shop", key=str)
    async def countdown(n: int) -> int:
        if n == 3:
            waiting.append(asyncio.create_task(countdown(3)))  # it gets the result of the first
        return n + (await countdown(n - 1) if n else 0)

    assert await countdown(3) == 6
    assert await waiting[0] == 6
    assert await countdown(3) == 6


async def test_a_file_that_this_process_owns_is_told_so(url: str) -> None:
    async with await duly.open_ledger(url):

        @duly.once(url, scope="shop", key=str)
        async def charge(order: str) -> str:
            return order

        with pytest.raises(LedgerInUse, match="is open in this process without"):
            await charge("o-1")


async def test_a_ledger_that_was_not_awaited_is_told() -> None:
    not_awaited: Any = duly.open_ledger("memory:")
    with pytest.raises(ProgramError, match="was not awaited"):
        duly.once(not_awaited, scope="shop", key=str)


async def test_a_plain_function_needs_its_ledger_by_url() -> None:
    async with await duly.open_ledger("memory:") as ledger:
        with pytest.raises(ProgramError, match="by URL"):
            duly.once(ledger, scope="shop", key=str)(function)


def test_a_partial_is_a_function(tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    added: Any = duly.once(plain(tmp_path), scope="shop", key=lambda a: a)(functools.partial(add, b=1))
    assert added(1) == 2


@pytest.mark.parametrize("place", ["memory:", "sqlite:///{folder}/app.db"])
def test_a_loop_that_ends_without_shutting_down_leaves_no_task_behind(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    @duly.once(place.format(folder=tmp_path), scope="shop", key=str)
    async def charge(order: str) -> str:
        return order

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(charge("o-1")) == "o-1"
    pending = [task.get_name() for task in asyncio.all_tasks(loop)]
    loop.close()
    asyncio.run(charge("o-2"))
    assert pending == []
    gc.collect()
    assert "Task was destroyed" not in caplog.text


async def test_keys_that_are_no_longer_kept_are_forgotten_again_and_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "PRUNE_SECONDS", 0.01)
    ledger = await ledgers.ledger_at(ledgers.url_to_share(url))
    times = asyncio.Semaphore(0)

    async def prune(**_: object) -> int:
        times.release()
        raise LedgerUnavailable("not now")

    monkeypatch.setattr(ledger, "prune", prune)
    async with asyncio.timeout(GUARD):
        for _ in range(3):
            await times.acquire()


async def test_a_ledger_that_closes_while_keys_are_forgotten_is_no_failure(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledgers, "PRUNE_SECONDS", 0.01)
    ledger = await ledgers.ledger_at(ledgers.url_to_share(url))
    times = asyncio.Semaphore(0)

    async def prune(**_: object) -> int:
        times.release()
        raise Stopped("this ledger is closed")

    monkeypatch.setattr(ledger, "prune", prune)
    async with asyncio.timeout(GUARD):
        for _ in range(2):
            await times.acquire()
    assert "failed" not in caplog.text
