"""What does `@duly.once` cost, against what people use instead?

The contender is AWS Lambda Powertools' idempotency utility on a real redis-server on this machine. The same
function body, the same payload of 214 bytes as JSON, concurrency 100: duly with 100 tasks, Powertools, which
is synchronous, with 100 threads (and with 10, in case a hundred get in each other's way). Its local cache is
off, as by default, and its payload validation too, so that it does less than duly, which tells other
arguments under the same key. Redis runs with its default settings, where a kill -9 forgets the last
seconds; the variant that flushes before it answers, as duly does, is printed too.

Keys come in two kinds. UUIDv7 carries its time, so that the ledger grows at one edge. UUIDv4 is random, and
every call touches other pages: the worst case, and what many have. Redis does not care; it gets UUIDv7.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import sys
import time
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from uuid import uuid4

import msgspec

import duly
from bench.measure import Contender, Figure, Report, folder, rounds, spread
from bench.servers import postgres_url, redis_server
from duly.core.ids import uuid7
from duly.storage.ledger import Ledger

Order = dict[str, str]


def timed() -> str:
    return uuid7(time.time_ns() // 1_000, secrets.randbits(74))


def random() -> str:
    return str(uuid4())


def orders(count: int, key: Callable[[], str] = timed) -> list[Order]:
    made = [{"id": key(), "customer": "c-1", "note": "x" * 142} for _ in range(count)]
    assert len(msgspec.json.encode(made[0])) == 214
    return made


def body(order: Order) -> dict[str, str]:
    return {"paid": order["id"]}


# ── Powertools ───────────────────────────────────────────────────────────────────────────────────


def powertools(port: int) -> Callable[..., Any]:
    """The same function under Powertools."""
    _without_dynamodb()
    warnings.filterwarnings("ignore", module="aws_lambda_powertools")
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    client: Any = redis.Redis(host="127.0.0.1", port=port, decode_responses=True)
    config = IdempotencyConfig(use_local_cache=False)

    @idempotent_function(  # type: ignore[untyped-decorator]  # it is not always installed
        data_keyword_argument="order", persistence_store=CachePersistenceLayer(client=client), config=config
    )
    def charge(order: Order) -> dict[str, str]:
        return body(order)

    return cast("Callable[..., Any]", charge)


def _without_dynamodb() -> None:
    """Powertools imports boto3 for its DynamoDB layer, which is not used here. Where boto3 is missing, empty
    modules take its place so that the import goes through; the Redis layer runs unchanged."""
    if "boto3" in sys.modules or importlib.util.find_spec("boto3") is not None:
        return
    for name, holds in (
        ("boto3", ()),
        ("boto3.dynamodb", ()),
        ("boto3.dynamodb.types", ("TypeDeserializer",)),
        ("botocore", ()),
        ("botocore.exceptions", ("ClientError",)),
    ):
        module = sys.modules[name] = types.ModuleType(name)
        for item in holds:
            setattr(module, item, type(item, (Exception,), {}))


def threaded(charge: Callable[..., Any], threads: int) -> Callable[[list[Order]], Any]:
    return lambda work: asyncio.to_thread(in_threads, charge, work, threads)


def in_threads(charge: Callable[..., Any], work: list[Order], threads: int) -> float:
    def worker(share: list[Order]) -> None:
        for order in share:
            charge(order=order)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # the threads are there
        began = time.perf_counter()
        list(pool.map(worker, [work[i::threads] for i in range(threads)]))
        return len(work) / (time.perf_counter() - began)


# ── duly ─────────────────────────────────────────────────────────────────────────────────────────


def under_once(ledger: Ledger) -> Callable[[Order], Any]:
    @duly.once(ledger, scope="bench", key=lambda order: order["id"])
    async def charge(order: Order) -> dict[str, str]:
        return body(order)

    return charge


def pair(
    name: str, one: Callable[[list[Order]], Any], count: int, key: Callable[[], str] = timed
) -> dict[str, Contender]:
    """Calls with new keys, then the same calls again."""
    latest: list[Order] = []

    async def fresh() -> float:
        latest[:] = orders(count, key)
        return float(await one(latest))

    async def repeat() -> float:
        return float(await one(latest))

    return {name: fresh, f"{name}, repeats": repeat}


async def run(quick: bool) -> Report:
    calls, theirs, turns = (4_000, 1_000, 3) if quick else (10_000, 3_000, 7)
    contenders: dict[str, Contender] = {}
    notes: list[str] = []
    with (
        folder() as place,
        redis_server(place / "redis") as port,
        redis_server(place / "aof", "--appendonly", "yes", "--appendfsync", "always") as durable_port,
        postgres_url() as url,
    ):
        ledger = await duly.open_ledger(f"sqlite:///{place}/ledger.db")
        charge = under_once(ledger)
        scattered = await duly.open_ledger(f"sqlite:///{place}/scattered.db")
        charge_too = under_once(scattered)
        contenders |= pair("once, SQLite", lambda work: spread(work, 100, charge), calls)
        contenders |= pair(
            "once, SQLite, random keys", lambda work: spread(work, 100, charge_too), calls, random
        )
        if port is None or durable_port is None:
            notes.append("redis-server is not installed: nothing to compare with")
        else:
            for name, at, threads in (
                ("Powertools, Redis", port, 100),
                ("Powertools, Redis, 10 threads", port, 10),
                ("Powertools, Redis that flushes", durable_port, 100),
            ):
                contenders |= pair(name, threaded(powertools(at), threads), theirs)
        shared = None
        if url is not None:
            shared = await duly.open_ledger(url)
            other = under_once(shared)
            contenders |= pair("once, PostgreSQL", lambda work: spread(work, 100, other), calls // 2)
        rate = await rounds(contenders, turns)
        await ledger.close()
        await scattered.close()
        if shared is not None:
            await shared.close()
    figures = []
    for name, value in rate.items():
        again = ", repeats" if name.endswith(", repeats") else ""
        rivals = (("Powertools, Redis", "100 threads"), ("Powertools, Redis, 10 threads", "10 threads"))
        compared = [(rate[r + again], to) for r, to in rivals if r in rate and name.startswith("once")]
        if not compared:
            figures.append(Figure(name, value, "calls/s"))
        for theirs_rate, to in compared:
            bound = 5 if "SQLite" in name and not again and to == "100 threads" else None
            figures.append(Figure(name, value, "calls/s", value / theirs_rate, to, bound))
    return Report("@duly.once, concurrency 100", figures, {"rates": rate}, notes)
