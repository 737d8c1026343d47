"""Configuration: the profiles and silences in memory, kept up to date with the ledger.

The law: before an alert is refused because its profile is unknown, the ledger is read: a profile that another
hub has just created is valid at once.
"""

from __future__ import annotations

import asyncio
from typing import Final

from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.planner import AlertPlanner
from duly.apps.alerts.profiles import CONFIGURED, VERSION, Profiles
from duly.core.messages import Message
from duly.core.rate_limits import Rate, RateLimits
from duly.errors import LedgerUnavailable, NoProfile
from duly.storage.item_loader import ItemLoader
from duly.storage.ledger import Ledger

PROFILE_READS: Final = Rate(50)
"""Reads of the ledger for unknown profiles, per second and sentinel."""


class AlertConfiguration:
    """Reads the profiles and silences of one tower."""

    def __init__(
        self, ledger: Ledger, profiles: Profiles, operations: AlertOperations, planner: AlertPlanner
    ) -> None:
        self._ledger = ledger
        self._profiles = profiles
        self._operations = operations
        self._planner = planner
        self._reads = RateLimits(PROFILE_READS)
        self._version: bytes | None = None
        """the version of the profiles and silences in memory"""
        self._items = ItemLoader(ledger)
        self._refreshing = asyncio.Lock()

    async def refresh(self, unless: bytes | None = None) -> None:
        """Read profiles and silences again, unless the version `unless` was read meanwhile."""
        async with self._refreshing:
            if unless is not None and unless == self._version:
                return
            version = None if self._ledger.sole else await self._ledger.item(CONFIGURED, VERSION)
            await self._profiles.refresh()
            self._planner.silences = list((await self._operations.silences.all()).values())
            self._version = version  # this version was read first; anything read later is at least as new

    def is_sure_of_profile(self, profile: str) -> bool:
        """Return whether a profile for these alerts is known without reading the ledger, because no other hub
        can change it."""
        return self._ledger.sole and self._profiles.get(profile) is not None

    async def check_profile(self, message: Message) -> None:
        """Refuse an alert whose profile is missing, unless it is a repeat of a known alert."""
        if await self.has_profile(message.recipient, message.scope):
            return
        if await self._ledger.find(message.key) is not None:
            return
        raise NoProfile(
            f"there is no profile {message.recipient!r}, so no recipient would be told; make it with "
            f"'duly profile set {message.recipient} --send URL', or one named 'default'"
        )

    async def has_profile(self, profile: str, sentinel: str) -> bool:
        """Return whether there is a profile for these alerts; the ledger is read before the answer is no."""
        if not self._ledger.sole:
            await self.catch_up()
        if self._profiles.get(profile) is not None:
            return True
        if self._reads.take(sentinel, self._ledger.clock.now()):
            raise LedgerUnavailable(f"{sentinel} names too many unknown profiles; try again")
        return await self._profiles.knows(profile)

    async def catch_up(self) -> None:
        """Read profiles and silences again if another hub has changed them. Alerts that arrive together
        share one read, which begins after they arrived, so that no change is missed."""
        (version,) = await self._items.get((CONFIGURED, VERSION))
        if version != self._version:
            await self.refresh(unless=version)
