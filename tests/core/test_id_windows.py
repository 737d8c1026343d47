"""Windows forget, and never run an id twice for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duly.core.id_windows import DEFAULT_SIZE, CountWindow, Seen, TimeWindow
from duly.core.ids import SeqId
from duly.errors import Malformed

FRESH, DUPLICATE, STALE = Seen.FRESH, Seen.DUPLICATE, Seen.STALE

# -- CountWindow ---------------------------------------------------------------------------------------


def seen(window: CountWindow[int], *ids: int) -> list[Seen]:
    return [window.see(id) for id in ids]


def test_an_id_is_fresh_once_and_then_a_duplicate() -> None:
    assert seen(CountWindow(), 1, 1, 1) == [FRESH, DUPLICATE, DUPLICATE]


def test_an_id_that_fell_out_is_stale_and_never_runs_again() -> None:
    window = CountWindow[int]()
    assert seen(window, *range(DEFAULT_SIZE + 1)) == [FRESH] * (DEFAULT_SIZE + 1)
    assert seen(window, 0, 1, DEFAULT_SIZE) == [STALE, DUPLICATE, DUPLICATE]


def test_a_late_id_is_fresh_as_long_as_nothing_newer_has_fallen_out() -> None:
    window = CountWindow[int](size=3)
    assert seen(window, 10, 30, 20, 5) == [FRESH] * 4  # 10 has fallen out
    assert seen(window, 9, 10, 11) == [STALE, STALE, FRESH]


def test_the_mark_is_the_newest_id_that_fell_out_not_the_last() -> None:
    window = CountWindow[int](size=1)
    assert seen(window, 50, 60, 61) == [FRESH] * 3
    window = CountWindow[int](size=2)
    assert seen(window, 50, 10, 51, 52) == [FRESH] * 4  # out go 50 and then 10
    assert seen(window, 50, 49, 11) == [STALE] * 3


def test_a_duplicate_does_not_stay_longer_for_being_repeated() -> None:
    assert seen(CountWindow(size=2), 1, 2, 1, 3, 1) == [FRESH, FRESH, DUPLICATE, FRESH, STALE]


def test_asking_remembers_nothing() -> None:
    window = CountWindow[int]()
    assert [window.check(1), window.check(1), window.see(1), window.check(1)] == [FRESH] * 3 + [DUPLICATE]


def test_it_holds_the_ids_of_a_sender() -> None:
    window = CountWindow[SeqId](size=1)
    first, second = SeqId(5, 0), SeqId(5, 1)
    assert [window.see(first), window.see(second), window.see(first)] == [FRESH, FRESH, STALE]


def test_a_smaller_window_restored_from_a_larger_one_still_runs_nothing_twice() -> None:
    large, small = CountWindow[int](size=5), CountWindow[int](size=2)
    seen(large, 5, 4, 3, 2, 1)
    small.restore(large.snapshot())
    assert seen(small, 1, 2, 3, 4, 5, 6) == [DUPLICATE, DUPLICATE, STALE, STALE, STALE, FRESH]


def test_a_snapshot_is_not_changed_by_what_comes_after_it() -> None:
    window = CountWindow[int](size=1)
    window.see(1)
    snapshot = window.snapshot()
    window.see(2)
    assert snapshot == {"ids": [1], "low": None}


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_of_nothing_is_malformed(size: int) -> None:
    with pytest.raises(Malformed):
        CountWindow(size)
    with pytest.raises(Malformed):
        TimeWindow(size)


class CountWindowMachine(RuleBasedStateMachine):
    """The model remembers every id ever accepted, in the order of arrival."""

    size = 4

    def __init__(self) -> None:
        super().__init__()
        self.window = CountWindow[int](self.size)
        self.accepted: list[int] = []

    @rule(id=st.integers(0, 30))
    def see(self, id: int) -> None:
        kept, gone = self.accepted[-self.size :], self.accepted[: -self.size]
        checked = self.window.check(id)
        answer = self.window.see(id)
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
        assert self.window.see(id) is FRESH
        self.accepted.append(id)

    @rule()
    def crash(self) -> None:
        restored = CountWindow[int](self.size)
        restored.restore(self.window.snapshot())
        self.window = restored

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.window) <= self.size


TestCountWindowMachine = CountWindowMachine.TestCase
TestCountWindowMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- TimeWindow ----------------------------------------------------------------------------------------


def test_a_value_is_known_before_its_time_and_not_at_it() -> None:
    window = TimeWindow[str](10)
    window.put(b"a", "done", until=100)
    assert window.get(b"a", 99) == "done"
    assert window.get(b"a", 100) is None
    assert len(window) == 0


def test_a_later_value_replaces_the_earlier_one() -> None:
    window = TimeWindow[str](10)
    window.put(b"a", "accepted", until=100)
    window.put(b"a", "done", until=50)
    assert (window.get(b"a", 49), window.get(b"a", 50)) == ("done", None)


def test_over_capacity_the_least_recently_put_goes_and_reading_does_not_count() -> None:
    window = TimeWindow[int](2)
    window.put(b"a", 1, until=100)
    window.put(b"b", 2, until=100)
    window.put(b"a", 3, until=100)
    assert window.get(b"b", 0) == 2
    window.put(b"c", 4, until=100)
    assert [window.get(key, 0) for key in (b"a", b"b", b"c")] == [3, None, 4]


def test_what_is_dropped_is_unknown_and_dropping_the_unknown_is_nothing() -> None:
    window = TimeWindow[int](2)
    window.put(b"a", 1, until=100)
    window.drop(b"a")
    window.drop(b"a")
    assert window.get(b"a", 0) is None


keys = st.sampled_from([b"a", b"b", b"c", b"d"])
steps = st.one_of(
    st.tuples(st.just("put"), keys, st.integers(0, 20)),
    st.tuples(st.just("get"), keys, st.integers(0, 20)),
    st.tuples(st.just("drop"), keys, st.just(0)),
)


@settings(max_examples=200)
@given(st.lists(steps), st.integers(1, 4))
def test_a_cache_may_forget_but_never_lies(script: list[tuple[str, bytes, int]], capacity: int) -> None:
    """Against a model that keeps every put; with room for every key, nothing alive is forgotten either."""
    window, puts = TimeWindow[int](capacity), dict[bytes, tuple[int, int]]()
    for n, (verb, key, time) in enumerate(script):
        if verb == "put":
            window.put(key, n, time)
            puts[key] = (n, time)
        elif verb == "drop":
            window.drop(key)
            puts.pop(key, None)
        else:
            value, until = puts.get(key, (None, 0))
            known, told = value if until > time else None, window.get(key, time)
            assert told == known or (told is None and capacity < 4)
            if known is None:
                puts.pop(key, None)
        assert len(window) <= capacity
