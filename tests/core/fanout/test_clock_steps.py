"""A wall clock that is set neither delays a message nor ends an urgent one."""

from __future__ import annotations

import pytest

from duly.core.fanout.plan import AttemptEnded, AttemptResult
from duly.core.steps import Arrived, MachineEvent
from duly.core.units import DAY, HOUR, MINUTE
from tests.core.fanout.test_machine import FanoutTower, batches


def urgent(*recipients: str, later: int = 0, before: FanoutTower | None = None) -> FanoutTower:
    """A tower for urgent messages, with a boss who is told later; or the next run of one."""
    steps = (("boss", later),) if later else ()
    disk, clock = (None, None) if before is None else (before.disk, before.clock)
    return FanoutTower(*recipients, urgent=True, later=steps, disk=disk, clock=clock)


def set_clock(tower: FanoutTower, by: int) -> None:
    tower.clock.set(tower.clock.now() + by)
    tower.fanout.shift(by)


@pytest.mark.parametrize("by", [-2 * DAY, 2 * DAY])
def test_an_escalation_comes_as_long_after_the_message_as_planned(by: int) -> None:
    tower = urgent("mail", later=10 * MINUTE)
    (first,) = batches(tower.report())
    tower.went(first)
    set_clock(tower, by)
    assert batches(tower.driver.wait(599)) == []
    (second,) = batches(tower.driver.wait(1))
    assert second.recipient == "boss"


def test_a_clock_that_is_ahead_for_a_minute_ends_nothing() -> None:
    tower = urgent("mail")
    (batch,) = batches(tower.report())
    tower.went(batch, AttemptResult.NOT_SENT, "no line")
    set_clock(tower, 2 * DAY)
    (batch,) = batches(tower.driver.wait(5))
    tower.went(batch, AttemptResult.NOT_SENT, "no line")
    assert tower.states() == {("mail", 0): "accepted"}
    set_clock(tower, -2 * DAY)
    (batch,) = batches(tower.driver.wait(10))
    tower.went(batch)
    assert tower.state() == "done"


def test_a_message_is_tried_for_as_long_as_planned_however_the_clock_is_set() -> None:
    tower = urgent("mail")
    (batch,) = batches(tower.report())
    set_clock(tower, -2 * DAY)
    began = tower.clock.now()
    tower.went(batch, AttemptResult.NOT_SENT, "no line")
    while tower.states() == {("mail", 0): "accepted"}:
        for again in batches(tower.driver.wait(600)):
            tower.went(again, AttemptResult.NOT_SENT, "no line")
    assert tower.states() == {("mail", 0): "expired"}
    assert DAY <= tower.clock.now() - began <= DAY + HOUR


def test_after_a_restart_under_a_clock_that_was_set_back_nothing_waits_longer_than_if_it_were_new() -> None:
    before = urgent("mail", later=2 * HOUR)
    (batch,) = batches(before.report())
    before.went(batch, AttemptResult.NOT_SENT, "no line")
    before.clock.set(before.clock.now() - 2 * DAY)
    after = urgent("mail", later=2 * HOUR, before=before)
    (again,) = batches(after.driver.wait(3_600))
    assert again.recipient == "mail"
    assert batches(after.driver.wait(3_599)) == []
    (second,) = batches(after.driver.wait(1))
    assert second.recipient == "boss"


def test_after_a_restart_under_a_clock_that_was_set_back_a_repeat_waits_as_long_as_its_attempt_says() -> None:
    before = urgent("mail")
    (batch,) = batches(before.report())
    before.went(batch, AttemptResult.NOT_SENT, "no line")
    before.clock.set(before.clock.now() - 2 * DAY)
    (again,) = batches(urgent("mail", before=before).driver.wait(5))
    assert again.recipient == "mail"


