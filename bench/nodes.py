"""What does a task cost, from node to node and back, beyond what the broker and its clients cost?

Two processes and a broker: `bench.peers` written by hand on gmqtt and on paho, with no dedup and nothing
stored, and two `duly.Node`, each with its file; a hundred tasks under way. Beside them what people use
instead, on the same task (`bench.rivals`). And a node that was away: how fast it catches up with what has
waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from bench.gateway import CLIENT_BOUND
from bench.load import Found
from bench.measure import Figure, Median, Options, Report, figure, folder, progress
from bench.peers import Work
from bench.processes import GRACE, NoAnswer, ProcessDied, Server, answer_of, load
from bench.rivals import WORKERS
from bench.servers import free_port, redis_server
from duly.broker.acl_dialects import NODES, BrokerUser
from duly.broker.embedded import EmbeddedBroker

DEPTH = 100
USER = "bench"
GMQTT, PAHO, DULY = "gmqtt by hand", "paho by hand", "duly"
KINDS = {GMQTT: "gmqtt", PAHO: "paho", DULY: "duly"}
PACKAGES = {
    "Celery": "celery",
    "Dramatiq": "dramatiq",
    "Taskiq": "taskiq_redis",
    "arq": "arq",
    "FastStream": "zmqtt",
}


@contextlib.contextmanager
def mosquitto() -> Iterator[Work | None]:
    """A Mosquitto; None if it is not installed."""
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        yield None
        return
    from tests.servers import Mosquitto

    server = Mosquitto()
    try:
        server.start()
        yield Work("127.0.0.1", server.port)
    finally:
        server.remove()


@contextlib.asynccontextmanager
async def embedded(root: Path) -> AsyncIterator[Work]:
    """The broker that a hub brings along."""
    await asyncio.to_thread(root.mkdir)
    broker = EmbeddedBroker(root, free_port())
    users = [BrokerUser(f"{USER}-{side}", "secret", ["#"], ["#"], NODES) for side in ("a", "b")]
    await broker.set_users(users)
    await broker.start()
    try:
        yield Work("127.0.0.1", broker.port, USER, "secret")
    finally:
        await broker.stop()


@contextlib.asynccontextmanager
async def started(*args: str, ready: bool, **env: str) -> AsyncIterator[Server]:
    """A process of its own; gone afterwards, with its children."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *args, stdout=subprocess.PIPE if ready else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | env, start_new_session=True,
    )  # fmt: skip
    try:
        if ready:
            assert process.stdout is not None
            async with asyncio.timeout(20):
                if (await process.stdout.readline()).strip() != b"ready":
                    raise ProcessDied(f"{' '.join(args[:4])} did not start")
        else:
            await asyncio.sleep(3.0)  # workers of others say nothing
        yield Server("", process.pid, f"{' '.join(args[:4])}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def pair(kind: str, work: Work, depth: int, seconds: float, root: Path) -> Found:
    """Two nodes of a kind, one of which has so many tasks under way."""
    await asyncio.to_thread(root.mkdir)
    told = msgspec.structs.replace(
        work, depth=depth, seconds=seconds, folder=str(root), a=f"a{root.name}", b=f"b{root.name}"
    )
    text = msgspec.json.encode(told).decode()
    async with started("-m", "bench.peers", kind, "serve", text, ready=True) as serving:
        found = await answer_of("-m", "bench.peers", kind, "load", text, seconds=seconds, servers=[serving])
    return msgspec.json.decode(found, type=Found)


async def drained(work: Work, count: int, root: Path) -> float:
    """Tasks a second, by a node that was away while so many were sent to it."""
    await asyncio.to_thread(root.mkdir)
    text = msgspec.json.encode(
        msgspec.structs.replace(work, folder=str(root), drain=count, a=f"a{root.name}", b=f"b{root.name}")
    ).decode()
    serve = ("-m", "bench.peers", "duly", "serve", text)
    async with started(*serve, ready=True):
        pass  # so that the broker keeps its mail
    async with load("-m", "bench.peers", "duly", "load", text) as child:
        await child.line(GRACE, begins=b"sent")
        async with started(*serve, ready=True):
            return float(msgspec.json.decode(await child.line(GRACE, begins=b"{"))["rate"])


async def rival(name: str, port: int, seconds: float) -> Found:
    """What another library comes to on the same task."""
    env = {"RIVAL_PORT": str(port)}
    async with started(*WORKERS[name], ready=False, **env) as worker:
        load_of = ("-m", "bench.rivals", name, "load", str(DEPTH), str(seconds))
        found = await answer_of(*load_of, seconds=seconds, servers=[worker], env=env)
    return msgspec.json.decode(found, type=Found)


class Broker:
    """What was measured at one broker."""

    def __init__(self, name: str, work: Work, roots: Iterator[Path]) -> None:
        self.name = name
        self._work = work
        self._places = roots
        self._many: dict[str, list[Found]] = {kind: [] for kind in KINDS}
        self._alone: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._woken: list[float] = []

    async def turn(self, seconds: float) -> None:
        """Every kind of node once: a hundred tasks under way, and one at a time."""
        for name, kind in KINDS.items():
            gc.collect()
            self._many[name].append(await pair(kind, self._work, DEPTH, seconds, next(self._places)))
            self._alone[name].append((await pair(kind, self._work, 1, seconds / 2, next(self._places))).p50)
            progress.step(f"{name}, {self.name}")

    async def catch_up(self, waiting: int) -> None:
        """A node of duly that was away."""
        self._woken.append(await drained(self._work, waiting, next(self._places)))
        progress.step(f"{waiting:,} that waited, {self.name}")

    @property
    def rates(self) -> dict[str, Median]:
        """Tasks a second."""
        return {name: Median([f.rate for f in found]) for name, found in self._many.items()}

    @property
    def client_bound(self) -> list[str]:
        """The kinds whose load, which is a node itself, used a whole core."""
        return [
            f"{name}, {self.name}"
            for name, found in self._many.items()
            if statistics.median(f.busy for f in found) > CLIENT_BOUND
        ]

    def figures(self) -> list[Figure]:
        """duly beside the two by hand."""
        rate, at = self.rates, self.name
        p50 = {name: Median(found) for name, found in self._alone.items()}
        woken = Median(self._woken)
        return [
            *(figure(f"{name}, {at}", rate[name], "tasks/s") for name in (GMQTT, PAHO)),
            *(figure(f"duly, {at}", rate[DULY], "tasks/s", rate[name], name) for name in (GMQTT, PAHO)),
            *(figure(f"{name}, {at}, c=1, p50", p50[name], "ms") for name in (GMQTT, PAHO)),
            *(figure(f"duly, {at}, c=1, p50", p50[DULY], "ms", p50[name], name) for name in (GMQTT, PAHO)),
            figure(f"duly, {at}, those that waited", woken, "tasks/s", rate[DULY], "its live rate"),
        ]


class Rivals:
    """What people use instead, taking turns with the nodes; one that fails is noted, and the others go on."""

    def __init__(self, mqtt: Work | None, redis: Server | None, notes: list[str]) -> None:
        redis_port = int(redis.url.rpartition(":")[2].partition("/")[0]) if redis else None
        ports = dict.fromkeys(WORKERS, redis_port) | {"FastStream": mqtt.port if mqtt else None}
        self.ports: dict[str, int] = {}
        for name, port in ports.items():
            if port is None or importlib.util.find_spec(PACKAGES[name]) is None:
                notes.append(f"{name} or its server is not installed: no comparison with it")
            else:
                self.ports[name] = port
        self._notes = notes
        self._rates: dict[str, list[float]] = {name: [] for name in self.ports}

    async def turn(self, seconds: float) -> None:
        """Every one of them once."""
        for name, port in list(self.ports.items()):
            try:
                self._rates[name].append((await rival(name, port, seconds)).rate)
            except (ProcessDied, NoAnswer) as problem:
                self._notes.append(f"{name} did not finish: {problem}")
                del self.ports[name]
            progress.step(name)

    def figures(self, best: float) -> list[Figure]:
        """duly beside each of them."""
        made: list[Figure] = []
        for name in self.ports:
            rate = Median(self._rates[name])
            made += [figure(name, rate, "tasks/s"), figure("duly", best, "tasks/s", rate, name)]
        return made


async def run(options: Options) -> Report:
    turns, seconds, waiting = options.pick((2, 1.5, 5_000), (5, 2.0, 10_000))
    figures: list[Figure] = []
    notes: list[str] = []
    async with contextlib.AsyncExitStack() as running:
        root = running.enter_context(folder())
        roots = (root / f"{n}" for n in itertools.count())
        works = {
            "Mosquitto": running.enter_context(mosquitto()),
            "embedded NATS": await running.enter_async_context(embedded(next(roots))),
        }
        brokers = [Broker(name, work, roots) for name, work in works.items() if work is not None]
        notes += [
            f"{name} is not installed: nothing measured there" for name, work in works.items() if not work
        ]
        rivals = Rivals(works["Mosquitto"], running.enter_context(redis_server(next(roots))), notes)
        progress.plan(len(brokers) * (turns * len(KINDS) + max(1, turns // 2)) + turns * len(rivals.ports))
        for turn in range(turns):
            for broker in brokers:
                await broker.turn(seconds)
                if turn < max(1, turns // 2):
                    await broker.catch_up(waiting)
            await rivals.turn(seconds)
        for broker in brokers:
            figures += broker.figures()
        figures += rivals.figures(max(broker.rates[DULY] for broker in brokers))
    bound = [each for broker in brokers for each in broker.client_bound]
    if bound:
        notes.append(f"the client, which is a node itself, used a whole core: {', '.join(bound)}")
    rates = {f"{name}, {broker.name}": rate for broker in brokers for name, rate in broker.rates.items()}
    return Report(
        "Nodes: pending → ack → complete, 214 bytes, 100 under way", figures, dict(rates), notes=notes
    )
