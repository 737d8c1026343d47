"""Fills an empty ledger with rows, for copies, imports and restores.

All rows are written in one transaction: afterwards the ledger holds all of them, or is as empty as before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from duly.errors import LedgerError
from duly.storage.ledger import Ledger, Transaction
from duly.storage.snapshot import FLOOR, TABLES, LedgerTable, StoredRow, Summaries, TableDigest
from duly.storage.sql.ledger import SqlLedger

_POSTGRES_TYPES: Final = {"bytes": "bytea", "str": "text", "int": "bigint", "bool": "boolean"}
SQLITE_VALUES: Final = 2_000
"""The most values in one SQLite statement."""


class LedgerLoader:
    """Writes rows into an empty ledger, within one transaction."""

    def __init__(self, tx: Transaction, dialect: str) -> None:
        self._tx = tx
        self._dialect = dialect
        self.digests = {table.name: TableDigest() for table in TABLES}

    @property
    def _prefix(self) -> str:
        return "duly_" if self._dialect == "postgres" else ""

    async def begin(self) -> None:
        """Lock out other writers; raise if the ledger is not empty."""
        if self._dialect == "postgres":
            names = ", ".join(f"duly_{table.name}" for table in TABLES)
            await self._tx.execute(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
        for table in TABLES:
            if table is not FLOOR and await self._tx.fetch(
                f"SELECT 1 FROM {self._prefix}{table.name} LIMIT 1"
            ):
                raise LedgerError(
                    f"the target is not empty: it has rows in {table.name}. Name a new file or database; "
                    "nothing was changed"
                )
        await self._tx.execute(f"DELETE FROM {self._prefix}{FLOOR.name}")

    async def add(self, table: LedgerTable, rows: Sequence[StoredRow]) -> None:
        """Write some rows of a table, or none."""
        if not rows:
            return
        self.digests[table.name].add(rows)
        columns = dict(table.columns)
        if self._dialect == "postgres":
            await self._add_to_postgres(table, columns, rows)
            return
        names = ", ".join((*columns, *(["only"] if table is FLOOR else [])))
        most = SQLITE_VALUES // len(columns)
        marks = ", ".join((*"?" * len(columns), *(["1"] if table is FLOOR else [])))
        for at in range(0, len(rows), most):
            some = rows[at : at + most]
            values = ", ".join([f"({marks})"] * len(some))
            flat = [value for row in some for value in row]
            await self._tx.execute(f"INSERT INTO {table.name} ({names}) VALUES {values}", *flat)

    async def _add_to_postgres(
        self, table: LedgerTable, columns: dict[str, str], rows: Sequence[StoredRow]
    ) -> None:
        names = ", ".join((*columns, *(["one"] if table is FLOOR else [])))
        kinds = ", ".join(
            f"${n}::{_POSTGRES_TYPES[kind.rstrip('?')]}[]" for n, kind in enumerate(columns.values(), 1)
        )
        chosen = ", ".join((*(f"new.{name}" for name in columns), *(["1"] if table is FLOOR else [])))
        await self._tx.execute(
            f"INSERT INTO duly_{table.name} ({names}) SELECT {chosen} FROM unnest({kinds}) WITH ORDINALITY "
            f"AS new ({', '.join(columns)}, place) ORDER BY new.place",
            *map(list, zip(*rows, strict=True)),
        )


Source = Callable[[LedgerTable], AsyncIterator[Sequence[StoredRow]]]


async def fill(
    ledger: Ledger, source: Source, progress: Callable[[int], None] = lambda rows: None
) -> Summaries:
    """Write all rows of a source into an empty ledger, or none; return row counts and digests by table."""
    if not isinstance(ledger, SqlLedger):
        raise LedgerError("only a ledger in SQLite or PostgreSQL can be filled")
    async with ledger.maintenance() as tx:
        loader = LedgerLoader(tx, ledger.dialect)
        await loader.begin()
        for table in TABLES:
            async for rows in source(table):
                await loader.add(table, rows)
                progress(len(rows))
    return {name: digest.summary() for name, digest in loader.digests.items()}
