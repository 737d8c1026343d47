"""What supersedes what, judged by a model that remembers everything: see `duly.core.ordering`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duly.core.inbox import Inbox
from duly.core.lane import Move, Release, Supersede
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order
from duly.core.ordering import LanePolicy, Lanes
from duly.core.outbox import OutboxPolicy
from duly.core.retry import COMMAND
from duly.core.steps import Answered, Arrived, Reachable, ReportOutcome, Transmit
from duly.core.units import MS, SECOND
from duly.storage.memory import Disk
from duly.testing import ManualClock
from tests.core.driving import Driver, only

T = 1_700_000_000 * SECOND


def message(n: int, mode: Mode = Mode.REPLAY, expires: int = 0) -> Message:
    order = Order("", mode, n)
    return Message("app", f"{T // MS + n}_{n}", "k", "lock", expires=expires, order=order)


def hub(clock: ManualClock | None = None, disk: Disk | None = None) -> Driver:
    policy = OutboxPolicy("device", COMMAND, patience=10 * SECOND)
    inbox = Inbox(policy, "hub", lanes=LanePolicy(gated=True))
    return Driver(inbox, clock or ManualClock(T), disk)


def ended(m: Message, state: State, code: int = 0) -> Answered:
    return Answered(m.key, state, Answer(code))


def sent(effects: list[Any]) -> list[str]:
    return [transmit.message.id.partition("_")[2] for transmit in only(Transmit, effects)]


def test_a_late_one_goes_before_a_later_one_that_only_waits() -> None:
    gateway = hub()
    gateway.give(Arrived(message(0)))
    gateway.give(Arrived(message(2)))
    gateway.wait(0.3)  # 1 is given up; 0 and 2 wait for the lock
    assert only(ReportOutcome, gateway.give(Arrived(message(1)))) == []
    assert sent(gateway.give(Reachable("lock"))) == ["0", "1", "2"]


def test_a_late_one_goes_if_the_later_one_has_failed() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(message(0)))
    gateway.give(ended(message(0), State.DONE))
    gateway.give(Arrived(message(2)))
    assert sent(gateway.wait(0.3)) == ["2"]
    gateway.give(ended(message(2), State.FAILED, 3))
    assert sent(gateway.give(Arrived(message(1)))) == ["1"]
    gateway.give(ended(message(1), State.DONE))
    assert sent(gateway.give(Arrived(message(3)))) == ["3"]


def test_that_also_holds_after_a_restart() -> None:
    first = hub()
    first.give(Reachable("lock"))
    first.give(Arrived(message(0)))
    first.give(ended(message(0), State.DONE))
    first.give(Arrived(message(2)))
    first.wait(0.3)
    first.give(ended(message(2), State.FAILED, 3))
    second = hub(disk=first.ledger.disk, clock=first.clock)
    second.give(Reachable("lock"))
    assert sent(second.give(Arrived(message(1)))) == ["1"]


def test_a_late_one_is_superseded_by_what_is_under_way_done_or_unknown() -> None:
    for end in (None, State.DONE, State.UNKNOWN):
        gateway = hub()
        gateway.give(Reachable("lock"))
        gateway.give(Arrived(message(0)))
        gateway.give(Arrived(message(2)))
        gateway.wait(0.3)
        if end is not None:
            gateway.give(ended(message(2), end))
        (report,) = only(ReportOutcome, gateway.give(Arrived(message(1))))
        assert report.state is State.SUPERSEDED


def test_where_only_the_latest_counts_one_that_expires_supersedes_nothing() -> None:
    gateway = hub()
    gateway.give(Arrived(message(0, Mode.LATEST)))
    gateway.give(Arrived(message(1, Mode.LATEST, gateway.clock.now() + 5 * SECOND)))
    assert [r.state for r in only(ReportOutcome, gateway.wait(6))] == [State.EXPIRED]
    assert sent(gateway.give(Reachable("lock"))) == ["0"]


def test_nor_does_one_that_expires_at_the_moment_its_recipient_comes() -> None:
    gateway = hub()
    gateway.give(Arrived(message(0, Mode.LATEST)))
    gateway.give(Arrived(message(1, Mode.LATEST, gateway.clock.now() + 5 * SECOND)))
    gateway.clock.advance(6)
    assert sent(gateway.give(Reachable("lock"))) == ["0"]


class Anything(RuleBasedStateMachine):
    """Messages of one sender come in any order, the recipient comes and goes, and what it is handed is done,
    fails, or ends as unknown."""

    @initialize(mode=st.sampled_from([Mode.REPLAY, Mode.LATEST]))
    def begin(self, mode: Mode) -> None:
        self.mode = mode
        self.lanes = Lanes(LanePolicy(gated=True))
        self.now, self.next = T, 0
        self.waiting: set[int] = set()
        self.running: dict[int, Message] = {}
        self.counted: set[int] = set()
        self.moved: set[int] = set()
        self.offered: set[int] = set()

    def take(self, moves: list[Move]) -> None:
        for at, move in enumerate(moves):
            assert move.message.order is not None
            n = move.message.order.n
            assert n is not None
            assert n not in self.moved
            self.moved.add(n)
            if isinstance(move, Release):
                assert all(n > other for other in self.counted | set(self.running)), "in order"
                self.running[n] = move.message
            else:
                assert isinstance(move, Supersede)
                after = [m.message.order.n for m in moves[at:] if isinstance(m, Release) and m.message.order]
                later = {other for other in (*self.counted, *self.running, *after) if other and other > n}
                assert later, f"{n} is superseded by nothing that was handed over and counts"

    @rule(n=st.integers(0, 12))
    def arrive(self, n: int) -> None:
        if n not in self.offered:
            self.offered.add(n)
            self.take(self.lanes.offer(message(n, self.mode), self.now))

    @rule()
    def come(self) -> None:
        self.take(self.lanes.reach("lock", self.now))

    @rule()
    def go(self) -> None:
        self.lanes.lose("lock")

    @rule(pick=st.randoms(use_true_random=False), counts=st.booleans())
    def end(self, pick: Any, counts: bool) -> None:
        if self.running:
            n = pick.choice(sorted(self.running))
            ended = self.running.pop(n)
            if counts:
                self.counted.add(n)
            self.take(self.lanes.finished(ended, self.now, counts=counts))

    @rule(by=st.integers(0, 400))
    def pass_time(self, by: int) -> None:
        self.now += by * MS
        self.take(self.lanes.wake(self.now))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "lanes"):
            assert self.lanes.waiting == len(self.offered - self.moved)

    def teardown(self) -> None:
        if hasattr(self, "lanes"):
            self.now += SECOND
            self.take(self.lanes.wake(self.now))
            self.take(self.lanes.reach("lock", self.now))
            assert self.moved == self.offered


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_repeat_of_what_failed_does_not_count_either() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(message(0)))
    gateway.give(ended(message(0), State.DONE))
    gateway.give(Arrived(message(2)))
    gateway.wait(0.3)
    gateway.give(ended(message(2), State.FAILED, 3))
    gateway.give(Arrived(message(2)))
    assert sent(gateway.give(Arrived(message(1)))) == ["1"]
