"""The floor of a hub's ledger, as it is watched: is it in the future, and may it be taken back?"""

from __future__ import annotations

from typing import Any, Final

from duly.core.trusted_time import Floor
from duly.core.units import HOUR, MS, SECOND, show
from duly.storage.ledger import Ledger

FLOOR_AHEAD: Final = HOUR
"""A floor further in the future than that makes a hub unfit: what it is sent may be stale."""


class FloorWatch:
    """One ledger's floor, as it was when it was last looked at."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._floor = Floor()

    async def look(self) -> None:
        self._floor = await self._ledger.floor()

    @property
    def problem(self) -> str | None:
        """Why this hub should not be sent anything, if that is so."""
        ahead = self._floor.until - self._ledger.clock.now()
        return floor_ahead(ahead) if ahead > FLOOR_AHEAD else None

    def state(self) -> dict[str, float]:
        """How far the floor is in the future, and how far trusted time is behind the clock, in seconds."""
        now = self._ledger.clock.now()
        ahead, behind = self._floor.until - now, now - self._floor.trusted
        return {"ahead": max(0, ahead) / SECOND, "behind": max(0, behind) / SECOND}

    async def administer(self, wanted: dict[str, str]) -> dict[str, Any]:
        """Show the floor; take it back first, if that is wanted."""
        if "mend" in wanted:
            await self._ledger.mend_floor(everything="all" in wanted)
        await self.look()
        floor, now = self._floor, self._ledger.clock.now()
        return {
            "now": now // MS,
            "floor": floor.until // MS,
            "trusted": floor.trusted // MS,
            "ahead": max(0, floor.until - now) // MS,
            "mended": floor.mended // MS or None,
            "barrier": floor.barrier // MS if floor.barrier > now else None,
        }


def floor_ahead(by: int) -> str:
    return (
        f"the ledger's floor is {show(by)} in the future, since a clock was wrong: what is sent may be "
        "refused as stale until then. Set the clock if it is wrong; 'duly floor --mend' takes the floor back"
    )
