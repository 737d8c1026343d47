"""When an unsent event happened, by the tower's clock.

The laws. A clock without a battery starts in 1970 and is set later; the steady clock of one run tells by how
much, so an event of this run is always dated right. Of an event that an earlier run has made only the
wall clocks are known: its time is believed if it fits, and otherwise the event says itself that it is
undated. No event is dropped because of a time that may be wrong: it expires only by one that was measured.
"""

from __future__ import annotations

from typing import Final

import msgspec

from duly.core.monitor.signals import EventData
from duly.core.units import MINUTE, MS, SECOND

OLDEST: Final = 1_577_836_800 * SECOND
"""2020: a clock that shows an earlier time runs from its maker's date, and was never set."""
AHEAD: Final = 5 * MINUTE
"""How far ahead of the tower's clock a time may be that is believed."""
DIFFERS: Final = MINUTE
"""An offset that was measured before is corrected by a later one only if they differ this much: then one of
the clocks was set. Less is drift, and the earlier one is nearer to the event."""


def is_believable(at: int, now: int) -> bool:
    """Return whether something that is reported now can have happened at a time, by the same clock.

    >>> is_believable(OLDEST + 1, OLDEST + 2), is_believable(5, OLDEST), is_believable(2 * OLDEST, OLDEST)
    (True, False, False)
    """
    return OLDEST <= at <= now + AHEAD


def dated(data: EventData, steps: int, offset: int) -> EventData:
    """Return an event of this run with the offset of its own time to the tower's clock; `steps` is by how
    much our clock was set since, `offset` how far the tower's is ahead of it now."""
    own = offset + steps
    if data.offset_ms is not None and abs(data.offset_ms * MS - own) < DIFFERS:
        return data
    return msgspec.structs.replace(data, offset_ms=own // MS)


def dated_again(data: EventData, offset: int, now: int, keep: int) -> EventData | None:
    """Return an event of an earlier run as it is told: with its time if that can be believed, else undated;
    None: it was made more than `keep` ago by the tower's clock, and is no longer told."""
    if data.undated:
        return data
    at, tower = data.timestamp * MS, now + offset
    if data.offset_ms is not None:
        happened = at + data.offset_ms * MS
        if is_believable(happened, tower):
            return None if happened + keep <= tower else data
    elif at >= OLDEST:
        for by in (offset, 0):  # a clock that is wrong by as much all the time, or one that was right
            if tower - keep < at + by <= tower + AHEAD:
                return msgspec.structs.replace(data, offset_ms=by // MS)
    return msgspec.structs.replace(data, undated=True)
