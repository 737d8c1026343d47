"""Reads single items of buckets, as they stand now.

The law: an item is read after it was asked for, never remembered, so what another hub has just written is
seen. Everything that is asked for in one turn of the event loop, or while a read is under way, is one
question to the ledger: a flood makes the question longer, not more. A read that finds the ledger unavailable
also answers those who asked meanwhile: a read of their own would keep them waiting twice as long.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from duly.errors import DulyError, LedgerUnavailable
from duly.runtime.tasks import report
from duly.storage.ledger import Ledger

Place: TypeAlias = tuple[str, str]
"""A bucket, and the name of an item on it."""
_Asked: TypeAlias = tuple[tuple[Place, ...], asyncio.Future[list[bytes | None]]]


class ItemLoader:
    """Reads items of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._asked: list[_Asked] = []
        self._reading: asyncio.Task[None] | None = None

    async def get(self, *places: Place) -> list[bytes | None]:
        """Return the items at these places, in the same order; None where there is none."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[bytes | None]] = loop.create_future()
        self._asked.append((places, answer))
        if self._reading is None or self._reading.done():
            self._reading = loop.create_task(self._read())
            self._reading.add_done_callback(report("reading items"))
        return await answer

    async def _read(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            places = list(dict.fromkeys(place for some, _ in asked for place in some))
            try:
                found = dict(zip(places, await self._ledger.items(places), strict=True))
            except DulyError as problem:
                if isinstance(problem, LedgerUnavailable):
                    asked, self._asked = asked + self._asked, []
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(problem)
                continue
            except BaseException:
                for _, answer in asked:
                    answer.cancel()
                raise
            for some, answer in asked:
                if not answer.done():
                    answer.set_result([found[place] for place in some])
