"""The shared ledger: PostgreSQL, written by any number of hubs at once, through asyncpg.

Callers share flushes (`duly.storage.group_commit`). A flush is one transaction on a connection of its own, so
that readers cannot delay it: one statement if its rows are as this hub last saw them (`verified_flush.py`), a
dozen if not (`flush.py`). A transaction that lost a race is repeated. Results are returned after the server
has flushed them, whatever its default setting. When the server is away, callers get an error at once and
nothing is stored in part; when the server is back, the same ledger goes on. A server that does not answer
counts as away within seconds (`watch.py`). Another hub may end a message, so one query polls for all callers
that wait."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from itertools import islice
from typing import Any, Final

from duly.core import operations as w
from duly.errors import LedgerDamaged, LedgerError, LedgerUnavailable, Malformed, ProgramError, Stopped
from duly.runtime.clock import Clock
from duly.storage import sql
from duly.storage.caller_statements import CallerStatements, Row
from duly.storage.group_commit import CommitBatch
from duly.storage.ledger import (
    RECENT_KEPT,
    Description,
    Record,
    Size,
    StreamEntry,
    StreamPosition,
    Transaction,
    reading,
)
from duly.storage.postgres.flush import ConcurrentChange, flush
from duly.storage.postgres.flush_connection import FlushConnection
from duly.storage.postgres.row_cache import RowCache
from duly.storage.postgres.verified_flush import NotCached, VerifiedFlush
from duly.storage.postgres.watch import DoubtfulCommits, StatementWatch, asyncpg
from duly.storage.sql import rows
from duly.storage.sql.ledger import as_duly
from duly.storage.sql.polled import PolledLedger

SESSIONS: Final = 8
"""The most transactions of callers at once; two more connections are for reading, and one for flushes."""
ATTEMPTS: Final = 10
INSPECT_SECONDS: Final = 5.0
CONNECTING: Final[dict[str, Any]] = {
    "timeout": 3,
    "command_timeout": 60,
    # A plan made for an empty table would be kept while the table grows: with such a plan, locking 200 of
    # 300,000 rows took 830 ms instead of 4 ms. Planning each time costs 0.1 ms.
    "server_settings": {
        "application_name": "duly",
        "synchronous_commit": "on",
        "default_transaction_isolation": "read committed",
        "plan_cache_mode": "force_custom_plan",
    },
}


RELEASE_SECONDS: Final = 3
"""How long returning a connection to the pool may take; after that the connection is closed."""

ARGUMENT: Final = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError)
"""The errors about a value that one caller has given: other callers' statements succeed."""
GONE: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""The errors of a connection that is returned to the pool while its server is away."""


class PostgresLedger(PolledLedger):
    """A ledger in PostgreSQL, opened by `duly.open_ledger("postgresql://…")`."""

    dialect = "postgres"
    poll_seconds = 0.025

    def __init__(self, url: str, clock: Clock | None) -> None:
        super().__init__(clock, recent=RECENT_KEPT)
        self._pool: Any = None
        self._cache = RowCache()
        self._watch = StatementWatch(url)
        self._doubts = DoubtfulCommits(url, CONNECTING)
        self._flusher = FlushConnection(url, CONNECTING, self._watch, self._doubts)
        self._sessions = asyncio.Semaphore(SESSIONS)

    @classmethod
    async def open(cls, url: str, clock: Clock | None = None) -> PostgresLedger:
        """Connect, and bring the schema up to date."""
        ledger = cls(url, clock)
        try:
            with translated_postgres():
                # No idle connections are kept: the pool would log an error whenever the server is away. Reads
                # leave nothing to reset, which would be a second round trip for each.
                ledger._pool = await asyncpg.create_pool(
                    url, min_size=0, max_size=SESSIONS + 2, reset=_keep_session, **CONNECTING
                )
                await ledger._migrate()
                ledger._cache.floor = floor = await ledger.floor()
                ledger._witness.begin(floor)
        except BaseException as error:
            await ledger.close()
            if isinstance(error, ValueError):
                raise Malformed(f"this is not the address of a PostgreSQL database: {error}") from error
            raise
        return ledger

    async def _migrate(self) -> None:
        queries = self._queries
        async with self._pool.acquire() as connection, connection.transaction(isolation="read_committed"):
            await connection.execute(queries["migrating"])
            if not await connection.fetchval(queries["has_schema"]):
                await connection.execute(queries["create_schema"])
            for migration in sql.pending("postgres", await connection.fetchval(queries["version"])):
                await connection.execute(migration.sql)
                await connection.execute(queries["migrated"], migration.number, migration.name)

    async def close(self) -> None:
        """Finish the submitted commits, then close every connection."""
        await self._finish()
        with suppress(*GONE):
            await self._flusher.close(RELEASE_SECONDS)
        self._watch.close()
        if self._pool is not None:
            await _close_pool(self._pool)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def _start(self, batches: list[CommitBatch]) -> None:
        self._tasks.do("a flush of the ledger", self._flush(batches))

    async def _flush(self, batches: list[CommitBatch]) -> None:
        try:
            await self._commit(batches)
        except asyncio.CancelledError:
            for batch in batches:
                batch.error = Stopped(f"the program ended before the ledger had answered; {MAYBE}")
            raise
        finally:
            self._group_commit.flushed(batches)

    async def _commit(self, batches: list[CommitBatch]) -> None:
        try:
            flushed = await self._transact([group for batch in batches for group in batch.groups])
        except Exception as problem:
            common = isinstance(problem, LedgerError) and not isinstance(problem, LedgerDamaged)
            if len(batches) == 1 or common:
                for batch in batches:
                    batch.error = as_duly(problem)
                return
            # One caller's error, or its damaged row, must not fail the others: each batch gets a transaction
            # of its own.
            for batch in batches:
                await self._commit([batch])
        else:
            results = iter(flushed)
            for batch in batches:
                batch.results = list(islice(results, len(batch.groups)))

    async def _transact(self, groups: list[w.Group]) -> list[w.Results]:
        return await self._verify(groups) or await self._lock(groups)

    async def _verify(self, groups: list[w.Group]) -> list[w.Results] | None:
        """Carry out groups on cached rows, with one statement; return None if they need locks."""
        try:
            work = VerifiedFlush(self._cache, groups)
        except NotCached:
            return None
        with translated_postgres(own=True):
            line = await self._flusher.get()
        with translated_postgres(committing=True, own=True):
            try:
                with self._watch.over(line):
                    stored = await work.store(line)
            except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                return None
            except BaseException as error:
                refused = isinstance(error, asyncpg.PostgresError | ValueError)
                self._flusher.drop(in_doubt=line.is_closed() or not refused)
                raise
        return work.results if stored else None

    async def _lock(self, groups: list[w.Group]) -> list[w.Results]:
        """Carry out groups on rows that are read and locked."""
        for _ in range(ATTEMPTS):
            with translated_postgres(own=True):
                line = await self._flusher.get()
                transaction = line.transaction(isolation="read_committed")
                try:
                    with self._watch.over(line):
                        await transaction.start()
                        flushed, held = await flush(line, groups)
                except (ConcurrentChange, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                    await transaction.rollback()
                    continue
                except BaseException:
                    self._flusher.drop()
                    raise
            with translated_postgres(committing=True, own=True):
                try:
                    with self._watch.over(line):
                        await transaction.commit()
                except BaseException:
                    self._flusher.drop(in_doubt=True)
                    raise
            self._cache.learn(held)
            return flushed
        raise LedgerUnavailable(OVERTAKEN)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the caller, on a connection from the pool."""
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        with self._group_commit.within():
            async with self._sessions, self._connection() as connection, _resetting(connection):
                session = _PostgresSession(connection, self._watch)
                transaction = connection.transaction(isolation="read_committed")
                with translated_postgres(), self._watch.over(connection):
                    await transaction.start()
                try:
                    yield session
                    session.check()
                    session.check_awaited()
                except BaseException:
                    with suppress(*GONE), self._watch.over(connection):
                        await transaction.rollback()
                    raise
                finally:
                    session.over = True
                with translated_postgres(committing=True), self._watch.over(connection):
                    await transaction.commit()
        self._learn(session.written)

    @contextmanager
    def _asking_the_pool(self) -> Iterator[None]:
        # The pool is closed last: a caller that `close` has woken must not find it open and wait again.
        if self._closed:
            raise Stopped("this ledger is closed")
        try:
            with translated_postgres(own=True):
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

    def check(self) -> None:
        """Raise if the server does not answer."""
        if self._watch.silent:
            raise LedgerUnavailable("PostgreSQL does not answer; nothing can be stored until it does")

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def _read(self, name: str, *args: object) -> list[Any]:
        async with self._connection() as connection:
            try:
                with reading(self), self._asking_the_pool(), self._watch.over(connection):
                    found: list[Any] = await connection.fetch(self._queries[name], *args)
            except (asyncpg.DataError, asyncpg.InterfaceError) as error:
                raise Malformed(f"PostgreSQL cannot look for this: {error}") from error
        return found

    def _key_list(self, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys)

    def _name_list(self, names: Collection[str]) -> list[str]:
        return list(names)

    def _ref_lists(self, refs: Sequence[w.DeliveryRef]) -> tuple[object, ...]:
        return tuple(zip(*map(rows.names, sorted(refs, key=rows.names)), strict=True))

    async def booked(self, channel: str, recipients: Collection[str]) -> list[w.OpenDelivery]:
        """Return the waiting deliveries for these recipients that no worker holds."""
        return [rows.open_of(row) for row in await self._read("booked", channel, list(recipients))]

    async def strays(
        self, channel: str, *, here: Collection[str], worker: str, living: Collection[str], now: int
    ) -> list[w.OpenDelivery]:
        """Return the open deliveries that this worker should take over."""
        found = await self._read("strays", channel, list(here), worker, list(living), now)
        return [rows.open_of(row) for row in found]

    async def find_all(self, keys: Collection[bytes]) -> list[Record]:
        """Return the records of the known ones among these messages."""
        return [rows.record_of(row) for row in await self._read("find_all", list(keys))] if keys else []

    async def entries_after(
        self, places: Sequence[tuple[str, int]], limit: int = 100
    ) -> list[list[StreamEntry]]:
        """Return entries of many streams."""
        found: list[list[StreamEntry]] = [[] for _ in places]
        if places:
            for place, *entry in await self._read("entries_after", *zip(*places, strict=True), limit):
                found[place - 1].append(StreamEntry(*entry))
        return found

    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """Return the last numbers of streams and the positions of readers in them."""
        if not places:
            return []
        return [StreamPosition(*row) for row in await self._read("standing", *zip(*places, strict=True))]

    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Return many items."""
        buckets, names = [bucket for bucket, _ in places], [name for _, name in places]
        return [body for (body,) in await self._read("items", buckets, names)] if places else []

    async def counts(self, buckets: Collection[str]) -> dict[str, int]:
        """Return how many items are in each of these buckets."""
        return dict(await self._read("counts", list(buckets))) if buckets else {}

    async def _settled(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for (key,) in await self._read("settled", list(keys))]

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    async def scrub(self) -> None:
        """Rewrite the table of items, so that it holds no deleted data."""
        with self._asking_the_pool():
            await self._pool.execute(self._queries["scrub"])


class _PostgresSession(CallerStatements):
    """A caller's transaction. The first error ends it, even if the caller catches it: PostgreSQL would answer
    a later COMMIT with a silent rollback."""

    def __init__(self, connection: Any, watch: StatementWatch) -> None:
        super().__init__()
        self._connection = connection
        self._watch = watch
        self._lock = asyncio.Lock()
        self._error: BaseException | None = None
        self.over = False
        self.written: list[w.Results] = []

    async def _fetch(self, statement: str, args: Row) -> list[Row]:
        async with self._turn():
            if _ENDS.match(statement):  # before it has committed anything
                raise ProgramError(ENDED)
            found = await self._connection.fetch(statement, *args)
        return [tuple(row) for row in found]

    async def write(self, *operations: w.Write) -> w.Results:
        """Carry out a group after a savepoint, to which a lost race returns before it is repeated."""
        async with self._turn():
            for _ in range(ATTEMPTS):
                with suppress(ConcurrentChange):
                    async with self._connection.transaction():  # a savepoint
                        (results,), _ = await flush(self._connection, [operations])
                    self.written.append(results)
                    return results
            raise LedgerUnavailable(OVERTAKEN)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the caller's other calls: a connection runs one at a time."""
        async with self._lock:
            if self.over:
                raise ProgramError("this transaction has ended; open a new one")
            self.check()
            try:
                with translated_postgres(), self._watch.over(self._connection):
                    yield
                if not self._connection.is_in_transaction():
                    raise ProgramError(ENDED)
            except BaseException as error:
                self._error = error
                raise

    def check(self) -> None:
        """Raise if a statement has failed."""
        if self._error is not None:
            raise ProgramError(
                f"this transaction was rolled back when a statement failed ({self._error}); "
                "nothing was stored"
            ) from self._error


