"""Two processes under one username: only one runs a given task, with nothing configured (docs/adr/0007)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.clients.node.claim import MailboxClaim
from duly.clients.node.node import Node
from duly.clients.node.tasks import SentTask, Task
from duly.core.retry import RetryPolicy
from duly.core.units import MINUTE
from tests import servers
from tests.clients.node.nodes import SOON, own_name, until
from tests.end_to_end.processes import end
from tests.guard import GUARD

ROOT = Path(__file__).parents[2]
LATE = RetryPolicy.fixed(30 * MINUTE, tries=None)


class Process:
    """A `duly node` of its own; it writes down what it did, and what it said."""

    def __init__(self, url: str, name: str, log: Path, data: str | None) -> None:
        self.url, self.name, self.log, self.data = url, name, log, data
        self.said: list[str] = []

    async def start(self) -> None:
        memory = [] if self.data is None else ["--data", self.data]
        command = f"work=cat >> {self.log} && echo done"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "duly", "node", self.name, "--url", self.url, "--run", command, *memory,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.said.append(line.decode())

    def is_now(self, word: str) -> bool:
        """What it last said about itself."""
        about = [line for line in self.said if f"  {self.name}: " in line]
        return bool(about) and word in about[-1]

    async def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        await end(self._process, how)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def two(
    url: str, name: str, log: Path, data: tuple[str | None, str | None]
) -> AsyncIterator[list[Process]]:
    processes = [Process(url, name, log, each) for each in data]
    try:
        await asyncio.gather(*(process.start() for process in processes))  # at the same moment
        yield processes
    finally:
        for process in processes:
            await process.stop()


def runs(log: Path) -> Counter[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    return Counter(line.partition('"id":"')[2].partition('"')[0] for line in lines)


@pytest.mark.parametrize(
    ("broker", "memory"),
    [
        ("mosquitto", "same file"),
        ("mosquitto", "files of their own"),
        ("mosquitto", "no memory"),
        ("embedded", "files of their own"),
        ("rabbitmq", "no memory"),
    ],
)
async def test_only_one_of_two_runs_a_task_and_the_other_takes_over_when_it_dies(
    request: pytest.FixtureRequest, tmp_path: Path, broker: str, memory: str
) -> None:
    server: servers.MqttServer = request.getfixturevalue(f"{broker}_server")
    name, log = own_name("B"), tmp_path / "log"
    files: dict[str, tuple[str | None, str | None]] = {
        "same file": (str(tmp_path / "b.db"), str(tmp_path / "b.db")),
        "files of their own": (str(tmp_path / "1.db"), str(tmp_path / "2.db")),
        "no memory": (None, None),
    }
    a_name = own_name("A")
    # A copy of a task, sent again before its answer came, is a new task to a process that shares no memory
    # with the one that ran it: docs/adr/0007 does not promise more. So none is sent, and the mailbox exists.
    async with Node(server.url(name), name=name, serve=True) as earlier:
        await earlier.ready()
    async with Node(server.url(a_name), name=a_name, resend=LATE) as a:
        tasks = [await a.send(name, "work", n, expires=300) for n in range(40)]
        async with two(server.url(name), name, log, files[memory]) as processes:
            late = await taken_over(server, a, processes, tasks, memory)
    assert runs(log) == Counter(task.id for task in late), "".join(
        f"\n── process {number} ──\n{''.join(process.said)}" for number, process in enumerate(processes, 1)
    )


async def taken_over(
    server: servers.MqttServer, a: Node, processes: list[Process], tasks: list[SentTask], memory: str
) -> list[SentTask]:
    """Return all tasks that were done, some by the first process and, after its death, some by the second."""
    name = processes[0].name
    async with asyncio.timeout(GUARD):
        for task in tasks:
            assert await task.result == "done"
    await until(lambda: sum(process.is_now("online") for process in processes) == 1)
    await until(lambda: sum(process.is_now("standing by") for process in processes) == 1)
    active = next(process for process in processes if process.is_now("online"))
    more = [await a.send(name, "work", n, expires=300) for n in range(10)]
    async with asyncio.timeout(GUARD):
        for task in more:
            assert await task.result == "done"
    if memory != "same file":
        more.append(await handled_all(server, name))
    await active.stop(signal.SIGKILL)
    late = [await a.send(name, "work", n, expires=300) for n in range(10)]
    async with asyncio.timeout(GUARD):
        for task in late:
            assert await task.result == "done"
    (other,) = [process for process in processes if process is not active]
    await until(lambda: other.is_now("online"))
    return tasks + more + late


async def handled_all(server: servers.MqttServer, name: str) -> SentTask:
    """Return a task that was done when the broker had the acknowledgements of all tasks before it: they are
    sent in order, and before its answer."""
    c_name = own_name("C")
    async with Node(server.url(c_name), name=c_name, resend=LATE) as c:
        last = await c.send(name, "work", "last", expires=300)
        async with asyncio.timeout(GUARD):
            assert await last.result == "done"
    return last


@pytest.mark.parametrize("broker", ["mosquitto", "embedded", "rabbitmq"])
async def test_a_process_held_up_between_looking_and_connecting_steps_back(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, broker: str
) -> None:
    """It found the mailbox free, then stood still for as long as another process needed to begin work."""
    server: servers.MqttServer = request.getfixturevalue(f"{broker}_server")
    name, a_name = own_name("B"), own_name("A")
    began: list[str] = []
    go_on, looked, held_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
    look = MailboxClaim.wait

    def node() -> Node:
        made = Node(server.url(name), name=name)

        @made.task("work")
        async def work(task: Task) -> str:
            began.append(task.id)
            await go_on.wait()
            return "done"

        return made

    async def slow_look(claim: MailboxClaim) -> None:
        await look(claim)
        if not looked.is_set():
            looked.set()
            await held_up.wait()

    monkeypatch.setattr(MailboxClaim, "wait", slow_look)
    second = node()
    await second.start()
    try:
        async with asyncio.timeout(GUARD), Node(server.url(a_name), name=a_name, resend=SOON) as a:
            await looked.wait()
            async with node() as first:
                tasks = [await a.send(name, "work", n, expires=300) for n in range(5)]
                await until(lambda: len(began) == 5)
                held_up.set()
                await until(lambda: "standing by" in second.situation)
                go_on.set()
                for task in tasks:
                    assert await task.result == "done"
                assert await a.call(name, "work", 5) == "done"
                assert first.situation == "online"
    finally:
        await second.stop()
    assert len(began) == len(set(began)) == 6


@pytest.mark.parametrize("broker", ["mosquitto", "embedded"])
async def test_a_process_of_which_the_broker_retains_nothing_is_asked(
    request: pytest.FixtureRequest, broker: str
) -> None:
    """A broker may have lost what it retains, or be slow to show it."""
    server: servers.MqttServer = request.getfixturevalue(f"{broker}_server")
    name = own_name("B")

    def node() -> Node:
        made = Node(server.url(name), name=name)

        @made.task("work")
        async def work(task: Task) -> str:
            return "done"

        return made

    async with node() as first:
        await until(lambda: first.situation == "online")
        await first._mailbox.link.publish(first._mailbox.own_status.topic, b"", retain=True)
        second = node()
        await second.start()
        try:
            await until(lambda: "standing by" in second.situation)
            assert first.situation == "online"
        finally:
            await second.stop()
