"""The sender's machine, as a specification."""

from __future__ import annotations

from typing import Any

import pytest

from duly.core.lifecycle import State
from duly.core.messages import CONFLICT, FORGOTTEN, FRESH, Answer, Message, Verdict, VerdictKind
from duly.core.outbox import UNABLE, Outbox, OutboxPolicy, heard, unable
from duly.core.retry import RetryPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    AttemptFailed,
    CancelMessages,
    DeliveriesFound,
    Event,
    MachineEvent,
    NumberRefused,
    Reachable,
    Received,
    Reply,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.units import FOREVER, SECOND
from duly.errors import Malformed
from duly.storage.memory import Disk
from duly.testing import ManualClock
from tests.at_once import at_once
from tests.core.driving import Driver, only

OVER_THE_NETWORK = OutboxPolicy("hub", RetryPolicy.fixed(3 * SECOND, tries=4), patience=30 * SECOND)
TO_A_HANDLER = OutboxPolicy(
    "run", None, RetryPolicy.exponential(SECOND, 10 * SECOND, tries=3, jitter=0), FOREVER
)


def message(n: int = 0, **more: Any) -> Message:
    return Message("app", f"1700000000000_{n}", "lock_control", "lock", b"open", **more)


def sender(
    policy: OutboxPolicy = OVER_THE_NETWORK, *, disk: Disk | None = None, clock: ManualClock | None = None,
    worker: str = "me", repeatable: bool = True,
) -> Driver:  # fmt: skip
    machine = Outbox(policy, worker, repeatable=lambda message: repeatable)
    return Driver(machine, clock or ManualClock(), disk)


def test_a_message_is_stored_and_then_transmitted() -> None:
    out = sender()
    effects = out.give(Arrived(message()))
    assert effects == [Reply(None, message(), FRESH), Transmit(message(), 1)]
    assert out.state(message().key) == "sent"


def test_the_last_id_is_kept_with_the_message_that_carries_it() -> None:
    out = Driver(Outbox(OVER_THE_NETWORK, "me", minted="ids"), ManualClock())
    out.give(Arrived(message(7)))
    out.give(Arrived(Message("app", "order-7", "lock_control", "lock")))
    assert out.ledger.disk.marks == {"ids": (7, 1_700_000_000_000)}


def test_the_same_message_again_is_not_sent_twice() -> None:
    out = sender()
    out.give(Arrived(message()))
    (reply,) = out.give(Arrived(message()))
    assert isinstance(reply, Reply)
    assert reply.verdict.kind is VerdictKind.DUPLICATE


def test_it_is_repeated_every_three_seconds_three_times_with_the_same_id() -> None:
    out = sender()
    out.give(Arrived(message()))
    sent = [(second, t.attempt) for second in range(1, 30) for t in only(Transmit, out.wait(1))]
    assert sent == [(3, 2), (6, 3), (9, 4)]
    assert {t.message.id for t in only(Transmit, out.effects)} == {message().id}


def test_without_any_answer_it_ends_as_unknown_and_a_late_answer_settles_it() -> None:
    out = sender()
    out.give(Arrived(message()))
    (report,) = only(ReportOutcome, out.wait(31))
    assert report.state is State.UNKNOWN
    assert out.give(Answered(message().key, State.DONE, Answer(0))) == [
        ReportOutcome(message().key, State.DONE, Answer(0))
    ]
    assert out.state(message().key) == "done"


def test_a_receipt_is_remembered_and_starts_patience_anew() -> None:
    out = sender()
    out.give(Arrived(message()))
    out.wait(20)
    out.give(Received(message().key))
    assert out.state(message().key) == "delivered"
    assert only(ReportOutcome, out.wait(29)) == []
    assert only(ReportOutcome, out.wait(2))[0].state is State.UNKNOWN


def test_patience_may_begin_at_the_expiry_where_the_recipient_waits_itself() -> None:
    policy = OutboxPolicy(
        "hub", RetryPolicy.fixed(3 * SECOND, tries=4), beyond_expiry=True, patience=30 * SECOND
    )
    out = sender(policy)
    out.give(Arrived(message(expires=out.clock.now() + 3600 * SECOND)))
    out.give(Received(message().key))
    assert only(ReportOutcome, out.wait(3600 + 29)) == []
    assert only(ReportOutcome, out.wait(2))[0].state is State.UNKNOWN


