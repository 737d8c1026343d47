"""The receiver's machine: as a specification, then against a naive model that remembers everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duly.core.horizon import Horizon
from duly.core.ids import SeqIds
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Verdict, VerdictKind
from duly.core.ordering import LanePolicy
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    AttemptFailed,
    CancelMessages,
    Effect,
    Ended,
    MachineEvent,
    NumberRefused,
    Reachable,
    Received,
    Reply,
    ReportOutcome,
    TimesLowered,
    Transmit,
    Unreachable,
)
from duly.core.units import FOREVER, HOUR, MINUTE, SECOND
from duly.storage.memory import Disk
from duly.testing import ManualClock
from tests.at_once import at_once
from tests.core.driving import Driver, only

RUN = OutboxPolicy("run", None, RetryPolicy.never(), FOREVER)


def message(n: int = 0, order: Order | None = None, *, body: bytes = b"open", **more: Any) -> Message:
    return Message("app", f"{1_700_000_000_000 + n}_{n}", "lock_control", "lock", body, order=order, **more)


def ordered(n: int, mode: Mode = Mode.REPLAY) -> Message:
    return message(n, Order("", mode, n))


def receiver(
    *, disk: Disk | None = None, clock: ManualClock | None = None, worker: str = "me",
    repeatable: bool = False, keep: int = 24 * HOUR,
) -> Driver:  # fmt: skip
    machine = Inbox(
        RUN, worker, lanes=LanePolicy(serial=True), horizon=lambda kind: Horizon(keep, MINUTE),
        repeatable=lambda message: repeatable,
    )  # fmt: skip
    return Driver(machine, clock or ManualClock(), disk)


def done(message: Message, attempt: int = 1) -> Answered:
    return Answered(message.key, State.DONE, Answer(0, message.body), attempt)


def words(effects: list[Effect]) -> list[str]:
    return [reply.verdict.kind.value for reply in only(Reply, effects)]


def test_a_message_is_stored_then_answered_then_run() -> None:
    inbox = receiver()
    effects = inbox.give(Arrived(message(), "c1"))
    assert [type(effect) for effect in effects] == [Reply, Transmit]
    assert words(effects) == ["fresh"]


def test_its_end_is_told_to_every_sender_that_asked() -> None:
    inbox = receiver()
    inbox.give(Arrived(message(), "c1"))
    (repeat,) = inbox.give(Arrived(message(), "c2"))
    assert isinstance(repeat, Reply)
    assert (repeat.origin, repeat.verdict.kind, repeat.verdict.state) == (
        "c2",
        VerdictKind.DUPLICATE,
        State.SENT,
    )
    assert inbox.give(done(message())) == [
        ReportOutcome(message().key, State.DONE, Answer(0, b"open"), ("c1", "c2"), "lock")
    ]


def test_a_repeat_after_the_end_gets_the_answer_and_runs_nothing() -> None:
    inbox = receiver()
    inbox.give(Arrived(message(), "c1"))
    inbox.give(done(message()))
    (reply,) = inbox.give(Arrived(message(), "c3"))
    assert isinstance(reply, Reply)
    assert (reply.verdict.state, reply.verdict.answer) == (State.DONE, Answer(0, b"open"))


def test_other_content_under_the_same_id_is_a_conflict_while_the_first_runs_and_after() -> None:
    inbox = receiver()
    inbox.give(Arrived(message()))
    assert words(inbox.give(Arrived(message(body=b"close")))) == ["conflict"]
    inbox.give(done(message()))
    assert words(inbox.give(Arrived(message(body=b"close")))) == ["conflict"]


def test_refusals_are_recorded_and_do_not_burn_the_id() -> None:
    inbox = receiver()
    future = message(2 * 60 * 1000)
    assert words(inbox.give(Arrived(future))) == ["refused"]
    assert [r.word for r in inbox.ledger.disk.refusals] == ["future"]
    inbox.clock.advance(120)
    assert words(inbox.give(Arrived(future))) == ["fresh"]


def test_two_repeats_before_the_first_is_stored_hear_only_when_it_is() -> None:
    """Three arrive in one turn: nobody is told anything until the commit."""
    inbox = receiver()
    now = inbox.clock.now()
    first = inbox.machine.handle(Arrived(message(), "c1"), now)
    assert inbox.machine.handle(Arrived(message(), "c2"), now) == []
    inbox.carry_out(first)
    assert [(r.origin, r.verdict.kind.value) for r in only(Reply, inbox.effects)] == [
        ("c1", "fresh"),
        ("c2", "duplicate"),
    ]


@pytest.mark.parametrize("origin", ["c1", None])
def test_each_of_three_copies_in_one_burst_is_answered_and_the_outcome_is_told_once(
    origin: str | None,
) -> None:
    inbox = receiver()
    now = inbox.clock.now()
    first = inbox.machine.handle(Arrived(message(), origin), now)
    for _ in range(2):
        assert inbox.machine.handle(Arrived(message(), origin), now) == []
    inbox.carry_out(first)
    assert [reply.verdict.kind.value for reply in only(Reply, inbox.effects)] == [
        "fresh", "duplicate", "duplicate",
    ]  # fmt: skip
    (outcome,) = only(ReportOutcome, inbox.give(done(message())))
    assert outcome.origins == (origin,)


def test_ordered_messages_run_one_after_the_other() -> None:
    inbox = receiver()
    assert len(only(Transmit, inbox.give(Arrived(ordered(0))))) == 1
    assert only(Transmit, inbox.give(Arrived(ordered(1)))) == []
    assert inbox.state(ordered(1).key) == "accepted"
    assert [t.message for t in only(Transmit, inbox.give(done(ordered(0))))] == [ordered(1)]


def test_a_message_that_waits_for_a_gap_is_stored_and_survives_a_crash() -> None:
    first = receiver()
    assert words(first.give(Arrived(ordered(2)))) == ["fresh"]
    second = receiver(disk=first.ledger.disk, clock=first.clock, worker="next")
    assert only(Transmit, second.effects) == []
    assert [t.message for t in only(Transmit, second.wait(0.3))] == [ordered(2)]


def test_a_late_message_is_superseded_also_after_a_restart() -> None:
    first = receiver()
    first.give(Arrived(ordered(3)))
    first.wait(0.3)
    first.give(done(ordered(3)))
    second = receiver(disk=first.ledger.disk, clock=first.clock, worker="next")
    effects = second.give(Arrived(ordered(1)))
    assert only(Transmit, effects) == []
    assert [r.state for r in only(ReportOutcome, effects)] == [State.SUPERSEDED]
    assert words(second.give(Arrived(ordered(1)))) == ["duplicate"]


def test_of_several_that_wait_only_the_latest_runs_and_the_others_hear_it() -> None:
    inbox = receiver()
    inbox.give(Arrived(ordered(0, Mode.LATEST)))
    inbox.give(Arrived(ordered(1, Mode.LATEST)))
    assert only(ReportOutcome, inbox.give(Arrived(ordered(2, Mode.LATEST)))) == []
    effects = inbox.give(done(ordered(0, Mode.LATEST)))
    assert (ordered(1).key, State.SUPERSEDED) in [(r.key, r.state) for r in only(ReportOutcome, effects)]
    assert [t.message.id for t in only(Transmit, effects)] == [ordered(2).id]


def test_a_message_whose_turn_comes_after_its_expiry_is_not_run() -> None:
    inbox = receiver()
    inbox.give(Arrived(ordered(0)))
    late = message(1, Order("", n=1), expires=inbox.clock.now() + SECOND)
    inbox.give(Arrived(late))
    inbox.clock.advance(2)
    effects = inbox.give(done(ordered(0)))
    assert only(Transmit, effects) == []
    assert only(ReportOutcome, effects)[-1].state is State.EXPIRED


def test_a_handlers_own_writes_commit_with_the_end_or_not_at_all() -> None:
    from duly.core.operations import AppendEntry

    inbox = receiver()
    inbox.give(Arrived(message()))
    written = AppendEntry("log", b"opened", 1)
    late = Answered(message().key, State.DONE, Answer(0), attempt=7, effects=(written,))
    assert inbox.give(late) == []
    assert "log" not in inbox.ledger.disk.streams
    inbox.give(Answered(message().key, State.DONE, Answer(0), attempt=1, effects=(written,)))
    assert len(inbox.ledger.disk.streams["log"]) == 1


def test_a_failure_ends_the_message_and_frees_the_lane() -> None:
    inbox = receiver()
    inbox.give(Arrived(ordered(0)))
    inbox.give(Arrived(ordered(1)))
    effects = inbox.give(AttemptFailed(ordered(0).key, 1, "jammed"))
    assert [r.state for r in only(ReportOutcome, effects)] == [State.FAILED]
    assert [t.message for t in only(Transmit, effects)] == [ordered(1)]


# ── recipients that come and go ──────────────────────────────────────────────────────────────────

HUB = OutboxPolicy("device", RetryPolicy.fixed(3 * SECOND, tries=4), patience=10 * SECOND)


def hub(*, disk: Disk | None = None, clock: ManualClock | None = None, **more: Any) -> Driver:
    return Driver(Inbox(HUB, "hub", lanes=LanePolicy(gated=True), **more), clock or ManualClock(), disk)


def test_what_comes_for_an_unreachable_recipient_is_stored_and_waits() -> None:
    gateway = hub()
    assert words(gateway.give(Arrived(message(0)))) == ["fresh"]
    assert words(gateway.give(Arrived(ordered(1)))) == ["fresh"]
    assert only(Transmit, gateway.wait(100)) == []
    started = only(Transmit, gateway.give(Reachable("lock")))
    assert [t.message.id for t in started] == [message(0).id, ordered(1).id]
    assert only(Transmit, gateway.give(Arrived(message(2))))


def test_messages_without_order_that_had_to_wait_are_all_done() -> None:
    gateway = hub()
    for n in range(3):
        gateway.give(Arrived(message(n)))
    assert len(only(Transmit, gateway.give(Reachable("lock")))) == 3


def test_of_what_waits_for_a_recipient_the_latest_is_handed_over_and_only_then_supersedes() -> None:
    gateway = hub()
    gateway.give(Arrived(ordered(0, Mode.LATEST)))
    assert only(ReportOutcome, gateway.give(Arrived(ordered(1, Mode.LATEST)))) == []
    effects = gateway.give(Reachable("lock"))
    assert [(r.key, r.state) for r in only(ReportOutcome, effects)] == [(ordered(0).key, State.SUPERSEDED)]
    assert [t.message.id for t in only(Transmit, effects)] == [ordered(1).id]


def test_what_waits_for_a_recipient_expires_and_that_is_the_truth() -> None:
    gateway = hub()
    gateway.give(Arrived(message(0, expires=gateway.clock.now() + 30 * SECOND)))
    assert [r.state for r in only(ReportOutcome, gateway.wait(31))] == [State.EXPIRED]
    assert gateway.give(Reachable("lock")) == []


def test_what_waits_for_a_recipient_survives_a_restart() -> None:
    first = hub()
    first.give(Arrived(message(0)))
    second = hub(disk=first.ledger.disk, clock=first.clock)
    assert only(Transmit, second.effects) == []
    assert len(only(Transmit, second.give(Reachable("lock")))) == 1


def test_a_recipient_that_comes_back_gets_what_it_has_not_answered_at_once() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(message(0)))
    gateway.give(Unreachable("lock"))
    (again,) = gateway.give(Reachable("lock"))
    assert again == Transmit(message(0), 1, again=True)


def test_the_application_may_refuse_what_is_new_but_not_a_repeat() -> None:
    offline = Verdict(VerdictKind.REFUSED, reason="the lock is offline; try later", cause="offline")
    away = False
    gateway = hub(refuse=lambda event, now: offline if away else None)
    gateway.give(Arrived(message(0)))
    away = True
    assert words(gateway.give(Arrived(message(1)))) == ["refused"]
    assert words(gateway.give(Arrived(message(0)))) == ["duplicate"]
    away = False
    assert words(gateway.give(Arrived(message(1)))) == ["fresh"], "the id was not burned"


def test_it_says_what_waits_and_what_is_under_way() -> None:
    machine = Inbox(HUB, "hub", lanes=LanePolicy(gated=True))
    gateway, key = Driver(machine, ManualClock()), message().key
    gateway.give(Arrived(message()))
    under_way = machine.outbox.transmissions
    assert (machine.is_live(key), machine.waiting()) == (True, [message()])
    assert (under_way.message(key), under_way.to("lock")) == (None, [])
    gateway.give(Reachable("lock"))
    assert (machine.is_live(key), machine.waiting()) == (True, [])
    assert (under_way.message(key), [one.message for one in under_way.to("lock")]) == (message(), [message()])
    gateway.give(Answered(key, State.DONE, Answer(0)))
    assert (machine.is_live(key), machine.keys, len(under_way)) == (False, [], 0)


def test_a_receipt_is_stored_and_one_for_nothing_is_nothing() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(message()))
    assert gateway.give(Received(message().key)) == []
    assert gateway.state(message().key) == "delivered"
    assert gateway.give(Received(message(1).key)) == []
    assert gateway.give(MachineEvent(None)) == []


def test_what_waits_can_be_cancelled_and_what_has_started_cannot() -> None:
    gateway = hub()
    gateway.give(Arrived(message(0)))
    ends = only(ReportOutcome, gateway.give(CancelMessages((message(0),), "the grant was revoked")))
    assert [(end.state, end.answer.reason) for end in ends] == [(State.CANCELLED, "the grant was revoked")]
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(message(1)))
    assert gateway.give(CancelMessages((message(1),), "the grant was revoked")) == []
    assert gateway.state(message(1).key) == "sent"


def test_what_starts_before_it_was_cancelled_goes_on() -> None:
    gateway = hub()
    gateway.give(Arrived(message(0)))
    start = gateway.machine.handle(Reachable("lock"), gateway.clock.now())
    cancel = gateway.machine.handle(CancelMessages((message(0),), "too late"), gateway.clock.now())
    gateway.carry_out(start + cancel)
    assert only(Transmit, gateway.effects)
    assert only(ReportOutcome, gateway.effects) == []
    assert gateway.state(message(0).key) == "sent"


def test_a_failure_of_what_has_no_order_lowers_no_mark() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(message()))
    (end,) = only(ReportOutcome, gateway.give(Answered(message().key, State.FAILED, Answer(3))))
    assert end.state is State.FAILED
    assert gateway.ledger.disk.marks == {}


def test_what_may_no_longer_be_handed_over_when_its_turn_comes_is_cancelled() -> None:
    gateway = hub(permit=lambda message: "the grant was revoked")
    gateway.give(Arrived(message(0)))
    (end,) = only(ReportOutcome, gateway.give(Reachable("lock")))
    assert (end.state, end.answer.reason) == (State.CANCELLED, "the grant was revoked")


def test_a_gap_that_is_filled_releases_what_waited_behind_it_in_order() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(ordered(0)))
    assert only(Transmit, gateway.give(Arrived(ordered(2)))) == []
    started = only(Transmit, gateway.give(Arrived(ordered(1))))
    assert [one.message.id for one in started] == [ordered(1).id, ordered(2).id]


def test_a_number_that_was_refused_before_is_no_gap() -> None:
    gateway = hub()
    gateway.give(Reachable("lock"))
    gateway.give(Arrived(ordered(0)))
    gateway.give(Arrived(ordered(2)))
    started = only(Transmit, gateway.give(NumberRefused("app", 1, ordered(1).made)))
    assert [one.message.id for one in started] == [ordered(2).id]


def test_the_last_id_of_a_local_sender_is_kept_with_the_message_that_carries_it() -> None:
    gateway = hub(minted="ids")
    gateway.give(Arrived(message(0)))
    gateway.give(Arrived(ordered(7)))
    assert gateway.ledger.disk.marks["ids"] == (7, 1_700_000_000_007)


def test_a_repeat_that_was_judged_while_the_ledger_was_read_anew_gets_the_answer() -> None:
    first = receiver()
    first.give(Arrived(message()))
    first.give(done(message()))
    second = receiver(disk=first.ledger.disk, clock=first.clock)
    judged = second.machine.handle(Arrived(message(), "c1"), second.clock.now())
    second.carry_out(second.machine.restore((), (), second.ledger.disk.marks, second.clock.now()))
    second.carry_out(judged)
    assert words(second.effects) == ["duplicate"]


def test_an_end_that_is_found_when_the_ledger_is_read_anew_is_reported_with_its_recipient() -> None:
    """The commit that stored the end failed as far as the hub could tell, and had happened all the same."""
    inbox = receiver()
    inbox.give(Arrived(message(), "c1"))
    ended = Ended(message().key, State.DONE, Answer())
    (report,) = inbox.machine.restore((), (ended,), inbox.ledger.disk.marks, inbox.clock.now())
    assert report == ReportOutcome(message().key, State.DONE, Answer(), ("c1",), "lock")


class AnyHistory(RuleBasedStateMachine):
    """Send, repeat, reorder, run, crash, forget, set the clock: whatever happens, compared with a model
    that simply remembers everything for ever."""

    @initialize(mode=st.sampled_from([Mode.REPLAY, Mode.LATEST]))
    def begin(self, mode: Mode) -> None:
        self.mode = mode
        self.clock = ManualClock()
        self.disk = Disk()
        self.lives = 0
        self.made: list[Message] = []
        self.arrived: set[bytes] = set()
        self.effects: list[int] = []
        self.answers: dict[bytes, tuple[State, Answer]] = {}
        self.ids = SeqIds()
        self._boot()

    def _boot(self) -> None:
        self.lives += 1
        self.running: dict[bytes, Transmit] = {}
        self.inbox = receiver(disk=self.disk, clock=self.clock, worker=f"w{self.lives}", keep=10 * MINUTE)
        self._look(self.inbox.effects)

    def _look(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Transmit(message=m):
                    order = m.order
                    assert order is not None
                    assert order.n is not None
                    assert order.n not in self.effects, "a second run"
                    self.effects.append(order.n)
                    self.running[m.key] = effect
                case ReportOutcome(key=key, state=state, answer=answer):
                    self._answer(key, state, answer)
                case Reply(message=m, verdict=v) if v.state is not None and v.state.terminal:
                    self._answer(m.key, v.state, v.answer or Answer())
                case Reply(message=m, verdict=v) if v.kind is VerdictKind.FRESH:
                    assert m.key not in self.arrived, "accepted twice"
                    self.arrived.add(m.key)

    def _answer(self, key: bytes, state: State, answer: Answer) -> None:
        before = self.answers.setdefault(key, (state, answer))
        assert before == (state, answer), "two answers for one id"

    @rule()
    def make(self) -> None:
        minted = self.ids.next(self.clock.now())
        order = Order("power", self.mode, minted.n)
        self.made.append(Message("app", str(minted), "k", "lock", b"%d" % minted.n, order=order))

    @precondition(lambda self: self.made)
    @rule(pick=st.randoms(use_true_random=False))
    def deliver(self, pick: Any) -> None:
        self._look(self.inbox.give(Arrived(pick.choice(self.made[-8:]), "c")))

    @precondition(lambda self: self.made)
    @rule(pick=st.randoms(use_true_random=False))
    def replay_an_old_one(self, pick: Any) -> None:
        self._look(self.inbox.give(Arrived(pick.choice(self.made), "attacker")))

    @rule()
    def finish(self) -> None:
        if self.running:
            transmit = self.running.pop(next(iter(self.running)))
            self._look(self.inbox.give(done(transmit.message, transmit.attempt)))

    @rule(seconds=st.sampled_from([0.05, 0.4, 30.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self._look(self.inbox.wait(seconds))

    @rule()
    def crash(self) -> None:
        self._boot()

    @rule()
    def forget(self) -> None:
        at_once(self.inbox.ledger.prune())

    @rule(seconds=st.integers(1, 900))
    def set_the_clock_back(self, seconds: int) -> None:
        self.clock.advance(-seconds)
        self.inbox.machine.shift(-seconds * SECOND)

    @invariant()
    def effects_are_in_order(self) -> None:
        assert getattr(self, "effects", []) == sorted(getattr(self, "effects", []))

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "inbox"):
            open_ = sum(not d.state.terminal for d in self.disk.deliveries.values())
            assert len(self.inbox.machine.keys) <= open_


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


def test_a_message_under_way_is_given_up_if_its_permission_was_revoked() -> None:
    gateway = receiver()
    gateway.give(Arrived(message(0), "c1"))
    (end,) = only(
        ReportOutcome, gateway.give(CancelMessages((message(0),), "the grant was revoked", started=True))
    )
    assert (end.state, gateway.state(message(0).key)) == (State.UNKNOWN, "unknown")
    assert "whether it took effect is not known" in end.answer.reason


def test_a_mark_that_a_wrong_clock_has_raised_is_lowered_in_memory_too() -> None:
    inbox = receiver()
    ahead = 1_700_000_000_000 + HOUR // 1_000
    inbox.give(Arrived(Message("app", f"{ahead}_5", "k", "lock", order=Order("", n=5))))
    inbox.wait(1)
    late = Message("app", "1700000001000_3", "k", "lock", order=Order("", n=3))
    assert inbox.give(TimesLowered(1_700_000_000_500)) == []
    effects = inbox.give(Arrived(late))
    assert words(effects) == ["fresh"]
    assert inbox.state(late.key) == "accepted", "a sender that counts anew: it waits for the one under way"


def test_a_repeat_that_waited_for_a_gap_is_dropped_when_the_gap_is_given_up() -> None:
    first = receiver()
    first.give(Arrived(ordered(5)))
    first.give(CancelMessages((ordered(5),), "the grant was revoked"))
    again = receiver(disk=first.ledger.disk, clock=first.clock)
    assert words(again.give(Arrived(ordered(5)))) == ["duplicate"]
    assert only(Transmit, again.wait(1)) == []
    assert isinstance(again.machine, Inbox)
    assert (again.machine.live, again.machine.lanes.waiting) == (0, 0)
