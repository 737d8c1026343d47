"""The pause between two tries of something that is not stored, such as a connection.

Durable retries wait in the ledger, until a time that survives a restart (`core/retry.py`). A connection is
not durable: it is retried after a pause by the same `RetryPolicy`, which starts over once a connection has
worked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from duly.core.retry import RetryPolicy
from duly.core.units import SECOND


class Backoff:
    """Counts failed tries and waits before the next one.

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
        """Start over: the next failure counts as the first one."""
        self._tries = 0

    async def wait(self, stopping: asyncio.Event | None = None, *, among: int = 1) -> bool:
        """Wait after a failed try until the next one is due, or until `stopping` is set. Among several
        addresses all are tried before the wait grows. Returns False if there is no next try."""
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
        """Return the seconds after a failed try until the next one is due, for callers that set a timer; None
        if there is no next try."""
        self._tries += 1
        delay = self._policy.delay(1 + (self._tries - 1) // among, self._salt)
        return None if delay is None else delay / SECOND
