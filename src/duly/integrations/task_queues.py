"""What the decorators of all task queues share: a function runs once per message of its queue.

The law: the key is the queue's own id of the message, which every delivery of it has. Outside a worker there
is no message, and the function runs as it is: tests call it as before. A worker in which the message is not
known, because a middleware is missing, gets an error: otherwise its tasks would run twice without a word.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, cast

from duly.errors import ProgramError
from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import DeclaredEffect
from duly.idempotency.values import name_of
from duly.run_once import once

F = TypeVar("F", bound=Callable[..., object])

KEEP: Final = 7 * 86_400.0
"""Seconds that an id is remembered: longer than any queue keeps a message."""
LEASE: Final = 30.0


def per_message(
    queue: str,
    message_id: Callable[..., str | None],
    ledger: LedgerSource,
    effect: DeclaredEffect,
    keep: float,
    lease: float,
) -> Callable[[F], F]:
    """Return the decorator of a queue. `message_id` gets the arguments of the call, and returns the id of the
    message that is being worked on, or None outside a worker."""

    def runs_once(scope: str) -> Callable[[F], F]:
        made = once(ledger, scope=scope, key=message_id, effect=effect, keep=keep, lease=lease, meaning=_same)
        return cast("Callable[[F], F]", made)

    runs_once(queue)  # wrong options are told before the queue registers what is returned here

    def decorate(function: F) -> F:
        if not inspect.isroutine(function):
            raise ProgramError(
                f"{name_of(function)} is not a plain function; put this decorator next to the function, "
                f"below the one that makes it a task of {queue}"
            )
        run = runs_once(f"{queue}/{function.__module__}.{function.__qualname__}")(function)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*args: object, **kwargs: object) -> object:
                chosen = function if message_id(*args, **kwargs) is None else run
                return await cast("Awaitable[object]", chosen(*args, **kwargs))

            return cast("F", later)

        @functools.wraps(function)
        def now(*args: object, **kwargs: object) -> object:
            chosen = function if message_id(*args, **kwargs) is None else run
            return chosen(*args, **kwargs)

        return cast("F", now)

    return decorate


def _same(*_: object, **__: object) -> str:
    """Return the same text for all arguments: the queue promises that a message of one id has one content, so
    arguments need not be JSON."""
    return ""
