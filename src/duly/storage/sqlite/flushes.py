"""The flushes of a SQLite ledger: from operations to the journal, and from the journal to the tables.

All of it is decided here, on the event loop's thread; the writer thread writes. The laws:

At most one flush is carried out and not yet on the disk. Its results are given out when it is, and until then
no question is answered from the rows it has changed. If it fails, all that memory holds is forgotten and read
from the disk again, so nothing is ever built on what was not stored.

The tables get only what the journal has, and the journal is cut in the transaction that brings it into them.
They get it from memory, at a moment when no flush is in flight; after one that failed, from the journal.
They follow at a distance that is bounded: if they cannot follow, nothing more is taken.
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
from duly.storage.sqlite.tables import TableReader
from duly.storage.sqlite.writer import SqliteWriter

LOG: Final = logging.getLogger("duly.storage.ledger")
T = TypeVar("T")

_Question: TypeAlias = tuple[Callable[[CachedRows], Any], asyncio.Future[Any]]
"""a question, and where its answer goes"""

CHANGES_BEHIND: Final = 4_000
"""So many changes are brought into the tables at once: about 800 commands, some milliseconds. More of them
have ended by then and are one row; but flushes wait meanwhile. Measured once, six turns each, beside 2,000:
with 4,000 a command took about a tenth less of the processor and p99 was 29 instead of 25 ms; with 8,000
little was gained beyond that, and p99 was 35 ms."""
BYTES_BEHIND: Final = 4 << 20
SECONDS_BEHIND: Final = 0.25
"""How long a change waits for others."""
MOST_BEHIND: Final = 10 * CHANGES_BEHIND
"""If the tables cannot be brought up to date and so many changes wait, nothing more is taken."""


class Flushes:
    """Carries flushes out for one ledger."""

    cached_rows: type[CachedRows] = CachedRows

    def __init__(self, writer: SqliteWriter, flushed: Callable[[list[CommitBatch]], None]) -> None:
        self._writer = writer
        self._flushed = flushed
        self._db = writer.file.connect(readonly=True)
        self.rows = self.cached_rows(TableReader(self._db))
        self._interpreter = Interpreter(self.rows)
        self._in_flight = False
        self._telling = False
        """a flush has ended, and its callers are being told; they hand over the next one"""
        self._tainted = False
        """memory holds something that was not stored"""
        self._asked: list[_Question] = []
        self._settling: list[asyncio.Future[None]] = []
        self._applying = False
        self._overdue = False
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = 0
        self._waiting: asyncio.Future[None] | None = None

    # ── a flush ──────────────────────────────────────────────────────────────────────────────────

    def flush(self, batches: list[CommitBatch]) -> None:
        """Carry batches out, and have them told when they are on the disk."""
        if self._tainted or len(self.rows.changes) > MOST_BEHIND:
            self._go_on(self._flush_when_settled(batches))
            return
        try:
            bodies = self._carry_out(batches)
        except Exception:  # one caller's trouble must not be everyone's
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
        """Carry batches out in memory; return what makes it durable, which may be nothing."""
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
        """Append to the journal; then say how it went."""

        def done(problem: Exception | None) -> None:
            self._in_flight = False
            if problem is None:
                self._bytes += sum(map(len, bodies))
                self.rows.changes.committed()
                self.rows.durable = self.rows.flush - 1
            else:
                self._tainted = True
            self._pause()
            self._telling = True
            through(problem)
            self._telling = False

        self._in_flight = True
        if self._telling:  # while the disk is at this one, the callers of the last one go on
            self._writer.put(lambda: self._writer.add_to_journal(bodies), done)
        else:
            self._writer.flush(bodies, done)

    def _pause(self) -> None:
        """Do what is done between two flushes, when memory and disk agree."""
        asked, self._asked = self._asked, []
        if self._tainted:
            if asked or self._settling:
                self._go_on(self._ask_again(asked))
            return
        for question, future in asked:
            if not future.done():
                future.set_result(question(self.rows))
        behind = len(self.rows.changes)
        if self._settling or self._overdue or behind > CHANGES_BEHIND or self._bytes > BYTES_BEHIND:
            self._apply()
        elif behind and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS_BEHIND, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._in_flight:
            self._overdue = True
        else:
            self._apply()

    def _go_on(self, work: Coroutine[None, None, None]) -> None:
        """Do what has to wait for something, while the loop goes on."""
        self._waiting = asyncio.ensure_future(work)

    # ── when something went wrong ────────────────────────────────────────────────────────────────

    async def _flush_when_settled(self, batches: list[CommitBatch]) -> None:
        """Carry batches out once memory and tables are sound again."""
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
        """Carry batches out, each with a flush of its own."""
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
        """Forget what memory holds, since the tables hold everything."""
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
        """Have the tables brought up to date; called when no flush is in flight."""
        if self._applying:
            return  # and then once more, if that is still asked for
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
        """Note that the tables are up to date, by what memory held or (`anew`) by what the journal did."""
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
            if not anew:  # else a flush has failed, and its callers know why
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
        """Return when the tables hold everything that was committed before."""
        if self._tainted or self._in_flight or self._applying or self.rows.changes:
            await self._brought_up_to_date()

    async def ask(self, question: Callable[[CachedRows], T]) -> T:
        """Answer a question from memory, at a moment when it holds nothing that is not on the disk."""
        if self._tainted:
            await self.settled()
        if not self._in_flight:
            return question(self.rows)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.append((question, future))
        return await future

    def recall(self, key: bytes, now: int) -> CachedMessage | None:
        """Return a message that can still be accepted, if what memory holds of it is on the disk."""
        found = self.rows.messages.get(key)
        if found is None or found.flush > self.rows.durable or found.row[4] <= now:
            return None
        return found

    # ── what is done alone ───────────────────────────────────────────────────────────────────────

    def converse(self, session: SqliteSession) -> None:
        """Give the writer to a caller's transaction, once the tables are up to date."""

        def done(problem: Exception | None) -> None:
            if problem is not None and session.error is None:
                session.refuse(problem)
            if session.committing:  # it may have changed anything
                self._tainted = True
                with suppress(LedgerError):
                    self._read_anew()
            self._flushed([session])

        self._alone(session, lambda: session.converse(self._writer), done)

    def scrub(self, batch: CommitBatch) -> None:
        """Write the file anew."""

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
        """Bring the tables up to date, as far as that is possible."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.settled()
        except Exception as problem:
            if self.rows.changes:  # the journal has it, and the next start brings it in
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
    """Return the keys of the messages that these batches admit first of all."""
    groups = chain.from_iterable(batch.groups for batch in batches)
    return [operation.message.key for group in groups for operation in group if type(operation) is Admit]
