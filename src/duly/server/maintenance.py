"""The periodic work of a hub: prunes the ledger, and follows changes by other hubs.

The law: periodic work never fails for good. If the ledger is unusable the next run tries again, and the state
of the hub shows the failure.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from duly.errors import DulyError, LedgerError
from duly.server import retention
from duly.server.policies import archive_of, deliveries_kept

if TYPE_CHECKING:
    from duly.server.hub import Hub

PRUNE_SECONDS: Final = 30.0
REFRESH_SECONDS: Final = 5.0


class Maintenance:
    """The periodic work of one hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.archive = archive_of(hub.settings)
        self.problem: str | None = None
        """why the last pruning failed; None if it succeeded"""
        self._others: frozenset[str] = frozenset()
        """the other hubs on this ledger that were alive at the last refresh"""

    def start(self) -> None:
        """Prune and refresh from time to time."""
        self._hub.tasks.every("pruning", PRUNE_SECONDS, self.run)
        self._hub.tasks.every("refreshing accounts", REFRESH_SECONDS, self.refresh)

    async def run(self) -> None:
        """Prune, read the floor again, and take over the alerts of hubs that have died."""
        hub = self._hub
        try:
            await self.prune()
            await hub.floor.refresh()
            self.problem = None
        except (LedgerError, OSError) as problem:  # the next run tries again
            self.problem = str(problem)
        with contextlib.suppress(DulyError):
            await hub.alerts.adopt(hub.gateway.remote.hubs)

    async def prune(self) -> dict[str, object]:
        """Forget what the ledger has kept for long enough; return what was forgotten."""
        hub = self._hub
        kept = deliveries_kept(hub.settings)
        return await retention.prune(hub.ledger, hub.alerts.operations, self.archive, kept)

    async def would_prune(self) -> dict[str, object]:
        """Return what `prune` would forget now."""
        return await retention.would_prune(
            self._hub.ledger, self.archive, deliveries_kept(self._hub.settings)
        )

    async def refresh(self) -> None:
        """Finish removals of people, and follow changes by other hubs."""
        hub = self._hub
        with contextlib.suppress(LedgerError):
            await hub.chat.remove_from_chat()
        if hub.ledger.sole:
            return
        with contextlib.suppress(LedgerError):
            await hub.revocation.disconnect(frozenset(), await hub.people.refresh())
            await hub.alerts.configuration.refresh()
        before, self._others = self._others, frozenset(hub.gateway.remote.hubs)
        if before - self._others:  # a hub has died: its work is taken over now
            with contextlib.suppress(DulyError):
                await hub.alerts.adopt(self._others)
