"""The embedded ledger: one SQLite file, through apsw (its wheel carries a current SQLite; Debian's own
3.40 can corrupt a WAL with two writers).

One writer thread is the only one that writes and checkpoints; `duly.storage.group_commit` hands it what has
come together meanwhile. `synchronous=FULL`: results are given out after the WAL is on
the disk. One process writes a file, held by a lock that dies with it; any number may read. A file that is not
a sound ledger of ours is not touched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, cast

import apsw

from duly.core import operations as w
from duly.core.trusted_time import Floor
from duly.errors import (
    LedgerError,
    LedgerUnavailable,
    ProgramError,
    Stopped,
)
from duly.runtime.clock import Clock
from duly.storage import sql
from duly.storage.group_commit import CommitBatch, GroupCommit
from duly.storage.ledger import HOT_IDS, StreamPosition, Transaction
from duly.storage.sql.ledger import SqlLedger, as_duly
from duly.storage.sqlite.bulk import BulkWriter
from duly.storage.sqlite.file import (
    APPLICATION_ID,
    CHECKED_SIZE,
    LedgerFile,
    checksum_vfs,
    connect,
    has_checksums,
    reserve_checksums,
    translated,
)
from duly.storage.sqlite.verbs import SqliteVerbs

LOG: Final = logging.getLogger("duly.storage.ledger")
CHECKPOINT_PAGES: Final = 2_000
"""Pages in the write-ahead log after which they are moved into the database; fewer, if the disk is small."""
FEWEST_PAGES: Final = 16
PAGE_SIZE: Final = 4_096


class SqliteLedger(SqlLedger):
    """A ledger in one file, opened by `duly.open_ledger("sqlite:///app.db")`; `?mode=ro` reads a running
    one."""

    dialect = "sqlite"

    def __init__(self, path: Path, clock: Clock | None, *, hot: int, readonly: bool) -> None:
        super().__init__(clock, hot=hot)
        self._file = LedgerFile(path)
        self.path = self._file.path
        self._readonly = readonly
        self._reading_through: threading.Thread | None = None
        self._closing = threading.Event()
        self._writer: _Writer | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="duly-read")
        self._db: apsw.Connection | None = None

    @classmethod
    async def open(
        cls, path: Path, clock: Clock | None = None, *, hot: int = HOT_IDS, readonly: bool = False
    ) -> SqliteLedger:
        """Open a file, or make it; a file that is not a sound ledger is not touched."""
        ledger = cls(path, clock, hot=hot, readonly=readonly)
        opening = asyncio.get_running_loop().run_in_executor(ledger._reader, ledger._open)
        try:
            await asyncio.shield(opening)
        except BaseException:
            await asyncio.wait([opening])  # cancelled: the thread goes on until it has opened
            await ledger.close()
            raise
        return ledger

    def _open(self) -> None:
        if not self.path.parent.is_dir():
            raise LedgerUnavailable(f"there is no folder {self.path.parent}; create it first")
        if self._readonly and not self.path.exists():
            raise LedgerUnavailable(f"there is no ledger at {self.path}; check the path")
        file = self._file
        with translated(self.path):
            if not self._readonly:
                file.hold()
                file.finish()
            if self.path.stat().st_size:
                file.inspect()
            if not self._readonly:
                self._writer = _Writer(file)
                self._witness.begin(self._writer.floor)
            self._db = connect(self.path, readonly=True)
            version = int(self._db.pragma("user_version"))
            if sql.pending("sqlite", version):  # a reader cannot upgrade it
                raise LedgerUnavailable(
                    f"{self.path} was written by an older duly (schema {version}); "
                    "open it once without mode=ro to upgrade it"
                )
        if not self._readonly and self.path.stat().st_size > CHECKED_SIZE:
            self._reading_through = threading.Thread(
                target=file.read_through, args=(self._closing,), name="duly-check", daemon=True
            )
            self._reading_through.start()

    async def scrub(self) -> None:
        """Write the file anew."""
        self._check_writable()
        await self._group_commit.add(_Scrub())

    def check(self) -> None:
        """Raise if the file was moved or removed."""
        if not self._readonly:
            self._file.check_in_place()

    async def close(self) -> None:
        """Finish what was handed over, then close the threads and the file."""
        await self._group_commit.close()
        loop = asyncio.get_running_loop()
        self._closing.set()
        if self._reading_through is not None:
            await loop.run_in_executor(self._reader, self._reading_through.join)
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await loop.run_in_executor(self._reader, writer.close)
        if self._db is not None:
            db, self._db = self._db, None
            await loop.run_in_executor(self._reader, db.close)
        self._reader.shutdown(wait=False)
        self._file.release()
        self._wake_all()

    # ── writing: callers share a flush, the thread commits it ────────────────────────────────────

    def commit(self, groups: Sequence[w.Group]) -> asyncio.Future[list[w.Results]]:
        """Hand groups to the next flush, if this ledger may be written."""
        self._check_writable()
        return super().commit(groups)

    def _start(self, batches: list[CommitBatch]) -> None:
        cast("_Writer", self._writer).put(batches, self._group_commit)

    def _check_writable(self) -> None:
        if self._readonly:
            raise ProgramError("this ledger was opened with mode=ro; open it without to write")

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction of the caller's own; the writer thread serves it alone until it ends."""
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        self._check_writable()
        with self._group_commit.within():
            session = _SqliteSession()
            through = self._group_commit.add(session)
            through.add_done_callback(_noticed)
            try:
                await session.begun
                yield session
                session.end("commit")
                await asyncio.shield(through)
            finally:
                session.end("rollback")  # of no effect after a commit

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def _open_db(self) -> apsw.Connection:
        if self._db is None:
            raise Stopped("this ledger is closed")
        if self._file.problem is not None:
            raise self._file.problem
        return self._db

    async def _read(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        statement, db = self._queries[name], self._open_db()

        def run() -> list[tuple[Any, ...]]:
            with translated(self.path):
                return db.execute(statement, args).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._reader, run)

    def _key_list(self, keys: Sequence[bytes]) -> str:
        return json.dumps([key.hex() for key in keys])

    def _ref_lists(self, refs: Sequence[w.DeliveryRef]) -> tuple[str]:
        return (json.dumps([(ref.key.hex(), ref.channel, ref.recipient, ref.round) for ref in refs]),)

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return how readers stand in streams."""
        statement, db = self._queries["standing"], self._open_db()

        def run() -> list[StreamPosition]:
            with translated(self.path):
                return [StreamPosition(*row) for place in places for row in db.execute(statement, place)]

        return await asyncio.get_running_loop().run_in_executor(self._reader, run)


class _SqliteSession(CommitBatch):
    """A transaction driven from the event loop: each call is carried out by the writer thread, which
    serves no other caller until it ends. The first error ends it, whatever its caller does about it."""

    alone = True

    def __init__(self) -> None:
        super().__init__(())
        self._loop = asyncio.get_running_loop()
        self._over = False
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.calls: SimpleQueue[tuple[str, tuple[Any, ...], asyncio.Future[Any] | None]] = SimpleQueue()

    async def execute(self, statement: str, *args: Any) -> None:
        """Run a statement."""
        await self._call("fetch", statement, args)

    async def fetch(self, statement: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        found: list[tuple[Any, ...]] = await self._call("fetch", statement, args)
        return found

    async def write(self, *operations: w.Write) -> w.Results:
        """Carry a group of operations out."""
        results: w.Results = await self._call("write", operations)
        return results

    async def _call(self, verb: str, *args: Any) -> Any:
        if self._over:
            raise ProgramError("this transaction has ended; open a new one")
        future = self._loop.create_future()
        self.calls.put((verb, args, future))
        return await future

    def end(self, how: str) -> None:
        """End the transaction by "commit" or "rollback"; only the first word counts."""
        if not self._over:
            self._over = True
            self.calls.put((how, (), None))

    def settle(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        """Give a call its result; called by the writer thread."""

        def give() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with suppress(RuntimeError):  # the loop is gone, and the caller with it
            self._loop.call_soon_threadsafe(give)


class _Scrub(CommitBatch):
    """A request to write the file anew: then nothing that was deleted is in it, nor in its log."""

    alone = True

    def __init__(self) -> None:
        super().__init__(())


class _Writer:
    """The writer thread and its connection."""

    def __init__(self, file: LedgerFile) -> None:
        self._file = file
        self._path = file.path
        self._queue: SimpleQueue[tuple[list[CommitBatch], GroupCommit] | None] = SimpleQueue()
        self._wal_pages = 0
        self._checkpoint_at = self._affordable_pages()
        self._db = db = self._connect()
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA cache_size = -65536")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            self._migrate()
            self._cursor = db.cursor()
            self._verbs = SqliteVerbs(db)
            self._bulk = BulkWriter(db)
            file.made()
        except BaseException:
            db.close()
            raise
        db.set_wal_hook(self._note_wal)
        self._thread = threading.Thread(target=self._run, name="duly-write", daemon=True)
        self._thread.start()

    def _connect(self) -> apsw.Connection:
        """Connect to a database whose pages have checksums, as far as that is possible here."""
        db = connect(self._path)
        if not int(db.pragma("page_count")):
            reserve_checksums(db)
        elif not has_checksums(db) and checksum_vfs() is not None:
            LOG.warning("writing %s anew, with checksums; this is done once", self._path)
            db.close()
            self._file.add_checksums()
            db = connect(self._path)
        return db

    def _migrate(self) -> None:
        db = self._db
        for migration in sql.pending("sqlite", int(db.pragma("user_version"))):
            with db:
                db.execute(migration.sql)
                db.pragma("user_version", migration.number)
                db.pragma("application_id", APPLICATION_ID)
        if has_checksums(db) and db.table_exists("main", "file"):
            db.execute("UPDATE file SET checksums = 1 WHERE checksums = 0")

    def _note_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    @property
    def floor(self) -> Floor:
        """The floor as it was committed last."""
        return self._verbs.floor

    def put(self, batches: list[CommitBatch], gather: GroupCommit) -> None:
        """Hand batches to the thread; `gather` is told when they are flushed."""
        self._queue.put((batches, gather))

    def close(self) -> None:
        """End the thread, and move the write-ahead log into the database."""
        self._queue.put(None)
        self._thread.join()
        with suppress(apsw.Error):
            if self._file.problem is None:
                logged, moved = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
                if logged == moved:  # said before the log is cut off: a crash in between loses nothing
                    self._file.settled()
                    self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self._db.close()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            batches, gather = job
            if isinstance(batches[0], _SqliteSession):
                self._bulk.forget()
                self._converse(batches[0])
            elif isinstance(batches[0], _Scrub):
                self._scrub(batches[0])
            else:
                self._commit(batches)
            # The loop may be gone at interpreter exit; what was committed stays committed.
            with suppress(RuntimeError):
                batches[0].future.get_loop().call_soon_threadsafe(gather.flushed, batches)
            if self._wal_pages > self._checkpoint_at or isinstance(batches[0].error, LedgerUnavailable):
                with suppress(apsw.Error):  # another connection reads: the next checkpoint will do
                    self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                self._wal_pages = 0
                self._checkpoint_at = self._affordable_pages()

    def _affordable_pages(self) -> int:
        """Return how long the log may become: a log that fills a disk leaves no room to move it into the
        database, and nothing would ever be stored again."""
        disk = os.statvfs(self._path.parent)
        return max(FEWEST_PAGES, min(CHECKPOINT_PAGES, disk.f_bavail * disk.f_frsize // (4 * PAGE_SIZE)))

    def _commit(self, batches: list[CommitBatch]) -> None:
        run, apply = self._cursor.execute, self._verbs.apply
        try:
            with translated(self._path):
                self._refuse_if_unfit()
                run("BEGIN IMMEDIATE")
                if not self._write_in_bulk(batches):
                    self._bulk.forget()
                    for batch in batches:
                        batch.results = [w.execute(group, apply) for group in batch.groups]
                run("COMMIT")
                self._file.committed(self._wal_pages)
        except Exception as problem:
            self._roll_back()
            if len(batches) == 1 or isinstance(problem, LedgerError):
                for batch in batches:
                    batch.error = as_duly(problem)
                return
            # One caller's trouble must not be everyone's: each gets a transaction of its own.
            for batch in batches:
                self._commit([batch])

    def _scrub(self, batch: _Scrub) -> None:
        try:
            with translated(self._path):
                self._refuse_if_unfit()
                self._db.execute("VACUUM")
                self._file.settled()
                with suppress(apsw.BusyError):  # another connection reads: the log is cut off when we close
                    self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except Exception as problem:
            batch.error = as_duly(problem)

    def _refuse_if_unfit(self) -> None:
        if self._file.problem is not None:
            raise self._file.problem

    def _write_in_bulk(self, batches: list[CommitBatch]) -> bool:
        """Carry all of it out at once, if it is all of the usual kind and goes the usual way."""
        flush = self._bulk.begin()
        for batch in batches:
            batch.results = results = []
            for group in batch.groups:
                expected = flush.add(group)
                if expected is None:
                    return False
                results.append(expected)
        return self._bulk.write(flush, self._verbs.floor.top)

    def _roll_back(self) -> None:
        self._bulk.forget()
        with suppress(apsw.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _converse(self, session: _SqliteSession) -> None:
        written: list[w.Results] = []
        try:
            with translated(self._path):
                self._refuse_if_unfit()
                self._db.execute("BEGIN IMMEDIATE")
        except Exception as problem:
            session.error = problem
        session.settle(session.begun, None, session.error)
        while True:
            verb, args, future = session.calls.get()
            result: Any = None
            error: Exception | None = None
            try:
                if session.error is not None and verb != "rollback":
                    raise ProgramError(
                        f"this transaction was rolled back when a statement failed ({session.error}); "
                        "nothing was stored"
                    ) from session.error
                with translated(self._path):
                    match verb:
                        case "fetch":
                            result = self._db.execute(args[0], args[1]).fetchall()
                        case "write":
                            result = w.execute(args[0], self._verbs.apply)
                            written.append(result)
                        case "commit":
                            floor = self._verbs.read_floor()
                            self._db.execute("COMMIT")
                            self._file.committed(self._wal_pages)
                            self._verbs.floor = floor
                            session.results = written
                            return
                        case _:
                            self._roll_back()
                            return
                if not self._db.in_transaction:
                    raise ProgramError(
                        "this SQL ended the ledger's transaction; leave BEGIN, COMMIT and ROLLBACK out"
                    )
            except Exception as problem:
                self._roll_back()
                session.error = error = problem
            if future is None:
                return
            session.settle(future, result, error)


def _noticed(future: asyncio.Future[Any]) -> None:
    """Mark a session's error as seen: its caller has it, and asyncio need not complain."""
    if not future.cancelled():
        future.exception()
