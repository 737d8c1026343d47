"""Ledgers of every earlier schema, made by the programs that had them, are opened and are whole.

`old_ledgers/make.py` says how they were made. Upgrades go forward: an older program refuses a newer ledger.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import asyncpg
import pytest

from duly.core.lifecycle import State
from duly.core.messages import Message, VerdictKind
from duly.errors import LedgerTooNew
from duly.server.ledger_check import check_invariants
from duly.settings import Settings
from duly.storage import file_url, open_ledger, sql
from duly.storage.sqlite.file import connect
from duly.testing import ManualClock
from tests import servers
from tests.guard import GUARD
from tests.storage.old_ledgers import make

MADE_MS = 1_700_000_000_000
HERE = Path(make.__file__).parent
SQLITE = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("sqlite-*.tar.xz"))
POSTGRES = sorted(HERE.glob("postgres-*.sql"))


@pytest.mark.parametrize(("dialect", "kept"), [("sqlite", make.SQLITE), ("postgres", make.POSTGRES)])
def test_every_earlier_schema_has_a_ledger(dialect: str, kept: dict[int, str]) -> None:
    *earlier, _ = (migration.number for migration in sql.migrations(dialect))
    assert list(kept) == earlier, "add the last commit of the schema before this one to make.py, and run it"
    made = {path.name.split("-")[1].partition(".")[0] for path in HERE.glob(f"{dialect}-*")}
    assert made == {str(number) for number in earlier}


async def holds_everything(url: str, folder: Path) -> None:
    """Opens a ledger and looks into every table."""
    clock = ManualClock(MADE_MS * 1_000)
    newest = sql.migrations("postgres" if url.startswith("postgres") else "sqlite")[-1].number
    done = Message("app-1", f"{MADE_MS}_1", "lock_control", "lock-1", b'{"open":true}')
    async with await open_ledger(url, clock=clock) as ledger:
        assert (await ledger.describe()).schema == newest
        repeat = await ledger.admit(done)
        assert (repeat.kind, repeat.state) == (VerdictKind.DUPLICATE, State.DONE)
        assert repeat.answer is not None
        assert (repeat.answer.data, repeat.answer.reason) == (b"7", "opened")
        other = Message("app-1", done.id, "lock_control", "lock-1", b"{}")
        assert (await ledger.admit(other)).kind is VerdictKind.CONFLICT
        assert [one.message.id for one in await ledger.open_deliveries("device")] == [f"{MADE_MS + 1}_2"]
        (alert,) = await ledger.of_kind("alert_event")
        (told,) = await ledger.deliveries(alert.message.key)
        assert told.ref.round == 101
        assert [entry.body for entry in await ledger.entries("conv")] == [b"hello", b"bye"]
        assert await ledger.cursor("conv", "ann") == 1
        assert await ledger.marks() == {'["lock-1","","app-1"]': (2, MADE_MS + 1)}
        assert [refusal.id for refusal in await ledger.refusals()][-1] == "x"
        assert await ledger.bucket("notes") in ({}, {"a": b"b"}), "the first schema had no items"
        fresh = Message("app-1", f"{MADE_MS + 2}_3", "lock_control", "lock-1")
        assert (await ledger.admit(fresh)).kind is VerdictKind.FRESH
    report = await check_invariants(Settings(data=str(folder)), url=url)
    assert report.ok, [finding for finding in report.invariants if finding.holds is False]


@pytest.mark.parametrize("name", SQLITE)
async def test_an_old_sqlite_ledger_is_upgraded_and_whole(name: str, tmp_path: Path) -> None:
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    await holds_everything(file_url(tmp_path / "ledger.db"), tmp_path)


async def load(server: servers.Postgres, dump: Path) -> str:
    url = server.create_database()
    connection = await asyncpg.connect(url)
    await connection.execute(dump.read_text())
    await connection.close()
    return url


@pytest.mark.parametrize("dump", POSTGRES, ids=lambda path: path.stem)
async def test_an_old_postgres_ledger_is_upgraded_and_whole(
    dump: Path, postgres_server: servers.Postgres, tmp_path: Path
) -> None:
    await holds_everything(await load(postgres_server, dump), tmp_path)


async def test_a_newer_sqlite_ledger_is_refused_with_a_sentence_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    await (await open_ledger(file_url(path))).close()
    db = connect(path)
    db.pragma("user_version", 99)
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerTooNew, match="upgrade duly, or restore the backup made before the upgrade"):
        await open_ledger(file_url(path))
    assert path.read_bytes() == before


PREVIOUS = """
import asyncio, sys
import duly
from duly.core.messages import Message
MS = 1_700_000_000_000
class Clock:
    def now(self): return MS * 1000
    def steady(self): return 0
async def main(url):
    ledger = await duly.open_ledger(url, clock=Clock())
    for n, line in enumerate(sys.stdin, 10):
        if line.strip() == "again":
            await ledger.close()
            try:
                await duly.open_ledger(url)
            except duly.DulyError as problem:
                print(type(problem).__name__, problem, flush=True)
            return
        verdict = await ledger.admit(Message("old", f"{MS}_{n}", "k", "r"))
        found = await ledger.find(Message("new", f"{MS}_1", "k", "r").key)
        pruned = await ledger.prune()
        print(verdict.word, None if found is None else found.state.word, pruned, flush=True)
asyncio.run(main(sys.argv[1]))
"""


def unpack_previous(folder: Path) -> None:
    """Unpacks the program that had the schema before this one."""
    args = ["git", "-C", str(HERE.parents[2]), "archive", make.POSTGRES[max(make.POSTGRES)], "src"]
    found = subprocess.run(args, capture_output=True, check=False)
    if found.returncode:
        shallow = subprocess.run(
            [*args[:3], "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
        ).stdout.strip()
        if shallow != "false":  # cut off, or no repository at all
            pytest.skip("the history of this repository is not here: a clone without depth has it")
        servers.unable(found.stderr.decode())
    subprocess.run(["tar", "x", "-C", folder], input=found.stdout, check=True)


async def test_the_previous_version_goes_on_beside_this_one_and_is_refused_when_it_starts_again(
    postgres_server: servers.Postgres, tmp_path: Path
) -> None:
    """Several hubs on one PostgreSQL are upgraded one after the other."""
    await asyncio.to_thread(unpack_previous, tmp_path)
    url = await load(postgres_server, HERE / f"postgres-{max(make.POSTGRES)}.sql")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}/src"}
    pipe = asyncio.subprocess.PIPE
    old = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PREVIOUS, url, env=env, stdin=pipe, stdout=pipe
    )
    assert old.stdin is not None
    assert old.stdout is not None

    async def ask(word: str) -> str:
        assert old.stdin is not None
        assert old.stdout is not None
        old.stdin.write(f"{word}\n".encode())
        return (await asyncio.wait_for(old.stdout.readline(), GUARD)).decode().strip()

    assert await ask("write") == "fresh None 0"
    async with await open_ledger(url, clock=ManualClock(MADE_MS * 1_000)) as new:
        assert (await new.admit(Message("new", f"{MADE_MS}_1", "k", "r"))).kind is VerdictKind.FRESH
        assert await ask("write") == "fresh accepted 0", "it sees and writes what it did before"
        assert (await new.admit(Message("old", f"{MADE_MS}_11", "k", "r"))).kind is VerdictKind.DUPLICATE
        assert "LedgerTooNew" in await ask("again")
    await old.wait()
