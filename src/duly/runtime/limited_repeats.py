"""Repeats of senders that have used up a limit: they are answered, and only new messages are refused.

The law: a message that was taken has its answer for every repeat, also while its sender may send no more. A
sender that floods a hub with new messages makes it read the ledger so often and no more.
"""

from __future__ import annotations

from typing import Final

from duly.core.messages import key_of
from duly.core.quota import Quota, Rate
from duly.core.units import SECOND
from duly.storage.ledger import Ledger

READS: Final = Rate(20, SECOND, burst=100)
"""How often the ledger is read for messages of one sender beyond its limit."""


class LimitedRepeats:
    """Knows which messages of one ledger were taken."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reads = Quota(READS)

    async def is_repeat(self, sender: str, id_: str | None) -> bool:
        """Whether a message that a limit refuses was taken before."""
        if id_ is None or self._reads.take(sender, self._ledger.clock.now()):
            return False
        return await self._ledger.find(key_of(sender, id_)) is not None
