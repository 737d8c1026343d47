"""A disk that fails while a ledger is made: the ledger says so, or loses nothing that it acknowledges."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from duly.core.messages import VerdictKind
from duly.errors import LedgerError
from duly.storage.sqlite.ledger import SqliteLedger
from duly.testing import ManualClock
from duly.testing.sim.sector_disk import SectorDisk, SectorFile
from tests.storage.making import message

STEPS: Final = 80
"""More writes and flushes than it takes to make a ledger."""


class FailingOnce:
    """A disk whose n-th write or flush fails, and no other."""

    def __init__(self, folder: Path, n: int) -> None:
        self.steps = 0
        self.sound = False
        self._n = n
        self.files = SectorDisk(folder, f"failing {n}", self._fault, lambda: None)

    def _fault(self, moment: str) -> str:
        self.steps += 1
        return "fail" if self.steps == self._n and not self.sound else ""

    def ledger(self) -> SqliteLedger:
        """The ledger on this disk, not opened yet."""
        self.files.begin()
        ledger = SqliteLedger(self.files.path, ManualClock(), hot=64, readonly=False)
        ledger._file = SectorFile(self.files.path)
        return ledger


async def _made(disk: FailingOnce) -> bool:
    """Whether a ledger could be made, and a message stored in it; then the power fails."""
    ledger = disk.ledger()
    try:
        ledger._open()
        (verdict,) = await ledger.admit_many([message(1)])
        assert ledger._writer is not None
        assert ledger._writer.db.pragma("journal_mode") == "wal"
    except LedgerError:
        return False
    else:
        return verdict.kind in (VerdictKind.FRESH, VerdictKind.DUPLICATE)
    finally:
        disk.files.die()
        await ledger.close()


@pytest.mark.parametrize("part", range(4))
async def test_whichever_write_fails_while_a_ledger_is_made_nothing_acknowledged_is_lost(
    tmp_path: Path, part: int
) -> None:
    failed = 0
    for n in range(1 + part, STEPS, 4):
        disk = FailingOnce(tmp_path / str(n), n)
        made = await _made(disk)
        disk.sound = True
        if not made:
            failed += 1
            assert await _made(disk), f"after the failure of step {n} it could not be made any more"
        ledger = disk.ledger()
        ledger._open()
        assert await ledger.find(message(1).key) is not None, f"step {n} failed"
        await ledger.close()
        disk.files.die()
    assert failed, "no failure was noticed"