async def _keep_session(_: object) -> None:
    """Leave a connection that returns to the pool as it is."""


async def _close_pool(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Close a pool, which waits for its connections, unless the server does not answer."""
    try:
        async with asyncio.timeout(RELEASE_SECONDS):
            await pool.close()
    except TimeoutError:
        pool.terminate()


@asynccontextmanager
async def _resetting(connection: asyncpg.Connection[asyncpg.Record]) -> AsyncIterator[None]:
    """Undo what a caller's SQL has set in its session, or close the connection if that fails."""
    try:
        yield
    finally:
        with suppress(*GONE):
            try:
                await connection.reset(timeout=RELEASE_SECONDS)
            except BaseException:
                connection.terminate()
                raise


ENDED: Final = "this SQL ends the ledger's transaction; leave BEGIN, COMMIT and ROLLBACK out"
_ENDS: Final = re.compile(
    r"\s*(?:BEGIN|START\s+TRANSACTION|COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!.*\bTO\b))\b",
    re.IGNORECASE | re.DOTALL,
)
OVERTAKEN: Final = f"other hubs were faster {ATTEMPTS} times in a row; nothing was stored. Try again"
MAYBE: Final = "it may or may not be stored. Repeat it with the same ids: that is safe either way"


@contextmanager
def translated_postgres(*, committing: bool = False, own: bool = False) -> Iterator[None]:
    """Translate errors of PostgreSQL and the network into duly's, which say what to do. `own`: the statement
    is this program's, so that any other error means damaged tables, unless it is about an argument. The SQL
    of a caller raises asyncpg's errors."""
    stored = MAYBE if committing else "nothing was stored. Try again when it is back"
    try:
        yield
    except (
        asyncpg.InvalidAuthorizationSpecificationError,
        asyncpg.InvalidCatalogNameError,
        asyncpg.InsufficientPrivilegeError,
    ) as error:
        raise LedgerError(
            f"PostgreSQL refuses the login ({error}); check the user, password and database"
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
        asyncpg.ObjectNotInPrerequisiteStateError,  # among others: the database accepts no connections
        asyncpg.InternalClientError,
    ) as error:
        raise LedgerUnavailable(f"PostgreSQL cannot be used now ({error!r}); {stored}") from error
    except asyncpg.InterfaceError as error:
        if isinstance(error, ValueError):  # an argument that the driver cannot send
            raise
        raise LedgerUnavailable(f"PostgreSQL cannot be used now ({error}); {stored}") from error
    except asyncpg.PostgresError as error:
        if not own or isinstance(error, ARGUMENT):
            raise
        raise LedgerDamaged(
            f"PostgreSQL cannot use the ledger ({type(error).__name__}: {error}); nothing was changed. Its "
            "log says more: mend the database, or restore a backup"
        ) from error


async def inspect(url: str) -> tuple[Description | None, Size | None]:
    """Return the description and the size of the ledger in a database, without changing it. The description
    is None if the database has no ledger; the size is None unless the schema is the current one."""
    queries = sql.queries("postgres")
    try:
        with translated_postgres():
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
