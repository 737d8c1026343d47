"""When events happened, by the tower's clock, whatever the sentinel's clock has shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.monitor.event_times import dated_again
from duly.core.monitor.signals import ClockOffset, DeviceBack, EventData, SentinelPolicy, Severity
from duly.core.steps import MachineEvent, Reachable, ReportOutcome
from duly.core.units import DAY, HOUR, MINUTE, MS, SECOND
from duly.testing import ManualClock
from tests.at_once import at_once
from tests.core.driving import only
from tests.core.monitor.watching import Watch

AT_ONCE = SentinelPolicy(countdown=0)
RIGHT = 1_794_786_893 * SECOND


def data(message: Message) -> Any:
    return json.loads(message.body)


def set_clock(watch: Watch, now: int) -> None:
    """Set the clock as a computer does that has found a time server."""
    by = now - watch.clock.now()
    watch.clock.set(now)
    watch.monitor.shift(by)


def connect(watch: Watch, tower: int) -> None:
    """Connect to a tower whose clock shows this."""
    watch.give(MachineEvent(ClockOffset(tower - watch.clock.now())))
    watch.give(Reachable(""))


def happened(event: Message) -> int:
    """When an event happened, by the tower's clock."""
    told = data(event)
    assert "undated" not in told
    return int(told["timestamp"] + told["offset_ms"]) * MS


@pytest.mark.parametrize("severity", list(Severity))
def test_an_event_of_1970_has_its_right_time_although_the_clock_is_set_before_it_leaves(
    severity: Severity,
) -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(5 * SECOND))
    watch.signal(severity=severity)
    watch.wait(60)
    set_clock(watch, RIGHT)
    watch.wait(60)
    connect(watch, watch.clock.now())
    (event,) = watch.sent()
    assert happened(event) == RIGHT - MINUTE


def test_an_event_has_its_right_time_although_both_clocks_are_set_between_two_connections() -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(5 * SECOND))
    watch.give(MachineEvent(ClockOffset(HOUR)))  # of a tower whose clock is wrong, too
    watch.signal()
    set_clock(watch, RIGHT)
    connect(watch, RIGHT + SECOND)
    (event,) = watch.sent()
    assert happened(event) == RIGHT + SECOND


def test_a_signal_that_was_held_back_in_1970_has_its_right_time() -> None:
    watch = Watch(SentinelPolicy(countdown=0, debounce=0), online=False, clock=ManualClock(5 * SECOND))
    watch.signal("fall")
    watch.call_off()
    watch.wait(10)
    watch.signal("fall")
    watch.wait(10)
    set_clock(watch, RIGHT)
    watch.wait(300)
    connect(watch, watch.clock.now())
    assert [happened(event) for event in watch.sent()] == [RIGHT - 10 * SECOND]


def test_a_device_that_was_back_before_the_clock_was_set_back_is_no_alarm() -> None:
    watch = Watch(clock=ManualClock(RIGHT))
    watch.signal()
    watch.wait(5)
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    set_clock(watch, 5 * SECOND)
    (report,) = only(ReportOutcome, watch.wait(20))
    assert report.state is State.CANCELLED


def test_what_happened_before_the_clock_was_set_can_be_called_off() -> None:
    watch = Watch(AT_ONCE, clock=ManualClock(5 * SECOND))
    ruled = watch.signal()
    watch.take(watch.sent()[0])
    set_clock(watch, RIGHT)
    assert watch.call_off().corrected == (ruled.event,)


def test_what_was_sent_and_not_answered_goes_on_after_the_clock_was_set_and_after_a_restart() -> None:
    watch = Watch(AT_ONCE, clock=ManualClock(5 * SECOND))
    watch.signal()
    set_clock(watch, RIGHT)
    watch.wait(DAY // SECOND)
    assert only(ReportOutcome, watch.effects) == []
    again = watch.restarted()
    assert only(ReportOutcome, again.effects) == []
    assert again.sent() == watch.sent()
    (report,) = only(ReportOutcome, again.wait(7 * DAY // SECOND))
    assert report.state is State.UNKNOWN


@pytest.mark.parametrize("at", [5 * SECOND, RIGHT - 60 * DAY, RIGHT + 2 * DAY], ids=["1970", "old", "ahead"])
def test_an_event_of_an_earlier_run_whose_clock_was_wrong_is_told_as_undated(at: int) -> None:
    watch = Watch(online=False, clock=ManualClock(at))
    ruled = watch.signal()
    watch.wait(20)
    watch.clock.set(RIGHT)
    again = watch.restarted(online=False)
    again.wait(DAY // SECOND)
    assert only(ReportOutcome, again.effects) == []
    connect(again, again.clock.now())
    (event,) = again.sent()
    assert (event.id, data(event)["undated"]) == (ruled.event, True)
    assert data(event)["timestamp"] == at // MS


@pytest.mark.parametrize("wrong", [0, HOUR, -HOUR])
def test_an_event_of_an_earlier_run_is_believed_if_its_time_fits(wrong: int) -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(RIGHT + wrong))
    watch.signal()
    watch.wait(7_200)
    again = watch.restarted(online=False)
    connect(again, again.clock.now() - wrong)
    (event,) = again.sent()
    assert happened(event) == RIGHT


def test_an_event_that_a_clockless_run_has_dated_is_believed_by_the_next() -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(5 * SECOND))
    watch.give(MachineEvent(ClockOffset(RIGHT)))
    watch.signal()
    watch.clock.set(RIGHT + HOUR)
    again = watch.restarted(online=False)
    connect(again, again.clock.now())
    (event,) = again.sent()
    assert happened(event) == RIGHT + 5 * SECOND


def test_an_event_that_is_too_old_by_the_towers_own_clock_expires_after_a_restart() -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(RIGHT))
    watch.give(MachineEvent(ClockOffset(0)))
    watch.signal()
    watch.signal("fall", severity=Severity.CRITICAL)
    watch.clock.advance(8 * DAY // SECOND)
    again = watch.restarted(online=False)
    connect(again, again.clock.now())
    (report,) = only(ReportOutcome, again.effects)
    assert report.state is State.EXPIRED
    assert [data(event)["severity"] for event in again.sent()] == ["critical"]


def test_an_event_goes_on_in_its_own_run_after_a_ledger_that_failed() -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(5 * SECOND))
    watch.signal()
    open_ = at_once(watch.ledger.open_deliveries(watch.monitor.channel))
    watch.monitor.restore(open_, (), {}, watch.clock.now())
    set_clock(watch, RIGHT)
    connect(watch, RIGHT)
    (event,) = watch.sent()
    assert happened(event) == RIGHT


def event_at(timestamp: int, **more: Any) -> EventData:
    return EventData("home", "fall", "band", "night", timestamp, Severity.WARNING, 0, **more)


def test_an_event_of_an_earlier_run_that_says_itself_that_it_is_undated_stays_so() -> None:
    undated = event_at(5, undated=True)
    assert dated_again(undated, 0, RIGHT, DAY) is undated


def test_an_offset_of_an_earlier_run_that_cannot_be_right_makes_an_event_undated() -> None:
    told = dated_again(event_at(RIGHT // MS, offset_ms=DAY // MS), 0, RIGHT, DAY)
    assert told is not None
    assert told.undated, "it would happen tomorrow"
