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
from duly.identity.accounts import Accounts, Role

SHAPES = {"1 app × 100": (1, 100), "10 apps × 10": (10, 10)}
"""A hundred under way: an app and its device with a hundred, or ten of each with ten. The first is judged."""


def pairs(count: int) -> list[Pair]:
    """Apps and devices of a contender that lets everybody in."""
    names = [(f"app-{n}", f"lock-{n}") for n in range(count)]
    return [Pair(app, device, app, device) for app, device in names]


async def accounts(place: Path, count: int, idle: int = 0, ledger: str = "") -> tuple[list[Pair], list[Pair]]:
    """The same, with accounts in a hub's ledger; and devices that nobody talks to."""
    await asyncio.to_thread(place.mkdir, exist_ok=True)
    async with await duly.open_ledger(ledger or f"sqlite:///{place}/ledger.db") as opened:
        book = Accounts(opened)
        talking = pairs(count)
        for pair in talking:
            pair.app_token = await book.add(Role.APP, pair.app)
            pair.device_token = await book.add(Role.DEVICE, pair.device)
            await book.grant(pair.app, pair.device)
        names = [f"idle-{n}" for n in range(idle)]
        waiting = [Pair("", name, "", await book.add(Role.DEVICE, name)) for name in names]
    return talking, waiting


async def measure(url: str, talking: list[Pair], depth: int, seconds: float, device_url: str = "") -> Found:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    work = msgspec.json.encode(Work(url, talking, depth, seconds, device_url=device_url)) + b"\n"
    try:
        async with asyncio.timeout(60 + seconds):
            out, _ = await child.communicate(work)
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode:
        raise RuntimeError(f"the load on {url} failed")
    return msgspec.json.decode(out, type=Found)


BARE, DURABLE, REDIS = "bare relay", "durable relay", "Redis relay"
JUDGED = next(iter(SHAPES))
NATS, SYNCED, DULY = "NATS", "NATS, synced", "duly"


async def run(quick: bool) -> Report:
    turns, seconds = (3, 1.0) if quick else (5, 1.5)
    notes: list[str] = []
    with contextlib.ExitStack() as running:
        place = running.enter_context(folder())
        places = (place / f"{n}" for n in itertools.count())
        most = max(apps for apps, _ in SHAPES.values())
        everybody = pairs(most)
        contenders = {
            BARE: (running.enter_context(hub("bare", next(places))), everybody),
            DURABLE: (running.enter_context(hub("durable", next(places))), everybody),
        }
        port = running.enter_context(redis_server(next(places)))
        if port is None:
            notes.append("redis-server is not installed: no comparison with it")
        else:
            contenders[REDIS] = (running.enter_context(hub("redis", next(places), str(port))), everybody)
        for name, synced in ((NATS, False), (SYNCED, True)):
            contenders[name] = (running.enter_context(nats_server(next(places), synced=synced)), everybody)
        home = next(places)
        known, _ = await accounts(home, most)
        contenders[DULY] = (running.enter_context(hub("duly", home)), known)

        crowd = {shape: {name: list[Found]() for name in contenders} for shape in SHAPES}
        alone = {name: list[Found]() for name in contenders}
        work = {name: list[float]() for name in contenders}
        for _ in range(turns):
            for shape, (apps, depth) in SHAPES.items():
                for name, (server, talking) in contenders.items():
                    gc.collect()
                    before = server.worked
                    found = await measure(server.url, talking[:apps], depth, seconds)
                    crowd[shape][name].append(found)
                    if shape == JUDGED:
                        work[name].append((server.worked - before) / found.count * 1e6)
            for name, (server, talking) in contenders.items():
                alone[name].append(await measure(server.url, talking[:1], 1, seconds / 2))

    figures: list[Figure] = []
    bounds = {BARE: 0.35, DURABLE: 0.7, REDIS: 2, NATS: 1, SYNCED: 1}
    rates: dict[str, dict[str, Median]] = {}
    for shape, all_found in crowd.items():
        rate = rates[shape] = {name: Median([f.rate for f in found]) for name, found in all_found.items()}
        figures += [Figure(f"{name}, {shape}", rate[name], "cmd/s") for name in rate if name != DULY]
        figures += [
            Figure(
                f"duly, {shape}",
                rate[DULY],
                "cmd/s",
                rate[DULY] / rate[name],
                name,
                bounds[name] if shape == JUDGED else None,
            )
            for name in rate
            if name != DULY
        ]
    wait = {name: Median([one.p50 for one in found]) for name, found in alone.items()}
    figures += [Figure(f"{name}, c=1, p50", value, "ms") for name, value in wait.items() if name != DULY]
    figures.append(Figure("duly, c=1, p50", wait[DULY], "ms", wait[DULY] / wait[DURABLE], DURABLE, at_most=2))
    figures += [
        Figure(f"{name}, {JUDGED}, p99", Median([f.p99 for f in found]), "ms")
        for name, found in crowd[JUDGED].items()
    ]
    figures += [Figure(f"{name}, processor time", Median(found), "µs/cmd") for name, found in work.items()]
    notes.append(
        "c=1, commands a second: "
        + ", ".join(
            f"{name} {statistics.median(f.rate for f in found):,.0f}" for name, found in alone.items()
        )
    )
    notes.append("only the shape of one app is judged: DESIGN's targets were set on it")
    return Report("Gateway: app → hub → device and back, 214 bytes", figures, {"rates": rates[JUDGED]}, notes)
