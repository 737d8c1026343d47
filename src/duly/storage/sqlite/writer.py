"""The writer thread of a SQLite ledger, and its connection: the only one that writes and checkpoints.

The thread carries out jobs in order. The event loop's thread computes beforehand what a job writes; a job
consists of SQLite calls and little else, so that the two threads rarely compete for Python's global
interpreter lock. While the thread is idle and the disk is quick, the event loop uses the connection for small
flushes itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Final

import apsw

from duly.errors import LedgerUnavailable
from duly.storage import sql
from duly.storage.sqlite.caller_sql import CallerSql
from duly.storage.sqlite.disk_pace import DiskPace
from duly.storage.sqlite.file import (
    APPLICATION_ID,
    LedgerFile,
    checksum_vfs,
    has_checksums,
    set_journal_mode,
    translated,
)
from duly.storage.sqlite.replay import replay
from duly.storage.sqlite.table_rows import Row, Statement, TableReader

LOG: Final = logging.getLogger("duly.storage.ledger")
CHECKPOINT_PAGES: Final = 2_000
"""The length of the write-ahead log, in pages, above which it is moved into the database; less if the disk is
nearly full."""
FEWEST_PAGES: Final = 16
PAGE_SIZE: Final = 4_096
SMALL_FLUSH: Final = 256 * 1024
"""The most bytes of a flush that the event loop carries out itself, about a thousand commands."""


def _nothing() -> None:
    """Do nothing."""


def _ignore(_: Exception | None) -> None:
    """Ignore the outcome of a job."""


class SqliteWriter:
    """The writer thread and its connection."""

    def __init__(self, file: LedgerFile) -> None:
        self.file = file
        self._path = file.path
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._handed = 0
        """how many jobs the thread was given; counted by the event loop"""
        self._finished = 0
        """how many jobs the thread has finished; counted by the thread"""
        self._pace = DiskPace()
        self._doubtful = file.log.is_there()
        """the disk has failed here, or perhaps in the process that left this log: the write-ahead log may not
        be on the disk (see `_make_sure`)"""
        self._wal_pages = 0
        self._checkpoint_at = self._affordable_pages()
        self._sql = sql.queries("sqlite")
        self._caller_sql = CallerSql()
        self.db = db = self._connect()
        try:
            set_journal_mode(db, "wal")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA cache_size = -65536")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            self._migrate()
            self._run = db.cursor().execute
            db.set_wal_hook(self._note_wal)
            file.made()
            self.n = 0
            self.catch_up()
        except BaseException:
            # Otherwise the last connection to close would move the log into the database and remove it, and
            # the next start would miss the log that the note beside the file describes.
            db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            db.close()
            raise
        self._begin()

    def _begin(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="duly-write", daemon=True)
        self._thread.start()

    def _connect(self) -> apsw.Connection:
        """Connect to the database, and give its pages checksums if that is possible here."""
        db = self.file.connect()
        if not has_checksums(db) and checksum_vfs() is not None:
            LOG.warning("writing %s anew, with checksums; this is done once", self._path)
            db.close()
            self.file.add_checksums()
            db = self.file.connect()
        return db

    def _migrate(self) -> None:
        db = self.db
        for migration in sql.pending("sqlite", int(db.pragma("user_version"))):
            with db:
                db.execute(migration.sql)
                db.pragma("user_version", migration.number)
                db.pragma("application_id", APPLICATION_ID)
        if has_checksums(db) and db.table_exists("main", "file"):
            db.execute("UPDATE file SET checksums = 1 WHERE checksums = 0")

    def catch_up(self) -> None:
        """Apply the journal to the tables without using the cache: an earlier process or a failed flush left
        entries in it."""
        changes = replay(TableReader(self.db).journal())
        self.n = max(self.n, int(self.db.execute("SELECT coalesce(max(n), 0) FROM journal").get))
        if changes:
            self.write_tables(list(changes.statements()), self.n)

    def _note_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────

    def put(self, job: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Pass a job to the thread; `done` is called on this event loop with the error, or None."""
        loop = asyncio.get_running_loop()

        def carry_out() -> None:
            problem = self._carry_out(job)
            long = self._is_log_long(problem)
            self._finished += not long  # the loop may use the connection as soon as it hears of the end
            # The loop may have ended at interpreter exit; what was committed stays committed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(done, problem)
            if long:
                self._checkpoint()
                self._finished += 1

        self._handed += 1
        self._queue.put(carry_out)

    def flush(self, bodies: Sequence[bytes], done: Callable[[Exception | None], None]) -> None:
        """Append entries to the journal: in this call if that is quick, otherwise in the thread."""
        job = partial(self.add_to_journal, bodies)
        if not self._is_quick(bodies):
            self.put(job, done)
            return
        problem = self._carry_out(job)
        if self._is_log_long(problem):
            self.put(_nothing, _ignore)  # after each job the thread checks the length of the log
        done(problem)

    def _is_quick(self, bodies: Sequence[bytes]) -> bool:
        """Return whether the event loop may append these itself: small, thread idle, disk quick."""
        idle = self._handed == self._finished
        return idle and self._pace.quick and len(bodies) == 1 and len(bodies[0]) <= SMALL_FLUSH

    def _carry_out(self, job: Callable[[], None]) -> Exception | None:
        """Carry out a job; return the error, or None."""
        try:
            with translated(self._path):
                if self.file.problem is not None:
                    raise self.file.problem
                job()
        except Exception as problem:
            self.roll_back()
            return problem
        return None

    def _is_log_long(self, problem: Exception | None) -> bool:
        """Return whether the write-ahead log has to be moved into the database."""
        return self._wal_pages > self._checkpoint_at or isinstance(problem, LedgerUnavailable)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def add_to_journal(self, bodies: Sequence[bytes]) -> None:
        """Append rows to the journal in one transaction and flush it; with this they are committed."""
        self._make_sure()
        began = perf_counter()
        try:
            self._insert(bodies)
        except apsw.IOError:
            self._doubtful = True
            raise
        self._pace.note(perf_counter() - began)
        self.n += len(bodies)
        self.file.committed(self._wal_pages)

    def _insert(self, bodies: Sequence[bytes]) -> None:
        add = self._sql["add_to_journal"]
        if len(bodies) == 1:
            self._run(add, (self.n + 1, bodies[0]))  # a single statement is a transaction by itself
            return
        self._run("BEGIN IMMEDIATE")
        for at, body in enumerate(bodies):
            self._run(add, (self.n + 1 + at, body))
        self.db.execute("COMMIT")

    def write_tables(self, statements: Iterable[Statement], through: int) -> None:
        """Bring the tables up to date and truncate the journal, in one transaction.

        The transaction is not flushed: if it is lost, the journal still holds the changes.
        """
        self.file.check_sizes()
        run = self._run
        run("PRAGMA synchronous = NORMAL")
        try:
            run("BEGIN IMMEDIATE")
            for statement, values in statements:
                run(statement, values)
            run(self._sql["cut_journal"], (through,))
            run("COMMIT")
        finally:
            self.roll_back()
            run("PRAGMA synchronous = FULL")

    def write_now(self, statements: Sequence[Statement]) -> None:
        """Write to the tables in the open transaction."""
        for statement, values in statements:
            self._run(statement, values)

    def begin(self) -> None:
        """Begin a transaction that locks out every other writer."""
        self._make_sure()
        self._run("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit and flush."""
        try:
            self.db.execute("COMMIT")
        except apsw.IOError:
            self._doubtful = True
            raise
        self.file.committed(self._wal_pages)

    def fetch(self, statement: str, args: Row, *, own: bool) -> Sequence[Row]:
        """Run a statement of a caller, or of the ledger's own, and return its rows."""
        return self._caller_sql.fetch(self.db, statement, tuple(args), own=own)

    def roll_back(self) -> None:
        """Roll back the open transaction, if there is one."""
        with suppress(apsw.Error):
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def scrub(self) -> None:
        """Rewrite the file, so that neither the file nor its log holds deleted data."""
        self.db.execute("VACUUM")
        self.file.settled()
        with suppress(apsw.BusyError):  # another connection reads: the log is truncated at close
            self.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self.file.measure()

    # ── the write-ahead log ──────────────────────────────────────────────────────────────────────

    def _make_sure(self) -> None:
        """Raise if a file was truncated, or if parts of the log may not be on the disk.

        An operating system reports a failed flush once, and drops what it could not write. Later flushes
        succeed, but their commits would be lost with that gap, so the log is written again and moved into the
        database first.
        """
        self.file.check_sizes()
        if self._doubtful:
            self._checkpoint()
        if self._doubtful:
            raise LedgerUnavailable(
                f"{self._path} cannot be used now (the disk has failed, and what was written before cannot "
                "be flushed); nothing was stored"
            )

    def _checkpoint(self) -> None:
        try:
            if self._doubtful:  # a crash in the middle of the move is repaired from the log alone
                self.file.log.write_again()
            logged, moved = self.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (apsw.IOError, OSError):
            self._doubtful = True
        except apsw.Error:
            pass  # another connection reads, or the disk is full: the next checkpoint does it
        else:
            if logged == moved:  # the next write restarts the log, and is perhaps not flushed
                self._doubtful = False
                self.file.settled()
        self.file.measure()
        self._wal_pages = 0
        self._checkpoint_at = self._affordable_pages()

    def _affordable_pages(self) -> int:
        """Return how long the log may become, in pages. A log that fills the disk leaves no room to move it
        into the database, and nothing could ever be stored again."""
        disk = os.statvfs(self._path.parent)
        return max(FEWEST_PAGES, min(CHECKPOINT_PAGES, disk.f_bavail * disk.f_frsize // (4 * PAGE_SIZE)))

    def close(self) -> None:
        """End the thread, and move the write-ahead log into the database."""
        self._queue.put(None)
        self._thread.join()
        with suppress(apsw.Error, OSError):
            if self.file.problem is None:
                if self._doubtful:
                    self.db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                    self.file.log.write_again()
                logged, moved = self.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
                if logged == moved:  # recorded before the log is truncated, so a crash loses nothing
                    self.file.settled()
                    self.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self.db.close()
