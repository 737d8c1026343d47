"""The file of a SQLite ledger: held by one process under whatever name, kept in its place, never silently
other than it was written."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.errors import LedgerDamaged, LedgerError, LedgerInUse, LedgerUnavailable
from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from duly.storage.sqlite import file as sqlite_file
from duly.storage.sqlite import ledger as sqlite
from duly.storage.sqlite import writer as sqlite_writer
from duly.storage.sqlite.ledger import SqliteLedger
from duly.testing import ManualClock
from tests.guard import GUARD
from tests.storage.making import message
from tests.storage.sqlite.test_ledger import ADMIT, HOLD, line, process

FLIPS = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


def beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def files(path: Path) -> list[Path]:
    return [beside(path, end) for end in ("", "-wal", "-shm", ".lock")]


async def fill(ledger: Ledger) -> None:
    found = await ledger.admit_many([message(n, body=random.Random(n).randbytes(300)) for n in range(60)])
    assert all(verdict.fresh for verdict in found)
    await ledger.write(*(w.AppendEntry("log", b"line %d" % n, n) for n in range(20)))
    await ledger.write(
        w.PutItem("users", "eve", b"1"), w.RaiseMark("mark", 3, 4), w.MoveCursor("log", "bob", 7)
    )
    await ledger.write(w.Advance(message(3).key, State.DONE, 5))


async def content(ledger: Ledger) -> object:
    """Everything that was committed, as it reads back."""
    return (
        await ledger.messages(limit=1_000),
        await ledger.entries("log", limit=1_000),
        await ledger.bucket("users"),
        await ledger.marks(),
        await ledger.cursors("log"),
    )


# ── one process writes it, whatever it is called ─────────────────────────────────────────────────


def by_symlink(path: Path) -> Path:
    path.with_name("other.db").symlink_to(path)
    return path.with_name("other.db")


def by_hard_link(path: Path) -> Path:
    path.with_name("other.db").hardlink_to(path)
    return path.with_name("other.db")


def without_lock(path: Path) -> Path:
    beside(path, ".lock").unlink()
    return path


@pytest.mark.parametrize("other", [by_symlink, by_hard_link, without_lock])
async def test_a_second_process_is_refused_under_every_name_and_without_the_lock_file(
    path: Path, other: Callable[[Path], Path]
) -> None:
    with process(HOLD, path) as holder:
        assert line(holder) == "open"
        with pytest.raises(LedgerInUse, match="another process"):
            await SqliteLedger.open(other(path), ManualClock())


@pytest.mark.parametrize("other", [by_symlink, by_hard_link, without_lock])
async def test_so_is_a_second_writer_in_the_same_process(path: Path, other: Callable[[Path], Path]) -> None:
    async with await SqliteLedger.open(path, ManualClock()):
        with pytest.raises(LedgerInUse, match="open in this process already; use that ledger"):
            await SqliteLedger.open(other(path), ManualClock())


async def test_a_file_that_this_process_shares_is_not_said_to_be_of_another_one(path: Path) -> None:
    async with await open_ledger(f"sqlite:///{path}?mode=shared"):
        with pytest.raises(
            LedgerInUse, match=r"open in this process already; .* \?mode=shared in both places"
        ):
            await SqliteLedger.open(path, ManualClock())


async def test_a_ledger_opened_by_a_symlink_keeps_its_log_beside_the_file_itself(path: Path) -> None:
    path.with_name("other.db").symlink_to(path)
    async with await SqliteLedger.open(path.with_name("other.db"), ManualClock()) as ledger:
        await ledger.admit(message(1))
        assert beside(path, "-wal").exists()
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert not (await ledger.admit(message(1))).fresh


STRANGER = (
    "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('SELECT * FROM floor'); db.close()"
)


async def test_looking_into_a_held_file_from_the_same_process_leaves_sqlites_locks(path: Path) -> None:
    """Closing any descriptor of a file drops this process's POSIX locks on it; another program would then
    take itself for the last one, and remove the log."""
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await ledger.admit(message(1))
        with pytest.raises(LedgerInUse):
            await SqliteLedger.open(path, ManualClock())
        await (await SqliteLedger.open(path, readonly=True)).close()
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, str(path))
        assert await stranger.wait() == 0
        assert (await ledger.admit(message(2))).fresh
        assert beside(path, "-wal").stat().st_size


# ── it stays in its place ────────────────────────────────────────────────────────────────────────


def removed(path: Path) -> None:
    path.unlink()


def moved(path: Path) -> None:
    path.rename(path.with_name("remote"))


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
@pytest.mark.parametrize("lose", [removed, moved, replaced])
async def test_files_lost_under_a_running_ledger_are_noticed_before_anything_is_acknowledged(
    path: Path, end: str, lose: Callable[[Path], None]
) -> None:
    ledger = await SqliteLedger.open(path, ManualClock())
    await ledger.admit(message(1))
    ledger.check()
    lose(beside(path, end))
    with pytest.raises(LedgerError, match="while the ledger was in use"):
        await ledger.admit(message(2))
    for refused in (ledger.admit(message(3)), ledger.find(message(1).key), ledger.prune()):
        with pytest.raises(LedgerError, match="while the ledger was in use"):
            await refused
    await ledger.close()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_off(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("end", ["", "-wal"])
@pytest.mark.parametrize("cut", [cut_short, cut_off])
async def test_files_truncated_under_a_running_ledger_are_noticed_before_anything_is_acknowledged(
    path: Path, end: str, cut: Callable[[Path], None]
) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as before:
        await before.admit(message(0))
    ledger = await SqliteLedger.open(path, ManualClock())
    await ledger.admit(message(1))
    ledger.check()
    cut(beside(path, end))
    for refused in (ledger.admit(message(2)), ledger.admit(message(3)), ledger.prune()):
        with pytest.raises(LedgerDamaged, match="truncated while the ledger was in use"):
            await refused
    await ledger.close()


async def test_a_ledger_that_is_scrubbed_may_become_smaller(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        for n in range(50):
            await ledger.admit(message(n))
        for _ in range(2):
            await ledger.scrub()
            ledger.check()
        await ledger.admit(message(50))


async def test_the_log_says_once_why_a_ledger_stores_nothing_more(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = await SqliteLedger.open(path, ManualClock())
    path.unlink()
    for n in range(3):
        with pytest.raises(LedgerError):
            await ledger.admit(message(n))
    await ledger.close()
    assert [line.count("removed while the ledger was in use") for line in caplog.messages] == [1]


async def test_an_idle_ledger_notices_when_it_is_asked(path: Path) -> None:
    ledger = await SqliteLedger.open(path, ManualClock())
    path.unlink()
    with pytest.raises(LedgerDamaged, match="removed while the ledger was in use"):
        ledger.check()
    await ledger.close()


# ── what was there once does not begin anew by itself ────────────────────────────────────────────


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def cut_to_its_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("spoil", [removed, emptied, cut, cut_to_its_header])
async def test_a_ledger_that_is_gone_empty_or_shorter_is_refused(
    path: Path, spoil: Callable[[Path], None]
) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
    spoil(path)
    for _ in range(2):
        with pytest.raises(LedgerDamaged):
            await SqliteLedger.open(path, ManualClock())


async def test_an_empty_file_beside_a_log_is_refused_even_without_the_note(path: Path) -> None:
    with process(ADMIT, path) as sender:
        line(sender)
        sender.send_signal(signal.SIGKILL)
        sender.wait()
    emptied(path)
    beside(path, ".lock").unlink()
    with pytest.raises(LedgerDamaged, match="now the file is empty"):
        await SqliteLedger.open(path, ManualClock())


async def test_removing_the_note_as_well_begins_anew(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
    for file in files(path):
        file.unlink(missing_ok=True)
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert (await ledger.admit(message(1))).fresh


@pytest.mark.parametrize("readonly", [False, True])
async def test_an_empty_file_is_refused_until_it_is_removed_even_without_a_note(
    path: Path, readonly: bool
) -> None:
    """A copy of a ledger that failed, or a disk that lost its content, was started as a new ledger: without
    accounts, and without the ids that had run."""
    path.touch()
    for _ in range(2):
        with pytest.raises(LedgerDamaged, match=r"the file is empty.* restore a backup; .*remove the empty"):
            await SqliteLedger.open(path, ManualClock(), readonly=readonly)
        assert path.stat().st_size == 0
    path.unlink()
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert (await ledger.admit(message(1))).fresh


FIRST_OPEN = """
import os, signal, sys
from pathlib import Path
from duly.storage.sqlite import file, lock_file
from duly.storage.sqlite.writer import SqliteWriter

