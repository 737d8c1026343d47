"""What does a command cost, app → hub → device and back, beyond what the libraries and the disk cost?

Each contender is a process of its own (`bench.hubs`, or a nats-server), the apps and devices are one process
with the same code for all (`bench.load`; for NATS with nats-py, where the stream takes the hub's place).
Two concurrencies: one command at a time, and a hundred. duly commits twice, before each of the two acks; the
durable floor once, before the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import statistics
import sys
from pathlib import Path

import msgspec

import duly
from bench.load import Found, Pair, Work
from bench.measure import Figure, Median, Report, folder
from bench.servers import hub, nats_server, redis_server
from duly.auth import Accounts, Role

APPS, DEPTH = 10, 10
"""A hundred under way: ten apps with ten each, every app with a device of its own."""


def pairs(count: int) -> list[Pair]:
    """Apps and devices of a contender that lets everybody in."""
    names = [(f"app-{n}", f"lock-{n}") for n in range(count)]
    return [Pair(app, device, app, device) for app, device in names]


async def accounts(place: Path, count: int, idle: int = 0) -> tuple[list[Pair], list[Pair]]:
    """The same, with accounts in a hub's ledger; and devices that nobody talks to."""
    place.mkdir(exist_ok=True)
    async with await duly.open_ledger(f"sqlite:///{place}/ledger.db") as ledger:
        book = Accounts(ledger)
        talking = pairs(count)
        for pair in talking:
            pair.app_token = await book.add(Role.APP, pair.app)
            pair.device_token = await book.add(Role.DEVICE, pair.device)
            await book.grant(pair.app, pair.device)
        names = [f"idle-{n}" for n in range(idle)]
        waiting = [Pair("", name, "", await book.add(Role.DEVICE, name)) for name in names]
    return talking, waiting


async def measure(url: str, talking: list[Pair], depth: int, seconds: float) -> Found:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    work = msgspec.json.encode(Work(url, talking, depth, seconds)) + b"\n"
    try:
        async with asyncio.timeout(60 + seconds):
            out, _ = await child.communicate(work)
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode:
        raise RuntimeError(f"the load on {url} failed")
    return msgspec.json.decode(out, type=Found)


BARE, DURABLE, REDIS = "bare relay", "relay, one SQLite commit", "relay, Redis SET NX"
NATS, SYNCED, DULY = "NATS JetStream, unsynced", "NATS JetStream, synced", "duly"


async def run(quick: bool) -> Report:
    turns, seconds = (3, 1.0) if quick else (7, 2.0)
    notes: list[str] = []
    with contextlib.ExitStack() as running, contextlib.ExitStack():
        place = running.enter_context(folder())
        places = (place / f"{n}" for n in itertools.count())
        everybody = pairs(APPS)
        contenders = {
            BARE: (running.enter_context(hub("bare", next(places))).url, everybody),
            DURABLE: (running.enter_context(hub("durable", next(places))).url, everybody),
        }
        port = running.enter_context(redis_server(next(places)))
        if port is None:
            notes.append("redis-server is not installed: no comparison with it")
        else:
            url = running.enter_context(hub("redis", next(places), str(port))).url
            contenders[REDIS] = (url, everybody)
        for name, synced in ((NATS, False), (SYNCED, True)):
            contenders[name] = (running.enter_context(nats_server(next(places), synced=synced)), everybody)
        home = next(places)
        known, _ = await accounts(home, APPS)
        contenders[DULY] = (running.enter_context(hub("duly", home)).url, known)

        crowd: dict[str, list[Found]] = {name: [] for name in contenders}
        alone: dict[str, list[Found]] = {name: [] for name in contenders}
        for _ in range(turns):
            for name, (url, talking) in contenders.items():
                gc.collect()
                crowd[name].append(await measure(url, talking, DEPTH, seconds))
            for name, (url, talking) in contenders.items():
                alone[name].append(await measure(url, talking[:1], 1, seconds / 2))

    rate = {name: Median([one.rate for one in found]) for name, found in crowd.items()}
    wait = {name: Median([one.p50 for one in found]) for name, found in alone.items()}
    bounds = {BARE: 0.35, DURABLE: 0.7, REDIS: 2, NATS: 1, SYNCED: 1}
    figures = [Figure(f"{name}, c=100", rate[name], "cmd/s") for name in rate if name != DULY]
    figures += [
        Figure("duly, c=100", rate[DULY], "cmd/s", rate[DULY] / rate[name], name, bounds[name])
        for name in rate
        if name != DULY
    ]
    figures += [
        Figure(f"{name}, c=100, p99", Median([f.p99 for f in found]), "ms") for name, found in crowd.items()
    ]
    figures += [
        Figure(f"{name}, c=1, p50", value, "ms")
        if name != DULY
        else Figure("duly, c=1, p50", value, "ms", value / wait[DURABLE], DURABLE, at_most=2)
        for name, value in wait.items()
    ]
    notes.append(
        "c=1, commands a second: "
        + ", ".join(
            f"{name} {statistics.median(f.rate for f in found):,.0f}" for name, found in alone.items()
        )
    )
    return Report("Gateway: app → hub → device and back, 214 bytes", figures, {"rates": rate}, notes)
