"""The callers that wait for the outcome of a message.

A waiting caller is woken when its message changes; it then queries the ledger again. So a caller that is
woken once too often is harmless, and nothing here is authoritative.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from duly.core.operations import Advance, AppendEntry, DeliveryRef, Postpone, Results, Withdraw, Write


class OutcomeWaiters:
    """The waiting callers of one ledger, by the key of their message."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, list[asyncio.Future[None]]] = {}

    @contextmanager
    def watch(self, key: bytes) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done when the message changes."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.by_key.setdefault(key, []).append(news)
        try:
            yield news
        finally:
            waiting = self.by_key.get(key)
            if waiting is not None and news in waiting:
                waiting.remove(news)
                if not waiting:
                    del self.by_key[key]

    def learn(self, committed: Iterable[Results]) -> None:
        """Wake the callers whose messages were changed by these groups."""
        for results in committed:
            for operation, result in zip(results.operations, results.values, strict=True):
                self._learn(operation, result)

    def _learn(self, operation: Write, result: Any) -> None:
        """Wake the callers that wait for a message which this operation ended, withdrew or postponed."""
        match operation:
            case Advance(key=key, to=to):
                if result.moved and to.terminal:
                    self.wake(key)
            case AppendEntry(ends=True, key=key) | Withdraw(key=key) | Postpone(ref=DeliveryRef(key=key)):
                if result:
                    self.wake(key)

    def wake(self, key: bytes) -> None:
        """Wake the callers that wait for this key: they query the ledger again."""
        for future in self.by_key.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """Wake all waiting callers: the ledger is closed, and their next query raises that error."""
        for key in list(self.by_key):
            self.wake(key)
