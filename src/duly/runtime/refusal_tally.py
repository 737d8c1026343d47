"""Counts refusals that may come in floods, and records them periodically.

Every refusal is counted, and its kind is recorded with its reasons [P5]. A flood of refusals neither fills
the disk nor delays other work: it becomes about `KINDS` rows per `PERIOD` seconds, each with its count and
the time of the last one. Before refusals are shown, those still counted are recorded (`ActivityLog.settle`).
"""

from __future__ import annotations

import asyncio
from typing import Final

from duly.core.acl import HUB
from duly.errors import DulyError
from duly.runtime.activity_log import ActivityLog
from duly.runtime.tasks import Supervisor

PERIOD: Final = 5.0
"""Seconds between two records."""
KINDS: Final = 50
"""How many kinds of refusals get their own row in one period."""
REASONS: Final = 5
"""How many reasons of one kind get their own row; further ones are counted with the last of them."""
REST: Final = "(others)"
"""The id under which the refusals of further kinds are counted."""


class RefusalTally:
    """Records refusals in the background; those of one kind and reason become one row."""

    def __init__(
        self, activity: ActivityLog, tasks: Supervisor | None = None, *, period: float = PERIOD
    ) -> None:
        self._activity = activity
        self._period = period
        self._tasks = tasks or Supervisor()
        self._counts: dict[tuple[str, str, str], dict[str, tuple[int, int]]] = {}
        """by scope, id and word: how often each reason was given, and when last"""
        activity.unrecorded.append(self._write)
        self._rows = 0
        self._task: asyncio.Task[None] | None = None
        self.total = 0

    def note(self, scope: str, id_: str, word: str, reason: str) -> None:
        """Count a refusal. It is recorded at once if nothing was refused just before, otherwise within
        `period`."""
        self.total += 1
        self._count((scope, id_, word), reason, 1, self._activity.now())
        if self._task is None or self._task.done():
            self._task = self._tasks.do("record of refusals", self._record())

    def _count(self, kind: tuple[str, str, str], reason: str, times: int, at: int) -> None:
        reasons = self._counts.get(kind)
        if reasons is None:
            if self._rows >= KINDS:
                kind = (HUB, REST, kind[2])
            reasons = self._counts.setdefault(kind, {})
        if reason not in reasons and reasons and (len(reasons) >= REASONS or self._rows >= KINDS):
            times += reasons.pop(next(reversed(reasons)))[0]
            self._rows -= 1
        self._rows += reason not in reasons
        before, last = reasons.get(reason, (0, 0))
        reasons[reason] = (before + times, max(last, at))

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
                times, at = self._take(kind, reason)
                counted = f"{reason} ({times:,} times)" if times > 1 else reason
                try:
                    if times:
                        await self._activity.refuse(*kind, counted, at)
                except DulyError:  # the ledger cannot be used: it is recorded later
                    self._count(kind, reason, times, at)
                    return

    def _take(self, kind: tuple[str, str, str], reason: str) -> tuple[int, int]:
        """Remove a reason and return its count and time; the count is 0 if it was merged with another reason
        meanwhile."""
        reasons = self._counts.get(kind, {})
        times, at = reasons.pop(reason, (0, 0))
        self._rows -= times > 0
        if not reasons:
            self._counts.pop(kind, None)
        return times, at
