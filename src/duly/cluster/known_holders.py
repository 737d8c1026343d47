"""The holders of devices as this hub knows them, by device and by hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class KnownHolders:
    """A copy of the registry in memory. What is learnt between two reads of the registry is in doubt, because
    an earlier read may end later: the next read asks for it again."""

    def __init__(self) -> None:
        self._holders: dict[str, bytes] = {}
        self._at: dict[str, dict[str, None]] = {}
        """by hub: its devices"""
        self._doubted: set[str] = set()

    def get(self, device: str) -> bytes | None:
        """Return the holder of a device, as far as is known."""
        return self._holders.get(device)

    def at(self, hubs: Iterable[str]) -> list[str]:
        """Return the devices that these hubs hold."""
        return [device for hub in hubs for device in self._at.get(hub, ())]

    def beside(self, hubs: frozenset[str]) -> list[tuple[str, bytes]]:
        """Return the devices that other hubs than these hold, with their holders, except those in doubt."""
        others = self.at(hub for hub in self._at if hub not in hubs)
        return [(device, self._holders[device]) for device in others if device not in self._doubted]

    def learn(self, device: str, holder: bytes | None) -> None:
        """Note what was written or read between two reads of the registry."""
        self.doubt(device)
        self.update({device: holder})

    def doubt(self, device: str) -> None:
        """Ask for this device at the next read."""
        self._doubted.add(device)

    def take_doubted(self) -> set[str]:
        """Return the devices that have to be asked for, which are then no longer in doubt."""
        doubted, self._doubted = self._doubted, set()
        return doubted

    def update(self, found: Mapping[str, bytes | None]) -> None:
        """Note the holders of some devices, as they were read."""
        for device, holder in found.items():
            before = self._holders.pop(device, None)
            if before is not None:
                here = self._at[hub_of(before)]
                here.pop(device)
                if not here:
                    del self._at[hub_of(before)]
            if holder is not None:
                self._holders[device] = holder
                self._at.setdefault(hub_of(holder), {})[device] = None

    def replace(self, found: Mapping[str, bytes]) -> None:
        """Note all holders, as they were read."""
        self._holders, self._at = {}, {}
        self.update(found)


def hub_of(holder: bytes) -> str:
    """Return the hub in a holder."""
    return holder.partition(b"/")[0].decode()
