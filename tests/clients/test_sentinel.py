"""A sentinel and a real tower: what is reported is in the tower's list once, in order, whatever happens to
the network, the tower and the sentinel in between."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import pytest

from duly.apps.alerts.heartbeats import PROMISES
from duly.apps.alerts.model import AlertState, is_undated
from duly.apps.alerts.profiles import ProfileDraft
from duly.clients.sentinel import FIELD_LIMIT, Sentinel
from duly.clients.sentinel_alerts import SentinelNews
from duly.core.lifecycle import State
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.signals import SentinelPolicy
from duly.core.operations import Group, Results
from duly.core.units import DAY, HOUR, MS, SECOND
from duly.errors import ConnectionLost, LedgerUnavailable, Malformed, Stopped, TooLarge
from duly.identity.accounts import Role
from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from duly.storage.memory import MemoryLedger
from duly.testing import ManualClock
from duly.wire.frames import Frame
from duly.wire.outgoing import OutgoingFrame, encode
from duly.wire.session import UncongestedSession
from tests.guard import GUARD
from tests.local_hub import LocalHub

ROOT = Path(__file__).parents[2]
Way = Literal["websocket", "http"]
BOTH_WAYS = pytest.mark.parametrize("transport", ["websocket", "http"])
PATIENT = SentinelPolicy(countdown=60, debounce=0)
AT_ONCE = SentinelPolicy(countdown=0, debounce=0, per_hour=10_000)


@pytest.fixture
async def tower(local: LocalHub) -> LocalHub:
    await local.add(Role.SENTINEL, "watch", "other")
    await local.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    return local


class Told(Sentinel):
    """A sentinel whose clock is the test's, and whose news can be waited for."""

    clock: ManualClock | None = None

    async def _open_ledger(self) -> Ledger:
        return await open_ledger(
            "memory:" if self._store is None else f"sqlite:///{self._store}", clock=self.clock
        )

    async def hear(self, *words: str) -> SentinelNews:
        """The next news of these kinds."""
        async with asyncio.timeout(GUARD):
            async for news in self.news():
                if news.what in words:
                    return news
        raise AssertionError


def sentinel(
    tower: LocalHub,
    policy: SentinelPolicy = AT_ONCE,
    *,
    name: str = "watch",
    store: Path | None = None,
    transport: Way = "websocket",
    clock: ManualClock | None = None,
) -> Told:
    it = Told(
        tower.url,
        tower.tokens[name],
        store=None if store is None else str(store),
        profile="home",
        policy=policy,
        session="night",
        transport=transport,
    )
    it.clock = clock
    return it


async def listed(tower: LocalHub) -> list[dict[str, Any]]:
    """What the tower has, oldest first, as it came."""
    alerts = await tower.hub.alerts.operations.alerts(limit=10_000)
    messages = [alert.record.message for alert in reversed(alerts)]
    return [json.loads(one.body) | {"id": one.id, "scope": one.scope} for one in messages]


class Observer(UncongestedSession):
    """Watches the tower, as an admin may: what it has taken, in the order it took it."""

    def __init__(self, tower: LocalHub) -> None:
        self.taken: list[str] = []
        self.look(tower)

    def look(self, tower: LocalHub) -> None:
        tower.hub.activity.watchers.append(self)

    def push(self, frame: OutgoingFrame) -> None:
        seen = json.loads(encode(frame))["data"]
        if (seen["what"], seen.get("word")) == ("said", "fresh"):
            self.taken.append(seen["id"])

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


# ── reporting ────────────────────────────────────────────────────────────────────────────────────


@BOTH_WAYS
async def test_what_is_triggered_is_in_the_towers_list(tower: LocalHub, transport: Way) -> None:
    async with sentinel(tower, transport=transport) as watch:
        alert = watch.trigger(
            "fall", "band", severity="critical", meta={"rssi": -70}, location={"lat": 31.2, "lon": 121.5}
        )
        sent = await alert.sent
    assert sent.done
    (event,) = await listed(tower)
    assert (event["id"], event["scope"]) == (alert.id, "watch")
    assert event["trigger_reason"] == "fall"
    assert event["severity"] == "critical"
    assert event["device_address"] == "band"
    assert event["session_id"] == "night"
    assert event["location"] == {"lat": 31.2, "lon": 121.5}
    assert event["device_meta"] == {"rssi": -70}


