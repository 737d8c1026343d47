"""Windows: what is on its way to a recipient is bounded, and an acknowledgement makes room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.flow_control import PAGE_BYTES, FlowWindow, Outstanding, next_page
from duly.core.lane import Release, Supersede
from duly.core.messages import Message, Mode, Order
from duly.core.ordering import LanePolicy, Lanes
from duly.errors import Malformed


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 100)), max_size=100))
def test_it_counts_what_was_taken_and_not_released(steps: list[tuple[bool, int, int]]) -> None:
    outstanding, held = Outstanding(FlowWindow(frames=5, bytes=200)), dict[bytes, int]()
    for take, n, size in steps:
        key = b"%d" % n
        if take:
            outstanding.take("lock", key, size)
            held.setdefault(key, size)
        else:
            assert outstanding.release("lock", key) is (held.pop(key, None) is not None)
        assert len(outstanding) == len(held)
        assert outstanding.has_room("lock") is (len(held) < 5 and sum(held.values()) < 200)
        assert outstanding.has_room("lamp")


def test_a_message_larger_than_the_window_still_goes() -> None:
    outstanding = Outstanding(FlowWindow(frames=5, bytes=10))
    assert outstanding.has_room("lock")
    outstanding.take("lock", b"large", 1_000)
    assert not outstanding.has_room("lock")


@given(st.integers(1, 500), st.integers(0, 10**9), st.integers(1, 500))
def test_a_page_is_small_where_entries_are_large(read: int, size: int, most: int) -> None:
    count = next_page(read, size, most)
    assert 1 <= count <= most
    assert count == 1 or count * (size / read) <= PAGE_BYTES * 1.01


# ── lanes ────────────────────────────────────────────────────────────────────────────────────────


def command(n: int, key: str = "", mode: Mode = Mode.REPLAY, scope: str = "phone") -> Message:
    return Message(scope, f"{1_700_000_000_000 + n}_{n}", "lock_control", "lock", order=Order(key, mode, n))


def lanes(frames: int) -> Lanes:
    it = Lanes(LanePolicy(gated=True, ahead=FlowWindow(frames=frames)))
    it.reach("lock")
    return it


def released(moves: list[Release | Supersede]) -> list[Message]:
    return [move.message for move in moves if isinstance(move, Release)]


def test_what_does_not_fit_waits_and_follows_in_order() -> None:
    it = lanes(2)
    sent = [command(n) for n in range(6)]
    assert [released(it.offer(one, 0)) for one in sent] == [[sent[0]], [sent[1]], [], [], [], []]
    assert released(it.finished(sent[1])) == [sent[2]]
    assert released(it.acknowledged(sent[0])) == [sent[3]], "a receipt makes room as an end does"
    assert released(it.finished(sent[0])) == [], "and its end no more"
    assert it.waiting == 2


def test_lanes_that_wait_take_turns() -> None:
    it = lanes(1)
    flood = [command(n) for n in range(5)]
    for one in flood:
        it.offer(one, 0)
    other = command(0, "other", Mode.LATEST, scope="tablet")
    assert it.offer(other, 0) == []
    assert released(it.finished(flood[0])) == [flood[1]]
    assert released(it.finished(flood[1])) == [other]
    assert released(it.finished(other)) == [flood[2]]


def test_where_only_the_latest_counts_what_waits_is_superseded() -> None:
    it = lanes(1)
    first, second, third = [command(n, "power", Mode.LATEST) for n in range(3)]
    assert released(it.offer(first, 0)) == [first]
    assert it.offer(second, 0) == []
    assert it.offer(third, 0) == [], "what only waits supersedes nothing"
    moves = it.finished(first)
    assert [(type(move), move.message) for move in moves] == [(Supersede, second), (Release, third)]


def test_what_has_ended_while_it_waited_takes_no_room() -> None:
    it = lanes(1)
    sent = [command(n) for n in range(2_000)]
    for one in sent:
        it.offer(one, 0)
    for one in sent[1:1_999]:
        it.finished(one)  # it expired, or was cancelled
    assert it.waiting < 100
    assert released(it.finished(sent[0])) == [sent[1_999]]


def test_a_lane_in_which_all_have_ended_is_passed_over() -> None:
    it = lanes(1)
    first, ended, other = (
        command(0),
        command(0, "level", Mode.LATEST, scope="tablet"),
        command(0, "power", Mode.LATEST, scope="watch"),
    )
    for one in (first, ended, other):
        it.offer(one, 0)
    it.finished(ended)
    assert released(it.finished(first)) == [other]


def test_what_was_under_way_before_a_restart_counts() -> None:
    it = lanes(2)
    before = [command(n) for n in range(2)]
    for one in before:
        it.occupy(one)
    new = command(2, scope="tablet")
    assert it.offer(new, 0) == []
    it.finished(before[0])


@pytest.mark.parametrize("wrong", [{"frames": 0}, {"bytes": 0}])
def test_a_window_that_lets_nothing_through_cannot_be_made(wrong: dict[str, int]) -> None:
    with pytest.raises(Malformed):
        FlowWindow(**wrong)
