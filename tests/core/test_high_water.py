"""Marks: what counts for a message that comes late."""

from __future__ import annotations

import pytest

from duly.core import high_water
from duly.core.high_water import HighWaterMarks, names_in

MARK = '["lamp","power","app"]'
OTHER = '["lamp","level","app"]'
A, B, C = b"a", b"b", b"c"


def test_a_mark_rises_with_what_is_handed_over() -> None:
    marks = HighWaterMarks()
    assert marks.hand_over(MARK, A, 3, 30) is not None
    assert marks.is_late(MARK, 2, 20)
    assert not marks.is_late(MARK, 4, 40)
    assert marks.hand_over(MARK, B, 2, 20) is None


def test_what_failed_does_not_count() -> None:
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 1, 10)
    marks.settled(MARK, A, counts=True)
    marks.hand_over(MARK, B, 5, 50)
    assert marks.without(MARK, B) == (1, 51)
    marks.settled(MARK, B, counts=False)
    assert not marks.is_late(MARK, 3, 30), "between what is done and what has failed"
    assert marks.is_late(MARK, 1, 10)


def test_a_failure_behind_something_later_lowers_nothing() -> None:
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 1, 10)
    marks.hand_over(MARK, B, 5, 50)
    assert marks.without(MARK, A) is None
    marks.settled(MARK, A, counts=False)
    assert marks.is_late(MARK, 4, 40)


def test_if_all_have_failed_nothing_counts() -> None:
    marks = HighWaterMarks()
    for key, n in ((A, 1), (B, 5), (C, 7)):
        marks.hand_over(MARK, key, n, 10 * n)
    for key in (A, B, C):
        marks.settled(MARK, key, counts=False)
    assert not marks.is_late(MARK, 0, 0)


def test_what_is_done_is_the_floor_for_what_fails_later() -> None:
    marks = HighWaterMarks()
    for key, n in ((A, 1), (B, 5), (C, 7)):
        marks.hand_over(MARK, key, n, 10 * n)
    marks.settled(MARK, B, counts=True)
    marks.settled(MARK, A, counts=False)
    marks.settled(MARK, C, counts=False)
    assert marks.is_late(MARK, 5, 50)
    assert not marks.is_late(MARK, 6, 60)


def test_what_was_under_way_before_a_restart_counts_whatever_becomes_of_it() -> None:
    marks = HighWaterMarks()
    marks.restore(MARK, 5, 50)
    marks.settled(MARK, A, counts=False)
    assert marks.is_late(MARK, 4, 40)


def test_a_name_says_whose_mark_it_is() -> None:
    assert names_in(MARK) == ("lamp", "power", "app")


def test_of_two_that_only_their_times_set_apart_the_one_that_failed_does_not_count() -> None:
    """`{ms}_0` every time: one number, and a time."""
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 0, 10)
    marks.settled(MARK, A, counts=True)
    marks.hand_over(MARK, B, 0, 30)
    assert marks.without(MARK, B) == (-1, 31), "the ledger takes number 0 for later again"
    marks.settled(MARK, B, counts=False)
    assert marks.hand_over(MARK, C, 0, 20) is not None, "between what is done and what has failed"
    assert marks.is_late(MARK, 0, 9), "before what is done"


def test_a_failure_goes_back_to_the_newest_that_counts_in_whatever_order_they_end() -> None:
    marks = HighWaterMarks()
    for key, n in ((A, 1), (B, 2), (C, 3)):
        marks.hand_over(MARK, key, n, 10 * n)
    marks.settled(MARK, B, counts=True)
    marks.settled(MARK, A, counts=False)
    assert marks.without(MARK, C) == (2, 31)
    marks.settled(MARK, C, counts=False)
    assert marks.is_late(MARK, 1, 10)
    assert not marks.is_late(MARK, 3, 30)


def test_what_is_under_way_before_something_that_is_done_counts_no_longer() -> None:
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 1, 10)
    marks.hand_over(MARK, B, 2, 20)
    marks.settled(MARK, B, counts=True)
    assert marks.without(MARK, A) is None
    marks.settled(MARK, A, counts=False)
    assert marks.is_late(MARK, 1, 10)


def test_of_an_unknown_mark_nothing_is_lowered() -> None:
    marks = HighWaterMarks()
    marks.restore(MARK, 5, 50)
    assert marks.without(MARK, A) is None
    assert marks.get('["lamp","other","app"]') is None


def test_the_mark_that_was_used_longest_ago_is_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(high_water, "MARKS_KEPT", 2)
    marks = HighWaterMarks()
    names = [f'["lamp","{key}","app"]' for key in ("power", "level", "colour")]
    for name in names:
        marks.hand_over(name, A, 3, 30)
    assert [marks.get(name) for name in names] == [None, (3, 30), (3, 30)]
    assert marks.last(names[0]) == -1
    assert marks.forget("lamp") == set(names[1:])


def test_times_in_the_future_are_taken_back_also_of_what_is_under_way() -> None:
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 3, 9_000)
    marks.hand_over(MARK, B, 4, 9_500)
    assert marks.is_late(MARK, 0, 5_001)
    marks.lower(5_000)
    assert not marks.is_late(MARK, 0, 5_001)
    assert marks.is_late(MARK, 4, 5_000)
    assert marks.without(MARK, B) == (3, 5_001)


def test_a_number_that_is_a_time_is_taken_back_with_it() -> None:
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 9_001, 9_000)
    marks.lower(5_000)
    assert marks.get(MARK) == (5_000, 5_000)
    assert marks.last(MARK) == 5_000


def test_a_clock_that_is_set_right_lowers_marks_whose_last_message_failed_and_those_at_rest() -> None:
    marks = HighWaterMarks()
    marks.hand_over(MARK, A, 1, 10)
    marks.hand_over(MARK, B, 5, 50)
    marks.settled(MARK, B, counts=False)
    marks.restore(OTHER, 3, 90)
    marks.lower(20)
    assert (marks.get(MARK), marks.last(MARK)) == ((1, 20), 5), (
        "the failed number was handed over all the same"
    )
    assert marks.get(OTHER) == (3, 20)
