"""Time inside duly: integer microseconds since the epoch; milliseconds and seconds only at the wire."""

from __future__ import annotations

from typing import Final

MS: Final = 1_000
SECOND: Final = 1_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
YEAR: Final = 365 * DAY

FOREVER: Final = (1 << 62) - 1
"""Later than any real time, with room left to add to it in a signed 64-bit column."""


def seconds(value: float) -> int:
    """Convert seconds to microseconds.

    >>> seconds(0.3)
    300000
    """
    return round(value * SECOND)


def show(micros: int) -> str:
    """Format a length of time for people.

    >>> show(300_000), show(90 * SECOND), show(DAY), show(400 * DAY), show(20_000 * DAY)
    ('300 ms', '1.5 min', '24 h', '400 days', '55 years')
    """
    if abs(micros) >= 2 * YEAR:
        return f"{micros / YEAR:.0f} years"
    if abs(micros) >= 3 * DAY:
        return f"{micros / DAY:.0f} days"
    for unit, word in ((HOUR, "h"), (MINUTE, "min"), (SECOND, "s"), (MS, "ms")):
        if abs(micros) >= unit:
            size = micros / unit
            return f"{size:.0f} {word}" if abs(size) >= 100 else f"{size:.3g} {word}"
    return f"{micros} µs"
