"""Drives a machine by hand: commits its steps to a memory ledger at once, and collects what it wants done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from duly.core import operations as w
from duly.core.steps import Effect, Event, MachineEffect, Reply, ReportOutcome, Step, Todo, Transmit
from duly.runtime.engine import Machine
from duly.storage.memory import Disk, MemoryLedger
from duly.testing import ManualClock
from tests.at_once import at_once

E = TypeVar("E", Transmit, Reply, ReportOutcome, MachineEffect)


class Driver:
    def __init__(self, machine: Machine, clock: ManualClock, disk: Disk | None = None) -> None:
        self.machine = machine
        self.clock = clock
        self.ledger = MemoryLedger(clock, disk=disk)
        self.effects: list[Effect] = []
        self.carry_out(machine.restore(self._open(), (), self.ledger.disk.marks, clock.now()))

    def _open(self) -> list[w.OpenDelivery]:
        return at_once(self.ledger.open_deliveries(self.machine.channel))

    def give(self, event: Event) -> list[Effect]:
        """Hand an event over; what came of it."""
        before = len(self.effects)
        self.carry_out(self.machine.handle(event, self.clock.now()))
        return self.effects[before:]

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, waking the machine whenever it asked to be."""
        before = len(self.effects)
        end = self.clock.now() + round(seconds * 1_000_000)
        while (wake := self.machine.next_wake()) is not None and wake <= end:
            self.clock.set(max(wake, self.clock.now()))
            self.carry_out(self.machine.wake(self.clock.now()))
        self.clock.set(end)
        return self.effects[before:]

    def carry_out(self, todo: list[Todo]) -> None:
        while todo:
            item, *todo = todo
            if isinstance(item, Step):
                results = self.ledger.execute(item.writes)
                todo = [*item.done(results, self.clock.now()), *todo]
            else:
                self.effects.append(item)

    def state(self, key: bytes) -> str:
        return self.ledger.disk.messages[key].state.word


def only(kind: type[E], effects: Iterable[object]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]
