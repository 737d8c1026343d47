"""The tower, end to end, over real HTTP: what it takes in, and what people do with it."""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.apps.alerts.channels import label_of
from duly.core.fanout.plan import FanoutPolicy
from duly.core.units import SECOND
from duly.errors import Malformed
from duly.identity.accounts import Role
from tests.apps.alerts.conftest import Tower, event, quiet_now
from tests.receivers import Receiver

# ── admission ────────────────────────────────────────────────────────────────────────────────────


async def test_an_event_is_stored_acknowledged_and_told_once(tower: Tower, hook: Receiver) -> None:
    (secret,) = (await tower.profile("home", hook.url)).values()
    sent = event(location={"lat": 52.5}, cancelled_count=2)
    status, said = await tower.post(sent)
    assert (status, said) == (202, {"type": "server_ack", "seq_id": "event-1", "code": 0})
    shown = await tower.until_state("event-1", "done")
    ((headers, body),) = hook.requests
    told = json.loads(body)
    assert told["type"] == "alert.event"
    assert told["data"]["event"] == "event-1"
    assert told["data"]["sentinel"] == "gate"
    assert told["data"]["location"] == {"lat": 52.5}
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    assert headers["webhook-signature"] == "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()
    assert [(one["state"], one["attempts"]) for one in shown["deliveries"]] == [("done", 1)]


async def test_the_same_event_again_gets_its_state_and_no_recipient_is_told_again(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url)
    sent = event()
    await tower.post(sent)
    await tower.until_state("event-1", "done")
    for _ in range(5):
        status, said = await tower.post(sent)
        assert (status, said["code"], said["state"], said["ack"]["state"]) == (200, 5, "done", "done")
    assert len(hook.requests) == 1
    assert (await tower.do("alert.list"))["alerts"][0]["event"] == "event-1"
    assert len((await tower.do("alert.list"))["alerts"]) == 1


