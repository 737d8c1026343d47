"""Held-back counts: how many signals sentinels did not report, by their own account.

A sentinel reports totals since its start, so a lost report loses nothing. Only the increase since its last
report is counted. The last report is stored in the ledger, so that nothing is counted twice after a restart
or at another hub.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.operations import CheckItem, PutItem, PutNewItem
from duly.errors import Malformed
from duly.storage.ledger import Ledger

REPORTS: Final = "held_back"
"""The bucket with the last report of each sentinel."""
REASONS: Final = ("debounce", "limit", "cooldown")
TRIES: Final = 3
_MOST: Final = 1 << 53


class HeldBackReport(Struct, frozen=True):
    """What a sentinel has held back since its start, by reason; `run` identifies that start."""

    run: str
    counts: dict[str, int]

    def check(self) -> None:
        """Raise `Malformed` if this cannot be a report."""
        known = all(reason in REASONS and 0 <= count < _MOST for reason, count in self.counts.items())
        if not known or not 0 < len(self.run) <= 64:
            raise Malformed(f"held counts signals by {', '.join(REASONS)}, and run is 1 to 64 characters")


class HeldBackCounts:
    """Counts the reports at one hub."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.counts: Counter[str] = Counter()
        """held-back signals reported to this hub since its start, by reason"""

    async def report(self, sentinel: str, report: HeldBackReport) -> None:
        """Count the increase since the last report."""
        for _ in range(TRIES):
            stored = await self._ledger.item(REPORTS, sentinel)
            known = (
                HeldBackReport("", {}) if stored is None else msgspec.json.decode(stored, type=HeldBackReport)
            )
            before = known.counts if known.run == report.run else {}
            new = {reason: count - before.get(reason, 0) for reason, count in report.counts.items()}
            if not any(count > 0 for count in new.values()):
                return
            body = msgspec.json.encode(report)
            put = PutItem(REPORTS, sentinel, body)
            if await self._ledger.apply(
                PutNewItem(REPORTS, sentinel, body)
                if stored is None
                else CheckItem(REPORTS, sentinel, stored, then=(put,))
            ):
                self.counts.update({reason: count for reason, count in new.items() if count > 0})
                return
