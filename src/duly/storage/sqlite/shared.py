"""The SQLite ledger that several processes share: `sqlite:///app.db?mode=shared`, which `duly.once` opens by
itself.

No process knows what another has written, so nothing is cached: a flush takes SQLite's write lock, reads the
rows that it touches, carries out its operations on them and commits, with `synchronous=FULL`
(`shared_flush`). One polling query serves all callers that wait for another process.

SQLite's locks do not survive a fork. So all connections are closed before this process forks, and opened
again when they are next needed; the child never uses the ledgers that it inherits.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw

from duly.core import operations as w
from duly.core.messages import Message, Verdict
from duly.errors import LedgerError, LedgerInUse, LedgerUnavailable, ProgramError, Stopped
from duly.runtime.clock import Clock
from duly.storage import sql
from duly.storage.caller_statements import CallerStatements
from duly.storage.group_commit import CommitBatch
from duly.storage.ledger import StreamPosition, Transaction, reading
from duly.storage.sql.ledger import as_duly
from duly.storage.sql.polled import PolledLedger
from duly.storage.sqlite.caller_sql import ENDED, CallerSql
from duly.storage.sqlite.file import BUSY_MS, connect, translated
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.shared_file import SharedFile
from duly.storage.sqlite.shared_flush import Row, flush

T = TypeVar("T")

PATIENCE: Final = 3.0
"""How many seconds `open` waits for a process that owns the file, perhaps only to prepare it."""
TRY_AGAIN: Final = 0.02
FORK_SECONDS: Final = 5.0
"""How long a fork waits for writes under way."""


class SharedSqliteLedger(PolledLedger):
    """A ledger in a file that other processes write as well."""

    dialect = "sqlite"
    poll_seconds = 0.01

    def __init__(self, path: Path, clock: Clock | None) -> None:
        super().__init__(clock, recent=1)
        self._file = SharedFile(path)
        self.path = self._file.path
        self._group_commit.locked = self.path
        self._pid = os.getpid()
        self._writer = _Connection(self._file, "duly-write", readonly=False)
        self._reader = _Connection(self._file, "duly-read", readonly=True)

    @classmethod
    async def open(cls, path: Path, clock: Clock | None = None) -> SharedSqliteLedger:
        """Join the processes that share a file; the first one creates and checks it."""
        ledger = cls(path, clock)
        with translated(ledger.path):
            await ledger._join(clock)
        return ledger

    async def _join(self, clock: Clock | None) -> None:
        if not self.path.parent.is_dir():
            raise LedgerUnavailable(f"there is no folder {self.path.parent}; create it first")
        until = time.monotonic() + PATIENCE
        prepared = False
        while not self._file.join(prepared=prepared):
            prepared = False
            if time.monotonic() > until:
                raise self._file.in_use()
            try:
                await (await SqliteLedger.open(self.path, clock)).close()
                prepared = True
            except LedgerInUse:
                await asyncio.sleep(TRY_AGAIN)
        _OPEN.add(self)
        self.worker = self._file.enter(self.worker)
        try:
            self._witness.begin(await self.floor())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish the submitted commits, then close the threads and the file."""
        await self._finish()
        self.drop()

    def drop(self) -> None:
        """Close the threads and the file now, without the event loop, which may have ended."""
        self._closed = True
        if self._pid != os.getpid():
            return  # inherited through a fork: this process must not touch it
        self._writer.close()
        self._reader.close()
        self._file.release()
        _OPEN.discard(self)

    def leave_to_parent(self) -> None:
        """Close, in a forked child, the descriptors that would make its parent seem alive."""
        self._file.leave_to_parent()

    def check(self) -> None:
        """Raise if the file was moved or removed."""
        self._file.check_in_place()

    def is_gone(self, worker: str) -> bool:
        """Return whether a worker has certainly ended: the kernel has released its presence lock."""
        return self._file.is_gone(worker)

    def recall(self, message: Message, now: int) -> Verdict | None:
        """Return None: another process may have changed what this one remembers."""
        return None

    def _remember(self, committed: Iterable[w.Results]) -> None:
        """Remember nothing, for the same reason."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def _start(self, batches: list[CommitBatch]) -> None:
        first = batches[0]
        if isinstance(first, _SharedSession):
            if not first.turn.done():
                first.turn.set_result(None)
            else:  # the caller was cancelled
                asyncio.get_running_loop().call_soon(self._group_commit.flushed, batches)
            return
        loop = asyncio.get_running_loop()

        def work() -> None:
            self._commit(batches)
            with suppress(RuntimeError):  # the event loop has ended; what was committed stays committed
                loop.call_soon_threadsafe(self._group_commit.flushed, batches)

        self._writer.submit(work)

    def _commit(self, batches: list[CommitBatch]) -> None:
        try:
            with translated(self.path), self._writer.used() as db:
                db.execute("BEGIN IMMEDIATE")
                try:
                    results = flush(db.execute, [group for batch in batches for group in batch.groups])
                    for batch in batches:
                        batch.results = list(islice(results, len(batch.groups)))
                    self._file.check_in_place()
                    db.execute("COMMIT")
                except BaseException:
                    _roll_back(db)
                    raise
        except Exception as problem:
            if len(batches) == 1 or isinstance(problem, LedgerError):
                for batch in batches:
                    batch.error = as_duly(problem)
                return
            # One caller's error must not fail the others: each batch gets a transaction of its own.
            for batch in batches:
                self._commit([batch])

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the caller; no other process writes until it ends."""
        return self._transaction()

    def maintenance(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the ledger's own statements, which may change its tables."""
        return self._transaction(own=True)

    @asynccontextmanager
    async def _transaction(self, *, own: bool = False) -> AsyncIterator[Transaction]:
        with self._group_commit.within():
            session = _SharedSession(self._writer, own=own)
            through = self._group_commit.add(session)
            try:
                await session.turn
            except BaseException:
                if not session.turn.cancelled():  # the turn had come
                    self._group_commit.flushed([session])
                through.cancel()
                raise
            try:
                await session.begin()
                yield session
                session.check_awaited()
                await session.commit()
            except BaseException as problem:
                session.error = problem if isinstance(problem, Exception) else Stopped("cancelled")
                raise
            finally:
                await session.end()
                through.cancel()
                self._group_commit.flushed([session])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, look: Callable[[apsw.Connection], T]) -> T:
        if self._closed:
            raise Stopped("this ledger is closed")

        def work() -> T:
            with translated(self.path), self._reader.used() as db:
                return look(db)

        with reading(self):
            return await asyncio.wrap_future(self._reader.submit(work))

    async def _read(self, name: str, *args: Any) -> list[Row]:
        statement = self._queries[name]
        return await self._ask(lambda db: db.execute(statement, args).fetchall())

    def _key_list(self, keys: Sequence[bytes]) -> str:
        return json.dumps([key.hex() for key in keys])

    def _name_list(self, names: Collection[str]) -> str:
        return json.dumps(list(names))

    def _ref_lists(self, refs: Sequence[w.DeliveryRef]) -> tuple[str]:
        return (json.dumps([(ref.key.hex(), ref.channel, ref.recipient, ref.round) for ref in refs]),)

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return the last numbers of streams and the positions of readers in them."""
        statement = self._queries["standing"]
        return await self._ask(
            lambda db: [StreamPosition(*row) for place in places for row in db.execute(statement, place)]
        )

    async def _settled(self, keys: Sequence[bytes]) -> list[bytes]:
        statement, awaited = sql.queries("sqlite", "shared")["settled"], self._key_list(keys)
        found: list[Row] = await self._ask(lambda db: db.execute(statement, (awaited,)).fetchall())
        return [key for (key,) in found]


class _SharedSession(CommitBatch, CallerStatements):
    """A caller's transaction. The first error ends it, even if the caller catches it."""

    alone = True

    def __init__(self, writer: _Connection, *, own: bool) -> None:
        CommitBatch.__init__(self, ())
        CallerStatements.__init__(self)
        self._writer = writer
        self._own = own
        self._db: apsw.Connection | None = None
        self._over = False
        self._written: list[w.Results] = []
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """done when no other flush of this process is under way, and none begins until this ends"""

    async def begin(self) -> None:
        """Take SQLite's write lock."""

        def work() -> None:
            self._db = db = self._writer.take()
            try:
                db.execute("BEGIN IMMEDIATE")
            except BaseException:
                self._writer.give_back()
                self._db = None
                raise

        await self._do(work)

    async def _fetch(self, statement: str, args: Row) -> list[Row]:
        caller_sql, own = self._writer.caller_sql, self._own
        return await self._call(lambda db: caller_sql.fetch(db, statement, args, own=own))

    async def write(self, *operations: w.Write) -> w.Results:
        """Carry out a group of operations."""
        (results,) = await self._call(lambda db: flush(db.execute, (operations,)))
        self._written.append(results)
        return results

    async def commit(self) -> None:
        """Commit, unless a statement has failed."""
        await self._call(_commit)
        self.results = self._written

    async def end(self) -> None:
        """Roll back if the transaction was not committed, and let the next flush begin."""
        self._over = True

        def work() -> None:
            if self._db is not None:
                _roll_back(self._db)
                self._db = None
                self._writer.give_back()

        ending = asyncio.ensure_future(self._do(work))
        while not ending.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(ending)

    async def _call(self, do: Callable[[apsw.Connection], T]) -> T:
        if self._over:
            raise ProgramError("this transaction has ended; open a new one")
        if self.error is not None:
            raise ProgramError(
                f"this transaction was rolled back when a statement failed ({self.error}); nothing was stored"
            ) from self.error
        committing = do is _commit

        def work() -> T:
            assert self._db is not None
            try:
                done = do(self._db)
                if not committing and not self._db.in_transaction:
                    raise ProgramError(ENDED)
            except Exception as problem:
                _roll_back(self._db)
                self.error = problem
                raise
            return done

        return await self._do(work)

    async def _do(self, work: Callable[[], T]) -> T:
        def translating() -> T:
            with translated(self._writer.path):
                return work()

        return await asyncio.wrap_future(self._writer.submit(translating))


