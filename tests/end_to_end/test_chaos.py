"""Tasks between two nodes while everything breaks: cut and slow connections, repeated messages, kill -9 of
both nodes and of the broker.

The law: none is lost, none runs twice by the handler's own log, and every sender knows how each ended. A task
whose handler was killed in the middle ends as `unknown`, and nothing else does.

`make test` does 600 tasks and `make proof` 3,000; DULY_CHAOS=10000 is the full count.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.transports.mqtt.link import MqttLink
from duly.wire.session import Acknowledge
from tests import servers
from tests.end_to_end.processes import end, tracebacks
from tests.proof import count
from tests.transports.mqtt.wire import Proxy

COUNTS = [600, pytest.param(int(os.environ.get("DULY_CHAOS", "3000")), marks=pytest.mark.proof)]
ROOT = Path(__file__).parents[2]
QUICK = RetryPolicy.fixed(50 * MS, tries=None)


class NodeProcess:
    def __init__(self, url: str, name: str, other: str, folder: Path, many: int) -> None:
        self.name, self.folder = name, folder
        self._args = [
            sys.executable,
            "-m",
            "tests.end_to_end.node_process",
            url,
            name,
            other,
            str(folder),
            str(many),
        ]
        (folder / f"{name}.ended").touch()
        self.kills = 0

    async def start(self) -> None:
        if self.kills:
            count("kills", 1)
        with (self.folder / f"{self.name}.errors").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(*self._args, stderr=errors, cwd=ROOT)

    async def kill(self) -> None:
        assert self.alive, self.errors
        self.kills += 1
        await self.end()

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        await end(self._process, how)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def errors(self) -> str:
        """What it has complained about."""
        return (self.folder / f"{self.name}.errors").read_text()

    def lines(self, what: str) -> list[str]:
        file = self.folder / f"{self.name}.{what}"
        return file.read_text().splitlines() if file.exists() else []


class Parrot:
    """Says again, a little later, some of what it hears in anybody's mailbox: what is sent at least once."""

    def __init__(self, url: str, names: list[str], dice: random.Random) -> None:
        self.repeated = 0
        self._dice = dice
        topics = [
            f"nodes/{name}/{kind}" for name in names for kind in ("pending", "ack", "complete", "failed")
        ]
        self.link = MqttLink(url, self._hear, subscriptions=topics, retry=QUICK)
        self._said: set[tuple[str, bytes]] = set()

    def _hear(self, topic: str, payload: bytes, retained: bool, ack: Acknowledge) -> None:
        ack()
        if self._dice.random() < 0.05 and (topic, payload) not in self._said:
            self._said.add((topic, payload))
            asyncio.get_running_loop().call_later(self._dice.uniform(0, 2), self._say, topic, payload)

    def _say(self, topic: str, payload: bytes) -> None:
        self.repeated += 1
        self.link.post(topic, payload)


class SlowProxy(Proxy):
    """Holds everything back now and then."""

    async def misbehave(self, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(dice.uniform(0.3, 2))
            if dice.random() < 0.5:
                self.cut()
            else:
                self.flowing.clear()
                await asyncio.sleep(dice.uniform(0.05, 0.4))
                self.flowing.set()
            self.packets.clear()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("many", COUNTS)
async def test_nothing_is_lost_and_nothing_runs_twice_whatever_breaks(tmp_path: Path, many: int) -> None:
    broker = servers.Mosquitto()
    broker.start()
    try:
        async with SlowProxy(broker.port) as proxy:
            nodes = [
                NodeProcess(f"mqtt://{name}@127.0.0.1:{proxy.port}", name, other, tmp_path, many // 2)
                for name, other in (("A", "B"), ("B", "A"))
            ]
            parrot = Parrot(f"mqtt://parrot@127.0.0.1:{broker.port}", ["A", "B"], random.Random(8))
            await parrot.link.start()
            trouble = asyncio.create_task(proxy.misbehave(random.Random(9)))
            try:
                await break_things(nodes, broker, random.Random(7), many)
            finally:
                trouble.cancel()
                await asyncio.gather(trouble, return_exceptions=True)
                for node in nodes:
                    await node.end()
                await parrot.link.stop()
        judge(nodes, parrot.repeated, many)
        sys.stderr.write(f"{proxy.connections} connections, {parrot.repeated} repeats\n")
    finally:
        broker.remove()


async def break_things(
    nodes: list[NodeProcess], broker: servers.Mosquitto, dice: random.Random, many: int
) -> None:
    """Until every task has ended, and each node has died."""
    began = time.monotonic()
    broker_kills = 0
    turns: list[NodeProcess | servers.Mosquitto] = []
    for node in nodes:
        await node.start()
    while any(len(node.lines("ended")) < many // 2 or not node.kills for node in nodes):
        assert time.monotonic() - began < 500, [len(node.lines("ended")) for node in nodes]
        await asyncio.sleep(dice.uniform(0.5, 2))
        turns = turns or dice.sample([*nodes, broker], 3)
        match turns.pop():
            case NodeProcess() as node:
                await node.kill()
                await node.start()
            case _:
                broker_kills += 1
                count("kills", 1)
                await asyncio.to_thread(broker.stop, signal.SIGKILL)
                await asyncio.to_thread(broker.start)
    states = Counter(line.split()[1] for node in nodes for line in node.lines("ended"))
    kills = sum(node.kills for node in nodes)
    sys.stderr.write(
        f"\n{many} tasks in {time.monotonic() - began:.0f} s: {dict(states)}; {kills} kills of nodes, "
        f"{broker_kills} of the broker, "
    )


def judge(nodes: list[NodeProcess], repeated: int, many: int) -> None:
    assert repeated > 10, "too few repeats to say anything"
    assert all(node.kills for node in nodes), "too few kills to say anything"
    for sender, receiver in (nodes, nodes[::-1]):
        ended = dict(line.split() for line in sender.lines("ended"))
        did = Counter(line for line in receiver.lines("did") if line.startswith(f"{sender.name}."))
        assert set(ended) == {f"{sender.name}.{n}" for n in range(many // 2)}, "lost"
        assert [id_ for id_, times in did.items() if times > 1] == [], "run twice"
        assert set(ended.values()) <= {"done", "unknown"}, Counter(ended.values())
        assert {id_ for id_, state in ended.items() if state == "done"} <= set(did), "done and never run"
        doubtful = sum(state == "unknown" for state in ended.values())
        assert doubtful <= 10 * receiver.kills, (
            "only what was under way when the receiver was killed is in doubt"
        )
        assert "Traceback" not in sender.errors, tracebacks(sender.errors)
    count("messages under faults", many)
