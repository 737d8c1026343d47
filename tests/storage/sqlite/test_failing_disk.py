"""A disk that fails while a ledger chooses its write-ahead log: the ledger is not opened, or has the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from duly.errors import LedgerError
from duly.storage.sqlite.file import translated
from duly.storage.sqlite.writer import SqliteWriter
from duly.testing.sim.sector_disk import SectorDisk, SectorFile


class QuietWriter(SqliteWriter):
    """The production writer, whose thread is not started."""

    def _begin(self) -> None:
        pass


@pytest.mark.parametrize("n", range(1, 9))
def test_a_ledger_whose_disk_failed_has_its_log_or_is_not_opened(tmp_path: Path, n: int) -> None:
    """SQLite raises nothing if it cannot change to the log, and goes on without it."""
    steps = 0

    def fault(moment: str) -> str:
        nonlocal steps
        steps += 1
        return "fail" if steps == n else ""

    disk = SectorDisk(tmp_path, f"failing {n}", fault, lambda: None)
    disk.begin()
    disk.path.touch()
    try:
        with translated(disk.path):
            writer = QuietWriter(SectorFile(disk.path))
    except LedgerError:
        return
    assert writer.db.pragma("journal_mode") == "wal", f"step {n} failed"
    writer.db.close()
