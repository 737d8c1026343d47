"""The timer queue, step by step and against a naive model."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import duly
from duly.core.timers import SPARE, Timers
from duly.core.units import FOREVER

KEYS = st.sampled_from("abcde")
TIMES = st.one_of(st.integers(0, 50), st.just(FOREVER))


def test_a_key_has_one_timer_and_the_last_setting_counts() -> None:
    timers = Timers[str]()
    timers.set("a", 10)
    timers.set("a", 30)
    timers.set("b", 20)
    assert len(timers) == 2
    assert timers.next_wake() == 20
    assert list(timers.due(29)) == ["b"]
    assert timers.get("a") == 30
    assert timers.pop(29) is None
    assert timers.pop(30) == "a"
    assert timers.next_wake() is None
    assert "a" not in timers


def test_timers_of_the_same_moment_fire_in_the_order_they_were_set() -> None:
    timers = Timers[object]()
    keys = [object() for _ in range(20)]  # cannot be compared with each other
    for key in keys:
        timers.set(key, 5)
    assert list(timers.due(5)) == keys


def test_a_timer_set_to_forever_is_none() -> None:
    timers = Timers[str]()
    timers.set("a", 10)
    timers.set("a", FOREVER)
    assert timers.next_wake() is None
    assert timers.get("a") is None
    timers.set("a", FOREVER, until=7)
    assert timers.next_wake() == 7


def test_a_clock_that_is_set_moves_lengths_and_leaves_limits() -> None:
    timers = Timers[str]()
    timers.set("length", 100)
    timers.set("moment", FOREVER, until=200)
    timers.set("both", 300, until=250)
    timers.shift(1_000)
    assert [timers.get(key) for key in ("length", "moment", "both")] == [1_100, 200, 250]
    timers.shift(-1_200)
    assert [timers.get(key) for key in ("length", "moment", "both")] == [-100, 200, 100]


def test_a_timer_may_be_set_or_cancelled_while_those_due_are_taken() -> None:
    timers = Timers[str]()
    for n, key in enumerate("abc"):
        timers.set(key, n)
    seen = []
    for key in timers.due(10):
        seen.append(key)
        if key == "a":
            timers.cancel("b")
            timers.set("d", 10)
            timers.set("e", 11)
    assert seen == ["a", "c", "d"]
    assert list(timers) == ["e"]


def test_dead_timers_are_bounded() -> None:
    timers = Timers[int]()
    for n in range(10_000):
        timers.set(0, n)
        assert len(timers._heap) <= 2 + SPARE
    for n in range(1_000):
        timers.set(n, 10_000 + n)
    for n in range(999):
        timers.cancel(n)
    for n in range(3_000):
        timers.set(0, n)
    assert len(timers._heap) <= 2 * len(timers) + SPARE
    assert list(timers.due(20_000)) == [0, 999]


def test_a_cleared_queue_has_nothing() -> None:
    timers = Timers[str]()
    timers.set("a", 1)
    timers.clear()
    assert timers.next_wake() is None
    assert not timers
    timers.cancel("a")


class AgainstModel(RuleBasedStateMachine):
    """Timers behave as a list that is searched from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = Timers[str]()
        self.model: list[tuple[str, int, int]] = []
        """key, `when`, `until`, in the order of setting"""

    def order(self) -> list[tuple[int, str]]:
        return sorted(((min(when, until), key) for key, when, until in self.model), key=lambda one: one[0])

    @rule(key=KEYS, when=TIMES, until=TIMES)
    def set(self, key: str, when: int, until: int) -> None:
        self.timers.set(key, when, until)
        self.cancelled(key)
        if min(when, until) < FOREVER:
            self.model.append((key, when, until))

    @rule(key=KEYS)
    def cancel(self, key: str) -> None:
        self.timers.cancel(key)
        self.cancelled(key)

    def cancelled(self, key: str) -> None:
        self.model = [one for one in self.model if one[0] != key]

    @rule(by=st.integers(-40, 40))
    def shift(self, by: int) -> None:
        self.timers.shift(by)
        self.model = [(key, when if when == FOREVER else when + by, until) for key, when, until in self.model]

    @rule(now=st.integers(-40, 90))
    def due(self, now: int) -> None:
        expected = [key for due, key in self.order() if due <= now]
        assert list(self.timers.due(now)) == expected
        for key in expected:
            self.cancelled(key)

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        due, key = self.order()[0]
        assert self.timers.pop(due - 1) is None
        assert self.timers.pop(due) == key
        self.cancelled(key)

    @invariant()
    def same(self) -> None:
        order = self.order()
        assert self.timers.next_wake() == (order[0][0] if order else None)
        assert sorted(self.timers) == sorted(key for _, key in order)
        assert {key: self.timers.get(key) for key in self.timers} == {key: due for due, key in order}


TestAgainstModel = AgainstModel.TestCase


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1_000)), max_size=2_000))
def test_the_heap_is_bounded_whatever_is_set(settings: list[tuple[int, int]]) -> None:
    timers, most = Timers[int](), 0
    for key, when in settings:
        if when % 3:
            timers.set(key, when)
        else:
            timers.cancel(key)
        most = max(most, len(timers))
        assert len(timers._heap) <= 2 * most + SPARE


def test_no_other_module_keeps_a_heap_of_its_own() -> None:
    root = Path(duly.__file__).parent
    with_heaps = {
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if "heapq" in path.read_text("utf-8")
    }
    assert with_heaps == {"core/timers.py"}
