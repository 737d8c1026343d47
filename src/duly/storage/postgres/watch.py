"""Watches statements sent to PostgreSQL, to distinguish a server that does not answer from a slow one.

The laws. A statement may take long as long as the server accepts connections: when one takes longer than
`SLOW_SECONDS`, the watch opens a separate connection to check that. If the server does not answer this within
`ANSWER_SECONDS` either, or the network reports that it cannot reach the machine, the server is unreachable,
and every waiting connection is closed: its statements fail within five seconds, and none waits for a TCP
connection that the other side never closes. From then on the ledger is unfit for use until the server answers
again, so callers need not wait for a connection.

A commit on a connection that was closed in this way is in doubt: its bytes may be under way, and arrive when
the server is back. So before any further query the server process of that connection is terminated
(`DoubtfulCommits`); after that the tables show whether the commit took place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from socket import gaierror
from typing import Any, Final, TypeAlias

from duly.errors import LedgerUnavailable
from duly.extras import needed_for
from duly.runtime.tasks import report
from duly.storage import sql

with needed_for("a ledger in PostgreSQL"):
    import asyncpg
    from asyncpg import connect_utils

__all__ = ["DoubtfulCommits", "ServerProcess", "StatementWatch", "asyncpg", "process_of"]

SLOW_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 2.5
"""How long a connection may take to be made."""
CHECK_SECONDS: Final = 0.25
HEARTBEAT_SECONDS: Final = 1.0
"""How often a slow server is checked again."""
END_SECONDS: Final = 3.0
"""How long a server process may take to end."""
_CLIENT_ERRORS: Final = (asyncpg.InterfaceError, asyncpg.InternalClientError)


ServerProcess: TypeAlias = tuple[int, datetime]
"""A server process of PostgreSQL: its id and its start time, since ids are reused."""


class StatementWatch:
    """The statements that wait for an answer, over any number of connections to one server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: dict[int, tuple[Any, float]] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._last = float("-inf")
        self.silent = False
        """whether the last check failed, and the server has answered nothing since"""

    @contextmanager
    def over(self, connection: Any) -> Iterator[None]:
        """Watch the statement that this block runs on the connection."""
        loop = asyncio.get_running_loop()
        self._count += 1
        number = self._count
        self._waiting[number] = (connection, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(CHECK_SECONDS, self._check)
        try:
            yield
            self.silent = False
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def _check(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        slow = now - next(iter(self._waiting.values()))[1] > SLOW_SECONDS
        if slow and self._heartbeat is None and now - self._last >= HEARTBEAT_SECONDS:
            self._last = now
            self._heartbeat = loop.create_task(self._ask())
            self._heartbeat.add_done_callback(report("asking whether PostgreSQL lives"))
        self._timer = loop.call_later(CHECK_SECONDS, self._check)

    async def _ask(self) -> None:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await asyncpg.connect(self._url, timeout=ANSWER_SECONDS)
            connection.terminate()
            self.silent = False
        except (ConnectionError, gaierror, asyncpg.PostgresError, *_CLIENT_ERRORS):
            pass  # a refusal is an answer as well, from the server or its machine; no address says nothing
        except OSError:  # no answer in time, or the network cannot reach the machine
            self.silent = True
            for connection, since in list(self._waiting.values()):
                if since <= began:
                    with suppress(asyncpg.InterfaceError):
                        connection.terminate()
        finally:
            self._heartbeat = None


class DoubtfulCommits:
    """The server processes whose last commit has an unknown outcome."""

    def __init__(self, url: str, connecting: dict[str, Any]) -> None:
        self._url, self._connecting = url, connecting
        self._processes: set[ServerProcess] = set()
        self._settling: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._processes)

    def add(self, process: ServerProcess) -> None:
        """Add a server process that must be terminated before anything is read again."""
        self._processes.add(process)

    async def settle(self) -> None:
        """Terminate these processes; a transaction that they have not committed by then is never committed.

        Callers during an attempt share its outcome: with one attempt each, the last of ten callers would wait
        ten times as long."""
        while self._processes:
            if self._settling is None or self._settling.done():
                self._settling = asyncio.get_running_loop().create_task(self._settle())
                self._settling.add_done_callback(_retrieve)
            await asyncio.shield(self._settling)

    async def _settle(self) -> None:
        connection = await asyncpg.connect(self._url, **self._connecting)
        try:
            async with asyncio.timeout(END_SECONDS):
                for process in list(self._processes):
                    await self._end(connection, process)
                    self._processes.discard(process)
        except TimeoutError:
            raise LedgerUnavailable(
                "a PostgreSQL process that may still commit a write of this program has not ended, and "
                "nothing is read before it has. Try again"
            ) from None
        finally:
            connection.terminate()

    async def _end(self, connection: Any, process: ServerProcess) -> None:
        while True:
            try:
                found = await connection.fetch(sql.queries("postgres")["end_backend"], *process)
            except asyncpg.InsufficientPrivilegeError:
                return  # another user has the process now: the server is behind a connection pooler
            if not found:
                return
            await asyncio.sleep(0.02)


async def process_of(connection: Any) -> ServerProcess:
    """Return the server process of a connection."""
    ((pid, began),) = await connection.fetch(sql.queries("postgres")["own_backend"])
    return pid, began


class _AbandonedUpgrade(connect_utils.TLSUpgradeProto):
    """Asks a server for TLS, and retrieves its own error if the connection attempt was cancelled meanwhile.

    asyncpg waits for the answer in a future. If the attempt is cancelled at the moment when TCP connects,
    asyncpg has not begun to wait: the connection is closed, the future fails, and asyncio logs "Future
    exception was never retrieved". An attempt that does wait gets the error as before."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the future, and retrieve its error in case no attempt waits for it any more."""
        super().connection_lost(exc)
        if not self.on_data.cancelled():
            self.on_data.exception()


connect_utils.TLSUpgradeProto = _AbandonedUpgrade  # type: ignore[misc]  # asyncpg offers no other place


def _retrieve(attempt: asyncio.Task[None]) -> None:
    """Retrieve the outcome of an attempt whose callers may all have been cancelled."""
    if not attempt.cancelled():
        attempt.exception()
