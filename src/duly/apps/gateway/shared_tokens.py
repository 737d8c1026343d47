"""Detects two clients that use the token of one device and keep disconnecting each other.

The law: one newer connection is normal; several in a row are recorded, and reported until they stop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from duly.core.identity_conflicts import WORD, IdentityConflicts
from duly.core.units import seconds
from duly.errors import DulyError
from duly.runtime.activity_log import ActivityLog
from duly.runtime.refusal_tally import RefusalTally
from duly.runtime.tasks import Supervisor


class SharedTokens:
    """The device connections that were closed in favour of newer ones."""

    def __init__(self, activity: ActivityLog, tasks: Supervisor) -> None:
        self._conflicts = IdentityConflicts()
        self._refusals = RefusalTally(activity, tasks)

    def note(self, device: str) -> None:
        """Count that a device's connection was closed in favour of a newer one; several in a row are
        recorded."""
        reason = (
            f"two clients use the token of {device}, and each disconnects the other; "
            f"give each an account of its own"
        )
        if self._conflicts.note(device, reason, seconds(asyncio.get_running_loop().time())):
            self._refusals.note(device, "websocket connect", WORD, reason)

    def conflicts(self) -> list[str]:
        """Return a sentence about each device whose token two clients use at the same time."""
        return self._conflicts.present(seconds(asyncio.get_running_loop().time()))

    async def stop(self) -> None:
        """Store what is not recorded yet."""
        with suppress(DulyError):  # the ledger is unreachable
            await self._refusals.stop()
