"""Watches the floor of the ledger: the time before which messages are stale.

A floor in the future, left by a clock that was wrong, makes a hub refuse what it is sent; `duly floor
--mend` takes it back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from duly.core.trusted_time import Floor
from duly.core.units import HOUR, MINUTE, MS, SECOND, show
from duly.storage.floor_repair import lower_marks, lowered_to, mend_floor
from duly.storage.ledger import Ledger

TOLERATED_AHEAD: Final = 5 * MINUTE
"""How far the clock of a sender may be ahead, as the hub's policies allow it."""


class FloorWatch:
    """The floor of one ledger as of the last refresh. If it is further in the future than `tolerated`, the
    hub is unhealthy: new messages are refused as stale."""

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
        before, self._lowered = self._lowered, await lowered_to(self._ledger)
        if self._lowered > before >= 0 and self.on_lowered is not None:
            await self.on_lowered(self._lowered)

    @property
    def problem(self) -> str | None:
        """Why the hub may refuse new messages; None if the floor is not far in the future."""
        ahead = self._floor.until - self._ledger.clock.now()
        return floor_ahead(ahead) if ahead > self._tolerated else None

    def state(self) -> dict[str, float | None]:
        """Return by how many seconds the floor is in the future, by how many it may be, and how far trusted
        time is behind the clock (None while the ledger is so new that there is no trusted time)."""
        now, floor = self._ledger.clock.now(), self._floor
        behind = None if floor.young else max(0, now - floor.trusted) / SECOND
        ahead = max(0, floor.until - now) / SECOND
        return {"ahead": ahead, "tolerated": self._tolerated / SECOND, "behind": behind}

    async def administer(self, wanted: dict[str, str]) -> dict[str, int | None]:
        """Return the floor, in milliseconds; `mend` lowers it first, together with the lanes that a wrong
        clock has moved into the future."""
        lanes = 0
        if "mend" in wanted:
            lanes = await lower_marks(self._ledger)
            await mend_floor(self._ledger, everything="all" in wanted)
        await self.refresh()
        ahead = await lanes_ahead(self._ledger)
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
            "lanes_ahead": ahead,
        }


async def lanes_ahead(ledger: Ledger) -> int:
    """Return the number of lanes whose last message was made in the future, further than a sender's clock may
    be ahead: what their senders say now can be superseded."""
    limit = (ledger.clock.now() + TOLERATED_AHEAD) // MS
    return sum(ms > limit for _, ms in (await ledger.marks()).values())


def senders_ahead(lanes: int) -> str:
    """Return the sentence that tells an operator about lanes that are in the future."""
    return (
        f"{lanes} {'lane is' if lanes == 1 else 'lanes are'} in the future, since a clock was wrong: what "
        "the senders say now may be superseded by what they said then. Set the clock if it is wrong; "
        "'duly floor --mend' takes the lanes back"
    )


def floor_ahead(by: int) -> str:
    """Return the sentence that tells an operator about a floor in the future."""
    return (
        f"the ledger's floor is {show(by)} in the future, since a clock was wrong: new messages may be "
        "refused as stale until then. Set the clock if it is wrong; 'duly floor --mend' takes the floor back"
    )
