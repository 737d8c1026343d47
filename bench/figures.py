"""What does it cost to be seen? Two hubs taking turns: one that keeps no trail and is not asked for figures,
and one that writes every hop into its ledger while Prometheus reads `/metrics` every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request

import aiohttp

from bench.gateway import accounts
from bench.load import Pair
from bench.measure import Options, Report, folder, progress
from bench.overhead import Overhead, hub_of
from bench.processes import Server

SCRAPE_SECONDS = 1.0
UNSEEN, SEEN = "unseen", "seen"


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


async def run(options: Options) -> Report:
    turns, seconds = options.pick((8, 1.0), (15, 1.5))
    found = Overhead(UNSEEN, SEEN)
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
                await found.round(
                    name, server, talking, seconds, scrape(server.url) if name == SEEN else None
                )
    return found.report("Being seen: the trail in the ledger, and /metrics read every second")
