"""Which signals become events: held back for a reason, for a bounded time, and told afterwards."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duly.core.monitor.suppression import Ruling, Summary, SuppressionDecision, Suppressor, SuppressPolicy
from duly.core.units import HOUR, MINUTE, SECOND
from duly.errors import Malformed

PASS, DEBOUNCED, LIMITED, COOLING = Ruling.PASS, Ruling.DEBOUNCED, Ruling.LIMITED, Ruling.COOLING

POLICY = SuppressPolicy()
T = 1_700_000_000 * SECOND


def rulings(suppressor: Suppressor, *times: int, critical: bool = False) -> list[Ruling]:
    return [suppressor.signal("door", T + time * SECOND, critical).ruling for time in times]


def exhausted() -> Suppressor:
    """Ten signals have passed, a minute apart: the limit is free again an hour after the first."""
    suppressor = Suppressor(POLICY)
    assert rulings(suppressor, *range(0, 600, 60)) == [PASS] * 10
    return suppressor


def reloaded(suppressor: Suppressor, policy: SuppressPolicy) -> Suppressor:
    fresh = Suppressor(policy)
    fresh.restore(json.loads(json.dumps(suppressor.snapshot())))
    return fresh


# -- debounce ------------------------------------------------------------------------------------------


def test_repeats_within_30_seconds_are_one_event() -> None:
    assert rulings(Suppressor(POLICY), 0, 1, 29, 30) == [PASS, DEBOUNCED, DEBOUNCED, PASS]


def test_debounce_counts_from_what_passed_so_a_link_that_flaps_for_ever_still_rings() -> None:
    assert rulings(Suppressor(POLICY), 0, 20, 40, 60, 80) == [PASS, DEBOUNCED, PASS, DEBOUNCED, PASS]


def test_a_flapping_link_is_one_event_even_if_critical() -> None:
    suppressor = Suppressor(POLICY)
    assert rulings(suppressor, 0, 5, 30, critical=True) == [PASS, DEBOUNCED, PASS]
    assert rulings(suppressor, 35) == [DEBOUNCED]


def test_a_harmless_flutter_does_not_swallow_the_critical_signal_after_it() -> None:
    suppressor = Suppressor(POLICY)
    assert rulings(suppressor, 0) == [PASS]
    assert rulings(suppressor, 5, 6, critical=True) == [PASS, DEBOUNCED]


def test_another_reason_is_another_event_however_soon_it_comes() -> None:
    suppressor = Suppressor(POLICY)
    assert suppressor.signal("door", T, reason="disconnect").passes
    assert suppressor.signal("door", T + SECOND, reason="fall").passes
    assert suppressor.signal("door", T + 2 * SECOND, reason="fall").ruling is DEBOUNCED


def test_what_is_held_back_is_told_when_the_reason_ends() -> None:
    suppressor = Suppressor(POLICY)
    assert suppressor.signal("door", T) == SuppressionDecision(PASS, None)
    assert suppressor.signal("door", T).passes is False
    assert suppressor.signal("door", T + 7) == SuppressionDecision(DEBOUNCED, T + 30 * SECOND)


def test_devices_do_not_mute_each_other() -> None:
    suppressor = exhausted()
    suppressor.cancelled("door", T + 600 * SECOND)
    assert suppressor.signal("window", T + 600 * SECOND).passes


# -- limit and summary ---------------------------------------------------------------------------------


def test_the_eleventh_in_an_hour_is_held_back_until_the_first_is_an_hour_old() -> None:
    suppressor = exhausted()
    assert suppressor.signal("door", T + 700 * SECOND) == SuppressionDecision(LIMITED, T + HOUR)
    assert rulings(suppressor, 3599, 3600, 3630) == [LIMITED, PASS, LIMITED]


def test_what_the_limit_held_back_is_summed_up_once_when_it_is_free_again() -> None:
    suppressor = exhausted()
    assert suppressor.next_wake() is None
    rulings(suppressor, 700, 800, 900)
    assert suppressor.next_wake() == T + HOUR
    assert suppressor.wake(T + HOUR - 1) == []
    assert suppressor.wake(T + HOUR) == [Summary("door", {"": 3}, T + 700 * SECOND, T + 900 * SECOND)]
    assert suppressor.wake(T + HOUR) == []
    assert suppressor.next_wake() is None


def test_a_summary_says_what_was_held_back_for_which_reason() -> None:
    suppressor = exhausted()
    for reason, at in (("fall", 700), ("fall", 800), ("low battery", 801)):
        suppressor.signal("door", T + at * SECOND, reason=reason)
    (summary,) = reloaded(suppressor, POLICY).wake(T + HOUR)
    assert (summary.held, summary.reasons) == (3, {"fall": 2, "low battery": 1})


def test_a_late_wake_still_tells_everything() -> None:
    suppressor = exhausted()
    rulings(suppressor, 700)
    assert rulings(suppressor, 3600, 3630) == [PASS, LIMITED]
    assert suppressor.next_wake() == T + HOUR
    assert suppressor.wake(T + 2 * HOUR) == [Summary("door", {"": 2}, T + 700 * SECOND, T + 3630 * SECOND)]


def test_without_anything_held_back_there_is_no_summary() -> None:
    suppressor = exhausted()
    assert suppressor.wake(T + HOUR) == []


def test_debounced_and_cooling_signals_are_not_summed_up() -> None:
    suppressor = exhausted()
    assert rulings(suppressor, 545) == [DEBOUNCED]
    suppressor.cancelled("door", T + 546 * SECOND)
    assert rulings(suppressor, 550, 600) == [COOLING, COOLING]
    assert suppressor.next_wake() is None


def test_a_critical_signal_passes_the_limit_and_uses_none_of_it() -> None:
    suppressor = exhausted()
    assert rulings(suppressor, *range(600, 3600, 300), critical=True) == [PASS] * 10
    assert rulings(suppressor, 3600) == [PASS]


# -- cooldown ------------------------------------------------------------------------------------------


def test_after_a_cancel_nothing_rings_for_five_minutes() -> None:
    suppressor = Suppressor(POLICY)
    suppressor.cancelled("door", T)
    assert suppressor.signal("door", T + MINUTE) == SuppressionDecision(COOLING, T + 5 * MINUTE)
    assert rulings(suppressor, 299, 300) == [COOLING, PASS]


def test_a_second_cancel_starts_the_cooldown_again() -> None:
    suppressor = Suppressor(POLICY)
    suppressor.cancelled("door", T)
    suppressor.cancelled("door", T + 200 * SECOND)
    assert rulings(suppressor, 499, 500) == [COOLING, PASS]


def test_a_critical_signal_passes_the_cooldown() -> None:
    suppressor = Suppressor(POLICY)
    suppressor.cancelled("door", T)
    assert rulings(suppressor, 1, critical=True) == [PASS]


# -- the clock, restarts, memory -----------------------------------------------------------------------


def test_a_clock_set_back_makes_the_marks_in_its_future_void() -> None:
    suppressor = exhausted()
    rulings(suppressor, 700)
    suppressor.cancelled("door", T + 700 * SECOND)
    assert rulings(suppressor, -5000) == [PASS]
    assert suppressor.next_wake() == T - 5000 * SECOND
    assert suppressor.wake(T - 5000 * SECOND) == [
        Summary("door", {"": 1}, T + 700 * SECOND, T + 700 * SECOND)
    ]


def test_after_a_clock_set_back_a_summary_is_told_at_the_next_wake() -> None:
    suppressor = exhausted()
    rulings(suppressor, 700)
    assert [summary.held for summary in suppressor.wake(T - HOUR)] == [1]


times = st.integers(0, 500)
tiny = SuppressPolicy(debounce=5, per_hour=2, window=50, cooldown=20)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("scwx"), times)), times)
def test_whatever_the_clock_does_nothing_is_muted_longer_than_its_span(
    history: list[tuple[str, int]], now: int
) -> None:
    suppressor = Suppressor(tiny)
    held = told = 0
    for verb, time in history:
        if verb == "c":
            suppressor.cancelled("door", time)
        elif verb == "w":
            told += sum(summary.held for summary in suppressor.wake(time))
        else:
            held += suppressor.signal("door", time, critical=verb == "x").ruling is LIMITED
    decision = suppressor.signal("door", now)
    held += decision.ruling is LIMITED
    due = suppressor.next_wake()
    assert due is None or due <= now + tiny.window
    if not decision.passes:
        assert decision.until is not None
        assert now < decision.until <= now + 50
    told += sum(summary.held for summary in suppressor.wake(now + 50))
    assert held == told
    assert suppressor.signal("door", now + 55).passes


def test_a_restart_forgets_nothing() -> None:
    suppressor = exhausted()
    rulings(suppressor, 700)
    suppressor = reloaded(suppressor, POLICY)
    assert rulings(suppressor, 800) == [LIMITED]
    suppressor = reloaded(suppressor, POLICY)
    assert suppressor.wake(T + HOUR) == [Summary("door", {"": 2}, T + 700 * SECOND, T + 800 * SECOND)]


def test_a_restart_with_another_limit_obeys_the_new_one() -> None:
    assert rulings(reloaded(exhausted(), SuppressPolicy(per_hour=11)), 600, 660) == [PASS, LIMITED]
    strict = reloaded(exhausted(), SuppressPolicy(per_hour=1))
    assert strict.signal("door", T + 600 * SECOND) == SuppressionDecision(LIMITED, T + 540 * SECOND + HOUR)


def test_devices_with_nothing_left_to_remember_are_forgotten() -> None:
    suppressor = Suppressor(tiny)
    for n in range(10_000):
        suppressor.signal(f"device-{n}", n)
        assert len(suppressor) <= 2 * max(64, tiny.window)
    suppressor.wake(10_000 + tiny.window)
    assert len(suppressor) == 0
    assert suppressor.snapshot() == {}


def test_a_device_with_a_summary_to_come_is_not_forgotten() -> None:
    suppressor = exhausted()
    rulings(suppressor, 700)
    for n in range(1000):
        suppressor.signal(f"device-{n}", T + 10 * HOUR + n * MINUTE)
    suppressor = reloaded(suppressor, POLICY)
    assert [summary.device for summary in suppressor.wake(T + 100 * HOUR)] == ["door"]
    assert len(suppressor) == 0


@pytest.mark.parametrize(
    "wrong", [{"debounce": -1}, {"cooldown": -1}, {"per_hour": 0}, {"window": 0}, {"summary": 0}], ids=str
)
def test_a_policy_that_makes_no_sense_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        SuppressPolicy(**wrong)


def test_zero_switches_debounce_and_cooldown_off() -> None:
    suppressor = Suppressor(SuppressPolicy(debounce=0, cooldown=0))
    suppressor.cancelled("door", T)
    assert rulings(suppressor, 0, 0) == [PASS, PASS]


class SuppressorMachine(RuleBasedStateMachine):
    """The model keeps every signal and every cancel for ever, and counts them anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000
        self.suppressor = Suppressor(tiny)
        self.passed: list[tuple[str, int, bool, str]] = []
        self.cancels: list[tuple[str, int]] = []
        self.void: dict[str, int] = {}
        """how many had passed when a person last cancelled at a device: none of them makes a repeat"""
        self.held: dict[str, list[tuple[int, str]]] = {}
        self.due: dict[str, int] = {}

    devices = st.sampled_from("ab")
    reasons = st.sampled_from(["lost", "fall"])

    @rule(device=devices, critical=st.booleans(), reason=reasons)
    def signal(self, device: str, critical: bool, reason: str) -> None:
        expected = self.expected(device, critical, reason)
        assert self.suppressor.signal(device, self.now, critical, reason) == expected
        if expected.ruling is PASS:
            self.passed.append((device, self.now, critical, reason))
        elif expected.ruling is LIMITED:
            assert expected.until is not None
            self.held.setdefault(device, []).append((self.now, reason))
            self.due.setdefault(device, min(expected.until, self.now + tiny.summary))

    def expected(self, device: str, critical: bool, reason: str) -> SuppressionDecision:
        same = [
            time
            for name, time, was, why in self.passed[self.void.get(device, 0) :]
            if name == device and why == reason and (was or not critical)
        ]
        last = max(same, default=-1_000)
        if self.now < last + tiny.debounce:
            return SuppressionDecision(DEBOUNCED, last + tiny.debounce)
        if critical:
            return SuppressionDecision(PASS)
        cancel = max((time for name, time in self.cancels if name == device), default=-1_000)
        if self.now < cancel + tiny.cooldown:
            return SuppressionDecision(COOLING, cancel + tiny.cooldown)
        recent = [
            time
            for name, time, was_critical, _ in self.passed
            if name == device and not was_critical and self.now < time + tiny.window
        ]
        if len(recent) >= tiny.per_hour:
            return SuppressionDecision(LIMITED, recent[-tiny.per_hour] + tiny.window)
        return SuppressionDecision(PASS)

    @rule(device=devices)
    def cancel(self, device: str) -> None:
        self.suppressor.cancelled(device, self.now)
        self.cancels.append((device, self.now))
        self.void[device] = len(self.passed)

    @rule(later=st.integers(1, 25))
    def time_passes(self, later: int) -> None:
        self.now += later

    @rule()
    def wake(self) -> None:
        expected = {
            device: Summary(
                device,
                Counter(reason for _, reason in self.held[device]),
                self.held[device][0][0],
                self.held[device][-1][0],
            )
            for device, due in self.due.items()
            if due <= self.now
        }
        assert {summary.device: summary for summary in self.suppressor.wake(self.now)} == expected
        for device in expected:
            del self.held[device], self.due[device]

    @rule()
    def restart(self) -> None:
        self.suppressor = reloaded(self.suppressor, tiny)

    @invariant()
    def it_knows_when_to_wake(self) -> None:
        assert self.suppressor.next_wake() == min(self.due.values(), default=None)


TestSuppressorMachine = SuppressorMachine.TestCase
TestSuppressorMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_signal_that_the_limit_did_not_hold_back_leaves_the_summary_as_it_is() -> None:
    suppressor = Suppressor(SuppressPolicy())
    suppressor.remove_from_summary("never seen", "fall")
    suppressor = exhausted()
    before = suppressor.snapshot()
    suppressor.remove_from_summary("band", "another reason")
    assert suppressor.snapshot() == before