def test_an_answer_ends_it_once_and_repeats_of_the_answer_are_ignored() -> None:
    out = sender()
    out.give(Arrived(message()))
    answer = Answered(message().key, State.FAILED, Answer(3, b"", "jammed"))
    assert out.give(answer) == [
        ReportOutcome(message().key, State.FAILED, Answer(3, b"", "jammed"), recipient="lock")
    ]
    assert out.give(answer) == []
    assert out.give(Answered(message().key, State.DONE, Answer(0))) == [], "the first end stands"
    assert out.wait(100) == []
    assert out.machine.keys == []


@pytest.mark.parametrize(
    ("waits", "state", "kept"),
    [(0, State.DONE, False), (4, State.DONE, True), (0, State.FAILED, True), (0, State.UNKNOWN, True)],
)
def test_a_delivery_is_kept_unless_it_was_done_at_the_first_attempt(
    waits: float, state: State, kept: bool
) -> None:
    out = sender()
    out.give(Arrived(message()))
    out.wait(waits)
    out.give(Answered(message().key, state, Answer(0)))
    assert out.state(message().key) == state.word
    assert bool(at_once(out.ledger.deliveries(message().key))) == kept


def test_an_answer_for_something_never_sent_is_ignored() -> None:
    assert sender().give(Answered(message().key, State.DONE, Answer(0))) == []


def test_an_answer_of_another_account_than_the_recipient_does_not_count() -> None:
    out = sender()
    out.give(Arrived(message()))
    assert out.give(Answered(message().key, State.DONE, Answer(0), by="other lock")) == []
    assert len(out.give(Answered(message().key, State.DONE, Answer(0), by="lock"))) == 1


def test_an_answer_may_be_passed_on_without_being_stored() -> None:
    out = sender()
    out.give(Arrived(message()))
    (report,) = out.give(Answered(message().key, State.DONE, Answer(0, b"chunk"), keep=False))
    assert isinstance(report, ReportOutcome)
    assert report.answer == Answer(0, b"chunk")
    assert out.ledger.disk.messages[message().key].answer == Answer(0)


def test_its_expiry_ends_what_was_transmitted_as_unknown() -> None:
    out = sender()
    out.give(Arrived(message(expires=out.clock.now() + 5 * SECOND)))
    assert only(ReportOutcome, out.wait(4)) == []
    assert only(ReportOutcome, out.wait(1))[0].state is State.UNKNOWN


def test_a_restart_goes_on_with_what_had_not_ended() -> None:
    first = sender()
    first.give(Arrived(message(0)))
    first.give(Arrived(message(1)))
    first.give(Answered(message(1).key, State.DONE, Answer(0)))
    second = sender(disk=first.ledger.disk, clock=first.clock, worker="me again")
    assert [t.message for t in only(Transmit, second.effects)] == [message(0)]
    assert only(Transmit, second.effects)[0].attempt == 2


def test_after_a_restart_or_a_reconnect_it_is_repeated_as_patiently_as_at_first() -> None:
    first = sender()
    first.give(Arrived(message()))
    first.wait(20)
    assert only(Transmit, first.give(Reachable(""))) == [Transmit(message(), 4, again=True)]
    assert [t.attempt for t in only(Transmit, first.wait(9.5))] == [5, 6, 7]
    second = sender(disk=first.ledger.disk, clock=first.clock, worker="me again")
    assert [t.attempt for t in only(Transmit, second.effects)] == [8]
    assert [t.attempt for t in only(Transmit, second.wait(20))] == [9, 10, 11]


def test_setting_the_clock_back_does_not_stretch_patience() -> None:
    out = sender()
    out.give(Arrived(message()))
    out.clock.advance(-3600)
    out.machine.shift(-3600 * SECOND)
    assert len(only(Transmit, out.wait(3.5))) == 1


# ── a handler of our own ─────────────────────────────────────────────────────────────────────────


def test_a_handler_at_work_is_not_disturbed_by_time_or_expiry() -> None:
    out = sender(TO_A_HANDLER)
    out.give(Arrived(message(expires=out.clock.now() + SECOND)))
    assert out.wait(100_000) == []


def test_a_failure_without_effect_is_tried_again_with_back_off_and_then_ends() -> None:
    out = sender(TO_A_HANDLER)
    out.give(Arrived(message()))
    out.give(AttemptFailed(message().key, 1, "busy"))
    assert out.state(message().key) == "sent"
    assert [t.attempt for t in only(Transmit, out.wait(1))] == [2]
    out.give(AttemptFailed(message().key, 2, "busy"))
    assert only(Transmit, out.wait(1.9)) == []
    assert [t.attempt for t in only(Transmit, out.wait(0.1))] == [3]
    (report,) = out.give(AttemptFailed(message().key, 3, "busy"))
    assert report == ReportOutcome(message().key, State.FAILED, Answer(1, b"", "busy"), recipient="lock")


