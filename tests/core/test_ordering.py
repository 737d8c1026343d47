"""Lanes, as a specification: what is let go when, and what is superseded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duly.core import ordering, sender_gaps
from duly.core.flow_control import FlowWindow
from duly.core.high_water import mark_name
from duly.core.lane import Move, Release, Supersede
from duly.core.messages import Message, Mode, Order
from duly.core.ordering import LanePolicy, Lanes
from duly.core.units import HOUR, MS, SECOND
from duly.errors import Malformed

T = 1_700_000_000 * SECOND


def message(n: int | None, *, mode: Mode = Mode.REPLAY, made: int | None = None, **more: Any) -> Message:
    fields = {"scope": "app", "recipient": "lamp", "key": "", "after": None} | more
    at = T // MS + (n or 0) if made is None else made
    order = Order(fields["key"], mode, n, fields["after"])
    return Message(fields["scope"], f"{at}_{n or 0}", "k", fields["recipient"], order=order)


def numbers(moves: list[Move]) -> tuple[list[int | None], list[int | None]]:
    """(released, superseded)"""
    released = [m.message.order.n for m in moves if isinstance(m, Release) and m.message.order]
    superseded = [m.message.order.n for m in moves if isinstance(m, Supersede) and m.message.order]
    return released, superseded


def test_what_follows_on_is_let_go_at_once() -> None:
    lanes = Lanes()
    assert [numbers(lanes.offer(message(n), T))[0] for n in range(4)] == [[0], [1], [2], [3]]
    assert lanes.next_wake() is None


def test_a_gap_waits_and_closes_in_order() -> None:
    lanes = Lanes()
    lanes.offer(message(0), T)
    assert lanes.offer(message(2), T) == []
    assert lanes.offer(message(3), T) == []
    assert numbers(lanes.offer(message(1), T + 10))[0] == [1, 2, 3]
    assert (lanes.next_wake(), lanes.waiting) == (None, 0)


def test_a_gap_waits_no_longer_than_the_window_and_then_the_missing_one_is_late() -> None:
    lanes = Lanes()
    lanes.offer(message(0), T)
    lanes.offer(message(2), T)
    assert lanes.next_wake() == T + 300 * MS
    assert lanes.wake(T + 299 * MS) == []
    assert numbers(lanes.wake(T + 300 * MS))[0] == [2]
    assert numbers(lanes.offer(message(1), T + 301 * MS)) == ([], [1])


@pytest.mark.parametrize("gated", [True, False])
def test_what_ends_while_it_waits_for_a_gap_waits_no_longer_and_its_number_has_arrived(gated: bool) -> None:
    """It would be queued when the gap is given up, and stay there until its recipient comes back."""
    lanes = Lanes(LanePolicy(gated=gated, ahead=FlowWindow() if gated else None))
    lanes.reach("lamp")
    lanes.offer(message(0), T)
    lanes.offer(message(2), T)
    lanes.offer(message(3), T)
    assert lanes.finished(message(2), T, counts=False) == []
    assert lanes.waiting == 1
    assert numbers(lanes.offer(message(1), T + 10))[0] == [1, 3]
    assert (lanes.next_wake(), lanes.waiting) == (None, 0)


def test_what_ends_while_it_waits_to_be_sorted_by_its_time_waits_no_longer() -> None:
    lanes = Lanes()
    timed = message(None, key="power")
    assert lanes.offer(timed, T) == []
    assert lanes.finished(timed, T, counts=False) == []
    assert lanes.wake(T + SECOND) == []
    assert lanes.waiting == 0


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))))
def test_the_24_orders_of_off_on_off_on_show_every_state_in_order(arrival: tuple[int, ...]) -> None:
    lanes = Lanes()
    shown = [n for i, k in enumerate(arrival) for n in numbers(lanes.offer(message(k), T + i * 10 * MS))[0]]
    assert shown == [0, 1, 2, 3]


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))))
def test_the_24_orders_end_in_the_right_state_where_the_latest_counts(arrival: tuple[int, ...]) -> None:
    lanes = Lanes()
    moves = [
        m for i, k in enumerate(arrival) for m in lanes.offer(message(k, mode=Mode.LATEST), T + i * 10 * MS)
    ]
    released, superseded = numbers(moves)
    assert released[-1] == 3
    assert released == sorted(released, key=lambda n: n or 0)
    assert {*released, *superseded} == {0, 1, 2, 3}
    assert len(released + superseded) == 4


def test_numbers_that_went_to_other_lanes_leave_no_gap() -> None:
    lanes = Lanes()
    lanes.offer(message(0), T)
    lanes.offer(message(1, recipient="lock"), T)
    lanes.offer(message(2, key="level"), T)
    assert numbers(lanes.offer(message(3), T))[0] == [3]


def test_a_refused_number_leaves_no_gap() -> None:
    lanes = Lanes()
    lanes.offer(message(0), T)
    assert lanes.offer(message(2), T) == []
    assert numbers(lanes.arrived("app", 1, T, T))[0] == [2]


def test_senders_do_not_wait_for_each_other() -> None:
    lanes = Lanes()
    lanes.offer(message(5, scope="a"), T)
    assert numbers(lanes.offer(message(0, scope="b"), T))[0] == [0]


def test_a_first_message_with_a_high_number_waits_once_since_others_may_come() -> None:
    lanes = Lanes()
    assert lanes.offer(message(7), T) == []
    assert numbers(lanes.wake(T + 300 * MS))[0] == [7]
    assert numbers(lanes.offer(message(8), T + 301 * MS))[0] == [8]


def test_a_sender_that_counts_anew_is_heard() -> None:
    lanes = Lanes()
    for n in range(500, 503):
        lanes.offer(message(n), T)
    lanes.wake(T + SECOND)
    anew = message(0, made=T // MS + 10_000)
    assert numbers(lanes.offer(anew, T + 10 * SECOND))[0] == [0]
    assert numbers(lanes.offer(message(1, made=T // MS + 10_001), T + 10 * SECOND))[0] == [1]


def test_a_late_message_does_not_pass_for_one_that_counts_anew() -> None:
    lanes = Lanes()
    for n in (0, 1, 3):
        lanes.offer(message(n), T)
    lanes.wake(T + SECOND)
    assert numbers(lanes.offer(message(2), T + 2 * SECOND)) == ([], [2])


def test_the_hub_says_what_went_before_so_the_receiver_need_not_wait_for_what_went_elsewhere() -> None:
    hub, device = Lanes(), Lanes()
    hub.offer(message(0, recipient="lock"), T)
    for n in (1, 2, 5):
        hub.offer(message(n, recipient="lock" if n == 2 else "lamp"), T)
    (release,) = hub.wake(T + SECOND)
    assert isinstance(release, Release)
    assert release.after == 1
    device.offer(message(1, after=-1), T)
    assert numbers(device.offer(message(5, after=1), T))[0] == [5]


def test_the_receiver_waits_for_what_the_hub_says_went_before() -> None:
    device = Lanes()
    device.offer(message(1, after=-1), T)
    assert device.offer(message(9, after=5), T) == []
    assert numbers(device.offer(message(5, after=1), T + MS))[0] == [5, 9]


def test_without_a_counter_replay_sorts_within_the_window() -> None:
    lanes = Lanes()
    for made in (30, 10, 20):
        assert lanes.offer(message(None, made=T // MS + made), T + 50 * MS) == []
    moves = lanes.wake(T + SECOND)
    assert [m.message.made - T for m in moves] == [10 * MS, 20 * MS, 30 * MS]


def test_without_a_counter_the_latest_runs_at_once_and_an_older_one_is_superseded() -> None:
    lanes = Lanes()
    assert len(lanes.offer(message(None, mode=Mode.LATEST, made=T // MS + 30), T + 50 * MS)) == 1
    (move,) = lanes.offer(message(None, mode=Mode.LATEST, made=T // MS + 20), T + 60 * MS)
    assert isinstance(move, Supersede)


def test_without_a_counter_two_of_the_same_millisecond_both_run() -> None:
    lanes = Lanes()
    first = Message("app", "a", "k", "lamp", time=T, order=Order("power", Mode.LATEST))
    second = Message("app", "b", "k", "lamp", time=T, order=Order("power", Mode.LATEST))
    assert isinstance(lanes.offer(first, T)[0], Release)
    assert isinstance(lanes.offer(second, T)[0], Release)


def test_a_clock_an_hour_fast_locks_its_lane_for_the_drift_at_most() -> None:
    lanes = Lanes(LanePolicy(drift=2 * SECOND))

    def stamped(id_: str, at: int) -> Message:
        return Message("app", id_, "k", "lamp", time=at, order=Order("power", Mode.LATEST))

    lanes.offer(stamped("fast", T + HOUR), T)
    assert isinstance(lanes.offer(stamped("right", T + 3 * SECOND), T + 3 * SECOND)[0], Release)


def test_a_serial_lane_runs_one_at_a_time_and_other_lanes_beside_it() -> None:
    lanes = Lanes(LanePolicy(serial=True))
    first, second = message(0), message(1)
    assert len(lanes.offer(first, T)) == 1
    assert lanes.offer(second, T) == []
    assert len(lanes.offer(message(2, key="level"), T)) == 1
    assert numbers(lanes.finished(first))[0] == [1]
    assert lanes.finished(first) == [], "the lane is the second one's now"
    assert lanes.finished(second) == []


def test_a_busy_serial_lane_keeps_only_the_latest_of_those_that_wait() -> None:
    lanes = Lanes(LanePolicy(serial=True))
    first = message(0, mode=Mode.LATEST)
    lanes.offer(first, T)
    assert lanes.offer(message(1, mode=Mode.LATEST), T) == []
    assert lanes.offer(message(2, mode=Mode.LATEST), T) == [], "while the newer one only waits, so does it"
    assert numbers(lanes.finished(first)) == ([2], [1])


def test_marks_survive_a_restart() -> None:
    old = message(4)
    lanes = Lanes(marks={mark_name(old): (4, T // MS + 4), "ids": (9, 9)})
    assert numbers(lanes.offer(message(3), T)) == ([], [3])
    assert numbers(lanes.offer(message(5), T))[0] == [5]


def test_setting_the_clock_does_not_stretch_the_window() -> None:
    lanes = Lanes()
    lanes.offer(message(2), T)
    lanes.shift(-HOUR)
    assert lanes.next_wake() == T - HOUR + 300 * MS


def test_a_message_that_wants_no_order_runs_at_once_and_its_number_leaves_no_gap() -> None:
    lanes = Lanes()
    lanes.offer(message(0), T)
    assert lanes.offer(message(2), T) == []
    moves = lanes.offer(message(1, mode=Mode.ANY), T)
    assert numbers(moves)[0] == [1, 2]
    assert numbers(lanes.offer(message(9, mode=Mode.ANY), T))[0] == [9]


@pytest.mark.parametrize(
    "bad", [{"window": -1}, {"drift": -1}, {"width": 0}, {"serial": True, "ahead": FlowWindow()}]
)
def test_a_nonsensical_policy_cannot_be_made(bad: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        LanePolicy(**bad)


# ── several hubs ─────────────────────────────────────────────────────────────────────────────────


def left(lanes: Lanes, n: int, at: int = T, **more: Any) -> Message:
    """What becomes of a message that is left to another hub."""
    return lanes.leave(message(n, **more), at)[0]


def after(m: Message) -> int | None:
    assert m.order is not None
    return m.order.after


def test_what_is_left_to_another_hub_says_what_it_comes_after() -> None:
    lanes = Lanes()
    assert after(left(lanes, 0)) == -1
    assert after(left(lanes, 1, recipient="lock")) == -1
    assert after(left(lanes, 2)) == 0
    assert after(left(lanes, 3, key="level")) == -1
    assert after(left(lanes, 4)) == 2


def test_what_is_left_to_another_hub_is_no_gap_here() -> None:
    lanes = Lanes()
    left(lanes, 0)
    assert numbers(lanes.offer(message(1, recipient="lock"), T))[0] == [1]


def test_behind_a_gap_what_comes_before_is_not_known_until_the_gap_is_given_up() -> None:
    lanes = Lanes()
    left(lanes, 0)
    assert after(left(lanes, 2)) is None
    assert after(left(lanes, 3)) is None
    assert lanes.next_wake() == T + 300 * MS
    lanes.wake(T + 300 * MS)
    assert lanes.next_wake() is None
    assert after(left(lanes, 4, T + 301 * MS)) == 3
    assert after(left(lanes, 1, T + 302 * MS)) is None, "it is late"


def test_a_sender_that_counts_anew_does_not_come_after_what_it_sent_before() -> None:
    lanes = Lanes()
    for n in range(3):
        left(lanes, n)
    again = left(lanes, 0, made=T // MS + 1_000)
    assert after(again) is None
    assert after(left(lanes, 1, made=T // MS + 1_001)) == 0


def test_the_home_lets_go_what_says_what_it_comes_after() -> None:
    remote, home = Lanes(), Lanes()
    moved = []
    for n in range(6):
        m = left(remote, n, recipient="lamp" if n % 2 else "lock")
        if n % 2:
            moved += home.offer(m, T) + home.catch_up(m)
    assert numbers(moved)[0] == [1, 3, 5]
    assert home.next_wake() is None


def test_a_sender_that_moves_to_the_home_itself_need_not_wait() -> None:
    remote, home = Lanes(), Lanes()
    for n in range(3):
        m = left(remote, n)
        home.offer(m, T)
        home.catch_up(m)
    assert numbers(home.offer(message(3), T))[0] == [3]
    m = left(remote, 4)  # and back: what went to the home is a gap there
    assert after(m) is None
    assert numbers(home.offer(m, T) + home.catch_up(m))[0] == [4]


def test_what_waits_at_home_goes_when_what_it_waited_for_came_through_another_hub() -> None:
    remote, home = Lanes(), Lanes()
    assert home.offer(message(1), T) == []
    m = left(remote, 0)
    assert numbers(home.offer(m, T) + home.catch_up(m))[0] == [0, 1]


def test_lanes_that_come_home_are_learned() -> None:
    lanes = Lanes()
    lanes.learn({mark_name(message(0)): (4, T // MS + 4)})
    assert numbers(lanes.offer(message(3), T)) == ([], [3])
    assert numbers(lanes.offer(message(5), T))[0] == [5]


def test_lanes_that_are_forgotten_take_what_comes_again() -> None:
    lanes = Lanes(LanePolicy(gated=True))
    lanes.reach("lamp")
    lanes.offer(message(0), T)
    lanes.offer(message(2), T)  # waits for a gap
    lanes.lose("lamp")
    lanes.offer(message(1), T)  # both wait for the lamp
    lanes.forget("lamp")
    assert lanes.waiting == 0
    lanes.learn({mark_name(message(0)): (0, T // MS)})
    for n in (1, 2):
        assert lanes.offer(message(n), T) == []
    assert numbers(lanes.reach("lamp"))[0] == [1, 2]


def test_a_late_one_says_for_which_mark() -> None:
    lanes = Lanes()
    lanes.offer(message(0), T)
    lanes.offer(message(1), T)
    (late,) = lanes.offer(message(0), T)
    assert isinstance(late, Supersede)
    assert (late.mark, late.n) == (mark_name(message(0)), 0)


def test_what_has_no_number_is_left_to_another_hub_as_it_is() -> None:
    lanes = Lanes()
    plain = Message("app", "order-7", "k", "lamp")
    assert lanes.leave(plain, T) == (plain, [])
    told = message(3, after=2)
    assert lanes.leave(told, T) == (told, [])
    assert lanes.without(plain) is None


def test_what_waits_for_a_gap_is_forgotten_with_its_recipient_and_what_is_for_others_stays() -> None:
    lanes = Lanes(LanePolicy(gated=True))
    for recipient in ("lamp", "lock"):
        lanes.reach(recipient)
    lanes.offer(message(2), T)
    lanes.offer(message(3, after=1, recipient="lamp", key="level"), T)
    lanes.offer(message(5, recipient="lock"), T)
    lanes.forget("lamp")
    assert lanes.waiting == 1
    assert numbers(lanes.wake(T + 300 * MS))[0] == [5]


def test_the_gap_of_a_lane_that_was_forgotten_is_waited_for_no_longer() -> None:
    lanes = Lanes(LanePolicy(gated=True))
    lanes.reach("lamp")
    lanes.offer(message(1, after=-1), T)
    assert lanes.offer(message(5, after=4), T) == []
    lanes.forget("lamp")
    assert lanes.wake(T + 300 * MS) == []
    assert lanes.next_wake() is None


def test_what_came_through_another_hub_frees_what_waits_in_its_own_lane() -> None:
    home = Lanes()
    assert home.offer(message(4, after=2), T) == []
    home.offer(message(1, after=-1), T)
    told = message(2, after=1)
    assert numbers(home.offer(told, T) + home.catch_up(told))[0] == [2, 4]


def test_numbers_far_ahead_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_gaps, "AHEAD_KEPT", 3)
    lanes = Lanes()
    lanes.offer(message(0), T)
    for n in range(5, 9):
        lanes.arrived("app", n, T, T)
    assert numbers(lanes.offer(message(9), T))[0] == [9], "the gap before them is given up"


def test_senders_that_fell_silent_are_forgotten_and_those_with_a_gap_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (sender_gaps, ordering):
        monkeypatch.setattr(module, "CHAINS_KEPT", 2)
    lanes = Lanes()
    lanes.offer(message(2, scope="waits"), T)
    for n in range(5):
        lanes.offer(message(0, scope=f"app{n}"), T)
        left(lanes, 1, scope=f"app{n}", recipient="lock")
    assert len(lanes._chains) <= 3
    assert len(lanes._passed) <= 2
    assert numbers(lanes.wake(T + 300 * MS))[0] == [2]


def test_senders_that_all_wait_for_a_gap_are_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sender_gaps, ordering):
        monkeypatch.setattr(module, "CHAINS_KEPT", 1)
    lanes = Lanes()
    for n in range(3):
        lanes.offer(message(2, scope=f"app{n}"), T)
    assert numbers(lanes.wake(T + 300 * MS))[0] == [2, 2, 2]


def test_a_sender_that_has_only_time_is_sorted_in_each_of_its_lanes() -> None:
    lanes = Lanes()
    for n, key in enumerate(("power", "level", "power")):
        assert lanes.offer(message(0, key=key, made=T // MS + 10 * n), T + n * MS) == []
    released = [move.message.order for move in lanes.wake(T + 300 * MS) + lanes.wake(T + 302 * MS)]
    assert [order.key for order in released if order] == ["power", "level", "power"]


def test_a_recipient_has_room_unless_its_window_is_full() -> None:
    assert Lanes().has_room("lamp")
    lanes = Lanes(LanePolicy(ahead=FlowWindow(frames=1)))
    assert lanes.has_room("lamp")
    lanes.offer(message(0), T)
    assert not lanes.has_room("lamp")


class AnyArrival(RuleBasedStateMachine):
    """Whatever comes, however late: released numbers rise, each moves once, nothing waits for ever."""

    @initialize(mode=st.sampled_from([Mode.REPLAY, Mode.LATEST]), serial=st.booleans())
    def begin(self, mode: Mode, serial: bool) -> None:
        self.mode, self.serial = mode, serial
        self.lanes = Lanes(LanePolicy(serial=serial))
        self.now, self.next = T, 0
        self.sent: dict[int, Message] = {}
        self.offered: set[int] = set()
        self.released: list[int] = []
        self.moved: list[int] = []
        self.running: Message | None = None

    def take(self, moves: list[Move]) -> None:
        for move in moves:
            order = move.message.order
            assert order is not None
            n = order.n
            assert n is not None
            self.moved.append(n)
            if isinstance(move, Release):
                assert not self.serial or self.running is None
                self.running = move.message if self.serial else None
                self.released.append(n)

    @rule(count=st.integers(1, 4))
    def send(self, count: int) -> None:
        for _ in range(count):
            self.sent[self.next] = message(self.next, mode=self.mode)
            self.next += 1

    @rule(pick=st.randoms(use_true_random=False), lost=st.integers(0, 9))
    def arrive(self, pick: Any, lost: int) -> None:
        waiting = sorted(set(self.sent) - self.offered)
        if waiting:
            n = pick.choice(waiting)
            self.offered.add(n)
            if lost == 0:
                self.moved.append(n)  # refused remote
                self.take(self.lanes.arrived("app", n, self.sent[n].made, self.now))
            else:
                self.take(self.lanes.offer(self.sent[n], self.now))

    @rule(by=st.integers(0, 400))
    def pass_time(self, by: int) -> None:
        self.now += by * MS
        wake = self.lanes.next_wake()
        if wake is not None and wake <= self.now:
            self.take(self.lanes.wake(self.now))

    @rule()
    def finish(self) -> None:
        if self.running is not None:
            message, self.running = self.running, None
            self.take(self.lanes.finished(message))

    @invariant()
    def order_is_kept(self) -> None:
        if hasattr(self, "released"):
            assert self.released == sorted(self.released)
            assert len(self.moved) == len(set(self.moved))

    @invariant()
    def a_wait_has_an_end(self) -> None:
        if hasattr(self, "lanes"):
            wake = self.lanes.next_wake()
            assert wake is None or wake <= self.now + 300 * MS

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        self.now += SECOND
        self.take(self.lanes.wake(self.now))
        while self.running is not None:
            self.finish()
        assert set(self.moved) == self.offered
        assert self.lanes.waiting == 0


TestAnyArrival = AnyArrival.TestCase
TestAnyArrival.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def unordered(n: int) -> Message:
    return Message("app", f"{T // MS}_{n}", "k", "lamp")


def test_only_so_many_without_order_are_under_way_and_the_next_starts_when_one_is_through() -> None:
    lanes = Lanes(LanePolicy(serial=True, width=2))
    assert [len(lanes.offer(unordered(n), T)) for n in range(4)] == [1, 1, 0, 0]
    (third,) = lanes.finished(unordered(1))
    assert third.message == unordered(2)
    assert lanes.finished(unordered(1)) == []
    (fourth,) = lanes.finished(unordered(0))
    assert fourth.message == unordered(3)
    assert lanes.finished(unordered(2)) == []
    assert lanes.finished(unordered(3)) == []
    assert len(lanes.offer(unordered(4), T)) == 1


def test_what_was_under_way_before_a_restart_counts() -> None:
    lanes = Lanes(LanePolicy(width=1))
    lanes.occupy(unordered(0))
    assert lanes.offer(unordered(1), T) == []
    assert len(lanes.finished(unordered(0))) == 1


def test_a_lane_is_at_least_one_wide() -> None:
    with pytest.raises(Malformed, match="width"):
        LanePolicy(width=0)


def test_without_a_counter_those_of_one_millisecond_that_wait_together_all_run_in_order_of_arrival() -> None:
    lanes = Lanes()
    same = [Message("app", f"id-{n}", "k", "lamp", time=T, order=Order("power")) for n in range(4)]
    for each in same:
        assert lanes.offer(each, T) == []
    moves = lanes.wake(T + 300 * MS)
    assert [move.message for move in moves] == same
    assert all(isinstance(move, Release) for move in moves)


def test_a_message_of_another_hub_lets_go_what_waits_in_its_lane_for_what_was_released_here() -> None:
    lanes = Lanes()
    assert numbers(lanes.offer(message(0, after=-1), T))[0] == [0]
    assert lanes.offer(message(4, after=2), T) == [], "it comes after the number 2, which is not known here"
    lanes.learn({mark_name(message(2)): (2, T // MS + 2)})
    assert numbers(lanes.catch_up(message(3, after=2)))[0] == [4]


def test_a_time_that_a_wrong_clock_has_set_is_taken_back_here_too() -> None:
    ahead, right = message(1, made=T // MS + HOUR // MS), message(0, made=T // MS)
    lanes = Lanes()
    lanes.offer(ahead, T)
    lanes.wake(T + SECOND)
    assert numbers(lanes.offer(right, T + SECOND)) == ([], [0]), "by its number and by its time it is late"
    lanes.lower(T // MS - 1)
    again = message(0, made=T // MS + 5)
    assert numbers(lanes.offer(again, T + SECOND))[0] == [0], "now it is a sender that counts anew"
