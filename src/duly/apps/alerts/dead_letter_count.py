"""The count of dead letters: notifications that were given up and still need a person.

An alert whose dead letters may have changed here is read again within a second. All alerts are counted again
from time to time if anything has happened, or if other hubs use the same ledger; the more alerts there are,
the longer the time between two counts.

Deliveries are given up in `duly.core.fanout.attempts`; `alert_queries` says which of these are dead letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Final

from duly.apps.alerts.alert_queries import dead_letters
from duly.apps.alerts.operations import AlertOperations
from duly.core.fanout.plan import FanoutCounts

COUNTED: Final = 1_000
"""Dead letters are counted up to here."""
RECOUNT_SECONDS: Final = 15.0
SHARE: Final = 30.0
"""Counting all alerts takes at most one part in this many of the time."""
TOUCHED: Final = 200
"""How many alerts are read again at once."""
TOUCHED_MOST: Final = 10_000
"""Beyond this many changed alerts, all alerts are counted again instead."""


class DeadLetterCount:
    """Counts the dead letters of one ledger. `shared` says whether other hubs use it as well."""

    def __init__(
        self,
        operations: AlertOperations,
        counts: FanoutCounts,
        *,
        shared: bool,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._operations = operations
        self._counts = counts
        self._shared = shared
        self._now = now
        self._letters: Counter[bytes] = Counter()
        """dead letters by the key of their alert"""
        self._touched: dict[bytes, None] = {}
        self._changes = 0
        self._counted_at: tuple[int, ...] = ()
        """what had happened before the last count"""
        self._due = 0.0

    @property
    def value(self) -> int:
        """How many dead letters there are, as far as they were counted."""
        return min(self._letters.total(), COUNTED)

    def touch(self, key: bytes) -> None:
        """Note that the dead letters of an alert may have changed."""
        self._changes += 1
        self._touched[key] = None

    async def refresh(self) -> None:
        """Read alerts that may have changed, and count all again if that is due."""
        if self._now() >= self._due or len(self._touched) > TOUCHED_MOST:
            await self._count_all()
        keys = list(self._touched)[:TOUCHED]
        for key in keys:
            del self._touched[key]
        try:
            alerts = await self._operations.get_all(keys)
        except BaseException:
            self._touched.update(dict.fromkeys(keys))  # the next refresh tries again
            raise
        for key in keys:
            self._letters.pop(key, None)
        self._letters.update({one.key: count for one in alerts if (count := len(dead_letters(one)))})

    async def _count_all(self) -> None:
        counts, began = self._counts, self._now()
        seen = (counts.accepted, counts.attempts, counts.failed, counts.in_doubt, self._changes)
        if self._shared or seen != self._counted_at:
            self._touched.clear()
            found = await self._operations.deliveries(state="dead", limit=COUNTED)
            self._counted_at = seen
            self._letters = Counter(alert.key for alert, _ in found)
        now = self._now()
        self._due = now + max(RECOUNT_SECONDS, SHARE * (now - began))
