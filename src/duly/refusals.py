"""Refusals that may come in floods: counted, and recorded now and then.

The law: every refusal is counted and its kind recorded with a reason [P5], and no flood of them fills the
journal or makes anybody wait: at most `KINDS` rows in `PERIOD` seconds, each with how often it happened.
"""

from __future__ import annotations

import asyncio
from typing import Final

from duly.core.acl import HUB
from duly.errors import DulyError
from duly.journal import Journal
from duly.tasks import Supervisor

PERIOD: Final = 5.0
KINDS: Final = 50
REST: Final = "(others)"
"""The id under which refusals are counted that are too many kinds."""


class RefusalTally:
    """Records refusals in the background, together where they are alike."""

    def __init__(self, journal: Journal, tasks: Supervisor | None = None, *, period: float = PERIOD) -> None:
        self._journal = journal
        self._period = period
        self._tasks = tasks or Supervisor()
        self._counts: dict[tuple[str, str, str], tuple[int, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self.total = 0

    def note(self, scope: str, id_: str, word: str, reason: str) -> None:
        """This was refused. The first of a kind is recorded at once, later ones within `period`."""
        self.total += 1
        key = (scope, id_, word)
        if key not in self._counts and len(self._counts) >= KINDS:
            key = (HUB, REST, word)
        before, _ = self._counts.get(key, (0, ""))
        self._counts[key] = (before + 1, reason)
        if self._task is None or self._task.done():
            self._task = self._tasks.do("record of refusals", self._record())

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
            count, reason = self._counts.pop(kind)
            said = reason if count == 1 else f"{reason} ({count:,} times)"
            try:
                await self._journal.refuse(*kind, said)
            except DulyError:  # the ledger is away: it is recorded when it is back
                later, _ = self._counts.get(kind, (0, ""))
                self._counts[kind] = (count + later, reason)
                return
