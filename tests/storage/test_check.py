"""Every invariant holds in a sound ledger, and its violation is named."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer, Mode, Order
from duly.server.ledger_check import check_invariants
from duly.server.ledger_inspectors import hub_inspectors
from duly.settings import Settings
from duly.storage import open_ledger
from duly.storage.check import CheckReport
from duly.storage.invariants import KERNEL
from duly.storage.snapshot import TABLES
from duly.storage.sqlite.file import connect
from duly.testing import ManualClock
from tests import servers
from tests.storage.making import message
from tests.storage.whole_ledger import MADE_MS, NOW, UNTIL, fill_up

PLANTED: dict[str, str] = {
    "message-key": "UPDATE {messages} SET key = {hex}01020304050667617465006531'::x WHERE listed",
    "message-readable": "UPDATE {messages} SET state = 7 WHERE state = 0 AND kind = 'alert_event'",
    "message-fingerprint": "UPDATE {messages} SET body = {hex}7b7d'::x WHERE state = 10",
    "answer-readable": "UPDATE {messages} SET answer = {hex}c1'::x WHERE state = 10",
    "delivery-message": "UPDATE {deliveries} SET key = {hex}0000'::x WHERE channel = 'alert'",
    "delivery-readable": "UPDATE {deliveries} SET kind = 9 WHERE channel = 'alert'",
    "delivery-ended": "UPDATE {deliveries} SET state = 1 WHERE state = 10",
    "mark-readable": "INSERT INTO {marks} (mark, n, ms) VALUES ('[\"lamp\"', 1, 1)",
    "mark-reached": "UPDATE {marks} SET n = 0, ms = 5",
    "stream-last": "UPDATE {streams} SET last = 2 WHERE stream = 'conv'",
    "stream-order": "DELETE FROM {entries} WHERE stream = 'conv' AND n = 2",
    "cursor-reached": "UPDATE {cursors} SET n = 9",
    "floor-one": "UPDATE {floor} SET barrier = 5",
    "refusals-kept": "UPDATE {refusals} SET word = ''",
    "account-readable": "UPDATE {items} SET body = {hex}7b7d'::x WHERE bucket = 'principals'",
    "account-references": "DELETE FROM {items} WHERE bucket = 'principals' AND name = 'lock'",
    "secret-key": "UPDATE {items} SET body = {hex}7365616c65643a313a61623a78'::x WHERE bucket = 'secrets'",
    "secret-openable": "UPDATE {items} SET name = 'other' WHERE bucket = 'secrets'",
    "audit-chain": "UPDATE {entries} SET body = {hex}7b7d'::x WHERE stream = 'audit' AND n = 1",
    "trail-readable": "UPDATE {entries} SET body = {hex}00'::x WHERE stream = 'trail/hub-1'",
    "totals-readable": "UPDATE {items} SET body = {hex}c1'::x WHERE bucket = 'totals'",
}
"""A statement that breaks each invariant of what both databases hold."""

OF_THE_FILE = {"file-sound", "column-types", "journal-readable", "journal-sequence", "one-outcome"}
"""Those that only a damaged file breaks: a database refuses them."""


def planted(name: str, dialect: str) -> str:
    """Returns the statement for one database."""
    prefix, hexed, cast = ("duly_", "'\\x", "'::bytea") if dialect == "postgres" else ("", "x'", "'")
    names = {table.name: prefix + table.name for table in TABLES}
    return PLANTED[name].replace("'::x", cast).format(hex=hexed, **names)


def broken(report: CheckReport) -> set[str]:
    return {finding.name for finding in report.invariants if finding.holds is False}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a sound ledger."""
    folder = tmp_path_factory.mktemp("sound")

    async def make() -> None:
        async with await open_ledger(f"sqlite:///{folder}/ledger.db", clock=ManualClock()) as ledger:
            await fill_up(ledger, folder)

    asyncio.run(make())
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be broken."""
    for name in ("ledger.db", "secret.key"):
        shutil.copy(sound / name, tmp_path / name)
    return tmp_path


def edit(folder: Path, *statements: tuple[str, tuple[Any, ...]]) -> None:
    db = connect(folder / "ledger.db")
    for statement, values in statements:
        db.execute(statement, values)
    db.close()


async def test_a_sound_ledger_breaks_no_invariant(sound: Path) -> None:
    report = await check_invariants(Settings(data=str(sound)))
    assert report.ok, broken(report)
    assert all(finding.holds for finding in report.invariants)
    assert report.tables["messages"].rows == 3


async def test_a_command_outside_of_the_order_need_not_have_moved_the_mark(folder: Path) -> None:
    free = message(5, ms=MADE_MS + 5, order=Order("door", Mode.ANY, n=5))
    async with await open_ledger(f"sqlite:///{folder}/ledger.db", clock=ManualClock()) as ledger:
        await ledger.write(w.Admit(free, UNTIL, NOW), w.Advance(free.key, State.DONE, NOW, Answer(0)))
    report = await check_invariants(Settings(data=str(folder)))
    assert report.ok, broken(report)


def test_each_invariant_has_a_planted_violation() -> None:
    known = {one.name for one in KERNEL} | {
        one.name for each in hub_inspectors(None) for one in each.invariants
    }
    assert known == PLANTED.keys() | OF_THE_FILE


@pytest.mark.parametrize("name", PLANTED)
async def test_a_violation_is_named(name: str, folder: Path) -> None:
    edit(folder, (planted(name, "sqlite"), ()))
    report = await check_invariants(Settings(data=str(folder)))
    assert not report.ok
    assert name in broken(report)
    (finding,) = (one for one in report.invariants if one.name == name)
    assert finding.count
    assert finding.examples
    assert finding.advice


async def test_a_journal_that_was_changed_is_named_and_the_tables_are_checked_all_the_same(
    folder: Path,
) -> None:
    insert = "INSERT INTO journal VALUES (?, ?)"
    edit(folder, (insert, (5, b"\x01????changed")), (insert, (8, b"\x01????changed")))
    report = await check_invariants(Settings(data=str(folder)))
    assert broken(report) == {"journal-readable", "journal-sequence"}
    assert report.tables["messages"].rows == 3


async def test_an_index_that_lacks_a_row_is_named(folder: Path) -> None:
    edit(
        folder,
        ("PRAGMA writable_schema = ON", ()),
        (
            "UPDATE sqlite_schema SET sql = replace(sql, '(until)', '(moved_at)') WHERE name = ?",
            ("messages_until",),
        ),
    )
    report = await check_invariants(Settings(data=str(folder)))
    assert "file-sound" in broken(report)


async def test_a_key_that_is_there_twice_is_named(folder: Path) -> None:
    edit(
        folder,
        ("ALTER TABLE messages RENAME TO old", ()),
        ("CREATE TABLE messages AS SELECT * FROM old UNION ALL SELECT * FROM old", ()),
    )
    report = await check_invariants(Settings(data=str(folder)))
    assert "one-outcome" in broken(report)


async def test_without_the_key_secrets_are_not_opened_and_that_is_said(folder: Path) -> None:
    (folder / "secret.key").unlink()
    report = await check_invariants(Settings(data=str(folder)))
    assert report.ok
    (finding,) = (one for one in report.invariants if one.name == "secret-openable")
    assert finding.holds is None
    assert "--secret-key" in finding.advice


async def test_a_value_of_another_type_is_named(folder: Path) -> None:
    edit(folder, ("UPDATE messages SET body = 'text' WHERE listed", ()))
    assert broken(await check_invariants(Settings(data=str(folder)))) >= {"column-types"}


@pytest.fixture(scope="module")
def database(postgres_server: servers.Postgres) -> str:
    return postgres_server.create_database()


async def test_postgres_is_checked_by_the_same_invariants(database: str, tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path), ledger=database)
    async with await open_ledger(database, clock=ManualClock()) as ledger:
        await fill_up(ledger, tmp_path)
    report = await check_invariants(settings)
    assert report.ok, broken(report)
    hidden = {"mark-reached", "account-references", "delivery-ended", "secret-openable", "message-readable"}
    connection = await asyncpg.connect(database)
    for name in PLANTED.keys() - hidden:  # these need rows that others of them break
        await connection.execute(planted(name, "postgres"))
    assert broken(await check_invariants(settings)) >= PLANTED.keys() - hidden
    await connection.close()


@pytest.mark.parametrize("guide", ["docs/operations.md", "docs/zh/operations.md"])
def test_the_guide_lists_every_invariant(guide: str) -> None:
    known = [*KERNEL, *(one for each in hub_inspectors(None) for one in each.invariants)]
    text = (Path(__file__).parents[2] / guide).read_text(encoding="utf-8")
    listed = [
        line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "duly " not in line
    ]
    assert listed == [one.name for one in known]
    if "zh" not in guide:
        assert all(f"| `{one.name}` | {one.sentence} |" in text for one in known)
