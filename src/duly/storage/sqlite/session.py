"""A caller's own transaction in SQLite: its SQL and the ledger's operations commit together, or neither does.

The caller's coroutine controls the transaction; the writer thread carries it out, and serves no other caller
until it ends. The tables are brought up to date before the transaction begins, and its operations are written
to the tables at once, where the caller's SQL sees them. The first error ends the transaction, even if the
caller catches it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from duly.core import operations as w
from duly.errors import ProgramError
from duly.storage.caller_statements import CallerStatements, Row
from duly.storage.group_commit import CommitBatch
from duly.storage.interpreter import Interpreter
from duly.storage.sqlite.cached_rows import ALL, CachedRows
from duly.storage.sqlite.caller_sql import ENDED
from duly.storage.sqlite.file import translated
from duly.storage.sqlite.table_rows import TableReader
from duly.storage.sqlite.writer import SqliteWriter


class SqliteSession(CommitBatch, CallerStatements):
    """A caller's transaction, which has a flush of its own."""

    alone = True

    def __init__(self) -> None:
        CommitBatch.__init__(self, ())
        CallerStatements.__init__(self)
        self._loop = asyncio.get_running_loop()
        self._over = False
        self.own = False
        """whether the statements are the ledger's, not a caller's"""
        self.committing = False
        """whether the commit was attempted"""
        self._written: list[w.Results] = []
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self._calls: SimpleQueue[tuple[str, Row, asyncio.Future[Any] | None]] = SimpleQueue()

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────

    async def _fetch(self, statement: str, args: Row) -> list[Row]:
        found: list[Row] = await self._call("fetch", statement, args)
        return found

    async def write(self, *operations: w.Write) -> w.Results:
        """Carry out a group of operations."""
        results: w.Results = await self._call("write", operations)
        return results

    async def _call(self, verb: str, *args: Any) -> Any:
        if self._over:
            raise ProgramError("this transaction has ended; open a new one")
        future = self._loop.create_future()
        self._calls.put((verb, args, future))
        return await future

    def end(self, how: str) -> None:
        """End the transaction with "commit" or "rollback"; only the first call counts."""
        if not self._over:
            self._over = True
            self._calls.put((how, (), None))

    # ── in the writer thread ─────────────────────────────────────────────────────────────────────

    def refuse(self, problem: Exception) -> None:
        """Report to the caller that the transaction cannot begin."""
        self.error = problem
        self._settle(self.begun, None, problem)

    def converse(self, writer: SqliteWriter) -> None:
        """Carry out the caller's calls until the transaction has ended; raise if it did not commit."""
        self._open(writer)
        while not self._serve(writer, *self._calls.get()):
            pass

    def _open(self, writer: SqliteWriter) -> None:
        """Begin the transaction; raise if that is not possible."""
        try:
            with translated(writer.file.path):
                writer.begin()
        except Exception as problem:
            self.refuse(problem)
            raise
        self._settle(self.begun, None, None)

    def _serve(self, writer: SqliteWriter, verb: str, args: Row, future: asyncio.Future[Any] | None) -> bool:
        """Carry out one call; return whether it was the last."""
        result: Any = None
        error: Exception | None = None
        try:
            if verb == "rollback":
                writer.roll_back()
                return True
            self._refuse_after_error()
            with translated(writer.file.path):
                if verb == "commit":
                    self.committing = True
                    writer.commit()
                    self.results = self._written
                    return True
                if verb == "write":
                    result = _write(writer, *args)
                    self._written.append(result)
                else:
                    result = writer.fetch(*args, own=self.own)
            if not writer.db.in_transaction:
                raise ProgramError(ENDED)
        except Exception as problem:
            writer.roll_back()
            self.error = error = problem
        if future is None:
            return True
        self._settle(future, result, error)
        return False

    def _refuse_after_error(self) -> None:
        if self.error is not None:
            raise ProgramError(
                f"this transaction was rolled back when a statement failed ({self.error}); nothing was stored"
            ) from self.error

    def _settle(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        def give() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with suppress(RuntimeError):  # the event loop has ended, and the caller with it
            self._loop.call_soon_threadsafe(give)


def _write(writer: SqliteWriter, group: w.Group) -> w.Results:
    """Carry out a group on the rows of the tables, within the open transaction."""
    rows = CachedRows(TableReader(writer.db), ALL)
    results = Interpreter(rows).execute(group)
    rows.changes.take()
    rows.changes.committed()
    writer.write_now(rows.changes.begin_to_apply())
    return results
