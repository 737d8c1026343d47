"""The page in a real browser, at its edges: links that do not work, two people in one browser, the demo, long
texts and texts from right to left, a phone without a touch screen, and the hub's sentences in Chinese."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duly.apps.alerts import verbs
from duly.clients.app import App
from duly.clients.device import Device
from duly.core.messages import key_of
from duly.identity.accounts import Role
from duly.server.dashboard import live_updates
from duly.server.dashboard.access import LINK_LASTS
from duly.server.dashboard.visitors import DashboardRole
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.server.dashboard.test_browser import SECONDS, SlowLock, Visitor, report

pytestmark = pytest.mark.asyncio(loop_scope="module")

PHONE = {"width": 360, "height": 740}
LONG = "w" * 300
ARABIC = "دخان في المطبخ \u202e(1)"
LINES = (
    "(node) => { const all = new Range(); all.selectNodeContents(node); return all.getClientRects().length; }"
)
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", registration="open", allow_private_webhooks=True)
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.add(Role.SENTINEL, "watch")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def visitor(browser: Any, local: LocalHub) -> AsyncIterator[Visitor]:
    context = await browser.new_context(locale="en-GB", viewport={"width": 1280, "height": 900})
    it = Visitor(local, context)
    yield it
    await context.close()
    assert it.problems == []


async def link(local: LocalHub, role: str = "admin", name: str = "ann") -> str:
    token = await local.hub.dashboard.access.make_link(name, DashboardRole.named(role))
    return f"{local.url}/login#{token}"


# ── links and sessions ───────────────────────────────────────────────────────────────────────────


async def test_a_wrong_link_and_one_that_is_too_old_are_refused_in_words(
    local: LocalHub, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await link(local)
    clock = local.hub.ledger.clock
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + LINK_LASTS + 1)
    for path in ("/login#nothing-of-the-kind", old.removeprefix(local.url)):
        page = await visitor.tab(path)
        await page.wait_for_selector(".notice.bad:has-text('duly dashboard link')")
        assert "#" not in page.url
        assert await page.locator("nav").count() == 0


async def test_another_login_in_the_same_browser_shows_in_every_tab(
    local: LocalHub, visitor: Visitor
) -> None:
    """The cookie is the browser's: a tab that shows an admin's buttons must not keep them."""
    lock = SlowLock(local)
    async with lock.device:
        first = await visitor.open("admin", "ann")
        await first.goto(f"{local.url}/device?name=lock")
        await first.wait_for_selector("button:has-text('Send')")
        second = await visitor.open("viewer", "vic")
        assert await second.locator("nav a[href='/audit']").count() == 0
        await first.click("button:has-text('Send')")
        await first.wait_for_selector(".toast:has-text('You are vic')")
        await first.wait_for_selector("text=needs the role operator")
        assert await first.inner_text(".who strong") == "vic"
    assert lock.effects == []


async def test_two_browsers_with_different_roles_see_the_same_and_may_do_different_things(
    local: LocalHub, visitor: Visitor, browser: Any
) -> None:
    lock = SlowLock(local)
    context = await browser.new_context(locale="en-GB")
    async with lock.device:
        admin = await visitor.open("admin", "ann")
        await admin.goto(f"{local.url}/audit")
        viewer = await Visitor(local, context).open("viewer", "vic")
        await viewer.goto(f"{local.url}/messages")
        await viewer.wait_for_selector(".empty")
        await admin.wait_for_selector("td:has-text('vic')")
        other = await visitor.tab("/device?name=lock")
        await other.click("button:has-text('Send')")
        await viewer.wait_for_selector("tbody tr .badge.good")
        await admin.wait_for_selector("td:has-text('command.send')")
    await context.close()
    assert len(lock.effects) == 1


async def test_one_page_too_many_says_so_and_goes_on_when_another_is_closed(
    local: LocalHub, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_updates, "PAGES_EACH", 1)
    first = await visitor.open()
    await first.wait_for_selector(".health .part")
    second = await visitor.tab("/")
    await second.wait_for_selector(".offline-bar:has-text('Too many pages are open')")
    await first.close()
    await second.wait_for_selector(".health .part")
    await second.wait_for_selector(".offline-bar", state="hidden")


# ── a hub at which nothing has happened ──


async def test_what_was_not_measured_is_no_zero_and_an_offline_device_can_be_sent_to(
    local: LocalHub, visitor: Visitor
) -> None:
    page = await visitor.open()
    await page.wait_for_selector(".tile:has-text('Accepted') .value:has-text('0')")
    assert await page.locator(".tile:has-text('Time (median)') .value").inner_text() == "–"
    assert "0 ms" not in await page.locator(".tiles").inner_text()
    await page.goto(f"{local.url}/device?name=lock")
    await page.click("button:has-text('Send')")
    await page.wait_for_selector(".notice.bad:has-text('Tick “Keep it for the device')")
    await page.check("input[type=checkbox]")
    await page.click("button:has-text('Send')")
    await page.wait_for_selector("[data-state=accepted]")


@pytest.mark.parametrize("width", [390, 880, 1100, 1280])
async def test_a_date_of_the_filter_shows_its_time(local: LocalHub, visitor: Visitor, width: int) -> None:
    page = await visitor.open()
    await page.set_viewport_size({"width": width, "height": 800})
    await page.goto(f"{local.url}/messages?since=1795116060000")
    since = page.locator("input[type=datetime-local]").first
    await since.wait_for()
    shown = await since.bounding_box()
    assert shown["width"] >= 210, "twelve hours with AM or PM need as much"
    assert await page.evaluate(TOO_WIDE) <= 0


# ── times ──


async def test_a_page_that_stays_open_says_how_long_ago_anew(local: LocalHub, visitor: Visitor) -> None:
    """The hub sends a row again when something in it changes; time passes without that."""
    lock = SlowLock(local)
    async with lock.device, App(local.url, local.tokens["phone"]) as app:
        await app.send("lock", "lock_control", {"open": True})
    page = await visitor.open()
    await page.clock.install()
    await page.goto(f"{local.url}/devices")
    await page.wait_for_selector("time:text-matches('now|s ago$')")
    await page.clock.fast_forward("07:00")
    await page.wait_for_selector("time:text-matches('^[78] min ago$')")
    await page.goto(f"{local.url}/messages")
    accepted = page.locator("tbody time").first
    assert len(await accepted.inner_text()) == len("12:34:56")
    await page.clock.fast_forward("24:00:00")
    await page.wait_for_selector("tbody time:text-matches('^[0-9/]{10} [0-9:]{8}$')")


# ── the demo ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(120)
async def test_the_demo_can_be_watched(browser: Any, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "duly", "demo", "--page", "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stderr is not None
    context = await browser.new_context(locale="en-GB")
    try:
        async with asyncio.timeout(GUARD):
            while "/login#" not in (line := (await process.stderr.readline()).decode()):
                assert line, "it ended"
        page = await context.new_page()
        page.set_default_timeout(SECONDS)
        await page.goto(line.strip())
        await page.wait_for_selector("td:has-text('lock_control')")
        await page.click("nav a[href='/messages']")
        await page.wait_for_selector("tbody tr:has-text('dev_control') .badge.good")
        await page.click("nav a[href='/devices']")
        await page.wait_for_selector("tr:has-text('lamp')")
    finally:
        await context.close()
        process.send_signal(signal.SIGINT)
        said, _ = await process.communicate()
    assert process.returncode == 0, said


# ── texts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [1280, 360])
async def test_long_texts_and_texts_from_right_to_left_stay_in_their_place(
    local: LocalHub, browser: Any, width: int
) -> None:
    name = "d" * 64
    await local.add(Role.DEVICE, name)
    await local.hub.accounts.grant("phone", name)
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"nobody": True}))
    await report(local, "a" * 64, LONG)
    await report(local, "b" * 64, ARABIC)
    async with Device(local.url, local.tokens[name]) as device:
        await device.push("status_report", {"version": LONG, "note": ARABIC})
        async with App(local.url, local.tokens["phone"]) as app:
            await app.send(name, "lock_control", {"text": LONG + ARABIC})
    await local.hub.dashboard.audit.add("ann", "admin", "alert.ack", LONG, ARABIC, f"refused: {LONG}")
    context = await browser.new_context(locale="en-GB", viewport={"width": width, "height": 740})
    page = await Visitor(local, context).open()
    for path, ready in (
        ("/", "td:has-text('lock_control')"),
        ("/messages", "tbody tr"),
        ("/devices", f"td:has-text('{name}')"),
        (f"/device?name={name}", "td:has-text('status_report')"),
        ("/alerts?view=all", "tbody a:has-text('دخان')"),
        (f"/alert?sentinel=watch&event={'a' * 64}", "dl"),
        (f"/alert?sentinel=watch&event={'b' * 64}", "h1:has-text('دخان')"),
        ("/audit", "td:has-text('alert.ack')"),
    ):
        await page.goto(local.url + path)
        await page.wait_for_selector(ready)
        assert await page.evaluate(TOO_WIDE) <= 0, path
    heading = page.locator("td:has-text('دخان')").first
    assert await heading.evaluate("node => getComputedStyle(node).unicodeBidi") == "plaintext"
    await context.close()


async def test_reasons_are_chinese_on_a_chinese_page(local: LocalHub, browser: Any) -> None:
    unreachable = {"send": ["http://127.0.0.1:9/hook"], "tries": 1}
    await local.hub.alerts.profiles.set("home", verbs.draft_of(unreachable))
    await report(local, "e" * 64, "water")
    context = await browser.new_context(locale="zh-CN")
    one = Visitor(local, context)
    page = await one.open("operator", "vic")
    await page.goto(f"{local.url}/alerts?view=dead")
    await page.wait_for_selector("td:has-text('尝试 1 次后放弃：无法连接')")
    await page.goto(f"{local.url}/device?name=lock")
    await page.click("button:has-text('发送')")
    await page.wait_for_selector(".notice.bad:has-text('设备离线。请勾选“设备离线时保留”')")
    await page.goto(f"{local.url}/device?name=nothing")
    await page.wait_for_selector(".empty:has-text('没有设备或节点')")
    await page.goto(f"{local.url}/login#wrong")
    await page.wait_for_selector(".notice.bad:has-text('这个链接已经用过或已过期')")
    await context.close()


# ── keyboard ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_is_sent_by_keyboard_alone_on_a_narrow_screen(local: LocalHub, browser: Any) -> None:
    """From the overview to the device's page and its form, by Tab and Enter; the focus is in sight."""
    lock = SlowLock(local)
    context = await browser.new_context(locale="en-GB", viewport=PHONE)
    async with lock.device:
        page = await Visitor(local, context).open()

        async def focus(words: str) -> None:
            """Press Tab until the focus is on what has these words."""
            for _ in range(60):
                await page.keyboard.press("Tab")
                now = await page.evaluate("(e => [e.tagName, e.textContent])(document.activeElement)")
                if now[0] in ("A", "BUTTON") and words in now[1]:
                    box = await page.evaluate(
                        "(b => [b.left, b.right])(document.activeElement.getBoundingClientRect())"
                    )
                    assert -1 <= box[0] < box[1] <= PHONE["width"] + 1, f"{words} is out of sight: {box}"
                    return
            raise AssertionError(f"no Tab leads to {words}")

        await page.wait_for_selector(".health .part")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to content"
        await focus("Devices")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("td a:has-text('lock')")
        await focus("lock")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("button:has-text('Send')")
        await focus("Send")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[data-state=done]")
    await context.close()
    assert len(lock.effects) == 1