@pytest.mark.parametrize("sent", [True, False])
def test_what_expired_while_no_hub_ran_is_tried_all_the_same(sent: bool) -> None:
    """The clock was set ahead meanwhile, or the power was off for days."""
    before = urgent("mail", later=10 * MINUTE)
    (batch,) = batches(before.report())
    if not sent:
        before.went(batch, AttemptResult.NOT_SENT, "no line")
    before.clock.set(before.clock.now() + 2 * DAY)
    after = urgent("mail", later=10 * MINUTE, before=before)
    after.driver.wait(10)
    for each in batches(after.driver.effects):
        after.went(each)
    assert after.states() == {("mail", 0): "done", ("boss", 1): "done"}


def test_what_expired_while_no_hub_ran_is_tried_for_a_while_only() -> None:
    before = urgent("mail")
    (batch,) = batches(before.report())
    before.went(batch, AttemptResult.NOT_SENT, "no line")
    before.clock.set(before.clock.now() + 2 * DAY)
    after, began = urgent("mail", before=before), before.clock.now()
    while after.states() == {("mail", 0): "accepted"}:
        for again in batches(after.driver.wait(60)):
            after.went(again, AttemptResult.NOT_SENT, "no line")
    assert after.states() == {("mail", 0): "expired"}
    assert HOUR <= after.clock.now() - began <= 2 * HOUR


def test_after_a_restart_under_the_right_clock_everything_comes_at_its_time() -> None:
    before = urgent("mail", later=2 * HOUR)
    (batch,) = batches(before.report())
    before.went(batch)
    before.driver.wait(3_000)
    after = urgent("mail", later=2 * HOUR, before=before)
    assert batches(after.driver.wait(4_199)) == []
    (second,) = batches(after.driver.wait(1))
    assert second.recipient == "boss"


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_what_is_due_at_once_and_waits_for_others_does_not_wait_for_the_clock(by: int) -> None:
    tower = FanoutTower("mail", most=1)
    (first,) = batches(tower.report())
    tower.went(first)
    assert batches(tower.report(tower.event(1))) == []  # one in a minute: it waits for its turn
    set_clock(tower, by)
    (second,) = batches(tower.driver.wait(60))
    tower.went(second)
    assert tower.state(1) == "done"


def test_after_a_restart_what_was_due_at_once_under_a_clock_that_was_ahead_goes_out() -> None:
    before = FanoutTower("mail", most=1)
    (first,) = batches(before.report())
    before.went(first)
    assert batches(before.report(before.event(1))) == []
    before.clock.set(before.clock.now() - HOUR)
    after = FanoutTower("mail", most=1, disk=before.disk, clock=before.clock)
    (second,) = batches(after.driver.wait(60))
    assert second.recipient == "mail"


@pytest.mark.parametrize("by", [-HOUR, HOUR, -2 * DAY, 2 * DAY])
def test_an_escalation_that_is_not_urgent_comes_as_long_after_the_message_as_planned(by: int) -> None:
    tower = FanoutTower("mail", later=(("boss", 2 * HOUR),))
    (first,) = batches(tower.report())
    tower.went(first)
    tower.driver.wait(600)
    set_clock(tower, by)
    assert batches(tower.driver.wait(7_200 - 600 - 1)) == []
    (second,) = batches(tower.driver.wait(1))
    assert second.recipient == "boss"


@pytest.mark.parametrize("by", [-2 * DAY, 2 * DAY])
def test_what_is_not_urgent_is_tried_for_as_long_as_planned_however_the_clock_is_set(by: int) -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    set_clock(tower, by)
    began = tower.clock.now()
    tower.went(batch, AttemptResult.NOT_SENT, "no line")
    while tower.states() == {("mail", 0): "accepted"}:
        for again in batches(tower.driver.wait(600)):
            tower.went(again, AttemptResult.NOT_SENT, "no line")
    assert tower.states() == {("mail", 0): "expired"}
    assert DAY - HOUR <= tower.clock.now() - began <= DAY + HOUR


