"""A signal that something may have changed: the owner sends it, and waiting tasks check again.

The law: a task that reads the state and then waits misses no change, provided that it awaits nothing else in
between.
"""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes all waiting tasks whenever something may have changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wake the tasks that wait now; a task that starts to wait later waits for the next change."""
        self._event.set()
        self._event.clear()

    async def wait(self) -> None:
        """Wait for the next change."""
        await self._event.wait()
