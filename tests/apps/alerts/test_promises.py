"""What people may rely on: who said so, when it happened, that what is critical is told, and that nobody is
told any more once somebody takes care."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from duly.apps.alerts.notifications import NotificationContext, notification
from duly.core.fanout.plan import BatchItem, StartAttempt
from duly.core.messages import Message
from duly.core.operations import DeliveryRef
from duly.core.units import HOUR, SECOND
from duly.identity.accounts import Role
from duly.runtime.thresholds import judge
from tests.apps.alerts.conftest import Tower, event
from tests.apps.alerts.test_telling import mail_to
from tests.guard import GUARD
from tests.receivers import Mailbox, Receiver, receiver

# ── who said so ──────────────────────────────────────────────────────────────────────────────────


async def admin(tower: Tower, verb: str, token: str, **wanted: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{tower.url}/v1/admin/{verb}", json=wanted, headers=headers) as answer,
    ):
        said = await answer.json()
        assert answer.status == 200, said
        return said


async def test_who_acknowledged_is_the_account_and_not_what_its_client_says(tower: Tower) -> None:
    await tower.add(Role.ADMIN, "ann")
    for n, verb in enumerate(("alert.ack", "alert.resolve")):
        status, said = await tower.post(event(f"event-{n}"))
        assert (status, said["code"]) == (200, 0), said
        said = await admin(tower, verb, tower.tokens["ann"], event=f"event-{n}", by="bob", note="on my way")
        assert (said["by"], said["claimed"], said["note"]) == ("ann", "bob", "on my way")
    said = await admin(tower, "alert.silence", tower.tokens["ann"], device="x", by="bob", lasts="60")
    assert (said["by"], said["claimed"]) == ("ann", "bob")
    _, (silence,) = (await admin(tower, "alert.silences", tower.tokens["ann"])).popitem()
    assert (silence["by"], silence["claimed"]) == ("ann", "bob")


# ── once somebody takes care ─────────────────────────────────────────────────────────────────────


async def test_after_an_acknowledgement_recipients_that_were_not_reached_are_not_told(
    tower: Tower, hook: Receiver
) -> None:
    tower.hub.alerts._fanout.policy = type(tower.hub.alerts._fanout.policy)("alert")  # retries after 5 s
    (tower.folder / "notifications" / "blocked").mkdir(
        parents=True
    )  # a folder is no file: it cannot be written
    await tower.profile("home", hook.url, "file:blocked")
    await tower.post(event())
    await hook.got(1)
    async with asyncio.timeout(GUARD):
        while not any(
            one["attempts"] and one["error"] for one in (await tower.show("event-1"))["deliveries"]
        ):
            await asyncio.sleep(0.01)
    await tower.do("alert.ack", event="event-1")
    states = {one["recipient"][:5]: one["state"] for one in (await tower.show("event-1"))["deliveries"]}
    assert states == {"http:": "done", "file:": "cancelled"}
    await tower.until_state("event-1", "done")


async def test_an_acknowledgement_between_claim_and_sending_is_heeded(
    tower: Tower, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery is claimed, and somebody takes care before it goes out."""
    await tower.profile("home", hook.url)
    opened, go_on = asyncio.Event(), asyncio.Event()
    channel = tower.hub.alerts._sender._channel

    async def slow(label: str) -> Any:
        opened.set()
        await go_on.wait()
        return await channel(label)

    monkeypatch.setattr(tower.hub.alerts._sender, "_channel", slow)
    await tower.post(event())
    await opened.wait()
    await tower.do("alert.ack", event="event-1")
    go_on.set()
    shown = await tower.until_state("event-1", "cancelled")
    assert [one["state"] for one in shown["deliveries"]] == ["cancelled"]
    assert hook.requests == []


# ── when it happened ─────────────────────────────────────────────────────────────────────────────


