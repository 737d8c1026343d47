"""The shared ledger: PostgreSQL, written by any number of hubs at once, through asyncpg.

The laws. Callers gather (`duly.storage.group_commit`) and a flush is one transaction (`postgres_flush`), on a
connection that nobody else can keep busy. A transaction that lost a race is done again. Results are given
out after the server has flushed them, whatever its default is. When the server is away, callers hear it
at once and nothing is half stored; when it is back, the same ledger goes on.
A server that does not answer is as good as away, within seconds (`postgres_watch`).
Another hub may end a message, so whoever waits is served by looking: one query for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from itertools import islice
from typing import Any, Final

from duly.core import operations as w
from duly.core.trusted_time import Floor
from duly.errors import DulyError, LedgerError, LedgerUnavailable, Malformed, ProgramError, Stopped
from duly.runtime.clock import Clock
from duly.runtime.tasks import Supervisor
from duly.storage import sql
from duly.storage.group_commit import CommitBatch, GroupCommit
from duly.storage.ledger import (
    HOT_IDS,
    NEWEST,
    AgedMessage,
    Description,
    Ledger,
    Record,
    Refusal,
    Size,
    StreamEntry,
    StreamPosition,
    StreamRange,
    Transaction,
)
from duly.storage.postgres.flush import ConcurrentChange, FlushResult, flush
from duly.storage.postgres.watch import DoubtfulCommits, StatementWatch, asyncpg, process_of
from duly.storage.sql import rows

SESSIONS: Final = 8
"""Most transactions of callers at once; two more connections are for reading, one is for the flush."""
ATTEMPTS: Final = 10
INSPECT_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.025
CONNECTING: Final[dict[str, Any]] = {
    "timeout": 3,
    "command_timeout": 60,
    # A plan made for an empty table would be kept while it grows: locking 200 of 300,000 rows took 830 ms
    # with it, 4 ms when planned for the table as it is. Planning costs 0.1 ms.
    "server_settings": {
        "application_name": "duly",
        "synchronous_commit": "on",
        "plan_cache_mode": "force_custom_plan",
    },
}


RELEASE_SECONDS: Final = 3
"""How long giving a connection back to the pool may take; then it is closed."""

GONE: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a connection says that is given back when its server is away."""


