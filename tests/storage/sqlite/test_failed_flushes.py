"""A disk that fails to flush says so once, and forgets what it could not write: nothing is acknowledged
behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest

from duly.core import operations as w
from duly.errors import LedgerUnavailable
from duly.testing import ManualClock
from duly.testing.sim.journal_ledger import JournalLedger, UnsettledFlushes
from duly.testing.sim.sector_disk import SectorDisk


class FailingDisk:
    """A simulated disk whose next writes and flushes fail as it is told."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.fails: deque[str] = deque()
        """the moments that fail next, in order: `write` or `flush`"""
        self.writes_left: int | None = None
        """so many more writes, once nothing else is to fail; then the power fails"""
        self.died = asyncio.Event()
        self._disk = SectorDisk(folder, f"{seed}", self._fault, self._die)

    def _fault(self, moment: str) -> str:
        if self.fails and self.fails[0] == moment:
            self.fails.popleft()
            return "fail"
        if moment == "write" and not self.fails and self.writes_left is not None:
            self.writes_left -= 1
            return "" if self.writes_left else "crash"
        return ""

    def _die(self) -> None:
        assert self.writes_left == 0, "a process dies only where it is told to"
        self.died.set()

    def kill(self) -> None:
        """End the process alone: the operating system still has what it wrote."""
        self._disk.die(power=False)

    def open(self) -> JournalLedger:
        """Begin a life with what the last one has left."""
        doubt = UnsettledFlushes(lambda disk, write, result: None)
        ledger = JournalLedger(ManualClock(), self._disk, "worker", self._fault, self._die, doubt)
        ledger.begin()
        return ledger


async def stored(ledger: JournalLedger, name: str) -> bool:
    """Try to store an item; return whether that was acknowledged."""
    try:
        await ledger.commit([(w.PutItem("things", name, b"x"),)])
    except LedgerUnavailable:
        return False
    return True


@pytest.mark.parametrize("then", [[], ["write"], ["flush"]], ids=["alone", "and a write", "and a flush"])
@pytest.mark.parametrize("seed", range(8))
async def test_what_is_acknowledged_after_a_failed_flush_survives_a_loss_of_power(
    tmp_path: Path, seed: int, then: list[str]
) -> None:
    disk = FailingDisk(tmp_path / "disk", seed)
    ledger = disk.open()
    acknowledged = [name for name in ("a", "b") if await stored(ledger, name)]
    await ledger.size()  # the tables are written behind them, and not flushed yet
    disk.fails.extend(["flush", *then])
    acknowledged += [name for name in "cdef" if await stored(ledger, name)]
    ledger.dead = True  # the power fails
    assert acknowledged[:2] == ["a", "b"]
    assert acknowledged[2:]  # the disk works again, and so does the ledger

    again = disk.open()
    found = await again.bucket("things")
    again.dead = True
    assert set(acknowledged) <= found.keys()


@pytest.mark.parametrize("seed", range(8))
async def test_a_process_that_follows_a_failed_flush_rests_nothing_on_it(tmp_path: Path, seed: int) -> None:
    """The process that saw the flush fail is killed. The next one reads the whole log, and does not know that
    the disk has a gap there."""
    disk = FailingDisk(tmp_path / "disk", seed)
    ledger = disk.open()
    acknowledged = [name for name in ("a", "b", "c") if await stored(ledger, name)]
    await ledger.size()  # the tables are written behind them, and not flushed yet
    disk.fails.extend(["flush", "write"])
    assert not await stored(ledger, "d")
    disk.kill()
    ledger.dead = True

    ledger = disk.open()
    acknowledged += [name for name in "efg" if await stored(ledger, name)]
    assert len(acknowledged) == 6
    ledger.dead = True  # the power fails

    again = disk.open()
    found = await again.bucket("things")
    again.dead = True
    assert set(acknowledged) <= found.keys()


@pytest.mark.parametrize("writes", range(1, 13))
@pytest.mark.parametrize("seed", range(8))
async def test_a_loss_of_power_while_the_log_is_moved_after_a_failed_flush_loses_nothing(
    tmp_path: Path, seed: int, writes: int
) -> None:
    """The failed flush leaves a gap in the log. Pages from behind the gap must not get into the database
    before the gap is closed: what is before it would no longer fit them."""
    disk = FailingDisk(tmp_path / "disk", seed)
    ledger = disk.open()
    acknowledged = [name for name in ("a", "b", "c") if await stored(ledger, name)]
    await ledger.size()  # the tables are written behind them, and not flushed yet
    disk.fails.append("flush")
    disk.writes_left = writes
    died = asyncio.ensure_future(disk.died.wait())
    for name in "defg":
        storing = asyncio.ensure_future(stored(ledger, name))
        await asyncio.wait({storing, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():  # a dead process answers nothing
            storing.cancel()
            break
        acknowledged += [name] if storing.result() else []
    died.cancel()
    ledger.dead = True

    disk.writes_left = None
    again = disk.open()
    found = await again.bucket("things")
    again.dead = True
    assert {"a", "b", "c"} <= set(acknowledged) <= found.keys()
