"""The real libraries and brokers: every message comes twice, a worker is killed in the middle, and each
effect happens once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import servers
from tests.integrations import task_worker_path

ORDERS = ["a", "b", "c", "d"]
QUEUES = ["celery", "dramatiq", "arq", "taskiq"]


class TaskQueueWork:
    """A queue, a ledger, and the file that the tasks write."""

    def __init__(self, queue: str, broker: str, folder: Path) -> None:
        self._file = folder / "charged.txt"
        ledger = f"sqlite:///{folder}/tasks.db"
        self._program = [sys.executable, str(task_worker_path), queue, broker, ledger, str(self._file)]
        self.said = (folder / "said").open("w+b")

    @property
    def charged(self) -> list[str]:
        return self._file.read_text().split() if self._file.exists() else []

    def send(self, *orders: str) -> None:
        subprocess.run([*self._program, *orders], check=True, timeout=50, capture_output=True)

    @contextlib.contextmanager
    def worker(self, how: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen([*self._program, how], stdout=self.said, stderr=self.said)
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)

    def until(self, count: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 80
        while len(self.charged) < count:
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


@pytest.fixture(params=QUEUES)
def work(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TaskQueueWork]:
    broker = request.getfixturevalue("redis_url")
    it = TaskQueueWork(request.param, broker, tmp_path)
    yield it
    it.said.close()


@pytest.mark.proof
@pytest.mark.timeout(240)
def test_every_message_comes_twice_and_a_worker_dies_in_the_middle(work: TaskQueueWork) -> None:
    work.send(*ORDERS)
    with work.worker("dies") as first:
        first.wait(80)
    assert len(work.charged) == 1
    work.send(*ORDERS)
    with work.worker("lives") as second:
        work.until(len(ORDERS), second)
        work.send(*ORDERS, "last")
        work.until(len(ORDERS) + 1, second)
        work.send(*ORDERS, "end")
        work.until(len(ORDERS) + 2, second)
    assert sorted(work.charged) == sorted([*ORDERS, "last", "end"])