OURS = {module.__file__ for module in (file, lock_file)}

def die_at(n):
    def trace(frame, event, arg):
        nonlocal n
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            n -= 1
            if not n:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

def open_first(path):
    held = file.LedgerFile(path)
    held.hold()
    held.finish()
    held.inspect()
    SqliteWriter(held)

for n in range(1, 10_000):
    path = Path(sys.argv[1]) / str(n) / "ledger.db"
    path.parent.mkdir()
    if not (child := os.fork()):
        sys.settrace(die_at(n))
        open_first(path)
        os._exit(0)
    if not os.waitpid(child, 0)[1]:
        print(n, flush=True)
        break
"""


async def test_a_kill_at_any_line_of_the_first_open_is_harmless(tmp_path: Path) -> None:
    """Whatever is left, the next start makes a ledger; none of the files is ever empty under its name."""
    maker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FIRST_OPEN, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await maker.communicate()
    assert int(said) > 50, "it was killed at so many lines"
    seen = {tuple(sorted((file.name, file.stat().st_size) for file in folder.iterdir())): folder
            for folder in tmp_path.iterdir()}  # fmt: skip
    for folder in seen.values():
        path = folder / "ledger.db"
        assert not path.exists() or path.stat().st_size, "no empty file"
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            assert (await ledger.admit(message(1))).fresh
        left = {file.name for file in folder.iterdir()}
        assert left <= {"ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"}, "it was tidied up"
    assert len(seen) > 5


async def killed(path: Path) -> None:
    """A ledger whose process was killed: its log holds what was stored last."""
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
        for file in files(path):
            shutil.copy(file, file.with_name("kept-" + file.name))
    for file in files(path):
        file.with_name("kept-" + file.name).replace(file)


@pytest.mark.parametrize("readonly", [False, True])
async def test_a_killed_ledger_whose_log_is_gone_is_refused(path: Path, readonly: bool) -> None:
    await killed(path)
    beside(path, "-wal").unlink()
    with pytest.raises(LedgerDamaged, match="what was stored last may be lost"):
        await SqliteLedger.open(path, ManualClock(), readonly=readonly)
    assert not beside(path, "-wal").exists(), "nothing was left behind"


async def test_a_ledger_whose_log_and_note_are_gone_does_not_begin_anew(path: Path) -> None:
    """All that a young ledger had stored was in its log. A copy of its folder without the log and the note
    was started as a new ledger: without accounts, and without the ids that had run."""
    await killed(path)
    for end in ("-wal", "-shm", ".lock"):
        beside(path, end).unlink()
    for _ in range(2):
        with pytest.raises(LedgerDamaged, match=r"as after a crash.* restore a backup; .* remove the file"):
            await SqliteLedger.open(path, ManualClock())
    path.unlink()
    beside(path, ".lock").unlink(missing_ok=True)
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert (await ledger.admit(message(1))).fresh


async def test_one_that_only_reads_refuses_a_log_that_was_cut_short(path: Path) -> None:
    await killed(path)
    log = beside(path, "-wal")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size // 2)
    with pytest.raises(LedgerDamaged, match="of them are sound"):
        await SqliteLedger.open(path, ManualClock(), readonly=True)


async def test_one_that_only_reads_refuses_a_file_that_was_emptied(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
    path.write_bytes(b"")
    with pytest.raises(LedgerDamaged, match=r"there was a ledger at .* and now the file is empty"):
        await SqliteLedger.open(path, ManualClock(), readonly=True)
    beside(path, ".lock").unlink()
    with pytest.raises(LedgerDamaged, match="now the file is empty"):
        await SqliteLedger.open(path, ManualClock(), readonly=True)


async def test_one_that_only_reads_leaves_a_log_alone_that_is_being_written(path: Path) -> None:
    """What the note says is behind or ahead of what is read then; the writer has inspected the log itself."""
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
        right = await content(ledger)
        note = beside(path, ".lock")
        note.write_bytes(note.read_bytes().replace(b'"frames":', b'"frames":9'))
        async with await SqliteLedger.open(path, ManualClock(), readonly=True) as reader:
            assert await content(reader) == right
        code = "import sys, duly, asyncio; asyncio.run(duly.open_ledger(f'sqlite:///{sys.argv[1]}?mode=ro'))"
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(path))
        assert await other.wait() == 0


async def test_a_start_that_failed_has_not_touched_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to move the log into the database and remove it; the next start missed it."""
    await killed(path)
    async with await SqliteLedger.open(_copy(path, path.parent / "good"), ManualClock()) as ledger:
        right = await content(ledger)

    def fail(self: object) -> None:
        raise apsw.FullError("planted")

    with monkeypatch.context() as full:
        full.setattr(sqlite_writer.SqliteWriter, "catch_up", fail)
        with pytest.raises(LedgerUnavailable, match="full"):
            await SqliteLedger.open(path, ManualClock())
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert await content(ledger) == right


