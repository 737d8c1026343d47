"""With 100,000 messages and 1,000 devices every view is made in under 300 ms, on either engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Admit, Advance, Deliver, DeliveryRef, Finish, PutItem, Write
from duly.core.units import HOUR, MS
from duly.identity.accounts import Role
from duly.server.dashboard.message_views import STRETCH
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MESSAGES = 100_000
DEVICES = 1_000
LIMIT = 0.3
ANN = DashboardVisitor("ann", DashboardRole.ADMIN)


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.proof)]
)
async def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalHub]:
    """A hub with so many messages and devices."""
    settings: dict[str, str] = {}
    if request.param == "postgres":
        settings["ledger"] = request.getfixturevalue("postgres_server").create_database()
    it = LocalHub(Path(tmp_path_factory.mktemp("hub")), **settings)
    await it.start()
    ledger, now = it.hub.ledger, it.hub.ledger.clock.now()
    await it.add(Role.DEVICE, "d0")
    account = await ledger.item("principals", "d0")
    assert account is not None
    for n in range(1, DEVICES):
        await ledger.write(
            PutItem("principals", f"d{n}", account.replace(b'"token":"', b'"token":"%06d' % n))
        )
    await it.hub.accounts.refresh()
    first = now // MS - MESSAGES
    for start in range(0, MESSAGES, 5_000):
        groups: list[tuple[Write, ...]] = []
        for n in range(start, start + 5_000):
            kind = "alert_event" if n % 10 == 0 else "lock_control"
            body = (
                b'{"profile_id":"home","trigger_reason":"x","timestamp":1794900000000}'
                if n % 10 == 0
                else b"{}"
            )
            message = Message(f"app{n % 50}", f"{first + n}_{n}", kind, f"d{n % DEVICES}", body)
            admit = Admit(message, now + 24 * HOUR, now, listed=kind == "alert_event")
            end = State.UNKNOWN if n == 10 else State.DONE
            letter = DeliveryRef(message.key, "alert", "eve")
            dead = (Deliver(letter, now), Finish(letter, 0, State.FAILED, "given up"))
            groups.append((admit, *(dead if n % 100 == 0 else ()), Advance(message.key, end, now, Answer())))
        await ledger.commit(groups)
    yield it
    await it.stop()


QUESTIONS = [
    ("overview", {}),
    ("chart", {"span": "days"}),
    ("messages", {}),
    ("messages", {"state": "unknown"}),
    ("messages", {"to": "nobody-has-this-name"}),
    ("messages", {"scope": "app7", "kind": "lock_control", "limit": "200"}),
    ("messages", {"scope": "app10", "state": "unknown", "since": "1794900000000"}),
    ("messages", {"id": f"{1:064x}"}),
    ("devices", {}),
    ("devices", {"limit": "100"}),
    ("devices", {"only": "offline", "name": "9"}),
    ("device", {"name": "d999"}),
    ("alerts", {}),
    ("alerts", {"status": "acknowledged"}),
    ("alerts-status", {}),
    ("alerts-deliveries", {}),
    ("alerts-deliveries", {"limit": "100"}),
    ("alerts-deliveries", {"state": "open"}),
    ("alerts-deliveries", {"state": "all", "limit": "100"}),
    ("audit", {}),
    ("sessions", {}),
]


@pytest.mark.parametrize(("view", "query"), QUESTIONS, ids=str)
async def test_a_view_is_made_in_time(full: LocalHub, view: str, query: dict[str, str]) -> None:
    took = []
    for _ in range(10):  # the machine may be busy with something else: once in time is enough
        watch = Stopwatch()
        await full.hub.dashboard.view(ANN, view, query)
        took.append(watch.seconds)
        if took[-1] < LIMIT:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{view} {query} took {[round(one, 3) for one in took]} s")


async def test_one_message_among_them_is_found_by_its_id(full: LocalHub) -> None:
    page = await full.hub.dashboard.view(ANN, "messages", {})
    assert isinstance(page, dict)
    newest = page["messages"][0]
    watch = Stopwatch()
    found = await full.hub.dashboard.view(ANN, "messages", {"id": newest["id"]})
    one = await full.hub.dashboard.view(ANN, "message", {"scope": newest["scope"], "id": newest["id"]})
    assert watch.seconds < 2 * LIMIT
    assert isinstance(found, dict)
    assert isinstance(one, dict)
    assert [each["id"] for each in found["messages"]] == [newest["id"]]


async def test_the_one_among_all_is_found_by_a_rare_filter(full: LocalHub) -> None:
    query = {"scope": "app10", "state": "unknown", "since": "1000", "before": ""}
    for _ in range(2 * MESSAGES // STRETCH):  # a page that has taken long ends after one stretch
        page = await full.hub.dashboard.view(ANN, "messages", query)
        assert isinstance(page, dict)
        if page["messages"]:
            break
        query["before"] = page["next"]
    assert isinstance(page, dict)
    assert [one["to"] for one in page["messages"]] == ["d10"]


@pytest.mark.proof
async def test_a_person_pages_through_them(full: LocalHub, browser: Any) -> None:
    """Page by page without a repeat, back to the newest, and with a filter that a single one fits."""
    context = await browser.new_context(locale="en-GB")
    page = await context.new_page()
    page.set_default_timeout(GUARD * 1000)
    token = await full.hub.dashboard.access.make_link()
    await page.goto(f"{full.url}/login#{token}")
    await page.wait_for_selector(".health .part")
    await page.goto(f"{full.url}/messages")
    seen: list[str] = []
    for _ in range(4):
        first = page.locator("tbody tr a").first
        await first.wait_for()
        ids = await page.eval_on_selector_all("tbody tr a", "links => links.map((link) => link.title)")
        seen += ids
        await page.click("a:has-text('Older')")
        await page.wait_for_function("id => document.querySelector('tbody tr a')?.title !== id", arg=ids[0])
    assert len(seen) == len(set(seen)) == 200
    assert seen == sorted(seen, reverse=True)
    await page.click("a:has-text('Newest')")
    await page.wait_for_function("id => document.querySelector('tbody tr a')?.title === id", arg=seen[0])
    await page.select_option("select[name=state]", "unknown")
    await page.wait_for_url("**/messages?state=unknown")
    while not await page.locator("tbody tr .badge.warn").count():
        further = page.locator("a:has-text('Look further back')")
        if await further.count():
            await further.click()
        await page.wait_for_timeout(50)
    assert await page.locator("tbody tr").count() == 1
    await page.goto(f"{full.url}/devices")
    await page.wait_for_selector("text=of 1,000 are online")
    await page.click("a:has-text('Next page')")
    await page.wait_for_selector("a:has-text('First page')")
    await context.close()
