"""What the page shows and does: messages by every filter, commands once, unknown ones settled by hand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.apps.alerts import verbs
from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of
from duly.core.operations import Admit, Advance
from duly.core.units import HOUR
from duly.identity.accounts import Role
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.server.dashboard.visiting import PageVisitor, mint


@pytest.fixture
async def ann(local: LocalHub) -> AsyncIterator[PageVisitor]:
    async with PageVisitor(local, "operator") as visitor:
        yield visitor


class CountingLock:
    """A device that counts what it has done."""

    def __init__(self, local: LocalHub, name: str = "lock") -> None:
        self.effects: list[str] = []
        self.device = Device(local.url, local.tokens[name])

        @self.device.on("lock_control")
        async def lock_control(command: Command) -> dict[str, Any]:
            self.effects.append(command.id)
            return {"open": True}


@pytest.fixture
async def lock(local: LocalHub) -> AsyncIterator[CountingLock]:
    it = CountingLock(local)
    async with it.device:
        yield it


async def store(
    local: LocalHub, id_: str, state: State, to: str = "lock", kind: str = "lock_control"
) -> None:
    """Put a message of the phone into the ledger, as far along as this."""
    ledger = local.hub.ledger
    now = ledger.clock.now()
    message = Message("phone", id_, kind, to, b"{}")
    await ledger.write(Admit(message, now + 24 * HOUR, now))
    if state is not State.ACCEPTED:
        await ledger.write(Advance(message.key, state, now, Answer()))


def ids(seen: dict[str, Any]) -> list[str]:
    return [one["id"] for one in seen["messages"]]


# ── finding ──────────────────────────────────────────────────────────────────────────────────────


async def test_messages_are_found_by_id_sender_recipient_state_and_kind(
    local: LocalHub, ann: PageVisitor
) -> None:
    await store(local, "1794900000000_1", State.DONE)
    await store(local, "1794900000001_2", State.UNKNOWN, to="lamp")
    await store(local, "1794900000002_3", State.FAILED, kind="query")
    for query, found in (
        ({}, ["1794900000002_3", "1794900000001_2", "1794900000000_1"]),
        ({"id": "1794900000001_2"}, ["1794900000001_2"]),
        ({"scope": "tablet"}, []),
        ({"to": "lamp"}, ["1794900000001_2"]),
        ({"state": "done"}, ["1794900000000_1"]),
        ({"state": "trouble"}, ["1794900000002_3", "1794900000001_2"]),
        ({"state": "open"}, []),
        ({"kind": "query"}, ["1794900000002_3"]),
        ({"kind": "query", "state": "done"}, []),
    ):
        assert ids(await ann.get("/messages.json", **query)) == found, query


async def test_messages_are_found_by_time(local: LocalHub, ann: PageVisitor) -> None:
    now = local.hub.ledger.clock.now() // 1000
    await store(local, f"{now}_1", State.DONE)
    assert ids(await ann.get("/messages.json", since=str(now - 1000))) == [f"{now}_1"]
    assert ids(await ann.get("/messages.json", since=str(now + 60_000))) == []
    assert ids(await ann.get("/messages.json", until=str(now + 60_000))) == [f"{now}_1"]
    assert ids(await ann.get("/messages.json", until=str(now - 1000))) == []


@pytest.mark.parametrize("query", [{}, {"to": "lock"}])
async def test_pages_follow_each_other_without_a_gap_or_a_repeat(
    local: LocalHub, ann: PageVisitor, query: dict[str, str]
) -> None:
    for n in range(25):
        await store(local, f"{1794900000000 + n}_{n}", State.DONE, to="lock" if n % 2 else "lamp")
    found: list[str] = []
    cursor = ""
    for _ in range(20):
        seen = await ann.get("/messages.json", limit="4", before=cursor, **query)
        found += ids(seen)
        cursor = seen["next"] or ""
        if not cursor:
            break
    wanted = [f"{1794900000000 + n}_{n}" for n in range(24, -1, -1) if not query or n % 2]
    assert found == wanted
    assert "1794" not in cursor, "a cursor tells nothing"


@pytest.mark.parametrize(
    "query",
    [
        {"state": "nonsense"},
        {"limit": "0"},
        {"limit": "x"},
        {"before": "x"},
        {"since": "-1"},
        {"id": "x" * 300},
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(ann: PageVisitor, query: dict[str, str]) -> None:
    status, said = await ann.ask("GET", "/messages.json", params=query)
    assert (status, said["error"]) == (400, "malformed")


async def test_what_people_say_to_each_other_is_not_shown(local: LocalHub, ann: PageVisitor) -> None:
    for name in ("bob", "eve"):
        await local.hub.people.register(name, "correct horse", "127.0.0.1", trusted=True)
    token = await local.hub.people.let_in("bob")
    heads = {"Authorization": f"Bearer {token}"}
    id_ = mint()
    frame = {"type": "one_chat", "seq_id": id_, "to": "eve", "data": {"text": "a secret"}}
    status, _ = await ann.ask("POST", "/v1/messages", json=frame, headers=heads)
    assert status == 200
    seen = await ann.get("/message.json", scope="bob", id=id_)
    assert seen["private"] is True
    assert "a secret" not in str(seen)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_sent_twice_is_one_effect(ann: PageVisitor, lock: CountingLock) -> None:
    wanted = {"id": mint(), "device": "lock", "type": "lock_control", "data": '{"open": true}'}
    answers = await asyncio.gather(*(ann.act("command.send", **wanted) for _ in range(5)))
    assert min(said["server_ack"]["code"] for _, said in answers) == 0
    async with asyncio.timeout(GUARD):
        while (await ann.get("/message.json", scope="dashboard", id=wanted["id"]))["state"] != "done":
            await asyncio.sleep(0.01)
    assert lock.effects == [wanted["id"]]


async def test_a_repeat_of_a_command_that_has_ended_is_told_how(ann: PageVisitor, lock: CountingLock) -> None:
    wanted = {"id": mint(), "device": "lock", "type": "lock_control", "data": '{"open": true}'}
    await ann.act("command.send", **wanted)
    await _ended(ann, wanted["id"])
    status, said = await ann.act("command.send", **wanted)
    assert (status, said["server_ack"]["code"]) == (200, 5)
    assert said["server_ack"]["ack"]["data"] == {"open": True}


async def test_the_timeline_of_a_command_has_its_hops(ann: PageVisitor, lock: CountingLock) -> None:
    id_ = mint()
    await ann.act("command.send", id=id_, device="lock", type="lock_control", data="{}")
    async with asyncio.timeout(GUARD):
        while (seen := await ann.get("/message.json", scope="dashboard", id=id_))["state"] != "done":
            await asyncio.sleep(0.01)
    assert [hop["what"] for hop in seen["hops"]][:2] == ["fresh", "sent"]
    assert [step["what"] for step in seen["timeline"]][:5] == ["made", "stored", "fresh", "sent", "done"]
    assert seen["ack"]["data"] == {"open": True}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"id": "1_1", "device": "lock", "type": "lock_control"}, "UUID"),
        ({"id": "0190a0c0-0000-7000-8000-000000000000", "device": "lock", "type": "x", "data": "{"}, "JSON"),
        ({}, "UUID"),
    ],
)
async def test_a_command_that_makes_no_sense_is_refused(
    ann: PageVisitor, wanted: dict[str, str], why: str
) -> None:
    status, said = await ann.act("command.send", **wanted)
    assert status == 400
    assert why in said["detail"]


async def test_an_offline_device_refuses_and_the_same_form_may_be_sent_again(
    local: LocalHub, ann: PageVisitor
) -> None:
    wanted = {"id": mint(), "device": "lock", "type": "lock_control", "data": "{}"}
    _, said = await ann.act("command.send", **wanted)
    assert said["server_ack"]["code"] == 1
    it = CountingLock(local)
    async with it.device:
        _, said = await ann.act("command.send", **wanted)
        assert said["server_ack"]["code"] == 0


async def test_the_timeline_of_a_command_from_the_page_says_that_its_request_was_over(
    ann: PageVisitor, lock: CountingLock
) -> None:
    """The page sees the outcome in the ledger; no session of its sender was there to be told."""
    id_ = mint()
    await ann.act("command.send", id=id_, device="lock", type="lock_control", data="{}")
    await _ended(ann, id_)
    timeline = (await ann.get("/message.json", scope="dashboard", id=id_))["timeline"]
    assert [step["what"] for step in timeline] == ["made", "stored", "fresh", "sent", "done", "not told"]


async def test_a_command_that_has_ended_is_resent_as_a_new_one(ann: PageVisitor, lock: CountingLock) -> None:
    first, second = mint(), mint()
    await ann.act("command.send", id=first, device="lock", type="lock_control", data='{"n": 1}')
    await _ended(ann, first)
    status, sent = await ann.act("message.resend", scope="dashboard", id=first, new_id=second)
    assert (status, sent["id"]) == (200, second)
    await _ended(ann, second)
    assert lock.effects == [first, second]


async def test_a_waiting_command_is_cancelled_and_its_sender_told(local: LocalHub, ann: PageVisitor) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True}, queue=True)
        async with asyncio.timeout(GUARD):
            while await local.hub.ledger.find(key_of("phone", command.id)) is None:
                await asyncio.sleep(0.01)
        status, said = await ann.act("message.cancel", scope="phone", id=command.id, why="a mistake")
        assert (status, said) == (200, {"state": "cancelled"})
        ack = await command.ended()
    assert ack.state == "cancelled"
    seen = await ann.get("/message.json", scope="phone", id=command.id)
    assert "cancelled by ann on the dashboard: a mistake" in seen["ack"]["detail"]
    status, said = await ann.act("message.cancel", scope="phone", id=command.id)
    assert (status, said["error"]) == (400, "malformed")


async def test_an_unknown_one_is_settled_once_with_who_and_why(local: LocalHub, ann: PageVisitor) -> None:
    await store(local, "1794900000000_1", State.UNKNOWN)
    where = {"scope": "phone", "id": "1794900000000_1"}
    status, said = await ann.act("message.settle", **where, **{"as": "done"})
    assert status == 400, "a reason is needed"
    status, said = await ann.act("message.settle", **where, **{"as": "done"}, why="I looked: it is open")
    assert (status, said) == (200, {"state": "done"})
    record = await local.hub.ledger.find(key_of("phone", "1794900000000_1"))
    assert record is not None
    assert record.answer is not None
    assert record.answer.reason == "settled by hand by ann: I looked: it is open"
    timeline = (await ann.get("/message.json", **where))["timeline"]
    assert [step for step in timeline if "settled by hand by ann: I looked" in json.dumps(step)], timeline
    assert timeline[-1]["what"] == "not told", "the phone is not connected"
    counted = (await ann.get("/overview.json"))["metrics"]["duly_messages_total"]
    assert {what: count for what, count in counted.items() if count} == {"lock_control/done": 1}
    status, said = await ann.act("message.settle", **where, **{"as": "failed"}, why="no")
    assert status == 400
    assert "only what is unknown" in said["detail"]


@pytest.mark.parametrize("state", [State.ACCEPTED, State.SENT, State.DELIVERED, State.DONE])
async def test_only_an_unknown_one_is_settled(local: LocalHub, ann: PageVisitor, state: State) -> None:
    """One that waits or is under way would take effect after its sender was told how it ended."""
    await store(local, "1794900000000_1", state)
    where = {"scope": "phone", "id": "1794900000000_1"}
    status, said = await ann.act("message.settle", **where, **{"as": "failed"}, why="I think so")
    assert (status, said["error"]) == (400, "malformed")
    assert f"it is {state.word}; only what is unknown" in said["detail"]
    record = await local.hub.ledger.find(key_of("phone", "1794900000000_1"))
    assert record is not None
    assert record.state is state


async def _ended(ann: PageVisitor, id_: str) -> None:
    async with asyncio.timeout(GUARD):
        while (await ann.get("/message.json", scope="dashboard", id=id_))["state"] != "done":
            await asyncio.sleep(0.01)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_device_shows_what_it_reported_and_what_waits_for_it(
    local: LocalHub, ann: PageVisitor, lock: CountingLock
) -> None:
    await lock.device.push("status_report", {"battery": 71, "rssi": -60, "version": "1.2"})
    async with App(local.url, local.tokens["phone"]) as app:
        await app.post("lamp", "dev_control", {}, queue=True)
        async with asyncio.timeout(GUARD):
            while True:
                lamp, door = (await ann.get("/devices.json"))["devices"]
                if door["battery"] is not None and lamp["queue"]:
                    break
                await asyncio.sleep(0.05)
    assert (door["name"], door["online"], door["battery"], door["signal"]) == ("lock", True, 71, -60)
    assert (door["version"], door["apps"]) == ("1.2", ["phone"])
    assert (lamp["name"], lamp["online"], lamp["queue"]) == ("lamp", False, 1)
    assert [one["name"] for one in (await ann.get("/devices.json", only="online"))["devices"]] == ["lock"]
    assert [one["name"] for one in (await ann.get("/devices.json", name="AM"))["devices"]] == ["lamp"]
    seen = await ann.get("/devices.json", limit="1")
    assert (seen["next"], seen["total"]) == ("lamp", 2)
    assert [one["name"] for one in (await ann.get("/devices.json", after="lamp"))["devices"]] == ["lock"]


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────


async def report(local: LocalHub, event: str) -> None:
    """Report an alert as the sentinel, and wait until it has ended."""
    data = {"profile_id": "home", "trigger_reason": "water", "timestamp": round(time.time() * 1000)}
    frame = {"type": "alert_event", "seq_id": event, "data": data}
    heads = {"Authorization": f"Bearer {local.tokens['watch']}"}
    async with (
        aiohttp.ClientSession(local.url, headers=heads) as http,
        http.post("/v1/messages?wait=10", json=frame) as answer,
    ):
        assert (await answer.json())["ack"]["state"] == "done"


async def test_a_dead_letter_is_listed_until_it_is_sent_elsewhere_also_if_others_were_told(
    local: LocalHub, ann: PageVisitor
) -> None:
    await local.add(Role.SENTINEL, "watch")
    (local.folder / "notifications" / "folder.txt").mkdir(parents=True)  # no notification can be written
    draft = {"send": ["file:told.txt", "file:folder.txt"], "tries": 1}
    await local.hub.alerts.profiles.set("home", verbs.draft_of(draft))
    await report(local, "e" * 64)
    (letter,) = (await ann.get("/alerts-deliveries.json", state="dead"))["deliveries"]
    failed = letter["delivery"]["recipient"]
    assert (failed.partition("#")[0], letter["delivery"]["state"]) == ("file:folder.txt", "failed")
    wanted = {"sentinel": "watch", "event": "e" * 64, "recipient": failed, "url": "file:other.txt"}
    assert (await ann.act("deliveries.edit", **wanted))[0] == 200
    assert (await ann.get("/alerts-deliveries.json", state="dead"))["deliveries"] == []


@pytest.mark.parametrize(("view", "rows"), [("alerts", "alerts"), ("alerts-deliveries", "deliveries")])
async def test_a_short_list_of_alerts_is_whole_however_busy_the_machine_is(
    local: LocalHub, ann: PageVisitor, monkeypatch: pytest.MonkeyPatch, view: str, rows: str
) -> None:
    monkeypatch.setattr("duly.server.dashboard.alert_views.SEARCH_SECONDS", -1.0)
    await local.add(Role.SENTINEL, "watch")
    await local.hub.alerts.profiles.set("home", verbs.draft_of({"send": ["file:told.txt"]}))
    for n in range(4):
        await report(local, f"{n:064}")
    seen = await ann.get(f"/{view}.json", **({"state": "all"} if rows == "deliveries" else {}))
    assert (len(seen[rows]), seen["next"]) == (4, None)


async def test_a_test_from_the_page_reaches_its_recipient(local: LocalHub, ann: PageVisitor) -> None:
    profile, _ = await local.hub.alerts.profiles.set("home", verbs.draft_of({"send": ["file:told.txt"]}))
    (recipient,) = profile.steps[0].to
    status, said = await ann.act("channel.test", recipient=recipient)
    assert (status, said["recipient"], said["fate"]) == (200, recipient, "arrived")
    told = Path(local.hub.settings.data) / "notifications/told.txt"
    assert json.loads(told.read_text())["title"] == "Test from duly"
