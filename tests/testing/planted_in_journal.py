"""Bugs to plant in the journal of a SQLite ledger, its rows in memory, its tables and its recovery. The
checkers must find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import pytest

from duly.core.lifecycle import State
from duly.storage.sql import rows
from duly.storage.sqlite import journal_format, replay
from duly.storage.sqlite.cached_rows import CachedRows
from duly.storage.sqlite.file import LedgerFile
from duly.storage.sqlite.flushes import Flushes
from duly.storage.sqlite.pending_changes import PendingChanges
from duly.storage.sqlite.table_rows import Statement, TableChanges
from duly.storage.sqlite.write_ahead_log import WriteAheadLog
from duly.storage.sqlite.writer import SqliteWriter
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("stored_at_restart")
def tables_before_journal(patch: Patch) -> None:
    """A flush writes the tables, which are not flushed by themselves, and no row of the journal."""

    def add(self: SqliteWriter, bodies: Sequence[bytes]) -> None:
        changes = TableChanges()
        for flush in journal_format.flushes_in(enumerate(bodies)):
            changes.update(TableChanges.unpack(flush))
        self.write_tables(list(changes.statements()), self.n)

    patch.setattr(SqliteWriter, "add_to_journal", add)


@breaks("stored_at_restart")
def acknowledged_before_flush(patch: Patch) -> None:
    """A flush writes its row and does not wait until it is on the disk."""
    add = SqliteWriter.add_to_journal

    def hasty(self: SqliteWriter, bodies: Sequence[bytes]) -> None:
        self._run("PRAGMA synchronous = NORMAL")
        try:
            add(self, bodies)
        finally:
            self._run("PRAGMA synchronous = FULL")

    patch.setattr(SqliteWriter, "add_to_journal", hasty)


@breaks("stored_at_restart")
def journal_cut_too_early(patch: Patch) -> None:
    """The journal is cut in a transaction of its own, before the tables hold what it held."""
    write = SqliteWriter.write_tables

    def early(self: SqliteWriter, statements: Iterable[Statement], through: int) -> None:
        self._run(self._sql["cut_journal"], (through,))
        write(self, statements, through)

    patch.setattr(SqliteWriter, "write_tables", early)


@breaks("caught_up")
def journal_never_cut(patch: Patch) -> None:
    """The journal keeps what the tables hold, and grows for ever."""
    write = SqliteWriter.write_tables
    patch.setattr(SqliteWriter, "write_tables", lambda self, statements, through: write(self, statements, 0))


@breaks("sound")
def a_row_applied_twice(patch: Patch) -> None:
    """The last row stays in the journal when it is brought into the tables, and a restart applies it again,
    over what came later."""
    write = SqliteWriter.write_tables
    patch.setattr(
        SqliteWriter, "write_tables", lambda self, statements, through: write(self, statements, through - 1)
    )


@breaks("stored_at_restart")
def recovery_skips_the_journal(patch: Patch) -> None:
    """A restart serves what the tables hold, and cuts off the rest."""

    patch.setattr(SqliteWriter, "catch_up", lambda self: self.write_tables([], 1 << 40))


@breaks("settled")
def stale_rows_after_a_failed_flush(patch: Patch) -> None:
    """A flush has failed, and memory goes on with what it did."""
    write = Flushes._write

    def forgiving(self: Flushes, bodies: list[bytes], through: Callable[[Exception | None], None]) -> None:
        def done(problem: Exception | None) -> None:
            self._tainted = False
            through(problem)

        write(self, bodies, done)

    patch.setattr(Flushes, "_write", forgiving)


@breaks("settled")
def a_failed_flush_is_swallowed(patch: Patch) -> None:
    """The disk says that a flush has failed, and its callers are told that all is well."""
    write = Flushes._write
    patch.setattr(
        Flushes, "_write", lambda self, bodies, through: write(self, bodies, lambda problem: through(None))
    )


@breaks("sound_disk")
def acknowledged_behind_a_failed_flush(patch: Patch) -> None:
    """The disk has failed to flush the log, and what is written behind that place counts as stored: the gap
    is neither waited for nor closed."""
    patch.setattr(SqliteWriter, "_make_sure", lambda self: None)
    patch.setattr(WriteAheadLog, "write_again", lambda self: None)


@breaks("stored_at_restart")
def what_failed_to_follow_is_forgotten(patch: Patch) -> None:
    """The tables cannot be brought up to date once, and the next time only what is new is brought in."""

    begin = PendingChanges.begin_to_apply

    def forget(self: PendingChanges) -> list[Statement]:
        self._applying.clear()
        return begin(self)

    patch.setattr(PendingChanges, "begin_to_apply", forget)


@breaks("torn_refused")
def a_torn_row_is_accepted(patch: Patch) -> None:
    """The checksum of a row of the journal is not looked at."""

    def flushes_in(entries: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
        for _, body in entries:
            try:
                TableChanges.unpack(body[journal_format._HEAD + 1 :])
            except msgspec.DecodeError:
                break
            yield body[journal_format._HEAD + 1 :]

    patch.setattr(replay, "flushes_in", flushes_in)


@breaks("admitted_once")
def what_is_forgotten_is_surely_new(patch: Patch) -> None:
    """Memory forgets a message that the tables have, and takes its id for one that was never stored."""
    forget = CachedRows.forget

    def careless(self: CachedRows) -> None:
        top = self._top
        forget(self)
        self._top = top

    patch.setattr(CachedRows, "forget", careless)


@breaks("admitted_once")
def a_prune_leaves_memory_as_it_was(patch: Patch) -> None:
    """A transaction on the tables has changed what memory holds, and memory is not read again."""
    patch.setattr(Flushes, "_read_anew", lambda self: setattr(self, "_tainted", False))


@breaks("sound_disk")
def an_old_note_asks_for_a_new_log(patch: Patch) -> None:
    """The note that the log was moved into the database is not flushed; after a loss of power the log is
    missed."""

    def settled(self: LedgerFile) -> None:
        if self.problem is None:
            self._lock.write(msgspec.structs.replace(self._lock.note, salt="", frames=0))

    patch.setattr(LedgerFile, "settled", settled)


@breaks("settled")
def a_move_is_lost_in_the_fold(patch: Patch) -> None:
    """Many changes are brought into the tables at once, and of a message that is new only its first state."""
    statements = TableChanges.statements

    def first(self: TableChanges) -> Iterator[Statement]:
        for key, row in self.messages.items():
            self.states[key] = (rows.STATE_NUMBERS[State.ACCEPTED], row[5], None)
        yield from statements(self)

    patch.setattr(TableChanges, "statements", first)


PLANTED = planted(
    tables_before_journal, acknowledged_before_flush, journal_cut_too_early,
    journal_never_cut, a_row_applied_twice, recovery_skips_the_journal, stale_rows_after_a_failed_flush,
    a_failed_flush_is_swallowed, acknowledged_behind_a_failed_flush, what_failed_to_follow_is_forgotten,
    a_torn_row_is_accepted, what_is_forgotten_is_surely_new,
    a_prune_leaves_memory_as_it_was, an_old_note_asks_for_a_new_log, a_move_is_lost_in_the_fold,
)  # fmt: skip
