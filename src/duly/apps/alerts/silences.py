"""Silences: rules made by people that suppress notifications about some alerts for a while.

The laws. A critical alert is not suppressed unless the silence says so. A clock that is set back makes no
silence longer. A silence applies at every hub that reads it; expired silences are removed when a new one is
made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Final

import msgspec
from msgspec import Struct

from duly.apps.alerts.model import AlertEvent
from duly.apps.alerts.profiles import changed
from duly.core.messages import Message
from duly.core.monitor.signals import Severity
from duly.core.operations import DropItem, PutNewItem
from duly.core.units import MINUTE
from duly.storage.ledger import Ledger

SILENCES: Final = "silences"
"""The bucket of silences."""

SKEW: Final = 5 * MINUTE
"""How far ahead the clock of the hub that made a silence may be."""


class Silence(Struct, frozen=True, omit_defaults=True):
    """A rule that suppresses notifications about some alerts for a while. Its patterns are those of a
    shell: `*`, `lock-?`. Critical alerts are not suppressed unless `critical` says so."""

    until: int
    sentinel: str = "*"
    device: str = "*"
    reason: str = "*"
    profile: str = "*"
    by: str = ""
    """the account that made it"""
    note: str = ""
    claimed: str = ""
    """the name that the client gave; not checked"""
    critical: bool = False
    since: int = 0
    """when it was made; before that, less the skew, it suppresses nothing: the clock was set back"""

    def covers(self, message: Message, event: AlertEvent, now: int) -> bool:
        """Return whether notifications about this alert are suppressed now."""
        return (
            self.since - SKEW <= now < self.until
            and (self.critical or event.severity is not Severity.CRITICAL)
            and fnmatchcase(message.scope, self.sentinel)
            and fnmatchcase(event.device_address, self.device)
            and fnmatchcase(event.trigger_reason, self.reason)
            and fnmatchcase(event.profile_id, self.profile)
        )


class AlertSilences:
    """The silences of one ledger; `tell` asks a running hub to read them again."""

    def __init__(self, ledger: Ledger, tell: Callable[[bytes], Awaitable[None]]) -> None:
        self._ledger = ledger
        self._tell = tell

    async def add(self, silence: Silence) -> str:
        """Store a silence; returns its name."""
        existing = await self.all()
        now = self._ledger.clock.now()
        over = [DropItem(SILENCES, old) for old, one in existing.items() if one.until < now]
        number = max((int(name) for name in existing if name.isdecimal()), default=0) + 1
        body = msgspec.json.encode(silence)
        while not await self._ledger.apply(PutNewItem(SILENCES, str(number), body), changed(), *over):
            number += 1  # the number was used meanwhile
        await self._tell(b"")
        return str(number)

    async def remove(self, name: str) -> bool:
        """Remove a silence; returns whether there was one."""
        gone = await self._ledger.apply(DropItem(SILENCES, name), changed())
        await self._tell(b"")
        return gone

    async def all(self) -> dict[str, Silence]:
        """Return all silences by name."""
        bucket = await self._ledger.bucket(SILENCES)
        return {name: msgspec.json.decode(body, type=Silence) for name, body in bucket.items()}