# ── what an operator sees ────────────────────────────────────────────────────────────────────────


async def test_what_a_person_did_is_shown_at_once_also_by_a_busy_hub(
    local: LocalHub, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"nobody": True}))
    await report(local, "e" * 64, "water")
    monkeypatch.setitem(live_updates.PACE, "alerts", 600.0)  # a busy hub makes a view again much later
    context = await browser.new_context(locale="en-GB")
    page = await Visitor(local, context).open()
    await page.goto(f"{local.url}/alerts")
    await page.click("button:has-text('Acknowledge')")
    await page.wait_for_selector("tr:has-text('water') .badge:has-text('acknowledged')")
    await context.close()


async def test_all_charts_tell_the_values_at_the_pointer(
    local: LocalHub, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.async_api import expect  # there is none where the browser is missing

    began = 1_800_000_000_000
    columns = ["time", "accepted", "done", "duplicate", "refused", "retries", "p50_ms", "p99_ms"]
    columns += ["pending", "connections", "commit_p50_ms", "commit_p99_ms"]
    rows = [[began + 1000 * i, 100 + i, *range(1, 11)] for i in range(60)]
    shown = {"columns": columns, "rows": rows, "seconds": 1}
    monkeypatch.setattr(local.hub.metrics.telemetry, "chart", lambda _: shown)
    context = await browser.new_context(locale="en-GB", viewport={"width": 1280, "height": 900})
    page = await Visitor(local, context).open()
    accepted, captions = page.locator(".legend strong").first, page.locator("figcaption .muted")
    await expect(accepted).to_have_text("159")
    assert await captions.all_inner_texts() == ["per second", "ms", "", "ms"]
    over = page.locator(".chart .u-over").first
    await over.hover(position={"x": 1, "y": 20})
    await expect(accepted).to_have_text("100")
    first, *others = [text.partition(" · ")[0] for text in await captions.all_inner_texts()]
    assert first.count(":") == 2, "the moment of which the values are"
    assert others == [first] * 3, "the same moment in each chart"
    await page.mouse.move(0, 0)
    await expect(accepted).to_have_text("159")
    await context.close()


async def test_a_chart_has_a_hole_where_nothing_was_measured(visitor: Visitor) -> None:
    page = await visitor.open()
    rows = [[0, 5], [60_000, 6], [900_000, 7], [960_000, 8]]
    found = await page.evaluate(
        "(rows) => import('/static/charts.js').then((charts) => charts.withHoles(rows, 60))", rows
    )
    assert found == [*rows[:2], [120_000], *rows[2:]]


@pytest.mark.parametrize("width", [1280, 1000])
async def test_a_word_stays_whole_beside_a_long_reason(local: LocalHub, browser: Any, width: int) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {}, queue=True)
        await command.accepted()
        record = await local.hub.ledger.find(key_of("phone", command.id))
        assert record is not None
        await local.hub.gateway.cancel(record.message, "because of a reason that needs many words " * 4)
        context = await browser.new_context(locale="en-GB", viewport={"width": width, "height": 900})
        page = await Visitor(local, context).open()
        await page.goto(f"{local.url}/messages")
        await page.wait_for_selector("td:has-text('many words')")
        for text in ("lock_control", "phone"):
            lines = await page.locator(f"tbody td >> text={text}").first.evaluate(LINES)
            assert lines == 1, f"{text} is broken"
        await context.close()
