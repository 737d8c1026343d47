"""What sentinels held back is counted once, whatever restarts in between."""

from __future__ import annotations

import pytest

from duly.apps.alerts.held_back_counts import HeldBackCounts, HeldBackReport
from duly.errors import Malformed
from duly.storage.memory import MemoryLedger


async def test_only_what_is_new_since_the_last_report_counts() -> None:
    held = HeldBackCounts(MemoryLedger())
    await held.report("watch", HeldBackReport("a", {"debounce": 2, "limit": 1}))
    await held.report("watch", HeldBackReport("a", {"debounce": 2, "limit": 1}))
    await held.report("watch", HeldBackReport("a", {"debounce": 5, "limit": 1}))
    assert held.counts == {"debounce": 5, "limit": 1}


async def test_a_sentinel_that_starts_again_counts_from_zero() -> None:
    held = HeldBackCounts(MemoryLedger())
    await held.report("watch", HeldBackReport("a", {"cooldown": 2}))
    await held.report("watch", HeldBackReport("b", {"cooldown": 1}))
    assert held.counts == {"cooldown": 3}


async def test_another_hub_does_not_count_the_same_again() -> None:
    ledger = MemoryLedger()
    here, there = HeldBackCounts(ledger), HeldBackCounts(ledger)
    await here.report("watch", HeldBackReport("a", {"limit": 2}))
    await there.report("watch", HeldBackReport("a", {"limit": 3}))
    assert (here.counts["limit"], there.counts["limit"]) == (2, 1)


@pytest.mark.parametrize(
    "report",
    [
        HeldBackReport("a", {"mood": 1}),
        HeldBackReport("a", {"limit": -1}),
        HeldBackReport("", {}),
        HeldBackReport("a" * 65, {}),
    ],
)
def test_what_cannot_be_a_report_is_refused(report: HeldBackReport) -> None:
    with pytest.raises(Malformed, match="held counts signals by debounce, limit, cooldown"):
        report.check()
