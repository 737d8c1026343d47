"""Backups: a copy of a ledger at one moment, kept as a SQLite ledger, and the rules for restoring it.

The laws. A backup is made from a snapshot, so it is consistent while hubs write; it is verified before it
gets its name. A restored ledger never runs a message a second time. It does not know which messages were
accepted after the backup, so a message that was made before the loss and is not in the backup is stale
(`Floor.restore`). A message that was open in the backup may have ended since, so it becomes `unknown`, unless
the caller says that repeating it does no harm. It gives the numbers of lost stream entries out again, and
notes what clients need to recognise that (`restored_streams`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.high_water import mark_name
from duly.core.lifecycle import State
from duly.core.messages import Answer, pack_answer
from duly.core.operations import PutItem, is_later
from duly.core.trusted_time import Floor
from duly.core.units import MS
from duly.errors import LedgerDamaged, LedgerError
from duly.storage import file_url, open_snapshot, secret_box
from duly.storage import snapshot as tables
from duly.storage.bulk_load import fill
from duly.storage.ledger import Ledger
from duly.storage.new_file import new_ledger_file
from duly.storage.restored_streams import BUCKET as GENERATIONS
from duly.storage.restored_streams import reader_of
from duly.storage.snapshot import LedgerTable, Snapshot, StoredRow, Summaries, summarize
from duly.storage.sql import rows

BUCKET: Final = "backup"
ABOUT: Final = "about"
KEY: Final = "key"

LOST: Final = pack_answer(
    Answer(0, b"", "the ledger was restored from a backup made before its end: it may have taken effect")
)

Progress = Callable[[int], None]


class BackupInfo(Struct, frozen=True):
    """The description that a backup contains of itself."""

    at: int
    """when the backup was made (µs)"""
    engine: str
    """the database that the backup was made from"""
    schema: int
    key: str
    """the id of the key that its secrets need; empty if it has no secrets"""
    key_included: bool
    tables: Summaries
    """row counts and digests of the ledger that the backup was made from"""


async def write_backup(
    snapshot: Snapshot,
    path: Path,
    now: int,
    *,
    key: bytes | None = None,
    progress: Progress = lambda rows: None,
) -> BackupInfo:
    """Write a backup of a snapshot and verify it; a given secret key is included."""
    async with new_ledger_file(path) as ledger:
        written = await fill(ledger, snapshot.rows, progress)
        needed = await secret_box.needed_key(ledger)
        about = BackupInfo(now, snapshot.engine, snapshot.schema, needed, key is not None, written)
        also = [] if key is None else [PutItem(BUCKET, KEY, key)]
        await ledger.write(PutItem(BUCKET, ABOUT, msgspec.json.encode(about)), *also)
        ledger_path = getattr(ledger, "path", path)
        await _verify(Path(ledger_path), about)
    return about


async def _verify(path: Path, about: BackupInfo) -> None:
    """Read a backup again; raise if its rows differ from those of the ledger."""
    async with await open_snapshot(file_url(path)) as written:
        if problems := await written.problems():
            raise LedgerDamaged(f"the backup is damaged ({problems[0][1]}); try another disk")
        found = await summarize(_WithoutAbout(written))
    different = [name for name, digest in found.items() if digest != about.tables[name]]
    if different:
        raise LedgerDamaged(f"the backup differs from the ledger in {', '.join(different)}; try again")


async def about_backup(snapshot: Snapshot) -> tuple[BackupInfo | None, bytes | None]:
    """Return a backup's description of itself and the key it includes, or None for each that it lacks; a
    ledger in use has no description."""
    about, key = None, None
    async for batch in snapshot.rows(tables.ITEMS):
        for bucket, name, body in batch:
            if (bucket, name) == (BUCKET, ABOUT):
                about = msgspec.json.decode(body, type=BackupInfo)
            elif (bucket, name) == (BUCKET, KEY):
                key = body
    return about, key


async def restore_rows(
    backup: Snapshot,
    ledger: Ledger,
    *,
    lost: int,
    repeatable: Container[str],
    progress: Progress = lambda rows: None,
) -> RestoredCounts:
    """Fill an empty ledger from a backup, so that no message in it runs a second time. `lost` is the time
    (µs) of the loss: messages made before it may have been accepted after the backup. `repeatable` names the
    channels whose deliveries may be repeated; those deliveries stay open, and so do listed messages that wait
    for a plan of their deliveries."""
    about, _ = await about_backup(backup)
    if about is None:
        raise LedgerError(
            "this file is a ledger, not a backup; make a backup with 'duly backup', or use 'duly copy'"
        )
    restored = _RestoredRows(backup, lost, repeatable, ledger.clock.now())
    await restored.find_open()
    await fill(ledger, restored.rows, progress)
    return RestoredCounts(len(restored.unknown), len(restored.kept_open), about)


class RestoredCounts(Struct, frozen=True):
    """The result of a restore: how many messages became unknown, and how many are still open."""

    unknown: int
    open: int
    about: BackupInfo


class _WithoutAbout(Snapshot):
    """The rows of a backup without its description of itself: the rows of the original ledger."""

    def __init__(self, backup: Snapshot) -> None:
        self._backup = backup
        self.engine, self.schema = backup.engine, backup.schema

    async def rows(self, table: LedgerTable) -> AsyncIterator[Sequence[StoredRow]]:
        """Yield the rows of a table."""
        async for batch in self._backup.rows(table):
            yield [row for row in batch if row[0] != BUCKET] if table is tables.ITEMS else batch

    async def count(self, table: LedgerTable) -> int:
        """Return how many rows a table has."""
        return await self._backup.count(table)

    async def problems(self) -> list[tuple[str, str]]:
        """Return what is wrong with the database."""
        return await self._backup.problems()

    async def close(self) -> None:
        """Do nothing: the owner of the backup closes it."""


class _RestoredRows:
    """The rows of a backup, changed to what a restored ledger holds."""

    def __init__(self, backup: Snapshot, lost: int, repeatable: Container[str], now: int) -> None:
        self._backup = _WithoutAbout(backup)
        self._lost = lost
        self._repeatable = repeatable
        self._now = now
        self._generation = now // MS
        self.unknown: set[bytes] = set()
        self.kept_open: set[bytes] = set()
        self._marks: dict[str, tuple[int, int]] = {}
        """the marks of lanes in which an unknown message may have started"""

    async def find_open(self) -> None:
        """Find the open messages, and those among them that may be repeated."""
        async for batch in self._backup.rows(tables.DELIVERIES):
            self.kept_open.update(
                row[0] for row in batch if row[4] < State.DONE and row[1] in self._repeatable
            )
        still_open: set[bytes] = set()
        async for batch in self._backup.rows(tables.MESSAGES):
            for row in batch:
                if row[4] < State.DONE:
                    listed = row[13]
                    if listed or row[0] in self.kept_open:
                        still_open.add(row[0])
                    else:
                        self.unknown.add(row[0])
                        self._raise_mark(row)
        self.kept_open = still_open

    def _raise_mark(self, row: StoredRow) -> None:
        """Raise the mark of a lane to a message that may have started: earlier messages are late now."""
        key, _, kind, recipient, _, _, _, _, time, expires, position, body, _, _ = row
        message = rows.message_of((key, kind, recipient, body, time, expires, position))
        if message.order is not None and message.order.n is not None:
            name = mark_name(message)
            self._marks[name] = _later(self._marks.get(name), (message.order.n, message.made // MS))

    async def rows(self, table: LedgerTable) -> AsyncIterator[Sequence[StoredRow]]:
        """Yield the rows of a table, with the changes that a restore makes."""
        async for batch in self._backup.rows(table):
            match table.name:
                case "floor":
                    yield [rows.floor_row(Floor(*row).restore(self._lost, self._now)) for row in batch]
                case "marks":
                    yield [(mark, *_later(self._marks.pop(mark, None), (n, ms))) for mark, n, ms in batch]
                case "messages":
                    yield [self._message(row) for row in batch]
                case "deliveries":
                    yield [self._delivery(row) for row in batch]
                case "items":
                    earlier = [int(name) for bucket, name, _ in batch if bucket == GENERATIONS]
                    self._generation = max([self._generation, *(one + 1 for one in earlier)])
                    yield batch
                case _:
                    yield batch
        if table is tables.ITEMS:
            yield [(GENERATIONS, str(self._generation), b"")]
        if table is tables.CURSORS:
            reader = reader_of(self._generation)
            async for batch in self._backup.rows(tables.STREAMS):
                yield [(stream, reader, last) for stream, last in batch]
        if table is tables.MARKS and self._marks:
            yield [(mark, *at) for mark, at in self._marks.items()]

    def _message(self, row: StoredRow) -> StoredRow:
        if row[0] not in self.unknown:
            return row
        return (*row[:4], int(State.UNKNOWN), *row[5:7], self._now, *row[8:12], LOST, row[13])

    def _delivery(self, row: StoredRow) -> StoredRow:
        if row[0] not in self.unknown or row[4] >= State.DONE:
            return row
        return (*row[:4], int(State.UNKNOWN), *row[5:8], "", row[9] or "restored from a backup", *row[10:])


def _later(one: tuple[int, int] | None, other: tuple[int, int]) -> tuple[int, int]:
    """Return the later of two positions in a lane."""
    return other if one is None or is_later(*other, one) else one
