"""A bounded memory of ids forgets, and never runs an id twice for it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duly.core.ids import SeqId
from duly.core.recent_ids import DEFAULT_SIZE, RecentIds, Seen
from duly.errors import Malformed

FRESH, DUPLICATE, STALE = Seen.FRESH, Seen.DUPLICATE, Seen.STALE


def seen(recent: RecentIds[int], *ids: int) -> list[Seen]:
    return [recent.see(id) for id in ids]


def test_an_id_is_fresh_once_and_then_a_duplicate() -> None:
    assert seen(RecentIds(), 1, 1, 1) == [FRESH, DUPLICATE, DUPLICATE]


def test_an_id_that_fell_out_is_stale_and_never_runs_again() -> None:
    recent = RecentIds[int]()
    assert seen(recent, *range(DEFAULT_SIZE + 1)) == [FRESH] * (DEFAULT_SIZE + 1)
    assert seen(recent, 0, 1, DEFAULT_SIZE) == [STALE, DUPLICATE, DUPLICATE]


def test_a_late_id_is_fresh_as_long_as_nothing_newer_has_fallen_out() -> None:
    recent = RecentIds[int](size=3)
    assert seen(recent, 10, 30, 20, 5) == [FRESH] * 4  # 10 has fallen out
    assert seen(recent, 9, 10, 11) == [STALE, STALE, FRESH]


def test_the_mark_is_the_newest_id_that_fell_out_not_the_last() -> None:
    recent = RecentIds[int](size=1)
    assert seen(recent, 50, 60, 61) == [FRESH] * 3
    recent = RecentIds[int](size=2)
    assert seen(recent, 50, 10, 51, 52) == [FRESH] * 4  # out go 50 and then 10
    assert seen(recent, 50, 49, 11) == [STALE] * 3


def test_a_duplicate_does_not_stay_longer_for_being_repeated() -> None:
    assert seen(RecentIds(size=2), 1, 2, 1, 3, 1) == [FRESH, FRESH, DUPLICATE, FRESH, STALE]


def test_asking_remembers_nothing() -> None:
    recent = RecentIds[int]()
    assert [recent.check(1), recent.check(1), recent.see(1), recent.check(1)] == [FRESH] * 3 + [DUPLICATE]


def test_it_holds_the_ids_of_a_sender() -> None:
    recent = RecentIds[SeqId](size=1)
    first, second = SeqId(5, 0), SeqId(5, 1)
    assert [recent.see(first), recent.see(second), recent.see(first)] == [FRESH, FRESH, STALE]


def test_a_smaller_memory_restored_from_a_larger_one_still_runs_nothing_twice() -> None:
    large, small = RecentIds[int](size=5), RecentIds[int](size=2)
    seen(large, 5, 4, 3, 2, 1)
    small.restore(large.snapshot())
    assert seen(small, 1, 2, 3, 4, 5, 6) == [DUPLICATE, DUPLICATE, STALE, STALE, STALE, FRESH]


def test_a_snapshot_is_not_changed_by_what_comes_after_it() -> None:
    recent = RecentIds[int](size=1)
    recent.see(1)
    snapshot = recent.snapshot()
    recent.see(2)
    assert snapshot == {"ids": [1], "low": None}


@pytest.mark.parametrize("size", [0, -1])
def test_a_memory_of_nothing_is_malformed(size: int) -> None:
    with pytest.raises(Malformed):
        RecentIds(size)


class RecentIdsMachine(RuleBasedStateMachine):
    """The model remembers every id ever accepted, in the order of arrival."""

    size = 4

    def __init__(self) -> None:
        super().__init__()
        self.recent = RecentIds[int](self.size)
        self.accepted: list[int] = []

    @rule(id=st.integers(0, 30))
    def see(self, id: int) -> None:
        kept, gone = self.accepted[-self.size :], self.accepted[: -self.size]
        checked = self.recent.check(id)
        answer = self.recent.see(id)
        assert checked is answer
        if id in kept:
            assert answer is DUPLICATE
        elif any(id <= old for old in gone):
            assert answer is STALE
        else:
            assert answer is FRESH
            assert id not in self.accepted, "it ran twice"
            self.accepted.append(id)

    @rule(step=st.integers(1, 3))
    def a_new_id_above_all_others_is_always_fresh(self, step: int) -> None:
        id = max(self.accepted, default=0) + step
        assert self.recent.see(id) is FRESH
        self.accepted.append(id)

    @rule()
    def crash(self) -> None:
        restored = RecentIds[int](self.size)
        restored.restore(self.recent.snapshot())
        self.recent = restored

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.recent) <= self.size


TestRecentIdsMachine = RecentIdsMachine.TestCase
TestRecentIdsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
