"""A notifier over PostgreSQL's LISTEN and NOTIFY, which needs no server besides the ledger's.

It uses one connection, outside any transaction, so that no hint waits for a commit and no commit for a hint:
PostgreSQL commits notifying transactions one at a time. When the connection breaks, it reconnects.

A connection carries one statement at a time, and asyncpg fails with `InternalClientError` when two tasks use
it, so statements take turns.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from duly.cluster.notifier import Notifier
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.extras import needed_for
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import SupervisedTask

with needed_for("a notifier over PostgreSQL"):
    import asyncpg

CHANNEL: Final = "duly_notifier"
AGAIN: Final = RetryPolicy.exponential(100 * MS, 5 * SECOND)
SEND_SECONDS: Final = 0.5
"""A hint that takes longer is dropped: the other hubs have read the ledger by then."""
ALIVE_SECONDS: Final = 10.0
"""How long the connection may be quiet before it is tested."""
ANSWER_SECONDS: Final = 5.0
SESSION: Final = {"application_name": "duly notifier", "synchronous_commit": "off"}
"""A notification is committed like a row but need not be flushed: a hint may be lost."""
TROUBLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)


class _ListenConnection:
    """A connection whose statements take turns."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()

    async def execute(self, statement: str, *args: object, within: float) -> None:
        """Carry out one statement, after those before it; `TimeoutError` when that takes too long."""
        async with asyncio.timeout(within), self._turn:
            await self._connection.execute(statement, *args)


class PostgresNotifier(Notifier):
    """Hints as notifications of one channel of a database."""

    def __init__(self, me: str, url: str) -> None:
        super().__init__(me)
        self._url = url
        self._connected: _ListenConnection | None = None
        self._listening: SupervisedTask | None = None

    async def start(self) -> None:
        """Connect and listen, supervised."""
        self._listening = self.tasks.spawn("notifier", self._listen)

    async def stop(self) -> None:
        """Stop listening, then sending."""
        if self._listening is not None:
            await self._listening.stop()
        await super().stop()

    async def _listen(self) -> None:
        backoff = Backoff(AGAIN, self._me)
        while True:
            connection = None
            gone = asyncio.Event()
            try:
                connection = await asyncpg.connect(
                    self._url, timeout=ANSWER_SECONDS, command_timeout=ANSWER_SECONDS,
                    server_settings=SESSION,
                )  # fmt: skip
                connection.add_termination_listener(lambda _, gone=gone: gone.set())
                await connection.add_listener(CHANNEL, self._note)
                current = self._connected = _ListenConnection(connection)
                self.problem = ""
                backoff.worked()
                while not gone.is_set():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ALIVE_SECONDS):
                            await gone.wait()
                        break
                    await current.execute("SELECT 1", within=ANSWER_SECONDS)
                self.problem = "PostgreSQL has closed the connection"
            except TROUBLE as trouble:
                self.problem = str(trouble) or type(trouble).__name__
            finally:
                self._connected = None
                if connection is not None:
                    connection.terminate()
            await backoff.wait()

    def _note(self, _connection: object, _pid: int, _channel: str, note: object) -> None:
        self.receive(str(note))

    async def _send(self, note: bytes) -> None:
        current = self._connected
        if current is not None:
            with suppress(*TROUBLE):
                await current.execute("SELECT pg_notify($1, $2)", CHANNEL, note.decode(), within=SEND_SECONDS)
