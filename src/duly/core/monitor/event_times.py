"""The times of unsent events by the tower's clock.

The laws. A clock without a battery starts in 1970 and is set later. The steady clock shows by how much it was
set, so the date of an event of this run is always right. For an event of an earlier run only the wall clock
is known: its time is used if it is plausible, otherwise the event is marked as undated. No event is dropped
because of a time that may be wrong; an event expires only by measured time.
"""

from __future__ import annotations

from typing import Final

import msgspec

from duly.core.monitor.signals import EventData
from duly.core.units import MINUTE, MS, SECOND

OLDEST: Final = 1_577_836_800 * SECOND
"""2020: a clock that shows an earlier time was never set."""
AHEAD: Final = 5 * MINUTE
"""How far ahead of the tower's clock a time may be and still be plausible."""
DIFFERS: Final = MINUTE
"""A measured offset is replaced by a later one only if they differ by more than this, which means that a
clock was set. A smaller difference is drift, and the earlier measurement is closer to the event."""


def is_believable(at: int, now: int) -> bool:
    """Return whether something reported now can have happened at this time, by the same clock.

    >>> is_believable(OLDEST + 1, OLDEST + 2), is_believable(5, OLDEST), is_believable(2 * OLDEST, OLDEST)
    (True, False, False)
    """
    return OLDEST <= at <= now + AHEAD


def dated(data: EventData, steps: int, offset: int) -> EventData:
    """Return an event of this run with the offset between its time and the tower's clock. `steps` is by how
    much our clock was set since; `offset` is how far the tower's clock is ahead now."""
    own = offset + steps
    if data.offset_ms is not None and abs(data.offset_ms * MS - own) < DIFFERS:
        return data
    return msgspec.structs.replace(data, offset_ms=own // MS)


def dated_again(data: EventData, offset: int, now: int, keep: int) -> EventData | None:
    """Return an event of an earlier run as it is reported: with its time if that is plausible, else undated.
    Returns None if it was created more than `keep` ago by the tower's clock and is no longer reported."""
    if data.undated:
        return data
    at, tower = data.timestamp * MS, now + offset
    if data.offset_ms is not None:
        happened = at + data.offset_ms * MS
        if is_believable(happened, tower):
            return None if happened + keep <= tower else data
    elif at >= OLDEST:
        for by in (offset, 0):  # a clock that was always wrong by this much, or one that was right
            if tower - keep < at + by <= tower + AHEAD:
                return msgspec.structs.replace(data, offset_ms=by // MS)
    return msgspec.structs.replace(data, undated=True)