async def test_after_a_loss_of_power_no_older_note_asks_for_the_log_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of the log is flushed before the log begins anew."""
    flushed: dict[str, bytes] = {}
    fsync = os.fsync

    def note_flushed(fd: int) -> None:
        fsync(fd)
        flushed["note"] = beside(path, ".lock").read_bytes()

    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
        monkeypatch.setattr(os, "fsync", note_flushed)
        flushed["note"] = beside(path, ".lock").read_bytes()  # the system has written it back by itself
        assert ledger._writer is not None
        ledger._writer._checkpoint()
        await ledger.admit(message(999))
        left = _copy(path, path.parent / "left")
    beside(left, ".lock").write_bytes(flushed["note"])
    beside(left, "-wal").write_bytes(beside(left, "-wal").read_bytes()[: sqlite_file.WAL_HEADER])
    async with await SqliteLedger.open(left, ManualClock()) as ledger:
        assert not (await ledger.admit(message(1))).fresh


async def test_a_ledger_closed_up_to_any_point_opens_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was killed just when its log had been taken over and was cut off."""
    for point in ("settled", "release"):
        ledger = await SqliteLedger.open(path, ManualClock())
        await ledger.admit(message(ord(point[0])))
        kept = path.with_name(point)
        kept.mkdir()
        real = getattr(ledger._file, point)

        def snap(real: Callable[[], None] = real, kept: Path = kept) -> None:
            real()
            for file in files(path):
                if file.exists():
                    shutil.copy(file, kept)

        monkeypatch.setattr(ledger._file, point, snap)
        await ledger.close()
        async with await SqliteLedger.open(kept / path.name, ManualClock()) as again:
            assert not (await again.admit(message(ord(point[0])))).fresh


