"""The statements of a caller's transaction leave the ledger's own tables and its transaction alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import duly
from duly.errors import ProgramError
from duly.idempotency.blocking import BlockingTransaction
from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from duly.storage.sqlite.caller_sql import LEDGER_TABLES
from tests.storage.making import admit, message


@pytest.fixture(params=["rw", "shared"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = await open_ledger(f"sqlite:///{tmp_path}/ledger.db?mode={request.param}")
    await ledger.write(admit(message()))
    async with ledger.transaction() as tx:
        await tx.execute("CREATE TABLE doors (name TEXT)")
        await tx.execute("CREATE TRIGGER sly AFTER INSERT ON doors BEGIN DELETE FROM messages; END")
    yield ledger
    await ledger.close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM messages",
        "UPDATE Messages SET state = 0",
        "DELETE FROM main.journal",
        "INSERT INTO items VALUES ('mine')",
        "CREATE TABLE IF NOT EXISTS items (name TEXT)",
        "CREATE TEMP TABLE messages (name TEXT)",
        "CREATE TEMP VIEW messages AS SELECT 1",
        "DROP TABLE messages",
        "ALTER TABLE messages RENAME TO mine",
        "CREATE INDEX mine ON messages (scope)",
        "CREATE TRIGGER mine AFTER INSERT ON messages BEGIN DELETE FROM doors; END",
        "INSERT INTO doors VALUES ('a trigger deletes')",
    ],
)
async def test_the_ledgers_own_tables_cannot_be_changed(ledger: Ledger, statement: str) -> None:
    with pytest.raises(ProgramError, match=r"is a table of the ledger itself.*name yours differently"):
        async with ledger.transaction() as tx:
            await tx.execute(statement)
    async with ledger.transaction() as tx:
        assert await tx.fetch("SELECT count(*) FROM messages") == [(1,)], "reading is allowed"
    assert not (await ledger.write(admit(message()))).values[0].fresh


@pytest.mark.parametrize(
    ("setting", "value"), [("writable_schema", "1"), ("synchronous", "OFF"), ("journal_mode", "DELETE")]
)
async def test_what_the_ledger_sets_cannot_be_set(ledger: Ledger, setting: str, value: str) -> None:
    with pytest.raises(ProgramError, match=f"the ledger sets {setting} itself"):
        async with ledger.transaction() as tx:
            await tx.execute(f"PRAGMA {setting} = {value}")


async def test_the_ledger_goes_on_after_a_refusal_and_prunes_itself(ledger: Ledger) -> None:
    with pytest.raises(ProgramError):
        async with ledger.transaction() as tx:
            await tx.execute("DELETE FROM messages")
    assert (await ledger.write(admit(message(1)))).values[0].fresh
    await ledger.prune()


async def test_the_names_are_those_of_a_ledgers_tables(ledger: Ledger) -> None:
    async with ledger.transaction() as tx:
        found = await tx.fetch("SELECT name FROM sqlite_master WHERE type = 'table'")
    assert {name for (name,) in found} - {"doors", "sqlite_sequence"} == LEDGER_TABLES


def test_a_function_cannot_forget_what_ran(tmp_path: Path) -> None:
    runs: list[str] = []

    @duly.once(f"sqlite:///{tmp_path}/app.db", scope="s", key=lambda key: key)
    def charge(key: str) -> None:
        runs.append(key)

    @duly.once(f"sqlite:///{tmp_path}/app.db", scope="t", key=lambda key: key, effect="exactly_once")
    def clean(tx: BlockingTransaction, key: str) -> None:
        tx.execute("DELETE FROM messages")

    charge("k-1")
    with pytest.raises(ProgramError, match="a table of the ledger itself"):
        clean("k-2")
    charge("k-1")
    assert runs == ["k-1"]
