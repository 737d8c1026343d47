"""A crash at any moment of a flush, or while the tables are brought up to date, loses nothing acknowledged.

A run is random groups on a ledger whose memory is tiny and whose tables follow soon. At every moment that
matters its files are copied, as a killed process leaves them; some flushes and some applications fail. Each
copy is opened and compared with the memory ledger, which was given what was acknowledged. Bugs that are
planted into the ledger have to be noticed.
"""

from __future__ import annotations

import base64
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import apsw
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.errors import DulyError, LedgerDamaged, LedgerTooNew, LedgerUnavailable, ProgramError
from duly.storage.ledger import Ledger
from duly.storage.memory import MemoryLedger
from duly.storage.sql import rows
from duly.storage.sqlite import cached_rows, flushes, journal_format
from duly.storage.sqlite.cached_rows import CachedRows
from duly.storage.sqlite.flushes import Flushes
from duly.storage.sqlite.journal_format import VERSION, entries_of
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.pending_changes import PendingChanges
from duly.storage.sqlite.table_rows import Statement, TableChanges
from duly.storage.sqlite.writer import SqliteWriter
from duly.testing import ManualClock

AT = 1_700_000_000_000_000
MESSAGES = 24
FLUSHES = 40


def message(n: int) -> Message:
    return Message("app", f"{AT // 1000 + n}_{n}", "lock_control", "lock", b"%d" % n)


def some_group(rng: random.Random) -> w.Group:
    """What applications write: a command or its end, a line, a mark, a withdrawal, an item, a refusal."""
    n = rng.randrange(MESSAGES)
    m = message(n)
    ref = w.DeliveryRef(m.key, "device", "lock")
    match rng.randrange(10):
        case 0 | 1 | 2:
            deliver = w.Deliver(ref, AT, 0, 1, "hub")
            return (w.Admit(m, AT * 2, AT, State.SENT, (w.RaiseMark("lane", n, AT + n, (deliver,)),)),)
        case 3 | 4:
            done = w.Advance(m.key, State.DONE, AT + 9, Answer(0, b"ok"))
            return (w.Finish(ref, None, State.DONE, "", (done,), kept=rng.random() < 0.5),)
        case 9:
            return (w.Deliver(ref, AT + 7, 0, 1, "again"),)
        case 5:
            return (w.AppendEntry("log", b"%d" % n, AT, m.key), w.MoveCursor("log", "ann", n))
        case 6:
            return (w.Withdraw(m.key), w.RewriteEntry("log", n % 5 + 1, b"new"))
        case 7:
            put, drop = w.PutItem("users", f"u{n % 3}", b"%d" % n), w.DropItem("users", f"u{(n + 1) % 3}")
            return (put, drop)
        case _:
            return (w.RecordRefusal("app", m.id, "denied", "no", AT + n), w.Take(ref, 1, "other", AT + 5))


