"""A disk is quick once several flushes in a row were, and no longer after a slow one."""

from __future__ import annotations

from duly.storage.sqlite.disk_pace import QUICK_IN_A_ROW, QUICK_SECONDS, DiskPace


def noted(*seconds: float) -> DiskPace:
    pace = DiskPace()
    for each in seconds:
        pace.note(each)
    return pace


def test_a_disk_is_quick_after_several_quick_flushes() -> None:
    assert not noted(*[QUICK_SECONDS] * (QUICK_IN_A_ROW - 1)).quick
    assert noted(*[QUICK_SECONDS] * QUICK_IN_A_ROW).quick


def test_one_slow_flush_is_enough_to_doubt_it() -> None:
    quick = [QUICK_SECONDS] * QUICK_IN_A_ROW
    assert not noted(*quick, 2 * QUICK_SECONDS).quick
    assert not noted(*quick, 2 * QUICK_SECONDS, *quick[1:]).quick
    assert noted(*quick, 2 * QUICK_SECONDS, *quick).quick
