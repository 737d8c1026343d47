"""A snapshot of a PostgreSQL ledger: a read-only transaction that sees no later change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Final

from duly.errors import LedgerInUse, LedgerUnavailable, Malformed
from duly.storage import sql
from duly.storage.postgres.ledger import CONNECTING, GONE, translated_postgres
from duly.storage.postgres.watch import asyncpg
from duly.storage.snapshot import BATCH, TABLES, LedgerTable, Snapshot, StoredRow

SLOW_SECONDS: Final = 600
"""How long one query may take, such as the count of a large table."""


class PostgresSnapshot(Snapshot):
    """A PostgreSQL ledger at one moment, while hubs write it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str, *, locked: bool = False) -> PostgresSnapshot:
        """Open a snapshot of the database. With `locked`, no process can write the ledger until the snapshot
        is closed; raises if a process is writing now."""
        queries = sql.queries("postgres")
        try:
            with translated_postgres():
                connection = await asyncpg.connect(url, **CONNECTING | {"command_timeout": SLOW_SECONDS})
        except ValueError as problem:
            raise Malformed(f"this is not the address of a PostgreSQL database: {problem}") from None
        snapshot = cls(connection)
        try:
            with translated_postgres():
                if not await connection.fetchval(queries["has_schema"]):
                    raise LedgerUnavailable(
                        "there is no ledger in this database yet; a first 'duly up' makes it"
                    )
                (row,) = await connection.fetch(queries["describe"])
                snapshot.engine, snapshot.schema = row
                if sql.pending("postgres", snapshot.schema):
                    raise LedgerUnavailable(
                        f"this ledger was written by an older duly (schema {snapshot.schema}); start a hub "
                        "of this version on it, and it is upgraded"
                    )
                await snapshot._begin(locked)
        except BaseException:
            await snapshot.close()
            raise
        return snapshot

    async def _begin(self, locked: bool) -> None:
        """Begin the transaction that sees the ledger at one moment."""
        if locked and (others := await self._connection.fetchval(sql.queries("postgres")["other_processes"])):
            raise LedgerInUse(
                f"other processes of duly use this ledger ({others} connections are open); stop its "
                "hubs first"
            )
        await self._connection.transaction(isolation="repeatable_read", readonly=not locked).start()
        if locked:
            tables = ", ".join(f"duly_{table.name}" for table in TABLES)
            try:
                await self._connection.execute(f"LOCK TABLE {tables} IN EXCLUSIVE MODE NOWAIT")
            except asyncpg.LockNotAvailableError:
                raise LedgerInUse("another process writes this ledger; stop its hubs first") from None

    async def rows(self, table: LedgerTable) -> AsyncIterator[Sequence[StoredRow]]:
        """Yield the rows of a table in order, some at a time."""
        columns = ", ".join(table.columns)
        with translated_postgres():
            cursor = await self._connection.cursor(
                f"SELECT {columns} FROM duly_{table.name} ORDER BY {table.order}"
            )
        while True:
            with translated_postgres():
                found = await cursor.fetch(BATCH)
            if not found:
                return
            yield [tuple(row) for row in found]

    async def count(self, table: LedgerTable) -> int:
        """Return how many rows a table has."""
        with translated_postgres():
            return int(await self._connection.fetchval(f"SELECT count(*) FROM duly_{table.name}"))

    async def problems(self) -> list[tuple[str, str]]:
        """Return the indexes that PostgreSQL calls invalid."""
        with translated_postgres():
            found = await self._connection.fetch(sql.queries("postgres")["invalid_indexes"])
        return [("file-sound", f"the index {name} is not valid; REINDEX it") for (name,) in found]

    async def close(self) -> None:
        """Close the connection."""
        with suppress(*GONE):
            await self._connection.close(timeout=5)
