"""The activity log: records what was refused and why, and shows what is happening now.

The law (P5): the question "why did nothing happen?" always has an answer. Every refusal is recorded in the
ledger with its reason, and watching admins see everything as it happens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from duly.core.operations import RecordRefusal
from duly.core.units import MS
from duly.runtime.logs import RateLimitedLog
from duly.storage.ledger import Ledger
from duly.wire.outgoing import SeenFrame
from duly.wire.session import Session

LOG: Final = logging.getLogger("duly.refused")
LOG.addFilter(RateLimitedLog())

ID_SHOWN = 200
"""Characters of an id that are recorded; a sound id is shorter."""


class ActivityLog:
    """Records the refusals of one hub, and shows events to the sessions in `watchers`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.watchers: list[Session] = []
        self.unrecorded: list[Callable[[], Awaitable[None]]] = []
        """record the refusals that are first counted and recorded later"""

    async def refuse(self, scope: str, id_: str, word: str, reason: str, at: int = 0) -> None:
        """Record that a message was refused, now or earlier (`at`), and show it to the watchers."""
        self.see("refused", scope=scope, id=id_, word=word, reason=reason)
        LOG.info("refused: %s", reason, extra={"scope": scope, "id": id_[:ID_SHOWN], "word": word})
        await self._ledger.write(RecordRefusal(scope, id_[:ID_SHOWN], word, reason, at or self.now()))

    def now(self) -> int:
        """Return the time of the ledger's clock."""
        return self._ledger.clock.now()

    async def settle(self) -> None:
        """Record the refusals that are not recorded yet."""
        for record in self.unrecorded:
            await record()

    def see(self, what: str, **more: object) -> None:
        """Show an event to the watchers; without watchers this costs nothing."""
        if self.watchers:
            seen = SeenFrame({"what": what, **more}, self._ledger.clock.now() // MS)
            # An HTTP request that has asked to watch is gone once it is answered.
            self.watchers = [watcher for watcher in self.watchers if watcher.listening]
            for watcher in self.watchers:
                watcher.push(seen)
