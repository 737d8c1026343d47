"""What does an open page cost? One hub, with a tab that shows the overview, its charts and the newest
messages, and without it, taking turns.
"""

from __future__ import annotations

import contextlib

import aiohttp

from bench.gateway import accounts
from bench.measure import Options, Report, folder, progress
from bench.overhead import Overhead, hub_of
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


async def run(options: Options) -> Report:
    turns, seconds = options.pick((8, 1.5), (15, 2.0))
    found = Overhead(CLOSED, OPEN)
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
                await found.round(CLOSED, server, talking, seconds)
                await found.round(OPEN, server, talking, seconds, show(page))
    return found.report("An open page: overview, charts and messages, live")
