"""Stops the parts of a hub, the last one first, in a bounded time.

Each part may finish its work while there is time; then it is cancelled, which is as safe as a kill:
everything that was accepted is stored. So a hub ends soon whatever its database does, before a service
manager kills it together with its broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from duly.errors import LedgerError

LOG: Final = logging.getLogger("duly.server")

STOP_SECONDS: Final = 4.0
"""How long all parts together may take to finish their work."""
PART_SECONDS: Final = 1.0
"""How long each part may take even after that: enough to close connections."""
LEDGER_SECONDS: Final = 3.0
"""The same for the ledger, which is last: what was handed to it is committed if the database answers."""


class Shutdown:
    """The parts of one hub that were started, and how each is stopped."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Callable[[], Awaitable[None]], float]] = []

    def add(self, name: str, stop: Callable[[], Awaitable[None]], least: float | None = None) -> None:
        """Stop this part before those that were added earlier. It may take `least` seconds in any case."""
        self._parts.append((name, stop, PART_SECONDS if least is None else least))

    def call(self, name: str, function: Callable[[], None]) -> None:
        """Stop a part, as `add` does, by a function that does not wait."""

        async def stop() -> None:
            function()

        self.add(name, stop)

    async def run(self) -> None:
        """Stop everything. A part that fails does not prevent the others from being stopped; its failure is
        raised at the end, unless the ledger is merely unreachable."""
        over = asyncio.get_running_loop().time() + STOP_SECONDS
        failures: list[Exception] = []
        while self._parts:
            name, stop, least = self._parts.pop()
            try:
                async with asyncio.timeout_at(max(over, asyncio.get_running_loop().time() + least)):
                    await stop()
            except TimeoutError:
                LOG.warning("%s did not end in time and was cancelled; what was accepted is stored", name)
            except LedgerError as problem:
                LOG.warning("%s ended without the ledger: %s", name, problem)
            except Exception as problem:
                failures.append(problem)
        if failures:
            raise failures[0]