class PostgresLedger(Ledger):
    """Opened by `duly.open_ledger("postgresql://…")`."""

    sole = False

    def __init__(self, url: str, clock: Clock | None, *, hot: int) -> None:
        super().__init__(clock, hot=hot)
        self._url = url
        self._gather = GroupCommit(self._start, self._learn)
        self._pool: Any = None
        self._line: Any = None
        self._process: tuple[int, Any] = (0, None)
        """the server's process behind the line"""
        self._watch = StatementWatch(url)
        self._doubts = DoubtfulCommits(url, CONNECTING)
        self._sessions = asyncio.Semaphore(SESSIONS)
        self._closed = False
        self._tasks = Supervisor()
        self._look_soon: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, url: str, clock: Clock | None = None, *, hot: int = HOT_IDS) -> PostgresLedger:
        ledger = cls(url, clock, hot=hot)
        try:
            with _translated():
                # No connection is held in reserve: the pool would complain whenever the server is away.
                ledger._pool = await asyncpg.create_pool(url, min_size=0, max_size=SESSIONS + 2, **CONNECTING)
                await ledger._migrate()
                ledger._witness.begin(await ledger.floor())
        except BaseException as error:
            await ledger.close()
            if isinstance(error, ValueError):
                raise Malformed(f"this is not the address of a PostgreSQL database: {error}") from error
            raise
        return ledger

    async def _migrate(self) -> None:
        queries = sql.queries("postgres")
        async with self._pool.acquire() as connection, connection.transaction(isolation="read_committed"):
            await connection.execute(queries["migrating"])
            if not await connection.fetchval(queries["has_schema"]):
                await connection.execute(queries["create_schema"])
            for migration in sql.pending("postgres", await connection.fetchval(queries["version"])):
                await connection.execute(migration.sql)
                await connection.execute(queries["migrated"], migration.number, migration.name)

    async def close(self) -> None:
        await self._gather.close()
        self._closed = True
        if self._look_soon is not None:
            self._look_soon.cancel()
        self._wake_all()
        await self._tasks.finish()
        if self._line is not None:
            line, self._line = self._line, None
            with suppress(*GONE):
                await line.close(timeout=RELEASE_SECONDS)
        self._watch.close()
        if self._pool is not None:
            await self._close_pool()

    async def _close_pool(self) -> None:
        """The pool waits for everybody to say goodbye; not for a server that does not answer."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def commit(self, groups: Sequence[w.Group]) -> asyncio.Future[list[w.Results]]:
        self._gather.not_within()
        return self._gather.add(CommitBatch(groups))

    def _start(self, batches: list[CommitBatch]) -> None:
        self._spawn(self._flush(batches))

    def _spawn(self, work: Any) -> None:
        self._tasks.do("a job of the ledger", work)

    async def _flush(self, batches: list[CommitBatch]) -> None:
        try:
            await self._commit(batches)
        except asyncio.CancelledError:
            for batch in batches:
                batch.error = Stopped(f"the program ended before the ledger had answered; {MAYBE}")
            raise
        finally:
            self._gather.flushed(batches)

    async def _commit(self, batches: list[CommitBatch]) -> None:
        try:
            flushed = await self._transact([group for batch in batches for group in batch.groups])
        except Exception as problem:
            if len(batches) == 1 or isinstance(problem, LedgerError):
                for batch in batches:
                    batch.error = _as_duly(problem)
                return
            # One caller's trouble must not be everyone's: each gets a transaction of its own.
            for batch in batches:
                await self._commit([batch])
        else:
            results = iter(flushed.results)
            for batch in batches:
                batch.results = list(islice(results, len(batch.groups)))
            batches[0].applied = flushed.applied

    async def _transact(self, groups: list[w.Group]) -> FlushResult:
        for _ in range(ATTEMPTS):
            with _translated():
                line = await self._ready_line()
                transaction = line.transaction(isolation="read_committed")
                try:
                    with self._watch.over(line):
                        await transaction.start()
                        flushed = await flush(line, groups)
                except (ConcurrentChange, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                    await transaction.rollback()
                    continue
                except BaseException:
                    self._hang_up()
                    raise
            with _translated(committing=True):
                try:
                    with self._watch.over(line):
                        await transaction.commit()
                except BaseException:
                    self._doubts.add(self._process)
                    self._hang_up()
                    raise
            return flushed
        raise LedgerUnavailable(OVERTAKEN)

    async def _ready_line(self) -> Any:
        if self._doubts:
            await self._doubts.settle()
        if self._line is None or self._line.is_closed():
            self._line = await asyncpg.connect(self._url, **CONNECTING)
            with self._watch.over(self._line):
                self._process = await process_of(self._line)
        return self._line

    def _hang_up(self) -> None:
        """Whatever was open on the connection is rolled back by the server."""
        if self._line is not None:
            self._line.terminate()
            self._line = None

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        with self._gather.within():
            async with self._sessions, self._connection() as connection:
                session = _PostgresSession(connection, self._watch)
                transaction = connection.transaction(isolation="read_committed")
                with _translated(), self._watch.over(connection):
                    await transaction.start()
                try:
                    yield session
                    session.check()
                except BaseException:
                    with suppress(*GONE), self._watch.over(connection):
                        await transaction.rollback()
                    raise
                finally:
                    session.over = True
                with _translated(committing=True), self._watch.over(connection):
                    await transaction.commit()
        self._learn(session.applied)

    @contextmanager
    def _asking_the_pool(self) -> Iterator[None]:
        # The pool is closed last. Whoever was woken by the closing must not find it open and wait again.
        if self._closed:
            raise Stopped("this ledger is closed")
        try:
            with _translated():
                yield
        except LedgerUnavailable:
            if self._closed:
                raise Stopped("this ledger is closed") from None
            raise

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        with self._asking_the_pool():
            if self._doubts:
                await self._doubts.settle()
            connection = await self._pool.acquire()
        try:
            yield connection
        finally:
            with suppress(*GONE):
                await self._pool.release(connection, timeout=RELEASE_SECONDS)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def _read(self, name: str, *args: Any) -> list[Any]:
        async with self._connection() as connection:
            with self._asking_the_pool(), self._watch.over(connection):
                found: list[Any] = await connection.fetch(sql.queries("postgres")[name], *args)
        return found

    async def find(self, key: bytes) -> Record | None:
        found = await self._read("find", key)
        return rows.record_of(found[0]) if found else None

    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        found = await self._read("key_below", top, count - 1)
        return found[0][0] if found else None

    async def _between(
        self, end: bytes, top: bytes, lead: bytes | None, open_only: bool, limit: int
    ) -> list[Record]:
        return [rows.record_of(row) for row in await self._read("between", end, top, lead, open_only, limit)]

    async def alerts(self, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        return [rows.record_of(row) for row in await self._read("alerts", *before, limit)]

    async def open_deliveries(self, channel: str) -> list[w.OpenDelivery]:
        return [rows.open_of(row) for row in await self._read("open", channel)]

    async def booked(self, channel: str, recipients: Collection[str]) -> list[w.OpenDelivery]:
        return [rows.open_of(row) for row in await self._read("booked", channel, list(recipients))]

    async def strays(
        self, channel: str, *, here: Collection[str], worker: str, living: Collection[str], now: int
    ) -> list[w.OpenDelivery]:
        found = await self._read("strays", channel, list(here), worker, list(living), now)
        return [rows.open_of(row) for row in found]

    async def find_all(self, keys: Collection[bytes]) -> list[Record]:
        return [rows.record_of(row) for row in await self._read("find_all", list(keys))] if keys else []

    async def lasts(self, streams: Collection[str]) -> dict[str, int]:
        return dict(await self._read("lasts", list(streams))) if streams else {}

    async def deliveries(self, key: bytes) -> list[w.Delivery]:
        return [rows.delivery_of(row) for row in await self._read("deliveries", key)]

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        return [StreamEntry(*row) for row in await self._read("entries", stream, after, limit)]

    async def extent(self, stream: str) -> StreamRange:
        ((first, last),) = await self._read("extent", stream)
        last = last or 0
        return StreamRange(first or last + 1, last)

    async def cursor(self, stream: str, reader: str) -> int:
        found = await self._read("cursor", stream, reader)
        return int(found[0][0]) if found else 0

    async def cursors(self, stream: str) -> dict[str, int]:
        return dict(await self._read("cursors", stream))

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        if not places:
            return []
        return [StreamPosition(*row) for row in await self._read("standing", *zip(*places, strict=True))]

    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        return {mark: (n, ms) for mark, n, ms in await self._read("marks", lead)}

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        return dict(await self._read("bucket", bucket))

    async def item(self, bucket: str, name: str) -> bytes | None:
        found = await self._read("item", bucket, name)
        return found[0][0] if found else None

    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        buckets, names = [bucket for bucket, _ in places], [name for _, name in places]
        return [body for (body,) in await self._read("items", buckets, names)] if places else []

    async def counts(self, buckets: Collection[str]) -> dict[str, int]:
        return dict(await self._read("counts", list(buckets))) if buckets else {}

    async def refusals(self, limit: int = 100) -> list[Refusal]:
        return [Refusal(*row) for row in await self._read("refusals", limit)]

    async def size(self) -> Size:
        return Size(*(await self._read("size"))[0])

    async def describe(self) -> Description:
        return Description(*(await self._read("describe"))[0])

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def watch(self, key: bytes) -> Iterator[asyncio.Future[None]]:
        with super().watch(key) as news:
            self._schedule_look()
            yield news

    def _schedule_look(self) -> None:
        if self._look_soon is None and self._waiters and not self._closed:
            loop = asyncio.get_running_loop()
            self._look_soon = loop.call_later(POLL_SECONDS, lambda: self._spawn(self._look()))

    async def _look(self) -> None:
        """Wake those whose message was ended by another hub."""
        try:
            with suppress(LedgerUnavailable, Stopped):
                for (key,) in await self._read("settled", list(self._waiters)):
                    self._wake(key)
        finally:
            self._look_soon = None
            self._schedule_look()

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    async def prunable(self, limit: int = 1_000) -> list[Record]:
        by = (await self._would_raise()).until
        return [rows.record_of(row) for row in await self._read("would_prune", by, limit)]

    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        queries = sql.queries("postgres")
        async with self.transaction() as tx:
            ((*row,),) = await tx.fetch(queries["hold_floor"])
            floor = self._raised(Floor(*row))
            await tx.execute(queries["set_floor"], *rows.floor_row(floor))
            if keys is None:
                found = await tx.fetch(queries["prunable"], floor.until, limit)
            else:
                found = await tx.fetch(queries["prunable_of"], floor.until, list(keys[:limit]))
            old = [key for (key,) in found]
            await tx.execute(queries["forget_deliveries"], old)
            await tx.execute(queries["forget"], old)
        return len(old)

    async def floor(self) -> Floor:
        return Floor(*(await self._read("floor"))[0])

    async def _set_floor(self, floor: Floor) -> None:
        async with self.transaction() as tx:
            await tx.execute(sql.queries("postgres")["set_floor"], *rows.floor_row(floor))

    async def aged(self, after: tuple[int, bytes], until: int, limit: int = 100) -> list[AgedMessage]:
        return rows.aged_of(await self._read("aged", *after, until, limit))

    async def forget_deliveries(self, refs: Sequence[w.DeliveryRef]) -> int:
        if not refs:
            return 0
        these = zip(*map(rows.names, sorted(refs, key=rows.names)), strict=True)
        async with self.transaction() as tx:
            return len(await tx.fetch(sql.queries("postgres")["forget_ended_deliveries"], *these))

    async def scrub(self) -> None:
        with self._asking_the_pool():
            await self._pool.execute(sql.queries("postgres")["scrub"])

    async def trim(self, stream: str, through: int) -> None:
        async with self.transaction() as tx:
            await tx.execute(sql.queries("postgres")["trim"], stream, through)


class _PostgresSession:
    """A caller's transaction. The first error ends it, whatever its caller does about it: PostgreSQL would
    answer a COMMIT after it with a silent rollback."""

    def __init__(self, connection: Any, watch: StatementWatch) -> None:
        self._connection = connection
        self._watch = watch
        self._lock = asyncio.Lock()
        self._error: BaseException | None = None
        self.over = False
        self.applied: list[tuple[w.Write, w.Result]] = []

    async def execute(self, statement: str, *args: Any) -> None:
        await self.fetch(statement, *args)

    async def fetch(self, statement: str, *args: Any) -> list[tuple[Any, ...]]:
        async with self._turn():
            found = await self._connection.fetch(statement, *args)
        return [tuple(row) for row in found]

    async def write(self, *writes: w.Write) -> w.Results:
        async with self._turn():
            for _ in range(ATTEMPTS):
                with suppress(ConcurrentChange):
                    async with self._connection.transaction():  # a savepoint
                        flushed = await flush(self._connection, [writes])
                    self.applied += flushed.applied
                    return flushed.results[0]
            raise LedgerUnavailable(OVERTAKEN)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One call at a time: a connection does not take two."""
        async with self._lock:
            if self.over:
                raise ProgramError("this transaction has ended; open a new one")
            self.check()
            try:
                with _translated(), self._watch.over(self._connection):
                    yield
                if not self._connection.is_in_transaction():
                    raise ProgramError(
                        "this SQL ended the ledger's transaction; leave BEGIN, COMMIT and ROLLBACK out"
                    )
            except BaseException as error:
                self._error = error
                raise

    def check(self) -> None:
        if self._error is not None:
            raise ProgramError(
                f"this transaction was rolled back when a statement failed ({self._error}); "
                "nothing was stored"
            ) from self._error


