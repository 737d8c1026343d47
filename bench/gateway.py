"""What does a command cost, app → hub → device and back, beyond what the libraries and the disk cost?

Each contender is a process of its own (`bench.relays`, a nats-server, or a hub), the apps and devices are
one process with the same code for all (`bench.load`; for NATS with nats-py, where the stream takes the
hub's root). Two concurrencies: one command at a time, and a hundred. duly and the lean relay commit
twice, before each of the two acks; the durable relay once, before the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

import duly
from bench.load import Found, Pair, Work
from bench.measure import Figure, Median, Options, Report, figure, folder, progress
from bench.processes import Server, answer_of
from bench.servers import hub, nats_server, redis_server, relay
from duly.identity.accounts import Accounts, Role

SHAPES = {"1 app × 100": (1, 100), "10 apps × 10": (10, 10)}
"""A hundred under way: an app and its device with a hundred, or ten of each with ten. The first is judged."""
BARE, DURABLE, LEAN, REDIS = "bare relay", "durable relay", "lean relay", "Redis relay"
JUDGED = next(iter(SHAPES))
NATS, SYNCED, DULY = "NATS, unsynced", "NATS, synced", "duly"
CLIENT_BOUND = 0.9
"""A load that uses more of a core than this is the limit itself."""

Contenders = dict[str, tuple[Server, list[Pair]]]


def pairs(count: int) -> list[Pair]:
    """Apps and devices of a contender that lets every client in."""
    names = [(f"app-{n}", f"lock-{n}") for n in range(count)]
    return [Pair(app, device, app, device) for app, device in names]


async def accounts(root: Path, count: int, idle: int = 0, ledger: str = "") -> tuple[list[Pair], list[Pair]]:
    """The same, with accounts in a hub's ledger; and devices that get no commands."""
    await asyncio.to_thread(root.mkdir, 0o700, exist_ok=True)
    async with await duly.open_ledger(ledger or f"sqlite:///{root}/ledger.db") as opened:
        book = Accounts(opened)
        talking = pairs(count)
        for pair in talking:
            pair.app_token = await book.add(Role.APP, pair.app)
            pair.device_token = await book.add(Role.DEVICE, pair.device)
            await book.grant(pair.app, pair.device)
        names = [f"idle-{n}" for n in range(idle)]
        waiting = [Pair("", name, "", await book.add(Role.DEVICE, name)) for name in names]
    return talking, waiting


async def measure(
    servers: Server | Sequence[Server], talking: list[Pair], depth: int, seconds: float, device_url: str = ""
) -> Found:
    """What the load finds at the first of these servers; if one of them dies, that is the error."""
    watched = [servers] if isinstance(servers, Server) else servers
    work = msgspec.json.encode(Work(watched[0].url, talking, depth, seconds, device_url=device_url))
    found = await answer_of("-m", "bench.load", work=work, seconds=seconds, servers=watched)
    return msgspec.json.decode(found, type=Found)


async def start(running: contextlib.ExitStack, notes: list[str]) -> Contenders:
    """All that are installed."""
    root = running.enter_context(folder())
    roots = (root / f"{n}" for n in itertools.count())
    most = max(apps for apps, _ in SHAPES.values())
    everybody = pairs(most)
    contenders: Contenders = {}
    for name, kind in ((BARE, "bare"), (DURABLE, "durable"), (LEAN, "lean")):
        contenders[name] = (running.enter_context(relay(kind, next(roots))), everybody)
    redis = running.enter_context(redis_server(next(roots)))
    if redis is None:
        notes.append("redis-server is not installed: no comparison with it")
    else:
        port = redis.url.rpartition(":")[2].partition("/")[0]
        contenders[REDIS] = (running.enter_context(relay("redis", next(roots), port)), everybody)
    for name, synced in ((NATS, False), (SYNCED, True)):
        server = running.enter_context(nats_server(next(roots), synced=synced))
        if server is None:
            notes.append(f"nats-py is not installed: no comparison with {name}")
        else:
            contenders[name] = (server, everybody)
    home = next(roots)
    known, _ = await accounts(home, most)
    contenders[DULY] = (running.enter_context(hub(home)), known)
    return contenders


async def run(options: Options) -> Report:
    turns, seconds = options.pick((3, 1.0), (5, 1.5))
    notes: list[str] = []
    with contextlib.ExitStack() as running:
        contenders = await start(running, notes)
        crowd = {shape: {name: list[Found]() for name in contenders} for shape in SHAPES}
        alone = {name: list[Found]() for name in contenders}
        work = {name: list[float]() for name in contenders}
        progress.plan(turns * len(contenders) * (len(SHAPES) + 1))
        for _ in range(turns):
            for shape, (apps, depth) in SHAPES.items():
                for name, (server, talking) in contenders.items():
                    gc.collect()
                    before = server.worked
                    found = await measure(server, talking[:apps], depth, seconds)
                    crowd[shape][name].append(found)
                    if shape == JUDGED:
                        work[name].append((server.worked - before) / found.count * 1e6)
                    progress.step(f"{name}, {shape}")
            for name, (server, talking) in contenders.items():
                alone[name].append(await measure(server, talking[:1], 1, seconds / 2))
                progress.step(f"{name}, c=1")
    notes += client_bound(crowd[JUDGED])
    notes.append(f"only '{JUDGED}' is judged")
    rates = {name: statistics.median(f.rate for f in found) for name, found in crowd[JUDGED].items()}
    return Report(
        "Gateway: app → hub → device and back, 214 bytes", figures(crowd, alone, work), rates, notes=notes
    )


def figures(
    crowd: dict[str, dict[str, list[Found]]], alone: dict[str, list[Found]], work: dict[str, list[float]]
) -> list[Figure]:
    """Every contender's figures, and duly's and the lean relay's beside each of the others."""
    made: list[Figure] = []
    for shape, all_found in crowd.items():
        rate = {name: Median([f.rate for f in found]) for name, found in all_found.items()}
        others = [name for name in rate if name != DULY]
        made += [figure(f"{name}, {shape}", rate[name], "cmd/s") for name in others]
        made += [figure(f"duly, {shape}", rate[DULY], "cmd/s", rate[name], name) for name in others]
    wait = {name: Median([one.p50 for one in found]) for name, found in alone.items()}
    made += [figure(f"{name}, c=1, p50", value, "ms") for name, value in wait.items() if name != DULY]
    made += [figure("duly, c=1, p50", wait[DULY], "ms", wait[name], name) for name in (DURABLE, LEAN)]
    made += [
        figure(f"{name}, {JUDGED}, p99", Median([f.p99 for f in found]), "ms")
        for name, found in crowd[JUDGED].items()
    ]
    made += [figure(f"{name}, processor time", Median(found), "µs/cmd") for name, found in work.items()]
    made += [
        figure(f"{name}, the load itself", Median([f.busy * 100 for f in found]), "% of a core")
        for name, found in crowd[JUDGED].items()
    ]
    return made


def client_bound(found: dict[str, list[Found]]) -> list[str]:
    """Which contenders could have done more with a faster client."""
    bound = [name for name, each in found.items() if statistics.median(f.busy for f in each) > CLIENT_BOUND]
    return [f"the client is the limit of: {', '.join(bound)}"] if bound else []