@BOTH_WAYS
async def test_events_go_out_in_order(tower: LocalHub, transport: Way) -> None:
    observer = Observer(tower)
    async with sentinel(tower, transport=transport) as watch:
        alerts = [watch.trigger("fall", f"band-{n}") for n in range(50)]
        assert all([(await alert.sent).done for alert in alerts])
    assert observer.taken == [alert.id for alert in alerts]


async def test_a_link_that_goes_on_and_off_rings_once(tower: LocalHub) -> None:
    async with sentinel(tower, SentinelPolicy(countdown=0.2)) as watch:
        alerts = []
        for _ in range(5):
            alerts.append(watch.disconnect("band"))
            watch.reconnect("band")
        alerts.append(watch.disconnect("band"))
        assert (await alerts[0].sent).done
        held = [await alert.sent for alert in alerts[1:]]
    assert [(one.state, one.reason, one.event) for one in held] == [("held", "debounced", alerts[0].id)] * 5
    assert (watch.counts.signals, watch.counts.debounced, watch.counts.sent) == (6, 5, 1)
    assert len(await listed(tower)) == 1


async def test_a_countdown_can_be_called_off_by_event_or_by_device(tower: LocalHub) -> None:
    async with sentinel(tower, PATIENT) as watch:
        first, second = watch.trigger("fall", "band"), watch.trigger("smoke", "kitchen")
        first.cancel()
        watch.cancel("kitchen")
        assert {(await first.sent).state, (await second.sent).state} == {"cancelled"}
        assert (await watch.trigger("fall", "band").sent).reason == "cooling"
    assert await listed(tower) == []


async def test_a_cancel_after_the_tower_has_it_is_told_to_the_tower(tower: LocalHub) -> None:
    async with sentinel(tower) as watch:
        alert = watch.trigger("fall", "band")
        await alert.sent
        alert.cancel()
        assert (await watch.hear("corrected")).event == alert.id
    (seen,) = await tower.hub.alerts.operations.alerts()
    assert seen.status.standing.value == "cancelled"


async def test_a_newer_location_reaches_the_tower_after_its_event(tower: LocalHub) -> None:
    async with sentinel(tower) as watch:
        alert = watch.trigger("fall", "band", location={"lat": 1})
        await alert.sent
        alert.update(location={"lat": 2}, severity="critical")
        assert (await watch.hear("updated")).event == alert.id
    (seen,) = await tower.hub.alerts.operations.alerts()
    assert json.loads(bytes(seen.status.location)) == {"lat": 2}


async def test_the_countdown_is_told_as_it_goes(tower: LocalHub) -> None:
    async with sentinel(tower, SentinelPolicy(countdown=0.1)) as watch:
        watch.trigger("fall", "band")
        words = []
        async with asyncio.timeout(GUARD):
            async for news in watch.news():
                if news.what != "online":
                    words.append((news.what, news.device, news.reason))
                if news.what == "sent":
                    break
    assert words == [(word, "band", "fall") for word in ("countdown", "queued", "sent")]


