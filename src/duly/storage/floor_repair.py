"""Repairs what a clock that was wrong has left in a ledger: a floor and high-water marks in the future."""

from __future__ import annotations

from typing import Final

from duly.core.operations import LowerMark, PutItem
from duly.core.trusted_time import Floor
from duly.core.units import MS
from duly.storage.ledger import Ledger

LOWERED: Final = "lowered_marks"
"""The name of the bucket, and of its one item, that holds when marks were last lowered."""
LOWERED_AT_ONCE: Final = 1_000


async def mend_floor(ledger: Ledger, *, everything: bool = False) -> Floor:
    """Lower a floor that is in the future because a clock was wrong, and return the new floor; see
    `Floor.mend`."""
    old = await ledger.floor()
    new = old.mend(ledger.clock.now(), everything=everything)
    if new != old:
        await ledger.set_floor(new)
    return new


async def lower_marks(ledger: Ledger) -> int:
    """Lower the high-water marks that are in the future because a clock was wrong; return how many there
    were. Otherwise every message ordered by its time is superseded until the clock passes its mark."""
    now, count = ledger.clock.now() // MS, 0
    while ahead := [mark for mark, (_, ms) in (await ledger.marks()).items() if ms > now]:
        for at in range(0, len(ahead), LOWERED_AT_ONCE):
            some = ahead[at : at + LOWERED_AT_ONCE]
            await ledger.write(*(LowerMark(mark, now) for mark in some))
        count += len(ahead)
    if count:
        await ledger.write(PutItem(LOWERED, LOWERED, b"%d" % now))
    return count


async def lowered_to(ledger: Ledger) -> int:
    """Return the time (ms) at which marks were last lowered; 0: never."""
    return int(await ledger.item(LOWERED, LOWERED) or 0)
