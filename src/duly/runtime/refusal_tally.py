"""Refusals that may come in floods: counted, and recorded now and then.

The law: every refusal is counted and its kind recorded with its reasons [P5], and no flood of them fills the
journal or makes anybody wait: about `KINDS` rows in `PERIOD` seconds, each with how often it happened.
"""

from __future__ import annotations

import asyncio
from typing import Final

from duly.core.acl import HUB
from duly.errors import DulyError
from duly.runtime.audit import AuditLog
from duly.runtime.tasks import Supervisor

PERIOD: Final = 5.0
KINDS: Final = 50
REASONS: Final = 5
"""Different reasons of one kind that become rows of their own; more are counted with the last of them."""
REST: Final = "(others)"
"""The id under which refusals are counted that are too many kinds."""


class RefusalTally:
    """Records refusals in the background, together where they are alike."""

    def __init__(self, journal: AuditLog, tasks: Supervisor | None = None, *, period: float = PERIOD) -> None:
        self._journal = journal
        self._period = period
        self._tasks = tasks or Supervisor()
        self._counts: dict[tuple[str, str, str], dict[str, int]] = {}
        """how often each reason was given, by scope, id and word"""
        self._rows = 0
        self._task: asyncio.Task[None] | None = None
        self.total = 0

    def note(self, scope: str, id_: str, word: str, reason: str) -> None:
        """This was refused. It is recorded within `period`; at once, if nothing was just before."""
        self.total += 1
        self._count((scope, id_, word), reason, 1)
        if self._task is None or self._task.done():
            self._task = self._tasks.do("record of refusals", self._record())

    def _count(self, kind: tuple[str, str, str], reason: str, times: int) -> None:
        reasons = self._counts.get(kind)
        if reasons is None:
            if self._rows >= KINDS:
                kind = (HUB, REST, kind[2])
            reasons = self._counts.setdefault(kind, {})
        if reason not in reasons and reasons and (len(reasons) >= REASONS or self._rows >= KINDS):
            times += reasons.pop(next(reversed(reasons)))
            self._rows -= 1
        self._rows += reason not in reasons
        reasons[reason] = reasons.get(reason, 0) + times

    async def stop(self) -> None:
        """Record what is left."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._write()

    async def _record(self) -> None:
        while self._counts:
            await self._write()
            await asyncio.sleep(self._period)

    async def _write(self) -> None:
        for kind in list(self._counts):
            for reason in list(self._counts.get(kind, ())):
                times = self._take(kind, reason)
                said = f"{reason} ({times:,} times)" if times > 1 else reason
                try:
                    if times:
                        await self._journal.refuse(*kind, said)
                except DulyError:  # the ledger is away: it is recorded when it is back
                    self._count(kind, reason, times)
                    return

    def _take(self, kind: tuple[str, str, str], reason: str) -> int:
        """How often it happened, which is no longer counted then; 0 if it was counted with another since."""
        reasons = self._counts.get(kind, {})
        times = reasons.pop(reason, 0)
        self._rows -= times > 0
        if not reasons:
            self._counts.pop(kind, None)
        return times
