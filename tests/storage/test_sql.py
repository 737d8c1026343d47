"""SQL lives in files: they parse, they are complete, and the code asks only for what is there."""

from __future__ import annotations

import re
from pathlib import Path

import apsw
import apsw.ext
import asyncpg
import pytest

from duly.errors import LedgerTooNew
from duly.storage import sql
from tests import servers

SOURCES = Path(sql.__file__).parents[1]
ASKED = {
    "sqlite": [
        "sql/ledger.py",
        "sql/ledger_queries.py",
        "sqlite/ledger.py",
        "sqlite/table_rows.py",
        "sqlite/writer.py",
    ],
    "postgres": [
        "sql/ledger.py",
        "sql/ledger_queries.py",
        "postgres/ledger.py",
        "postgres/snapshot.py",
        "postgres/flush.py",
        "postgres/verified_flush.py",
        "postgres/watch.py",
    ],
}
DIALECTS = pytest.mark.parametrize("dialect", sorted(ASKED))
ASKS = re.compile(
    r'(?:_read|_ask|_run|_run_many|_insert|_fetch|_all|_of_keys)\(\s*"(\w+)"|(?:_?queries|_sql|queries\("\w+"\))\["(\w+)"\]'
    r'|\("(hold|known)",'
)


def asked(dialect: str) -> set[str]:
    text = "".join((SOURCES / name).read_text(encoding="utf-8") for name in ASKED[dialect])
    return {first or second or third for first, second, third in ASKS.findall(text)}


@DIALECTS
def test_the_code_asks_for_every_statement_and_for_no_other(dialect: str) -> None:
    assert asked(dialect) == set(sql.queries(dialect))


@DIALECTS
def test_every_statement_has_a_body_without_comments_or_semicolons(dialect: str) -> None:
    for name, statement in sql.queries(dialect).items():
        assert statement, name
        assert "--" not in statement, name
        assert ";" not in statement, name


@DIALECTS
def test_no_name_is_given_twice(dialect: str) -> None:
    text = (SOURCES / "sql" / dialect / "queries.sql").read_text(encoding="utf-8")
    names = re.findall(r"^-- name: (.*)$", text, flags=re.MULTILINE)
    assert len(names) == len(set(names)) == len(sql.queries(dialect))


@DIALECTS
def test_migrations_are_numbered_from_one_without_holes(dialect: str) -> None:
    known = sql.migrations(dialect)
    assert [migration.number for migration in known] == list(range(1, len(known) + 1))
    assert sql.pending(dialect, 0) == known
    assert sql.pending(dialect, len(known)) == ()
    with pytest.raises(LedgerTooNew):
        sql.pending(dialect, len(known) + 1)


def test_every_sqlite_statement_prepares_on_the_migrated_schema() -> None:
    db = apsw.Connection(":memory:")
    for migration in sql.migrations("sqlite"):
        db.execute(migration.sql)
    for name, statement in sql.queries("sqlite").items():
        assert apsw.ext.query_info(db, statement).query == statement, name
    db.close()


async def test_every_postgres_statement_prepares_on_the_migrated_schema(
    postgres_server: servers.Postgres,
) -> None:
    connection = await asyncpg.connect(postgres_server.create_database())
    for migration in sql.migrations("postgres"):
        await connection.execute(migration.sql)
    queries = sql.queries("postgres")
    await connection.execute(queries["create_schema"])
    for statement in queries.values():
        if not statement.startswith("CREATE"):
            await connection.prepare(statement)
    await connection.close()


@pytest.mark.parametrize("scope", [None, b"app-1\0"])
async def test_pages_are_read_by_index(postgres_server: servers.Postgres, scope: bytes | None) -> None:
    connection = await asyncpg.connect(postgres_server.create_database())
    for migration in sql.migrations("postgres"):
        await connection.execute(migration.sql)
    await connection.execute(
        "INSERT INTO duly_messages SELECT int8send(n), '', 'k', 'r', 0, 1, 1, 1, 1, 1, NULL, '' "
        "FROM generate_series(1, 100000) AS n"
    )
    await connection.execute("ANALYZE duly_messages")
    end, top = (50_000).to_bytes(8, "big"), (60_000).to_bytes(8, "big")
    for name, args in (
        ("key_below", (top, 9_999)),
        ("between", (end, top, scope, None, None, None, 0, 0, 1 << 62, 100)),
    ):
        found = await connection.fetch(f"EXPLAIN {sql.queries('postgres')[name]}", *args)
        plan = "\n".join(row for (row,) in found)
        assert "duly_messages_pkey" in plan, plan
        assert "Sort" not in plan, plan
    await connection.close()


async def test_claims_search_by_index(
    postgres_server: servers.Postgres,
) -> None:
    connection = await asyncpg.connect(postgres_server.create_database())
    for migration in sql.migrations("postgres"):
        await connection.execute(migration.sql)
    await connection.execute(
        "INSERT INTO duly_deliveries SELECT int8send(n), 'c', 'r', 0, 0, 0, n, 0, '', '' "
        "FROM generate_series(1, 20000) AS n"
    )
    found = await connection.fetch(f"EXPLAIN {sql.queries('postgres')['hold_due']}", "c", 10, 10)
    plan = "\n".join(row for (row,) in found)
    assert "duly_deliveries_due" in plan, plan
    await connection.close()
