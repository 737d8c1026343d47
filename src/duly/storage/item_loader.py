"""Reads the current value of single items in buckets, many with one query.

The law: items are never cached; each is read after the caller asked for it, so the caller sees what another
hub has just written. All requests of one turn of the event loop, or of the time that a read takes, become one
query: a flood of requests makes the query longer, not more frequent. If a read finds the ledger unavailable,
the callers that asked meanwhile get the same error: a read of their own would make them wait twice as long.
Every caller gets an answer or an error of its own; an error that one caller's request causes fails only that
caller.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from duly.errors import LedgerError, LedgerUnavailable, Stopped
from duly.runtime.tasks import report
from duly.storage.ledger import Ledger

Place: TypeAlias = tuple[str, str]
"""A bucket, and the name of an item in it."""
_Asked: TypeAlias = tuple[tuple[Place, ...], asyncio.Future[list[bytes | None]]]


class ItemLoader:
    """Reads items of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._asked: list[_Asked] = []
        self._reading: asyncio.Task[None] | None = None

    async def get(self, *places: Place) -> list[bytes | None]:
        """Return the items at these places, in the same order, with None for each that does not exist."""
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
            try:
                await self._answer(asked)
            except BaseException:  # the program ends
                left, self._asked = asked + self._asked, []
                _fail(left, Stopped("the program ended before the ledger had answered"))
                raise

    async def _answer(self, asked: list[_Asked]) -> None:
        """Answer these callers with one read, or with one each if their common read cannot be done."""
        places = list(dict.fromkeys(place for some, _ in asked for place in some))
        try:
            found = dict(zip(places, await self._ledger.items(places), strict=True))
        except LedgerError as problem:
            if isinstance(problem, LedgerUnavailable):
                asked, self._asked = asked + self._asked, []
            _fail(asked, problem)
        except Exception as problem:
            if len(asked) == 1:
                _fail(asked, problem)
                return
            for one in asked:
                await self._answer([one])
        else:
            for some, answer in asked:
                if not answer.done():
                    answer.set_result([found[place] for place in some])


def _fail(asked: list[_Asked], problem: Exception) -> None:
    for _, answer in asked:
        if not answer.done():
            answer.set_exception(problem)
