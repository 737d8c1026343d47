"""The dead man's switch on the wire: a sentinel that falls silent is told of, once, and so is its return."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.apps.alerts.heartbeats import MOST, PROMISES, _decode, _encode, presence
from duly.clients.sentinel import Sentinel
from duly.core.heartbeat_watch import Promise
from duly.core.monitor.signals import Severity
from duly.core.operations import PutItem
from duly.core.units import DAY, HOUR, MINUTE, MS
from duly.identity.accounts import Role
from tests.apps.alerts.conftest import Tower, event
from tests.guard import GUARD
from tests.receivers import Receiver

QUICK = 1_000
"""The shortest promise, in milliseconds."""


def beat(every: int = QUICK, profile: str = "home") -> dict[str, Any]:
    return {"type": "alert_heartbeat", "data": {"profile_id": profile, "every": every}}


def told(hook: Receiver) -> list[tuple[str, str, str]]:
    found = [json.loads(body) for _, body in hook.requests]
    return [(one["type"], one["data"]["reason"], one["data"]["severity"]) for one in found]


@pytest.fixture
async def tower(tower: Tower, hook: Receiver) -> Tower:
    await tower.profile("home", hook.url, grace=0.5)
    return tower


async def test_a_sentinel_that_falls_silent_is_told_of_once_and_so_is_its_return(
    tower: Tower, hook: Receiver
) -> None:
    status, _ = await tower.post(beat())
    assert status < 300
    await hook.got(1)
    assert told(hook) == [("alert.event", "silent", "critical")]
    said = json.loads(hook.requests[0][1])["data"]
    assert said["sentinel"] == "gate"
    assert "last_heard" in said["device_meta"]
    shown = (await tower.do("alert.list"))["alerts"]
    assert [(one["reason"], one["status"]) for one in shown] == [("silent", "open")]
    await tower.hub.alerts.heartbeats.check()
    assert len(hook.requests) == 1
    await tower.post(beat(60_000))
    await hook.got(2)
    assert told(hook)[1] == ("alert.cancelled", "silent", "critical")
    assert (await tower.do("alert.list"))["alerts"][0]["by"] == "tower"


async def test_silence_is_noticed_over_a_restart_but_not_held_against_the_sentinel(
    tower: Tower, hook: Receiver
) -> None:
    await tower.post(beat(60_000))
    await tower.stop()
    await asyncio.sleep(0)
    await tower.start()
    await tower.hub.alerts.heartbeats.check()
    assert hook.requests == []
    await tower.hub.alerts.heartbeats._keep("gate/home", "gate", "home", 1_000_000)
    await hook.got(1)
    assert told(hook)[0][1] == "silent"


async def test_a_return_that_a_crash_left_untold_is_told(
    tower: Tower, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tower.post(beat())
    await hook.got(1)
    heartbeats = tower.hub.alerts.heartbeats
    monkeypatch.setattr(heartbeats, "_returned", _die)
    with pytest.raises(RuntimeError):
        await heartbeats._keep("gate/home", "gate", "home", 60_000_000)
    await tower.stop()
    await tower.start()
    await hook.got(2)
    assert told(hook)[1][0] == "alert.cancelled"


async def _die(*_: object) -> None:
    raise RuntimeError


async def test_a_promise_can_be_taken_back_and_ends_with_its_account(tower: Tower, hook: Receiver) -> None:
    await tower.post(beat())
    await tower.post(beat(0))
    assert await tower.hub.ledger.bucket(PROMISES) == {}
    await tower.post(beat(60_000), who="barn")
    await tower.hub.accounts.remove("barn")
    await tower.hub.alerts.heartbeats.check()
    assert await tower.hub.ledger.bucket(PROMISES) == {}


async def test_a_sentinel_that_takes_its_promise_back_was_heard_then(tower: Tower) -> None:
    async def heard() -> int:
        return (await presence(tower.hub.ledger, {"gate"}))["heard"].get("gate", 0)

    await tower.post(beat(60_000))
    first = await heard()
    while (last := await heard()) <= first:
        await tower.post(beat(60_000))
    await tower.post(beat(0))
    assert await heard() >= last


async def test_a_promise_that_is_renewed_while_it_is_taken_back_is_taken_back_as_it_is_then(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what another hub has stored meanwhile is lost unseen, such as a silence that was reported."""
    heartbeats, ledger = tower.hub.alerts.heartbeats, tower.hub.ledger
    await tower.post(beat(60_000))
    read, taken_back = ledger.item, []

    async def read_before_a_silence(bucket: str, name: str) -> bytes | None:
        monkeypatch.setattr(ledger, "item", read)
        body = await read(bucket, name)
        assert body is not None
        await ledger.write(
            PutItem(PROMISES, name, _encode(_decode(body).missed(ledger.clock.now(), Severity.CRITICAL)))
        )
        return body

    async def take_back(key: bytes, reason: str) -> None:
        taken_back.append(reason)

    monkeypatch.setattr(ledger, "item", read_before_a_silence)
    monkeypatch.setattr(heartbeats, "_take_back", take_back)
    await heartbeats._remove_promise("gate/home", "gate")
    assert taken_back == ["It has ended its heartbeats itself"]
    assert await ledger.bucket(PROMISES) == {}