def failing(statements: Sequence[Statement]) -> Iterator[Statement]:
    """Give half of them, and then fail."""
    yield from statements[: len(statements) // 2]
    raise apsw.FullError("planted")


async def content(ledger: Ledger) -> list[object]:
    """Everything that a ledger holds."""
    of_each = [
        [await ledger.find(message(n).key), await ledger.deliveries(message(n).key)] for n in range(MESSAGES)
    ]
    logs = [await ledger.entries("log", limit=1_000), await ledger.cursors("log"), await ledger.extent("log")]
    rest = [await ledger.marks(), await ledger.bucket("users"), await ledger.refusals(1_000)]
    return [of_each, logs, rest, (await ledger.messages(limit=1_000)).records]


class Crashes:
    """Copies the files of a ledger at every moment that matters, and lets some of its work fail."""

    def __init__(self, path: Path, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.folder = folder
        self.rng = random.Random(seed)
        self.acknowledged = 0
        self.copies: list[tuple[Path, int, int]] = []
        """where, and how many flushes it holds: at least, at most"""
        self.states: list[list[object]] = []
        monkeypatch.setattr(flushes, "CHANGES_BEHIND", 12)
        monkeypatch.setattr(journal_format, "ENTRY_BYTES", 400)  # so that many flushes have several entries
        monkeypatch.setattr(CachedRows, "rows_kept", seed % 7)
        add, write = SqliteWriter.add_to_journal, SqliteWriter.write_tables

        def add_to_journal(writer: SqliteWriter, bodies: Sequence[bytes]) -> None:
            self.copy("before the journal", 0)
            if self.rng.random() < 0.1:
                raise apsw.FullError("planted")
            add(writer, bodies)
            self.copy("after the journal", 1)

        def write_tables(writer: SqliteWriter, statements: Sequence[Statement], through: int) -> None:
            self.copy("before the tables", 1)
            if self.rng.random() < 0.2:
                write(writer, failing(statements), through)
            write(writer, statements, through)
            self.copy("after the tables", 1)

        monkeypatch.setattr(SqliteWriter, "add_to_journal", add_to_journal)
        monkeypatch.setattr(SqliteWriter, "write_tables", write_tables)

    def copy(self, moment: str, more: int) -> None:
        """Copy the files as they are; up to `more` flushes may be on the disk that are not acknowledged."""
        if self.path.exists() and self.rng.random() < 0.3:
            where = self.folder / f"{len(self.copies)} {moment}"
            where.mkdir()
            for end in ("", "-wal"):
                if (file := self.path.with_name(self.path.name + end)).exists():
                    shutil.copy(file, where)
            self.copies.append((where / self.path.name, self.acknowledged, self.acknowledged + more))


async def run(path: Path, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Crashes:
    """Write to a ledger, with crashes; what it answers is what the memory ledger answers."""
    with monkeypatch.context() as planted:
        model, clock = MemoryLedger(ManualClock()), ManualClock()
        crashes = Crashes(path, folder, seed, planted)
        crashes.states.append(await content(model))
        ledger = await SqliteLedger.open(path, clock)
        try:
            for _ in range(FLUSHES):
                groups = [some_group(crashes.rng) for _ in range(crashes.rng.randint(1, 6))]
                try:
                    results = await ledger.commit(groups)
                except LedgerUnavailable:
                    pass
                else:
                    assert results == await model.commit(groups)
                    crashes.states.append(await content(model))
                    crashes.acknowledged += 1
                if crashes.rng.random() < 0.1:
                    await read_what_may_fail(ledger, crashes.states[-1])
        finally:
            await ledger.close()
    async with await SqliteLedger.open(path, clock) as ledger:
        assert await content(ledger) == crashes.states[-1]
    return crashes


async def read_what_may_fail(ledger: Ledger, expected: list[object]) -> None:
    """A question brings the tables up to date first, which may fail here; it never gives a wrong answer."""
    try:
        found = await content(ledger)
    except DulyError:
        return
    assert found == expected


async def check(crashes: Crashes) -> None:
    """Open every copy: by itself, and as a reader beside the one who writes."""
    for path, least, most in crashes.copies:
        allowed = crashes.states[least : most + 1]
        async with await SqliteLedger.open(path, ManualClock(), readonly=True) as reader:
            assert await content(reader) in allowed, f"a reader, {path.parent.name}"
        async with await SqliteLedger.open(path, ManualClock()) as ledger:
            assert await content(ledger) in allowed, path.parent.name


@pytest.mark.parametrize("seed", range(8))
async def test_what_was_acknowledged_is_there_after_a_crash_at_any_moment(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = await run(tmp_path / "app.db", tmp_path, seed, monkeypatch)
    assert crashes.acknowledged > FLUSHES // 2
    assert len(crashes.copies) > 10
    await check(crashes)


# ── planted bugs ─────────────────────────────────────────────────────────────────────────────────


def acknowledge_without_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteWriter, "add_to_journal", lambda writer, bodies: None)


def cut_the_journal_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SqliteWriter.write_tables
    monkeypatch.setattr(SqliteWriter, "write_tables", lambda self, _, through: write(self, [], through))


def apply_the_journal_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SqliteWriter.write_tables
    monkeypatch.setattr(SqliteWriter, "write_tables", lambda self, some, _: write(self, some, 0))


def keep_what_was_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def untaint(self: Flushes) -> None:
        self._tainted = False

    monkeypatch.setattr(Flushes, "_read_anew", untaint)


def take_what_was_forgotten_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = CachedRows.forget

    def forget_all(self: CachedRows) -> None:
        top = self._top
        forget(self)
        self._top = top

    monkeypatch.setattr(CachedRows, "forget", forget_all)


def forget_what_the_tables_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(known: dict[Any, Any], kept: object, count: int) -> dict[Any, Any]:
        return {key: known.pop(key) for key in list(known)[:count]}

    monkeypatch.setattr(cached_rows, "_forget_oldest", oldest)


def lose_changes_that_were_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PendingChanges.begin_to_apply

    def begin_anew(self: PendingChanges) -> list[Statement]:
        self.applied()
        return begin(self)

    monkeypatch.setattr(PendingChanges, "begin_to_apply", begin_anew)


def leave_discarded_deliveries_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    statements = TableChanges.statements

    def without(self: TableChanges) -> Iterator[Statement]:
        return (
            one for one in statements(self) if not one[0].startswith("DELETE FROM deliveries WHERE (key,")
        )

    monkeypatch.setattr(TableChanges, "statements", without)


def take_discarded_deliveries_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    put = CachedRows.put_delivery

    def put_new(self: CachedRows, delivery: w.Delivery) -> None:
        put(self, delivery)
        self.changes.flush.created.add(rows.names(delivery.ref))

    monkeypatch.setattr(CachedRows, "put_delivery", put_new)


def journal_no_discarded_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = TableChanges.pack

    def without(self: TableChanges) -> bytes:
        one = TableChanges()
        one.update(self)
        one.deliveries = {names: found for names, found in self.deliveries.items() if found is not None}
        return pack(one)

    monkeypatch.setattr(TableChanges, "pack", without)


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        (leave_discarded_deliveries_in_the_tables, AssertionError),
        (take_discarded_deliveries_for_new, AssertionError),
        (journal_no_discarded_deliveries, AssertionError),
        (acknowledge_without_journal, AssertionError),
        (cut_the_journal_too_early, AssertionError),
        (apply_the_journal_twice, ProgramError),
        (keep_what_was_not_stored, AssertionError),
        (take_what_was_forgotten_for_new, AssertionError),
        (forget_what_the_tables_do_not_hold, AssertionError),
        (lose_changes_that_were_not_applied, AssertionError),
    ],
)
async def test_a_planted_bug_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
) -> None:
    """By what is wrong in the end, and not by whatever goes wrong on the way."""
    plant(monkeypatch)
    with pytest.raises(error, match=None if error is AssertionError else "UNIQUE constraint failed"):
        await crash_again_and_again(tmp_path, monkeypatch)


