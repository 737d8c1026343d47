"""Bugs to plant in sentinels, each a mistake that was once made or designed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from duly.apps.alerts.heartbeats import Heartbeats
from duly.core.heartbeat_watch import HeartbeatWatch, Promise
from duly.core.ids import event_id
from duly.core.messages import Message
from duly.core.monitor import event_messages, suppression
from duly.core.monitor.devices import MonitoredDevices
from duly.core.monitor.machine import Monitor
from duly.core.monitor.suppression import Ruling, SuppressionDecision, Suppressor
from duly.core.operations import DropItem, PutItem
from duly.core.outbox import Outbox
from duly.core.steps import Step, Todo
from duly.core.transmissions import Transmissions
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("events_arrived")
def queue_in_memory(patch: Patch) -> None:
    """What waits is not found again after a restart."""
    restore = Monitor.restore

    def forgetful(self: Monitor, open_: Sequence[Any], ended: Any, marks: Any, now: int) -> list[Todo]:
        return restore(self, [item for item in open_ if item.delivery.attempt], ended, marks, now)

    patch.setattr(Monitor, "restore", forgetful)


@breaks("corrections_arrived")
def limits_in_memory(patch: Patch) -> None:
    """Debounce, limit and cooldown begin anew at every start."""
    patch.setattr(MonitoredDevices, "remember", lambda self, bucket: None)


@breaks("repeats_held_back")
def repeats_pass(patch: Patch) -> None:
    """Every repeat is an event of its own, however soon it comes."""
    patch.setattr(suppression, "_alive", lambda span, marks, now: {})


@breaks("no_signal_lost")
def limits_saved_apart(patch: Patch) -> None:
    """What is remembered of a device is never written down with what changed it."""

    def save(self: MonitoredDevices, name: str) -> PutItem | DropItem:
        return DropItem("nowhere", name)

    patch.setattr(MonitoredDevices, "save", save)


@breaks("events_arrived")
def id_worked_out_again(patch: Patch) -> None:
    """The id is made of the full minute (a common design takes the full hour), not of the event."""

    def minted(*, window_start: int, **fields: str) -> str:
        return event_id(window_start=window_start // 60_000_000, **fields)

    patch.setattr(event_messages, "event_id", minted)


@breaks("events_arrived")
def called_off_in_memory(patch: Patch) -> None:
    """A cancel is not stored: after a restart the event goes out all the same."""
    call_off = Monitor._call_off

    def unstored(self: Monitor, call: Any, now: int) -> list[Todo]:
        return [todo for todo in call_off(self, call, now) if not isinstance(todo, Step)]

    patch.setattr(Monitor, "_call_off", unstored)


@breaks("events_arrived")
def given_up_when_lost(patch: Patch) -> None:
    """What goes out while there is no connection counts as sent."""
    reached = Outbox.reached
    patch.setattr(Outbox, "reached", lambda self, recipient, now: reached(self, "nobody", now))
    patch.setattr(Transmissions, "next_try", lambda self, message, attempt, now: 1 << 60)
    patch.setattr(Transmissions, "repeat_later", lambda self, one, now: self.schedule(one, 1 << 60))


@breaks("no_signal_lost")
def forgotten_at_the_windows_end(patch: Patch) -> None:
    """What was held back is forgotten when its window ends, also if its cause still stands."""
    lapsed = MonitoredDevices.lapsed

    def forget(self: MonitoredDevices, now: int) -> list[Any]:
        lapsed(self, now)
        return []

    patch.setattr(MonitoredDevices, "lapsed", forget)


@breaks("no_signal_lost")
def critical_ones_wait(patch: Patch) -> None:
    """The cooldown and the hourly limit hold critical signals back like any other."""
    signal = Suppressor.signal

    def equal(
        self: Suppressor,
        device: str,
        now: int,
        critical: bool = False,
        reason: str = "",
        *,
        limit: bool = True,
    ) -> SuppressionDecision:
        return signal(self, device, now, False, reason, limit=limit)

    patch.setattr(Suppressor, "signal", equal)


@breaks("no_signal_lost")
def cooldown_swallows(patch: Patch) -> None:
    """What comes within the cooldown is ignored for ever."""
    hold = MonitoredDevices.hold

    def ignore(self: MonitoredDevices, signal: Any, decision: Any) -> bool:
        return decision.ruling is not Ruling.COOLING and hold(self, signal, decision)

    patch.setattr(MonitoredDevices, "hold", ignore)


@breaks("silence_taken_back")
def return_not_told(patch: Patch) -> None:
    """A sentinel that is heard again goes on counting as silent."""

    def kept(self: Promise, now: int, every: int) -> Promise:
        return structs.replace(self, heard=now, every=every)

    patch.setattr(Promise, "kept", kept)


@breaks("silence_noticed")
def silence_not_noticed(patch: Patch) -> None:
    """The tower waits for a sentinel that promised heartbeats, however long."""
    patch.setattr(HeartbeatWatch, "overdue", lambda self, promises, patience, elapsed, now: [])


@breaks("silence_noticed")
def silence_not_told(patch: Patch) -> None:
    """The tower notes that a sentinel is silent, and tells nobody."""
    begin = Heartbeats.__init__

    async def mute(message: Message) -> None:
        return

    def muted(self: Heartbeats, ledger: Any, profiles: Any, report: Any, take_back: Any, known: Any) -> None:
        begin(self, ledger, profiles, mute, take_back, known)

    patch.setattr(Heartbeats, "__init__", muted)


PLANTED_IN_SENTINELS = planted(
    queue_in_memory, limits_in_memory, limits_saved_apart, repeats_pass, id_worked_out_again,
    called_off_in_memory, given_up_when_lost, forgotten_at_the_windows_end, cooldown_swallows,
    return_not_told, critical_ones_wait, silence_not_noticed, silence_not_told,
)  # fmt: skip
