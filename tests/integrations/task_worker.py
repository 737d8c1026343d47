"""A worker of a task queue in a process of its own. Each task writes its order into a file; with `dies` the
process kills itself after the first.

python task_worker.py QUEUE BROKER LEDGER FILE dies|lives      works
python task_worker.py QUEUE BROKER LEDGER FILE ORDER…          sends each of these orders

With `bare` as its ledger a task is not decorated, and runs as often as the queue delivers it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUEUE, BROKER, LEDGER, FILE, *WHAT = sys.argv[1:]
WORKS = WHAT in (["dies"], ["lives"])


def decorated(decorator: Callable[[str], Callable[[Any], Any]], task: Any) -> Any:
    return task if LEDGER == "bare" else decorator(LEDGER)(task)


def charge(order: str) -> str:
    written = os.open(FILE, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(written, f"{order}\n".encode())
    os.close(written)
    if WHAT == ["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"charged {order}"


def with_celery() -> None:
    from celery import Celery

    from duly.integrations.celery import once_per_task

    app = Celery(broker=BROKER, backend=BROKER)
    app.conf.update(
        task_acks_late=True,
        broker_transport_options={"visibility_timeout": 1, "polling_interval": 0.1},
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
    )
    task = app.task(name="charge")(decorated(once_per_task, charge))
    if WORKS:
        app.worker_main(["worker", "--pool=solo", "--loglevel=ERROR", "--without-gossip", "--without-mingle"])
    for order in WHAT:
        task.apply_async((order,), task_id=f"id-{order}")


def with_dramatiq() -> None:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.middleware import CurrentMessage

    from duly.integrations.dramatiq import once_per_message

    broker = RedisBroker(url=BROKER, heartbeat_timeout=1_000, maintenance_chance=1_000_000)
    broker.add_middleware(CurrentMessage())
    dramatiq.set_broker(broker)
    actor = dramatiq.actor(actor_name="charge", max_retries=0)(decorated(once_per_message, charge))
    if WORKS:
        dramatiq.Worker(broker, worker_threads=1, worker_timeout=100).start()
        signal.pause()
    for order in WHAT:
        message = actor.message(order)
        broker.enqueue(message.copy(message_id=f"id-{order}"))


def with_arq() -> None:
    from arq import Worker, create_pool, func
    from arq.connections import RedisSettings

    from duly.integrations.arq import once_per_job

    async def job(ctx: dict[str, Any], order: str) -> str:
        return charge(order)

    there = RedisSettings.from_dsn(BROKER)

    async def send() -> None:
        pool = await create_pool(there)
        for order in WHAT:
            await pool.enqueue_job("job", order, _job_id=f"id-{order}")
        await pool.aclose()

    if WORKS:
        asyncio.set_event_loop(asyncio.new_event_loop())
        Worker(
            [func(decorated(once_per_job, job), name="job")],
            redis_settings=there,
            keep_result=0,
            job_timeout=1,
            poll_delay=0.1,
            max_jobs=1,
        ).run()
    asyncio.run(send())


def with_taskiq() -> None:
    from taskiq.api import run_receiver_task
    from taskiq_redis import RedisStreamBroker

    from duly.integrations.taskiq import CurrentTask, once_per_task

    broker = RedisStreamBroker(BROKER, idle_timeout=1_000, unacknowledged_lock_timeout=5)
    broker.add_middlewares(CurrentTask())

    async def charge_later(order: str) -> str:
        return charge(order)

    task = broker.task(task_name="charge")(decorated(once_per_task, charge_later))

    async def work() -> None:
        broker.is_worker_process = True
        await broker.startup()
        await run_receiver_task(broker, max_async_tasks=1)

    async def send() -> None:
        await broker.startup()
        for order in WHAT:
            await task.kicker().with_task_id(f"id-{order}").kiq(order)
        await broker.shutdown()

    asyncio.run(work() if WORKS else send())


def with_faststream() -> None:
    from faststream import FastStream
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

    from duly.integrations.faststream import CurrentStreamMessage, once_per_message

    broker = RabbitBroker(
        BROKER, middlewares=[CurrentStreamMessage], default_channel=Channel(prefetch_count=1), logger=None
    )

    queue = RabbitQueue("charges", durable=True)

    async def charge_later(order: str) -> str:
        return charge(order)

    broker.subscriber(queue)(decorated(once_per_message, charge_later))

    async def send() -> None:
        async with broker:
            await broker.declare_queue(queue)
            for order in WHAT:
                await broker.publish(order, queue, message_id=f"id-{order}")

    asyncio.run(FastStream(broker).run() if WORKS else send())


if __name__ == "__main__":
    Path(FILE).touch()
    globals()[f"with_{QUEUE}"]()
