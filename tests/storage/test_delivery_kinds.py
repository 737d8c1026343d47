"""What a delivery is for, and whether it is in doubt, are columns; an old ledger's rows are converted."""

from __future__ import annotations

from pathlib import Path

import apsw
import asyncpg
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.operations import DeliveryKind, DeliveryRef
from duly.storage import sql
from duly.storage.ledger import Ledger
from duly.storage.postgres.ledger import PostgresLedger
from duly.storage.sqlite.file import APPLICATION_ID
from duly.storage.sqlite.ledger import SqliteLedger
from duly.testing import ManualClock
from tests import servers
from tests.storage.making import admit, message

KEY = message(0).key
OLD = [
    # round, state, error; kind, in_doubt
    (0, State.DONE, "", DeliveryKind.STEP, False),
    (1, State.ACCEPTED, "in doubt: the connection broke", DeliveryKind.STEP, True),
    (48, State.ACCEPTED, "refused, in doubt: no", DeliveryKind.STEP, False),
    (49, State.ACCEPTED, "", DeliveryKind.FALLBACK, False),
    (50, State.ACCEPTED, "greylisted", DeliveryKind.RAISED, False),
    (100, State.ACCEPTED, "in doubt: ", DeliveryKind.CORRECTION, True),
    (200, State.ACCEPTED, "", DeliveryKind.BY_HAND, False),
    (203, State.UNKNOWN, "in doubt: x", DeliveryKind.BY_HAND, True),
]
LAST_WITHOUT = {"sqlite": 5, "postgres": 6}
"""The last schema of each dialect in which a round and a text said it."""


def old_rows() -> list[tuple[object, ...]]:
    return [(KEY, "alert", "mail", n, int(state), 1, 7, 9, "", error) for n, state, error, _, _ in OLD]


async def check(ledger: Ledger) -> None:
    found = await ledger.deliveries(KEY)
    shown = [(one.ref.round, one.state, one.error, one.ref.kind, one.in_doubt) for one in found]
    assert shown == OLD
    ref = DeliveryRef(KEY, "alert", "mail", 50, DeliveryKind.RAISED)
    assert await ledger.apply(w.Finish(ref, 1, State.DONE)), "found by its ref"


@pytest.fixture
async def old_sqlite(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    db = apsw.Connection(str(path))
    for migration in sql.migrations("sqlite")[: LAST_WITHOUT["sqlite"]]:
        db.execute(migration.sql)
    db.pragma("user_version", LAST_WITHOUT["sqlite"])
    db.pragma("application_id", APPLICATION_ID)
    db.executemany("INSERT INTO deliveries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", old_rows())
    db.close()
    return path


async def test_the_rows_of_an_old_sqlite_ledger_are_converted(old_sqlite: Path) -> None:
    async with await SqliteLedger.open(old_sqlite, ManualClock()) as ledger:
        await check(ledger)


async def test_the_rows_of_an_old_postgres_ledger_are_converted(postgres_server: servers.Postgres) -> None:
    url, clock = postgres_server.create_database(), ManualClock()
    connection = await asyncpg.connect(url)
    queries = sql.queries("postgres")
    await connection.execute(queries["create_schema"])
    for migration in sql.migrations("postgres")[: LAST_WITHOUT["postgres"]]:
        await connection.execute(migration.sql)
        await connection.execute(queries["migrated"], migration.number, migration.name)
    await connection.executemany(
        "INSERT INTO duly_deliveries VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)", old_rows()
    )
    await connection.close()
    async with await PostgresLedger.open(url, clock) as ledger:
        await check(ledger)


async def test_kind_and_doubt_are_kept_through_attempts(ledger: Ledger) -> None:
    refs = [DeliveryRef(KEY, "alert", "mail", kind * 10, kind) for kind in DeliveryKind]
    await ledger.write(admit(message(0), then=tuple(w.Deliver(ref, 1) for ref in refs)))
    assert [one.ref for one in await ledger.deliveries(KEY)] == refs
    claimed = await ledger.apply(w.Claim("alert", "me", 5, 9))
    assert [(one.ref, one.in_doubt) for one in claimed] == [(ref, False) for ref in refs]
    await ledger.write(*(w.Postpone(ref, 1, 2, "later", in_doubt=ref.kind > 1) for ref in refs))
    claimed = await ledger.apply(w.Claim("alert", "me", 5, 9))
    assert [(one.ref, one.in_doubt) for one in claimed] == [(ref, ref.kind > 1) for ref in refs]
    await ledger.write(*(w.Finish(ref, 2, State.DONE) for ref in refs))
    assert [one.in_doubt for one in await ledger.deliveries(KEY)] == [ref.kind > 1 for ref in refs]
