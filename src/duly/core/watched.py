"""What a sentinel remembers of each device it watches: limits, cancels, and which events may be called off.

The law: what is remembered is what lies on the shelf. Whoever changes something here commits `save` with it,
in the same step as what it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.suppress import DeviceSnapshot, Suppressor, SuppressPolicy
from duly.core.units import DAY, HOUR
from duly.core.writes import Drop, Put

DEVICES: Final = "devices"
"""The shelf."""

RECENT: Final = 32
"""Events of one device that can still be changed and called off, for a day."""

SWEEP: Final = 256
"""Devices that are remembered before those with nothing left are forgotten: addresses may be random."""


class _Saved(Struct):
    """A device as it lies on its shelf."""

    marks: DeviceSnapshot | None = None
    cancels: int = 0
    back: int = 0
    events: dict[str, int] = {}


_decode: Final = msgspec.json.Decoder(_Saved).decode
_encode: Final = msgspec.json.Encoder().encode


class Device:
    """One device, besides its limits."""

    __slots__ = ("back", "cancels", "events")

    def __init__(self, cancels: int = 0, back: int = 0, events: Mapping[str, int] | None = None) -> None:
        self.cancels = cancels
        self.back = back
        """when it came back; 0: it has not"""
        self.events = dict(events or {})
        """those the tower has or will have, with their times"""

    def recent(self, at: int, span: int = HOUR) -> list[str]:
        """The events of the last hour, or so."""
        return [event for event, then in self.events.items() if abs(at - then) < span]

    def add(self, event: str, at: int) -> None:
        self.events = {recent: self.events[recent] for recent in self.recent(at, DAY)}
        self.events[event] = at
        while len(self.events) > RECENT:
            del self.events[next(iter(self.events))]


class Watched:
    """All devices of one sentinel."""

    def __init__(self, policy: SuppressPolicy) -> None:
        self.suppressor = Suppressor(policy)
        self._devices: dict[str, Device] = {}
        self._sweep_at = SWEEP

    def __len__(self) -> int:
        return len(self._devices)

    def remember(self, shelf: Mapping[str, bytes]) -> None:
        """Take in what lies on the shelf, forgetting what is here."""
        saved = {name: _decode(body) for name, body in shelf.items()}
        self._devices = {name: Device(one.cancels, one.back, one.events) for name, one in saved.items()}
        self.suppressor.restore({name: one.marks for name, one in saved.items() if one.marks is not None})

    def save(self, name: str) -> Put | Drop:
        """What to commit, now that something has changed."""
        device, marks = self._devices[name], self.suppressor.marks(name)
        if marks is None and not (device.cancels or device.back or device.events):
            return Drop(DEVICES, name)
        return Put(DEVICES, name, _encode(_Saved(marks, device.cancels, device.back, device.events)))

    def at(self, name: str) -> Device:
        """A device that something has happened to."""
        return self._devices.setdefault(name, Device())

    def get(self, name: str) -> Device | None:
        return self._devices.get(name)

    def of(self, event: str) -> str:
        """The device an event may be called off at; empty if there is none."""
        return next((name for name, device in self._devices.items() if event in device.events), "")

    def forget(self, name: str, event: str) -> list[Put | Drop]:
        """The tower will never have this event: there is nothing to correct."""
        device = self._devices.get(name)
        if device is None or device.events.pop(event, None) is None:
            return []
        return [self.save(name)]

    def sweep(self, now: int) -> list[Drop]:
        """Forget who has nothing left to remember, now and then."""
        if len(self._devices) < self._sweep_at:
            return []
        idle = [
            name
            for name, device in self._devices.items()
            if not (device.cancels or device.recent(now, DAY)) and self.suppressor.marks(name) is None
        ]
        for name in idle:
            del self._devices[name]
        self._sweep_at = max(SWEEP, 2 * len(self._devices))
        return [Drop(DEVICES, name) for name in idle]
