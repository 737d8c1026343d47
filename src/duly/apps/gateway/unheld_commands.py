"""The commands that wait in a shared ledger for devices that no hub holds.

No hub has them in memory: the one to which the device connects reads them. They are counted from time to
time, so that every hub can show them.
"""

from __future__ import annotations

from collections.abc import Mapping

from duly.storage.ledger import Ledger


class UnheldCommands:
    """How many commands wait for each device of no hub, as last counted."""

    def __init__(self, ledger: Ledger, channel: str) -> None:
        self._ledger = ledger
        self._channel = channel
        self._found: Mapping[str, tuple[int, int]] = {}

    async def refresh(self) -> None:
        """Count them. A hub with a ledger of its own has every command in memory."""
        if not self._ledger.sole:
            self._found = await self._ledger.unheld(self._channel)

    @property
    def by_device(self) -> dict[str, int]:
        """How many wait, by device."""
        return {device: count for device, (count, _) in self._found.items()}

    @property
    def since(self) -> int:
        """When the oldest was accepted (µs); 0 if none waits."""
        return min((oldest for _, oldest in self._found.values()), default=0)
