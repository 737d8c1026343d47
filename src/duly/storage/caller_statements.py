"""The statements of a caller's transaction.

The law: a statement that was never awaited fails the transaction. Without an error the statement would be
lost, and the transaction would commit without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, TypeAlias, TypeVar

from duly.errors import ProgramError

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
"""The columns of a row, or the arguments of a statement."""


class CallerStatements(ABC):
    """Base of the transactions of callers: runs their statements."""

    def __init__(self) -> None:
        self._asked: deque[Coroutine[object, None, object]] = deque()
        """the statements that the caller may not have awaited yet"""

    def execute(self, statement: str, *args: object) -> Coroutine[object, None, None]:
        """Run a statement."""
        return self._ask(self._execute(statement, args))

    def fetch(self, statement: str, *args: object) -> Coroutine[object, None, list[Row]]:
        """Run a statement and return its rows."""
        return self._ask(self._fetch(statement, args))

    def check_awaited(self) -> None:
        """Raise if a statement was not awaited."""
        forgotten = [call for call in self._asked if getcoroutinestate(call) == CORO_CREATED]
        for call in forgotten:
            call.close()
        if forgotten:
            raise ProgramError(
                "a statement was not awaited, so the transaction was rolled back; write 'await tx.execute(…)'"
            )

    @abstractmethod
    async def _fetch(self, statement: str, args: Row) -> list[Row]:
        """Run a statement and return its rows."""

    async def _execute(self, statement: str, args: Row) -> None:
        await self._fetch(statement, args)

    def _ask(self, call: Coroutine[object, None, T]) -> Coroutine[object, None, T]:
        asked = self._asked
        with suppress(IndexError):  # empty, perhaps by the same work of another thread
            while getcoroutinestate(asked[0]) != CORO_CREATED:
                _ = asked.popleft()
        asked.append(call)
        return call
