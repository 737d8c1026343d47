"""Several hubs on one ledger are one tower, whoever hears what."""

from __future__ import annotations

import asyncio
import json

from duly.apps.alerts.unnotified_alerts import LONG_TRIED
from duly.errors import Malformed
from duly.identity.accounts import Role
from tests.apps.alerts.conftest import Tower, event
from tests.guard import GUARD
from tests.receivers import Receiver, receiver


async def test_two_hubs_on_one_postgres_are_one_tower(hubs: list[Tower], hook: Receiver) -> None:
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home", hook.url, most=0)
    for hub in hubs:
        hub.tokens = hubs[0].tokens
        await hub.hub.maintenance.refresh()
    events = [event(f"event-{n}") for n in range(20)]
    answers = await asyncio.gather(*(hub.post(one) for one in events for hub in hubs))
    assert sorted(said["code"] for _, said in answers) == [0] * 20 + [5] * 20
    await hubs[0].until(lambda: len(hook.events) == 20)
    for one in events:
        await hubs[1].until_state(one["seq_id"], "done")
    assert len(hook.requests) == 20
    hook.words = ["hang"]
    await hubs[0].post(event("event-20"))
    await hook.got(21)
    me, other = (hub.hub.ledger.worker for hub in reversed(hubs))
    await hubs[1].hub.alerts.adopt({me, other})
    assert len(hook.requests) == 21, "a living one's claim is its own"
    await hubs[1].hub.alerts.adopt({me})
    await hook.got(22)
    first, second = (headers["webhook-id"] for headers, _ in hook.requests[-2:])
    assert first == second, "a dead one's claim is over at once, and goes out with the same key"
    await hubs[1].until_state("event-20", "done")


async def test_what_is_over_stays_over_however_many_say_something_at_the_same_moment(
    hubs: list[Tower],
) -> None:
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home")
    for n in range(20):
        id_ = f"event-{n}"
        await hubs[0].post(event(id_))
        said = await asyncio.gather(
            *(hub.do("alert.ack", event=id_, by=f"{who}") for who in range(3) for hub in hubs),
            *(hub.do("alert.resolve", event=id_, by="ann") for hub in hubs),
            return_exceptions=True,
        )
        assert all(isinstance(one, dict | Malformed) for one in said), said
        shown = await hubs[n % 2].show(id_)
        assert (shown["status"], shown["by"]) == ("resolved", "ann")
        before = {one["by"] for one in said if isinstance(one, dict) and one["status"] == "acknowledged"}
        assert len(before) <= 1, "whoever was first, is"


async def test_an_update_at_one_hub_takes_back_nothing_that_a_person_says_at_another(
    hubs: list[Tower],
) -> None:
    """Both change the status of one alert at the same moment. The slower one reads it again; a sentinel that
    is told to try again does."""
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home")
    for n in range(20):
        id_ = f"event-{n}"
        await hubs[0].post(event(id_))
        data = {"event": id_, "location": {"lat": n}}
        update = {"type": "alert_update", "seq_id": f"u-{n}", "data": data}
        said, _ = await asyncio.gather(
            hubs[0].post(update), hubs[1].do("alert.ack", event=id_, by="ann", note="on my way")
        )
        while said[1]["code"] == 4:
            said = await hubs[0].post(update)
        shown = await hubs[1].show(id_)
        assert (shown["status"], shown["by"], shown["location"]) == ("acknowledged", "ann", {"lat": n})


async def test_what_was_told_at_one_hub_while_it_was_cancelled_at_another_is_corrected(
    hubs: list[Tower], hook: Receiver
) -> None:
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home", hook.url, escalate=((2.0, hook.url + "/boss"),))
    hubs[1].tokens = hubs[0].tokens
    await hubs[1].hub.maintenance.refresh()
    hook.words = ["hang after"]
    await hubs[0].post(event())
    await hook.got(1)
    change = {"event": "event-1", "cancelled_at": 1}
    _, said = await hubs[1].post({"type": "alert_cancel", "seq_id": "c1", "data": change})
    assert said["code"] == 0
    assert len(hook.requests) == 1, "nobody knows yet that somebody was told"
    hook.released.set()
    await hook.got(2)
    types = [json.loads(body)["type"] for _, body in hook.requests]
    assert types == ["alert.event", "alert.cancelled"]

    hook.words = ["200", "200"]
    await hubs[0].post(event("event-2"))
    await hook.got(3)
    change = {"event": "event-2", "location": "the shed"}
    await hubs[1].post({"type": "alert_update", "seq_id": "u1", "data": change})
    await hook.got(4)
    told = [json.loads(body)["data"] for _, body in hook.requests[2:]]
    assert [one.get("location") for one in told] == [None, "the shed"], "whoever comes later hears it all"


async def test_a_promise_of_a_sentinel_that_another_hub_has_just_made_is_kept(hubs: list[Tower]) -> None:
    deaf = hubs[1].hub
    assert deaf.notifier is not None
    deaf.notifier._listeners.clear()
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home", nobody=True)
    beat = {"type": "alert_heartbeat", "seq_id": "b1", "data": {"profile_id": "home", "every": 1000}}
    assert (await hubs[0].post(beat))[1]["code"] == 0
    await deaf.alerts.heartbeats.check()
    assert await deaf.ledger.item("heartbeats", "gate/home") is not None


async def test_a_critical_alert_whose_recipients_two_hubs_have_tried_in_vain_is_told_to_the_default_profile(
    hubs: list[Tower], hook: Receiver
) -> None:
    """Each hub makes some of the attempts, so that neither knows alone that none is left. There are fewer
    attempts than those after which the default profile is told while others are still tried."""
    events = [f"event-{n}" for n in range(12)]
    await hubs[0].add(Role.SENTINEL, "gate")
    async with receiver() as dead:
        dead.words = ["503"] * 1_000
        await hubs[0].profile("home", dead.url, dead.url + "/second", tries=LONG_TRIED - 1)
        await hubs[0].profile("default", hook.url)
        await hubs[1].hub.maintenance.refresh()
        for id_ in events:
            assert (await hubs[0].post(event(id_, severity="critical")))[1]["code"] == 0
        both = {hub.hub.ledger.worker for hub in hubs}
        async with asyncio.timeout(GUARD):
            while hook.events != sorted(events):
                for hub in hubs:
                    await hub.hub.alerts.adopt(both)
                await asyncio.sleep(0.02)
        for id_ in events:
            shown = await hubs[0].show(id_)
            assert [one["state"] for one in shown["deliveries"] if one["kind"] == "step"] == ["failed"] * 2
    for hub in hubs:
        await hub.hub.alerts.adopt(both)
    assert await hubs[0].hub.ledger.bucket("unsettled") == {}


async def test_a_hub_that_takes_an_alert_over_looks_up_the_address_that_it_does_not_know(
    hubs: list[Tower], hook: Receiver
) -> None:
    deaf = hubs[1].hub
    assert deaf.notifier is not None
    deaf.notifier._listeners.clear()
    await hubs[0].add(Role.SENTINEL, "gate")
    await hubs[0].profile("home", hook.url)
    hook.words = ["hang"]
    await hubs[0].post(event(severity="critical"))
    await hook.got(1)
    assert deaf.alerts.profiles.all() == {}, "it has not read the profile yet"
    await deaf.alerts.adopt({deaf.ledger.worker})
    await hubs[1].until_state("event-1", "done")
    assert len(hook.requests) == 2