def at_hour(tower: FanoutTower, hour: float) -> None:
    """Let the clock show this time of the next day, before anything is reported."""
    tower.clock.set((tower.clock.now() // DAY + 1) * DAY + round(hour * HOUR))


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_what_waits_for_the_end_of_the_night_comes_at_that_time_of_day(by: int) -> None:
    tower = FanoutTower("mail", later=(("boss", HOUR),), quiet=True)
    at_hour(tower, 3)
    assert batches(tower.report()) == []
    set_clock(tower, by)
    hours = 4 - by // HOUR
    assert batches(tower.driver.wait(hours * 3_600 - 1)) == []
    (first,) = batches(tower.driver.wait(1))
    tower.went(first)
    assert batches(tower.driver.wait(3_599)) == []
    (second,) = batches(tower.driver.wait(1))
    assert second.recipient == "boss"


@pytest.mark.parametrize("by", [-2 * HOUR, 2 * HOUR])
def test_when_the_night_is_over_an_escalation_does_not_depend_on_the_clock(by: int) -> None:
    tower = FanoutTower("mail", later=(("boss", HOUR),), quiet=True)
    at_hour(tower, 3)
    tower.report()
    (first,) = batches(tower.driver.wait(4 * 3_600))
    tower.went(first)
    set_clock(tower, by)
    assert batches(tower.driver.wait(3_599)) == []
    (second,) = batches(tower.driver.wait(1))
    assert second.recipient == "boss"


def test_a_clock_that_is_set_back_to_before_the_night_lets_go_what_waited_for_its_end() -> None:
    tower = FanoutTower("mail", quiet=True)
    at_hour(tower, 3)
    assert batches(tower.report()) == []
    set_clock(tower, -8 * HOUR)
    (first,) = batches(tower.driver.wait(0))
    assert first.recipient == "mail"


def test_after_a_restart_in_the_night_it_still_waits_for_its_end() -> None:
    before = FanoutTower("mail", quiet=True)
    at_hour(before, 3)
    before.report()
    after = FanoutTower("mail", quiet=True, disk=before.disk, clock=before.clock)
    set_clock(after, HOUR)
    assert batches(after.driver.wait(3 * 3_600 - 1)) == []
    assert len(batches(after.driver.wait(1))) == 1


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_clock_that_is_set_while_a_message_is_stored_delays_nothing(by: int) -> None:
    tower = FanoutTower("mail", most=1)
    (first,) = batches(tower.report())
    tower.went(first)
    to_store = tower.fanout.handle(Arrived(tower.event(1)), tower.clock.now())
    set_clock(tower, by)
    tower.driver.carry_out(to_store)
    (second,) = batches(tower.driver.wait(60))
    tower.went(second)
    assert tower.state(1) == "done"


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_clock_that_is_set_while_a_retry_is_stored_does_not_delay_it(by: int) -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    failed = MachineEvent(AttemptEnded(batch, AttemptResult.NOT_SENT, "no line", 0))
    to_store = tower.fanout.handle(failed, tower.clock.now())
    set_clock(tower, by)
    tower.driver.carry_out(to_store)
    assert batches(tower.driver.wait(4)) == []
    (again,) = batches(tower.driver.wait(1))
    assert again.items[0].attempt == 2


@pytest.mark.parametrize("by", [-2 * DAY, 2 * DAY])
def test_a_clock_that_is_set_while_an_urgent_message_is_stored_does_not_change_how_long_it_is_tried(
    by: int,
) -> None:
    tower = urgent("mail", later=10 * MINUTE)
    to_store = tower.fanout.handle(Arrived(tower.event()), tower.clock.now())
    set_clock(tower, by)
    tower.driver.carry_out(to_store)
    (batch,) = batches(tower.driver.effects)
    tower.went(batch, AttemptResult.NOT_SENT, "no line")
    (again,) = batches(tower.driver.wait(5))
    tower.went(again)
    assert batches(tower.driver.wait(594)) == []
    (second,) = batches(tower.driver.wait(1))
    assert second.recipient == "boss"
