"""The snapshot of a SQLite ledger: what `duly check`, `backup` and `export` read is whole, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duly.errors import LedgerDamaged
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.snapshot import SqliteSnapshot
from duly.testing import ManualClock
from tests.storage.sqlite.test_file import beside, files, killed


async def test_it_refuses_what_a_reader_refuses(tmp_path: Path) -> None:
    """`duly backup` made a checked backup of what was left, and `duly check` found that sound."""
    path = tmp_path / "app.db"
    await killed(path)
    cut, gone, empty = (tmp_path / name / path.name for name in ("cut", "gone", "empty"))
    for copy in (cut, gone, empty):
        copy.parent.mkdir()
        for file in files(path):
            shutil.copy(file, copy.parent)
    log = beside(cut, "-wal")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    beside(gone, "-wal").unlink()
    empty.write_bytes(b"")
    for copy, said in ((cut, "of them are sound"), (gone, "may be lost"), (empty, "the file is empty")):
        with pytest.raises(LedgerDamaged, match=said):
            await SqliteSnapshot.open(copy)
    for end in (".lock", "-wal"):
        beside(empty, end).unlink()
    with pytest.raises(LedgerDamaged, match="the file is empty"):
        await SqliteSnapshot.open(empty)


async def test_of_a_ledger_in_use_the_note_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    await killed(path)
    async with await SqliteLedger.open(path, ManualClock()):
        snapshot = await SqliteSnapshot.open(path)
        assert snapshot.schema
        await snapshot.close()
