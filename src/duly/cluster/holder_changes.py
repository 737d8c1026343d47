"""The changes of the registry: what a hub announces of its own ones, and what it has read of the others'.

The laws. A hub announces, with each heartbeat, the devices whose holder it has changed lately, numbered in
the order in which it noted them. It notes a change when the write is over, however it ended, and announces it
in a later transaction: a hub that reads an announcement and then the devices in it sees the change, in
whatever order transactions of different hubs commit. An announcement names devices and no holders, so that
reading it twice does no harm. A hub that cannot tell which changes it has missed reads the whole registry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec import Struct

LOOKS: Final = 10
"""How many heartbeats announce a change: a hub that looks more rarely reads the whole registry."""
MOST: Final = 2_000
"""How many changes an announcement has at most; beyond that, reading the whole registry is as cheap."""


class Announcement(Struct, frozen=True):
    """The latest changes of one hub."""

    after: int
    """the number of the last change that is no longer announced"""
    devices: list[str]
    """the devices whose holder was changed, in order"""

    @property
    def last(self) -> int:
        """The number of the latest change."""
        return self.after + len(self.devices)


_decode: Final = msgspec.json.Decoder(Announcement).decode


class OwnChanges:
    """The changes of this hub that it still announces."""

    def __init__(self) -> None:
        self._after = 0
        self._devices: deque[str] = deque()
        self._announced: deque[int] = deque(maxlen=LOOKS)
        """the number of the latest change at each of the last heartbeats"""

    def note(self, device: str) -> None:
        """Note that a write of this hub may have changed the holder of a device."""
        self._devices.append(device)
        if len(self._devices) > MOST:
            self._forget(1)

    def announcement(self) -> bytes:
        """Return what the next heartbeat announces."""
        if len(self._announced) == LOOKS:
            self._forget(self._announced[0] - self._after)
        self._announced.append(self._after + len(self._devices))
        return msgspec.json.encode(Announcement(self._after, list(self._devices)))

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._devices.popleft()
            self._after += 1


class ReadChanges:
    """How far this hub has read the changes of the other hubs."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        """by hub: the number of the last change that was read"""

    def compare(self, bodies: Mapping[str, bytes], hubs: Collection[str]) -> set[str] | None:
        """Return the devices that these hubs have changed since the last call; None if that cannot be told:
        a hub announces nothing, has just started, or announces no longer what was not read."""
        said = {hub: _decode(body) for hub, body in bodies.items()}
        before, self._read = self._read, {hub: one.last for hub, one in said.items()}
        if not said.keys() >= set(hubs):
            return None
        changed: set[str] = set()
        for hub, one in said.items():
            if not one.after <= before.get(hub, -1) <= one.last:
                return None
            changed.update(one.devices[before[hub] - one.after :])
        return changed
