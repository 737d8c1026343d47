"""The real libraries and brokers: every message comes twice, a worker is killed in the middle, and each
effect happens once."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import pytest

from tests import servers
from tests.guard import GUARD
from tests.integrations import task_worker_path
from tests.test_guides import ROOT, blocks

ORDERS = ["a", "b", "c", "d"]
QUEUES = ["celery", "dramatiq", "arq", "taskiq", "faststream"]


class TaskQueueWork:
    """A queue, a ledger, and the file that the tasks write."""

    def __init__(self, queue: str, broker: str, folder: Path, ledger: str = "") -> None:
        self._file = folder / "charged.txt"
        ledger = ledger or f"sqlite:///{folder}/tasks.db"
        self._program = [sys.executable, str(task_worker_path), queue, broker, ledger, str(self._file)]
        self.said = (folder / "said").open("w+b")

    @property
    def charged(self) -> list[str]:
        return self._file.read_text().split() if self._file.exists() else []

    def send(self, *orders: str) -> None:
        subprocess.run([*self._program, *orders], check=True, timeout=GUARD, capture_output=True)

    @contextlib.contextmanager
    def worker(self, how: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen([*self._program, how], stdout=self.said, stderr=self.said)
        try:
            yield process
        finally:
            process.kill()
            process.wait(GUARD)

    def until(self, orders: list[str], process: subprocess.Popen[bytes]) -> None:
        """Until each of these orders was charged."""
        deadline = time.monotonic() + GUARD
        while not set(orders) <= set(self.charged):
            if process.poll() is not None or time.monotonic() > deadline:
                self.said.seek(0)
                raise AssertionError(f"{self.charged}: {self.said.read().decode()[-3000:]}")
            time.sleep(0.05)


@pytest.fixture
def redis_url() -> Iterator[str]:
    server = servers.Redis()
    server.start()
    yield server.url
    server.remove()


@contextlib.contextmanager
def work_on(
    queue: str, request: pytest.FixtureRequest, folder: Path, ledger: str = ""
) -> Iterator[TaskQueueWork]:
    """The work of a queue, with a broker that no other test has used."""
    if queue == "faststream":
        server: servers.RabbitMqHost = request.getfixturevalue("rabbitmq_server")
        broker = server.amqp_url
        empty_queue(broker)
    else:
        broker = request.getfixturevalue("redis_url")
    it = TaskQueueWork(queue, broker, folder, ledger)
    yield it
    it.said.close()


def empty_queue(url: str) -> None:
    async def delete() -> None:
        async with await aio_pika.connect(url) as broker:
            await (await broker.channel()).queue_delete("charges")

    asyncio.run(delete())


@pytest.mark.proof
@pytest.mark.timeout(240)
@pytest.mark.parametrize("queue", QUEUES)
def test_every_message_comes_twice_and_a_worker_dies_in_the_middle(
    queue: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with work_on(queue, request, tmp_path) as work:
        deliver_twice_and_kill(work)
        assert sorted(work.charged) == sorted([*ORDERS, "last", "end"])


@pytest.mark.proof
@pytest.mark.timeout(240)
@pytest.mark.parametrize("queue", QUEUES)
def test_without_the_decorator_the_same_deliveries_charge_twice(
    queue: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with work_on(queue, request, tmp_path, "bare") as work:
        deliver_twice_and_kill(work)
        assert len(work.charged) > len(set(work.charged))


def deliver_twice_and_kill(work: TaskQueueWork) -> None:
    """Each order comes at least twice, and the first worker dies after its first effect."""
    work.send(*ORDERS)
    with work.worker("dies") as first:
        first.wait(GUARD)
    assert len(work.charged) == 1
    work.send(*ORDERS)
    with work.worker("lives") as second:
        work.until(ORDERS, second)
        work.send(*ORDERS, "last")
        work.until([*ORDERS, "last"], second)
        work.send(*ORDERS, "end")
        work.until([*ORDERS, "last", "end"], second)


@pytest.mark.proof
@pytest.mark.parametrize("guide", ["docs/task-queues.md", "docs/zh/task-queues.md"])
def test_the_guide_charges_once_as_printed(guide: str, redis_url: str, tmp_path: Path) -> None:
    (program,) = blocks(ROOT / guide, "python")
    (tmp_path / "tasks.py").write_text(program.replace("redis://localhost", redis_url))
    _, work, send = blocks(ROOT / guide, "console")[0].splitlines()
    words = work.removeprefix("$ ").removesuffix(" &").split()
    with (
        (tmp_path / "said").open("w+b") as said,
        subprocess.Popen([sys.executable, "-m", *words], cwd=tmp_path, stdout=said, stderr=said) as worker,
    ):
        try:
            sends = shlex.split(send.removeprefix("$ python "))
            # What comes later is answered: both deliveries were taken, and the worker ends what it has taken.
            answered = "; charge.delay('43').get(50); print(charge.AsyncResult('order-42').get(50))"
            done = subprocess.run(
                [sys.executable, sends[0], sends[1] + answered],
                cwd=tmp_path, capture_output=True, text=True, check=True,
            )  # fmt: skip
        finally:
            worker.terminate()
            worker.wait(GUARD)
        said.seek(0)
        assert said.read().decode().count("charging 42") == 1
    assert done.stdout.strip() == "charged 42"
