"""The production SQLite ledger on a simulated disk, in virtual time.

Journal, rows in memory, tables and recovery are the production code. There are no threads: what its writer
and its reader do takes a moment of virtual time, in which the process may die.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from random import Random
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, ParamSpec, TypeVar, cast

import apsw

from duly.core import operations as w
from duly.core.units import SECOND
from duly.errors import LedgerDamaged, LedgerUnavailable, ProgramError
from duly.runtime.clock import Clock
from duly.storage import sql
from duly.storage.group_commit import CommitBatch
from duly.storage.ledger import Record, Refusal, StreamEntry
from duly.storage.memory import Disk
from duly.storage.sql import rows
from duly.storage.sqlite.cached_rows import CachedRows
from duly.storage.sqlite.file import LedgerFile
from duly.storage.sqlite.flushes import Flushes
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.overlay import JournalOverlay
from duly.storage.sqlite.replay import replay
from duly.storage.sqlite.session import SqliteSession
from duly.storage.sqlite.table_rows import TableReader
from duly.storage.sqlite.writer import SqliteWriter
from duly.testing.sim.sector_disk import MOMENT, SectorDisk, SectorFile

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple[Callable[[], None], Callable[[Exception | None], None]]

PAGES: Final = 24
"""Pages in the write-ahead log before a checkpoint: few, so that checkpoints are frequent."""


class _AtOnce(Executor):
    """Runs everything at once, in the thread of its caller."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function; return its result as a future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as problem:
            future.set_exception(problem)
        return future


