"""No emergency is swallowed: what is held back is judged again when its window ends, what is critical is not
held back, and no clock and no restart makes an alarm wait longer. Time is the test's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.signals import DeviceBack, EventQueued, SentinelPolicy, Severity, SignalRuling
from duly.core.monitor.suppression import Ruling
from duly.core.steps import Answered, Effect, MachineEffect, MachineEvent, Reachable, Transmit
from duly.core.units import DAY, SECOND
from tests.core.monitor.watching import Watch

AT_ONCE = SentinelPolicy(countdown=0)
SMALL = SentinelPolicy(countdown=4, debounce=3, per_hour=2, cooldown=20, summary=10)
LONGEST = 3 + 20 + 10 + 4


def data(message: Message) -> Any:
    return json.loads(message.body)


def back(watch: Watch, device: str = "band") -> None:
    watch.give(MachineEvent(DeviceBack(device, watch.clock.now())))


def reasons(watch: Watch) -> list[str]:
    return [data(one)["trigger_reason"] for one in watch.sent()]


# ── the debounce ─────────────────────────────────────────────────────────────────────────────────


def test_a_device_that_came_back_and_went_for_good_within_the_debounce_is_an_alarm() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(10)
    back(watch)
    watch.wait(10)  # the first countdown has ended: the device was back
    gone = watch.clock.now()
    assert watch.signal().decision.ruling is Ruling.DEBOUNCED
    watch.wait(10)
    assert watch.sent() == []  # judged again, and counting down
    watch.wait(15)
    (event,) = watch.sent()
    assert data(event)["timestamp"] == gone // 1000, "it says when the device went, not when it was judged"


def test_one_that_is_back_when_the_debounce_ends_is_none() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(10)
    back(watch)
    watch.wait(10)
    watch.signal()
    watch.wait(5)
    back(watch)
    watch.wait(3600)
    assert watch.sent() == []


def test_a_repeat_that_the_first_event_tells_of_is_not_told_again() -> None:
    watch = Watch(AT_ONCE)
    watch.signal()
    for _ in range(5):
        watch.wait(1)
        watch.signal()
        watch.signal("fall")
    watch.wait(3600)
    assert reasons(watch) == ["disconnect", "fall"]


def test_what_is_held_back_survives_a_restart() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(10)
    back(watch)
    watch.wait(10)
    watch.signal()
    watch = watch.restarted()
    watch.wait(25)
    assert reasons(watch) == ["disconnect"]


# ── the cooldown ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reason", ["disconnect", "fall"])
@pytest.mark.parametrize("after", [1, 100, 299])
def test_a_signal_after_a_cancel_is_told_when_the_cooldown_ends(reason: str, after: float) -> None:
    watch = Watch()
    watch.signal(reason)
    watch.wait(5)
    watch.call_off()
    watch.wait(after)
    assert watch.signal(reason).decision.ruling is Ruling.COOLING
    watch.wait(300 - after)
    assert watch.sent() == []
    watch.wait(15)
    assert reasons(watch) == [reason]


def test_a_second_cancel_calls_off_what_was_held_back() -> None:
    watch = Watch()
    watch.signal()
    watch.call_off()
    watch.wait(10)
    watch.signal("fall")
    assert watch.call_off().held == ("fall",)
    watch.wait(3600)
    assert watch.sent() == []


def test_a_cause_that_a_person_called_off_is_not_brought_up_again_without_a_new_signal() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(5)
    watch.call_off()
    watch.wait(3600)
    assert watch.sent() == []


# ── the limit ────────────────────────────────────────────────────────────────────────────────────


def test_the_limit_holds_a_device_that_stays_away_back_for_five_minutes_not_for_an_hour() -> None:
    watch = Watch(AT_ONCE)
    for _ in range(10):
        watch.signal()
        watch.wait(31)
        back(watch)
        watch.wait(1)
    assert watch.signal().decision.ruling is Ruling.LIMITED
    assert len(watch.sent()) == 10
    watch.wait(300)
    assert reasons(watch) == ["disconnect"] * 11, "it stands: an event of its own, and no summary besides"
    watch.wait(7200)
    assert len(watch.sent()) == 11


def test_what_the_limit_held_back_and_is_over_is_in_the_summary() -> None:
    watch = Watch(AT_ONCE)
    for _ in range(10):
        watch.signal()
        watch.wait(31)
        back(watch)
        watch.wait(1)
    watch.signal()
    watch.wait(5)
    back(watch)
    watch.signal("fall")
    watch.wait(300)
    *_, summary = watch.sent()
    assert data(summary)["summary"]["reasons"] == {"disconnect": 1, "fall": 1}


# ── what is critical ─────────────────────────────────────────────────────────────────────────────


def critical(watch: Watch, reason: str = "fall", **more: Any) -> SignalRuling:
    return watch.signal(reason, severity=Severity.CRITICAL, **more)


@pytest.mark.parametrize("reason", ["disconnect", "fall"])
def test_a_critical_signal_right_after_a_cancel_passes(reason: str) -> None:
    watch = Watch()
    critical(watch, reason)
    watch.wait(5)
    watch.call_off()
    watch.wait(1)
    assert critical(watch, reason).decision.passes
    watch.wait(15)
    assert reasons(watch) == [reason]


def test_a_critical_absence_after_one_that_settled_does_not_wait() -> None:
    watch = Watch()
    critical(watch, "disconnect")
    watch.wait(10)
    back(watch)
    watch.wait(6)
    assert critical(watch, "disconnect").decision.passes


def test_a_critical_signal_after_one_that_the_tower_refused_passes() -> None:
    watch = Watch(AT_ONCE)
    first = critical(watch)
    watch.give(Answered(key_of(SCOPE, first.event), State.FAILED, Answer(2, b"", "malformed")))
    watch.wait(1)
    assert critical(watch).decision.passes


def test_what_is_critical_does_not_expire() -> None:
    watch = Watch(AT_ONCE, online=False)
    watch.signal("tilt")
    critical(watch)
    watch.wait(30 * 86_400)
    watch.give(Reachable(""))
    assert reasons(watch) == ["fall"]


# ── clocks and restarts ──────────────────────────────────────────────────────────────────────────


def test_a_clock_that_was_set_back_over_a_restart_makes_no_countdown_longer() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(5)
    watch.clock.set(watch.clock.now() - 400 * DAY)
    watch = watch.restarted()
    watch.wait(15)
    assert reasons(watch) == ["disconnect"]


def test_a_clock_that_was_set_back_over_a_restart_makes_no_window_longer() -> None:
    watch = Watch()
    watch.signal()
    watch.call_off()
    watch.wait(5)
    watch.signal()
    watch.clock.set(watch.clock.now() - 400 * DAY)
    watch = watch.restarted()
    watch.wait(315)
    assert reasons(watch) == ["disconnect"]


def test_a_clock_that_was_set_back_over_a_restart_makes_a_debounce_no_longer() -> None:
    watch = Watch()
    watch.signal()
    watch.wait(10)
    back(watch)
    watch.wait(10)
    watch.signal()
    watch.clock.set(watch.clock.now() - DAY)
    watch = watch.restarted()
    watch.wait(30 + 15)
    assert reasons(watch) == ["disconnect"]


def test_what_is_critical_in_the_very_moment_of_a_cancel_is_an_event_of_its_own() -> None:
    watch = Watch()
    events = set()
    for _ in range(3):
        events.add(critical(watch).event)
        watch.call_off()
    events.add(critical(watch).event)
    assert len(events) == 4
    watch.wait(15)
    assert reasons(watch) == ["fall"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_is_set_back_does_not_make_a_summary_wait(restart: bool) -> None:
    watch = Watch(AT_ONCE)
    for number in range(11):
        watch.signal(f"reason {number}")
    for message in watch.sent():
        watch.take(message)
    watch.clock.set(watch.clock.now() - DAY)
    if restart:
        watch = watch.restarted()
    else:
        watch.monitor.shift(-DAY)
    watch.wait(301)
    assert reasons(watch)[-1] == "summary"


def test_a_clock_that_jumps_years_ahead_expires_nothing_critical() -> None:
    watch = Watch(AT_ONCE, online=False)
    critical(watch)
    watch.clock.set(watch.clock.now() + 4000 * DAY)
    watch.monitor.shift(4000 * DAY)
    watch.wait(1)
    watch = watch.restarted()
    assert reasons(watch) == ["fall"]


def test_an_event_of_a_signal_that_was_held_back_does_not_wait_for_a_clock_that_was_wrong() -> None:
    """The clock is a day ahead when the signal is judged again, and right after the next restart."""
    watch = Watch(SMALL)
    watch.signal("disconnect")
    watch.wait(1)
    watch.give(MachineEvent(DeviceBack("band", watch.clock.now())))
    watch.wait(1)
    watch.signal("disconnect")
    for by in (DAY, -DAY):
        watch.clock.set(watch.clock.now() + by)
        watch.monitor.shift(by)
        watch = watch.restarted()
        watch.wait(0.5)
    watch.wait(LONGEST)
    assert "disconnect" in reasons(watch)


# ── at random ────────────────────────────────────────────────────────────────────────────────────


class _Timed(Watch):
    """Notes when everything happened, by a clock that nobody sets."""

    def carry_out(self, todo: Any) -> None:
        before = len(self.effects)
        super().carry_out(todo)
        self.told.extend((self.clock.now() / SECOND - self.ahead, effect) for effect in self.effects[before:])

    told: list[tuple[float, Effect]]
    ahead: float


class SwallowedMachine(RuleBasedStateMachine):
    """Absences, falls, cancels, restarts and clocks that are set, in any order. The model: of every absence
    that outlasts all windows, and that no person called off meanwhile, an event goes out before they can have
    ended; of every critical fall, before its countdown can have."""

    def __init__(self) -> None:
        super().__init__()
        _Timed.told, _Timed.ahead = [], 0.0
        self.watch: Watch = _Timed(SMALL)
        self.away: dict[str, float] = {}
        self.absences: list[tuple[str, float, float]] = []
        self.falls: list[tuple[str, float]] = []
        self.cancels: list[tuple[str, float]] = []
        self.slack = 1
        """how often a window may begin anew: once for every restart under a clock that was set back"""
        self.set_back = False

    @property
    def now(self) -> float:
        return self.watch.clock.now() / SECOND - _Timed.ahead

    devices = st.sampled_from(["a", "b"])

    @rule(device=devices)
    def goes(self, device: str) -> None:
        self.away.setdefault(device, self.now)
        self.watch.signal("disconnect", device)

    @rule(device=devices)
    def comes_back(self, device: str) -> None:
        self.watch.give(MachineEvent(DeviceBack(device, self.watch.clock.now())))
        if device in self.away:
            self.absences.append((device, self.away.pop(device), self.now))

    @rule(device=devices, there=st.sampled_from([0.5, 1, 2, 5]), away=st.sampled_from([0.5, 1, 3]))
    def flaps(self, device: str, away: float, there: float) -> None:
        """Goes, comes back, and goes again, perhaps for good."""
        self.goes(device)
        self.watch.wait(away)
        self.comes_back(device)
        self.watch.wait(there)
        self.goes(device)

    @rule(device=devices)
    def falls_badly(self, device: str) -> None:
        self.falls.append((device, self.now))
        critical(self.watch, "fall", device=device)

    @rule(device=devices, reason=st.sampled_from(["tilt", "noise"]))
    def something(self, device: str, reason: str) -> None:
        self.watch.signal(reason, device)

    @rule(device=devices)
    def cancel(self, device: str) -> None:
        self.cancels.append((device, self.now))
        self.watch.call_off(device)

    @rule(seconds=st.sampled_from([0.5, 1, 2, 3, 5, 10, 25, 60]))
    def time_passes(self, seconds: float) -> None:
        self.watch.wait(seconds)

    @rule(by=st.sampled_from([-100_000, -10, 10, 100_000]))
    def the_clock_is_set(self, by: int) -> None:
        _Timed.ahead += by
        self.set_back |= by < 0
        self.watch.clock.set(self.watch.clock.now() + by * SECOND)
        self.watch.monitor.shift(by * SECOND)

    @rule()
    def restart(self) -> None:
        number = str(int(self.watch.monitor._outbox.worker) + 1)
        self.slack += self.set_back
        self.watch = _Timed(SMALL, disk=self.watch.ledger.disk, clock=self.watch.clock, worker=number)

    def teardown(self) -> None:
        longest, countdown = LONGEST * self.slack, SMALL.countdown * self.slack
        self.watch.wait(longest + 1)
        for device, since in self.away.items():
            self.absences.append((device, since, self.now))
        left = self._left()
        for device, since, until in self.absences:
            if until - since <= longest or self._called_off(device, since, until):
                continue
            assert any(
                cause == (device, "disconnect") and since <= at <= since + longest for at, cause in left
            ), f"{device} went at {since}, stayed away until {until}, and nobody was told: {left}"
        for device, at in self.falls:
            if self._called_off(device, at, at + countdown):
                continue
            assert any(
                cause == (device, "fall") and at - SMALL.debounce <= when <= at + countdown
                for when, cause in left
            ), f"{device} fell at {at}, and nobody was told: {left}"

    def _left(self) -> list[tuple[float, tuple[str, str]]]:
        """What left for the tower, and when."""
        found = []
        for at, effect in _Timed.told:
            match effect:
                case MachineEffect(what=EventQueued(device=device, reason=reason)):
                    found.append((at, (device, reason)))
                case Transmit(message=message) if message.kind == "alert_event":
                    found.append((at, (data(message)["device_address"], data(message)["trigger_reason"])))
        return found

    def _called_off(self, device: str, since: float, until: float) -> bool:
        return any(name == device and since <= at <= until for name, at in self.cancels)


TestSwallowedMachine = SwallowedMachine.TestCase
TestSwallowedMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_late_refusal_of_what_was_called_off_does_not_make_a_repeat_of_a_later_event_pass() -> None:
    watch = Watch(SentinelPolicy(countdown=0, cooldown=0))
    first = watch.signal("fall")
    watch.wait(1)
    watch.call_off()
    watch.wait(1)
    assert watch.signal("fall").decision.passes
    watch.give(Answered(key_of(SCOPE, first.event), State.FAILED, Answer(2)))
    watch.wait(1)
    for one in (watch, watch.restarted()):
        assert one.signal("fall").decision.ruling is Ruling.DEBOUNCED
