"""A monitor in any order of signals, cancels, cuts, lost answers and crashes."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duly.core.lifecycle import State
from duly.core.monitor.machine import event_in
from duly.core.monitor.signals import DeviceBack, SentinelPolicy, Severity, SignalRuling
from duly.core.steps import MachineEffect, MachineEvent, Reachable, ReportOutcome, Unreachable
from tests.core.monitor.watching import Watch


class MonitorMachine(RuleBasedStateMachine):
    """Signals, cancels, cuts, lost answers and crashes in any order. The tower keeps what it took, and every
    event that passed is there once, or was called off, or is still to come."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Watch(
            SentinelPolicy(countdown=15, debounce=2, per_hour=3, cooldown=20, summary=10), online=False
        )
        self.online = False
        self.passed: set[str] = set()
        self.tower: dict[str, bytes] = {}
        self.taken: list[str] = []
        self.cancelled: set[str] = set()
        self.read = 0

    def settle(self) -> None:
        for effect in self.watch.effects[self.read :]:
            match effect:
                case MachineEffect(what=SignalRuling(decision=decision, event=event)) if decision.passes:
                    self.passed.add(event)
                case ReportOutcome(key=key, state=State.CANCELLED | State.SUPERSEDED):
                    self.cancelled.add(event_in(key))
        self.read = len(self.watch.effects)

    devices = st.sampled_from(["a", "b"])

    @rule(device=devices, reason=st.sampled_from(["disconnect", "fall"]), severity=st.sampled_from(Severity))
    def signal(self, device: str, reason: str, severity: Severity) -> None:
        self.watch.signal(reason, device, severity=severity)

    @rule(device=devices)
    def back(self, device: str) -> None:
        self.watch.give(MachineEvent(DeviceBack(device, self.watch.clock.now())))

    @rule(device=devices)
    def cancel(self, device: str) -> None:
        self.watch.call_off(device)

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        self.watch.wait(seconds)

    @rule()
    def cut(self) -> None:
        self.online = False
        self.watch.give(Unreachable(""))

    @rule(heard=st.booleans())
    def connect(self, heard: bool) -> None:
        self.online = True
        self.watch.give(Reachable(""))
        self.upload(heard)

    @rule(heard=st.booleans())
    def upload(self, heard: bool) -> None:
        """The tower takes everything that was sent; its answers may be lost."""
        if not self.online:
            return
        for message in self.watch.sent():
            if message.kind == "alert_event":
                assert self.tower.setdefault(message.id, message.body) == message.body, "other content"
            else:
                assert json.loads(message.body)["event"] in self.tower, "a correction before its event"
            if heard:
                self.watch.take(message)
        self.settle()
        if heard:
            self.watch.effects.clear()
            self.read = 0

    @rule()
    def crash(self) -> None:
        self.settle()
        self.online = False
        self.watch = self.watch.restarted(online=False)
        self.read = 0

    @invariant()
    def nothing_is_lost(self) -> None:
        self.settle()
        waiting = {event_in(key) for key in self.watch.monitor.keys}
        assert self.passed <= self.tower.keys() | self.cancelled | waiting
        assert not self.cancelled & self.tower.keys()

    def teardown(self) -> None:
        self.watch.wait(120)  # all windows, and a countdown after them
        for _ in range(3):
            self.connect(heard=True)
        assert self.passed == self.tower.keys() | self.cancelled
        assert len(self.watch.monitor) == 0


TestMonitorMachine = MonitorMachine.TestCase
TestMonitorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
