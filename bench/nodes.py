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
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.load import Found
from bench.measure import Figure, Median, Report, folder
from bench.peers import Work
from bench.rivals import WORKERS
from bench.servers import redis_server
from duly.broker.embedded import EmbeddedBroker
from duly.broker.rules import BrokerUser

DEPTH = 100
GMQTT, PAHO, DULY = "bare gmqtt nodes", "bare paho nodes", "duly nodes"
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
    import shutil

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
async def embedded(place: Path) -> AsyncIterator[Work]:
    from bench.servers import free_port

    await asyncio.to_thread(place.mkdir)
    broker = EmbeddedBroker(place, free_port())
    await broker.set_users([BrokerUser("anybody", "secret", ["#"], ["#"])])
    await broker.start()
    try:
        yield Work("127.0.0.1", broker.port, "anybody", "secret")
    finally:
        await broker.stop()


@contextlib.asynccontextmanager
async def started(*args: str, ready: bool, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
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
                    raise RuntimeError(f"{args} did not start")
        else:
            await asyncio.sleep(3.0)  # workers of others say nothing
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def output(*args: str, within: float, **env: str) -> Any:
    child = await asyncio.create_subprocess_exec(
        sys.executable, *args, stdout=subprocess.PIPE, env=os.environ | env
    )
    try:
        async with asyncio.timeout(within):
            out, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode or not out:
        raise RuntimeError(f"{' '.join(args[:4])} failed")
    return msgspec.json.decode(out.splitlines()[-1])


async def pair(kind: str, work: Work, depth: int, seconds: float, place: Path) -> Found:
    await asyncio.to_thread(place.mkdir)
    told = msgspec.structs.replace(
        work, depth=depth, seconds=seconds, folder=str(place), a=f"a{place.name}", b=f"b{place.name}"
    )
    text = msgspec.json.encode(told).decode()
    async with started("-m", "bench.peers", kind, "serve", text, ready=True):
        found = await output("-m", "bench.peers", kind, "load", text, within=60)
    return msgspec.convert(found, Found)


async def drained(work: Work, count: int, place: Path) -> float:
    """Tasks a second, by a node that was away while so many were sent to it."""
    await asyncio.to_thread(place.mkdir)
    text = msgspec.json.encode(
        msgspec.structs.replace(work, folder=str(place), drain=count, a=f"a{place.name}", b=f"b{place.name}")
    ).decode()
    async with started("-m", "bench.peers", "duly", "serve", text, ready=True):
        pass  # so that the broker keeps its mail
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.peers", "duly", "load", text, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(90):
            assert (await child.stdout.readline()).strip() == b"sent"
            async with started("-m", "bench.peers", "duly", "serve", text, ready=True):
                return float(msgspec.json.decode(await child.stdout.readline())["rate"])
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def rival(name: str, port: int, seconds: float) -> float | None:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        return None
    env = {"RIVAL_PORT": str(port)}
    async with started(*WORKERS[name], ready=False, **env):
        found = await output("-m", "bench.rivals", name, "load", str(DEPTH), str(seconds), within=60, **env)
    return msgspec.convert(found, Found).rate


async def run(quick: bool) -> Report:
    turns, seconds, waiting = (3, 1.5, 5_000) if quick else (5, 2.0, 10_000)
    figures: list[Figure] = []
    notes: list[str] = []
    series: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as running:
        place = running.enter_context(folder())
        places = (place / f"{n}" for n in itertools.count())
        brokers = {
            "Mosquitto": running.enter_context(mosquitto()),
            "embedded NATS": await running.enter_async_context(embedded(next(places))),
        }
        live: dict[str, float] = {}
        for broker, work in brokers.items():
            if work is None:
                notes.append(f"{broker} is not installed: nothing measured there")
                continue
            rates: dict[str, list[float]] = {name: [] for name in KINDS}
            alone: dict[str, list[float]] = {name: [] for name in KINDS}
            for turn in range(turns):
                for name, kind in KINDS.items():
                    gc.collect()
                    rates[name].append((await pair(kind, work, DEPTH, seconds, next(places))).rate)
                    if turn == 0:
                        alone[name].append((await pair(kind, work, 1, seconds / 2, next(places))).p50)
            rate = {name: Median(found) for name, found in rates.items()}
            live[broker] = rate[DULY]
            series[broker] = rate
            figures += [Figure(f"{name}, {broker}", rate[name], "tasks/s") for name in (GMQTT, PAHO)]
            figures += [
                Figure(
                    f"duly, {broker}", rate[DULY], "tasks/s", rate[DULY] / rate[GMQTT], GMQTT, at_least=0.6
                ),
                Figure(f"duly, {broker}", rate[DULY], "tasks/s", rate[DULY] / rate[PAHO], PAHO, at_least=1),
            ]
            p50 = {name: Median(found) for name, found in alone.items()}
            figures += [Figure(f"{name}, {broker}, c=1, p50", value, "ms") for name, value in p50.items()]
            woken = Median([await drained(work, waiting, next(places)) for _ in range(max(1, turns // 2))])
            figures.append(
                Figure(
                    f"duly, {broker}, {waiting:,} that waited", woken, "tasks/s",
                    woken / rate[DULY], "its live rate", at_least=0.5,
                )
            )  # fmt: skip
        best = max(live.values())
        port = running.enter_context(redis_server(next(places)))
        for name in WORKERS:
            there = brokers["Mosquitto"] if name == "FastStream" else None
            at = there.port if there is not None else port
            try:
                found = None if at is None else await rival(name, at, seconds)
            except (RuntimeError, TimeoutError) as problem:
                notes.append(f"{name} did not finish: {problem}")
                continue
            if found is None:
                notes.append(f"{name} is not installed: no comparison with it")
                continue
            figures += [
                Figure(name, found, "tasks/s"),
                Figure("duly", best, "tasks/s", best / found, name, at_least=3),
            ]
    return Report("Nodes: pending → ack → complete, 214 bytes, 100 under way", figures, series, notes)
