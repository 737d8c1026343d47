"""What do two hubs on one PostgreSQL carry, compared with one; and what does it cost when an app and
its device are on different ones?

The same load each time, from two processes: ten apps, each with its device and ten commands under way. Load,
hubs and PostgreSQL share this machine's cores, so what two hubs can gain is bounded by what is left of those:
the notes say where the time went.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import statistics
import time
from collections.abc import Sequence

from bench.gateway import accounts, measure
from bench.load import Found, Pair
from bench.measure import Median, Options, Report, figure, folder, progress
from bench.processes import Server
from bench.servers import postgres_server, shared_hub

ONE, TWO, CROSSED = "one hub", "two hubs", "two hubs, app and device apart"
DEPTH = 10
PAIRS = 10


Way = tuple[Server, Server]
"""Where apps go, and where their devices go."""


async def both(one: Way, other: Way, talking: list[Pair], seconds: float) -> list[Found]:
    """Half of the pairs go one way, half the other."""
    half = len(talking) // 2
    return list(
        await asyncio.gather(
            measure(one, talking[:half], DEPTH, seconds, one[1].url),
            measure(other, talking[half:], DEPTH, seconds, other[1].url),
        )
    )


def worked(hubs: Sequence[Server], postgres: Server) -> tuple[float, float, float]:
    """Seconds of processor time that the hubs, PostgreSQL and the loads that have ended have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(server.worked for server in hubs), postgres.worked, usage.ru_utime + usage.ru_stime


async def run(options: Options) -> Report:
    turns, seconds = options.pick((3, 1.5), (5, 3.0))
    title = "Many hubs on one PostgreSQL, 214 bytes, 10 apps × 10"
    with contextlib.ExitStack() as running:
        postgres = running.enter_context(postgres_server())
        if postgres is None:
            return Report(title, notes=["postgresql is not installed"])
        root = running.enter_context(folder())
        talking, _ = await accounts(root, PAIRS, ledger=postgres.url)
        a, b = hubs = [running.enter_context(shared_hub(root / f"{n}", postgres.url)) for n in range(2)]
        ways: dict[str, tuple[Way, Way]] = {
            ONE: ((a, a), (a, a)),
            TWO: ((a, a), (b, b)),
            CROSSED: ((a, b), (b, a)),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        waits: dict[str, list[float]] = {name: [] for name in ways}
        costs: dict[str, list[list[float]]] = {name: [] for name in ways}
        progress.plan(turns * len(ways))
        for _ in range(turns):
            for name, (one, other) in ways.items():
                gc.collect()
                before, began = worked(hubs, postgres), time.perf_counter()
                found = await both(one, other, talking, seconds)
                lasted = time.perf_counter() - began
                used = [then - first for first, then in zip(before, worked(hubs, postgres), strict=True)]
                rates[name].append(sum(each.rate for each in found))
                waits[name].append(max(each.p99 for each in found))
                count = sum(each.count for each in found)
                busy = sum(used) / lasted / (os.cpu_count() or 1)
                costs[name].append([*(part / count * 1e6 for part in used), busy * 100])
                progress.step(name)
    rate = {name: Median(values) for name, values in rates.items()}
    figures = [
        figure(ONE, rate[ONE], "cmd/s"),
        figure(TWO, rate[TWO], "cmd/s", rate[ONE], ONE),
        figure(CROSSED, rate[CROSSED], "cmd/s", rate[ONE], ONE),
        *(figure(f"{name}, p99", Median(values), "ms") for name, values in waits.items()),
    ]
    notes = []
    for name, all_found in costs.items():
        parts = [Median(list(part)) for part in zip(*all_found, strict=True)]
        for part, what in zip(parts, ("hubs", "PostgreSQL"), strict=False):
            figures.append(figure(f"{name}, {what}, processor time", part, "µs/cmd"))
        hub_time, server_time, load_time, busy = map(statistics.median, (part.rounds for part in parts))
        notes.append(
            f"{name}: a command costs the hubs {hub_time:.0f} µs, PostgreSQL {server_time:.0f}, the load "
            f"{load_time:.0f}; together they had {busy:.0f} % of the {os.cpu_count()} cores"
        )
    return Report(title, figures, dict(rate), notes=notes)
