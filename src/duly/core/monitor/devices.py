"""The devices that a sentinel monitors: limits, cancels, events to call off, and signals held back.

The laws. Memory mirrors the ledger's bucket: a change is committed with `save`, in the same step as what it
is about. A signal that is held back is remembered until its window ends; then it is judged again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct, structs

from duly.core.monitor.signals import DISCONNECT, EventData, Severity, Signal
from duly.core.monitor.suppression import (
    DeviceSnapshot,
    Ruling,
    SuppressionDecision,
    Suppressor,
    SuppressPolicy,
)
from duly.core.operations import DropItem, PutItem
from duly.core.units import DAY, HOUR

DEVICES: Final = "devices"
"""The bucket."""

RECENT: Final = 32
"""Events of one device that can still be changed and called off, for a day."""

SWEEP: Final = 256
"""Devices that are remembered before those with nothing left are forgotten: addresses may be random."""


class HeldSignal(Struct, frozen=True, omit_defaults=True):
    """A signal that was held back and may still become an event. `at` is when it was noticed, `until` when
    it is judged again."""

    at: int
    until: int
    severity: Severity
    meta: str = ""
    location: str = ""
    countdown: int | None = None
    limited: bool = False
    """the limit held it back: the summary counts it"""

    def signal(self, device: str, reason: str) -> Signal:
        """Return the signal as it was noticed."""
        return Signal(
            device, reason, self.at, self.severity, self.meta.encode(), self.location.encode(), self.countdown
        )


class _Saved(Struct, omit_defaults=True):
    """A device as its bucket stores it."""

    marks: DeviceSnapshot | None = None
    cancels: int = 0
    back: int = 0
    events: dict[str, int] = {}
    covered: str = ""
    held: dict[str, HeldSignal] = {}


_decode: Final = msgspec.json.Decoder(_Saved).decode
_encode: Final = msgspec.json.Encoder().encode


class MonitoredDevice:
    """The state of one device, besides its limits."""

    __slots__ = ("back", "cancels", "covered", "events", "held")

    def __init__(self, saved: _Saved | None = None) -> None:
        saved = saved or _Saved()
        self.cancels = saved.cancels
        self.back = saved.back
        """when it came back; 0: it has not"""
        self.events = dict(saved.events)
        """those the tower has or will have, with their times"""
        self.covered = saved.covered
        """the event that tells of its present absence; empty: there is none"""
        self.held = dict(saved.held)
        """signals that wait to be judged again, by reason"""

    @property
    def idle(self) -> bool:
        """Whether it has neither cancels nor held signals."""
        return not (self.cancels or self.held)

    def hold(self, signal: Signal, until: int, *, limited: bool = False) -> None:
        """Remember a signal until it is judged again. Of several for one reason it keeps the first time,
        the last data and the highest severity."""
        before = self.held.get(signal.reason)
        at, severity = signal.at, signal.severity
        if before is not None:
            at, until = min(at, before.at), min(until, before.until)
            severity = max(severity, before.severity, key=_RANKS.__getitem__)
        self.held[signal.reason] = HeldSignal(
            at, until, severity, signal.meta.decode(), signal.location.decode(), signal.countdown, limited
        )

    def recent(self, at: int, span: int = HOUR) -> list[str]:
        """Return the events within `span` of a time."""
        return [event for event, then in self.events.items() if abs(at - then) < span]

    def add(self, event: str, at: int) -> None:
        """Remember an event; older ones are dropped after a day, or when there are too many."""
        self.events = {recent: self.events[recent] for recent in self.recent(at, DAY)}
        self.events[event] = at
        while len(self.events) > RECENT:
            del self.events[next(iter(self.events))]


_RANKS: Final = {severity: rank for rank, severity in enumerate(Severity)}


class MonitoredDevices:
    """The devices of one sentinel."""

    def __init__(self, policy: SuppressPolicy) -> None:
        self.suppressor = Suppressor(policy)
        self._longest = max(policy.debounce, policy.cooldown, policy.summary)
        self._devices: dict[str, MonitoredDevice] = {}
        self._sweep_at = SWEEP

    def __len__(self) -> int:
        return len(self._devices)

    def remember(self, bucket: Mapping[str, bytes]) -> None:
        """Replace what is known by the contents of the bucket."""
        saved = {name: _decode(body) for name, body in bucket.items()}
        self._devices = {name: MonitoredDevice(one) for name, one in saved.items()}
        self.suppressor.restore({name: one.marks for name, one in saved.items() if one.marks is not None})

    def save(self, name: str) -> PutItem | DropItem:
        """Return the write that stores the present state of a device."""
        device, marks = self._devices[name], self.suppressor.marks(name)
        if marks is None and device.idle and not (device.back or device.events):
            return DropItem(DEVICES, name)
        saved = _Saved(marks, device.cancels, device.back, device.events, device.covered, device.held)
        return PutItem(DEVICES, name, _encode(saved))

    def at(self, name: str) -> MonitoredDevice:
        """Return a device, which is added if it is new."""
        return self._devices.setdefault(name, MonitoredDevice())

    def get(self, name: str) -> MonitoredDevice | None:
        """Return a device; None: it is not known."""
        return self._devices.get(name)

    def of(self, event: str) -> str:
        """Return the device of an event that may still be called off; empty: there is none."""
        return next((name for name, device in self._devices.items() if event in device.events), "")

    def forget(self, data: EventData, event: str, *, settled: bool = False) -> list[PutItem | DropItem]:
        """Drop an event that the tower will never get, so that the next signal is no repeat of it; but a
        device that was back in time (`settled`) may still be flapping. What a person has called off is
        forgotten already; a later signal is remembered. Return the writes that store that."""
        name, critical = data.device_address, data.severity is Severity.CRITICAL
        device = self._devices.get(name)
        if device is None or device.events.pop(event, None) is None:
            return []
        if critical or not settled:
            self.suppressor.forgive(name, data.trigger_reason, critical=critical)
        if device.covered == event:
            device.covered = ""
        return [self.save(name)]

    def came_back(self, name: str, at: int) -> PutItem | DropItem | None:
        """Note that a device can be reached again, and return the write that stores that; None: nothing of
        it is remembered, so nothing depends on it."""
        device = self._devices.get(name)
        if device is None or device.back:
            return None
        device.back, device.covered = at, ""
        device.held.pop(DISCONNECT, None)
        return self.save(name)

    # ── what is held back ────────────────────────────────────────────────────────────────────────

    def hold(self, signal: Signal, decision: SuppressionDecision) -> bool:
        """Hold a signal back if no event reports it; return whether there is something to save. The summary
        counts what the limit holds back, but a lasting state that still stands becomes an event then."""
        device, limited = self._devices[signal.device], decision.ruling is Ruling.LIMITED
        until = self.suppressor.told_by(signal.device) if limited else decision.until
        told = bool(device.covered) if signal.lasting else decision.ruling is not Ruling.COOLING
        if not told and until is not None:
            device.hold(signal, until, limited=limited)
        return limited or not told

    def lapsed(self, now: int) -> list[tuple[str, str, HeldSignal]]:
        """Remove and return the signals whose window is over: device, reason and signal. The caller holds
        one that still stands again, or makes it an event."""
        over = [
            (name, reason, held)
            for name, device in self._devices.items()
            if device.held
            for reason, held in device.held.items()
            if held.until <= now
        ]
        for name, reason, _ in over:
            del self._devices[name].held[reason]
        return sorted(over, key=lambda one: one[2].at)

    @property
    def holding(self) -> int:
        """The number of signals that are held back."""
        return sum(len(device.held) for device in self._devices.values())

    def next_wake(self) -> int | None:
        """Return when the next held signal is judged again; None: none is held."""
        return min(
            (held.until for device in self._devices.values() for held in device.held.values()), default=None
        )

    def bound(self, now: int) -> None:
        """Limit waits after a restart, so that a clock that was set back holds no signal longer than a
        window."""
        self.suppressor.bound(now)
        for device in self._devices.values():
            for reason, held in device.held.items():
                until = min(held.until, now + self._longest)
                device.held[reason] = structs.replace(held, until=until)

    def shift(self, by: int) -> None:
        """Follow a wall clock that was set by this much: windows go on as if it had not been, and what was
        noticed is as long ago as it was."""
        self.suppressor.shift(by)
        for device in self._devices.values():
            device.back = device.back and max(1, device.back + by)
            device.events = {event: at + by for event, at in device.events.items()}
            for reason, held in device.held.items():
                device.held[reason] = structs.replace(held, at=max(0, held.at + by), until=held.until + by)

    def sweep(self, now: int) -> list[DropItem]:
        """Forget devices that have nothing left to remember, once there are many; return the writes for
        that."""
        if len(self._devices) < self._sweep_at:
            return []
        idle = [
            name
            for name, device in self._devices.items()
            if device.idle and not device.recent(now, DAY) and self.suppressor.marks(name) is None
        ]
        for name in idle:
            del self._devices[name]
        self._sweep_at = max(SWEEP, 2 * len(self._devices))
        return [DropItem(DEVICES, name) for name in idle]
