"""Several inboxes on one ledger: each serves the recipients it can reach, and leaves the others to others."""

from __future__ import annotations

from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order
from duly.core.operations import OpenDelivery
from duly.core.ordering import LanePolicy
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    DeliveriesFound,
    Effect,
    Reachable,
    Reply,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.units import SECOND
from duly.storage.memory import Disk
from duly.testing import ManualClock
from tests.at_once import at_once
from tests.core.driving import Driver, only

POLICY = OutboxPolicy("device", RetryPolicy.fixed(3 * SECOND, tries=4), patience=10 * SECOND)


def message(n: int, mode: Mode | None = Mode.REPLAY, expires: int = 0) -> Message:
    order = None if mode is None else Order("", mode, n)
    return Message(
        "app", f"{1_700_000_000_000 + n}_{n}", "k", "lock", b"%d" % n, expires=expires, order=order
    )


class SharedHub(Driver):
    """One of several on a disk."""

    def __init__(self, name: str, disk: Disk, clock: ManualClock) -> None:
        self.name = name
        super().__init__(Inbox(POLICY, name, lanes=LanePolicy(gated=True), shared=True), clock, disk)

    def _open(self) -> list[OpenDelivery]:
        return []

    def look(self, *here: str, living: tuple[str, ...] = ("a", "b")) -> list[Effect]:
        found = at_once(
            self.ledger.strays("device", here=here, worker=self.name, living=living, now=self.clock.now())
        )
        return self.give(DeliveriesFound(tuple(found), dict(self.ledger.disk.marks)))

    def comes(self) -> list[Effect]:
        """The lock connects here."""
        return self.look("lock") + self.give(Reachable("lock"))


def two() -> tuple[SharedHub, SharedHub, ManualClock]:
    disk, clock = Disk(), ManualClock()
    return SharedHub("a", disk, clock), SharedHub("b", disk, clock), clock


def sent(effects: list[Effect]) -> list[bytes]:
    return [transmit.message.body for transmit in only(Transmit, effects)]


def words(effects: list[Effect]) -> list[str]:
    return [reply.verdict.kind.value for reply in only(Reply, effects)]


def done(m: Message) -> Answered:
    return Answered(m.key, State.DONE, Answer(), by="lock")


def test_what_is_for_a_recipient_at_another_hub_is_stored_and_left() -> None:
    a, b, _ = two()
    b.comes()
    effects = a.give(Arrived(message(0), "c1"))
    assert (words(effects), sent(effects)) == (["fresh"], [])
    assert isinstance(a.machine, Inbox)
    assert a.machine.live == 0
    assert sent(b.look("lock")) == [b"0"]
    assert [report.state for report in only(ReportOutcome, b.give(done(message(0))))] == [State.DONE]
    assert a.state(message(0).key) == "done"


def test_the_home_puts_what_several_left_into_order() -> None:
    a, b, clock = two()
    b.comes()
    b.give(Arrived(message(1)))  # it waits for number 0
    a.give(Arrived(message(0)))
    assert sent(b.look("lock")) == [b"0", b"1"]
    assert sent(b.wait(1)) == []
    assert clock.now()


def test_a_repeat_that_comes_to_the_home_before_the_first_was_found_changes_nothing() -> None:
    a, b, _ = two()
    b.comes()
    a.give(Arrived(message(0)))
    assert words(b.give(Arrived(message(0)))) == ["duplicate"]
    assert sent(b.look("lock")) == [b"0"]
    assert sent(b.look("lock")) == [], "it is ours by now"


def test_what_waits_is_found_where_the_recipient_comes() -> None:
    a, b, _ = two()
    for n in range(3):
        a.give(Arrived(message(n, Mode.LATEST), patient=True))
    effects = b.comes()
    assert sent(effects) == [b"2"]
    assert [report.state for report in only(ReportOutcome, effects)] == [State.SUPERSEDED] * 2


def test_a_recipient_that_left_before_its_turn_finds_it_again() -> None:
    a, b, _ = two()
    a.give(Arrived(message(0), patient=True))
    b.look("lock")
    b.give(Unreachable("lock"))
    assert sent(b.comes()) == [b"0"]


