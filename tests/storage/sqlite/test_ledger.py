"""What only a file can do: be shared, be damaged, be full, be left behind by a process that was killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Message, VerdictKind
from duly.errors import (
    LedgerDamaged,
    LedgerError,
    LedgerInUse,
    LedgerTooNew,
    LedgerUnavailable,
    Malformed,
    ProgramError,
)
from duly.storage import open_ledger, sql
from duly.storage.sqlite.file import APPLICATION_ID
from duly.storage.sqlite.ledger import SqliteLedger
from duly.testing import ManualClock
from tests.guard import GUARD
from tests.small_disk import small_disk
from tests.storage.making import admit, message, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@contextmanager
def process(program: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real second process. It ends when the block does, however it stands."""
    prelude = (
        "import asyncio, sys\n"
        "from duly.core.messages import Message\n"
        "from duly.core.operations import *\n"
        "from duly.storage import open_ledger\n"
        "url = sys.argv[1]\n"
        "say = lambda *words: print(*words, flush=True)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", prelude + program, f"sqlite:///{path}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


# ── one writes, many read ────────────────────────────────────────────────────────────────────────

HOLD = """
async def main():
    async with await open_ledger(url):
        say("open")
        sys.stdin.readline()
asyncio.run(main())
"""


async def test_a_second_writing_process_is_refused_and_told_what_to_do(path: Path) -> None:
    with process(HOLD, path) as holder:
        assert line(holder) == "open"
        with pytest.raises(LedgerInUse) as caught:
            await SqliteLedger.open(path)
        assert f"pid {holder.pid}" in str(caught.value)
        assert "?mode=ro" in str(caught.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        await (await SqliteLedger.open(path)).close()


async def test_a_second_writer_in_the_same_process_is_refused_too(path: Path) -> None:
    async with await SqliteLedger.open(path):
        with pytest.raises(LedgerInUse):
            await SqliteLedger.open(path)


READ = """
async def main():
    async with await open_ledger(url + "?mode=ro") as ledger:
        say("open")
        while wanted := sys.stdin.readline().strip():
            record = await ledger.outcome("app-1", wanted)
            say(record and record.state.word)
        try:
            await ledger.admit(Message("app-1", "x", "k", "r"))
        except Exception as error:
            say(type(error).__name__)
asyncio.run(main())
"""


async def test_a_reader_in_another_process_sees_what_is_committed_and_cannot_write(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await ledger.admit(message(0))
        with process(READ, path) as reader:
            assert reader.stdin is not None
            assert line(reader) == "open"

            def ask(m: Message) -> str:
                print(m.id, file=reader.stdin, flush=True)
                return line(reader)

            assert ask(message(0)) == "accepted"
            assert ask(message(1)) == "None"
            await ledger.admit(message(1))
            await ledger.write(w.Advance(message(0).key, State.DONE, 1))
            assert (ask(message(1)), ask(message(0))) == ("accepted", "done")
            reader.stdin.close()
            assert line(reader) == "ProgramError"


async def test_a_reader_needs_a_ledger_that_is_there(path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="there is no ledger at"):
        await open_ledger(f"sqlite:///{path}?mode=ro")
    with pytest.raises(LedgerUnavailable, match="create it first"):
        await SqliteLedger.open(path.parent / "nowhere" / "app.db")
    with pytest.raises(LedgerUnavailable):
        await SqliteLedger.open(path.parent)
    for url in ("sqlite://", "sqlite://app.db", f"sqlite:///{path}?mode=maybe"):
        with pytest.raises(Malformed):
            await open_ledger(url)


async def test_a_reader_cannot_open_a_transaction(path: Path) -> None:
    await (await SqliteLedger.open(path)).close()
    async with await SqliteLedger.open(path, readonly=True) as reader:
        with pytest.raises(ProgramError, match="mode=ro"):
            async with reader.transaction():
                pass


# ── files that are not sound ledgers of ours ─────────────────────────────────────────────────────


async def fill(path: Path) -> None:
    """A ledger of many pages, with a WAL that was left behind: its process was killed."""
    ledger = await SqliteLedger.open(path, ManualClock())
    await ledger.admit_many([message(n, body=b"x" * 500) for n in range(200)])
    await ledger.scrub()
    await ledger.close()


def left_behind(path: Path) -> None:
    """Give the file a WAL, as a killed process leaves it."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA wal_autocheckpoint = 0")
    db.execute("INSERT INTO streams VALUES ('s', 1)")
    wal = path.with_name(path.name + "-wal")
    kept = wal.read_bytes()
    db.close()
    wal.write_bytes(kept)


def contents(path: Path) -> dict[str, str]:
    """What is in the file and its WAL. (Looking into a file makes SQLite lay an empty WAL beside it.)"""
    files = {file.name: file.read_bytes() for file in path.parent.glob("app.db*") if "shm" not in file.name}
    return {
        name: hashlib.sha256(raw).hexdigest() for name, raw in files.items() if raw and "lock" not in name
    }


def garbage(path: Path) -> None:
    path.write_bytes(b"these are not the pages you are looking for" * 1000)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 4096 * 5 + 77])


def flipped(path: Path) -> None:
    """One byte of a page's own bookkeeping: where its cells are."""
    raw = bytearray(path.read_bytes())
    raw[4096 * 20 + 13] ^= 0xFF
    path.write_bytes(raw)


def another_programs(path: Path) -> None:
    path.unlink()
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE recipes (name)")
    db.close()


def newer(path: Path) -> None:
    db = apsw.Connection(str(path))
    db.pragma("user_version", 99)
    db.close()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (garbage, LedgerDamaged, "does not start like a SQLite file"),
        (truncated, LedgerDamaged, "damaged"),
        (flipped, LedgerDamaged, "damaged"),
        (another_programs, LedgerError, "database of another program"),
        (newer, LedgerTooNew, "upgrade duly"),
    ],
)
async def test_an_unsound_file_is_refused_and_not_a_byte_of_it_touched(
    path: Path, spoil: Callable[[Path], None], error: type[LedgerError], says: str, readonly: bool
) -> None:
    await fill(path)
    spoil(path)
    before = contents(path)
    with pytest.raises(error, match=says) as caught:
        await SqliteLedger.open(path, readonly=readonly)
    assert type(caught.value) is error
    assert str(path) in str(caught.value) or error is LedgerTooNew
    assert contents(path) == before


async def test_an_unsound_file_with_a_wal_keeps_both(path: Path) -> None:
    await fill(path)
    newer(path)
    left_behind(path)
    before = contents(path)
    assert len(before) == 2
    with pytest.raises(LedgerTooNew):
        await SqliteLedger.open(path)
    assert contents(path) == before


async def test_damage_found_while_running_is_told_as_damage(path: Path) -> None:
    await fill(path)
    async with await SqliteLedger.open(path, readonly=True) as ledger:
        truncated(path)
        with pytest.raises(LedgerDamaged, match="restore a backup"):
            await ledger.size()


# ── older files ──────────────────────────────────────────────────────────────────────────────────


async def of_schema_one(path: Path) -> None:
    """A ledger as the first duly left it, with a message, its end, and a stream."""
    current = path.with_name("current.db")
    async with await SqliteLedger.open(current, ManualClock()) as ledger:
        await ledger.admit_many([message(0), message(1)])
        await ledger.write(w.Advance(message(0).key, State.DONE, 1), w.AppendEntry("log", b"x", 1))
    db = apsw.Connection(str(path))
    db.execute(sql.migrations("sqlite")[0].sql)
    db.pragma("user_version", 1)
    db.pragma("application_id", APPLICATION_ID)
    db.execute("ATTACH ? AS current", (str(current),))
    for table in ("messages", "streams", "entries"):
        columns = ", ".join(name for _, name, *_ in db.execute(f"PRAGMA main.table_info({table})"))
        db.execute(f"INSERT INTO main.{table} SELECT {columns} FROM current.{table}")
    db.close()


async def test_a_ledger_of_the_first_schema_is_upgraded_with_its_data_kept(path: Path) -> None:
    await of_schema_one(path)
    for _ in range(2):  # and once upgraded it simply opens
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            repeats = await ledger.admit_many([message(0), message(1)])
            assert [v.state for v in repeats] == [State.DONE, State.ACCEPTED]
            assert [e.body for e in await ledger.entries("log")] == [b"x"]
            await ledger.write(w.PutItem("users", "eve", b"1"))
            assert await ledger.bucket("users") == {"eve": b"1"}


async def test_a_reader_cannot_upgrade_and_says_so(path: Path) -> None:
    await of_schema_one(path)
    before = contents(path)
    with pytest.raises(LedgerUnavailable, match=r"older duly \(schema 1\); open it once without mode=ro"):
        await SqliteLedger.open(path, readonly=True)
    assert contents(path) == before


async def test_an_upgrade_that_fails_leaves_the_old_ledger(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await of_schema_one(path)
    with monkeypatch.context() as broken:
        bad = sql.Migration(2, "bad", "CREATE TABLE half (x); CREATE TABLE messages (twice)")
        known = (sql.migrations("sqlite")[0], bad)
        broken.setattr(sql, "migrations", lambda dialect: known)
        with pytest.raises(apsw.SQLError):
            await SqliteLedger.open(path)
    db = apsw.Connection(str(path))
    assert (db.pragma("user_version"), db.table_exists("main", "half")) == (1, False)
    db.close()
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert (await ledger.admit(message(0))).state is State.DONE


# ── full, killed ─────────────────────────────────────────────────────────────────────────────────


async def test_a_full_disk_stores_nothing_half_and_is_over_when_there_is_room(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert ledger._writer is not None
        db = ledger._writer.db
        room = db.pragma("max_page_count")
        db.pragma("max_page_count", db.pragma("page_count") + 3)
        with pytest.raises(LedgerUnavailable, match=r"is full; nothing was stored\. Free some room"):
            await ledger.commit(
                [(admit(message(n, body=b"x" * 3000)), w.AppendEntry("log", b"x", 1)) for n in range(20)]
            )
        with pytest.raises(LedgerUnavailable, match="is full"):
            async with ledger.transaction() as tx:
                await tx.write(*(admit(message(n, body=b"x" * 3000)) for n in range(20)))
        assert (await ledger.size()).messages == 0
        assert (await ledger.extent("log")).last == 0
        db.pragma("max_page_count", room)
        assert {v.kind for v in await ledger.admit_many([message(n) for n in range(20)])} == {
            VerdictKind.FRESH
        }


async def test_the_log_does_not_fill_a_small_disk(tmp_path: Path) -> None:
    """If it did, there would be no room to move it into the database, and nothing were ever stored again."""
    with small_disk(tmp_path / "disk") as disk:
        async with await SqliteLedger.open(disk / "app.db", ManualClock()) as ledger:
            for n in range(2_000):
                assert (await ledger.admit(message(n))).fresh


async def test_a_disk_that_others_have_filled_is_used_again_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        async with await SqliteLedger.open(disk / "app.db", ManualClock()) as ledger:
            (disk / "ballast").write_bytes(bytes(disk_room(disk) - 100_000))
            stored = await stored_until_full(ledger)
            (disk / "ballast").unlink()
            assert (await ledger.size()).messages == stored
            for n in range(stored, stored + 500):
                assert (await ledger.admit(message(n))).fresh


async def stored_until_full(ledger: SqliteLedger) -> int:
    """How many messages were stored before the disk was full."""
    for n in range(2_000):
        try:
            await ledger.admit(message(n, body=b"x" * 1_000))
        except LedgerUnavailable as problem:
            if "is full" not in str(problem):
                raise
            return n
    raise AssertionError("it is not full")


def disk_room(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


ADMIT = """
async def main():
    ledger = await open_ledger(url)
    async def send(who):
        n = 0
        while True:
            verdict = await ledger.admit(Message(f"app-{who}", f"opaque-{n}", "k", "r"))
            assert verdict.fresh
            say(f"app-{who}", f"opaque-{n}")
            n += 1
    await asyncio.gather(*(send(who) for who in range(20)))
asyncio.run(main())
"""


async def test_a_process_killed_while_admitting_loses_nothing_it_acknowledged(path: Path) -> None:
    with process(ADMIT, path) as sender:
        acknowledged = [line(sender).split() for _ in range(1_000)]
        sender.send_signal(signal.SIGKILL)
        assert sender.stdout is not None
        # The last line may have been cut off in the middle of being said.
        acknowledged += [
            said.split() for said in sender.stdout.read().splitlines(keepends=True) if said[-1] == "\n"
        ]
    async with await SqliteLedger.open(path) as ledger:
        verdicts = await ledger.admit_many([Message(scope, id_, "k", "r") for scope, id_ in acknowledged])
    assert {v.kind for v in verdicts} == {VerdictKind.DUPLICATE}


INSIDE = """
async def main():
    ledger = await open_ledger(url)
    async with ledger.transaction() as tx:
        await tx.execute("CREATE TABLE doors (name)")
        await tx.execute("INSERT INTO doors VALUES ('front')")
        await tx.write(Admit(Message("a", "1", "k", "r"), 1 << 60, 1), AppendEntry("log", b"x", 1))
        say("inside")
        sys.stdin.readline()
asyncio.run(main())
"""


async def test_a_process_killed_inside_a_transaction_leaves_neither(path: Path) -> None:
    with process(INSIDE, path) as worker:
        assert line(worker) == "inside"
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    async with await SqliteLedger.open(path) as ledger:
        assert await ledger.outcome("a", "1") is None
        assert (await ledger.extent("log")).last == 0
        async with ledger.transaction() as tx:
            assert await tx.fetch("SELECT 1 FROM sqlite_schema WHERE name = 'doors'") == []


EXIT = """
async def main():
    ledger = await open_ledger(url)
    asyncio.ensure_future(ledger.admit(Message("a", "1", "k", "r")))
    await asyncio.sleep(0)
    async def leave():
        async with ledger.transaction() as tx:
            await tx.execute("SELECT 1")
            await asyncio.sleep(3600)
    asyncio.ensure_future(leave())
    await ledger.find(b"")
asyncio.run(main())
say("over")
"""


async def test_a_program_that_ends_without_closing_ends_quietly(path: Path) -> None:
    with process(EXIT, path) as program:
        assert program.communicate(timeout=GUARD)[0] == "over\n"
        assert program.returncode == 0


# ── group commit ─────────────────────────────────────────────────────────────────────────────────


async def test_a_thousand_callers_share_a_few_flushes(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert ledger._writer is not None
        flushes = 0

        def count() -> bool:
            nonlocal flushes
            flushes += 1
            return False

        ledger._writer.db.set_commit_hook(count)
        verdicts = await asyncio.gather(*(ledger.admit(message(n)) for n in range(1_000)))
        assert all(v.fresh for v in verdicts)
        assert 1 <= flushes <= 5


async def test_a_caller_that_gave_up_is_carried_out_and_remembered(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        gave_up = asyncio.ensure_future(ledger.admit(message()))
        await asyncio.sleep(0)
        gave_up.cancel()
        await until(lambda: ledger.recall(message(), 0) is not None)
        assert (await ledger.admit(message())).kind is VerdictKind.DUPLICATE


async def test_a_cancelled_opening_lets_go_of_the_file(path: Path) -> None:
    opening = asyncio.ensure_future(SqliteLedger.open(path))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await (await SqliteLedger.open(path)).close()