def _commit(db: apsw.Connection) -> None:
    db.execute("COMMIT")


def _roll_back(db: apsw.Connection) -> None:
    with suppress(apsw.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")


class _Connection:
    """A connection with its thread; it is opened at first use and closed before this process forks."""

    def __init__(self, file: SharedFile, name: str, *, readonly: bool) -> None:
        self.path = file.path
        self._file = file
        self._readonly = readonly
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._db: apsw.Connection | None = None
        self._in_use = threading.Lock()
        self.caller_sql = CallerSql()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the thread; return its future."""
        try:
            return self._thread.submit(work)
        except RuntimeError:
            raise Stopped("this ledger is closed") from None

    def take(self) -> apsw.Connection:
        """Return the connection; it stays open until `give_back`."""
        self._in_use.acquire()
        try:
            if self._db is None:
                self._db = connect(self.path, readonly=self._readonly)
                self._db.set_busy_handler(_Patience())
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA cache_size = -16384")
                self._file.reopened()
        except BaseException:
            self._in_use.release()
            raise
        return self._db

    def give_back(self) -> None:
        """Allow the connection to be closed."""
        self._in_use.release()

    @contextmanager
    def used(self) -> Iterator[apsw.Connection]:
        """Yield the connection; it stays open during the block."""
        db = self.take()
        try:
            yield db
        finally:
            self.give_back()

    def close(self) -> None:
        """End the thread, and close the connection."""
        self._thread.shutdown(wait=True)
        self.rest(FORK_SECONDS)

    def rest(self, seconds: float) -> bool:
        """Close the connection until its next use; return False if it was not free within this time."""
        if not self._in_use.acquire(timeout=seconds):
            return False
        if self._db is not None:
            with suppress(apsw.Error):
                self._db.close()
            self._db = None
        self._in_use.release()
        return True


class _Patience:
    """The busy handler, which waits while another process writes. SQLite's own pauses grow to a tenth of a
    second; these do not grow."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self, tries: int) -> bool:
        now = time.monotonic()
        if not tries:
            self._since = now
        time.sleep(random.uniform(0.000_2, 0.001))
        return (now - self._since) * 1_000 < BUSY_MS


# ── forks ────────────────────────────────────────────────────────────────────────────────────────

_OPEN: Final[weakref.WeakSet[SharedSqliteLedger]] = weakref.WeakSet()
_INHERITED: Final[list[object]] = []
"""Ledgers of the parent process, kept after a fork so that the garbage collector does not close them here."""


def _rest_before_fork() -> None:
    for ledger in list(_OPEN):
        for connection in ledger_connections(ledger):
            connection.rest(FORK_SECONDS)


def ledger_connections(ledger: SharedSqliteLedger) -> Iterable[_Connection]:
    """Return the connections of a ledger, which are closed before a fork."""
    return ledger._writer, ledger._reader


def _keep_inherited() -> None:
    for ledger in _OPEN:
        ledger.leave_to_parent()
    _INHERITED.extend(_OPEN)
    _OPEN.clear()


os.register_at_fork(before=_rest_before_fork, after_in_child=_keep_inherited)
