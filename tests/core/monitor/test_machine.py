"""What a sentinel makes of signals: suppression, countdowns, the queue, corrections; and all that again after
a restart. Time is the test's own."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind, key_of
from duly.core.monitor.devices import DEVICES
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.machine import event_in
from duly.core.monitor.signals import (
    CancelResult,
    ClockOffset,
    DeviceBack,
    EventChange,
    EventQueued,
    HeartbeatDue,
    NothingToChange,
    SentinelPolicy,
    Severity,
    Signal,
    SignalRuling,
    StopHeartbeat,
)
from duly.core.monitor.suppression import Ruling
from duly.core.steps import (
    Answered,
    Arrived,
    Effect,
    MachineEffect,
    MachineEvent,
    Reachable,
    Reply,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.units import HOUR, MS, SECOND
from duly.errors import Malformed
from duly.testing import ManualClock
from tests.core.driving import only
from tests.core.monitor.watching import Watch

AT_ONCE = SentinelPolicy(countdown=0)


def data(message: Message) -> Any:
    return json.loads(message.body)


def kinds(effects: list[Effect]) -> list[str]:
    return [one.message.kind for one in only(Transmit, effects)]


# ── no second event ────────────────────────────────────────────────────────────────────


def test_a_link_that_goes_on_and_off_starts_one_countdown() -> None:
    watch = Watch()
    first = watch.signal()
    for _ in range(5):
        watch.wait(1)
        watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
        watch.wait(1)
        again = watch.signal()
        assert (again.decision.ruling, again.event) == (Ruling.DEBOUNCED, first.event)
    watch.wait(60)
    assert [message.id for message in watch.sent()] == [first.event]


def test_the_same_device_disconnecting_again_and_again_has_one_event_id() -> None:
    watch = Watch(AT_ONCE)
    first = watch.signal().event
    for _ in range(29):
        watch.wait(1)
        assert watch.signal().decision.ruling is Ruling.DEBOUNCED
    assert [one.id for one in watch.sent()] == [first]


def test_a_countdown_longer_than_the_debounce_is_still_the_only_one() -> None:
    watch = Watch(SentinelPolicy(countdown=120))
    first = watch.signal()
    watch.wait(40)
    assert watch.signal().event == first.event
    watch.wait(100)
    assert len(watch.sent()) == 1


def test_after_a_cancel_a_disconnect_obeys_the_cooldown() -> None:
    watch = Watch()
    first = watch.signal()
    watch.wait(5)
    assert watch.call_off().dropped == (first.event,)
    watch.wait(294)
    assert watch.signal().decision.ruling is Ruling.COOLING
    watch.wait(20)
    assert watch.sent() == []
    watch.wait(1)
    (event,) = watch.sent()
    assert data(event)["cancelled_count"] == 1


def test_a_critical_signal_passes_the_cooldown() -> None:
    watch = Watch()
    watch.signal()
    watch.call_off()
    assert watch.signal("fall", severity=Severity.CRITICAL).decision.passes


def test_another_reason_right_after_is_another_event() -> None:
    watch = Watch(AT_ONCE)
    assert {watch.signal().event, watch.signal("fall").event} == {one.id for one in watch.sent()}


# ── the countdown ────────────────────────────────────────────────────────────────────────────────


def test_an_event_goes_out_when_its_countdown_is_over_and_says_everything() -> None:
    watch = Watch()
    watch.give(MachineEvent(ClockOffset(1_250 * MS)))
    began = watch.clock.now()
    ruled = watch.signal("fall", meta=b'{"rssi":-70}', location=b'{"lat":31.2}')
    assert ruled.due == began + 15 * SECOND
    watch.wait(14.9)
    assert watch.sent() == []
    effects = watch.wait(0.1)
    assert MachineEffect(EventQueued(ruled.event, "band", "fall")) in effects
    (event,) = watch.sent()
    assert (event.kind, event.id) == ("alert_event", ruled.event)
    assert data(event) == {
        "profile_id": "home",
        "trigger_reason": "fall",
        "device_address": "band",
        "session_id": "night",
        "timestamp": began // MS,
        "severity": "warning",
        "cancelled_count": 0,
        "device_meta": {"rssi": -70},
        "location": {"lat": 31.2},
        "offset_ms": 1250,
    }


def test_what_the_tower_has_is_over_and_leaves_nothing_behind() -> None:
    watch = Watch(AT_ONCE)
    watch.signal()
    (event,) = watch.sent()
    assert watch.take(event) == [ReportOutcome(event.key, State.DONE, Answer())]
    assert watch.ledger.disk.messages == {}
    assert len(watch.monitor) == 0


def test_an_event_that_was_called_off_in_time_never_leaves() -> None:
    watch = Watch()
    ruled = watch.signal()
    watch.call_off(event=ruled.event)
    watch.wait(100)
    assert watch.sent() == []
    assert watch.state(key_of(SCOPE, ruled.event)) == "cancelled"


def test_a_device_that_is_back_when_the_countdown_ends_is_no_alarm() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(5)
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    (report,) = only(ReportOutcome, watch.wait(20))
    assert report.state is State.CANCELLED
    assert "was back" in report.answer.reason
    assert watch.sent() == []


def test_a_device_that_came_back_and_went_again_is_an_alarm() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(5)
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    watch.wait(5)
    watch.signal()
    watch.wait(5)
    assert len(watch.sent()) == 1


def test_a_device_that_came_back_too_late_is_an_alarm_also_after_a_restart() -> None:
    watch = Watch(online=False)
    watch.signal()
    watch.wait(20)
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    assert len(watch.restarted().sent()) == 1


def test_a_return_settles_nothing_where_that_is_switched_off() -> None:
    watch = Watch(SentinelPolicy(countdown=15, settle=False))
    watch.signal()
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now() + 1)))
    watch.wait(15)
    assert len(watch.sent()) == 1


def test_a_critical_signal_takes_the_place_of_the_countdown_for_the_same_reason() -> None:
    watch = Watch()
    first = watch.signal("fall")
    watch.wait(5)
    second = watch.signal("fall", severity=Severity.CRITICAL, countdown=0)
    watch.wait(60)
    assert [message.id for message in watch.sent()] == [second.event]
    ended = {event_in(one.key): one.state for one in only(ReportOutcome, watch.effects)}
    assert ended[first.event] is State.SUPERSEDED


def test_two_signals_in_the_same_microsecond_are_two_events_if_one_is_critical() -> None:
    watch = Watch(AT_ONCE)
    watch.signal("fall")
    watch.signal("fall", severity=Severity.CRITICAL)
    assert len({one.id for one in watch.sent()}) == 2


# ── the limit ────────────────────────────────────────────────────────────────────────────────────


def test_of_twelve_in_an_hour_ten_go_out_and_a_summary_tells_of_the_others() -> None:
    watch = Watch(AT_ONCE)
    for _ in range(12):
        watch.signal()
        watch.wait(60)
    assert len(watch.sent()) == 10
    since = watch.clock.now() - 120 * SECOND
    watch.wait(3600)
    *_, summary = watch.sent()
    assert len(watch.sent()) == 11
    assert data(summary)["trigger_reason"] == "summary"
    assert data(summary)["summary"] == {"held": 2, "reasons": {"disconnect": 2}, "since": since // MS}


def test_a_summary_is_told_once_also_over_a_restart() -> None:
    watch = Watch(AT_ONCE)
    for _ in range(11):
        watch.signal()
        watch.wait(60)
    watch = watch.restarted()
    watch.effects.clear()
    watch.wait(3600)
    (summary,) = [one for one in watch.sent() if data(one)["trigger_reason"] == "summary"]
    watch.take(summary)
    watch = watch.restarted()
    watch.wait(7200)
    assert [one for one in watch.sent() if data(one)["trigger_reason"] == "summary"] == []


def test_what_is_critical_passes_the_limit() -> None:
    watch = Watch(AT_ONCE)
    for _ in range(11):
        watch.signal()
        watch.wait(60)
    assert watch.signal("fall", severity=Severity.CRITICAL).decision.passes


# ── offline, restarts ────────────────────────────────────────────────────────────────────────────


def test_offline_events_wait_and_go_out_in_order_when_the_tower_is_back() -> None:
    watch = Watch(AT_ONCE, online=False)
    ids = [watch.signal(device=f"band-{n}").event for n in range(5)]
    watch.wait(3600)
    assert watch.sent() == []
    effects = watch.give(Reachable(""))
    assert [one.message.id for one in only(Transmit, effects)] == ids


def test_what_was_not_answered_before_a_cut_goes_out_again_in_order_with_the_same_ids() -> None:
    watch = Watch(AT_ONCE)
    ids = [watch.signal(device=f"band-{n}").event for n in range(3)]
    watch.give(Unreachable(""))
    ids.append(watch.signal(device="band-3").event)
    effects = watch.give(Reachable(""))
    assert [one.message.id for one in only(Transmit, effects)] == ids


def test_an_event_that_is_not_answered_is_sent_again_ever_more_rarely() -> None:
    watch = Watch(AT_ONCE)
    began = watch.clock.now()
    watch.signal()
    times: list[int] = []
    for _ in range(300):
        times += [(watch.clock.now() - began) // SECOND] * len(only(Transmit, watch.wait(1)))
    assert len(times) == 6  # 5, 10, 20, 40, 80, 160 s after each other, less a little jitter
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps)


def test_after_the_most_tries_it_stops_until_the_tower_is_back() -> None:
    watch = Watch(SentinelPolicy(countdown=0, tries=3))
    watch.signal()
    watch.wait(3600)
    assert len(only(Transmit, watch.effects)) == 3
    assert kinds(watch.give(Reachable(""))) == ["alert_event"]


def test_a_restart_goes_on_with_the_countdown() -> None:
    watch = Watch()
    ruled = watch.signal()
    watch.wait(10)
    watch = watch.restarted()
    assert (
        MachineEffect(SignalRuling(None, "band", "disconnect", ruled.decision, ruled.event, ruled.due))
        in watch.effects
    )
    watch.wait(4)
    assert watch.sent() == []
    watch.wait(1)
    assert [one.id for one in watch.sent()] == [ruled.event]


def test_a_restart_after_the_countdown_sends_it_at_once() -> None:
    watch = Watch()
    ruled = watch.signal()
    watch.clock.advance(3600)
    watch = watch.restarted()
    assert [one.id for one in watch.sent()] == [ruled.event]


def test_a_restart_forgets_no_debounce_no_cooldown_and_no_count() -> None:
    watch = Watch(AT_ONCE)
    watch.signal()
    watch = watch.restarted()
    watch.wait(1)
    assert watch.signal().decision.ruling is Ruling.DEBOUNCED
    watch.call_off()
    watch = watch.restarted()
    watch.wait(60)
    assert watch.signal().decision.ruling is Ruling.COOLING
    watch.wait(300)
    watch.signal()
    assert data(watch.sent()[-1])["cancelled_count"] == 1


def test_what_was_sent_and_not_answered_before_a_restart_is_sent_again_with_the_same_id() -> None:
    watch = Watch(AT_ONCE)
    ruled = watch.signal()
    watch = watch.restarted()
    assert {one.id for one in watch.sent()} == {ruled.event}


def test_a_signal_that_is_handled_again_after_a_ledger_that_failed_is_the_same_event() -> None:
    """The commit had gone through without saying so."""
    watch = Watch(SentinelPolicy(countdown=15, debounce=0))
    signal = MachineEvent(Signal("band", "disconnect", watch.clock.now()))
    watch.give(signal)
    watch = watch.restarted()
    (again,) = [one.what for one in watch.give(signal) if isinstance(one, MachineEffect)]
    assert isinstance(again, SignalRuling)
    assert again.decision.passes
    watch.wait(60)
    assert [one.id for one in watch.sent()] == [again.event]


def test_what_could_not_be_handed_over_for_a_week_expires() -> None:
    watch = Watch(AT_ONCE, online=False)
    ruled = watch.signal()
    (report,) = only(ReportOutcome, watch.wait(7 * 86_400))
    assert report.state is State.EXPIRED
    assert watch.state(key_of(SCOPE, ruled.event)) == "expired"


# ── later ────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancel_after_it_was_sent_is_a_correction_that_follows_its_event() -> None:
    watch = Watch(AT_ONCE)
    ruled = watch.signal()
    assert watch.call_off().corrected == (ruled.event,)
    (event,) = watch.sent()  # the correction waits until the tower has the event
    (correction,) = only(Transmit, watch.take(event))
    assert correction.message.kind == "alert_cancel"
    assert data(correction.message) == {"event": ruled.event, "cancelled_at": watch.clock.now() // MS}
    assert watch.call_off() == CancelResult("band")  # once


def test_a_correction_survives_a_restart_and_still_follows_its_event() -> None:
    watch = Watch(AT_ONCE)
    watch.signal()
    watch.call_off()
    watch = watch.restarted()
    (event,) = watch.sent()
    assert kinds(watch.take(event)) == ["alert_cancel"]


def test_offline_a_cancel_takes_the_event_back_without_a_trace() -> None:
    watch = Watch(AT_ONCE, online=False)
    ruled = watch.signal()
    watch.wait(600)
    assert watch.call_off().dropped == (ruled.event,)
    assert only(Transmit, watch.give(Reachable(""))) == []


@pytest.mark.parametrize("hours", [-30, -2, 2, 30])
@pytest.mark.parametrize("restart", [False, True])
def test_an_event_that_was_not_sent_can_be_cancelled_however_old_it_is(hours: int, restart: bool) -> None:
    watch = Watch(AT_ONCE, online=False)
    ruled = watch.signal()
    watch.clock.set(watch.clock.now() + hours * HOUR)
    watch = watch.restarted(online=False) if restart else watch
    assert watch.call_off().dropped == (ruled.event,)
    assert only(Transmit, watch.give(Reachable(""))) == []


def test_a_newer_location_goes_out_with_an_event_that_has_not_left() -> None:
    watch = Watch()
    ruled = watch.signal(location=b'{"lat":1}', meta=b'{"rssi":-50}')
    watch.give(
        MachineEvent(EventChange(ruled.event, watch.clock.now(), Severity.CRITICAL, location=b'{"lat":2}'))
    )
    watch = watch.restarted()
    watch.wait(15)
    (event,) = watch.sent()
    assert (data(event)["location"], data(event)["severity"]) == ({"lat": 2}, "critical")
    assert data(event)["device_meta"] == {"rssi": -50}


def test_a_newer_location_follows_an_event_that_has_left() -> None:
    watch = Watch(AT_ONCE)
    ruled = watch.signal()
    watch.give(MachineEvent(EventChange(ruled.event, watch.clock.now(), location=b'{"lat":2}')))
    (event,) = watch.sent()
    (update,) = only(Transmit, watch.take(event))
    assert update.message.kind == "alert_update"
    assert data(update.message) == {"event": ruled.event, "location": {"lat": 2}}


def test_the_ids_of_corrections_go_on_after_a_restart() -> None:
    watch = Watch(AT_ONCE)
    ids = []
    for n in range(3):
        watch.signal(device=f"band-{n}")
        watch.take(watch.sent()[-1])
        watch.call_off(f"band-{n}")
        ids.append(watch.sent()[-1].id)
        watch = watch.restarted()
    assert [id_.split("_")[1] for id_ in ids] == ["0", "1", "2"]


def test_a_refusal_for_good_is_told_and_kept() -> None:
    watch = Watch(AT_ONCE)
    ruled = watch.signal()
    (event,) = watch.sent()
    refused = Answer(2, b"", "malformed")
    assert watch.give(Answered(event.key, State.FAILED, refused)) == [
        ReportOutcome(event.key, State.FAILED, refused)
    ]
    assert watch.state(key_of(SCOPE, ruled.event)) == "failed"


def test_what_waits_for_an_event_that_the_tower_refuses_for_good_never_goes_out() -> None:
    watch = Watch(AT_ONCE)
    ruled = watch.signal()
    watch.give(MachineEvent(EventChange(ruled.event, watch.clock.now(), location=b"1")))
    watch.give(MachineEvent(EventChange(ruled.event, watch.clock.now(), location=b"2")))
    watch.call_off()
    (event,) = watch.sent()
    effects = watch.give(Answered(event.key, State.FAILED, Answer(2, b"", "malformed")))
    assert only(Transmit, effects) == []
    assert [one.state for one in only(ReportOutcome, effects)] == [State.FAILED, *[State.CANCELLED] * 3]
    assert len(watch.monitor) == 0
    assert watch.call_off() == CancelResult("band")


def test_an_update_does_not_cost_an_event_its_place_in_the_queue() -> None:
    watch = Watch(AT_ONCE, online=False)
    ids = [watch.signal(device=f"band-{n}").event for n in range(3)]
    watch.give(MachineEvent(EventChange(ids[0], watch.clock.now(), location=b"1")))
    effects = watch.give(Reachable(""))
    assert [one.message.id for one in only(Transmit, effects)] == ids


def test_an_event_can_be_called_off_for_a_day_and_a_device_for_an_hour() -> None:
    watch = Watch(AT_ONCE)
    ruled = watch.signal()
    watch.take(watch.sent()[0])
    watch.wait(2 * 3600)
    assert watch.call_off() == CancelResult("band")
    assert watch.call_off(event=ruled.event).corrected == (ruled.event,)


def test_an_update_of_an_event_that_was_called_off_is_told_to_be_in_vain() -> None:
    watch = Watch()
    ruled = watch.signal()
    watch.call_off()
    assert watch.give(MachineEvent(EventChange(ruled.event, watch.clock.now(), location=b"1"))) == [
        MachineEffect(NothingToChange(ruled.event))
    ]


def test_what_was_not_stored_when_the_ledger_failed_is_not_said_to_be_with_the_tower() -> None:
    watch = Watch()
    watch.monitor.handle(
        MachineEvent(Signal("band", "fall", watch.clock.now())), watch.clock.now()
    )  # and not committed
    assert only(ReportOutcome, watch.monitor.restore((), (), {}, watch.clock.now())) == []


# ── clocks, memory ───────────────────────────────────────────────────────────────────────────────


def test_events_from_before_the_clock_was_measured_learn_the_offset_before_they_leave() -> None:
    watch = Watch(AT_ONCE, online=False, clock=ManualClock(5 * SECOND))
    watch.signal()
    watch.give(MachineEvent(ClockOffset(1_700_000_000 * SECOND)))
    watch.give(Reachable(""))
    (event,) = watch.sent()
    assert data(event)["offset_ms"] == 1_700_000_000_000


def test_a_clock_that_is_set_moves_no_countdown() -> None:
    watch = Watch()
    watch.give(MachineEvent(ClockOffset(0)))
    watch.signal()
    watch.clock.advance(5)
    watch.clock.advance(3600)
    watch.monitor.shift(HOUR)
    watch.wait(9)
    assert watch.sent() == []
    watch.wait(1)
    assert len(watch.sent()) == 1
    assert watch.monitor.messages.offset == -HOUR


def test_devices_that_are_seen_once_are_forgotten() -> None:
    watch = Watch(AT_ONCE)
    for n in range(3_000):
        watch.signal(device=f"stranger-{n}")
        watch.take(watch.sent()[-1])
        watch.effects.clear()
        watch.wait(600)
    assert len(watch.ledger.disk.buckets[DEVICES]) < 400
    assert len(watch.monitor._devices) < 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"debounce": -1}, {"cooldown": float("nan")}, {"countdown": 1e12}, {"per_hour": 0}, {"tries": -1},
        {"heartbeat": 0.5},
        {"retry_first": 0}, {"retry_first": 10, "retry_most": 5}, {"countdown": 60, "keep": 60},
    ],
    ids=str,
)  # fmt: skip
def test_a_policy_that_makes_no_sense_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        SentinelPolicy(**wrong)


def test_the_policy_is_a_plain_table() -> None:
    assert msgspec.convert({"countdown": 5, "per_hour": 3}, SentinelPolicy).countdown == 5


# ── heartbeats, and what else the engine asks of it ──────────────────────────────────────────────


def beats(effects: list[Effect]) -> int:
    return sum(isinstance(e, MachineEffect) and isinstance(e.what, HeartbeatDue) for e in effects)


def test_a_promised_heartbeat_is_due_again_and_again_while_the_tower_can_be_reached() -> None:
    watch = Watch(SentinelPolicy(countdown=0, heartbeat=60))
    assert beats(watch.wait(150)) == 3, "at once, and every minute"
    watch.give(Unreachable(""))
    assert beats(watch.wait(600)) == 0
    watch.give(Reachable(""))
    assert beats(watch.wait(1)) == 1


def test_a_heartbeat_is_not_delayed_by_a_clock_that_was_set_back() -> None:
    watch = Watch(SentinelPolicy(countdown=0, heartbeat=60))
    watch.wait(1)
    watch.clock.advance(-3_600)
    watch.monitor.shift(-HOUR)
    assert beats(watch.wait(60)) == 1


def test_a_sentinel_that_stands_down_sends_no_more_heartbeats() -> None:
    watch = Watch(SentinelPolicy(countdown=0, heartbeat=60))
    watch.give(MachineEvent(StopHeartbeat()))
    assert beats(watch.wait(600) + watch.give(Reachable("")) + watch.wait(600)) == 0


def test_repeats_are_answered_from_memory_and_what_cannot_be_stored_is_refused() -> None:
    watch = Watch(AT_ONCE)
    watch.signal()
    (event,) = watch.sent()
    verdict = Verdict(VerdictKind.DUPLICATE, State.DONE, Answer())
    assert watch.monitor.repeated(event, verdict, "c1", 0) == [Reply("c1", event, verdict)]
    (reply,) = watch.monitor.unable(Arrived(event, "c1"))
    assert isinstance(reply, Reply)
    assert reply.verdict.retry


def test_an_offset_that_is_measured_again_does_not_change_what_carries_one() -> None:
    watch = Watch(online=False)
    watch.give(MachineEvent(ClockOffset(5 * SECOND)))
    watch.signal()
    watch.give(MachineEvent(ClockOffset(7 * SECOND)))
    watch.wait(20)
    watch.give(Reachable(""))
    (event,) = watch.sent()
    assert json.loads(event.body)["offset_ms"] == 5_000


def test_a_held_disconnect_is_dropped_if_another_event_reports_it_by_then() -> None:
    watch = Watch(SentinelPolicy(countdown=0, debounce=30, cooldown=300))
    watch.take(watch.sent()[0]) if watch.signal().decision.passes else None
    watch.call_off()
    watch.wait(1)
    assert watch.signal().decision.ruling is Ruling.COOLING
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    before = len(watch.sent())
    watch.wait(600)
    assert len(watch.sent()) == before, "it is back"


def test_an_update_that_waits_has_no_time_to_be_measured() -> None:
    watch = Watch(AT_ONCE)
    event = watch.signal().event
    (sent,) = watch.sent()
    watch.give(MachineEvent(EventChange(event, watch.clock.now(), location=b'{"lat":1}')))
    watch.give(MachineEvent(ClockOffset(5 * SECOND)))
    watch.take(sent)
    assert [one.kind for one in watch.sent()] == ["alert_event", "alert_update"]


def test_what_follows_an_event_that_the_tower_took_waits_for_the_connection() -> None:
    watch = Watch(AT_ONCE)
    event = watch.signal().event
    (sent,) = watch.sent()
    watch.give(MachineEvent(EventChange(event, watch.clock.now(), location=b'{"lat":1}')))
    watch.give(Unreachable(""))
    watch.take(sent)
    assert len(watch.sent()) == 1
    watch.give(Reachable(""))
    assert [one.kind for one in watch.sent()] == ["alert_event", "alert_update"]


def test_a_held_disconnect_is_dropped_when_a_critical_one_has_reported_the_same() -> None:
    watch = Watch(SentinelPolicy(countdown=0, debounce=30, cooldown=300))
    watch.signal()
    watch.call_off()
    watch.wait(40)
    assert watch.signal().decision.ruling is Ruling.COOLING
    critical = watch.signal(severity=Severity.CRITICAL)
    assert critical.decision.passes
    before = len(watch.sent())
    watch.wait(600)
    events = [one for one in watch.sent()[before:] if one.kind == "alert_event"]
    assert events == [], "the critical event says that the device is gone"


def test_a_held_disconnect_is_dropped_when_the_event_in_its_countdown_reports_it_again() -> None:
    watch = Watch(SentinelPolicy(countdown=60, debounce=30))
    watch.signal(severity=Severity.CRITICAL)
    watch.wait(1)
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    watch.wait(1)
    assert watch.signal().decision.ruling is Ruling.DEBOUNCED
    watch.wait(1)
    watch.signal(severity=Severity.CRITICAL)
    watch.wait(100)
    assert [one.kind for one in watch.sent()] == ["alert_event"], "the critical event says it, once"
