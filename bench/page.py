"""What does an open page cost? One hub, with a tab that shows the overview, its charts and the newest
messages, and without it, taking turns.

Judged by the least processor time of a command in many rounds: whatever else a machine does only adds to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics

import aiohttp

from bench.figures import DEPTH, hub_of
from bench.gateway import accounts, measure
from bench.load import Found, Pair
from bench.measure import Median, Options, Report, figure, folder, progress
from bench.processes import Server
from duly.server.dashboard.access import DashboardAccess
from duly.storage import file_url, open_ledger

CLOSED, OPEN = "no page", "open page"
VIEWS = ("overview", "chart", "messages")


async def show(page: aiohttp.ClientSession) -> None:
    """Show the views of the overview and of messages, as a tab does, until cancelled."""
    async with page.ws_connect("/page/live") as socket:
        for number, view in enumerate(VIEWS):
            await socket.send_json({"id": number, "view": view})
        async for _ in socket:
            pass


async def one_round(
    server: Server, talking: list[Pair], page: aiohttp.ClientSession | None, seconds: float
) -> tuple[float, Found]:
    """Processor time of a command (µs), and what the load found."""
    gc.collect()
    tab = None if page is None else asyncio.create_task(show(page))
    try:
        before = server.worked
        found = await measure(server, talking, DEPTH, seconds)
        return (server.worked - before) / found.count * 1e6, found
    finally:
        if tab is not None:
            tab.cancel()
            await asyncio.gather(tab, return_exceptions=True)


async def run(options: Options) -> Report:
    turns, seconds = options.pick((8, 1.5), (15, 2.0))
    costs: dict[str, list[float]] = {CLOSED: [], OPEN: []}
    rates: dict[str, list[float]] = {CLOSED: [], OPEN: []}
    with contextlib.ExitStack() as running:
        root = running.enter_context(folder())
        talking, _ = await accounts(root, 1)
        async with await open_ledger(file_url(root / "ledger.db")) as ledger:
            link = await DashboardAccess(ledger, None).make_link()
        server = running.enter_context(hub_of(root))
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(server.url, cookie_jar=jar) as page:
            async with page.post("/page/login", json={"link": link}) as answer:
                assert answer.status == 200
            progress.plan(2 * turns)
            for _ in range(turns):
                for name, tab in ((CLOSED, None), (OPEN, page)):
                    cost, found = await one_round(server, talking, tab, seconds)
                    costs[name].append(cost)
                    rates[name].append(found.rate)
                    progress.step(name)
    least = {name: min(found) for name, found in costs.items()}
    paired = [seen / unseen for unseen, seen in zip(costs[CLOSED], costs[OPEN], strict=True)]
    base, rate = Median(costs[CLOSED]), Median(rates[CLOSED])
    return Report(
        "An open page: overview, charts and messages, live",
        [
            figure("no page, processor time", base, "µs/cmd"),
            figure("open page, processor time", Median(costs[OPEN]), "µs/cmd", base, CLOSED),
            figure("no page, least processor time", least[CLOSED], "µs/cmd"),
            figure("open page, least processor time", least[OPEN], "µs/cmd", least[CLOSED], CLOSED),
            figure("no page, 1 app × 100", rate, "cmd/s"),
            figure("open page, 1 app × 100", Median(rates[OPEN]), "cmd/s", rate, CLOSED),
        ],
        notes=[
            "judged by the least of the rounds: other work on the machine only adds",
            f"round by round {statistics.median(paired):.3f} ×, give or take {statistics.pstdev(paired):.2f}",
        ],
    )