@pytest.mark.parametrize("text", ["docs/sentinel.md", "docs/zh/sentinel.md"])
async def test_the_guides_example_runs_as_printed(
    tower: LocalHub, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", (ROOT / text).read_text(encoding="utf-8"), re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert await names["main"](tower.url, tower.tokens["watch"]) == "done"
    (event,) = await listed(tower)
    assert event["location"] == {"lat": 31.3, "lon": 121.4}


# ── the network, the tower, restarts ─────────────────────────────────────────────────────────────


@BOTH_WAYS
async def test_a_sentinel_starts_and_stores_without_its_tower_and_replays_in_order(
    tower: LocalHub, tmp_path: Path, transport: Way
) -> None:
    await tower.stop()
    memory = tmp_path / "watch.db"
    async with sentinel(tower, store=memory, transport=transport) as watch:
        alerts = [watch.trigger("fall", f"band-{n}") for n in range(20)]
        assert {await alert.stored() for alert in alerts} == {"pass"}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(alerts[0].sent, 0.05)
    await tower.start()
    observer = Observer(tower)
    async with sentinel(tower, store=memory, transport=transport) as watch:
        await watch.drained()
    assert observer.taken == [alert.id for alert in alerts]
    assert len(await listed(tower)) == 20


@BOTH_WAYS
async def test_a_restart_of_the_tower_loses_and_repeats_nothing(tower: LocalHub, transport: Way) -> None:
    async with sentinel(tower, transport=transport) as watch:
        await watch.trigger("fall", "band-0").sent
        await tower.stop()
        alerts = [watch.trigger("fall", f"band-{n}") for n in range(1, 10)]
        await tower.start()
        observer = Observer(tower)
        assert all([(await asyncio.wait_for(alert.sent, GUARD)).done for alert in alerts])
    assert observer.taken == [alert.id for alert in alerts]
    assert len(await listed(tower)) == 10


async def test_an_answer_that_was_lost_does_not_make_a_second_event(tower: LocalHub, tmp_path: Path) -> None:
    memory = tmp_path / "watch.db"
    watch = sentinel(tower, store=memory)
    watch._heard = lambda frame: None  # type: ignore[method-assign]  # every answer is lost
    async with watch:
        alert = watch.trigger("fall", "band")
        await alert.stored()
        while not await listed(tower):
            await asyncio.sleep(0.01)
    with pytest.raises(Stopped):
        await alert.sent
    async with sentinel(tower, store=memory) as watch:
        await watch.drained()
    assert [event["id"] for event in await listed(tower)] == [alert.id]


async def test_the_countdown_goes_on_after_a_restart_and_can_still_be_called_off(
    tower: LocalHub, tmp_path: Path
) -> None:
    memory = tmp_path / "watch.db"
    async with sentinel(tower, PATIENT, store=memory) as watch:
        alert = watch.trigger("fall", "band")
        await alert.stored()
    async with sentinel(tower, PATIENT, store=memory) as watch:
        assert (await watch.hear("countdown")).event == alert.id
        watch.cancel("band")
        assert (await watch.hear("cancelled")).event == alert.id
    async with sentinel(tower, PATIENT, store=memory) as watch:
        assert (await watch.trigger("fall", "band").sent).reason == "cooling"


@pytest.mark.parametrize("by", [HOUR, -HOUR])
async def test_a_clock_that_is_set_before_a_signal_is_handled_leaves_the_countdown_its_length(
    tower: LocalHub, by: int
) -> None:
    clock = ManualClock(tower.hub.ledger.clock.now())
    async with sentinel(tower, PATIENT, clock=clock) as watch:
        await watch.hear("online")
        watch.trigger("fall", "band")
        clock.set(clock.now() + by)  # the signal has its time, and the monitor has not seen it
        news = await watch.hear("countdown", "queued")
        assert (news.what, news.until) == ("countdown", (clock.now() + 60 * SECOND) // MS)
        watch.cancel("band")
        await watch.drained()


async def test_the_clock_offset_is_measured_and_sent(tower: LocalHub, tmp_path: Path) -> None:
    clock = ManualClock(SECOND)  # it is 1970, or so it thinks
    async with sentinel(tower, clock=clock) as watch:
        assert (await watch.trigger("fall", "band").sent).done
    (alert,) = await tower.hub.alerts.operations.alerts()
    event = json.loads(alert.record.message.body)
    assert event["timestamp"] == 1000
    assert abs(1000 + event["offset_ms"] - tower.hub.ledger.clock.now() // MS) < 10_000
    assert abs(alert.record.message.time - tower.hub.ledger.clock.now()) < 10 * SECOND


async def test_a_clock_an_hour_behind_is_put_right_by_http_too(tower: LocalHub) -> None:
    clock = ManualClock(tower.hub.ledger.clock.now() - HOUR)
    async with sentinel(tower, clock=clock, transport="http") as watch:
        assert (await watch.trigger("fall", "band").sent).done
    (event,) = await listed(tower)
    assert abs(event["offset_ms"] - 3_600_000) < 5_000


async def test_a_countdown_that_ended_while_the_phone_slept_is_an_alarm_although_the_device_is_back(
    tower: LocalHub,
) -> None:
    clock = ManualClock(tower.hub.ledger.clock.now())
    async with sentinel(tower, PATIENT, clock=clock) as watch:
        alert = watch.disconnect("band")
        assert await alert.stored() == "pass"
        clock.advance(8 * HOUR / SECOND)
        watch.reconnect("band")
        async with asyncio.timeout(GUARD):
            assert (await alert.sent).done


async def test_after_a_sleep_of_weeks_an_emergency_is_told_with_its_own_time(tower: LocalHub) -> None:
    """A sleep does not move our clock against the tower's: what was measured before still holds."""
    clock, theirs = (ManualClock(tower.hub.ledger.clock.now()) for _ in range(2))
    tower.hub.ledger.clock = theirs
    async with sentinel(tower, clock=clock) as watch:
        assert (await watch.trigger("fall", "band").sent).done
        for one in (clock, theirs):
            one.advance(40 * DAY / SECOND)
        async with asyncio.timeout(GUARD):
            assert (await watch.trigger("fall", "band", severity="critical").sent).done
    _, event = await listed(tower)
    assert abs(event["timestamp"] + event["offset_ms"] - theirs.now() // MS) < 10_000


# ── who may ──────────────────────────────────────────────────────────────────────────────────────


@BOTH_WAYS
async def test_a_wrong_token_is_told_and_the_queue_stays(
    tower: LocalHub, tmp_path: Path, transport: Way
) -> None:
    memory = tmp_path / "watch.db"
    good, tower.tokens["watch"] = tower.tokens["watch"], "duly_nonsense"
    async with sentinel(tower, store=memory, transport=transport) as watch:
        alert = watch.trigger("fall", "band")
        assert "not known" in (await watch.hear("denied")).detail
        assert await alert.stored() == "pass"
    tower.tokens["watch"] = good
    async with sentinel(tower, store=memory, transport=transport) as watch:
        await watch.drained()
    assert [event["id"] for event in await listed(tower)] == [alert.id]


@BOTH_WAYS
async def test_an_account_that_is_no_sentinel_is_refused_and_the_queue_stays(
    tower: LocalHub, tmp_path: Path, transport: Way
) -> None:
    memory = tmp_path / "watch.db"
    async with sentinel(tower, name="phone", store=memory, transport=transport) as watch:
        watch.trigger("fall", "band")
        assert "not_allowed" in (await watch.hear("refused")).detail
        assert watch.waiting == 1
    assert await listed(tower) == []
    async with sentinel(tower, store=memory, transport=transport) as watch:
        await watch.drained()
    assert len(await listed(tower)) == 1


async def test_a_token_that_is_taken_away_keeps_the_queue_until_there_is_a_new_one(
    tower: LocalHub, tmp_path: Path
) -> None:
    memory = tmp_path / "watch.db"
    async with sentinel(tower, store=memory) as watch:
        await watch.trigger("fall", "band-0").sent
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {tower.hub._token}"}) as http:
            url = f"{tower.url}/v1/admin/add"
            wanted = {"role": "sentinel", "name": "watch", "replace": "1"}
            async with http.post(url, json=wanted) as answer:
                fresh = (await answer.json())["token"]
        await watch.hear("denied")
        alert = watch.trigger("fall", "band-1")
        assert await alert.stored() == "pass"
    tower.tokens["watch"] = fresh
    async with sentinel(tower, store=memory) as watch:
        await watch.drained()
    assert len(await listed(tower)) == 2


# ── what does not fit ────────────────────────────────────────────────────────────────────────────


async def test_a_name_that_was_cut_in_the_middle_of_an_emoji_costs_no_alert(tower: LocalHub) -> None:
    async with sentinel(tower) as watch:
        about = {"name": "dad \ud83d", "whole": "👴", "path": "\\ud83d"}
        alert = watch.trigger("fall", "band", severity="critical", countdown=0, meta=about)
        assert (await alert.sent).done
    (record,) = await tower.hub.ledger.of_kind("alert_event")
    told = json.loads(record.message.body)["device_meta"]
    assert told == {"name": "dad �", "whole": "👴", "path": "\\ud83d"}


async def test_what_does_not_fit_is_refused_before_it_is_stored(tower: LocalHub) -> None:
    async with sentinel(tower) as watch:
        with pytest.raises(TooLarge, match="location has 10000002 bytes"):
            watch.trigger("fall", "band", location="x" * 10_000_000)
        with pytest.raises(Malformed, match="meta cannot be written as JSON"):
            watch.trigger("fall", "band", meta=object())
        with pytest.raises(Malformed, match="nested deeper"):
            watch.trigger("fall", "band", meta=json.loads("[" * 31 + "]" * 31))
        with pytest.raises(Malformed, match="severity"):
            watch.trigger("fall", "band", severity="terrible")
        with pytest.raises(Malformed, match="a reason that the sentinel uses itself"):
            watch.trigger("summary", "band")
        for device in ("", "x" * 201, "\ud800", "a\0b"):
            with pytest.raises(Malformed, match="device is a text"):
                watch.disconnect(device)
        assert watch.waiting == 0
        largest = watch.trigger(
            "fall", "band", location="x" * (FIELD_LIMIT - 2), meta=json.loads("[" * 30 + "]" * 30)
        )
        assert (await largest.sent).done


class Unmeasured(Told):
    """It does not look at the tower's clock."""

    def _up(self, welcome: Frame) -> None:
        super()._up(msgspec.structs.replace(welcome, time=None))


async def test_an_ancient_event_is_refused_for_good_and_told_and_the_others_go_on(tower: LocalHub) -> None:
    now = tower.hub.ledger.clock.now()
    watch = Unmeasured(tower.url, tower.tokens["watch"], profile="home", policy=AT_ONCE)
    watch.clock = ManualClock(now - 60 * DAY)
    async with watch:
        sent = await watch.trigger("fall", "band").sent
        assert (sent.state, sent.reason[:6]) == ("unknown", "stale:")
        watch.clock.set(now)
        assert (await watch.trigger("fall", "band").sent).done
    assert len(await listed(tower)) == 1


@pytest.mark.parametrize("wrong", [4_000 * DAY, HOUR, -20_000 * DAY], ids=["decade", "hour", "1970"])
async def test_an_event_of_a_wrong_clock_arrives_and_measures_that_clock(tower: LocalHub, wrong: int) -> None:
    """The tower's clock was wrong when the sentinel connected, or it did not say what it shows."""
    watch = Unmeasured(tower.url, tower.tokens["watch"], profile="home", policy=AT_ONCE)
    watch.clock = ManualClock(tower.hub.ledger.clock.now() + wrong)
    async with watch:
        assert (await watch.trigger("fall", "band").sent).done
        assert (await watch.trigger("smoke", "band").sent).done
    first, second = await tower.hub.alerts.operations.alerts()
    dated, undated = sorted((first, second), key=lambda alert: is_undated(alert.record.message))
    assert is_undated(undated.record.message)
    assert "offset_ms" not in json.loads(undated.record.message.body)
    assert abs(json.loads(dated.record.message.body)["offset_ms"] + wrong // MS) < 60_000


async def test_a_sentinel_without_a_clock_of_its_own_loses_nothing_when_its_clock_is_set(
    tower: LocalHub, tmp_path: Path
) -> None:
    """It starts in 1970, notices something, is killed, and connects after its clock was set."""
    memory, now = tmp_path / "watch.db", tower.hub.ledger.clock.now()
    offline = Told(
        "http://127.0.0.1:9", tower.tokens["watch"], store=str(memory), profile="home", policy=AT_ONCE
    )
    offline.clock = ManualClock(5 * SECOND)
    async with offline:
        await offline.trigger("fall", "band").stored()
        offline.clock.set(now)
        await offline.trigger("smoke", "band").stored()
    async with sentinel(tower, store=memory) as watch:
        await watch.drained()
    told = {
        json.loads(one.record.message.body)["trigger_reason"]: one.record.message
        for one in await tower.hub.alerts.operations.alerts()
    }
    assert (is_undated(told["fall"]), is_undated(told["smoke"])) == (True, False)
    assert abs(told["smoke"].time - now) < 10 * SECOND


async def test_an_event_whose_profile_is_not_there_stays_in_the_queue_until_it_is(tower: LocalHub) -> None:
    policy = SentinelPolicy(countdown=0, retry_first=0.05, retry_most=0.1)
    async with Told(tower.url, tower.tokens["watch"], profile="barn", policy=policy) as watch:
        alert = watch.trigger("fall", "band", severity="critical")
        assert "no profile 'barn'" in (await watch.hear("refused")).detail
        await tower.hub.alerts.profiles.set("barn", ProfileDraft(nobody=True))
        assert (await alert.sent).done


async def test_a_sentinel_that_stands_down_knows_that_the_tower_has_it(tower: LocalHub) -> None:
    watch = sentinel(tower, SentinelPolicy(heartbeat=60))
    async with watch:
        with pytest.raises(ConnectionLost):
            watch.stand_down()
        await watch.hear("online")
        await watch.stand_down()
        assert (await watch.hear("stood down")).detail == "the tower expects no heartbeat"
        assert await tower.hub.ledger.bucket(PROMISES) == {}
        await watch.stand_down()
    with pytest.raises(Stopped):
        watch.stand_down()


async def test_a_sentinel_that_has_stood_down_makes_no_profile_wait_for_it(tower: LocalHub) -> None:
    await tower.hub.alerts.profiles.set("home", ProfileDraft(nobody=True, heartbeat=60.0))
    heartbeats = tower.hub.alerts.heartbeats
    async with sentinel(tower, msgspec.structs.replace(AT_ONCE, debounce=60.0)) as watch:
        assert (await watch.trigger("fall", "door").sent).done
        await watch.stand_down()
        heartbeats._beaten.clear()
        watch.trigger("fall", "door")
        async with asyncio.timeout(GUARD):
            while not tower.hub.alerts.held_back.counts["debounce"]:
                await asyncio.sleep(0.02)
        assert await tower.hub.ledger.bucket(PROMISES) == {}


# ── storage ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_file_does_not_grow_with_what_the_tower_has(tower: LocalHub, tmp_path: Path) -> None:
    memory = tmp_path / "watch.db"
    async with sentinel(tower, store=memory) as watch:
        for n in range(100):
            await watch.trigger("fall", f"band-{n % 3}").sent
    async with await open_ledger(f"sqlite:///{memory}") as ledger:
        assert (await ledger.size()).messages == 0
        assert len(await ledger.bucket("devices")) == 3


class Full(MemoryLedger):
    """A disk that is full until somebody makes room."""

    room = False

    async def commit(self, groups: Sequence[Group]) -> list[Results]:
        if not self.room:
            raise LedgerUnavailable("the disk is full")
        return await super().commit(groups)


async def test_signals_wait_for_a_disk_that_is_full_and_are_stored_when_it_is_not(tower: LocalHub) -> None:
    disk = Full()
    disk.room = True
    watch = sentinel(tower)

    async def open_it() -> Ledger:
        return disk

    watch._open_ledger = open_it  # type: ignore[method-assign]  # on the disk of this test
    async with watch:
        disk.room = False
        alerts = [watch.trigger("fall", f"band-{n}") for n in range(10)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(alerts[0].stored(), 0.2)
        disk.room = True
        assert {(await alert.sent).state for alert in alerts} == {"done"}
    assert len(await listed(tower)) == 10


def on(disk: Ledger, watch: Told) -> Told:
    """The sentinel, with this disk."""

    async def open_it() -> Ledger:
        return disk

    watch._open_ledger = open_it  # type: ignore[method-assign]  # on the disk of this test
    return watch


@BOTH_WAYS
async def test_a_critical_event_reaches_the_tower_at_once_from_a_full_disk(
    tower: LocalHub, transport: Way
) -> None:
    disk = Full()
    disk.room = True
    async with on(disk, sentinel(tower, transport=transport)) as watch:
        await watch.ready()
        disk.room = False
        mild = watch.trigger("fall", "band")
        await watch.hear("trouble")
        alert = watch.trigger("smoke", "kitchen", severity="critical")
        said = await watch.hear("unstored")
        assert (said.device, said.reason, said.event) == ("kitchen", "smoke", alert.id)
        assert "the disk is full" in said.detail
        async with asyncio.timeout(GUARD):
            assert (await alert.sent).done
        assert [one["id"] for one in await listed(tower)] == [alert.id]
        for waits in (alert.stored(), mild.stored()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waits, 0.1)
        disk.room = True
        assert await alert.stored() == "pass"
        assert (await mild.sent).done
        await watch.drained()
        assert watch.counts.sent == 2
    assert [one["trigger_reason"] for one in await listed(tower)] == ["smoke", "fall"]


async def test_a_stored_critical_event_goes_out_at_the_end_of_its_countdown_on_a_full_disk(
    tower: LocalHub,
) -> None:
    disk = Full()
    disk.room = True
    async with on(disk, sentinel(tower)) as watch:
        await watch.ready()
        alert = watch.trigger("smoke", "kitchen", severity="critical", countdown=0.3)
        assert await alert.stored() == "pass"
        disk.room = False
        async with asyncio.timeout(GUARD):
            assert (await alert.sent).done
        assert len(await listed(tower)) == 1
        disk.room = True
        await watch.drained()
    assert len(await listed(tower)) == 1


async def test_a_critical_event_that_is_called_off_in_time_stays_here_though_nothing_can_be_stored(
    tower: LocalHub,
) -> None:
    disk = Full()
    disk.room = True
    async with on(disk, sentinel(tower)) as watch:
        await watch.ready()
        disk.room = False
        watch.trigger("smoke", "kitchen", severity="critical", countdown=0.5)
        watch.cancel("kitchen")
        watch.trigger("disconnect", "door", severity="critical", countdown=0.5)
        watch.reconnect("door")
        last = watch.trigger("flood", "cellar", severity="critical", countdown=1)
        async with asyncio.timeout(GUARD):
            assert (await last.sent).done
        assert [one["trigger_reason"] for one in await listed(tower)] == ["flood"]


async def test_a_critical_event_that_went_out_unstored_is_corrected_when_it_is_called_off(
    tower: LocalHub,
) -> None:
    disk = Full()
    disk.room = True
    async with on(disk, sentinel(tower)) as watch:
        await watch.ready()
        disk.room = False
        alert = watch.trigger("smoke", "kitchen", severity="critical")
        assert (await alert.sent).done
        watch.cancel("kitchen", alert.id)
        disk.room = True
        await watch.hear("corrected")
    [event] = await tower.hub.alerts.operations.alerts(limit=10)
    assert event.status.standing is AlertState.CANCELLED


async def test_an_event_that_went_out_unstored_and_was_changed_after_a_restart_is_still_corrected(
    tower: LocalHub,
) -> None:
    disk = Full()
    disk.room = True
    async with on(disk, sentinel(tower)) as watch:
        await watch.ready()
        alert = watch.trigger("smoke", "kitchen", severity="critical", countdown=0.3)
        assert await alert.stored() == "pass"
        disk.room = False
        assert (await alert.sent).done
    disk.room = True
    async with on(disk, sentinel(tower)) as watch:
        watch.update(alert.id, location={"lat": 31.2})
        said = await watch.hear("sent", "failed", "unknown")
        assert (said.what, said.detail[:12]) == ("unknown", "id_conflict:"), "the tower has an earlier form"
        watch.cancel("kitchen", alert.id)
        await watch.hear("corrected")
    [event] = await tower.hub.alerts.operations.alerts(limit=10)
    assert event.status.standing is AlertState.CANCELLED


async def test_a_critical_event_that_can_neither_be_stored_nor_sent_is_loud(
    tower: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Full()
    disk.room = True
    async with on(disk, Told("http://127.0.0.1:9", tower.tokens["watch"], policy=AT_ONCE)) as watch:
        disk.room = False
        alert = watch.trigger("smoke", "kitchen", severity="critical")
        said = await watch.hear("unstored")
        assert "neither" in said.detail
        assert said.event == alert.id
        assert not alert.sent.done()
    [line] = [one for one in caplog.records if one.name == "duly.sentinel" and "neither" in one.message]
    assert line.levelname == "ERROR"


async def test_a_called_off_event_is_remembered_with_its_reason(tower: LocalHub, tmp_path: Path) -> None:
    memory = tmp_path / "watch.db"
    async with sentinel(tower, PATIENT, store=memory) as watch:
        alert = watch.trigger("fall", "band")
        alert.cancel()
        await alert.sent
    async with await open_ledger(f"sqlite:///{memory}") as ledger:
        record = await ledger.outcome(SCOPE, alert.id)
        assert record is not None
        assert record.state is State.CANCELLED
        assert record.answer is not None
        assert "called it off" in record.answer.reason


@BOTH_WAYS
async def test_the_tower_counts_what_the_sentinel_held_back(tower: LocalHub, transport: Way) -> None:
    policy = msgspec.structs.replace(AT_ONCE, debounce=60.0)
    async with sentinel(tower, policy, transport=transport) as it:
        for _ in range(3):
            it.trigger("fall", "door")
        async with asyncio.timeout(GUARD):
            while tower.hub.alerts.held_back.counts["debounce"] < 2:
                await asyncio.sleep(0.02)
    assert it.counts.held_back == {"debounce": 2}
    (metric,) = [
        one for one in (await tower.hub.measure()).metrics if one.name == "duly_alert_held_back_total"
    ]
    held = {sample.labels["reason"]: sample.value for sample in metric.samples}
    assert held == {"debounce": 2, "limit": 0, "cooldown": 0}
