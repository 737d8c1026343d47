"""A budget per sender for ids that are kept for long, so that messages with an `exp` years away cannot fill
the disk.

The law: the count may be too high, and after a crash a little too low. A sender's count returns to zero when
the last of the counted ids may have been forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from duly.core.operations import PutItem

IDS: Final = 100_000
"""About 20 MB of ledger."""


class IdBudget:
    """Counts the ids of each sender that are kept for long.

    >>> budget = IdBudget({}, limit=2)
    >>> [budget.afford("A", until=50, now=now) for now in (1, 2, 3, 51)]
    [True, True, False, True]
    """

    def __init__(self, saved: Mapping[str, bytes], limit: int = IDS) -> None:
        self.limit = limit
        self._used = {name: msgspec.json.decode(body, type=tuple[int, int]) for name, body in saved.items()}
        self._changed: set[str] = set()

    def afford(self, sender: str, until: int, now: int) -> bool:
        """Count one more id that is kept until this time, and return True if the budget allows it."""
        count, last = self._used.get(sender, (0, 0))
        if last <= now:
            count = 0
        if count >= self.limit:
            return False
        self._used[sender] = (count + 1, max(until, last))
        self._changed.add(sender)
        return True

    def save(self, bucket: str) -> list[PutItem]:
        """Return the counts that have changed since the last call, to be stored."""
        changed, self._changed = self._changed, set()
        return [PutItem(bucket, name, msgspec.json.encode(self._used[name])) for name in sorted(changed)]
