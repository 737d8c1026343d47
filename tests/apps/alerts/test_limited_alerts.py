"""What a sentinel may report is limited, and no rate refuses a critical alert before a person is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import HOUR
from duly.identity.accounts import Role
from tests.apps.alerts.conftest import Tower, event
from tests.receivers import Receiver


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[Tower]:
    """A tower that takes two alerts a minute of each sentinel, and two critical ones besides."""
    it = Tower(tmp_path / "hub", allow_private_webhooks=True, alerts_per_minute=2)
    await it.start()
    it.hub.alerts._limited._reserve = RateLimits(Rate(2, HOUR))
    await it.add(Role.SENTINEL, "gate", "barn")
    yield it
    await it.stop()


async def test_an_alert_beyond_the_rate_is_refused_and_recorded(narrow: Tower, hook: Receiver) -> None:
    await narrow.profile("home", hook.url)
    answers = [await narrow.post(event(f"event-{n}")) for n in range(3)]
    assert [status for status, _ in answers] == [202, 202, 429]
    assert answers[2][1]["error"] == "rate_limited"
    assert answers[2][1]["retry_after"] > 0
    assert (await narrow.post(event("event-0"), who="barn"))[0] == 202, "another sentinel has its own limit"
    await narrow.hub.activity.settle()
    assert [(r.scope, r.id) for r in await narrow.hub.ledger.refusals(10)] == [("gate", "event-2")]


async def test_a_repeat_is_answered_whatever_the_rate(narrow: Tower, hook: Receiver) -> None:
    await narrow.profile("home", hook.url)
    first = event("event-0")
    for frame in (first, event("event-1")):
        await narrow.post(frame)
    await narrow.until_state("event-0", "done")
    status, answer = await narrow.post(first, query="?wait=5")
    assert (status, answer["code"]) == (200, 5), answer


async def test_a_critical_alert_uses_the_reserve_that_others_cannot(narrow: Tower, hook: Receiver) -> None:
    await narrow.profile("home", hook.url)
    for n in range(5):
        await narrow.post(event(f"event-{n}"))
    assert (await narrow.post(event("fall-0", severity="critical")))[0] == 202
    await narrow.until_state("fall-0", "done")


async def test_people_are_told_once_before_a_critical_alert_is_refused(narrow: Tower, hook: Receiver) -> None:
    await narrow.profile("home", hook.url)
    answers = [await narrow.post(event(f"fall-{n}", severity="critical")) for n in range(7)]
    assert [status for status, _ in answers] == [202] * 4 + [429] * 3
    told = [one for one in (await narrow.do("alert.list"))["alerts"] if one["reason"] == "alerts_refused"]
    assert len(told) == 1, "stored before the first refusal was answered, and only once"
    assert told[0]["severity"] == "critical"
    await narrow.until_state(told[0]["event"], "done")
    assert any(b"alerts_refused" in body for _, body in hook.requests)


async def test_a_change_that_makes_an_alert_critical_is_not_refused_silently(
    narrow: Tower, hook: Receiver
) -> None:
    await narrow.profile("home", hook.url)
    await narrow.post(event("event-0"))
    change = {"event": "event-0", "severity": "critical"}
    frames = [{"type": "alert_update", "seq_id": f"change-{n}", "data": change} for n in range(5)]
    statuses = [(await narrow.post(frame))[0] for frame in frames]
    assert statuses[3:] == [429, 429]
    reasons = [one["reason"] for one in (await narrow.do("alert.list"))["alerts"]]
    assert reasons.count("alerts_refused") == 1