def test_a_late_failure_of_an_earlier_attempt_changes_nothing() -> None:
    out = sender(TO_A_HANDLER)
    out.give(Arrived(message()))
    out.give(AttemptFailed(message().key, 1, "busy"))
    out.wait(1)
    assert out.give(AttemptFailed(message().key, 1, "busy")) == []
    assert out.give(Answered(message().key, State.DONE, Answer(0), attempt=1)) == []
    assert out.state(message().key) == "sent"


def test_one_that_waits_for_its_next_try_may_expire() -> None:
    out = sender(TO_A_HANDLER)
    out.give(Arrived(message(expires=out.clock.now() + SECOND // 2)))
    out.give(AttemptFailed(message().key, 1, "busy"))
    assert only(ReportOutcome, out.wait(1))[0].state is State.EXPIRED


@pytest.mark.parametrize(("repeatable", "comes"), [(False, [State.UNKNOWN]), (True, [])])
def test_a_crash_in_the_gap_ends_as_unknown_or_is_run_again_as_declared(
    repeatable: bool, comes: list[State]
) -> None:
    first = sender(TO_A_HANDLER)
    first.give(Arrived(message()))
    second = sender(
        TO_A_HANDLER, disk=first.ledger.disk, clock=first.clock, worker="next", repeatable=repeatable
    )
    assert [r.state for r in only(ReportOutcome, second.effects)] == comes
    assert len(only(Transmit, second.effects)) == (1 if repeatable else 0)


def test_one_that_had_not_begun_is_run_after_a_crash_whatever_was_declared() -> None:
    first = sender(TO_A_HANDLER)
    first.give(Arrived(message()))
    first.give(AttemptFailed(message().key, 1, "busy"))
    second = sender(TO_A_HANDLER, disk=first.ledger.disk, clock=first.clock, worker="next", repeatable=False)
    assert [t.attempt for t in only(Transmit, second.wait(2))] == [2]


# ── what a recipient's verdict means ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("verdict", "event"),
    [
        (FRESH, Received(b"k")),
        (Verdict(VerdictKind.DUPLICATE, State.SENT), Received(b"k")),
        (
            Verdict(VerdictKind.DUPLICATE, State.DONE, Answer(0, b"x")),
            Answered(b"k", State.DONE, Answer(0, b"x")),
        ),
        (CONFLICT, Answered(b"k", State.FAILED, Answer(2, b"", CONFLICT.reason))),
        (FORGOTTEN, Answered(b"k", State.UNKNOWN, Answer(2, b"", FORGOTTEN.reason))),
        (Verdict(VerdictKind.EXPIRED, reason="late"), Answered(b"k", State.EXPIRED, Answer(2, b"", "late"))),
        (Verdict(VerdictKind.REFUSED, reason="no"), Answered(b"k", State.FAILED, Answer(2, b"", "no"))),
        (UNABLE, None),
    ],
)
def test_what_a_recipients_verdict_means_to_the_sender(verdict: Verdict, event: object) -> None:
    assert heard(b"k", verdict) == event


def test_a_nonsensical_policy_cannot_be_made() -> None:
    for bad in ({"channel": ""}, {"channel": "x", "patience": 0}):
        with pytest.raises(Malformed):
            OutboxPolicy(**bad)


def test_a_sender_may_forget_what_it_sent_some_time_after_it_has_expired() -> None:
    policy = OutboxPolicy("hub", OVER_THE_NETWORK.resend, remember=60 * SECOND)
    out = sender(policy)
    now = out.clock.now()
    out.give(Arrived(message(0)))
    out.give(Arrived(message(1, expires=now + 10 * SECOND)))
    kept = [out.ledger.disk.messages[message(n).key].until - now for n in (0, 1)]
    assert kept == [60 * SECOND, 70 * SECOND]


def test_what_could_not_be_committed_may_be_stored_all_the_same_and_its_sender_is_told_so() -> None:
    (reply,) = unable(Arrived(message()))
    assert isinstance(reply, Reply)
    assert reply.verdict.retry
    assert "same id" in reply.verdict.reason
    assert "nothing was" not in reply.verdict.reason


# ── what is under way, and other events ──────────────────────────────────────────────────────────


def test_it_says_what_is_under_way_and_to_whom() -> None:
    machine = Outbox(OVER_THE_NETWORK, "me")
    out = Driver(machine, ManualClock())
    out.give(Arrived(message()))
    key = message().key
    under_way = machine.transmissions
    assert (under_way.message(key), under_way.state(key), len(machine)) == (message(), State.SENT, 1)
    assert [one.message for one in under_way.to("lock")] == [message()]
    assert under_way.to("lamp") == []
    out.give(Answered(key, State.DONE, Answer(0)))
    assert (under_way.message(key), under_way.state(key), len(machine)) == (None, None, 0)


def test_a_receipt_counts_once_and_only_for_what_is_under_way() -> None:
    out = sender()
    assert out.give(Received(message().key)) == []
    assert message().key not in out.ledger.disk.messages
    out.give(Arrived(message()))
    for _ in range(2):
        assert out.give(Received(message().key)) == []
        assert out.state(message().key) == "delivered"


@pytest.mark.parametrize(
    "event", [Unreachable("lock"), NumberRefused("app", 3, 0), MachineEvent(None), CancelMessages((), "gone")]
)
def test_what_is_nothing_to_a_sender_changes_nothing(event: Event) -> None:
    out = sender()
    out.give(Arrived(message()))
    assert out.give(event) == []
    assert out.state(message().key) == "sent"


def test_a_repeat_of_what_has_ended_gets_the_verdict_that_memory_holds() -> None:
    verdict = Verdict(VerdictKind.DUPLICATE, State.DONE, Answer(0))
    machine = Outbox(OVER_THE_NETWORK, "me")
    assert machine.repeated(message(), verdict, "c1", 0) == [Reply("c1", message(), verdict)]
    assert machine.unable(Arrived(message(), "c1")) == unable(Arrived(message(), "c1"))
    assert machine.unable(Received(message().key)) == []


def test_what_another_worker_had_begun_is_taken_over_when_it_is_found() -> None:
    first = sender()
    first.give(Arrived(message()))
    second = Driver(Outbox(OVER_THE_NETWORK, "next"), first.clock)
    second.ledger = first.ledger
    found = DeliveriesFound(tuple(at_once(first.ledger.open_deliveries("hub"))))
    assert [t.attempt for t in only(Transmit, second.give(found))] == [2]
    assert second.give(found) == [], "a newer attempt is under way here"
    assert first.wait(4) == [], "its next attempt is fenced off, and it lets go"
    assert isinstance(first.machine, Outbox)
    assert len(first.machine) == 0


def test_a_handler_that_is_working_goes_on_while_the_ledger_is_read_anew() -> None:
    out = sender(TO_A_HANDLER)
    out.give(Arrived(message()))
    out.carry_out(out.machine.restore(out._open(), (), {}, out.clock.now()))
    assert len(only(Transmit, out.effects)) == 1
    (end,) = out.give(Answered(message().key, State.DONE, Answer(0), attempt=1))
    assert isinstance(end, ReportOutcome)


# ── recipients that are sent everything once, and messages that say how long they take ───────────


def test_a_recipient_that_is_sent_everything_once_is_sent_nothing_again_by_any_way() -> None:
    def machine(worker: str) -> Outbox:
        return Outbox(OVER_THE_NETWORK, worker, once=lambda message: True)

    first = Driver(machine("me"), ManualClock())
    first.give(Arrived(message()))
    assert only(Transmit, first.wait(20) + first.give(Reachable("lock"))) == []
    second = Driver(machine("next"), first.clock, first.ledger.disk)
    assert only(Transmit, second.effects + second.give(Reachable("lock"))) == []
    (report,) = only(ReportOutcome, second.wait(31))
    assert report.state is State.UNKNOWN


def test_a_message_that_says_how_long_it_takes_may_end_after_its_expiry_but_is_not_sent_after_it() -> None:
    machine = Outbox(OVER_THE_NETWORK, "me", patience=lambda message: 60 * SECOND)
    out = Driver(machine, ManualClock())
    out.give(Arrived(message(expires=out.clock.now() + 4 * SECOND)))
    assert [t.attempt for t in only(Transmit, out.wait(59))] == [2], "after 3 seconds, not after 6"
    (report,) = only(ReportOutcome, out.wait(2))
    assert report.state is State.UNKNOWN
