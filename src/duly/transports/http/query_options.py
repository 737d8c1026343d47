"""The options that requests give in their query: how long to wait, and how many of a list."""

from __future__ import annotations

from duly.errors import Malformed
from duly.transports.http.openapi import WAIT_LIMIT


def seconds_in(text: str | None) -> float:
    """Read the option `wait`; 0 if it is absent."""
    if not text:
        return 0.0
    try:
        wait = float(text)
    except ValueError:
        raise Malformed(f"wait={text!r} is not a number of seconds") from None
    if not 0 <= wait <= WAIT_LIMIT:
        raise Malformed(f"wait is a number of seconds from 0 to {WAIT_LIMIT:.0f}, not {text}")
    return wait


def number(text: str | None, default: int, most: int) -> int:
    """Read the option `limit`: a number from 1 to `most`, or `default` if it is absent."""
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise Malformed(f"limit is a number from 1 to {most}, not {text[:80]!r}")
    return int(text)
