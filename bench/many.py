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
from pathlib import Path

from bench.gateway import accounts, measure
from bench.load import Found, Pair
from bench.measure import Figure, Median, Report, folder
from bench.servers import Server, hub, postgres_url

ONE, TWO, CROSSED = "one hub", "two hubs", "two hubs, app and device apart"
DEPTH = 10
PAIRS = 10


Place = tuple[str, str]
"""Where apps go, and where their devices go."""


async def both(one: Place, other: Place, talking: list[Pair], seconds: float) -> list[Found]:
    """Half of the pairs go to one place, half to the other."""
    half = len(talking) // 2
    return list(
        await asyncio.gather(
            measure(one[0], talking[:half], DEPTH, seconds, one[1]),
            measure(other[0], talking[half:], DEPTH, seconds, other[1]),
        )
    )


def postgres_worked() -> float:
    """Seconds of processor time that all of PostgreSQL's processes on this machine have used."""
    total = 0
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = place.read_text().rpartition(")")
            if name.endswith("(postgres"):
                fields = rest.split()
                total += sum(map(int, fields[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


async def run(quick: bool) -> Report:
    turns, seconds = (3, 1.5) if quick else (5, 3.0)
    title = "Many hubs on one PostgreSQL, 214 bytes, 10 apps × 10"
    with contextlib.ExitStack() as running:
        ledger = running.enter_context(postgres_url())
        if ledger is None:
            return Report(title, notes=["postgresql is not installed"])
        place = running.enter_context(folder())
        talking, _ = await accounts(place, PAIRS, ledger=ledger)
        hubs = [running.enter_context(hub("shared", place / f"{n}", ledger)) for n in range(2)]
        a, b = (server.url for server in hubs)
        ways = {
            ONE: ((a, a), (a, a)),
            TWO: ((a, a), (b, b)),
            CROSSED: ((a, b), (b, a)),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        waits: dict[str, list[float]] = {name: [] for name in ways}
        costs: dict[str, list[list[float]]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, (one, other) in ways.items():
                gc.collect()
                before, began = worked(hubs), time.perf_counter()
                found = await both(one, other, talking, seconds)
                lasted, used = (
                    time.perf_counter() - began,
                    [b - a for a, b in zip(before, worked(hubs), strict=True)],
                )
                rates[name].append(sum(each.rate for each in found))
                waits[name].append(max(each.p99 for each in found))
                count = sum(each.count for each in found)
                busy = sum(used) / lasted / (os.cpu_count() or 1)
                costs[name].append([*(part / count * 1e6 for part in used), busy * 100])
    rate = {name: Median(values) for name, values in rates.items()}
    figures = [
        Figure(ONE, rate[ONE], "cmd/s"),
        Figure(TWO, rate[TWO], "cmd/s", rate[TWO] / rate[ONE], ONE, at_least=1.5),
        Figure(CROSSED, rate[CROSSED], "cmd/s", rate[CROSSED] / rate[ONE], ONE),
        *(Figure(f"{name}, p99", Median(values), "ms") for name, values in waits.items()),
    ]
    notes = []
    for name, all_found in costs.items():
        hub_time, server_time, load_time, busy = (
            statistics.median(part) for part in zip(*all_found, strict=True)
        )
        notes.append(
            f"{name}: a command costs the hubs {hub_time:.0f} µs, PostgreSQL {server_time:.0f}, the load "
            f"{load_time:.0f}; together they had {busy:.0f} % of the {os.cpu_count()} cores"
        )
    return Report(title, figures, {"rates": rate}, notes)


def worked(hubs: list[Server]) -> tuple[float, float, float]:
    """Seconds of processor time that the hubs, PostgreSQL and the loads that have ended have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(server.worked for server in hubs), postgres_worked(), usage.ru_utime + usage.ru_stime
