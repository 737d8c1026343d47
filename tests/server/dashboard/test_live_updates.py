"""Live updates: a view is sent when it has changed, to those who may see it, while their session holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from duly.apps.alerts.profiles import ProfileDraft
from duly.identity.accounts import Role
from duly.server.dashboard import live_updates
from duly.server.dashboard.live_updates import GONE, VIEWS_MOST
from duly.server.dashboard.query_time import QueryTime
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.server.dashboard.visiting import PageVisitor, mint


@pytest.fixture
async def ann(local: LocalHub) -> AsyncIterator[PageVisitor]:
    async with PageVisitor(local) as visitor:
        yield visitor


async def told(socket: aiohttp.ClientWebSocketResponse) -> Any:
    return await socket.receive_json(timeout=GUARD)


async def test_a_view_comes_at_once_and_again_when_it_has_changed(ann: PageVisitor) -> None:
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 7, "view": "messages"})
        first = await told(socket)
        assert (first["id"], first["is"]["messages"]) == (7, [])
        await ann.act("command.send", id=mint(), device="lock", type="x", data="{}", queue="yes")
        second = await told(socket)
        assert [one["state"] for one in second["is"]["messages"]] == ["accepted"]


async def test_a_view_that_is_no_longer_shown_is_not_sent(ann: PageVisitor) -> None:
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 1, "view": "messages"})
        await told(socket)
        await socket.send_json({"id": 1})
        await socket.send_json({"id": 2, "view": "devices"})
        assert (await told(socket))["id"] == 2
        await ann.act("command.send", id=mint(), device="lock", type="x", data="{}", queue="yes")
        assert (await told(socket))["id"] == 2, "the queue of the device has changed"


async def test_a_viewer_is_not_sent_what_is_for_admins(local: LocalHub) -> None:
    async with PageVisitor(local, "viewer") as vic, vic.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 1, "view": "audit"})
        assert (await told(socket))["is"]["error"] == "not_allowed"


@pytest.mark.parametrize("wanted", [{"view": "nonsense"}, {"view": "messages", "query": {"state": "x"}}])
async def test_what_is_wrong_with_a_question_is_said(ann: PageVisitor, wanted: dict[str, Any]) -> None:
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 1} | wanted)
        assert (await told(socket))["is"]["error"] == "malformed"


async def test_a_session_that_has_ended_closes_its_pages(local: LocalHub, ann: PageVisitor) -> None:
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 1, "view": "messages"})
        await told(socket)
        await local.hub.dashboard.access.end_sessions()
        async with asyncio.timeout(GUARD):
            while (said := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        assert said.data == GONE


async def test_a_page_opened_with_the_token_of_an_admin_is_closed_when_that_is_removed(
    local: LocalHub,
) -> None:
    await local.add(Role.ADMIN, "root")
    headers = {"Authorization": f"Bearer {local.tokens['root']}"}
    async with (
        aiohttp.ClientSession(local.url, headers=headers) as http,
        http.ws_connect("/page/live") as socket,
    ):
        await socket.send_json({"id": 1, "view": "audit"})
        await told(socket)
        await local.hub.accounts.remove("root")
        async with asyncio.timeout(GUARD):
            while (said := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        assert said.data == GONE


async def test_one_visitor_has_a_share_of_the_pages(
    local: LocalHub, ann: PageVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_updates, "PAGES_EACH", 2)
    async with AsyncExitStack() as open_:
        for _ in range(2):
            socket = await open_.enter_async_context(ann.http.ws_connect("/page/live"))
            await socket.send_json({"id": 1, "view": "chart"})
            await told(socket)
        third = await open_.enter_async_context(ann.http.ws_connect("/page/live"))
        said = await third.receive(timeout=GUARD)
        assert (said.type, said.data) == (aiohttp.WSMsgType.CLOSE, 1013)
        bob = await open_.enter_async_context(PageVisitor(local, "viewer", "bob"))
        socket = await open_.enter_async_context(bob.http.ws_connect("/page/live"))
        await socket.send_json({"id": 1, "view": "chart"})
        assert (await told(socket))["id"] == 1


async def test_who_asks_for_too_much_is_answered_later_and_no_one_else(
    local: LocalHub, ann: PageVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = local.hub.dashboard.query_time
    for _ in range(30):
        limits.spend("ann", 0.3)
    status, said = await ann.ask("GET", "/messages.json")
    assert (status, said["error"], said["retry_after"] > 1) == (429, "rate_limited", True)
    async with PageVisitor(local, "viewer", "bob") as bob:
        await bob.get("/messages.json")
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 1, "view": "messages"})
        async with PageVisitor(local, "viewer", "eve") as eve, eve.http.ws_connect("/page/live") as other:
            await other.send_json({"id": 2, "view": "messages"})
            await told(other)  # made by a tick or at once, while ann waits
        monkeypatch.setattr(limits, "_limits", QueryTime()._limits)
        assert (await told(socket))["id"] == 1, "it is answered when there is time for it"


async def test_without_a_session_there_are_no_live_updates(local: LocalHub) -> None:
    async with aiohttp.ClientSession(local.url) as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect("/page/live")
    assert refused.value.status == 401


@pytest.mark.parametrize("text", ["", "x", "[]", '{"id": "x"}', '{"id": 1, "view": 3}', "{" * 10_000])
async def test_nonsense_ends_the_connection_and_nothing_else(
    local: LocalHub, ann: PageVisitor, text: str
) -> None:
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_str(text)
        assert (await socket.receive(timeout=GUARD)).type is aiohttp.WSMsgType.CLOSE
    await ann.get("/messages.json")


async def test_a_page_shows_only_so_many_views(local: LocalHub, ann: PageVisitor) -> None:
    async with ann.http.ws_connect("/page/live") as socket:
        for n in range(VIEWS_MOST + 5):
            await socket.send_json({"id": n, "view": "chart", "query": {"span": "days"}})
        await socket.send_json({"id": 0, "view": "devices"})
        seen = {(await told(socket))["id"] for _ in range(VIEWS_MOST)}
        assert seen == set(range(VIEWS_MOST))
    async with asyncio.timeout(GUARD):
        while local.hub.dashboard.live.pages:
            await asyncio.sleep(0.01)


async def test_a_dead_letter_is_shown_without_waiting_for_the_next_count_of_all(
    local: LocalHub, ann: PageVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts = local.hub.alerts
    await alerts.backlog.refresh()
    monkeypatch.setattr(alerts.backlog, "_due", float("inf"))
    await local.add(Role.SENTINEL, "gate")
    (local.folder / "notifications" / "taken").mkdir(parents=True)  # no file can be written there
    await alerts.profiles.set("home", ProfileDraft(send=("file:taken",), tries=1))
    async with ann.http.ws_connect("/page/live") as socket:
        await socket.send_json({"id": 1, "view": "overview"})
        await told(socket)
        async with aiohttp.ClientSession() as http:
            data = {"profile_id": "home", "trigger_reason": "fall", "device_address": "AA", "timestamp": 0}
            frame = {"type": "alert_event", "seq_id": "event-1", "data": data}
            headers = {"Authorization": f"Bearer {local.tokens['gate']}"}
            async with http.post(f"{local.url}/v1/messages", json=frame, headers=headers) as answer:
                assert answer.status in (200, 202), await answer.text()
        async with asyncio.timeout(GUARD):
            while (await told(socket))["is"]["metrics"]["duly_dead_letters"][""] != 1:
                pass
