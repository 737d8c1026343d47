"""`Sentinel` of `duly.js` in a real browser, against a real tower: its queue is in IndexedDB."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duly.apps.alerts.profiles import ProfileDraft
from duly.core.monitor.signals import EventData, read_event
from duly.identity.accounts import Role
from tests.browsers import browser
from tests.clients.test_js import LossyWire, Tab, first_page, kept, site, tab, wire
from tests.guard import GUARD
from tests.local_hub import LocalHub

__all__ = ["browser", "first_page", "kept", "site", "tab", "wire"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

WATCH = """(() => {
  globalThis.sentinel = new Sentinel(hub, %s, { profile: "home", ...%s });
  globalThis.news = [];
  sentinel.on("news", (one) => news.push(one));
  return sentinel.opened;
})()"""


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path, site: str) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", origins=[site])
    await it.start()
    await it.add(Role.SENTINEL, "watch")
    await it.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    yield it
    await it.stop()


async def watch(tab: Tab, local: LocalHub, **options: Any) -> None:
    options = {"policy": {"countdown": 0}} | options
    await tab.do(WATCH % (json.dumps(local.tokens["watch"]), json.dumps(options)))


async def listed(local: LocalHub) -> list[EventData]:
    """The events that the tower has, the oldest first."""
    records = await local.hub.ledger.of_kind("alert_event", limit=1_000)
    return sorted((read_event(one.message.body) for one in records), key=lambda event: event.timestamp)


async def test_an_event_reaches_the_tower_with_all_that_is_known_of_it(tab: Tab, local: LocalHub) -> None:
    await watch(tab, local)
    about = {"severity": "critical", "meta": {"model": "x"}, "location": {"lat": 31.2}}
    end = await tab.do(f"sentinel.trigger('fall', 'watch-1', {json.dumps(about)}).sent")
    assert end["state"] == "done"
    (event,) = await listed(local)
    assert (event.profile_id, event.trigger_reason, event.device_address) == ("home", "fall", "watch-1")
    assert (event.severity.value, bytes(event.device_meta)) == ("critical", b'{"model":"x"}')
    assert bytes(event.location) == b'{"lat":31.2}'
    assert event.offset_ms is not None
    told = [one["what"] for one in await tab.do("news")]
    assert "online" in told
    assert [word for word in told if word in ("stored", "sent")] == ["stored", "sent"]


async def test_what_is_reported_offline_survives_a_reload_and_arrives_once_and_in_order(
    tab: Tab, local: LocalHub
) -> None:
    await local.stop()
    await watch(tab, local)
    await tab.do("Promise.all(['a', 'b', 'c'].map((device) => sentinel.trigger('fall', device).stored))")
    await tab.page.goto("about:blank")
    await local.start()
    await tab.load()
    await watch(tab, local)
    await tab.do("sentinel.drained()")
    assert [event.device_address for event in await listed(local)] == ["a", "b", "c"]
    assert await tab.do("sentinel.waiting") == 0


async def test_a_person_cancels_in_the_countdown_and_a_correction_follows_what_has_left(
    tab: Tab, local: LocalHub
) -> None:
    await watch(tab, local, policy={"countdown": 30, "cooldown": 0})
    await tab.do("void (globalThis.gone = sentinel.disconnect('band'), gone.cancel())")
    gone = await tab.do("gone.sent")
    assert gone["state"] == "cancelled"
    await tab.do("void (globalThis.alert = sentinel.trigger('fall', 'band', {countdown: 0}))")
    id_ = (await tab.do("alert.sent"))["event"]
    await tab.do("alert.update({location: {lat: 1}})")
    await tab.do("alert.cancel()")
    await tab.until("news.some(({ what }) => what === 'corrected')")
    what = [one["what"] for one in await tab.do("news")]
    assert [word for word in what if word in ("updated", "correcting", "corrected")][-1] == "corrected"
    (event,) = await listed(local)
    assert (event.cancelled_count, len(id_)) == (1, 32)


async def test_a_second_tab_takes_over_and_the_first_stops(kept: Any, site: str, local: LocalHub) -> None:
    first, second = Tab(kept, site, local), Tab(await kept.context.new_page(), site, local)
    for one in (first, second):
        await one.load()
        await watch(one, local)
    refused = await first.do("seen(sentinel.trigger('fall', 'a').stored)")
    assert refused["name"] == "StoreTaken"
    assert (await second.do("sentinel.trigger('fall', 'b').sent"))["state"] == "done"
    assert [event.device_address for event in await listed(local)] == ["b"]


async def test_a_connection_that_swallows_everything_is_made_anew(wire: LossyWire, local: LocalHub) -> None:
    tab = wire.tab
    await tab.page.clock.install()
    await watch(tab, local)
    await tab.do("sentinel.ready")
    wire.deaf = True
    await tab.do("void (globalThis.ended = sentinel.trigger('fall', 'a').sent)")
    async with asyncio.timeout(GUARD):
        while not wire.sent:
            await asyncio.sleep(0.01)
    await tab.page.clock.run_for(6_200)
    wire.deaf = False
    await tab.page.clock.run_for(400)
    assert (await tab.do("ended"))["state"] == "done"
    assert wire.connections == 2
    assert len(await listed(local)) == 1


async def test_a_cause_that_still_stands_is_judged_again_and_a_critical_one_never_waits(
    wire: LossyWire, local: LocalHub
) -> None:
    tab = wire.tab
    await tab.page.clock.install()
    await watch(tab, local, policy={"countdown": 1, "cooldown": 60}, heartbeat=30)
    await tab.do("sentinel.ready")
    await tab.do("sentinel.trigger('fall', 'band').stored")
    await tab.do("sentinel.cancel('band')")
    assert await tab.do("sentinel.disconnect('band').stored") == "cooling"
    await tab.do("void (globalThis.urgent = sentinel.trigger('fall', 'band', {severity: 'critical'}))")
    assert await tab.do("urgent.stored") == "pass"
    await tab.page.clock.run_for(1_100)
    assert (await tab.do("urgent.sent"))["state"] == "done"
    await tab.page.clock.run_for(62_000)
    await tab.until("sentinel.counts.sent === 2")
    assert [event.trigger_reason for event in await listed(local)] == ["disconnect", "fall"]
    beats = [id_ for id_ in wire.sent if id_.startswith("beat-")]
    assert len(beats) >= 3


async def test_a_name_that_was_cut_in_the_middle_of_an_emoji_costs_no_alert(
    tab: Tab, local: LocalHub
) -> None:
    await watch(tab, local)
    about = (
        r'{ severity: "critical", meta: { name: "dad 👴".slice(0, 5), path: "\\ud83d" }, location: "\udc74" }'
    )
    end = await tab.do(f"sentinel.trigger('fall', 'watch-1', {about}).sent")
    assert end["state"] == "done"
    (event,) = await listed(local)
    assert json.loads(bytes(event.device_meta)) == {"name": "dad �", "path": "\\ud83d"}
    assert json.loads(bytes(event.location)) == "�"


async def test_what_is_nested_too_deep_is_refused_where_it_is_reported(tab: Tab, local: LocalHub) -> None:
    await watch(tab, local)
    deep = "let meta = 1; for (let n = 0; n < %d; n++) meta = [meta];"
    report = "sentinel.trigger('fall', 'watch-1', { meta })"
    said = f"{deep % 31} try {{ {report} }} catch (e) {{ return e.name }}"
    assert await tab.do(f"(() => {{ {said} }})()") == "RangeError"
    end = await tab.do(
        f"(() => {{ {deep % 30} return sentinel.trigger('fall', 'watch-1', {{ meta }}).sent }})()"
    )
    assert end["state"] == "done"


FULL = """(() => {
  globalThis.room = true;
  globalThis.items ??= new Map();
  const store = {
    load: async () => new Map(items),
    write: async (changes) => {
      if (!room) throw new Error("the disk is full");
      for (const [key, text] of changes) text === null ? items.delete(key) : items.set(key, text);
    },
  };
  globalThis.sentinel = new Sentinel(%s, %s, { profile: "home", policy: { countdown: 0 }, store });
  globalThis.news = [];
  sentinel.on("news", (one) => news.push(one));
  return sentinel.opened;
})()"""


async def test_a_critical_event_reaches_the_tower_at_once_though_it_cannot_be_stored(
    tab: Tab, local: LocalHub
) -> None:
    await tab.do(FULL % ("hub", json.dumps(local.tokens["watch"])))
    await tab.do("sentinel.ready")
    await tab.do("void (room = false, globalThis.mild = sentinel.trigger('fall', 'band'))")
    await tab.do("new Promise((done) => setTimeout(done, 500))")
    begun = (
        "globalThis.alert = sentinel.trigger('smoke', 'kitchen', { severity: 'critical', countdown: 0.1 })"
    )
    assert (await tab.do(f"({begun}).sent"))["state"] == "done"
    assert [event.trigger_reason for event in await listed(local)] == ["smoke"]
    told = await tab.do("news.filter((one) => one.what === 'unstored')")
    assert [(one["reason"], "all the same" in one["detail"]) for one in told] == [("smoke", True)]
    assert await tab.do("items.size") == 1, "nothing of it is stored"
    await tab.do("void (room = true)")
    assert await tab.do("alert.stored") == "pass"
    await tab.do("sentinel.drained()")
    assert await tab.do("sentinel.counts.sent") == 2
    assert await tab.do("news.filter((one) => one.what === 'sent').length") == 2
    assert sorted(event.trigger_reason for event in await listed(local)) == ["fall", "smoke"]


async def test_an_event_that_went_out_unstored_and_was_changed_after_a_restart_is_still_corrected(
    tab: Tab, local: LocalHub
) -> None:
    await tab.do(FULL % ("hub", json.dumps(local.tokens["watch"])))
    await tab.do("sentinel.ready")
    begun = "sentinel.trigger('smoke', 'kitchen', { severity: 'critical', countdown: 0.3 })"
    await tab.do(f"(globalThis.alert = {begun}).stored")
    await tab.do("void (room = false)")
    assert (await tab.do("alert.sent"))["state"] == "done"
    await tab.do("sentinel.close()")
    again = FULL % ("hub", json.dumps(local.tokens["watch"]))
    await tab.do(f"{again}.then(() => sentinel.update(alert.id, {{ location: {{ lat: 31.2 }} }}))")
    await tab.do("sentinel.drained()")
    ends = await tab.do("news.filter((one) => ['sent', 'failed', 'unknown'].includes(one.what))")
    assert [(one["what"], one["detail"][:12]) for one in ends] == [("unknown", "id_conflict:")]
    await tab.do("(sentinel.cancel('kitchen', alert.id), sentinel.drained())")
    assert await tab.do("news.some((one) => one.what === 'corrected')")


async def test_a_critical_event_that_can_neither_be_stored_nor_sent_is_said(
    tab: Tab, local: LocalHub
) -> None:
    await tab.do(FULL % ("'http://127.0.0.1:9'", json.dumps(local.tokens["watch"])))
    await tab.do(
        "void (room = false, sentinel.trigger('smoke', 'kitchen', { severity: 'critical', countdown: 0.1 }))"
    )
    await tab.do("new Promise((done) => setTimeout(done, 700))")
    (said,) = await tab.do("news.filter((one) => one.what === 'unstored')")
    assert "neither" in said["detail"]
    await tab.do("sentinel.close()")