async def test_a_mail_says_when_it_happened_and_when_it_was_received(tower: Tower, box: Mailbox) -> None:
    await tower.profile("home", mail_to(box), zone="Asia/Shanghai")
    three_hours_ago = (time.time_ns() // 1_000_000) - 3 * 3_600_000 - 120_000
    await tower.post(event(timestamp=three_hours_ago), query="?wait=5")
    (mail,) = box.mails
    content = mail.get_payload(decode=True)
    assert isinstance(content, bytes)
    words = content.decode()
    happened = next(line for line in words.splitlines() if line.startswith("Happened: "))
    local = time.strftime("%Y-%m-%d %H:%M", time.gmtime(three_hours_ago / 1000 + 8 * 3600))
    assert happened.startswith(f"Happened: {local}")
    assert happened.endswith("CST (UTC+08:00), 3 h 2 min ago")
    assert any(line.startswith("Received: ") for line in words.splitlines())


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        (
            {"held": 3, "reasons": {"knock": 2, "rattle": 1}, "since": 1_794_786_893_877},
            "3 since 2026-11-16 07:54:53 CST (UTC+08:00): 2 × knock, 1 × rattle",
        ),
        ({"held": 2, "reasons": {}, "since": 0}, "2"),
        ({"held": 2, "reasons": {"a\x1b[2J": 2}, "since": -5}, "2: 2 × a\ufffd[2J"),
        ({"missed": "many"}, "missed many"),
        ("many", "many"),
    ],
)
async def test_a_mail_says_of_a_summary_how_many_were_held_back_and_since_when(
    tower: Tower, box: Mailbox, summary: object, told: str
) -> None:
    await tower.profile("home", mail_to(box), zone="Asia/Shanghai")
    await tower.post(event(summary=summary), query="?wait=5")
    (mail,) = box.mails
    content = mail.get_payload(decode=True)
    assert isinstance(content, bytes)
    assert f"Held back: {told}" in content.decode().splitlines()


async def test_a_webhook_is_told_when_it_happened_and_when_it_was_received(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url)
    await tower.post(event(timestamp=1_794_786_893_877), query="?wait=5")
    body = json.loads(hook.requests[0][1])
    assert body["timestamp"] == body["data"]["happened"] == "2026-11-15T23:54:53.877+00:00"
    assert body["data"]["time"] == 1_794_786_893_877 < body["data"]["received"]


def test_many_alerts_in_one_notice_say_when_each_happened() -> None:
    def load(n: int, at: int) -> BatchItem:
        body = b'{"profile_id":"home","trigger_reason":"fall"}'
        message = Message("gate", f"e{n}", "alert_event", "home", body, at)
        return BatchItem(DeliveryRef(message.key, "alert", "hook", 0), 1, message)

    now = 1_794_786_893 * SECOND
    batch = StartAttempt("hook", (load(1, now - 2 * HOUR), load(2, now)))
    first, second = notification(batch, NotificationContext(now, {}, {}, {"home": "UTC"})).text.splitlines()
    assert first.endswith("2026-11-15 21:54:53 UTC, 2 h ago")
    assert second.endswith("2026-11-15 23:54:53 UTC")


# ── what is critical ─────────────────────────────────────────────────────────────────────────────


