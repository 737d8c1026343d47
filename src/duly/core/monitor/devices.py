"""The devices that a sentinel monitors: limits, cancels, events that can be cancelled, and held signals.

The laws. The state in memory mirrors a bucket of the ledger; `save` commits a change in the same step as its
cause. A held signal is remembered until its window ends, and is then judged again.
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
"""The ledger's bucket of devices."""

RECENT: Final = 32
"""The most events per device that can still be changed and cancelled, within a day."""

SWEEP: Final = 256
"""With more devices than this, those with nothing left to remember are forgotten: addresses may be random."""


class HeldSignal(Struct, frozen=True, omit_defaults=True):
    """A signal that was held back and may still become an event. `at` is when it was noticed, `until` when it
    is judged again."""

    at: int
    until: int
    severity: Severity
    meta: str = ""
    location: str = ""
    countdown: int | None = None
    limited: bool = False
    """held back by the limit, so that the summary counts it"""

    def signal(self, device: str, reason: str) -> Signal:
        """Return the signal as it was noticed."""
        return Signal(
            device, reason, self.at, self.severity, self.meta.encode(), self.location.encode(), self.countdown
        )


class _Saved(Struct, omit_defaults=True):
    """A device as it is stored in the bucket."""

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
        """when it came back; 0 if it has not"""
        self.events = dict(saved.events)
        """events that the tower has or will get, with their times"""
        self.covered = saved.covered
        """the event about its present absence; empty if there is none"""
        self.held = dict(saved.held)
        """signals that wait to be judged again, by reason"""

    @property
    def idle(self) -> bool:
        """Whether it has neither cancels nor held signals."""
        return not (self.cancels or self.held)

    def hold(self, signal: Signal, until: int, *, limited: bool = False) -> None:
        """Remember a signal until it is judged again. Several signals for one reason are merged: first time,
        last data, highest severity."""
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
        """Remember an event; old ones are dropped after a day or when there are too many."""
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
        """Replace the state with the contents of the bucket."""
        saved = {name: _decode(body) for name, body in bucket.items()}
        self._devices = {name: MonitoredDevice(one) for name, one in saved.items()}
        self.suppressor.restore({name: one.marks for name, one in saved.items() if one.marks is not None})

    def save(self, name: str) -> PutItem | DropItem:
        """Return the write that stores the state of a device."""
        device, marks = self._devices[name], self.suppressor.marks(name)
        if marks is None and device.idle and not (device.back or device.events):
            return DropItem(DEVICES, name)
        saved = _Saved(marks, device.cancels, device.back, device.events, device.covered, device.held)
        return PutItem(DEVICES, name, _encode(saved))

    def at(self, name: str) -> MonitoredDevice:
        """Return a device, adding it if it is new."""
        return self._devices.setdefault(name, MonitoredDevice())

    def get(self, name: str) -> MonitoredDevice | None:
        """Return a device, or None."""
        return self._devices.get(name)

    def of(self, event: str) -> str:
        """Return the device of an event that may still be cancelled, or an empty string."""
        return next((name for name, device in self._devices.items() if event in device.events), "")

    def forget(self, data: EventData, event: str, *, settled: bool = False) -> list[PutItem | DropItem]:
        """Drop an event that the tower will never get, so that the next signal does not count as its repeat,
        and return the writes that store that. A device that came back in time (`settled`) may still be
        flapping. Events that a person cancelled are already gone; a later signal is remembered."""
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
        """Note that a device is reachable again, and return the write that stores it; None if nothing is
        remembered of the device."""
        device = self._devices.get(name)
        if device is None or device.back:
            return None
        device.back, device.covered = at, ""
        device.held.pop(DISCONNECT, None)
        return self.save(name)

    # ── what is held back ────────────────────────────────────────────────────────────────────────

    def hold(self, signal: Signal, decision: SuppressionDecision) -> bool:
        """Hold a signal back unless an event reports it; return whether there is something to save. The
        summary counts signals that the limit holds back, but a lasting state that still holds becomes an
        event then."""
        device, limited = self._devices[signal.device], decision.ruling is Ruling.LIMITED
        until = self.suppressor.summary_due(signal.device) if limited else decision.until
        told = bool(device.covered) if signal.lasting else decision.ruling is not Ruling.COOLING
        if not told and until is not None:
            device.hold(signal, until, limited=limited)
        return limited or not told

    def lapsed(self, now: int) -> list[tuple[str, str, HeldSignal]]:
        """Remove and return the signals whose window is over, with device and reason. The caller holds a
        signal again if its state still lasts, or turns it into an event."""
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
        """The number of held signals."""
        return sum(len(device.held) for device in self._devices.values())

    def next_wake(self) -> int | None:
        """Return when the next held signal is judged again, or None."""
        return min(
            (held.until for device in self._devices.values() for held in device.held.values()), default=None
        )

    def bound(self, now: int) -> None:
        """Limit waits after a restart, so that a clock that was set back holds no signal longer than its own
        window."""
        self.suppressor.bound(now)
        for device in self._devices.values():
            for reason, held in device.held.items():
                until = min(held.until, now + min(self._longest, held.until - held.at))
                device.held[reason] = structs.replace(held, until=until)

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: windows keep their length and signals their
        age."""
        self.suppressor.shift(by)
        for device in self._devices.values():
            device.back = device.back and max(1, device.back + by)
            device.events = {event: at + by for event, at in device.events.items()}
            for reason, held in device.held.items():
                device.held[reason] = structs.replace(held, at=max(0, held.at + by), until=held.until + by)

    def sweep(self, now: int) -> list[DropItem]:
        """Forget devices with nothing left to remember once there are many; return the writes for that."""
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
