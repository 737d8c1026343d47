"""Backoff: the pause between two tries of what nobody stores, such as a connection.

The law: what is durable waits in the ledger, by a time that survives us (`core/retry.py`). A connection is
not durable; whoever makes one again waits here, by the same RetryPolicy, and begins anew once it worked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from duly.core.retry import RetryPolicy
from duly.core.units import SECOND


class Backoff:
    """The tries so far, and the wait before the next.

    backoff = Backoff(RECONNECT, token)
    while not stopping.is_set():
        with suppress(OSError):
            async with connect() as connection:
                backoff.worked()
                await serve(connection)
        await backoff.wait(stopping)
    """

    def __init__(self, policy: RetryPolicy, salt: str = "") -> None:
        self._policy = policy
        self._salt = salt.encode()
        self._tries = 0

    def worked(self) -> None:
        """The next failure is a first one again."""
        self._tries = 0

    async def wait(self, stopping: asyncio.Event | None = None, *, among: int = 1) -> bool:
        """After a try that failed: until the next is due, or we are told to stop. Where there are several to
        be tried, all of them are before the wait grows. False if there is no next try."""
        pause = self.pause(among=among)
        if pause is None:
            return False
        if stopping is None:
            await asyncio.sleep(pause)
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
        return True

    def pause(self, *, among: int = 1) -> float | None:
        """After a try that failed: the seconds until the next is due, for callers that set a timer; None if
        there is no next try."""
        self._tries += 1
        delay = self._policy.delay(1 + (self._tries - 1) // among, self._salt)
        return None if delay is None else delay / SECOND
