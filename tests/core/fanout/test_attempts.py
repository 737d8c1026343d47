"""How attempts end while something else happens to their deliveries."""

from __future__ import annotations

from duly.core.fanout.plan import AttemptEnded, AttemptResult, DeliveriesChanged
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
