"""How attempts end while something else happens to their deliveries."""

from __future__ import annotations

from duly.core.fanout.attempts import FanoutQueries
from duly.core.fanout.plan import (
    AttemptEnded,
    AttemptResult,
    DeliveriesChanged,
    DeliveryPlan,
    DoubtPolicy,
    GroupingTraits,
)
from duly.core.fanout.recipient_queue import RecipientPolicy
from duly.core.steps import MachineEvent
from tests.core.fanout.test_machine import FanoutTower, batches


def test_a_delivery_that_another_worker_takes_while_its_repeat_is_stored_is_left_to_it() -> None:
    tower = FanoutTower("mail", sole=False)
    (batch,) = batches(tower.report())
    failed = MachineEvent(AttemptEnded(batch, AttemptResult.NOT_SENT, "no answer", 0))
    to_store = tower.fanout.handle(failed, tower.clock.now())
    tower.driver.give(MachineEvent(DeliveriesChanged(tower.event().key, ())))
    assert len(tower.fanout) == 0
    tower.driver.carry_out(to_store)
    assert batches(tower.driver.wait(3600)) == []


def test_a_new_urgent_message_does_not_wait_for_the_next_attempt_of_an_older_one() -> None:
    """The recipient could not be reached for hours, so that the next attempt is an hour away."""
    tower = FanoutTower("mail")
    tower.traits = GroupingTraits(urgent=True)
    (batch,) = batches(tower.report())
    for _ in range(12):
        tower.went(batch, AttemptResult.NOT_SENT, "no line")
        (batch,) = batches(tower.driver.wait(3_600))
    tower.went(batch, AttemptResult.NOT_SENT, "no line")
    (new,) = batches(tower.report(tower.event(1)))
    assert new.items[0].message.id == "event-1", "the line may be there again"
    tower.went(new)
    (old,) = batches(tower.driver.wait(0))
    assert old.items[0].message.id == "event-0", "and since it is, the older one follows at once"


def test_a_fanout_that_has_its_ledger_alone_notes_no_unsettled_messages() -> None:
    asks = FanoutQueries(
        plan=lambda message, now: DeliveryPlan(()),
        traits=lambda message: GroupingTraits(),
        route=lambda recipient: RecipientPolicy(),
        doubt=lambda recipient: DoubtPolicy.STOP,
    )
    assert (asks.unsettled(b"key"), asks.settled(b"key")) == ((), ())