def test_a_recipient_that_moves_is_sent_what_it_has_not_answered_and_the_fence_keeps_the_first_out() -> None:
    a, b, _ = two()
    a.comes()
    assert sent(a.give(Arrived(message(0), "c1"))) == [b"0"]
    a.give(Unreachable("lock"))
    assert set(sent(b.comes())) == {b"0"}
    assert a.wait(4) == [], "its next attempt is fenced off, and it lets go"
    assert isinstance(a.machine, Inbox)
    assert (a.machine.live, len(a.machine.outbox)) == (0, 0)
    assert [report.state for report in only(ReportOutcome, b.give(done(message(0))))] == [State.DONE]


def test_a_hub_without_the_recipient_does_not_end_what_another_has_taken_over() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(0), "c1"))
    a.give(Unreachable("lock"))
    a.wait(9.5)  # its attempts are through
    assert set(sent(b.comes())) == {b"0"}
    assert a.wait(2) == []
    assert b.state(message(0).key) == "sent"


def test_what_a_dead_hub_had_begun_is_taken_over_and_ends() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(0)))
    b.look(living=("b",))
    assert isinstance(b.machine, Inbox)
    assert b.machine.is_live(message(0).key)
    ends = only(ReportOutcome, b.wait(11))
    assert [end.state for end in ends] == [State.UNKNOWN]
    settled = only(ReportOutcome, b.give(done(message(0))))
    assert [end.state for end in settled] == [State.DONE]


def test_what_waited_for_no_recipient_until_its_end_expires() -> None:
    a, b, clock = two()
    m = message(0, expires=clock.now() + SECOND)
    a.give(Arrived(m, patient=True))
    b.wait(2)
    assert [end.state for end in only(ReportOutcome, b.look())] == [State.EXPIRED]
    assert only(ReportOutcome, a.look()) == []


def test_an_answer_may_come_to_a_hub_that_never_sent_it() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(0)))
    b.give(Reachable("lock"))
    assert [end.state for end in only(ReportOutcome, b.give(done(message(0))))] == [State.DONE]
    assert [d.state for d in a.ledger.disk.deliveries.values()] == [State.DONE]
    assert a.wait(20) == []
    assert a.state(message(0).key) == "done"


def test_a_late_one_is_late_wherever_the_later_one_took_effect() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(0, Mode.LATEST)))
    a.give(Arrived(message(3, Mode.LATEST)))
    assert sent(a.wait(1)) == [b"3"]
    a.give(Unreachable("lock"))
    b.comes()
    ends = only(ReportOutcome, b.give(Arrived(message(1, Mode.LATEST))) + b.wait(1))
    assert [end.state for end in ends] == [State.SUPERSEDED]


def test_found_twice_is_taken_once() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(0, None)))
    found = at_once(b.ledger.strays("device", here=["lock"], worker="b", living=["a", "b"], now=0))
    both = b.give(DeliveriesFound(tuple(found))) + b.give(DeliveriesFound(tuple(found)))
    assert sent(both) == [b"0"]
    assert isinstance(b.machine, Inbox)
    assert b.machine.live == 1


def test_what_waits_for_a_gap_is_let_go_when_another_hub_has_taken_it() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(1)))  # it waits for number 0
    b.comes()
    assert sent(b.wait(1)) == [b"1"]
    assert a.wait(1) == []
    assert isinstance(a.machine, Inbox)
    assert a.machine.live == 0


def test_what_waits_for_a_gap_is_late_when_another_hub_has_handed_over_a_later_one() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(1), "c1"))  # it waits for number 0
    b.give(Reachable("lock"))
    b.give(Arrived(message(3)))
    assert sent(b.wait(1)) == [b"3"]
    assert [end.state for end in only(ReportOutcome, a.wait(1))] == [State.SUPERSEDED]


def test_what_waits_for_a_gap_goes_with_its_recipient() -> None:
    a, b, _ = two()
    a.comes()
    a.give(Arrived(message(1)))  # it waits for number 0
    a.give(Unreachable("lock"))
    assert a.wait(1) == []
    assert sent(b.comes() + b.wait(1)) == [b"1"]