# ── damage is an error, never other content ──────────────────────────────────────────────────────


def flip(path: Path, seed: int) -> None:
    at = random.Random(seed)
    raw = bytearray(path.read_bytes())
    raw[at.randrange(len(raw))] ^= 1 << at.randrange(8)
    path.write_bytes(raw)


async def outcomes(path: Path, end: str, tmp_path: Path, *, readonly: bool = False) -> dict[str, int]:
    """Flips a bit at a seeded place in each of many copies, and opens them."""
    async with await SqliteLedger.open(_copy(path, tmp_path / "good"), ManualClock()) as ledger:
        right = await content(ledger)
    seen = {"refused": 0, "right": 0, "wrong": 0}
    for seed in range(FLIPS):
        copy = _copy(path, tmp_path / f"{end}{seed}")
        flip(beside(copy, end), seed)
        try:
            async with await SqliteLedger.open(copy, ManualClock(), readonly=readonly) as ledger:
                seen["right" if await content(ledger) == right else "wrong"] += 1
        except LedgerError:
            seen["refused"] += 1
    return seen


def _copy(path: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in files(path):
        if file.exists():
            shutil.copy(file, folder)
    return folder / path.name


async def test_a_flipped_bit_in_the_database_is_refused_or_harmless(path: Path, tmp_path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
        await ledger.scrub()  # in pages that are free, nothing is checked, and nothing matters
    seen = await outcomes(path, "", tmp_path)
    assert seen["wrong"] == 0
    assert seen["refused"] >= FLIPS * 9 // 10, seen


@pytest.mark.parametrize("readonly", [False, True])
async def test_a_flipped_bit_in_the_log_of_a_killed_ledger_is_refused_or_harmless(
    path: Path, tmp_path: Path, readonly: bool
) -> None:
    await killed(path)
    seen = await outcomes(path, "-wal", tmp_path, readonly=readonly)
    assert seen["wrong"] == 0
    assert seen["refused"] >= FLIPS * 9 // 10, seen


async def test_a_header_that_denies_the_checksums_is_refused(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
    raw = bytearray(path.read_bytes())
    assert raw[20] == sqlite_file.CHECKSUM_BYTES
    raw[20] = 0
    path.write_bytes(raw)
    with pytest.raises(LedgerDamaged):
        await SqliteLedger.open(path, ManualClock())


async def test_a_large_file_is_read_through_while_it_is_in_use(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
        await ledger.scrub()
    raw = bytearray(path.read_bytes())
    raw[raw.index(random.Random(30).randbytes(300)[:40])] ^= 1
    path.write_bytes(raw)
    for module in (sqlite, sqlite_file):
        monkeypatch.setattr(module, "CHECKED_SIZE", 0)
    ledger = await SqliteLedger.open(path, ManualClock())
    assert ledger._reading_through is not None
    ledger._reading_through.join()
    with pytest.raises(LedgerDamaged, match="nothing more is stored"):
        ledger.check()
    with pytest.raises(LedgerDamaged):
        await ledger.admit(message(99))
    await ledger.close()


async def test_closing_does_not_wait_for_a_large_file_to_be_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "CHECKED_SIZE", 0)
    reading = threading.Event()

    def long(self: sqlite_file.LedgerFile, stop: threading.Event) -> None:
        reading.set()
        assert stop.wait(GUARD), "closing did not say so"

    monkeypatch.setattr(sqlite_file.LedgerFile, "read_through", long)
    async with await SqliteLedger.open(path, ManualClock()):
        assert reading.wait(GUARD)


# ── older files ──────────────────────────────────────────────────────────────────────────────────


def by_backup(path: Path, copy: Path) -> None:
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def by_vacuum(path: Path, copy: Path) -> None:
    with closing(sqlite3.connect(path)) as source:
        source.execute("VACUUM INTO ?", (str(copy),))


async def test_a_ledger_without_checksums_gets_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        for module in (sqlite_writer, sqlite_file):
            older.setattr(module, "checksum_vfs", lambda: None)
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            await fill(ledger)
            right = await content(ledger)
    assert path.read_bytes()[20] == 0
    for _ in range(2):
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            assert await content(ledger) == right
    assert path.read_bytes()[20] == sqlite_file.CHECKSUM_BYTES
    assert [record.message for record in caplog.records if "with checksums" in record.message] == [
        f"writing {path} anew, with checksums; this is done once"
    ]


@pytest.mark.parametrize("after", [1, 2])
async def test_a_crash_while_checksums_are_added_is_made_good(
    path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Also of a ledger that is larger than SQLite's cache: its first pages are written before the header."""
    with monkeypatch.context() as older:
        for module in (sqlite_writer, sqlite_file):
            older.setattr(module, "checksum_vfs", lambda: None)
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            await fill(ledger)
            await ledger.write(*(w.AppendEntry("log", b"x" * 4_000, n) for n in range(2_000)))
            right = await content(ledger)
    with monkeypatch.context() as dying:
        connect, count = sqlite_file.connect, 0

        def die(path: Path, *, readonly: bool = False) -> apsw.Connection:
            nonlocal count
            count += not readonly
            if count > after + 1:  # the first looks whether there are checksums
                raise apsw.IOError("the process dies")
            return connect(path, readonly=readonly)

        dying.setattr(sqlite_file, "connect", die)
        with pytest.raises(LedgerError):
            await SqliteLedger.open(path, ManualClock())
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        assert await content(ledger) == right
        ledger.check()


@pytest.mark.parametrize("how", [by_backup, by_vacuum])
async def test_a_copy_made_by_sqlite3_says_what_it_is_and_can_be_used_as_documented(
    path: Path, tmp_path: Path, how: Callable[[Path, Path], None]
) -> None:
    async with await SqliteLedger.open(path, clock=ManualClock()) as ledger:
        await fill(ledger)
        before = await content(ledger)
    copy = tmp_path / "copy.db"
    how(path, copy)
    with pytest.raises(LedgerDamaged, match="is a copy that sqlite3 has made"):
        await SqliteLedger.open(copy)
    beside(copy, ".lock").write_text('{"pid":0,"made":true,"converting":true}\n')
    async with await SqliteLedger.open(copy, clock=ManualClock()) as ledger:
        assert await content(ledger) == before


async def test_a_rewrite_that_a_crash_has_cut_short_is_undone(path: Path) -> None:
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await fill(ledger)
        right = await content(ledger)
    db = apsw.Connection(str(path))
    for statement in ("PRAGMA journal_mode = DELETE", "BEGIN", "UPDATE messages SET body = x'00'"):
        db.execute(statement).fetchall()
    db.cache_flush()
    folder = _copy(path, path.with_name("crashed")).parent
    shutil.copy(beside(path, "-journal"), folder)
    db.close()
    async with await SqliteLedger.open(folder / path.name, ManualClock()) as ledger:
        assert await content(ledger) == right


# ── only its owner may read it ───────────────────────────────────────────────────────────────────


async def test_every_file_of_a_ledger_is_private_from_its_first_byte(path: Path) -> None:
    old = os.umask(0)
    try:
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            await ledger.admit(message(1))
            assert {file.name: file.stat().st_mode & 0o777 for file in files(path)} == {
                file.name: 0o600 for file in files(path)
            }
    finally:
        os.umask(old)


@pytest.mark.parametrize(
    "text", [b"a letter to a friend, which is no ledger\n" * 100, b"SQLite format 3\0" + b"x" * 99]
)
async def test_a_file_that_is_no_ledger_keeps_its_mode(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o644)
    with pytest.raises(LedgerError):
        await SqliteLedger.open(path, ManualClock())
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.read_bytes() == text


async def test_one_that_others_could_read_is_closed_and_that_is_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await (await SqliteLedger.open(path, ManualClock())).close()
    path.chmod(0o644)
    await (await SqliteLedger.open(path, ManualClock())).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert f"closed {path} to other users; it was open (mode 0644)" in caplog.text