async def test_a_hundred_uploads_of_one_event_at_once_are_one_event(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    sent = event()
    answers = await asyncio.gather(*(tower.post(sent) for _ in range(100)))
    assert sorted(said["code"] for _, said in answers) == [0] + [5] * 99
    await tower.until_state("event-1", "done")
    assert len(hook.requests) == 1


async def test_the_same_id_from_another_sentinel_is_another_event(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    assert (await tower.post(event(), "gate"))[1]["code"] == 0
    assert (await tower.post(event(), "barn"))[1]["code"] == 0
    await hook.got(2)
    assert len({headers["webhook-id"] for headers, _ in hook.requests}) == 2


async def test_other_content_under_the_same_id_is_a_loud_conflict(tower: Tower) -> None:
    await tower.profile("home")
    sent = event()
    await tower.post(sent)
    sent["data"]["trigger_reason"] = "smoke"
    status, said = await tower.post(sent)
    assert (status, said["error"]) == (422, "id_conflict")


NOW = time.time_ns() // 1_000_000


@pytest.mark.parametrize(
    ("frame", "who", "status", "word"),
    [
        (event(), "", 401, "not_authenticated"),
        (event(), "phone", 403, "not_allowed"),
        (event(sentinel_id="barn"), "gate", 403, "not_allowed"),
        (event(timestamp=NOW - 40 * 86_400_000), "gate", 400, "stale"),
        (event(cancelled_count="many", timestamp="today"), "gate", 400, "malformed"),
        (event(profile_id=""), "gate", 400, "malformed"),
        (event(severity="loud"), "gate", 400, "malformed"),
        (event(location="x" * 100_000), "gate", 413, "too_large"),
        (event(location="x" * 300_000), "gate", 413, "too_large"),
        ({"type": "alert_event", "data": {}}, "gate", 400, "malformed"),
        (b'{"type":"alert_event","seq_id":"e","data":{', "gate", 400, "malformed"),
        (b"\xff\xfe\x00", "gate", 400, "malformed"),
    ],
)
async def test_bad_uploads_are_refused_clearly_and_change_nothing(
    tower: Tower, frame: Any, who: str, status: int, word: str
) -> None:
    await tower.profile("home")
    got, said = await tower.post(frame, who)
    assert (got, said.get("error")) == (status, word), said
    assert said["detail"]
    assert (await tower.do("alert.list"))["alerts"] == []
    if who:
        assert [refusal.word for refusal in await tower.hub.ledger.refusals()] == [word]


async def test_ten_megabytes_are_refused_before_they_are_read(tower: Tower) -> None:
    status, said = await _big(tower)
    assert (status, json.loads(said)["error"]) == (413, "too_large")
    assert (await tower.post(event()))[1]["code"] == 0


async def _big(tower: Tower) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {tower.tokens['gate']}"}
    frame = io.BytesIO(json.dumps(event(location="x" * 10_000_000)).encode())
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{tower.url}/v1/messages", data=frame, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def test_a_measured_offset_corrects_a_wrong_clock_and_both_are_kept(tower: Tower) -> None:
    await tower.profile("home")
    now = time.time_ns() // 1_000_000
    sent = event(timestamp=now - 365 * 86_400_000, offset_ms=365 * 86_400_000)
    assert (await tower.post(sent))[1]["code"] == 0
    shown = await tower.show("event-1")
    assert abs(shown["time"] - now) < 60_000
    assert shown["offset_ms"] == 365 * 86_400_000
    assert abs(shown["accepted_at"] - now) < 120_000


async def test_an_alert_for_a_profile_that_is_not_there_is_refused_and_its_id_stays_free(
    tower: Tower, hook: Receiver
) -> None:
    status, said = await tower.post(event(profile_id="barn"))
    assert (status, said["code"], said["error"]) == (400, 2, "no_profile")
    assert "no profile 'barn'" in said["detail"]
    assert [one.word for one in await tower.hub.ledger.refusals(10)] == ["no_profile"]
    await tower.profile("default", hook.url)
    status, said = await tower.post(event(profile_id="barn"), query="?wait=5")
    assert (status, said["ack"]["state"]) == (200, "done"), "the profile named default takes it"


async def test_a_repeat_is_answered_although_its_profile_is_gone(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    frame = event()
    assert (await tower.post(frame, query="?wait=5"))[1]["ack"]["state"] == "done"
    await tower.do("profile.remove", name="home")
    assert (await tower.post(frame))[1]["code"] == 5
    await tower.stop()
    await tower.start()
    assert (await tower.post(frame))[1]["code"] == 5


async def test_a_batch_is_answered_in_its_order_and_stored_together(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, most=0)
    batch = [event(f"event-{n}") for n in range(50)] + [event("event-7"), {"type": "alert_event"}]
    status, said = await tower.post(batch)
    assert status == 200
    assert [one["code"] for one in said[:50]] == [0] * 50
    assert said[51]["code"] == 2
    await tower.until(lambda: len(hook.events) == 50)
    assert len(hook.requests) == 50


async def test_over_a_websocket_a_sentinel_is_welcomed_with_the_towers_time(tower: Tower) -> None:
    await tower.profile("home")
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(
            f"{tower.url}/v1/ws", headers={"Authorization": f"Bearer {tower.tokens['gate']}"}
        ) as ws,
    ):
        welcome = await ws.receive_json()
        assert (welcome["type"], welcome["you"]) == ("welcome", "gate")
        assert abs(welcome["time"] - time.time() * 1000) < 5_000
        await ws.send_json(event())
        assert await ws.receive_json() == {"type": "server_ack", "seq_id": "event-1", "code": 0}


# ── looking, over HTTP ───────────────────────────────────────────────────────────────────────────


async def look(tower: Tower, path: str, who: str = "gate") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {tower.tokens.get(who, tower.hub._token)}"}
    async with aiohttp.ClientSession() as http, http.get(f"{tower.url}{path}", headers=headers) as answer:
        return answer.status, await answer.json()


async def test_alerts_are_listed_by_page_newest_first(tower: Tower) -> None:
    await tower.profile("home")
    for n in range(5):
        await tower.post(event(f"event-{n}"))
    found: list[str] = []
    begins = ""
    while True:
        status, page = await look(tower, f"/v1/alerts?limit=2{begins}")
        assert (status, len(page["alerts"]) <= 2) == (200, True)
        found += [one["event"] for one in page["alerts"]]
        if page["next"] is None:
            break
        begins = f"&before={page['next']}"
    assert found == ["event-4", "event-3", "event-2", "event-1", "event-0"]
    await tower.do("alert.resolve", event="event-3", by="ann")
    _, page = await look(tower, "/v1/alerts?status=resolved")
    assert [one["event"] for one in page["alerts"]] == ["event-3"]
    assert (await look(tower, "/v1/alerts/gate/event-3"))[1]["by"] == "ann"


async def test_a_sentinel_sees_its_own_alerts_an_admin_all_and_others_none(tower: Tower) -> None:
    await tower.profile("home")
    await tower.post(event("mine"), "gate")
    await tower.post(event("theirs"), "barn")
    _, page = await look(tower, "/v1/alerts?sentinel=barn", "gate")
    assert [one["event"] for one in page["alerts"]] == ["mine"]
    assert (await look(tower, "/v1/alerts/barn/theirs", "gate"))[0] == 404
    assert (await look(tower, "/v1/alerts", "phone"))[0] == 403
    _, page = await look(tower, "/v1/alerts?sentinel=barn", "the command line")
    assert [one["event"] for one in page["alerts"]] == ["theirs"]
    _, page = await look(tower, "/v1/alerts", "the command line")
    assert len(page["alerts"]) == 2


@pytest.mark.parametrize("query", ["status=happy", "limit=0", "limit=x", "before=nonsense", "before=1-zz"])
async def test_a_list_that_cannot_be_had_says_why(tower: Tower, query: str) -> None:
    status, said = await look(tower, f"/v1/alerts?{query}")
    assert (status, said["error"]) == (400, "malformed")


# ── people ───────────────────────────────────────────────────────────────────────────────────────


async def test_no_further_recipient_is_woken_after_an_acknowledgement(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, escalate=((0.2, hook.url + "/boss"), (60, hook.url + "/ceo")))
    await tower.post(event())
    await hook.got(2)
    told = await tower.do("alert.ack", event="event-1", by="ann", note="on my way")
    assert (told["status"], told["by"], told["note"]) == ("acknowledged", "ann", "on my way")
    shown = await tower.until_state("event-1", "done")
    states = {one["round"]: one["state"] for one in shown["deliveries"]}
    assert states == {0: "done", 1: "done", 2: "cancelled"}
    assert len(hook.requests) == 2


async def test_resolved_means_that_what_has_not_gone_out_does_not(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    hook.words = ["429 60"]
    await tower.post(event())
    await hook.got(1)
    assert (await tower.do("alert.resolve", event="event-1", by="ann"))["status"] == "resolved"
    shown = await tower.until_state("event-1", "cancelled")
    assert [one["state"] for one in shown["deliveries"]] == ["cancelled"]


async def test_who_was_first_to_take_care_stays_and_what_is_over_stays_over(tower: Tower) -> None:
    await tower.profile("home")
    await tower.post(event())
    await tower.do("alert.ack", event="event-1", by="ann")
    assert (await tower.do("alert.ack", event="event-1", by="bob"))["by"] == "ann"
    await tower.do("alert.resolve", event="event-1", by="bob")
    with pytest.raises(Malformed, match="resolved by bob"):
        await tower.do("alert.ack", event="event-1", by="ann")
    assert (await tower.show("event-1"))["status"] == "resolved"


async def test_a_sentinel_cannot_take_back_what_a_person_has_resolved(tower: Tower, hook: Receiver) -> None:
    """The person who resolved it stays named, and no correction goes out."""
    await tower.profile("home", hook.url)
    await tower.post(event())
    await tower.until_state("event-1", "done")
    await tower.do("alert.resolve", event="event-1", by="ann", note="it was the cat")
    now = time.time_ns() // 1_000_000
    cancel = {"type": "alert_cancel", "seq_id": "c1", "data": {"event": "event-1", "cancelled_at": now}}
    assert (await tower.post(cancel))[1]["code"] == 0
    shown = await tower.show("event-1")
    assert (shown["status"], shown["by"], shown["note"]) == ("resolved", "ann", "it was the cat")
    assert len(shown["deliveries"]) == len(hook.requests) == 1


async def test_who_falls_back_is_known_before_its_people_are_told(tower: Tower, hook: Receiver) -> None:
    """An alert that has ended, and whose people are about to be replaced, is not one that nobody hears of."""
    await tower.profile("default", hook.url)
    await tower.profile("home")
    hook.words = ["hang"]
    await tower.post(event(severity="critical"))
    _, shown = await look(tower, "/v1/alerts/gate/event-1")
    told = [one["state"] for one in shown["deliveries"]]
    assert shown["state"] == "failed"
    assert shown.get("falls_back") or told in (["accepted"], ["sent"])
    hook.released.set()


async def test_an_update_is_seen_by_recipients_that_are_told_later(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", escalate=((0.2, hook.url),))
    await tower.post(event(location={"lat": 1}))
    update = {"type": "alert_update", "seq_id": "u1", "data": {"event": "event-1", "location": {"lat": 2}}}
    assert (await tower.post(update))[1]["code"] == 0
    assert (await tower.post(update))[1]["code"] == 5
    await hook.got(1)
    assert json.loads(hook.requests[0][1])["data"]["location"] == {"lat": 2}
    assert (await tower.show("event-1"))["location"] == {"lat": 2}


def worse(id_: str = "u1", severity: str = "critical") -> dict[str, Any]:
    return {"type": "alert_update", "seq_id": id_, "data": {"event": "event-1", "severity": severity}}


async def test_who_was_told_is_told_once_more_when_it_becomes_critical(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, escalate=((600, hook.url + "/boss"),))
    await tower.post(event())
    await tower.until(lambda: hook.events == ["event-1"])
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    for n, severity in enumerate(["critical", "warning", "critical"]):
        assert (await tower.post(worse(f"u{n}", severity)))[1]["code"] == 0
    await hook.got(2)
    told = json.loads(hook.requests[1][1])
    assert (told["type"], told["data"]["severity"]) == ("alert.raised", "critical")
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await tower.do("alert.resolve", event="event-1", by="ann")
    shown = await tower.until_state("event-1", "done")
    assert {(one["round"], one["state"]) for one in shown["deliveries"]} == {
        (0, "done"), (1, "cancelled"), (50, "done"),
    }  # fmt: skip
    assert len(hook.requests) == 2, "each recipient hears it once"


async def test_what_waits_for_the_end_of_quiet_hours_goes_out_when_it_becomes_critical(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, quiet=quiet_now(), escalate=((0.2, hook.url + "/boss"),))
    await tower.post(event())
    assert {one["state"] for one in (await tower.show("event-1"))["deliveries"]} == {"accepted"}
    await tower.post(worse())
    shown = await tower.until_state("event-1", "done")
    assert {(one["round"], one["state"]) for one in shown["deliveries"]} == {
        (0, "superseded"), (50, "done"), (1, "done"),
    }  # fmt: skip
    assert [json.loads(body)["data"]["severity"] for _, body in hook.requests] == ["critical", "critical"]


async def test_who_acknowledged_hears_that_it_becomes_critical_and_of_a_resolved_one_no_recipient_does(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url)
    await tower.post(event())
    await tower.until_state("event-1", "done")
    await tower.do("alert.ack", event="event-1", by="ann")
    await tower.post(worse())
    await hook.got(2)
    await tower.post(event("event-2"))
    await tower.until_state("event-2", "done")
    await tower.do("alert.resolve", event="event-2", by="ann")
    over = worse("u2")
    over["data"]["event"] = "event-2"
    await tower.post(over)
    assert {one["round"] for one in (await tower.show("event-2"))["deliveries"]} == {0}


async def test_a_late_cancel_brings_one_correction_to_those_who_were_told(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, escalate=((600, hook.url + "/boss"),))
    await tower.post(event())
    await tower.until(lambda: hook.events == ["event-1"])
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    cancel = {
        "type": "alert_cancel",
        "seq_id": "c1",
        "data": {"event": "event-1", "cancelled_at": time.time_ns() // 1_000_000},
    }
    assert (await tower.post(cancel))[1]["code"] == 0
    await hook.got(2)
    for _ in range(3):
        assert (await tower.post(cancel))[1]["code"] == 5
    assert json.loads(hook.requests[1][1])["type"] == "alert.cancelled"
    shown = await tower.until_state("event-1", "done")
    assert {(one["round"], one["state"]) for one in shown["deliveries"]} >= {(0, "done"), (1, "cancelled")}
    assert shown["status"] == "cancelled"
    assert len(hook.requests) == 2


async def test_a_cancel_while_it_is_on_its_way_is_followed_by_a_correction(
    tower: Tower, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.apps.alerts.channels.webhook.SECONDS", 0.3)
    await tower.profile("home", hook.url)
    hook.words = ["hang"]
    await tower.post(event())
    await hook.got(1)
    await tower.post({"type": "alert_cancel", "seq_id": "c1", "data": {"event": "event-1"}})
    await hook.got(2)
    assert [json.loads(body)["type"] for _, body in hook.requests] == ["alert.event", "alert.cancelled"]


async def test_no_sentinel_cancels_anothers_alert(tower: Tower) -> None:
    await tower.profile("home")
    await tower.post(event())
    cancel = {"type": "alert_cancel", "seq_id": "c1", "data": {"event": "event-1"}}
    status, said = await tower.post(cancel, "barn")
    assert (status, said["code"]) == (503, 4)
    assert (await tower.show("event-1"))["status"] == "open"


async def test_a_silenced_alert_is_listed_and_no_recipient_is_told(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    made = await tower.do("alert.silence", device="AA:*", lasts="60", by="ann")
    _, said = await tower.post(event("event-1"), query="?wait=2")
    assert said["ack"]["detail"] == "silenced by ann; no recipient was told"
    await tower.post(event("event-2", device_address="CC"))
    await hook.got(1)
    await tower.do("alert.unsilence", silence=made["silence"])
    await tower.post(event("event-3"))
    await hook.got(2)
    assert hook.events == ["event-2", "event-3"]
    assert len((await tower.do("alert.list"))["alerts"]) == 3


async def test_a_storm_is_a_few_messages_and_nothing_is_missing_in_them(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, most=5)
    batches = [[event(f"event-{i}-{n}") for n in range(500)] for i in range(4)]
    for batch in batches:
        assert {one["code"] for one in (await tower.post(batch))[1]} == {0}
    await hook.got(5)
    tower.hub.alerts._fanout.shift(-60 * SECOND)
    tower.hub.alerts.engine._news.set()
    await tower.until(lambda: len(hook.events) == 2_000)
    assert len(hook.requests) <= 10
    assert len((await tower.do("alert.list", limit="5000"))["alerts"]) == 2_000


async def test_later_events_of_one_episode_come_together(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url, together=0.5)
    await asyncio.gather(*(tower.post(event(f"event-{n}", session_id="walk")) for n in range(5)))
    await tower.until(lambda: len(hook.events) == 5)
    assert len(hook.requests) == 2
    assert json.loads(hook.requests[1][1])["data"]["count"] == 4


async def test_a_critical_one_does_not_wait_for_its_episode_or_the_quiet_hours(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, quiet=quiet_now())
    await tower.post(event("event-1", session_id="walk"))
    await tower.post(event("event-2", session_id="walk", severity="critical"))
    await tower.until_state("event-2", "done")
    assert hook.events == ["event-2"]
    (waiting,) = (await tower.do("deliveries.list", state="open"))["deliveries"]
    assert waiting["event"] == "event-1"


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────


async def test_what_waits_goes_out_after_a_restart_and_what_is_done_does_not(
    tower: Tower, hook: Receiver
) -> None:
    await tower.profile("home", hook.url, most=0)
    await tower.post(event("event-1"))
    await tower.until_state("event-1", "done")
    hook.words = ["500"]
    tower.hub.alerts._fanout.policy = FanoutPolicy("alert")
    await tower.post(event("event-2"))
    await hook.got(2)
    await tower.until(lambda: not tower.hub.alerts.tasks.busy)
    await tower.stop()
    await tower.start()
    assert (await tower.show("event-2"))["state"] == "sent"
    await tower.do("deliveries.retry", event="event-2")
    await hook.got(3)
    await tower.until_state("event-2", "done")
    assert hook.events == ["event-1", "event-2"]
    assert (await tower.post(event("event-1")))[1]["error"] == "id_conflict", "it is remembered"


async def test_counts_are_kept(tower: Tower, hook: Receiver) -> None:
    await tower.profile("home", hook.url)
    hook.words = ["500"]
    sent = event()
    await tower.post(sent)
    await tower.until_state("event-1", "done")
    await tower.post(sent)
    counts: Any = tower.hub.health.state()["alerts"]
    assert counts["total_events"] == 1
    assert counts["duplicate_events"] == 1
    assert counts["retry_attempts"] == counts["retry_successes"] == 1
    assert counts["average_retries"] == 1


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


async def test_addresses_are_never_shown(tower: Tower, hook: Receiver) -> None:
    url = hook.url.replace("http://", "http://user:hunter2@") + "/t0ken?key=s3cret"
    await tower.profile("home", url)
    await tower.post(event())
    await hook.got(1)
    everything = [
        await tower.do("profile.show", name="home"),
        await tower.do("profile.list"),
        await tower.do("deliveries.list"),
        await tower.show("event-1"),
        tower.hub.health.state(),
        label_of(url),
    ]
    text = json.dumps(everything)
    for secret in ("hunter2", "t0ken", "s3cret", "whsec"):
        assert secret not in text


async def test_a_private_address_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    tower = Tower(tmp_path / "hub")
    await tower.start()
    try:
        for url in ("http://127.0.0.1/x", "http://localhost/x", "http://[::1]/x", "http://10.1.2.3/x"):
            with pytest.raises(Malformed, match="private network"):
                await tower.profile("home", url)
    finally:
        await tower.stop()


async def test_profiles_can_be_written_into_the_settings(tmp_path: Path, hook: Receiver) -> None:
    written = {"home": {"send": [hook.url], "escalate": [[600, "console:"]], "quiet": "", "most": 0}}
    tower = Tower(tmp_path / "hub", allow_private_webhooks=True, profiles=written)
    await tower.start()
    await tower.add(Role.SENTINEL, "gate")
    try:
        await tower.post(event())
        await hook.got(1)
        assert len((await tower.do("profile.show", name="home"))["steps"]) == 2
    finally:
        await tower.stop()
    tower = Tower(tmp_path / "hub", profiles={"home": {"sent": []}})
    with pytest.raises(Malformed, match="not a profile"):
        await tower.start()