def test_what_waits_in_the_ledger_is_not_overtaken_when_it_arrives_at_its_worker_too() -> None:
    """Both workers are given the same message; the one that cannot reach the lock stores it first. Where that
    is asked for, the other one starts it: the next message follows on from it."""
    disk, clock = Disk(), ManualClock()
    a, b = SharedHub("a", disk, clock), SharedHub("b", disk, clock)
    a.machine = Inbox(POLICY, "a", lanes=LanePolicy(gated=True), shared=True, adopt=True)
    a.comes()
    b.give(Arrived(message(0), "b"))
    first = a.give(Arrived(message(0), "a"))
    assert [effect.message.id for effect in only(Transmit, first)] == [message(0).id]
    assert [effect.verdict.kind.value for effect in only(Reply, first)] == ["duplicate"]
    second = a.give(Arrived(message(1), "a"))
    assert [effect.message.id for effect in only(Transmit, second)] == [message(1).id]
    assert not only(Transmit, a.look("lock"))
    a.give(Answered(message(0).key, State.DONE, Answer()))
    assert a.state(message(0).key) == "done"


def test_what_waits_in_the_ledger_keeps_its_place_behind_a_gap_when_it_arrives_at_its_worker_too() -> None:
    disk, clock = Disk(), ManualClock()
    a, b = SharedHub("a", disk, clock), SharedHub("b", disk, clock)
    a.machine = Inbox(POLICY, "a", lanes=LanePolicy(gated=True), shared=True, adopt=True)
    a.comes()
    b.give(Arrived(message(1), "b"))
    assert not only(Transmit, a.give(Arrived(message(1), "a")))
    begun = a.give(Arrived(message(0), "a"))
    assert [effect.message.id for effect in only(Transmit, begun)] == [message(0).id, message(1).id]


def test_a_repeat_of_a_failed_message_at_another_worker_makes_no_earlier_one_late() -> None:
    """The mark of the failed one went back; its repeat must not raise it again."""
    disk, clock = Disk(), ManualClock()
    a, b = SharedHub("a", disk, clock), SharedHub("b", disk, clock)
    a.comes()
    a.give(Arrived(message(1), "a"))
    assert sent(a.wait(1)) == [b"1"]
    a.give(Answered(message(1).key, State.FAILED, Answer(1, b"", "jammed")))
    a.give(Unreachable("lock"))
    b.machine = Inbox(POLICY, "b", lanes=LanePolicy(gated=True), shared=True, adopt=True)
    b.comes()
    assert not only(Transmit, b.give(Arrived(message(1), "b")) + b.wait(1))
    assert sent(b.give(Arrived(message(0), "b")) + b.wait(1)) == [b"0"]


def test_what_another_worker_has_taken_is_not_adopted() -> None:
    disk, clock = Disk(), ManualClock()
    a, b = SharedHub("a", disk, clock), SharedHub("b", disk, clock)
    a.comes()
    assert sent(a.give(Arrived(message(0), "a"))) == [b"0"]
    b.machine = Inbox(POLICY, "b", lanes=LanePolicy(gated=True), shared=True, adopt=True)
    b.give(Reachable("lock"))
    assert not only(Transmit, b.give(Arrived(message(0), "b")) + b.wait(1))


def test_a_recipient_that_leaves_takes_along_what_waits_for_it_and_nothing_else() -> None:
    a, _, _ = two()
    lamp = Message("app", "1700000000009_9", "k", "lamp", b"9", order=Order("", n=9))
    a.give(Reachable("lock"))
    a.give(Reachable("lamp"))
    for one in (message(1), lamp):
        a.give(Arrived(one))
    assert isinstance(a.machine, Inbox)
    assert a.machine.live == 2
    a.give(Unreachable("lock"))
    assert [one.recipient for one in a.machine.waiting()] == ["lamp"]
    assert sent(a.wait(1)) == [b"9"]


def test_what_is_late_by_the_memory_of_one_hub_is_decided_by_the_ledger() -> None:
    a, b, _ = two()
    b.comes()
    b.give(Arrived(message(1)))
    b.wait(1)
    b.give(done(message(1)))
    effects = b.give(Arrived(message(0)))
    assert words(effects) == ["fresh"]
    assert a.state(message(0).key) == "superseded"


def test_what_another_hub_left_too_late_is_superseded_by_the_ledgers_mark() -> None:
    a, b, _ = two()
    b.comes()
    b.give(Arrived(message(1)))
    b.wait(1)
    b.give(done(message(1)))
    a.give(Arrived(message(0)))
    b.look("lock")
    assert a.state(message(0).key) == "superseded"
