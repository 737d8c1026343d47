"""The page while something that its hub depends on does not answer: it tells the truth, and comes back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duly.server import diagnostics
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.server.dashboard.visiting import PageVisitor
from tests.servers import Postgres, Redis

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

ANN = DashboardVisitor("ann", DashboardRole.ADMIN)


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of this test alone, since it dies."""
    it = Postgres()
    it.start()
    yield it
    it.stop()
    it.remove()


@pytest.fixture
def redis() -> Iterator[Redis]:
    it = Redis()
    it.start()
    yield it
    it.stop()
    it.remove()


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path, postgres: Postgres, redis: Redis) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", ledger=postgres.create_database(), notifier=redis.url)
    await it.start()
    yield it
    await it.stop()


async def test_a_part_that_does_not_answer_holds_up_no_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = asyncio.Event()

    async def no_answer(*_: object) -> dict[str, object]:
        await forever.wait()
        return {}

    it = LocalHub(tmp_path / "hub")
    await it.start()
    monkeypatch.setattr(diagnostics, "check_ledger", no_answer)
    async with asyncio.timeout(GUARD):
        for _ in range(3):
            seen = await it.hub.dashboard.view(ANN, "overview", {})
    assert isinstance(seen, dict)
    assert seen["health"]["ledger"]["problem"] == "no answer yet"
    forever.set()
    await it.stop()


async def test_the_overview_goes_on_and_says_what_is_down(
    local: LocalHub, postgres: Postgres, redis: Redis
) -> None:
    async with PageVisitor(local) as ann, ann.http.ws_connect("/page/live", origin=local.url) as page:
        await page.send_json({"id": 1, "view": "overview"})

        async def until(part: str, troubled: bool) -> None:
            """Until the page says how a part is, without being asked again."""
            async with asyncio.timeout(GUARD):
                while True:
                    health = (await page.receive_json())["is"]["health"]
                    said = health["down"] if part == "ledger" and health["down"] else health[part]
                    problem = said if isinstance(said, str) else said["problem"]
                    if bool(problem) is troubled:
                        return

        await until("notifier", False)
        await asyncio.to_thread(redis.stop, signal.SIGKILL)
        await until("notifier", True)
        await asyncio.to_thread(redis.start)
        await until("notifier", False)
        await asyncio.to_thread(postgres.stop, signal.SIGKILL)
        await until("ledger", True)
        async with ann.http.get("/metrics") as scraped:
            assert "\nduly_ready 0.0\n" in await scraped.text()
        await asyncio.to_thread(postgres.start)
        await until("ledger", False)


async def test_a_page_that_is_loaded_while_the_database_is_away_comes_back_by_itself(
    local: LocalHub, postgres: Postgres, browser: Any
) -> None:
    context = await browser.new_context(locale="en-GB")
    page = await context.new_page()
    page.set_default_timeout(GUARD * 1000)
    token = await local.hub.dashboard.access.make_link()
    await page.goto(f"{local.url}/login#{token}")
    await page.wait_for_selector(".health .part")
    await page.click("nav a[href='/devices']")
    await page.wait_for_selector(".empty")
    await asyncio.to_thread(postgres.stop, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        while local.hub.health.down is None:
            await asyncio.sleep(0.05)
    await page.reload()
    await page.wait_for_selector(".notice.bad:has-text('PostgreSQL')")
    await asyncio.to_thread(postgres.start)
    await page.wait_for_selector("h1:has-text('Devices')")
    await context.close()
