"""The link in a notification: it acknowledges its alert for its recipient, once, and does nothing else."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from duly.apps.alerts import verbs
from duly.apps.alerts.ack_links import LASTS, AckLinks
from duly.core.messages import key_of
from duly.core.units import SECOND
from duly.errors import NotAllowed
from duly.identity.accounts import Role
from tests.guard import GUARD
from tests.local_hub import LocalHub

EVENT = "e" * 64
KEY = key_of("watch", EVENT)


@pytest.fixture
async def link(local: LocalHub) -> str:
    """The link in the notification of an alert."""
    await local.add(Role.SENTINEL, "watch")
    told = local.folder / "notifications" / "told.txt"
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"send": [f"file:{told.name}"]}))
    data = {"profile_id": "home", "trigger_reason": "<b>fall</b>", "timestamp": round(time.time() * 1000)}
    heads = {"Authorization": f"Bearer {local.tokens['watch']}"}
    async with aiohttp.ClientSession(local.url, headers=heads) as http:
        frame = {"type": "alert_event", "seq_id": EVENT, "data": data}
        async with http.post("/v1/messages", json=frame) as answer:
            assert answer.status == 202
    async with asyncio.timeout(GUARD):
        while not told.exists() or "Acknowledge: " not in told.read_text():
            await asyncio.sleep(0.01)
    found = re.search(r"Acknowledge: (http[\w:/.?=-]+)", told.read_text())
    assert found is not None
    assert "Happened: " in told.read_text()
    return found[1]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def standing(local: LocalHub) -> tuple[str, str]:
    alert = await local.hub.alerts.operations.get(KEY)
    assert alert is not None
    return alert.status.standing.value, alert.status.by


async def press(http: aiohttp.ClientSession, link: str) -> str:
    """Open the page, and press its button."""
    async with http.get(link) as answer:
        assert answer.status == 200
        text = await answer.text()
    token = re.search(r'name="t" value="([^"]+)"', text)
    if token is None:
        return text
    address = link.partition("/ack")[0] + "/ack"
    async with http.post(address, data={"t": token[1]}, headers={"Origin": address[:-4]}) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_opening_the_link_changes_nothing_and_shows_text_as_text(
    local: LocalHub, link: str, http: aiohttp.ClientSession
) -> None:
    assert link.startswith(f"{local.url}/ack?t=")
    for _ in range(2):
        async with http.get(link) as answer:
            text = await answer.text()
            assert "script" not in answer.headers["Content-Security-Policy"].partition("default-src")[0]
    assert "&lt;b&gt;fall&lt;/b&gt;" in text
    assert "<b>" not in text
    assert (await standing(local))[0] == "open"


async def test_the_button_acknowledges_in_the_name_of_the_recipient_and_twice_is_once(
    local: LocalHub, link: str, http: aiohttp.ClientSession
) -> None:
    assert "Acknowledged. Thank you." in await press(http, link)
    state, by = await standing(local)
    assert (state, by[:9]) == ("acknowledged", "file:told")
    assert "acknowledged already" in await press(http, link)
    entries, _ = await local.hub.dashboard.audit.newest(10)
    mine = [one for one in entries if one["action"] == "alert.ack"]
    assert [(one["actor"], one["role"]) for one in mine] == [(by, "recipient")]


async def test_the_page_is_in_the_language_of_the_browser(link: str, http: aiohttp.ClientSession) -> None:
    chinese = {"Accept-Language": "zh-CN,zh;q=0.9"}
    async with http.get(link, headers=chinese) as answer:
        text = await answer.text()
        assert "确认" in text
        assert any(word in text for word in ("提示", "警告", "严重")), "the severity, too"
    async with http.get(link[:-4], headers=chinese) as answer:
        assert "链接无效" in await answer.text()


async def test_an_alert_that_is_over_needs_nothing_more(
    local: LocalHub, link: str, http: aiohttp.ClientSession
) -> None:
    wanted = {"event": EVENT, "sentinel": "watch"}
    alerts = local.hub.alerts
    await verbs.administer(alerts.operations, alerts.profiles, "alert.resolve", wanted, "ann")
    assert "This alert is over" in await press(http, link)


@pytest.mark.parametrize("damage", ["", "x", "AAAA", "\u00e4", "x" * 5000])
async def test_a_link_that_was_changed_does_nothing(
    local: LocalHub, link: str, http: aiohttp.ClientSession, damage: str
) -> None:
    address, _, token = link.partition("?t=")
    for wrong in (damage, token[:-4] + damage, damage + token):
        async with http.get(address, params={"t": wrong}) as answer:
            assert answer.status == (200 if wrong == token else 403)
        async with http.post(address, data={"t": wrong}) as answer:
            assert answer.status in (200, 403)
        if wrong != token:
            assert (await standing(local))[0] == "open"


async def test_a_page_of_another_origin_cannot_press_the_button(
    local: LocalHub, link: str, http: aiohttp.ClientSession
) -> None:
    address, _, token = link.partition("?t=")
    async with http.post(address, data={"t": token}, headers={"Origin": "https://evil.example"}) as answer:
        assert answer.status == 403
    assert (await standing(local))[0] == "open"


def test_a_link_expires_and_is_the_same_in_every_attempt() -> None:
    links = AckLinks(b"k" * 32, "https://duly.example")
    received = 1_794_900_000 * SECOND
    token = links.token(KEY, "mailto:x#1", received)
    assert token == links.token(KEY, "mailto:x#1", received)
    assert links.read(token, received + LASTS - SECOND) == (KEY, "mailto:x#1")
    with pytest.raises(NotAllowed, match="expired"):
        links.read(token, received + LASTS)


def test_links_of_another_ledger_are_not_valid() -> None:
    token = AckLinks(b"k" * 32).token(KEY, "mailto:x#1", SECOND)
    with pytest.raises(NotAllowed, match="not valid"):
        AckLinks(b"j" * 32).read(token, SECOND)


@pytest.mark.parametrize("settings", [{"public_url": "https://duly.example"}])
async def test_links_lead_to_the_public_address(link: str) -> None:
    assert link.startswith("https://duly.example/ack?t=")