async def crash_again_and_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try seeds until one fails: when the tables are written depends on threads, so not every seed does."""
    for seed in range(40):
        one = folder / str(seed)
        one.mkdir()
        await check(await run(one / "app.db", one, seed, monkeypatch))


# ── what cannot be read ──────────────────────────────────────────────────────────────────────────


def spoil(path: Path, change: Callable[[bytearray], None]) -> None:
    db = apsw.Connection(str(path))
    db.execute("INSERT INTO journal VALUES (1, ?)", (entries_of(TableChanges().pack())[0],))
    body = bytearray(db.execute("SELECT body FROM journal").get)
    change(body)
    db.execute("UPDATE journal SET body = ?", (bytes(body),))
    db.close()


BEFORE: Final = "AmY7U/QAm5CAkJGYlcQDa2V5pmRldmljZaRsb2NrAAABAQIDo2h1YqDCgaFtkgQFgJCQkJGToWKhbsQEYm9keZA="
"""A flush of a delivery, a mark and an item as version 2 of the journal holds it."""


async def test_a_journal_of_the_version_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with await SqliteLedger.open(path, ManualClock()) as ledger:
        await ledger.admit(message(0))
    db = apsw.Connection(str(path))
    db.execute("INSERT INTO journal VALUES (1, ?)", (base64.b64decode(BEFORE),))
    db.close()
    for readonly in (True, False):
        async with await SqliteLedger.open(path, ManualClock(), readonly=readonly) as ledger:
            (found,) = await ledger.deliveries(b"key")
            assert (found.state, found.worker) == (State.SENT, "hub")
            assert await ledger.marks() == {"m": (4, 5)}
            assert await ledger.item("b", "n") == b"body"


def newer(body: bytearray) -> None:
    body[0] = VERSION + 1


def torn(body: bytearray) -> None:
    body[-1] ^= 1


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [(newer, LedgerTooNew, "Upgrade duly"), (torn, LedgerDamaged, "Restore a backup")],
)
async def test_a_journal_that_cannot_be_read_is_refused(
    tmp_path: Path,
    change: Callable[[bytearray], None],
    error: type[DulyError],
    says: str,
    readonly: bool,
) -> None:
    path = tmp_path / "app.db"
    await (await SqliteLedger.open(path, ManualClock())).close()
    spoil(path, change)
    with pytest.raises(error, match=says):
        async with await SqliteLedger.open(path, ManualClock(), readonly=readonly) as ledger:
            await ledger.size()
