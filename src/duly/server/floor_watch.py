"""Watches the floor of the ledger: the time before which messages are stale.

A floor in the future, left by a clock that was wrong, makes a hub refuse what it is sent; `duly floor
--mend` takes it back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from duly.core.trusted_time import Floor
from duly.core.units import HOUR, MS, SECOND, show
from duly.storage.ledger import Ledger


class FloorWatch:
    """The floor of one ledger, as it was at the last refresh. Further in the future than `tolerated` it makes
    a hub unhealthy: new messages are refused as stale."""

    def __init__(self, ledger: Ledger, tolerated: int = HOUR) -> None:
        self._ledger = ledger
        self._tolerated = tolerated
        self._floor = Floor()
        self._lowered = -1
        self.on_lowered: Callable[[int], Awaitable[None]] | None = None
        """called with the time (ms) to which high-water marks were lowered, here or by another hub"""

    async def refresh(self) -> None:
        """Read the floor again."""
        self._floor = await self._ledger.floor()
        before, self._lowered = self._lowered, await self._ledger.lowered_to()
        if self._lowered > before >= 0 and self.on_lowered is not None:
            await self.on_lowered(self._lowered)

    @property
    def problem(self) -> str | None:
        """Why the hub may refuse new messages; None if the floor is not far in the future."""
        ahead = self._floor.until - self._ledger.clock.now()
        return floor_ahead(ahead) if ahead > self._tolerated else None

    def state(self) -> dict[str, float | None]:
        """The seconds by which the floor is in the future, by which it may be, and by which trusted time is
        behind the clock: None while the ledger is so new that there is no trusted time."""
        now, floor = self._ledger.clock.now(), self._floor
        behind = None if floor.young else max(0, now - floor.trusted) / SECOND
        ahead = max(0, floor.until - now) / SECOND
        return {"ahead": ahead, "tolerated": self._tolerated / SECOND, "behind": behind}

    async def administer(self, wanted: dict[str, str]) -> dict[str, int | None]:
        """Return the floor, in milliseconds; `mend` takes it back first, and with it the lanes that a wrong
        clock has led into the future."""
        lanes = 0
        if "mend" in wanted:
            lanes = await self._ledger.lower_marks()
            await self._ledger.mend_floor(everything="all" in wanted)
        await self.refresh()
        floor, now = self._floor, self._ledger.clock.now()
        return {
            "now": now // MS,
            "floor": floor.until // MS,
            "trusted": None if floor.young else floor.trusted // MS,
            "ahead": max(0, floor.until - now) // MS,
            "mended": floor.mended // MS or None,
            "barrier": floor.barrier // MS if floor.barrier > now else None,
            "restored": floor.restored // MS or None,
            "lanes": lanes,
        }


def floor_ahead(by: int) -> str:
    """The sentence that tells an operator about a floor in the future."""
    return (
        f"the ledger's floor is {show(by)} in the future, since a clock was wrong: new messages may be "
        "refused as stale until then. Set the clock if it is wrong; 'duly floor --mend' takes the floor back"
    )
