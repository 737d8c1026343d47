"""Repeats from senders that have used up a limit: repeats are answered, and only new messages are refused.

The law: every repeat of an accepted message is answered, even while its sender is over a limit. The number of
ledger reads that a flooding sender can cause is limited.
"""

from __future__ import annotations

from typing import Final

from duly.core.messages import key_of
from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import SECOND
from duly.storage.ledger import Ledger

READS: Final = Rate(20, SECOND, burst=100)
"""How often the ledger is read for messages of one sender beyond its limit."""


class LimitedRepeats:
    """Recognises messages that were accepted before."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reads = RateLimits(READS)

    async def is_repeat(self, sender: str, id_: str | None) -> bool:
        """Return whether a message that a limit refuses was accepted before."""
        if id_ is None or self._reads.take(sender, self._ledger.clock.now()):
            return False
        return await self._ledger.find(key_of(sender, id_)) is not None