async def test_a_profile_may_demand_signs_of_life_from_sentinels_that_promise_none(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, heartbeat=1.0, grace=0.5, silent="warning")
    await tower.post(event())
    await hook.got(2)
    assert told(hook)[1] == ("alert.event", "silent", "warning")


UNPROMISED = pytest.mark.parametrize("more", [{}, {"every": None}], ids=["absent", "null"])


@UNPROMISED
async def test_a_heartbeat_without_a_promise_takes_none_back(
    tower: Tower, hook: Receiver, more: dict[str, Any]
) -> None:
    await tower.post(beat())
    assert (await tower.post({"type": "alert_heartbeat", "data": {"profile_id": "home"} | more}))[0] < 300
    assert list(await tower.hub.ledger.bucket(PROMISES)) == ["gate/home"]
    await hook.got(1)
    assert told(hook) == [("alert.event", "silent", "critical")]


@UNPROMISED
async def test_a_heartbeat_without_a_promise_is_one_that_its_profile_demands(
    tower: Tower, hook: Receiver, more: dict[str, Any]
) -> None:
    unpromised = {"type": "alert_heartbeat", "seq_id": "b", "data": {"profile_id": "home"} | more}

    async def heard() -> list[int]:
        return [_decode(body).heard for body in (await tower.hub.ledger.bucket(PROMISES)).values()]

    await tower.post(unpromised)
    assert await heard() == [], "this profile demands none"
    await tower.profile("home", hook.url, heartbeat=1.0, grace=0.5)
    await tower.post(unpromised)
    (first,) = await heard()
    async with asyncio.timeout(GUARD):
        while await heard() == [first]:
            await tower.post(unpromised)
    await hook.got(1)
    assert told(hook) == [("alert.event", "silent", "critical")]


@pytest.mark.parametrize(
    "data", [{}, {"profile_id": "home", "every": -1}, {"profile_id": "home", "every": 5}]
)
async def test_a_heartbeat_that_makes_no_sense_is_refused(tower: Tower, data: dict[str, Any]) -> None:
    status, said = await tower.post({"type": "alert_heartbeat", "data": data})
    assert (status, said["error"]) == (400, "malformed")


async def test_a_heartbeat_for_a_profile_that_is_not_there_is_refused_until_it_is(
    tower: Tower, hook: Receiver
) -> None:
    status, said = await tower.post(beat(profile="away"))
    assert (status, said["code"], said["error"]) == (400, 2, "no_profile")
    assert "'away'" in said["detail"]
    headers = {"Authorization": f"Bearer {tower.tokens['gate']}"}
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{tower.url}/v1/ws", headers=headers) as ws:
        await ws.receive_json()
        await ws.send_json(beat(profile="away") | {"seq_id": "b1"})
        said = await ws.receive_json()
        assert (said["type"], said["seq_id"], said["error"]) == ("server_ack", "b1", "no_profile")
    assert await tower.hub.ledger.bucket(PROMISES) == {}
    assert (await tower.post(beat(0, "away")))[0] < 300, "there is nothing to take back"
    await tower.profile("default", hook.url)
    assert (await tower.post(beat(profile="away")))[0] < 300