OVERTAKEN: Final = f"other hubs were faster {ATTEMPTS} times in a row; nothing was stored. Try again"
MAYBE: Final = "it may or may not be stored. Repeat it with the same ids: that is safe either way"


@contextmanager
def _translated(*, committing: bool = False) -> Iterator[None]:
    """Turn what PostgreSQL and the network say into our errors: who can mend it, and what to do."""
    stored = MAYBE if committing else "nothing was stored. Try again when it is back"
    try:
        yield
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise LedgerError(
            f"PostgreSQL does not let us in ({error}); check the user, password and database"
        ) from error
    except asyncpg.InsufficientResourcesError as error:
        raise LedgerUnavailable(
            f"PostgreSQL has run out of room or connections ({error}); nothing was stored. "
            "Free some, then try again"
        ) from error
    except (
        OSError,
        TimeoutError,
        asyncpg.PostgresConnectionError,
        asyncpg.OperatorInterventionError,
        asyncpg.ReadOnlySQLTransactionError,
        asyncpg.InternalClientError,
    ) as error:
        raise LedgerUnavailable(f"PostgreSQL cannot be used now ({error!r}); {stored}") from error
    except asyncpg.InterfaceError as error:
        if isinstance(error, ValueError):  # an argument that the driver cannot send
            raise
        raise LedgerUnavailable(f"PostgreSQL cannot be used now ({error}); {stored}") from error


def _as_duly(problem: Exception) -> DulyError:
    if isinstance(problem, DulyError):
        return problem
    trouble = ProgramError(f"the ledger refused a write: {problem!r}")
    trouble.__cause__ = problem
    return trouble


async def inspect(url: str) -> tuple[Description | None, Size | None]:
    """What is in a database, without changing it; no description: there is no ledger in it (yet). The size
    only where its schema is the one we know."""
    queries = sql.queries("postgres")
    try:
        with _translated():
            connection = await asyncpg.connect(url, timeout=INSPECT_SECONDS, command_timeout=INSPECT_SECONDS)
            try:
                if not await connection.fetchval(queries["has_schema"]):
                    return None, None
                (found,) = await connection.fetch(queries["describe"])
                description = Description(*found)
                known = description.schema == sql.migrations("postgres")[-1].number
                if not known:
                    return description, None
                (size,) = await connection.fetch(queries["size"])
                return description, Size(*size)
            finally:
                await connection.close(timeout=INSPECT_SECONDS)
    except ValueError as problem:
        raise Malformed(f"this is not the address of a PostgreSQL database: {problem}") from None
