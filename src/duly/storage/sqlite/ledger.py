"""The embedded ledger: one SQLite file, through apsw (its wheel carries a current SQLite; Debian's own
3.40 can corrupt a WAL with two writers).

The journal is written first. The interpreter carries out a flush on cached rows, on the event loop's thread;
the changes are appended to the journal as one row and flushed (`synchronous=FULL`), and then the results are
returned. The tables are brought up to date a little later, many changes at a time. A query is answered from
the cache, or from the tables after they are brought up to date; either way it sees everything that was
committed, and nothing else.

One process writes a file, under a lock that ends with the process; any number of processes may read. A file
that is not a sound duly ledger is not changed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import apsw
from msgspec.structs import replace

from duly.core import operations as w
from duly.core.messages import Message, Verdict
from duly.errors import LedgerUnavailable, ProgramError, Stopped
from duly.runtime.clock import Clock
from duly.storage import sql
from duly.storage.group_commit import CommitBatch
from duly.storage.ledger import (
    RECENT_KEPT,
    Record,
    StreamEntry,
    StreamPosition,
    Transaction,
    reading,
    repeat_of,
)
from duly.storage.sql import rows
from duly.storage.sql.ledger import SqlLedger
from duly.storage.sqlite.cached_rows import UNREAD, Unread
from duly.storage.sqlite.file import CHECKED_SIZE, LedgerFile, translated
from duly.storage.sqlite.flushes import Flushes
from duly.storage.sqlite.overlay import JournalOverlay
from duly.storage.sqlite.session import SqliteSession
from duly.storage.sqlite.writer import SqliteWriter

T = TypeVar("T")


class SqliteLedger(SqlLedger):
    """A ledger in one file, opened by `duly.open_ledger("sqlite:///app.db")`; `?mode=ro` reads a file that
    another process may write."""

    dialect = "sqlite"
    session: type[SqliteSession] = SqliteSession

    def __init__(self, path: Path, clock: Clock | None, *, recent: int, readonly: bool) -> None:
        super().__init__(clock, recent=recent)
        self._file = LedgerFile(path)
        self.path = self._file.path
        self._readonly = readonly
        if readonly:
            self._group_commit.bar(_read_only)
        self._reading_through: threading.Thread | None = None
        self._closing = threading.Event()
        self._writer: SqliteWriter | None = None
        self._flushes: Flushes | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="duly-read")
        self._db: apsw.Connection | None = None
        self._overlay: JournalOverlay | None = None

    @classmethod
    async def open(cls, path: Path, clock: Clock | None = None, *, readonly: bool = False) -> SqliteLedger:
        """Open or create a file; a file that is not a sound ledger is not changed."""
        ledger = cls(path, clock, recent=RECENT_KEPT, readonly=readonly)
        opening = asyncio.get_running_loop().run_in_executor(ledger._reader, ledger._open)
        try:
            await asyncio.shield(opening)
        except BaseException:
            await asyncio.wait([opening])  # cancelled: the thread still finishes opening the file
            await ledger.close()
            raise
        return ledger

    def _open(self) -> None:
        if not self.path.parent.is_dir():
            raise LedgerUnavailable(f"there is no folder {self.path.parent}; create it first")
        file = self._file
        with translated(self.path):
            if self._readonly:
                file.read_note()
                if not self.path.exists():
                    raise LedgerUnavailable(f"there is no ledger at {self.path}; check the path")
            else:
                file.hold()
                file.finish()
            file.inspect()
            if not self._readonly:
                file.close_to_others()
                self._open_writer(file)
                assert self._flushes is not None
                self._witness.begin(self._flushes.rows.floor)
            self._db = file.connect(readonly=True)
            version = int(self._db.pragma("user_version"))
            if not version:
                raise LedgerUnavailable(f"{self.path} is empty: there is no ledger in it yet")
            if sql.pending("sqlite", version):  # a reader cannot upgrade the schema
                raise LedgerUnavailable(
                    f"{self.path} was written by an older duly (schema {version}); "
                    "open it once without mode=ro to upgrade it"
                )
            if self._readonly:
                self._overlay = JournalOverlay(self._db)
        if not self._readonly and self.path.stat().st_size > CHECKED_SIZE:
            self._reading_through = threading.Thread(
                target=file.read_through, args=(self._closing,), name="duly-check", daemon=True
            )
            self._reading_through.start()

    def _open_writer(self, file: LedgerFile) -> None:
        """Open the writer thread and the flushes."""
        self._writer = SqliteWriter(file)
        self._flushes = Flushes(self._writer, self._group_commit.flushed)

    async def scrub(self) -> None:
        """Rewrite the file, so that it holds no deleted data."""
        await self._group_commit.add(Scrub())

    def check(self) -> None:
        """Raise if the file was moved, removed or truncated."""
        if not self._readonly:
            self._file.check_in_place()
            self._file.check_sizes()

    async def close(self) -> None:
        """Finish the submitted commits, bring the tables up to date, then close the threads and the file."""
        await self._group_commit.close()
        loop = asyncio.get_running_loop()
        self._closing.set()
        if self._reading_through is not None:
            await loop.run_in_executor(self._reader, self._reading_through.join)
        if self._flushes is not None:
            await self._flushes.close()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await loop.run_in_executor(self._reader, writer.close)
        if self._db is not None:
            db, self._db = self._db, None
            await loop.run_in_executor(self._reader, db.close)
        self._reader.shutdown(wait=False)
        self._file.release()
        self._waiters.wake_all()

    # ── writing: callers share a flush ───────────────────────────────────────────────────────────

    def _start(self, batches: list[CommitBatch]) -> None:
        assert self._flushes is not None
        first = batches[0]
        if isinstance(first, SqliteSession):
            self._flushes.converse(first)
        elif isinstance(first, Scrub):
            self._flushes.scrub(first)
        else:
            self._flushes.flush(batches)

    def recall(self, message: Message, now: int) -> Verdict | None:
        """Return the verdict on a repeat, if its message is cached."""
        found = None if self._flushes is None else self._flushes.recall(message.key, now)
        return None if found is None else repeat_of(message, found)

    def _remember(self, committed: Iterable[w.Results]) -> None:
        """Do nothing: `recall` reads the cached rows."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the caller; the writer thread serves no other caller until it ends."""
        return self._transaction()

    def maintenance(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the ledger's own statements, which may change its tables."""
        return self._transaction(own=True)

    @asynccontextmanager
    async def _transaction(self, *, own: bool = False) -> AsyncIterator[Transaction]:
        with self._group_commit.within():
            session = self.session()
            session.own = own
            through = self._group_commit.add(session)
            through.add_done_callback(_noticed)
            try:
                await session.begun
                yield session
                session.check_awaited()
                session.end("commit")
                await asyncio.shield(through)
            finally:
                session.end("rollback")  # has no effect after a commit

    # ── reading: from memory, or from tables that are up to date ─────────────────────────────────

    def _open_db(self) -> apsw.Connection:
        if self._db is None:
            raise Stopped("this ledger is closed")
        if self._file.problem is not None:
            raise self._file.problem
        return self._db

    async def _in_reader(self, question: Callable[[apsw.Connection], T]) -> T:
        """Run a query on the tables, in the reader's thread."""
        db, overlay = self._open_db(), self._overlay

        def run() -> T:
            with translated(self.path):
                if overlay is None:
                    return question(db)
                with overlay.current():
                    return question(db)

        with reading(self):
            return await asyncio.get_running_loop().run_in_executor(self._reader, run)

    async def _read(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        self._open_db()
        if self._flushes is not None:
            await self._flushes.settled()
        return await self._ask(name, *args)

    async def _ask(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a named query on the tables, without bringing them up to date first."""
        statement = self._queries[name]
        return await self._in_reader(lambda db: db.execute(statement, args).fetchall())

    async def find(self, key: bytes) -> Record | None:
        """Return the record of a message."""
        self._open_db()
        if self._flushes is not None:
            known = await self._flushes.ask(lambda cached: cached.record(key))
            if known is not UNREAD:
                return known
        found = await self._ask("find", key)
        return rows.record_of(found[0]) if found else None

    async def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        return (await self.items([(bucket, name)]))[0]

    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Return the items of many (bucket, name), with one query."""
        self._open_db()
        known: dict[tuple[str, str], bytes | None] = {}
        if self._flushes is not None:
            known = await self._flushes.ask(
                lambda cached: {
                    place: body for place in places if (body := cached.items.get(place, UNREAD)) is not UNREAD
                }
            )
        unread = [place for place in dict.fromkeys(places) if place not in known]
        if unread:
            statement = self._queries["item"]
            found = await self._in_reader(
                lambda db: [db.execute(statement, place).fetchall() for place in unread]
            )
            for place, row in zip(unread, found, strict=True):
                known[place] = cast("bytes", row[0][0]) if row else None
        return [known[place] for place in places]

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        """Return entries of a stream."""
        self._open_db()
        tail: list[StreamEntry] = []
        bodies: dict[int, bytes] = {}
        if self._flushes is not None:
            known = await self._flushes.ask(lambda cached: cached.entries(stream, after, limit))
            if known.whole:
                return known.tail
            tail, bodies = known.tail, known.bodies
        found = [StreamEntry(*row) for row in await self._ask("entries", stream, after, limit)]
        if tail:
            found = [entry for entry in found if entry.n < tail[0].n] + tail
        return [replace(e, body=bodies[e.n]) if e.n in bodies else e for e in found[:limit]]

    async def cursor(self, stream: str, reader: str) -> int:
        """Return the position of a reader in a stream."""
        return (await self.standing([(stream, reader)]))[0].cursor or 0

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return the last numbers of streams and the positions of readers in them."""
        self._open_db()
        known: list[tuple[int | Unread, int | Unread | None]] = [(UNREAD, UNREAD)] * len(places)
        if self._flushes is not None:
            known = await self._flushes.ask(lambda cached: [cached.standing(*place) for place in places])
        unread = [place for place, both in zip(places, known, strict=True) if UNREAD in both]
        if unread:
            statement = self._queries["standing"]
            found = await self._in_reader(lambda db: [db.execute(statement, p).fetchall()[0] for p in unread])
            stored: dict[tuple[str, str], Any] = dict(zip(unread, found, strict=True))
        return [
            StreamPosition(
                stored[place][0] if last is UNREAD else last, stored[place][1] if cursor is UNREAD else cursor
            )
            for place, (last, cursor) in zip(places, known, strict=True)
        ]

    def _key_list(self, keys: Sequence[bytes]) -> str:
        return json.dumps([key.hex() for key in keys])

    def _name_list(self, names: Collection[str]) -> str:
        return json.dumps(list(names))

    def _ref_lists(self, refs: Sequence[w.DeliveryRef]) -> tuple[str]:
        return (json.dumps([(ref.key.hex(), ref.channel, ref.recipient, ref.round) for ref in refs]),)


class Scrub(CommitBatch):
    """A request to rewrite the file."""

    alone = True

    def __init__(self) -> None:
        super().__init__(())


def _read_only() -> ProgramError:
    return ProgramError("this ledger was opened with mode=ro; open it without to write")


def _noticed(future: asyncio.Future[Any]) -> None:
    """Mark a session's error as retrieved: its caller has it, and asyncio must not log it."""
    if not future.cancelled():
        future.exception()
