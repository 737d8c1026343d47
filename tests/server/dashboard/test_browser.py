"""The page in a real browser: what a person does there, also while the hub is cut off and comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from duly.apps.alerts import verbs
from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.core.messages import key_of
from duly.identity.accounts import Role
from duly.server.dashboard.visitors import DashboardRole
from tests.guard import GUARD
from tests.local_hub import LocalHub

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = GUARD * 1000
SCRIPT = "<img src=x onerror=\"globalThis.pwned='yes'\"><script>globalThis.pwned='yes'</script>"


ON_EACH_LEDGER = pytest.mark.parametrize(
    "local", ["sqlite", pytest.param("postgresql", marks=pytest.mark.proof)], indirect=True
)


class SlowLock:
    """A lock that writes down what it has done, and can be held up in the middle of it."""

    def __init__(self, local: LocalHub) -> None:
        self.effects: list[str] = []
        self.free = asyncio.Event()
        self.free.set()
        self.device = Device(local.url, local.tokens["lock"])

        @self.device.on("lock_control")
        async def lock_control(command: Command) -> dict[str, Any]:
            self.effects.append(command.id)
            await self.free.wait()
            return {"open": True}


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalHub]:
    settings: dict[str, Any] = {"registration": "open", "allow_private_webhooks": True}
    if getattr(request, "param", "") == "postgresql":
        server = request.getfixturevalue("postgres_server")
        settings["ledger"] = server.create_database()
    it = LocalHub(tmp_path / "hub", **settings)
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.add(Role.SENTINEL, "watch")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def lock(local: LocalHub) -> AsyncIterator[SlowLock]:
    it = SlowLock(local)
    async with it.device:
        yield it
        it.free.set()


class Visitor:
    """A person with a browser."""

    def __init__(self, local: LocalHub, context: Any) -> None:
        self._local = local
        self.context = context
        self.problems: list[str] = []

    async def open(self, role: str = "admin", name: str = "ann") -> Any:
        """A tab that has logged in by a link."""
        page = await self._new_page()
        token = await self._local.hub.dashboard.access.make_link(name, DashboardRole.named(role))
        await page.goto(f"{self._local.url}/login#{token}")
        await page.wait_for_selector("nav")
        assert "#" not in page.url, "the token does not stay in the address"
        return page

    async def tab(self, path: str) -> Any:
        """Another tab, in the same session."""
        page = await self._new_page()
        await page.goto(f"{self._local.url}{path}")
        return page

    async def _new_page(self) -> Any:
        """A tab whose errors are problems, also what its content policy forbids."""
        page = await self.context.new_page()
        page.set_default_timeout(SECONDS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self._heard(said.text))
        return page

    def _heard(self, said: str) -> None:
        if "Content Security Policy" in said:
            self.problems.append(said)


@pytest_asyncio.fixture(loop_scope="module")
async def visitor(browser: Any, local: LocalHub) -> AsyncIterator[Visitor]:
    context = await browser.new_context(locale="en-GB", viewport={"width": 1280, "height": 900})
    it = Visitor(local, context)
    yield it
    await context.close()
    assert it.problems == []


async def report(local: LocalHub, event: str, reason: str) -> None:
    """Report an alert, as a sentinel does."""
    data = {"profile_id": "home", "trigger_reason": reason, "timestamp": round(time.time() * 1000)}
    frame = {"type": "alert_event", "seq_id": event, "data": data}
    heads = {"Authorization": f"Bearer {local.tokens['watch']}"}
    async with (
        aiohttp.ClientSession(local.url, headers=heads) as http,
        http.post("/v1/messages", json=frame) as answer,
    ):
        assert answer.status in (200, 202), await answer.text()


async def until(condition: Any) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(SECONDS / 1000):
        while not condition():
            await asyncio.sleep(0.02)


# ── getting in ───────────────────────────────────────────────────────────────────────────────────


@ON_EACH_LEDGER
async def test_a_link_lets_in_once_and_messages_appear_as_they_happen(
    local: LocalHub, lock: SlowLock, visitor: Visitor
) -> None:
    page = await visitor.open()
    await page.wait_for_selector(".health .part")
    await page.click("nav a[href='/messages']")
    await page.wait_for_selector(".empty")
    async with App(local.url, local.tokens["phone"]) as app:
        for _ in range(3):
            await app.send("lock", "lock_control", {"open": True})
    await page.wait_for_selector("tbody tr:nth-child(3) .badge.good")
    await page.click("nav a[href='/']")
    await page.wait_for_selector("td:has-text('lock_control')")


@pytest.mark.proof
async def test_a_link_that_was_used_is_refused_in_words(local: LocalHub, visitor: Visitor) -> None:
    token = await local.hub.dashboard.access.make_link()
    await local.hub.dashboard.access.follow_link(token, "127.0.0.1")
    page = await visitor.tab(f"/login#{token}")
    await page.wait_for_selector(".notice.bad:has-text('duly dashboard link')")


@pytest.mark.proof
async def test_a_password_lets_in_and_logging_out_ends_it(local: LocalHub, visitor: Visitor) -> None:
    await local.hub.dashboard.access.set_password("ann", "correct horse", DashboardRole.OPERATOR)
    page = await visitor.tab("/devices")
    await page.fill("input[name=name]", "ann")
    await page.fill("input[name=password]", "wrong horse")
    await page.click("button[type=submit]")
    await page.wait_for_selector(".notice.bad:has-text('wrong')")
    await page.fill("input[name=password]", "correct horse")
    await page.click("button[type=submit]")
    await page.wait_for_selector("h1:has-text('Devices')")
    await page.click("text=Log out")
    await page.wait_for_selector("input[name=password]")
    await page.reload()
    await page.wait_for_selector("input[name=password]")


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_double_click_is_one_effect(local: LocalHub, lock: SlowLock, visitor: Visitor) -> None:
    page = await visitor.open()
    await page.goto(f"{local.url}/device?name=lock")
    await page.dblclick("button:has-text('Send')")
    await page.wait_for_selector("[data-state=done]")
    assert len(lock.effects) == 1
    await page.click("button:has-text('Send') >> nth=0")
    await page.wait_for_selector("[data-state=done]")
    assert len(lock.effects) == 1, "it is still the same form"
    await page.click("button:has-text('New command')")
    await page.click("button:has-text('Send') >> nth=0")
    await until(lambda: len(lock.effects) == 2)


@pytest.mark.proof
async def test_a_reload_in_the_middle_loses_and_repeats_nothing(
    local: LocalHub, lock: SlowLock, visitor: Visitor
) -> None:
    page = await visitor.open()
    await page.goto(f"{local.url}/device?name=lock")
    lock.free.clear()
    await page.click("button:has-text('Send')")
    await until(lambda: lock.effects)
    await page.reload()
    await page.wait_for_selector(".ack.good")
    lock.free.set()
    await page.wait_for_selector("[data-state=done]")
    assert len(lock.effects) == 1


async def test_the_page_comes_back_by_itself_after_the_hub_was_away(
    local: LocalHub, visitor: Visitor
) -> None:
    page = await visitor.open()
    await page.click("nav a[href='/devices']")
    await page.wait_for_selector("tr:has-text('lock') .badge:has-text('offline')")
    await local.stop()
    await page.wait_for_selector(".offline-bar:visible")
    await local.start()
    await page.wait_for_selector(".offline-bar", state="hidden")
    it = SlowLock(local)
    async with it.device:
        await page.wait_for_selector("tr:has-text('lock') .badge:has-text('online')")


@ON_EACH_LEDGER
async def test_a_message_is_found_by_its_id_after_a_restart(
    local: LocalHub, lock: SlowLock, visitor: Visitor
) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True})
        await command.ended()
    await local.stop()
    await local.start()
    page = await visitor.open()
    await page.click("nav a[href='/messages']")
    await page.fill("input[name=id]", command.id)
    await page.click("button:has-text('Find')")
    await page.click(f"a[title='{command.id}']")
    await page.wait_for_selector(f"h1:has-text('{command.id}')")
    steps = page.locator(".timeline .what")
    await page.wait_for_selector(".timeline .mark.good")
    assert await steps.all_inner_texts() == [
        "Made, by the sender's clock",
        "Accepted and stored",
        "The sender was told: accepted",
        "Handed to the recipient · attempt 1",
        "Done",
        "The sender was told the outcome",
    ]


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proof
@pytest.mark.parametrize("local", ["sqlite", "postgresql"], indirect=True)
async def test_a_dead_letter_is_sent_to_another_address(local: LocalHub, visitor: Visitor) -> None:
    unreachable = {"send": ["http://127.0.0.1:9/hook"], "tries": 1}
    await local.hub.alerts.profiles.set("home", verbs.draft_of(unreachable))
    await report(local, "a" * 64, "water")
    page = await visitor.open("operator")
    await page.goto(f"{local.url}/alerts?view=dead")
    await page.wait_for_selector("tr:has-text('water') .badge:has-text('failed')")
    await page.click("button:has-text('Other address')")
    told = local.folder / "notifications" / "told.txt"
    await page.fill("dialog input", f"file:{told.name}")
    await page.click("dialog button:has-text('Send')")
    await until(lambda: told.exists() and "water" in told.read_text())
    await page.wait_for_selector("tr:has-text('water')", state="detached")  # it needs nobody any more
    await page.goto(f"{local.url}/alerts")
    await page.click("a:has-text('water')")
    await page.wait_for_selector("tr:has-text('file:told') .badge:has-text('done')")


@pytest.mark.proof
@pytest.mark.parametrize("local", ["sqlite", "postgresql"], indirect=True)
async def test_an_alert_is_acknowledged_and_silenced(local: LocalHub, visitor: Visitor) -> None:
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"nobody": True}))
    await report(local, "b" * 64, "smoke")
    page = await visitor.open("operator")
    await page.click("nav a[href='/alerts']")
    await page.click("tr:has-text('smoke') button:has-text('Acknowledge')")
    await page.wait_for_selector("tr:has-text('smoke') .badge:has-text('acknowledged')")
    await page.click(".page-head button:has-text('Silence')")
    await page.fill("dialog input[name=sentinel]", "watch")
    await page.click("dialog button:has-text('Silence')")
    await page.wait_for_selector("td:has-text('sentinel watch')")
    await page.click("button:has-text('End')")
    await page.wait_for_selector("text=Nothing is silenced")


async def test_the_link_of_a_notification_acknowledges_once(local: LocalHub, browser: Any) -> None:
    told = local.folder / "notifications" / "told.txt"
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"send": [f"file:{told.name}"]}))
    await report(local, "c" * 64, "fall")
    await until(lambda: told.exists() and "/ack?t=" in told.read_text())
    link = "http" + told.read_text().partition("Acknowledge: http")[2].partition('"')[0].partition("\\n")[0]
    context = await browser.new_context(locale="en-GB")
    page = await context.new_page()
    page.set_default_timeout(SECONDS)
    await page.goto(link.strip())
    await page.click("button:has-text('Acknowledge')")
    await page.wait_for_selector("text=Acknowledged. Thank you.")
    await page.goto(link.strip())
    await page.wait_for_selector("text=acknowledged already")
    assert await page.locator("button").count() == 0
    await context.close()
    alert = await local.hub.alerts.operations.get(key_of("watch", "c" * 64))
    assert alert is not None
    assert alert.status.by.startswith("file:told")


# ── roles and hostile text ───────────────────────────────────────────────────────────────────────


async def test_a_viewer_sees_no_buttons_and_is_refused_and_recorded(
    local: LocalHub, lock: SlowLock, visitor: Visitor
) -> None:
    page = await visitor.open("viewer", "vic")
    await page.goto(f"{local.url}/device?name=lock")
    await page.wait_for_selector("text=needs the role operator")
    assert await page.locator("button:has-text('Send')").count() == 0
    assert await page.locator("nav a[href='/audit']").count() == 0
    status = await page.evaluate("""async () => {
        const { csrf } = await (await fetch("/page/session")).json();
        const body = JSON.stringify({ id: "x", device: "lock", type: "lock_control", data: "{}" });
        const heads = { "Content-Type": "application/json", "X-CSRF-Token": csrf };
        return (await fetch("/page/do/command.send", { method: "POST", headers: heads, body })).status;
    }""")
    assert status == 403
    assert lock.effects == []
    entries, _ = await local.hub.dashboard.audit.newest(1)
    assert (entries[0]["actor"], entries[0]["action"]) == ("vic", "command.send")
    assert str(entries[0]["result"]).startswith("refused")


async def test_script_in_what_others_send_is_shown_as_text(
    local: LocalHub, lock: SlowLock, visitor: Visitor
) -> None:
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"nobody": True}))
    await report(local, "d" * 64, SCRIPT)
    await lock.device.push("status_report", {"version": SCRIPT, "note": SCRIPT})
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"text": SCRIPT})
        await command.ended()
    await local.hub.dashboard.audit.add("ann", "admin", "alert.ack", SCRIPT, SCRIPT, SCRIPT)
    page = await visitor.open()
    for path, shown in (
        ("/alerts?view=all", "tbody a:has-text('onerror')"),
        (f"/alert?sentinel=watch&event={'d' * 64}", "h1:has-text('onerror')"),
        ("/devices", "td:has-text('onerror')"),
        ("/device?name=lock", "td:has-text('onerror')"),
        (f"/message?scope=phone&id={command.id}", "pre:has-text('onerror')"),
        ("/audit", "td:has-text('onerror')"),
    ):
        await page.goto(f"{local.url}{path}")
        await page.wait_for_selector(shown)
        assert await page.evaluate("globalThis.pwned") is None
        assert await page.locator("img[src=x]").count() == 0
    unknown = f"/message?scope={SCRIPT}&id=x"
    await page.goto(local.url + unknown)
    await page.wait_for_selector(".empty:has-text('onerror')")
    assert await page.evaluate("globalThis.pwned") is None


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────


async def enter_chat(page: Any, name: str) -> None:
    await page.fill("form input:not([type=password])", name)
    await page.fill("form input[type=password]", "correct horse")
    await page.click("button[value=register]")
    await page.wait_for_selector(".chat-new")


async def say(page: Any, text: str) -> None:
    await page.fill(".composer input", text)
    await page.click(".composer button")


async def test_two_tabs_chat_see_receipts_and_come_back_after_a_cut(
    local: LocalHub, visitor: Visitor
) -> None:
    first = await visitor.open()
    await first.click("nav a[href='/chat']")
    second = await visitor.tab("/chat")
    await enter_chat(first, "bob")
    await enter_chat(second, "eve")
    await first.fill(".chat-new input >> nth=0", "eve")
    await first.click(".chat-new button")
    await say(first, f"hello {SCRIPT}")
    await second.wait_for_selector(".bubble:has-text('hello')")
    assert await second.evaluate("globalThis.pwned") is None
    await second.bring_to_front()
    await say(second, "hello yourself")
    await first.wait_for_selector(".bubble:not(.mine):has-text('hello yourself')")
    read = ".bubble.mine:has-text('hello') .meta:has-text('read')"
    await first.wait_for_selector(read)
    await first.reload()
    await first.wait_for_selector(read)
    await local.stop()
    await first.wait_for_selector(".thread-head:has-text('does not answer')")
    await say(first, "said while it was away")
    await local.start()
    await second.wait_for_selector(".bubble:has-text('said while it was away')")
    assert await second.locator(".bubble:has-text('said while it was away')").count() == 1


@pytest.mark.proof
async def test_a_group_talks_together(local: LocalHub, visitor: Visitor) -> None:
    first = await visitor.open()
    await first.click("nav a[href='/chat']")
    second = await visitor.tab("/chat")
    await enter_chat(first, "bob")
    await enter_chat(second, "eve")
    await first.fill(".chat-new input >> nth=0", "family")
    await first.fill(".chat-new input >> nth=1", "eve")
    await first.click(".chat-new button")
    await first.wait_for_selector(".thread-head:has-text('family')")
    await say(first, "dinner is ready")
    await second.wait_for_selector(".chat-list:has-text('family')")
    await second.click(".chat-list button:has-text('family')")
    await second.wait_for_selector(".bubble:has-text('dinner is ready')")


# ── the API ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proof
async def test_the_openapi_document_can_be_read(local: LocalHub, visitor: Visitor) -> None:
    page = await visitor.open()
    await page.click("nav a[href='/api']")
    await page.click("summary:has-text('/v1/messages/{scope}/{id}')")
    await page.wait_for_selector("details[open] >> text=404")
    async with aiohttp.ClientSession(local.url) as http, http.get("/v1/openapi.json") as answer:
        paths = json.loads(await answer.text())["paths"]
    assert await page.locator(".operation .method").count() == sum(map(len, paths.values()))


@pytest.mark.proof
async def test_language_and_theme_are_remembered(local: LocalHub, visitor: Visitor) -> None:
    page = await visitor.open()
    await page.click("button:has-text('中文')")
    await page.wait_for_selector("h1:has-text('概览')")
    await page.click("button[aria-label='切换浅色与深色']")
    await page.reload()
    await page.wait_for_selector("h1:has-text('概览')")
    assert await page.get_attribute("html", "data-theme") == "dark"
    assert await page.get_attribute("html", "lang") == "zh-CN"
