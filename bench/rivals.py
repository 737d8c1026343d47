"""What people use instead: `python -m bench.rivals NAME load DEPTH SECONDS`; its worker is another process.

The same task for all: 214 bytes in, {"on": true} back, acknowledged after it has run, results on. Celery,
Dramatiq, Taskiq and arq over Redis, FastStream over the MQTT broker (request and reply, QoS 1).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from bench.load import Count

NOTE = {"note": "x" * 172}
PORT = int(os.environ.get("RIVAL_PORT", "0"))
REDIS = f"redis://127.0.0.1:{PORT}"


# ── Celery: python -m celery -A bench.rivals:celery_app worker ───────────────────────────────────


def make_celery() -> Any:
    from celery import Celery

    app = Celery("rivals", broker=f"{REDIS}/0", backend=f"{REDIS}/1")
    app.conf.update(task_acks_late=True, worker_prefetch_multiplier=50, task_always_eager=False)

    @app.task(name="work")  # type: ignore[untyped-decorator]  # Celery has no types
    def work(payload: Any) -> dict[str, bool]:
        return {"on": True}

    app.work = work
    return app


# ── Dramatiq: python -m dramatiq bench.rivals:dramatiq_broker ────────────────────────────────────


def make_dramatiq() -> tuple[Any, Any]:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    broker = RedisBroker(url=f"{REDIS}/0")
    broker.add_middleware(Results(backend=RedisBackend(url=f"{REDIS}/1")))
    dramatiq.set_broker(broker)

    @dramatiq.actor(store_results=True)  # type: ignore[untyped-decorator]  # it is not always installed
    def work(payload: Any) -> dict[str, bool]:
        return {"on": True}

    return broker, work


# ── Taskiq: python -m taskiq worker bench.rivals:taskiq_broker ───────────────────────────────────


def make_taskiq() -> tuple[Any, Any]:
    from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

    broker = RedisStreamBroker(url=f"{REDIS}/0").with_result_backend(RedisAsyncResultBackend(f"{REDIS}/1"))

    @broker.task(task_name="work")  # type: ignore[untyped-decorator]  # it is not always installed
    async def work(payload: Any) -> dict[str, bool]:
        return {"on": True}

    return broker, work


# ── arq: python -m arq bench.rivals.ArqWorker ────────────────────────────────────────────────────


async def arq_work(_: Any, payload: Any) -> dict[str, bool]:
    return {"on": True}


class ArqWorker:
    functions = (arq_work,)
    max_jobs = 100
    poll_delay = 0.01

    try:
        from arq.connections import RedisSettings

        redis_settings = RedisSettings(port=PORT)
    except ImportError:
        pass


# ── FastStream: python -m bench.rivals faststream worker ─────────────────────────────────────────


def make_faststream() -> Any:
    from faststream.mqtt import MQTTBroker, QoS

    broker = MQTTBroker("127.0.0.1", PORT, version="5.0", logger=None)
    return broker, QoS.AT_LEAST_ONCE


async def faststream_worker() -> None:
    broker, qos = make_faststream()

    @broker.subscriber("work", qos=qos)  # type: ignore[untyped-decorator]  # it is not always installed
    async def work(payload: Any) -> dict[str, bool]:
        return {"on": True}

    await broker.start()
    await asyncio.Event().wait()


# ── load ─────────────────────────────────────────────────────────────────────────────────────────


def threads(depth: int, seconds: float, one: Callable[[], object]) -> Count:
    count = Count(seconds)

    def worker() -> None:
        while not count.over:
            began = time.perf_counter()
            one()
            count.add(began)

    with ThreadPoolExecutor(depth) as pool:
        for each in [pool.submit(worker) for _ in range(depth)]:
            each.result()
    return count


async def tasks(depth: int, seconds: float, one: Callable[[], Awaitable[object]]) -> Count:
    count = Count(seconds)

    async def worker() -> None:
        while not count.over:
            began = time.perf_counter()
            await one()
            count.add(began)

    await asyncio.gather(*(worker() for _ in range(depth)))
    return count


def celery_load(depth: int, seconds: float) -> Count:
    work = make_celery().work
    return threads(depth, seconds, lambda: work.apply_async((NOTE,)).get(timeout=30))


def dramatiq_load(depth: int, seconds: float) -> Count:
    _, work = make_dramatiq()
    return threads(depth, seconds, lambda: work.send(NOTE).get_result(block=True, timeout=30_000))


async def taskiq_load(depth: int, seconds: float) -> Count:
    broker, work = make_taskiq()
    await broker.startup()

    async def one() -> None:
        task = await work.kiq(NOTE)
        await task.wait_result(check_interval=0.005, timeout=30)

    try:
        return await tasks(depth, seconds, one)
    finally:
        await broker.shutdown()


async def arq_load(depth: int, seconds: float) -> Count:
    from arq import create_pool
    from arq.connections import RedisSettings
    from arq.jobs import ResultNotFound

    pool = await create_pool(RedisSettings(port=PORT))

    async def one() -> None:
        job = await pool.enqueue_job("arq_work", NOTE)
        for _ in range(3):  # it may look between the queue and the result, and then gives up
            with suppress(ResultNotFound):
                await job.result(timeout=30, poll_delay=0.005)
                return

    return await tasks(depth, seconds, one)


async def faststream_load(depth: int, seconds: float) -> Count:
    broker, qos = make_faststream()
    await broker.start()
    try:
        return await tasks(depth, seconds, lambda: broker.request(NOTE, "work", timeout=30, qos=qos))
    finally:
        await broker.stop()


WORKERS = {
    "Celery": ["-m", "celery", "-A", "bench.rivals:celery_app", "worker", "-c", "2", "-l", "ERROR"],
    "Dramatiq": ["-m", "dramatiq", "bench.rivals:dramatiq_broker", "-p", "2", "-t", "8"],
    "Taskiq": ["-m", "taskiq", "worker", "bench.rivals:taskiq_broker", "-w", "1", "--log-level", "ERROR"],
    "arq": ["-m", "arq", "bench.rivals.ArqWorker"],
    "FastStream": ["-m", "bench.rivals", "FastStream", "worker"],
}


def __getattr__(name: str) -> Any:
    """What the workers' own command lines look for."""
    match name:
        case "celery_app":
            return make_celery()
        case "dramatiq_broker":
            return make_dramatiq()[0]
        case "taskiq_broker":
            return make_taskiq()[0]
    raise AttributeError(name)


def main() -> None:
    name, role, *more = sys.argv[1:]
    if role == "worker":
        asyncio.run(faststream_worker())
        return
    depth, seconds = int(more[0]), float(more[1])
    match name:
        case "Celery":
            count = celery_load(depth, seconds)
        case "Dramatiq":
            count = dramatiq_load(depth, seconds)
        case "Taskiq":
            count = asyncio.run(taskiq_load(depth, seconds))
        case "arq":
            count = asyncio.run(arq_load(depth, seconds))
        case _:
            count = asyncio.run(faststream_load(depth, seconds))
    print(json.dumps(msgspec.to_builtins(count.found())), flush=True)


if __name__ == "__main__":
    main()
