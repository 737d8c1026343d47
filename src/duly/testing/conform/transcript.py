"""The transcript of a run: what was sent and heard, and when."""

from __future__ import annotations

import time
from typing import Final

from msgspec import Struct

SHOWN: Final = 12
"""The last entries that are shown with a broken rule."""
_LONGEST: Final = 400


class Entry(Struct, frozen=True):
    """An entry: when (seconds since the start), which way (`>` to the client, `<` from it, `!` an event), and
    what."""

    at: float
    way: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:8.3f} {self.way} {self.text}"


class Transcript:
    """The entries of a run, in order."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.entries: list[Entry] = []

    def note(self, way: str, text: str) -> None:
        """Record a message or an event."""
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"
        self.entries.append(Entry(round(time.monotonic() - self._began, 3), way, short))

    def last(self, since: int) -> tuple[str, ...]:
        """Return the newest entries after this many, as lines."""
        return tuple(str(entry) for entry in self.entries[since:][-SHOWN:])
