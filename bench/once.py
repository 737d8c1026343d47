"""What does `@duly.once` cost, against what people use instead?

The contender is AWS Lambda Powertools' idempotency utility on a real redis-server on this machine. The same
function body, the same payload of 214 bytes as JSON, concurrency 100: duly with 100 tasks, Powertools, which
is synchronous, with 100 threads (and with 10, in case a hundred get in each other's way). Its local cache is
off, as by default, and its payload validation too, so that it does less than duly, which tells other
arguments under the same key. Redis runs with its default settings, where a kill -9 forgets the last
seconds; the variant that flushes before it answers, as duly does, is printed too.
"""

from __future__ import annotations

import asyncio
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
from duly.ledger import Ledger

Order = dict[str, str]


def orders(count: int) -> list[Order]:
    made = [{"id": str(uuid4()), "customer": "c-1", "note": "x" * 142} for _ in range(count)]
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

    @idempotent_function(  # type: ignore[untyped-decorator]
        data_keyword_argument="order", persistence_store=CachePersistenceLayer(client=client), config=config
    )
    def charge(order: Order) -> dict[str, str]:
        return body(order)

    return cast("Callable[..., Any]", charge)


def _without_dynamodb() -> None:
    """Powertools imports boto3 for its DynamoDB layer, which is not used here. Where boto3 is missing, empty
    modules take its place so that the import goes through; the Redis layer runs unchanged."""
    try:
        import boto3  # noqa: F401
    except ImportError:
        for name, holds in (
            ("boto3", ()),
            ("boto3.dynamodb", ()),
            ("boto3.dynamodb.types", ("TypeDeserializer",)),
            ("botocore", ()),
            ("botocore.exceptions", ("ClientError",)),
        ):
            module = sys.modules.setdefault(name, types.ModuleType(name))
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


def pair(name: str, one: Callable[[list[Order]], Any], count: int) -> dict[str, Contender]:
    """Calls with new keys, then the same calls again."""
    latest: list[Order] = []

    async def fresh() -> float:
        latest[:] = orders(count)
        return float(await one(latest))

    async def repeat() -> float:
        return float(await one(latest))

    return {name: fresh, f"{name}, repeats": repeat}


async def run(quick: bool) -> Report:
    calls, theirs, turns = (4_000, 1_000, 3) if quick else (10_000, 3_000, 5)
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
        contenders |= pair("once, SQLite", lambda work: spread(work, 100, charge), calls)
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
        if shared is not None:
            await shared.close()
    figures = []
    for name, value in rate.items():
        rival = "Powertools, Redis" + (", repeats" if name.endswith("repeats") else "")
        ratio = value / rate[rival] if rival in rate and name.startswith("once") else None
        bound = 5 if name == "once, SQLite" else None
        figures.append(Figure(name, value, "calls/s", ratio, "Powertools" if ratio else "", bound))
    return Report("@duly.once, concurrency 100", figures, {"rates": rate}, notes)
