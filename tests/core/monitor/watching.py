"""Drives a monitor by hand, through restarts."""

from __future__ import annotations

from typing import Any

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.monitor.devices import DEVICES
from duly.core.monitor.machine import Monitor
from duly.core.monitor.signals import (
    CancelRequest,
    CancelResult,
    Identity,
    SentinelPolicy,
    Signal,
    SignalRuling,
)
from duly.core.steps import Answered, Effect, MachineEffect, MachineEvent, Reachable, Transmit
from duly.storage.memory import Disk, MemoryLedger
from duly.testing import ManualClock
from tests.at_once import at_once
from tests.core.driving import Driver, only

IDENTITY = Identity("me", "tower:7800", "home", "night")
POLICY = SentinelPolicy(countdown=15)


class Watch(Driver):
    """A monitor on a disk: `restarted` is what kill -9 leaves of it."""

    def __init__(
        self,
        policy: SentinelPolicy = POLICY,
        *,
        online: bool = True,
        disk: Disk | None = None,
        clock: ManualClock | None = None,
        worker: str = "1",
    ) -> None:
        self.policy = policy
        self.monitor = Monitor(policy, IDENTITY, worker)
        memory = MemoryLedger(disk=disk)
        self.monitor.remember(at_once(memory.bucket(DEVICES)))
        super().__init__(self.monitor, clock or ManualClock(), disk)
        if online:
            self.give(Reachable(""))

    def restarted(self, *, online: bool = True) -> Watch:
        number = str(int(self.monitor._outbox.worker) + 1)
        return Watch(self.policy, online=online, disk=self.ledger.disk, clock=self.clock, worker=number)

    def signal(self, reason: str = "disconnect", device: str = "band", **more: Any) -> SignalRuling:
        told = self.give(MachineEvent(Signal(device, reason, self.clock.now(), **more)))
        return next(
            effect.what
            for effect in told
            if isinstance(effect, MachineEffect) and isinstance(effect.what, SignalRuling)
        )

    def call_off(self, device: str = "band", event: str = "") -> CancelResult:
        told = self.give(MachineEvent(CancelRequest(self.clock.now(), device, event)))
        return next(
            effect.what
            for effect in told
            if isinstance(effect, MachineEffect) and isinstance(effect.what, CancelResult)
        )

    def take(self, message: Message) -> list[Effect]:
        """The tower says that it has it."""
        return self.give(Answered(message.key, State.DONE, Answer()))

    def sent(self) -> list[Message]:
        """What went out, in order; resends are not counted."""
        return list({one.message.key: one.message for one in only(Transmit, self.effects)}.values())
