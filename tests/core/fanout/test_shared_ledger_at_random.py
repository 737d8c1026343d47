"""Two workers on one ledger at random: attempts fail, workers die and look, and every message ends as its
deliveries have."""

from __future__ import annotations

from random import Random

import pytest

from duly.apps.alerts.settlement import end_of
from duly.core.fanout.plan import AttemptResult, DoubtPolicy, MessageUnsettled, StartAttempt
from duly.core.lifecycle import State
from duly.core.operations import Advance, CheckItem, DeliveryRef, DropItem
from duly.core.steps import Effect, MachineEffect
from tests.core.fanout.test_machine import FanoutTower

EVENTS = 5
RESULTS = [AttemptResult.ARRIVED, AttemptResult.NOT_SENT, AttemptResult.REFUSED, AttemptResult.IN_DOUBT]


class Cluster:
    """Two workers, the attempts that they have under way, and a settlement as the application does it."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.recipients = ("hook", "mail", "pager")[: self.draw.randint(1, 3)]
        self.doubt = self.draw.choice(list(DoubtPolicy))
        first = self._tower(0)
        self.disk, self.clock = first.disk, first.clock
        self.towers = [first, self._tower(1, first)]
        self.attempts: list[tuple[FanoutTower, StartAttempt]] = []
        self.lives = 2

    def _tower(self, n: int, other: FanoutTower | None = None) -> FanoutTower:
        disk, clock = (None, None) if other is None else (other.disk, other.clock)
        return FanoutTower(
            *self.recipients, doubt=self.doubt, worker=f"worker-{n}", sole=False, disk=disk, clock=clock
        )

    def hear(self, tower: FanoutTower, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case MachineEffect(what=StartAttempt() as attempt):
                    self.attempts.append((tower, attempt))
                case MachineEffect(what=DeliveryRef(key=key)):
                    self.look(tower, key)
                case MachineEffect(what=MessageUnsettled(key=key)):
                    self.settle(key)
                case _:
                    pass

    def look(self, tower: FanoutTower, key: bytes) -> None:
        (n,) = (n for n in range(EVENTS) if tower.event(n).key == key)
        self.hear(tower, tower.look(n))

    def settle(self, key: bytes) -> None:
        ended = [one for ref, one in self.disk.deliveries.items() if ref.key == key]
        if any(not one.state.terminal for one in ended):
            return
        state, answer = end_of(ended)
        then = (DropItem("unsettled", key.hex()), Advance(key, state, self.clock.now(), answer))
        self.towers[0].driver.ledger.execute((CheckItem("unsettled", key.hex(), then=then),))

    def end(self, n: int, results: list[AttemptResult]) -> None:
        tower, attempt = self.attempts.pop(n)
        self.hear(tower, tower.went(attempt, self.draw.choice(results), "so"))

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for tower in self.draw.sample(self.towers, 2):
            self.hear(tower, tower.driver.wait(0))

    def crash(self, n: int) -> None:
        dead = self.towers[n]
        self.attempts = [one for one in self.attempts if one[0] is not dead]
        self.lives += 1
        self.towers[n] = self._tower(self.lives, dead)

    def step(self) -> None:
        tower = self.draw.choice(self.towers)
        what = self.draw.random()
        if what < 0.2:
            message = tower.event(self.draw.randrange(EVENTS))
            self.hear(tower, tower.report(message))
        elif what < 0.55 and self.attempts:
            self.end(self.draw.randrange(len(self.attempts)), RESULTS)
        elif what < 0.8:
            self.wait(self.draw.choice([0.1, 1, 5, 20, 70]))
        elif what < 0.96:
            self.look(tower, tower.event(self.draw.randrange(EVENTS)).key)
        else:
            self.crash(self.draw.randrange(2))

    def calm(self) -> None:
        """Let everything that is open end, with the checks that every hub makes."""
        for _ in range(300):
            while self.attempts:
                self.end(0, RESULTS[:3])
            if all(one.state.terminal for one in self.disk.deliveries.values()):
                break
            self.wait(30)
            for tower in self.towers:
                for key in {ref.key for ref, one in self.disk.deliveries.items() if not one.state.terminal}:
                    self.look(tower, key)
        for key in self.towers[0].unsettled:
            self.settle(key)


@pytest.mark.parametrize("seed", range(150))
def test_every_message_ends_as_its_deliveries_have(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(60):
        cluster.step()
    cluster.calm()
    for key, record in cluster.disk.messages.items():
        states = [one.state for ref, one in cluster.disk.deliveries.items() if ref.key == key]
        assert all(state.terminal for state in states), states
        assert record.state.terminal, (record.state, states)
        assert (record.state is State.DONE) == (State.DONE in states), (record.state, states)
