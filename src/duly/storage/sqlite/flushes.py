"""The flushes of a SQLite ledger: operations are written to the journal, and the journal to the tables.

This module runs on the event loop's thread and decides what to write; the writer thread writes it. The laws:

At most one flush is carried out in memory and not yet on the disk. Its results are returned when it is on the
disk; until then no query is answered from the rows that it changed. If a flush fails, the cache is emptied
and read from the disk again, so later flushes never build on changes that were not stored.

The tables get only changes that are in the journal, and the transaction that writes them to the tables also
truncates the journal. The changes come from memory, at a moment when no flush is in flight; after a failed
flush they come from the journal. The number of changes that the tables lack is bounded: if the tables cannot
be updated, no more flushes are accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

from duly.core.operations import Admit
from duly.errors import LedgerError
from duly.storage.group_commit import CommitBatch
from duly.storage.interpreter import Interpreter
from duly.storage.sql.ledger import as_duly
from duly.storage.sqlite.cached_rows import CachedMessage, CachedRows
from duly.storage.sqlite.file import translated
from duly.storage.sqlite.journal_format import entries_of
from duly.storage.sqlite.session import SqliteSession
from duly.storage.sqlite.table_rows import TableReader
from duly.storage.sqlite.writer import SqliteWriter

LOG: Final = logging.getLogger("duly.storage.ledger")
T = TypeVar("T")

_CacheQuestion: TypeAlias = tuple[Callable[[CachedRows], Any], asyncio.Future[Any]]
"""A query on the cached rows, and the future of its answer."""

CHANGES_BEHIND: Final = 4_000
"""How many changes are written to the tables at once: about 800 commands, which takes some milliseconds. With
a larger number more commands have ended by then and need only one row, but flushes wait longer. Measured six
times each: compared with 2,000, 4,000 took about a tenth less processor time per command and p99 was 29
instead of 25 ms; 8,000 saved little more, and p99 was 35 ms."""
BYTES_BEHIND: Final = 4 << 20
SECONDS_BEHIND: Final = 0.25
"""How long a change waits for others before it is written to the tables."""
MOST_BEHIND: Final = 10 * CHANGES_BEHIND
"""The most changes that may wait for the tables; beyond this, a flush waits for the tables first."""


class Flushes:
    """Carries out the flushes of one ledger."""

    cached_rows: type[CachedRows] = CachedRows

    def __init__(self, writer: SqliteWriter, flushed: Callable[[list[CommitBatch]], None]) -> None:
        self._writer = writer
        self._flushed = flushed
        self._db = writer.file.connect(readonly=True)
        self.rows = self.cached_rows(TableReader(self._db))
        self._interpreter = Interpreter(self.rows)
        self._in_flight = False
        self._tainted = False
        """the cache may hold changes that were not stored"""
        self._asked: list[_CacheQuestion] = []
        self._settling: list[asyncio.Future[None]] = []
        self._applying = False
        self._overdue = False
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = 0
        self._waiting: asyncio.Future[None] | None = None

    # ── a flush ──────────────────────────────────────────────────────────────────────────────────

    def flush(self, batches: list[CommitBatch]) -> None:
        """Carry out batches, and call `flushed` when they are on the disk."""
        if self._tainted or len(self.rows.changes) > MOST_BEHIND:
            self._go_on(self._flush_when_settled(batches))
            return
        try:
            bodies = self._carry_out(batches)
        except Exception:  # one caller's error must not fail the others
            self._tainted = True
            self._go_on(self._flush_one_by_one(batches))
            return
        if not bodies:
            asyncio.get_running_loop().call_soon(self._flushed, batches)
            return

        def through(problem: Exception | None) -> None:
            if problem is not None:
                error = as_duly(problem)
                for batch in batches:
                    batch.error = error
            self._flushed(batches)

        self._write(bodies, through)

    def _carry_out(self, batches: Sequence[CommitBatch]) -> list[bytes]:
        """Carry out batches in memory; return the journal entries that make them durable, possibly none."""
        execute = self._interpreter.execute
        with translated(self._writer.file.path):
            if self.rows.reads_one_by_one:
                self.rows.look_up(_admitted_keys(batches))
            for batch in batches:
                batch.results = [execute(group) for group in batch.groups]
        changes = self.rows.changes.take()
        self.rows.flush += 1
        return entries_of(changes.pack()) if changes else []

    def _write(self, bodies: list[bytes], through: Callable[[Exception | None], None]) -> None:
        """Append entries to the journal, then call `through` with the error, if any."""

        def done(problem: Exception | None) -> None:
            self._in_flight = False
            if problem is None:
                self._bytes += sum(map(len, bodies))
                self.rows.changes.committed()
                self.rows.durable = self.rows.flush - 1
            else:
                self._tainted = True
            self._pause()
            through(problem)

        self._in_flight = True
        self._writer.flush(bodies, done)

    def _pause(self) -> None:
        """Answer queries and update the tables between two flushes, when memory and disk agree."""
        asked, self._asked = self._asked, []
        if self._tainted:
            if asked or self._settling:
                self._go_on(self._ask_again(asked))
            return
        for question, future in asked:
            if not future.done():
                self._tell(question, future)
        behind = len(self.rows.changes)
        if self._settling or self._overdue or behind > CHANGES_BEHIND or self._bytes > BYTES_BEHIND:
            self._apply()
        elif behind and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS_BEHIND, self._tick)

    def _tell(self, question: Callable[[CachedRows], T], future: asyncio.Future[T]) -> None:
        """Answer a query. Its error is its caller's alone: the flush that has just ended still tells its
        callers."""
        try:
            found = self._answer(question)
        except Exception as problem:
            future.set_exception(problem)
        else:
            future.set_result(found)

    def _answer(self, question: Callable[[CachedRows], T]) -> T:
        with translated(self._writer.file.path):  # the cache may have to read the tables
            return question(self.rows)

    def _tick(self) -> None:
        self._timer = None
        if self._in_flight:
            self._overdue = True
        else:
            self._apply()

    def _go_on(self, work: Coroutine[None, None, None]) -> None:
        """Run work that has to wait, as a task."""
        self._waiting = asyncio.ensure_future(work)

    # ── when something went wrong ────────────────────────────────────────────────────────────────

    async def _flush_when_settled(self, batches: list[CommitBatch]) -> None:
        """Carry out batches once memory and tables are in order again."""
        try:
            await self.settled()
        except Exception as problem:
            error = as_duly(problem)
            for batch in batches:
                batch.error = error
            self._flushed(batches)
        else:
            self.flush(batches)

    async def _flush_one_by_one(self, batches: list[CommitBatch]) -> None:
        """Carry out batches, each with a flush of its own."""
        loop = asyncio.get_running_loop()
        for batch in batches:
            written: asyncio.Future[Exception | None] = loop.create_future()
            try:
                await self.settled()
                bodies = self._carry_out([batch])
                if bodies:
                    self._write(bodies, written.set_result)
                    if (problem := await written) is not None:
                        raise problem
            except Exception as problem:
                self._tainted = True
                batch.error = as_duly(problem)
        self._flushed(batches)

    def _read_anew(self) -> None:
        """Empty the cache, since the tables hold everything."""
        with translated(self._writer.file.path):
            self.rows.clear()
        self._tainted = False

    async def _ask_again(self, asked: list[tuple[Callable[[CachedRows], Any], asyncio.Future[Any]]]) -> None:
        for question, future in asked:
            try:
                found = await self.ask(question)
            except Exception as problem:
                if not future.done():
                    future.set_exception(problem)
            else:
                if not future.done():
                    future.set_result(found)

    # ── the tables ───────────────────────────────────────────────────────────────────────────────

    def _apply(self) -> None:
        """Let the writer bring the tables up to date; called when no flush is in flight."""
        if self._applying:
            return  # `_applied` calls this again if callers still wait
        self._overdue, self._bytes = False, 0
        settling, self._settling = self._settling, []
        if not (self._tainted or self.rows.changes):
            _settle(settling, None)
            return
        self._applying = True
        anew, through = self._tainted, self._writer.n
        statements = [] if anew else self.rows.changes.begin_to_apply()
        self._writer.put(
            self._writer.catch_up if anew else lambda: self._writer.write_tables(statements, through),
            lambda problem: self._applied(problem, settling, anew=anew),
        )

    def _applied(
        self, problem: Exception | None, settling: list[asyncio.Future[None]], *, anew: bool
    ) -> None:
        """Record that the tables are up to date, from the changes in memory or (`anew`) from the journal."""
        self._applying = False
        try:
            if problem is not None:
                raise problem
            if anew:
                self._read_anew()
            else:
                self.rows.changes.applied()
                self.rows.forget()
        except Exception as trouble:
            problem = trouble
            if not anew:  # otherwise a flush failed, and its callers got the error
                LOG.error("the tables of the ledger cannot be brought up to date: %s", problem)
        _settle(settling, None if problem is None else as_duly(problem))
        if self._settling and not self._in_flight:
            self._apply()

    async def _brought_up_to_date(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settling.append(waiting)
        if not self._in_flight:
            self._apply()
        await waiting

    async def settled(self) -> None:
        """Wait until the tables hold everything that was committed before the call."""
        if self._tainted or self._in_flight or self._applying or self.rows.changes:
            await self._brought_up_to_date()

    async def ask(self, question: Callable[[CachedRows], T]) -> T:
        """Run a query on the cached rows at a moment when they hold only what is on the disk."""
        if self._tainted:
            await self.settled()
        if not self._in_flight:
            return self._answer(question)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.append((question, future))
        return await future

    def recall(self, key: bytes, now: int) -> CachedMessage | None:
        """Return a cached message that can still be accepted, if its last change is on the disk."""
        found = self.rows.messages.get(key)
        if found is None or found.flush > self.rows.durable or found.row[4] <= now:
            return None
        return found

    # ── what is done alone ───────────────────────────────────────────────────────────────────────

    def converse(self, session: SqliteSession) -> None:
        """Run a caller's transaction in the writer, once the tables are up to date."""

        def done(problem: Exception | None) -> None:
            if problem is not None and session.error is None:
                session.refuse(problem)
            if session.committing:  # the caller's SQL may have changed any row
                self._tainted = True
                with suppress(LedgerError):
                    self._read_anew()
            self._flushed([session])

        self._alone(session, lambda: session.converse(self._writer), done)

    def scrub(self, batch: CommitBatch) -> None:
        """Rewrite the file, without deleted data."""

        def done(problem: Exception | None) -> None:
            batch.error = None if problem is None else as_duly(problem)
            self._flushed([batch])

        self._alone(batch, self._writer.scrub, done)

    def _alone(
        self, batch: CommitBatch, job: Callable[[], None], done: Callable[[Exception | None], None]
    ) -> None:
        async def settle_first() -> None:
            try:
                await self.settled()
            except Exception as problem:
                done(problem)
            else:
                self._writer.put(job, done)

        if self._tainted or self._applying or self.rows.changes:
            self._go_on(settle_first())
        else:
            self._writer.put(job, done)

    async def close(self) -> None:
        """Bring the tables up to date if possible, and close the connection."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.settled()
        except Exception as problem:
            if self.rows.changes:  # the journal has them, and the next start applies it
                LOG.warning("the ledger is closed with tables that are not up to date: %s", problem)
        self._db.close()


def _settle(waiting: list[asyncio.Future[None]], problem: Exception | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if problem is None:
            future.set_result(None)
        else:
            future.set_exception(problem)


def _admitted_keys(batches: Sequence[CommitBatch]) -> list[bytes]:
    """Return the keys of the messages that the top-level operations of these batches admit."""
    groups = chain.from_iterable(batch.groups for batch in batches)
    return [operation.message.key for group in groups for operation in group if type(operation) is Admit]