async def test_a_sentinel_says_that_its_heartbeat_is_refused(tower: Tower, tmp_path: Path) -> None:
    async with Sentinel(
        tower.url, tower.tokens["gate"], store=str(tmp_path / "gate.db"), profile="away", heartbeat=1
    ) as sentinel:
        async with asyncio.timeout(GUARD):
            async for news in sentinel.news():
                if news.what == "refused":
                    break
    assert news.detail.startswith("the heartbeat: no_profile: there is no profile 'away'")


async def test_list_shows_who_is_there_and_who_is_silent(tower: Tower, hook: Receiver) -> None:
    headers = {"Authorization": f"Bearer {tower.tokens['barn']}"}
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{tower.url}/v1/ws", headers=headers) as ws:
        await ws.receive()
        await tower.post(beat())
        await hook.got(1)
        listed = await _list(tower)
        assert (listed["silent"], listed["online"]) == (["gate"], ["barn"])
        assert listed["heard"].keys() == {"gate", "barn"}


async def _list(tower: Tower) -> Any:
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{tower.url}/v1/admin/list", json={}, headers={"Authorization": f"Bearer {tower.hub._token}"}
        ) as answer,
    ):
        return await answer.json()


async def test_one_sentinel_promises_heartbeats_for_so_many_profiles(tower: Tower) -> None:
    """With a default profile every name has one. What is promised already is kept, also after a restart."""
    await tower.profile("default", nobody=True)
    for n in range(MOST):
        assert (await tower.post(beat(60_000, f"p{n}")))[0] < 300
    for _ in range(2):
        status, said = await tower.post(beat(60_000, "one more") | {"seq_id": "hb-1"})
        assert (status, said["error"], said["seq_id"]) == (403, "not_allowed", "hb-1")
        assert "100 profiles" in said["detail"]
        assert (await tower.post(beat(60_000, "p7")))[0] < 300
        assert (await tower.post(beat(60_000), "barn"))[0] < 300
        await tower.stop()
        await tower.start()
    await tower.post(beat(0, "p7"))
    assert (await tower.post(beat(60_000, "one more")))[0] < 300


async def test_several_hubs_tell_of_one_silence_once(hubs: list[Tower], hook: Receiver) -> None:
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home", hook.url, grace=0.5)
    hubs[1].tokens = hubs[0].tokens
    for hub in hubs:
        await hub.hub.maintenance.refresh()
    await hubs[0].post(beat())
    await hook.got(1)
    for hub in hubs:
        await hub.hub.alerts.heartbeats.check()
    assert len(hook.requests) == 1
    await hubs[1].post(beat(60_000))
    await hook.got(2)
    for hub in hubs:
        await hub.hub.alerts.heartbeats.check()
    assert [one[0] for one in told(hook)] == ["alert.event", "alert.cancelled"]


async def test_a_sentinel_that_only_posts_was_heard(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    assert (await tower.post(event()))[1]["code"] == 0
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    assert "gate" in (await presence(tower.hub.ledger, {"gate"}))["heard"]


@pytest.mark.parametrize("wrong", [-40 * DAY, HOUR])
async def test_a_silence_that_a_hub_with_a_wrong_clock_has_stored_is_told_by_the_next(
    tower: Tower, hook: Receiver, wrong: int
) -> None:
    """It died before it had reported it; how old the report is does not depend on its clock."""
    found = tower.hub.ledger.clock.now() + wrong
    promise = Promise("gate", "home", QUICK * MS, found - MINUTE).missed(found, Severity.CRITICAL)
    await tower.hub.ledger.write(PutItem(PROMISES, "gate/home", _encode(promise)))
    await tower.hub.alerts.heartbeats.check()
    await hook.got(1)
    assert told(hook) == [("alert.event", "silent", "critical")]
