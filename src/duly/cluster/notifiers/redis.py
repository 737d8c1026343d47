"""A notifier over Redis pub/sub.

Redis may be killed, flushed, paused or unplugged at any time: then only hints are lost. One connection
listens and another one sends, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from duly.cluster.notifier import Notifier
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import Malformed
from duly.extras import needed_for
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import SupervisedTask

with needed_for("a notifier over Redis"):
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

CHANNEL: Final = "duly:notifier"
AGAIN: Final = RetryPolicy.exponential(100 * MS, 5 * SECOND)
SEND_SECONDS: Final = 0.5
"""A hint that takes longer is dropped: the other hubs have read the ledger by then."""
PING_SECONDS: Final = 5.0
"""A Redis server that hangs keeps its connections open; only a ping detects that."""
TROUBLE: Final = (RedisError, OSError, TimeoutError, RuntimeError)


class RedisNotifier(Notifier):
    """Hints as messages of one channel of a Redis server."""

    def __init__(self, me: str, url: str) -> None:
        super().__init__(me)
        self._url = url
        try:
            self._out = self._connection()
        except ValueError as problem:
            raise Malformed(f"this is not the address of a Redis: {problem}") from None
        self._listening: SupervisedTask | None = None

    def _connection(self) -> Any:
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        # No retries: a delayed hint is worthless. No time limit either: redis-py implements it with
        # `asyncio.wait_for`, which swallows a cancellation before Python 3.12.
        return Redis.from_url(
            self._url,
            socket_connect_timeout=2,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            max_connections=2,
        )

    async def start(self) -> None:
        """Connect and listen, supervised."""
        self._listening = self.tasks.spawn("notifier", self._listen)

    async def stop(self) -> None:
        """Stop listening, then sending, and close both connections."""
        if self._listening is not None:
            await self._listening.stop()
        await super().stop()
        with suppress(*TROUBLE):
            await self._out.aclose()

    async def _listen(self) -> None:
        backoff = Backoff(AGAIN, self._me)
        while True:
            connection = self._connection()
            try:
                async with connection.pubsub() as subscription:
                    async with asyncio.timeout(PING_SECONDS):
                        await subscription.subscribe(CHANNEL)
                    asked = False
                    while True:
                        message = await subscription.get_message(timeout=PING_SECONDS)
                        if message is None:
                            if asked:
                                raise TimeoutError("it does not answer")
                            asked = True
                            async with asyncio.timeout(PING_SECONDS):
                                await subscription.ping()
                            continue
                        asked = False
                        self.problem = ""
                        backoff.worked()
                        if message["type"] == "message":
                            self.receive(message["data"])
            except TROUBLE as problem:
                self.problem = str(problem) or type(problem).__name__
            finally:
                with suppress(*TROUBLE):
                    await connection.aclose()
            await backoff.wait()

    async def _send(self, note: bytes) -> None:
        with suppress(*TROUBLE):
            async with asyncio.timeout(SEND_SECONDS):
                await self._out.publish(CHANNEL, note)
