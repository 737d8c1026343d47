"""An alert whose time cannot be right is told all the same, with the time of its arrival, and says so."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from duly.apps.alerts.model import time_of_arrival
from duly.apps.alerts.notifications import NotificationContext, notification
from duly.core.fanout.plan import BatchItem, StartAttempt
from duly.core.messages import Message
from duly.core.operations import DeliveryRef
from duly.core.units import SECOND
from tests.apps.alerts.conftest import Tower, event
from tests.receivers import Receiver

NOW = time.time_ns() // 1_000_000

IMPOSSIBLE: list[dict[str, Any]] = [
    {"timestamp": 0},
    {"timestamp": 12, "severity": "warning"},
    {"timestamp": 86_400_000, "severity": "info"},
    {"ahead": 600_000, "severity": "warning"},
    {"timestamp": NOW + 4_000 * 86_400_000, "severity": "warning"},
    {"timestamp": NOW - 40 * 86_400_000, "severity": "warning", "undated": True},
    {"timestamp": -5},
    {"timestamp": 86_400_000},
    {"timestamp": 1_262_304_000_000},
    {"timestamp": 1_794_786_893_877_000_000},
    {"timestamp": 1_794_786_893_877, "offset_ms": -1_794_786_893_877},
]


@pytest.fixture
async def tower(tower: Tower, hook: Receiver) -> Tower:
    await tower.profile("home", hook.url)
    return tower


@pytest.mark.parametrize("time_", IMPOSSIBLE)
async def test_an_alert_is_told_with_the_time_of_its_arrival(
    tower: Tower, hook: Receiver, time_: dict[str, Any]
) -> None:
    before = time.time()
    if "ahead" in time_:  # of now: the run may have begun an hour ago
        time_ = {"timestamp": round(before * 1000) + time_["ahead"], "severity": time_["severity"]}
    status, answer = await tower.post(event(**{"severity": "critical"} | time_))
    assert (status, answer["code"]) == (202, 0)
    assert answer["detail"] == (
        "its time cannot be right, so it has the time of its arrival; a timestamp is in milliseconds since "
        "1970: set the clock of the sentinel"
    )
    assert before - 1 <= answer["time"] / 1000 <= time.time() + 1, "by which it can measure its own clock"
    await hook.got(1)
    told = json.loads(hook.requests[0][1])["data"]
    assert told["undated"] is True
    assert before - 1 <= told["time"] / 1000 <= time.time() + 1
    assert told["said_time"] == (time_["timestamp"] + time_.get("offset_ms", 0) or None)
    assert "happened" not in told
    _, again = await tower.post(event(**{"severity": "critical"} | time_))
    assert again["code"] == 5, "a repeat is none the less a repeat"
    assert len(hook.requests) == 1
    (listed,) = (await tower.do("alert.list"))["alerts"]
    assert listed["undated"] is True


@pytest.mark.parametrize("timestamp", [None, "today", True, [], {"ms": 1}])
async def test_a_time_that_is_no_number_is_no_reason_to_refuse_an_alert(
    tower: Tower, hook: Receiver, timestamp: object
) -> None:
    status, answer = await tower.post(event(timestamp=timestamp, offset_ms="none"))
    assert (status, answer["code"]) == (202, 0)
    await hook.got(1)
    told = json.loads(hook.requests[0][1])["data"]
    assert (told["undated"], told["said_time"]) == (True, None)


async def test_a_time_with_a_fraction_of_a_millisecond_is_rounded(tower: Tower, hook: Receiver) -> None:
    _, answer = await tower.post(event(timestamp=NOW + 0.6, offset_ms=-1.2))
    assert (answer["code"], answer.get("detail")) == (0, None)
    await hook.got(1)
    told = json.loads(hook.requests[0][1])["data"]
    assert (told["time"], "undated" in told) == (NOW, False)


@pytest.mark.parametrize("id_", ["1000_0", "00000000-03e8-7000-8000-000000000000"])
@pytest.mark.parametrize("offset", [None, NOW - 1_000], ids=["unmeasured", "measured"])
async def test_the_time_of_the_same_clock_in_its_id_does_not_count_either(
    tower: Tower, hook: Receiver, id_: str, offset: int | None
) -> None:
    for code in (0, 5):
        _, answer = await tower.post(event(id_, timestamp=1_000, offset_ms=offset))
        assert answer["code"] == code
    await hook.got(1)


@pytest.mark.parametrize("offset", [None, NOW - 1_000], ids=["unmeasured", "measured"])
async def test_an_expiry_of_the_same_clock_is_put_right_or_does_not_count(
    tower: Tower, hook: Receiver, offset: int | None
) -> None:
    _, answer = await tower.post(event(timestamp=1_000, offset_ms=offset) | {"exp": 601_000})
    assert answer["code"] == 0
    await hook.got(1)


@pytest.mark.parametrize(
    "id_",
    ["1000_1", f"{NOW + 400 * 86_400_000}_1", f"{NOW - 60 * 86_400_000}_1"],
    ids=["1970", "ahead", "behind"],
)
async def test_an_update_and_a_cancellation_of_a_wrong_clock_count(
    tower: Tower, hook: Receiver, id_: str
) -> None:
    """They have no measured offset, and the time in their ids is that of the sentinel's clock."""
    await tower.post(event("fall-1"), query="?wait=5")
    cancel = {"type": "alert_cancel", "seq_id": id_, "time": 1_000, "data": {"event": "fall-1"}}
    for code in (0, 5):
        _, answer = await tower.post(cancel)
        assert answer["code"] == code, answer
    (listed,) = (await tower.do("alert.list"))["alerts"]
    assert listed["status"] == "cancelled"
    await hook.got(2)


async def test_a_repeat_of_one_that_was_told_long_ago_stays_stale(tower: Tower) -> None:
    """Its time can be believed, and its id may have been forgotten: it might be told twice."""
    _, answer = await tower.post(event(timestamp=NOW - 40 * 86_400_000, severity="critical"))
    assert answer["error"] == "stale"


def load(now: int, timestamp: int) -> BatchItem:
    body = b'{"profile_id":"home","trigger_reason":"fall","severity":"critical","timestamp":%d}' % timestamp
    message = Message("gate", f"e{timestamp}", "alert_event", "home", body, time_of_arrival(now))
    return BatchItem(DeliveryRef(message.key, "alert", "hook", 0), 1, message)


@pytest.mark.parametrize(
    ("said", "clock"),
    [
        (1_000, "says 1970-01-01 00:00:01 UTC, which cannot be right"),
        (10**18, "says 1000000000000000000, which is not a time in milliseconds"),
        (0, "gives no time"),
    ],
)
def test_people_are_told_that_it_is_not_known_when_it_happened(said: int, clock: str) -> None:
    now = 1_794_786_893 * SECOND
    context = NotificationContext(now, {}, {}, {"home": "UTC"})
    one = notification(StartAttempt("hook", (load(now, said),)), context).text.splitlines()
    assert one[-2:] == [
        "Arrived: 2026-11-15 23:54:53 UTC",
        f"When it happened is not known: its sentinel {clock}",
    ]
    many = notification(StartAttempt("hook", (load(now, 1), load(now, 2))), context).text.splitlines()
    assert many[0].endswith(", arrived 2026-11-15 23:54:53 UTC")