async def test_a_silence_covers_what_is_critical_only_if_it_says_so(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    await tower.do("alert.silence", device="AA:*", lasts="60")
    await tower.post(event("event-1"), query="?wait=5")
    assert hook.requests == []
    await tower.post(event("event-2", severity="critical"), query="?wait=5")
    assert hook.events == ["event-2"]
    await tower.do("alert.silence", device="AA:*", lasts="60", critical="yes")
    await tower.post(event("event-3", severity="critical"), query="?wait=5")
    assert hook.events == ["event-2"]


async def test_a_critical_alert_that_could_not_be_told_goes_to_the_default_profile_and_is_recorded(
    tower: Tower, hook: Receiver
) -> None:
    async with Refusing() as refusing:
        await tower.profile("default", hook.url + "/default")
        await tower.profile("home", refusing)
        await tower.post(event("event-1"), query="?wait=5")
        await tower.post(event("event-2", severity="critical"), query="?wait=5")
        await tower.until(lambda: hook.events == ["event-2"])
    assert tower.hub.alerts.state()["critical_untold"] == 1
    refused = await tower.hub.ledger.refusals(10)
    assert [(one.id, one.word) for one in refused] == [("event-2", "untold")]


async def test_a_critical_alert_whose_recipient_answers_with_errors_for_ever_goes_to_the_default_profile_soon(
    tower: Tower, hook: Receiver
) -> None:
    """It is tried for a day, and nobody would hear of it before."""
    async with receiver() as broken:
        broken.words = ["500"] * 100
        await tower.profile("default", hook.url + "/default")
        await tower.profile("home", broken.url, most=0)
        await tower.post(event("event-1"))
        await tower.post(event("event-2", severity="critical"))
        await tower.until(lambda: hook.events == ["event-2"])
        await tower.until(lambda: len(broken.requests) > 20)
        assert hook.events == ["event-2"], "once, and no warning"
        broken.words = []
        await tower.until_state("event-2", "done")
        await tower.until_state("event-1", "done")
    assert tower.hub.alerts.state()["critical_untold"] == 1
    (refused,) = await tower.hub.ledger.refusals(10)
    assert (refused.id, refused.word) == ("event-2", "untold")
    assert "no recipient was reached by 6 attempts" in refused.reason
    assert "500" in refused.reason


async def test_the_default_profile_is_left_alone_while_one_recipient_has_been_reached(
    tower: Tower, hook: Receiver
) -> None:
    async with receiver() as broken, receiver() as works:
        broken.words = ["500"] * 100
        await tower.profile("default", hook.url + "/default")
        await tower.profile("home", broken.url, works.url)
        await tower.post(event("event-1", severity="critical"))
        await tower.until(lambda: len(broken.requests) > 8)
    assert (works.events, hook.events) == (["event-1"], [])


@pytest.mark.parametrize(
    "named", [True, False], ids=["its address refused", "its profile names no recipient"]
)
async def test_a_crash_between_the_end_and_the_fallback_loses_nothing(
    tower: Tower, hook: Receiver, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is committed, and the process is gone before anything follows from it."""
    async with Refusing() as refusing:
        await tower.profile("default", hook.url + "/default")
        await tower.profile("home", *([refusing] if named else []))
        monkeypatch.setattr(tower.hub.alerts, "_spawn", _unless_it_follows(tower.hub.alerts._spawn))
        await tower.post(event(severity="critical"))
        await tower.until_state("event-1", "failed")
        assert hook.requests == []
        await tower.stop()
        await tower.start()
        await hook.got(1)
        await tower.until_state("event-1", "failed")
    assert hook.events == ["event-1"]
    refused = await tower.hub.ledger.refusals(10)
    assert [(one.id, one.word) for one in refused] == [("event-1", "untold")]
    await tower.hub.alerts._unnotified.catch_up()
    assert len(await tower.hub.ledger.refusals(10)) == 1, "once"


async def test_where_the_default_profile_is_told_it_is_not_said_that_none_was(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("default", hook.url)
    await tower.profile("home")
    await tower.post(event(severity="critical"))
    await hook.got(1)
    await tower.until_state("event-1", "failed")
    (refused,) = await tower.hub.ledger.refusals(10)
    said = [refused.reason, (await tower.show("event-1"))["detail"]]
    assert said == ["profile 'home' names no recipient; see 'duly profile set'"] * 2


def _unless_it_follows(spawn: Callable[[Coroutine[Any, Any, None]], None]) -> Any:
    def some(work: Coroutine[Any, Any, None]) -> None:
        if getattr(work, "__qualname__", "") == "UnnotifiedAlerts.notify":
            work.close()
        else:
            spawn(work)

    return some


class Refusing:
    """A webhook that never takes anything."""

    def __init__(self) -> None:
        self._receiver = receiver()

    async def __aenter__(self) -> str:
        it = await self._receiver.__aenter__()
        it.words = ["400"] * 100
        return it.url

    async def __aexit__(self, *_: Any) -> None:
        await self._receiver.__aexit__(None, None, None)


async def test_critical_alerts_of_one_episode_do_not_wait_for_each_other(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url)
    for n in range(3):
        said = await tower.post(event(f"e-{n}", severity="critical", session_id="s"), query="?wait=5")
        assert said[1]["ack"]["state"] == "done"
    assert len(hook.requests) == 3


async def test_every_critical_alert_is_told_at_once_whatever_the_limit(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, most=2)
    await tower.post([event(f"warning-{n}") for n in range(5)])
    await tower.post([event(f"critical-{n}", severity="critical") for n in range(20)])
    await tower.until(lambda: sum(one.startswith("critical") for one in hook.events) == 20)
    types = [json.loads(body)["type"] for _, body in hook.requests]
    assert types == ["alert.event"] * 22, "two warnings, and each critical one alone"


async def test_what_has_become_critical_waits_for_no_limit_any_more(tower: Tower, hook: Receiver) -> None:
    """Also its later steps, which were planned when it was a warning."""
    await tower.profile("home", hook.url, escalate=((2, hook.url + "/boss"),), most=1)
    await tower.post(event("event-1"))
    await tower.post(event("event-2", device_address="CC"))
    await hook.got(1)
    worse = {"type": "alert_update", "seq_id": "u", "data": {"event": "event-2", "severity": "critical"}}
    await tower.post(worse)
    await hook.got(2)
    assert hook.events == ["event-1", "event-2"]
    await hook.got(4)
    told = [json.loads(body)["data"] for _, body in hook.requests[2:]]
    assert {(one["event"], one["escalation"]) for one in told} == {("event-1", 1), ("event-2", 1)}


async def test_an_emergency_is_not_refused_for_a_clock_that_is_years_ahead(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url)
    ahead = (time.time_ns() // 1_000_000) + 400 * 86_400_000
    _, said = await tower.post(event(timestamp=ahead), query="?wait=5")
    assert said["ack"]["state"] == "done"
    assert said["detail"]


# ── counts ───────────────────────────────────────────────────────────────────────────────────────


async def test_dead_letters_are_counted_from_the_start(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, tries=1)
    hook.words = ["500"]
    await tower.post(event("event-1"), query="?wait=5")
    await tower.stop()
    await tower.start()
    judged = {one.metric: one.value for one in judge(await tower.hub.measure())}
    assert judged["duly_dead_letters"] == 1


async def test_the_average_of_retries_is_that_of_deliveries_that_arrived(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, tries=4)
    hook.words = ["500"] * 4
    await tower.post(event("event-1"), query="?wait=5")
    state = tower.hub.alerts.state()
    assert (state["retry_attempts"], state["retry_successes"], state["average_retries"]) == (3, 0, 0.0)
    hook.words = ["500", "500"]
    await tower.post(event("event-2"), query="?wait=5")
    assert tower.hub.alerts.state()["average_retries"] == 2.0


# ── several hubs ─────────────────────────────────────────────────────────────────────────────────


async def test_a_profile_and_a_silence_made_at_one_hub_count_at_another_at_once(
    hubs: list[Tower], hook: Receiver
) -> None:
    await hubs[0].add(Role.SENTINEL, "gate")
    hubs[1].tokens = hubs[0].tokens
    await hubs[1].hub.maintenance.refresh()
    for n in range(20):
        await hubs[0].profile(f"home-{n}", hook.url, most=0)
        _, said = await hubs[1].post(event(f"event-{n}", profile_id=f"home-{n}"), query="?wait=5")
        assert said["ack"]["state"] == "done"
    for n in range(20):
        await hubs[0].do("alert.silence", device=f"lock-{n}", lasts="60")
        await asyncio.sleep(0.02)
        _, said = await hubs[1].post(event(f"quiet-{n}", profile_id="home-0", device_address=f"lock-{n}"))
        assert said["code"] == 0
    for n in range(20):
        assert "silenced" in (await hubs[1].until_state(f"quiet-{n}", "done"))["detail"]
    assert len(hook.events) == 20
