"""Statements of a caller's transaction that were never awaited: without an error they would be lost, and the
transaction would commit without them."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from inspect import CORO_CREATED, getcoroutinestate
from typing import TypeVar

from duly.errors import ProgramError

T = TypeVar("T")


class AwaitedCalls:
    """The statements that a caller has asked for and may not have awaited yet."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: deque[Coroutine[object, None, object]] = deque()

    def add(self, call: Coroutine[object, None, T]) -> Coroutine[object, None, T]:
        """Keep a call until it has begun, and return it."""
        made = self._made
        with suppress(IndexError):  # empty, perhaps by the same work of another thread
            while getcoroutinestate(made[0]) != CORO_CREATED:
                _ = made.popleft()
        made.append(call)
        return call

    def check(self) -> None:
        """Raise if a call was not awaited."""
        forgotten = [call for call in self._made if getcoroutinestate(call) == CORO_CREATED]
        for call in forgotten:
            call.close()
        if forgotten:
            raise ProgramError(
                "a statement was not awaited, so the transaction was rolled back; write 'await tx.execute(…)'"
            )
