"""A critical alert with an impossible time is told all the same, and says so; another one is refused."""

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

IMPOSSIBLE: list[dict[str, Any]] = [
    {"timestamp": 0},
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
async def test_a_critical_alert_is_told_with_the_time_of_its_arrival(
    tower: Tower, hook: Receiver, time_: dict[str, Any]
) -> None:
    before = time.time()
    status, answer = await tower.post(event(severity="critical", **time_))
    assert (status, answer["code"]) == (202, 0)
    assert answer["detail"] == (
        "its time is impossible, so it has the time of its arrival; set the clock of the sentinel"
    )
    await hook.got(1)
    told = json.loads(hook.requests[0][1])["data"]
    assert told["undated"] is True
    assert before - 1 <= told["time"] / 1000 <= time.time() + 1
    _, again = await tower.post(event(severity="critical", **time_))
    assert again["code"] == 5, "a repeat is none the less a repeat"
    assert len(hook.requests) == 1
    (listed,) = (await tower.do("alert.list"))["alerts"]
    assert listed["undated"] is True


@pytest.mark.parametrize("id_", ["1000_0", "00000000-03e8-7000-8000-000000000000"])
async def test_the_time_of_the_same_clock_in_its_id_does_not_count_either(
    tower: Tower, hook: Receiver, id_: str
) -> None:
    for code in (0, 5):
        _, answer = await tower.post(event(id_, severity="critical", timestamp=1_000))
        assert answer["code"] == code
    await hook.got(1)


async def test_an_expiry_of_the_same_clock_does_not_count_either(tower: Tower, hook: Receiver) -> None:
    _, answer = await tower.post(event(severity="critical", timestamp=1_000) | {"exp": 61_000})
    assert answer["code"] == 0
    await hook.got(1)


def load(now: int, timestamp: int) -> BatchItem:
    body = b'{"profile_id":"home","trigger_reason":"fall","severity":"critical","timestamp":%d}' % timestamp
    message = Message("gate", f"e{timestamp}", "alert_event", "home", body, time_of_arrival(now))
    return BatchItem(DeliveryRef(message.key, "alert", "hook", 0), 1, message)


@pytest.mark.parametrize(("said", "clock"), [(1_000, "shows the impossible time 1000"), (0, "gives no time")])
def test_people_are_told_that_it_is_not_known_when_it_happened(said: int, clock: str) -> None:
    now = 1_794_786_893 * SECOND
    context = NotificationContext(now, {}, {}, {"home": "UTC"})
    one = notification(StartAttempt("hook", (load(now, said),)), context).text.splitlines()
    assert one[-2:] == [
        "Arrived: 2026-11-15 23:54:53 UTC",
        f"When it happened is not known: its sentinel {clock} (milliseconds since 1970)",
    ]
    many = notification(StartAttempt("hook", (load(now, 1), load(now, 2))), context).text.splitlines()
    assert many[0].endswith(", arrived 2026-11-15 23:54:53 UTC")


@pytest.mark.parametrize("time_", [{"timestamp": 0}, {"timestamp": 86_400_000}])
async def test_one_that_is_not_critical_is_refused_and_says_what_to_do(
    tower: Tower, hook: Receiver, time_: dict[str, Any]
) -> None:
    status, answer = await tower.post(event(severity="warning", **time_))
    assert (status, answer["code"]) == (400, 2)
    assert "set the clock of the sentinel" in answer["detail"]
