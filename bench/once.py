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
import contextlib
import importlib.util
import secrets
import sys
import time
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from uuid import UUID, uuid4

import msgspec

import duly
from bench.measure import Contender, Options, Report, figure, folder, rounds, spread
from bench.processes import Server
from bench.servers import postgres_server, redis_server
from duly import Ledger

Order = dict[str, str]


def timed() -> str:
    """A UUIDv7: the time in milliseconds, then random bits."""
    bits = (time.time_ns() // 1_000_000) << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62
    return str(UUID(int=bits | secrets.randbits(62)))


def random() -> str:
    """A UUIDv4."""
    return str(uuid4())


def orders(count: int, key: Callable[[], str] = timed) -> list[Order]:
    made = [{"id": key(), "customer": "c-1", "note": "x" * 142} for _ in range(count)]
    assert len(msgspec.json.encode(made[0])) == 214
    return made


def body(order: Order) -> dict[str, str]:
    return {"paid": order["id"]}


# ── Powertools ───────────────────────────────────────────────────────────────────────────────────


def powertools(server: Server) -> Callable[..., Any]:
    """The same function under Powertools."""
    _without_dynamodb()
    warnings.filterwarnings("ignore", module="aws_lambda_powertools")
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    client: Any = redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=30)
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


async def run(options: Options) -> Report:
    calls, theirs, turns = options.pick((4_000, 1_000, 3), (10_000, 3_000, 7))
    contenders: dict[str, Contender] = {}
    notes: list[str] = []
    async with contextlib.AsyncExitStack() as running:
        root = running.enter_context(folder())
        redis = running.enter_context(redis_server(root / "redis"))
        synced = running.enter_context(
            redis_server(root / "aof", "--appendonly", "yes", "--appendfsync", "always")
        )
        for name, key in (("once, SQLite", timed), ("once, SQLite, random keys", random)):
            url = f"sqlite:///{root}/{key.__name__}.db"
            ledger = await running.enter_async_context(await duly.open_ledger(url))
            contenders |= pair(name, spread_over(under_once(ledger)), calls, key)
        if redis is None or synced is None or importlib.util.find_spec("aws_lambda_powertools") is None:
            notes.append("redis-server or Powertools is not installed: nothing to compare with")
        else:
            for name, at, threads in (
                ("Powertools, Redis", redis, 100),
                ("Powertools, Redis, 10 threads", redis, 10),
                ("Powertools, Redis that flushes", synced, 100),
            ):
                contenders |= pair(name, threaded(powertools(at), threads), theirs)
        server = running.enter_context(postgres_server())
        if server is not None:
            shared = await running.enter_async_context(await duly.open_ledger(server.url))
            contenders |= pair("once, PostgreSQL", spread_over(under_once(shared)), calls // 2)
        rate = await rounds(contenders, turns)
    figures = []
    for name, value in rate.items():
        again = ", repeats" if name.endswith(", repeats") else ""
        rivals = (("Powertools, Redis", "Powertools"), ("Powertools, Redis, 10 threads", "with 10 threads"))
        compared = [(rate[r + again], to) for r, to in rivals if r in rate and name.startswith("once")]
        if not compared:
            figures.append(figure(name, value, "calls/s"))
        figures += [figure(name, value, "calls/s", theirs_rate, to) for theirs_rate, to in compared]
    return Report("@duly.once, concurrency 100", figures, dict(rate), notes=notes)


def spread_over(charge: Callable[[Order], Any]) -> Callable[[list[Order]], Any]:
    """A hundred tasks share the calls."""
    return lambda work: spread(work, 100, charge)
