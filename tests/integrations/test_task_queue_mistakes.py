"""Wrong use of the decorators of task queues: each gets an error that says what to do, and no task runs
without its protection unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from duly.errors import Malformed, ProgramError
from tests import servers
from tests.guard import GUARD

DECORATORS = {
    "celery": "once_per_task",
    "dramatiq": "once_per_message",
    "arq": "once_per_job",
    "taskiq": "once_per_task",
    "faststream": "once_per_message",
}


def decorator_of(queue: str) -> Any:
    return getattr(import_module(f"duly.integrations.{queue}"), DECORATORS[queue])


def charge(order: str) -> str:
    return f"charged {order}"


@pytest.mark.parametrize("queue", DECORATORS)
def test_a_decorator_without_its_ledger_is_told_before_the_queue_registers_it(queue: str) -> None:
    with pytest.raises(ProgramError, match="by its URL"):
        decorator_of(queue)(charge)
    with pytest.raises(Malformed, match="at_most_once"):
        decorator_of(queue)("memory:", effect="twice")


def celery_task() -> object:
    from celery import Celery

    return Celery().task(charge)


def dramatiq_actor() -> object:
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    return dramatiq.actor(charge, broker=StubBroker())


def taskiq_task() -> object:
    from taskiq import InMemoryBroker

    return InMemoryBroker().task(charge)


def faststream_handler() -> object:
    from faststream.rabbit import RabbitBroker

    return RabbitBroker().subscriber("charges")(charge)


@pytest.mark.parametrize(
    ("queue", "made"),
    [
        ("celery", celery_task),
        ("dramatiq", dramatiq_actor),
        ("taskiq", taskiq_task),
        ("faststream", faststream_handler),
    ],
)
def test_a_decorator_above_that_of_the_queue_is_told(queue: str, made: Callable[[], object]) -> None:
    with pytest.raises(ProgramError, match=f"below the one that makes it a task of {queue}"):
        decorator_of(queue)("memory:")(made())


@pytest.mark.parametrize("noted", [False, True])
def test_dramatiq_without_its_middleware_is_told(noted: bool, tmp_path: Path) -> None:
    import dramatiq
    from dramatiq.brokers.stub import StubBroker
    from dramatiq.middleware import CurrentMessage

    broker = StubBroker()
    if noted:
        broker.add_middleware(CurrentMessage())
    ran: list[str] = []

    def charges(order: str) -> None:
        ran.append(order)

    decorated = decorator_of("dramatiq")(f"sqlite:///{tmp_path}/tasks.db")(charges)
    actor = dramatiq.actor(decorated, broker=broker, max_retries=0)
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=10)
    worker.start()
    told = contextlib.nullcontext() if noted else pytest.raises(ProgramError, match="CurrentMessage")
    try:
        actor.send("42")
        with told:
            broker.join(actor.queue_name, timeout=round(GUARD * 1000), fail_fast=True)
    finally:
        worker.stop()
    assert ran == (["42"] if noted else [])
    decorated("outside")
    assert ran[-1] == "outside"


async def test_faststream_without_its_middleware_is_told(tmp_path: Path) -> None:
    from faststream.rabbit import RabbitBroker, TestRabbitBroker

    from duly.integrations.faststream import CurrentStreamMessage

    ran: list[str] = []

    async def charges(order: str) -> None:
        ran.append(order)

    decorated = decorator_of("faststream")(f"sqlite:///{tmp_path}/tasks.db")(charges)
    bare = RabbitBroker()
    bare.subscriber("charges")(decorated)
    async with asyncio.timeout(GUARD), TestRabbitBroker(bare):
        with pytest.raises(ProgramError, match=r"middlewares=\[CurrentStreamMessage\]"):
            await bare.publish("42", "charges", message_id="id-42")
    assert ran == []
    noted = RabbitBroker(middlewares=[CurrentStreamMessage])
    noted.subscriber("charges")(decorated)
    async with asyncio.timeout(GUARD), TestRabbitBroker(noted):
        for _ in range(2):
            await noted.publish("42", "charges", message_id="id-42")
    assert ran == ["42"]
    await decorated("outside")
    assert ran == ["42", "outside"]


TASKIQ = """
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker
from duly.integrations.taskiq import once_per_task

broker = RedisStreamBroker("{url}").with_result_backend(RedisAsyncResultBackend("{url}"))

@broker.task(task_name="charge")
@once_per_task("sqlite:///tasks.db")
async def charge(order: str) -> str:
    return "it ran"

async def send() -> None:
    await broker.startup()
    print((await (await charge.kiq("42")).wait_result(timeout={guard})).error)
    await broker.shutdown()
"""


def test_taskiq_without_its_middleware_is_told(tmp_path: Path) -> None:
    server = servers.Redis()
    server.start()
    (tmp_path / "tasks.py").write_text(TASKIQ.format(url=server.url, guard=GUARD))
    command = [sys.executable, "-m", "taskiq", "worker", "tasks:broker", "--workers", "1"]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        send = "import asyncio, tasks; asyncio.run(tasks.send())"
        said = subprocess.run(
            [sys.executable, "-c", send],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=GUARD,
            check=True,
        )
        assert "CurrentTask" in said.stdout, (said, (tmp_path / "log").read_text())
    finally:
        worker.terminate()
        worker.wait(GUARD)
        server.remove()
