"""The journal: what was refused, and what is going on.

The law [P5]: "why did nothing happen?" has an answer. Every refusal is recorded in the ledger with its
reason, and whoever watches sees everything as it happens.
"""

from __future__ import annotations

from duly.core.operations import RecordRefusal
from duly.core.units import MS
from duly.storage.ledger import Ledger
from duly.wire.outgoing import SeenFrame
from duly.wire.session import Session

ID_SHOWN = 200
"""Of an id that nobody should have sent."""


class AuditLog:
    """One hub's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.watchers: list[Session] = []

    async def refuse(self, scope: str, id_: str, word: str, reason: str) -> None:
        """Record that something was refused."""
        self.see("refused", scope=scope, id=id_, word=word, reason=reason)
        await self._ledger.write(RecordRefusal(scope, id_[:ID_SHOWN], word, reason, self._ledger.clock.now()))

    def see(self, what: str, **more: object) -> None:
        """Show it to those who watch."""
        if self.watchers:
            seen = SeenFrame({"what": what, **more}, self._ledger.clock.now() // MS)
            for watcher in self.watchers:
                watcher.push(seen)
