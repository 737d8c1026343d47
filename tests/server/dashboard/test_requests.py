"""The page's own API: who may see and do what; another site can do nothing with a visitor's cookie."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.identity.accounts import Role
from duly.server.dashboard import service
from duly.server.dashboard.service import PAGES
from tests.local_hub import LocalHub
from tests.server.dashboard.visiting import PageVisitor, mint

VIEWS = ("overview", "chart", "messages", "devices", "alerts", "alerts-status", "alerts-deliveries")
FOR_ADMINS = ("audit", "sessions")


@pytest.fixture
async def ann(local: LocalHub) -> AsyncIterator[PageVisitor]:
    async with PageVisitor(local) as visitor:
        yield visitor


@pytest.fixture
async def viewer(local: LocalHub) -> AsyncIterator[PageVisitor]:
    async with PageVisitor(local, "viewer", "vic") as visitor:
        yield visitor


@pytest.fixture
async def stranger(local: LocalHub) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(local.url) as http:
        yield http


# ── seeing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PAGES)
async def test_the_shell_is_open_strict_and_never_kept(stranger: aiohttp.ClientSession, path: str) -> None:
    async with stranger.get(path) as answer:
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        text = await answer.text()
    assert "http://" not in text
    assert "https://" not in text
    assert "style=" not in text


async def test_the_files_of_the_page_load_nothing_from_elsewhere(local: LocalHub) -> None:
    for file in Path("src/duly/server/dashboard/static").rglob("*"):
        if file.suffix in (".js", ".css", ".html") and "vendor" not in file.parts:
            text = file.read_text(encoding="utf-8")
            assert "innerHTML" not in text
            assert "insertAdjacentHTML" not in text
            assert "//cdn" not in text


@pytest.mark.parametrize("view", VIEWS + FOR_ADMINS)
async def test_without_a_session_nothing_is_shown(stranger: aiohttp.ClientSession, view: str) -> None:
    async with stranger.get(f"/{view}.json") as answer:
        assert answer.status == 401
        assert "duly dashboard link" in (await answer.json())["detail"]


@pytest.mark.parametrize("view", VIEWS)
async def test_a_viewer_sees_everything_but_what_is_for_admins(viewer: PageVisitor, view: str) -> None:
    await viewer.get(f"/{view}.json")


@pytest.mark.parametrize("view", FOR_ADMINS)
async def test_the_audit_chain_is_for_admins(viewer: PageVisitor, ann: PageVisitor, view: str) -> None:
    status, _ = await viewer.ask("GET", f"/{view}.json")
    assert status == 403
    await ann.get(f"/{view}.json")


async def test_a_script_uses_an_admins_token(local: LocalHub, stranger: aiohttp.ClientSession) -> None:
    await local.add(Role.ADMIN, "root")
    for name, status in (("root", 200), ("phone", 403)):
        heads = {"Authorization": f"Bearer {local.tokens[name]}"}
        async with stranger.get("/messages.json", headers=heads) as answer:
            assert answer.status == status


@pytest.mark.parametrize(
    "path", ["/message.json?scope=x&id=y", "/device.json?name=x", "/alert.json?sentinel=x&event=y"]
)
async def test_what_is_not_known_is_404(ann: PageVisitor, path: str) -> None:
    status, said = await ann.ask("GET", path)
    assert (status, said["error"]) == (404, "not_found")


# ── the cookie ───────────────────────────────────────────────────────────────────────────────────


async def test_the_cookie_is_for_the_browser_alone(local: LocalHub) -> None:
    link = await local.hub.dashboard.access.make_link()
    async with (
        aiohttp.ClientSession(local.url) as http,
        http.post("/page/login", json={"link": link}) as answer,
    ):
        cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/" in cookie
    assert f"duly_session_{local.port}=" in cookie, "hubs at other ports of this machine keep theirs"


async def test_logging_out_ends_the_session_for_good(ann: PageVisitor) -> None:
    jar = {cookie.key: cookie.value for cookie in ann.http.cookie_jar}
    status, _ = await ann.ask("POST", "/page/logout", headers={"X-CSRF-Token": ann.csrf})
    assert status == 200
    status, _ = await ann.ask("GET", "/messages.json", cookies=jar)
    assert status == 401


# ── other sites ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("token", [None, "", "0" * 64, "\u00e4"])
async def test_no_request_without_the_csrf_token_does_anything(
    local: LocalHub, ann: PageVisitor, token: str | None
) -> None:
    heads = {} if token is None else {"X-CSRF-Token": token}
    body = {"id": mint(), "device": "lock", "type": "lock_control", "data": "{}", "queue": "yes"}
    status, said = await ann.ask("POST", "/page/do/command.send", json=body, headers=heads)
    assert status in (400, 403), said
    assert (await ann.get("/messages.json"))["messages"] == []
    if status == 403:
        ((newest, *_), _) = await local.hub.dashboard.audit.newest(1, 0)
        assert (newest["actor"], newest["action"]) == ("ann", "command.send")
        assert "page's token" in str(newest["result"])


async def test_no_request_from_another_origin_does_anything(local: LocalHub, ann: PageVisitor) -> None:
    body = {"id": mint(), "device": "lock", "type": "lock_control", "data": "{}", "queue": "yes"}
    heads = {"X-CSRF-Token": ann.csrf, "Origin": "https://evil.example"}
    status, _ = await ann.ask("POST", "/page/do/command.send", json=body, headers=heads)
    assert status == 403
    status, _ = await ann.ask("POST", "/page/do/command.send", json=body, headers=heads | {
        "Origin": local.url, "Sec-Fetch-Site": "cross-site"})  # fmt: skip
    assert status == 403
    assert (await ann.get("/messages.json"))["messages"] == []


async def test_a_page_of_another_origin_gets_no_live_updates(local: LocalHub, ann: PageVisitor) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await ann.http.ws_connect("/page/live", headers={"Origin": "https://evil.example"})
    assert refused.value.status == 403


async def test_a_form_of_another_site_is_no_json(ann: PageVisitor) -> None:
    status, said = await ann.ask("POST", "/page/login", data="link=x", headers={"Content-Type": "text/plain"})
    assert (status, said["error"]) == (400, "malformed")


# ── acting ───────────────────────────────────────────────────────────────────────────────────────

ACTIONS: dict[str, dict[str, str]] = {
    "message.resend": {"scope": "phone", "id": "1_1", "new_id": "x"},
    "message.cancel": {"scope": "phone", "id": "1_1"},
    "message.settle": {"scope": "phone", "id": "1_1", "as": "done", "why": "seen"},
    "command.send": {"id": "x", "device": "lock", "type": "lock_control"},
    "channel.test": {"recipient": "x"},
    "session.end": {"session": "0" * 64},
    "alert.ack": {"sentinel": "w", "event": "e"},
    "alert.resolve": {"sentinel": "w", "event": "e"},
    "alert.silence": {"sentinel": "w", "lasts": "3600"},
    "alert.unsilence": {"silence": "1"},
    "deliveries.retry": {"sentinel": "w", "event": "e"},
    "deliveries.edit": {"sentinel": "w", "event": "e", "recipient": "x", "url": "file:x"},
}


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_viewer_is_refused_every_action_and_that_is_recorded(
    ann: PageVisitor, viewer: PageVisitor, action: str
) -> None:
    status, said = await viewer.act(action, **ACTIONS[action])
    assert (status, said["error"]) == (403, "not_allowed")
    entry = (await ann.get("/audit.json"))["entries"][0]
    assert (entry["actor"], entry["role"], entry["action"]) == ("vic", "viewer", action)
    assert entry["result"].startswith("refused")


async def test_a_visitor_who_acts_too_often_does_not_fill_the_audit_chain(
    ann: PageVisitor, viewer: PageVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "monotonic", lambda: 7.0)
    statuses = [(await viewer.act("session.end", session="x" * 16))[0] for _ in range(service.ACTIONS.amount)]
    assert set(statuses) == {403}
    status, said = await viewer.act("session.end", session="x" * 16)
    assert (status, said["error"], said["retry_after"]) == (429, "rate_limited", 0.5)
    recorded = (await ann.get("/audit.json", limit="500"))["entries"]
    assert sum(one["actor"] == "vic" and one["action"] == "session.end" for one in recorded) == len(statuses)
    assert (await ann.act("alert.silence", sentinel="w", lasts="3600"))[0] == 200


async def test_every_action_is_tested_with_a_viewer(local: LocalHub) -> None:
    assert set(ACTIONS) == set(local.hub.dashboard.actions)


async def test_the_actor_is_the_session_whatever_the_request_says(ann: PageVisitor) -> None:
    status, _ = await ann.act("alert.silence", sentinel="w", lasts="3600", by="root", actor="root")
    assert status == 200
    entry = (await ann.get("/audit.json"))["entries"][0]
    assert (entry["actor"], entry["action"], entry["result"]) == ("ann", "alert.silence", "done")
    (silence,) = (await ann.get("/alerts-status.json"))["silences"]
    assert silence["by"] == "ann"


async def test_a_command_that_the_hub_refused_is_recorded_as_refused(ann: PageVisitor) -> None:
    status, said = await ann.act("command.send", id=mint(), device="lock", type="query", data="{}")
    assert (status, said["server_ack"]["error"]) == (200, "offline")
    entry = (await ann.get("/audit.json"))["entries"][0]
    assert entry["action"] == "command.send"
    assert entry["result"].startswith("refused: lock is offline")


async def test_an_admin_ends_the_session_of_another(ann: PageVisitor, viewer: PageVisitor) -> None:
    sessions = (await ann.get("/sessions.json"))["sessions"]
    (his,) = [one["session"] for one in sessions if one["name"] == "vic"]
    status, _ = await ann.act("session.end", session=his)
    assert status == 200
    status, _ = await viewer.ask("GET", "/messages.json")
    assert status == 401


async def test_what_the_command_line_changes_is_recorded_too(local: LocalHub, ann: PageVisitor) -> None:
    await local.add(Role.ADMIN, "root")
    heads: dict[str, Any] = {"Authorization": f"Bearer {local.tokens['root']}"}
    async with aiohttp.ClientSession(local.url, headers=heads) as http:
        for verb, body in (("grant", {"app": "tablet", "device": "lock"}), ("list", {})):
            async with http.post(f"/v1/admin/{verb}", json=body) as answer:
                assert answer.status == 200
    entry = (await ann.get("/audit.json"))["entries"][0]
    assert (entry["actor"], entry["action"], entry["target"]) == ("root", "grant", "tablet lock")
