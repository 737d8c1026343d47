"""What does it cost to be seen? Two hubs taking turns: one that keeps no trail and is not asked for figures,
and one that writes every hop into its ledger while Prometheus reads `/metrics` every second.

Judged by the least processor time of a command in many rounds: what is measured is small, and whatever else a
machine does only adds to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
import urllib.request
from pathlib import Path

import aiohttp

from bench.gateway import accounts, measure
from bench.load import Found, Pair
from bench.measure import Median, Options, Report, figure, folder, progress
from bench.processes import Server
from bench.servers import serving

DEPTH = 100
SCRAPE_SECONDS = 1.0
UNSEEN, SEEN = "unseen", "seen"


def hub_of(root: Path, **env: str) -> contextlib.AbstractContextManager[Server]:
    """A hub with settings by environment."""
    command = ["-m", "duly", "up", "--no-mqtt", "--port", "0", "--data", str(root)]
    return serving([sys.executable, *command], "the hub", **env)


def warm_up(url: str) -> None:
    """Read the figures once: what only that needs is loaded then."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        answer.read()


async def scrape(url: str) -> None:
    """Read the figures again and again, as Prometheus does."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/metrics") as answer:
                assert answer.status == 200
                await answer.read()
            await asyncio.sleep(SCRAPE_SECONDS)


async def one_round(name: str, server: Server, talking: list[Pair], seconds: float) -> tuple[float, Found]:
    """Processor time of a command (µs), and what the load found."""
    gc.collect()
    reading = asyncio.create_task(scrape(server.url)) if name == SEEN else None
    try:
        before = server.worked
        found = await measure(server, talking, DEPTH, seconds)
        return (server.worked - before) / found.count * 1e6, found
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def run(options: Options) -> Report:
    turns, seconds = options.pick((8, 1.0), (15, 1.5))
    costs: dict[str, list[float]] = {UNSEEN: [], SEEN: []}
    rates: dict[str, list[float]] = {UNSEEN: [], SEEN: []}
    with contextlib.ExitStack() as running:
        root = running.enter_context(folder())
        hubs: dict[str, tuple[Server, list[Pair]]] = {}
        for name, env in ((UNSEEN, {"DULY_TRAIL_MB": "0"}), (SEEN, {})):
            talking, _ = await accounts(root / name, 1)
            hubs[name] = (running.enter_context(hub_of(root / name, **env)), talking)
        await asyncio.to_thread(warm_up, hubs[SEEN][0].url)
        progress.plan(turns * len(hubs))
        for _ in range(turns):
            for name, (server, talking) in hubs.items():
                cost, found = await one_round(name, server, talking, seconds)
                costs[name].append(cost)
                rates[name].append(found.rate)
                progress.step(name)
    least = {name: min(found) for name, found in costs.items()}
    paired = [seen / unseen for unseen, seen in zip(costs[UNSEEN], costs[SEEN], strict=True)]
    base, rate = Median(costs[UNSEEN]), Median(rates[UNSEEN])
    return Report(
        "Being seen: the trail in the ledger, and /metrics read every second",
        [
            figure("unseen, processor time", base, "µs/cmd"),
            figure("seen, processor time", Median(costs[SEEN]), "µs/cmd", base, UNSEEN),
            figure("unseen, least processor time", least[UNSEEN], "µs/cmd"),
            figure("seen, least processor time", least[SEEN], "µs/cmd", least[UNSEEN], UNSEEN),
            figure("unseen, 1 app × 100", rate, "cmd/s"),
            figure("seen, 1 app × 100", Median(rates[SEEN]), "cmd/s", rate, UNSEEN),
        ],
        notes=[
            "judged by the least of the rounds: other work on the machine only adds",
            f"round by round {statistics.median(paired):.3f} ×, give or take {statistics.pstdev(paired):.2f}",
        ],
    )
