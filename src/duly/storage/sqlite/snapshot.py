"""A snapshot of a SQLite ledger: its tables with the journal applied, read in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeVar

import apsw

from duly.errors import LedgerError, LedgerUnavailable
from duly.storage import sql
from duly.storage.snapshot import BATCH, LedgerTable, Snapshot, StoredRow
from duly.storage.sqlite.file import LedgerFile, connect, translated
from duly.storage.sqlite.overlay import JournalOverlay
from duly.storage.sqlite.replay import replay
from duly.storage.sqlite.table_rows import TableReader

T = TypeVar("T")

FOUND: Final = 20
"""The most problems that SQLite reports for one file."""


class SqliteSnapshot(Snapshot):
    """A SQLite ledger at one moment; another process may write it meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="duly-snapshot")
        self._db: apsw.Connection | None = None
        self._standing_still = ExitStack()

    @classmethod
    async def open(cls, path: Path, *, overlay: bool = True) -> SqliteSnapshot:
        """Open a snapshot of the file. Raises if it is not a sound ledger of this version."""
        snapshot = cls(path)
        try:
            await snapshot._run(lambda: snapshot._open(overlay))
        except BaseException:
            await snapshot.close()
            raise
        return snapshot

    def _open(self, overlay: bool) -> None:
        file = LedgerFile(self._path)
        file.read_note()
        if not self._path.is_file():
            raise LedgerUnavailable(f"there is no ledger at {self._path}; check the path")
        file.inspect()
        self._db = db = connect(file.path, readonly=True)
        self.engine = f"SQLite {apsw.sqlite_lib_version()}"
        self.schema = int(db.pragma("user_version"))
        if not self.schema:
            raise LedgerUnavailable(f"{self._path} is empty: there is no ledger in it yet")
        if sql.pending("sqlite", self.schema):
            raise LedgerUnavailable(
                f"{self._path} was written by an older duly (schema {self.schema}); start a hub on it, or "
                "run 'duly prune', and it is upgraded"
            )
        if overlay:
            self._standing_still.enter_context(JournalOverlay(db).current())
        else:
            self._standing_still.enter_context(db)
            db.execute("SELECT 1 FROM main.sqlite_schema").fetchall()

    async def _run(self, job: Callable[[], T]) -> T:
        def guarded() -> T:
            with translated(self._path):
                return job()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _connection(self) -> apsw.Connection:
        assert self._db is not None
        return self._db

    async def rows(self, table: LedgerTable) -> AsyncIterator[Sequence[StoredRow]]:
        """Yield the rows of a table in order, some at a time."""
        columns = ", ".join(table.columns)
        cursor = await self._run(
            lambda: self._connection().execute(f"SELECT {columns} FROM {table.name} ORDER BY {table.order}")
        )
        flags = table.flags
        while found := await self._run(lambda: _some(cursor)):
            yield [_typed(row, flags) for row in found] if flags else found

    async def count(self, table: LedgerTable) -> int:
        """Return how many rows a table has."""
        return await self._run(
            lambda: int(self._connection().execute(f"SELECT count(*) FROM {table.name}").get)
        )

    async def problems(self) -> list[tuple[str, str]]:
        """Return the problems that SQLite finds in the file, and those of its journal."""
        return await self._run(self._problems)

    def _problems(self) -> list[tuple[str, str]]:
        db = self._connection()
        found = [str(said) for (said,) in db.execute(f"PRAGMA main.integrity_check({FOUND})")]
        problems = [("file-sound", said) for said in found if said != "ok"]
        before: int | None = None
        for n, _ in db.execute(sql.queries("sqlite")["journal"]):
            if before is not None and n != before + 1:
                problems.append(("journal-sequence", f"entry {n} follows entry {before}"))
            before = n
        try:
            replay(TableReader(db).journal())
        except (LedgerError, ValueError) as problem:
            problems.append(("journal-readable", str(problem)))
        return problems

    async def close(self) -> None:
        """Close the file."""
        db, self._db = self._db, None
        if db is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close, db)
        self._thread.shutdown(wait=False)

    def _close(self, db: apsw.Connection) -> None:
        self._standing_still.close()
        db.close()


def _some(cursor: apsw.Cursor) -> list[StoredRow]:
    found: list[StoredRow] = []
    for row in cursor:
        found.append(row)
        if len(found) == BATCH:
            break
    return found


def _typed(row: StoredRow, flags: tuple[int, ...]) -> StoredRow:
    changed = list(row)
    for at in flags:
        changed[at] = bool(changed[at])
    return tuple(changed)
