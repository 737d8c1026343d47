"""Two workers on one ledger deliver one message: neither knows alone how it ended."""

from __future__ import annotations

import pytest

from duly.core.fanout.plan import AttemptResult, DoubtPolicy, MessageUnsettled
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.core.steps import Effect, MachineEffect, ReportOutcome
from duly.core.units import MINUTE
from tests.core.driving import only
from tests.core.fanout.test_machine import FanoutTower, batches

NOT_SENT, REFUSED = AttemptResult.NOT_SENT, AttemptResult.REFUSED


def unsettled(effects: list[Effect]) -> int:
    return sum(isinstance(one.what, MessageUnsettled) for one in only(MachineEffect, effects))


class TwoTowers:
    """Two workers, the second of which comes when the first one's attempt at a hook has failed."""

    def __init__(self) -> None:
        self.one = FanoutTower("hook", "mail", sole=False)
        hook, self.mail = batches(self.one.report())
        self.one.went(hook, NOT_SENT, "no")
        self.other = FanoutTower(
            "hook", "mail", disk=self.one.disk, clock=self.one.clock, worker="other", sole=False
        )
        (self.hook,) = batches(self.other.driver.wait(5))


def test_on_a_shared_ledger_a_claim_is_its_workers_until_its_lease_ends() -> None:
    one = FanoutTower("hook", sole=False)
    (batch,) = batches(one.report())
    other = FanoutTower("hook", disk=one.disk, clock=one.clock, worker="other", sole=False)
    assert other.driver.wait(59) == []
    (asked,) = only(MachineEffect, other.driver.wait(2))
    assert asked.what == batch.items[0].ref, "its lease is over: the ledger is asked"
    (again,) = batches(other.look() + other.driver.wait(0))
    assert (again.items[0].ref, again.items[0].attempt) == (batch.items[0].ref, 2)
    assert only(ReportOutcome, one.went(batch)) == [], "it was thought dead: its end does not count any more"
    other.went(again)
    assert other.state() == "done"


def test_on_a_shared_ledger_only_one_takes_what_is_due() -> None:
    one = FanoutTower("hook", sole=False)
    (batch,) = batches(one.report())
    one.went(batch, AttemptResult.NOT_SENT, "no")
    other = FanoutTower("hook", disk=one.disk, clock=one.clock, worker="other", sole=False)
    (again,) = batches(other.driver.wait(5))
    assert batches(one.driver.wait(0)) == []
    other.went(again)
    assert other.state() == "done"


def test_a_message_whose_deliveries_two_workers_have_ended_is_noted_and_looked_at() -> None:
    towers = TwoTowers()
    assert unsettled(towers.other.went(towers.hook, REFUSED, "no such address")) == 0
    assert towers.one.unsettled == [towers.one.event().key], "another worker may end it"
    assert only(ReportOutcome, towers.one.went(towers.mail, REFUSED, "no such address")) == []
    assert unsettled(towers.one.driver.wait(5)) == 1, "the hook was ended elsewhere: now the ledger is asked"


def test_a_message_of_which_another_worker_has_a_delivery_is_not_ended_by_this_one() -> None:
    towers = TwoTowers()
    towers.one.driver.wait(0)
    effects = towers.one.went(towers.mail, REFUSED, "no such address")
    assert (only(ReportOutcome, effects), unsettled(effects)) == ([], 1)
    assert towers.one.state() == "sent", "the hook is under way"
    towers.other.went(towers.hook)
    assert towers.one.states() == {("hook", 0): "done", ("mail", 0): "failed"}
    assert towers.one.state() == "delivered"


def test_a_worker_that_has_ended_every_delivery_ends_the_message_and_removes_its_note() -> None:
    tower = FanoutTower("hook", "mail", sole=False)
    hook, mail = batches(tower.report())
    tower.went(hook, NOT_SENT, "no")
    tower.went(mail, REFUSED, "no such address")
    assert tower.unsettled == [tower.event().key], "it waits for the hook, which others may take"
    (again,) = batches(tower.driver.wait(5))
    tower.went(again, REFUSED, "no such address")
    assert (tower.state(), tower.unsettled) == ("failed", [])


def test_a_worker_that_has_claimed_all_that_is_left_notes_nothing() -> None:
    tower = FanoutTower("hook", "mail", sole=False)
    hook, mail = batches(tower.report())
    tower.went(hook)
    assert tower.unsettled == []
    tower.went(mail)
    assert (tower.state(), tower.unsettled) == ("done", [])


@pytest.mark.parametrize("doubt", list(DoubtPolicy))
def test_what_a_living_worker_gave_back_is_not_in_doubt_when_its_lease_would_be_over(
    doubt: DoubtPolicy,
) -> None:
    """Its attempt has failed, and its recipient wants to be left alone for longer than the lease: nothing has
    arrived, so that the delivery goes out again, unmarked, and not before."""
    one = FanoutTower("pager", doubt=doubt, sole=False)
    (first,) = batches(one.report())
    other = FanoutTower("pager", doubt=doubt, disk=one.disk, clock=one.clock, worker="other", sole=False)
    one.went(first, NOT_SENT, "come back later", rest=5 * MINUTE)
    other.driver.wait(61)
    assert batches(other.look() + other.driver.wait(0)) == []
    assert one.states() == {("pager", 0): "accepted"}
    (again,) = batches(other.driver.wait(240))
    assert (again.items[0].attempt, again.items[0].repeat) == (2, False)
    other.went(again)
    assert other.state() == "done"


def test_what_a_living_worker_gives_back_is_known_to_the_others_when_they_look() -> None:
    one = FanoutTower("pager", doubt=DoubtPolicy.STOP, sole=False)
    (first,) = batches(one.report())
    other = FanoutTower(
        "pager", doubt=DoubtPolicy.STOP, disk=one.disk, clock=one.clock, worker="other", sole=False
    )
    one.went(first, NOT_SENT, "no line")
    assert batches(other.look() + other.driver.wait(0)) == []
    assert one.states() == {("pager", 0): "accepted"}
    (again,) = batches(other.driver.wait(5))
    assert again.items[0].attempt == 2


def test_a_delivery_that_another_worker_gives_back_and_that_is_no_longer_wanted_is_cancelled() -> None:
    towers = TwoTowers()
    towers.one.driver.wait(0)
    towers.other.went(towers.hook, NOT_SENT, "no")
    towers.one.unwanted.add(towers.hook.items[0].ref)
    towers.one.look()
    assert towers.one.states()["hook", 0] == "cancelled"


def test_a_delivery_whose_message_is_not_known_here_any_more_is_dropped_and_ended_quietly() -> None:
    tower = FanoutTower("hook", sole=False)
    (batch,) = batches(tower.report())
    item = tower.fanout._active.items[batch.items[0].ref]
    attempts = tower.fanout._attempts
    assert attempts.lose(item, tower.clock.now()) != [], "the ledger is asked whether the message is over"
    assert attempts.lose(item, tower.clock.now()) == [], "its message is gone here"
    ends = attempts.end_all([(item, State.FAILED, Answer())], tower.clock.now())
    tower.driver.carry_out(ends)
    assert tower.states() == {("hook", 0): "failed"}


def test_a_claim_that_its_worker_gives_back_is_cancelled_where_it_is_no_longer_wanted() -> None:
    one = FanoutTower("hook", sole=False)
    (batch,) = batches(one.report())
    other = FanoutTower("hook", disk=one.disk, clock=one.clock, worker="other", sole=False)
    one.went(batch, NOT_SENT, "no")
    other.unwanted.add(batch.items[0].ref)
    other.look()
    assert other.states() == {("hook", 0): "cancelled"}