class SimWriter(SqliteWriter):
    """The production writer without its thread: each job is a moment of the loop."""

    def __init__(
        self, file: LedgerFile, disk: SectorDisk, after: Callable[[], None], durable: Callable[[], None]
    ) -> None:
        self.add_durable = durable
        self._jobs: deque[Job] = deque()
        self._busy = False
        self._disk = disk
        self._after = after
        self.session: InlineSession | None = None
        super().__init__(file)

    def _begin(self) -> None:
        pass

    def _affordable_pages(self) -> int:
        return PAGES

    def put(self, job: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Queue a job; jobs run in order."""
        self._jobs.append((job, done))
        self._go_on()

    def flush(self, bodies: Sequence[bytes], done: Callable[[Exception | None], None]) -> None:
        """Append to the journal, at once if no job waits and the disk is fast."""
        if self._busy or self._disk.takes() > MOMENT:
            self.put(lambda: self.add_to_journal(bodies), done)
        elif not self._disk.dead:
            self._end(self._carry_out(lambda: self.add_to_journal(bodies)), done)

    def _go_on(self) -> None:
        if self._jobs and not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_later(self._disk.takes(), self._next)

    def _next(self) -> None:
        if self._disk.dead:
            return
        job, done = self._jobs.popleft()
        problem = self._carry_out(job)
        if self.session is not None and problem is None:
            self.session.close = lambda: self._end(None, done)
        else:
            self._end(problem, done)

    def _end(self, problem: Exception | None, done: Callable[[Exception | None], None]) -> None:
        self.session = None
        if not self._disk.dead:
            self._after()
        if self._disk.dead:
            return
        long = self._is_log_long(problem)
        self._busy = long  # as in the thread: the loop does not use the connection before a checkpoint
        done(problem)
        if long:
            self._checkpoint()
            self._busy = False
        self._go_on()

    def add_to_journal(self, bodies: Sequence[bytes]) -> None:
        """Append rows to the journal, and note that they are on the disk."""
        super().add_to_journal(bodies)
        self.add_durable()

    def abandon(self) -> None:
        """Close the connection as the death of the process does."""
        with suppress(apsw.Error):
            self.db.close()


class InlineSession(SqliteSession):
    """The production transaction without its thread."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: SimWriter | None = None
        self.close: Callable[[], None] = lambda: None

    def converse(self, writer: SqliteWriter) -> None:
        """Begin the transaction."""
        assert isinstance(writer, SimWriter)
        self._open(writer)
        if self._over:
            self._serve(writer, "rollback", (), None)
        else:
            self._writer = writer
            writer.session = self

    async def _call(self, verb: str, *args: object) -> object:
        if self._over or self._writer is None:
            raise ProgramError("this transaction has ended; open a new one")
        await asyncio.sleep(MOMENT)
        future = self._loop.create_future()
        self._serve(self._writer, verb, args, future)
        return await future

    def end(self, how: str) -> None:
        """End the transaction; only the first call counts."""
        if not self._over:
            self._over = True
            if self._writer is not None:
                self._serve(self._writer, how, (), None)
                self._loop.call_soon(self.close)


class _FewRows(CachedRows):
    """A row cache that is so small that rows are often dropped and read again."""

    rows_kept = 3
    tail = 2


class _SimFlushes(Flushes):
    cached_rows = _FewRows
    doubt: UnsettledFlushes

    def _carry_out(self, batches: Sequence[CommitBatch]) -> list[bytes]:
        bodies = super()._carry_out(batches)
        self.doubt.begin(self._writer.n, bodies, [each for batch in batches for each in batch.results])
        return bodies


class UnsettledFlush(NamedTuple):
    """A flush that began, and is not known to be on the disk."""

    n: int
    body: bytes
    results: list[w.Results]


class UnsettledFlushes:
    """The flushes of a process since the last that is known to be on the disk. Each may be on the disk before
    that is known: the next life of the process finds it, or a later one. A sector that was lost can get its
    content back by a write that the next crash undoes elsewhere."""

    def __init__(self, watch: Callable[[Disk, w.Write, w.Result], None]) -> None:
        self._watch = watch
        self._flushes: list[UnsettledFlush] = []

    def begin(self, n: int, bodies: Sequence[bytes], results: list[w.Results]) -> None:
        """Note that a flush starts, after the row with this number."""
        flush = UnsettledFlush(n + len(bodies), bodies[-1] if bodies else b"", results)
        if bodies:
            self._flushes.append(flush)
        else:
            self._note(flush)

    def settle(self) -> None:
        """Note that the newest flush is on the disk, and so that no earlier one is."""
        if self._flushes:
            self.found(self._flushes[-1])

    def found(self, flush: UnsettledFlush) -> None:
        """Note that this flush is on the disk, and no other."""
        self._flushes = []
        self._note(flush)

    def _note(self, flush: UnsettledFlush) -> None:
        for each in flush.results:
            for operation, result in zip(each.operations, each.values, strict=True):
                self._watch(_NOWHERE, operation, result)

    def find(self, files: SectorDisk) -> UnsettledFlush | None:
        """Return the flush that is on the disk after all: in the journal, or in the tables, if a process died
        while it brought them up to date. It may still be lost if it was not flushed."""
        if not self._flushes:
            return None
        last, newest = _last_row(files.path), self._flushes[-1]
        in_journal = next((flush for flush in reversed(self._flushes) if flush[:2] == last), None)
        if in_journal is None and _left_traces(newest, contents(files)):
            return newest
        return in_journal


def _left_traces(flush: UnsettledFlush, disk: Disk) -> bool:
    """Return whether the messages are where the flush put them, or the deliveries if it moved none."""
    moved: list[bool] = []
    taken: list[bool] = []
    for each in flush.results:
        for operation, result in zip(each.operations, each.values, strict=True):
            if isinstance(operation, w.Advance) and isinstance(result, w.Advanced) and result.moved:
                record = disk.messages.get(operation.key)
                moved.append(record is not None and record.state is operation.to)
            elif isinstance(operation, w.Take) and result:
                delivery = disk.deliveries.get(operation.ref)
                taken.append(delivery is not None and delivery.attempt > operation.attempt)
    # A delivery that ended with its message is gone, so it tells nothing of the flush.
    traces = moved or taken
    return bool(traces) and all(traces)


class JournalLedger(SqliteLedger):
    """A SQLite ledger of a process that may die at every write."""

    session = InlineSession
    confirm = 60 * SECOND
    """the horizon of simulated worlds is minutes"""
    hangs_until = 0.0

    def __init__(
        self, clock: Clock, files: SectorDisk, worker: str,
        fault: Callable[[str], str], crash: Callable[[], None],
        doubt: UnsettledFlushes,
    ) -> None:  # fmt: skip
        files.begin()
        super().__init__(files.path, clock, recent=64, readonly=False)
        self._file = SectorFile(files.path)
        self._reader = _AtOnce()  # type: ignore[assignment]  # an executor like any other
        self.worker = worker
        self._files = files
        self._fault = fault
        self._crash = crash
        self._doubt = doubt

    def begin(self) -> None:
        """Open the file, and bring its tables up to date."""
        try:
            self._open()
        except apsw.Error as problem:  # the process died while the ledger was opened
            raise LedgerUnavailable(str(problem)) from problem

    def _open_writer(self, file: LedgerFile) -> None:
        self._writer = SimWriter(file, self._files, self._may_die, self._doubt.settle)
        self._flushes = flushes = _SimFlushes(self._writer, self._group_commit.flushed)
        flushes.doubt = self._doubt

    def _may_die(self) -> None:
        if self._fault("after") == "crash":
            self._crash()

    @property
    def dead(self) -> bool:
        """Whether its process has died."""
        return self._files.dead

    @dead.setter
    def dead(self, _: bool) -> None:
        """End the ledger with its process: connections are closed, and what was not flushed may be lost."""
        self._files.die()
        if self._flushes is not None:
            if self._flushes._timer is not None:
                self._flushes._timer.cancel()
            with suppress(apsw.Error):
                self._flushes._db.close()
        if isinstance(self._writer, SimWriter):
            self._writer.abandon()
        if self._db is not None:
            with suppress(apsw.Error):
                self._db.close()
        self._file.release()


_NOWHERE: Final = Disk()


def contents(files: SectorDisk) -> Disk:
    """Return what is on a disk, as a reader of the file sees it."""
    disk = Disk()
    if not _is_made(files.path):
        return disk
    db = LedgerFile(files.path).connect(readonly=True)
    try:
        if sql.pending("sqlite", int(db.pragma("user_version"))):
            return disk  # the process died while the ledger was created
        overlay = JournalOverlay(db)
        with overlay.current():
            _read(db, disk)
    finally:
        db.close()
    return disk


def _read(db: apsw.Connection, disk: Disk) -> None:
    for row in db.execute(
        "SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, "
        "moved_at FROM messages"
    ):
        record: Record = rows.record_of(row)
        disk.messages[record.message.key] = record
    for row in db.execute(
        "SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt "
        "FROM deliveries"
    ):
        delivery = rows.delivery_of(row)
        disk.deliveries[delivery.ref] = delivery
    for stream, n, body, at, key in db.execute(
        "SELECT stream, n, body, at, key FROM entries ORDER BY stream, n"
    ):
        disk.streams.setdefault(stream, []).append(StreamEntry(n, body, at, key))
    for row in db.execute("SELECT scope, id, word, reason, at FROM refusals ORDER BY n"):
        disk.refusals.append(Refusal(*row))
    disk.floor = TableReader(db).floor()


def _is_made(path: Path) -> bool:
    """Return whether there is a ledger. While it is being created, SQLite has no write-ahead log, and rolls
    back."""
    return path.exists() and path.stat().st_size > 0 and not path.with_name(path.name + "-journal").exists()


def _last_row(path: Path) -> tuple[int, bytes] | None:
    """Return the last row of the journal in a file that no process uses."""
    if not _is_made(path):
        return None
    db = LedgerFile(path).connect(readonly=True)
    try:
        if not db.table_exists("main", "journal"):
            return None
        return _newest(db)
    finally:
        db.close()


def _newest(db: apsw.Connection) -> tuple[int, bytes] | None:
    found = db.execute("SELECT n, body FROM journal ORDER BY n DESC LIMIT 1").fetchall()
    return cast("tuple[int, bytes]", found[0]) if found else None


def left_in_journal(files: SectorDisk) -> int:
    """Return how many rows of the journal are not in the tables."""
    if not _is_made(files.path):
        return 0
    db = LedgerFile(files.path).connect(readonly=True)
    try:
        return int(db.execute("SELECT count(*) FROM journal").get)
    finally:
        db.close()


def accepts_torn_row(files: SectorDisk, rng: Random) -> bool:
    """Tear the last row of the journal in a copy of the files, and return whether a start accepts it."""
    found = files.path
    if not _is_made(found):
        return False
    with TemporaryDirectory(dir=found.parent.parent) as folder:
        path = Path(folder) / found.name
        for each in found.parent.iterdir():
            copyfile(each, Path(folder) / each.name)
        if not _tear_last_row(path, rng):
            return False
        file = LedgerFile(path)
        db = file.connect()
        try:
            replay(TableReader(db).journal())
        except LedgerDamaged:
            return False
        except Exception:
            return True
        else:
            return True
        finally:
            db.close()


def _tear_last_row(path: Path, rng: Random) -> bool:
    db = LedgerFile(path).connect()
    try:
        if not db.table_exists("main", "journal"):
            return False
        last = _newest(db)
        if last is None:
            return False
        n, body = last
        at = rng.randrange(1, len(body))
        torn = body[:at] + bytes((body[at] ^ 1 << rng.randrange(8),)) + body[at + 1 :]
        db.execute("UPDATE journal SET body = ? WHERE n = ?", (torn, n))
        return True
    finally:
        db.close()
