"""One message to many recipients, as a specification."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from duly.core.fanout.attempts import FanoutQueries
from duly.core.fanout.machine import Fanout
from duly.core.fanout.plan import (
    FIRST_ROUND,
    Amendment,
    AttemptEnded,
    AttemptResult,
    DeliveriesChanged,
    DeliveryPlan,
    DoubtPolicy,
    FanoutPolicy,
    GroupingTraits,
    ItemSeen,
    PlannedDelivery,
    StartAttempt,
)
from duly.core.fanout.recipient_queue import RecipientPolicy
from duly.core.horizon import Horizon
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import Deliver, DeliveryKind, DeliveryRef, DropItem, OpenDelivery, PutItem
from duly.core.retry import RetryPolicy
from duly.core.steps import (
    Arrived,
    Effect,
    MachineEffect,
    MachineEvent,
    Reachable,
    Reply,
    ReportOutcome,
)
from duly.core.units import DAY, HOUR, MINUTE, SECOND
from duly.errors import Malformed
from duly.storage.memory import Disk
from duly.testing import ManualClock
from tests.core.driving import Driver, only

STEADY = RetryPolicy.exponential(5 * SECOND, HOUR, jitter=0)


class FanoutTower:
    """A fanout with a profile that a test can change."""

    def __init__(
        self,
        *recipients: str,
        disk: Disk | None = None,
        clock: ManualClock | None = None,
        doubt: DoubtPolicy = DoubtPolicy.RESEND,
        retry: RetryPolicy = STEADY,
        most: int = 20,
        worker: str = "me",
        sole: bool = True,
        unwanted: Collection[DeliveryRef] = (),
        urgent: bool = False,
        later: tuple[tuple[str, int], ...] = (),
        quiet: bool = False,
    ) -> None:
        self.clock = clock or ManualClock()
        self.recipients = recipients
        self.later = later
        self.quiet = quiet
        """nothing goes out from 22:00 to 07:00"""
        self.end = (State.DONE, Answer())
        self.cancelled: set[bytes] = set()
        self.unwanted = set(unwanted)
        self.traits = GroupingTraits(urgent=urgent)
        self.fanout = Fanout(
            FanoutPolicy("alert", retry, horizon=Horizon(keep=30 * DAY, skew=DAY)),
            worker,
            FanoutQueries(
                plan=self._plan,
                traits=lambda message: self.traits,
                route=lambda recipient: RecipientPolicy(most=most),
                doubt=lambda recipient: doubt,
                wanted=lambda ref: ref not in self.unwanted,
                cancelled=lambda key: key in self.cancelled,
                unsettled=lambda key: (PutItem("unsettled", key.hex(), b""),),
                settled=lambda key: (DropItem("unsettled", key.hex()),),
            ),
            sole=sole,
        )
        self.driver = Driver(self.fanout, self.clock, disk)
        self.disk = self.driver.ledger.disk

    def _plan(self, message: Message, now: int) -> DeliveryPlan:
        midnight, hour = now // DAY * DAY, now % DAY // HOUR
        night = self.quiet and not 7 <= hour < 22
        opens = midnight + (DAY if hour >= 22 else 0) + 7 * HOUR if night else 0
        begins = opens or now
        first = tuple(PlannedDelivery(name, begins, begins + DAY, 0, opens) for name in self.recipients)
        steps = enumerate(self.later, start=1)
        more = tuple(
            PlannedDelivery(name, begins + after, begins + DAY, n, opens) for n, (name, after) in steps
        )
        return DeliveryPlan((*first, *more), self.end, self.traits)

    def event(self, n: int = 0, body: bytes = b"{}") -> Message:
        return Message("gate", f"event-{n}", "alert_event", "home", body, self.clock.now())

    def report(self, message: Message | None = None) -> list[Effect]:
        return self.driver.give(Arrived(message or self.event()))

    def went(
        self,
        batch: StartAttempt,
        fate: AttemptResult = AttemptResult.ARRIVED,
        reason: str = "",
        rest: int = 0,
    ) -> list[Effect]:
        return self.driver.give(MachineEvent(AttemptEnded(batch, fate, reason, rest)))

    def look(self, n: int = 0) -> list[Effect]:
        """Read an event again: somebody has changed something about it, or the fanout has asked for that."""
        key = self.event(n).key
        found = [
            one for ref, one in self.disk.deliveries.items() if ref.key == key and not one.state.terminal
        ]
        state = self.disk.messages[key].state if key in self.disk.messages else State.ACCEPTED
        open_ = tuple(OpenDelivery(self.event(n), state, one) for one in found)
        return self.driver.give(MachineEvent(DeliveriesChanged(key, open_)))

    @property
    def unsettled(self) -> list[bytes]:
        """The keys of the messages that are noted, since they may be over."""
        return [bytes.fromhex(name) for name in self.disk.buckets.get("unsettled", {})]

    def states(self) -> dict[tuple[str, int], str]:
        return {(ref.recipient, ref.round): d.state.word for ref, d in self.disk.deliveries.items()}

    def state(self, n: int = 0) -> str:
        return self.driver.state(self.event(n).key)


def batches(effects: list[Effect]) -> list[StartAttempt]:
    return [e.what for e in effects if isinstance(e, MachineEffect) and isinstance(e.what, StartAttempt)]


def verdicts(effects: list[Effect]) -> list[str]:
    return [reply.verdict.kind.value for reply in only(Reply, effects)]


def test_an_event_and_its_deliveries_are_stored_before_a_recipient_is_told() -> None:
    tower = FanoutTower("mail", "hook")
    effects = tower.report()
    assert verdicts(effects) == ["fresh"]
    assert isinstance(effects[0], Reply)
    assert [(p.recipient, p.items[0].attempt) for p in batches(effects)] == [("mail", 1), ("hook", 1)]
    assert tower.states() == {("mail", 0): "sent", ("hook", 0): "sent"}
    assert {d.worker for d in tower.disk.deliveries.values()} == {"me"}, "claimed"


def test_the_same_event_again_is_one_event_and_gets_its_state() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    again = tower.report()
    assert (verdicts(again), batches(again)) == (["duplicate"], [])
    tower.went(batch)
    assert verdicts(tower.report()) == ["duplicate"]
    assert tower.fanout.counts.accepted == 1


def test_other_content_under_the_same_id_is_a_conflict() -> None:
    tower = FanoutTower("mail")
    tower.report()
    assert verdicts(tower.report(tower.event(body=b'{"other":1}'))) == ["conflict"]


def test_repeats_that_come_while_the_first_is_being_stored_hear_with_it() -> None:
    tower = FanoutTower("mail")
    message = tower.event()
    now = tower.clock.now()
    first = tower.fanout.handle(Arrived(message, "a"), now)
    assert tower.fanout.handle(Arrived(message, "b"), now) == []
    tower.driver.carry_out(first)
    said = {reply.origin: reply.verdict.kind for reply in only(Reply, tower.driver.effects)}
    assert said == {"a": VerdictKind.FRESH, "b": VerdictKind.DUPLICATE}
    assert len(batches(tower.driver.effects)) == 1


def test_it_is_done_when_every_recipient_was_told_and_its_senders_hear_it() -> None:
    tower = FanoutTower("mail", "hook")
    one, other = batches(tower.report())
    assert only(ReportOutcome, tower.went(one)) == []
    assert tower.state() == "delivered"
    (report,) = only(ReportOutcome, tower.went(other))
    assert (report.state, tower.state()) == (State.DONE, "done")
    assert len(tower.fanout) == 0


def test_what_was_not_sent_is_tried_again_ever_more_slowly_until_it_expires() -> None:
    tower = FanoutTower("hook")
    (batch,) = batches(tower.report())
    waits: list[int] = []
    while True:
        began = tower.clock.now()
        tower.went(batch, AttemptResult.NOT_SENT, "HTTP status 500")
        again = batches(tower.driver.wait(3_601))
        if not again:
            break
        waits.append(max(d.due for d in tower.disk.deliveries.values()) - MINUTE - began)
        (batch,) = again
    assert [wait // SECOND for wait in waits[:5]] == [5, 10, 20, 40, 80]
    assert waits[-1] == HOUR
    tower.driver.wait(3_700)
    assert tower.state() == "expired"
    (delivery,) = tower.disk.deliveries.values()
    assert "HTTP status 500" in delivery.error


def test_after_the_last_allowed_attempt_it_is_a_dead_letter() -> None:
    tower = FanoutTower("hook", retry=RetryPolicy.exponential(5 * SECOND, HOUR, tries=3, jitter=0))
    (batch,) = batches(tower.report())
    for _ in range(2):
        tower.went(batch, AttemptResult.NOT_SENT, "no")
        (batch,) = batches(tower.driver.wait(60))
    assert batch.items[0].attempt == 3
    tower.went(batch, AttemptResult.NOT_SENT, "no")
    assert (tower.state(), tower.states()) == ("failed", {("hook", 0): "failed"})
    assert tower.driver.wait(100_000) == []


def test_what_the_other_side_will_never_take_is_not_tried_again() -> None:
    tower = FanoutTower("hook")
    (batch,) = batches(tower.report())
    (report,) = only(ReportOutcome, tower.went(batch, AttemptResult.REFUSED, "HTTP status 410"))
    assert (report.state, report.answer.reason) == (State.FAILED, "HTTP status 410")


def test_a_recipient_that_wants_to_be_left_alone_is() -> None:
    tower = FanoutTower("hook")
    (batch,) = batches(tower.report())
    tower.went(batch, AttemptResult.NOT_SENT, "HTTP status 429", 120 * SECOND)
    assert batches(tower.driver.wait(119)) == []
    assert len(batches(tower.driver.wait(1))) == 1


def test_a_channel_that_works_again_is_used_at_once_for_all_its_recipients() -> None:
    tower = FanoutTower("mail:host#1", "mail:host#2", "mail:other#3")
    for batch in batches(tower.report()):
        tower.went(batch, AttemptResult.NOT_SENT, "down")
    works, *others = batches(tower.driver.wait(5))
    for batch in others:
        tower.went(batch, AttemptResult.NOT_SENT, "down")
    assert batches(tower.driver.wait(1)) == [], "they rest for ten seconds"
    tower.went(works)
    assert [batch.recipient for batch in batches(tower.driver.wait(0))] == ["mail:host#2"]


@pytest.mark.parametrize("doubt", [DoubtPolicy.RESEND, DoubtPolicy.REPEAT, DoubtPolicy.STOP])
def test_an_attempt_that_a_crash_cut_off_is_handled_as_the_channel_declares(doubt: DoubtPolicy) -> None:
    before = FanoutTower("hook", doubt=doubt)
    (batch,) = batches(before.report())
    after = FanoutTower("hook", doubt=doubt, disk=before.disk, clock=before.clock, worker="next")
    again = batches(after.driver.wait(0))
    if doubt is DoubtPolicy.STOP:
        assert again == []
        assert after.state() == "unknown"
        return
    (item,) = again[0].items
    assert (item.ref, item.attempt) == (batch.items[0].ref, 2)
    assert item.repeat is (doubt is DoubtPolicy.REPEAT)
    late = after.went(batch)
    assert only(ReportOutcome, late) == [], "the attempt of the dead one cannot finish a newer one"
    after.went(again[0])
    assert after.state() == "done"


def test_where_a_repeat_cannot_be_told_there_is_at_most_one_across_crashes() -> None:
    tower = FanoutTower("mail", doubt=DoubtPolicy.REPEAT)
    tower.report()
    tower = FanoutTower("mail", doubt=DoubtPolicy.REPEAT, disk=tower.disk, clock=tower.clock, worker="second")
    assert [item.repeat for p in batches(tower.driver.wait(0)) for item in p.items] == [True]
    tower = FanoutTower("mail", doubt=DoubtPolicy.REPEAT, disk=tower.disk, clock=tower.clock, worker="third")
    assert batches(tower.driver.wait(100)) == []
    assert tower.state() == "unknown"


def test_doubt_within_a_run_is_written_down_before_the_repeat() -> None:
    tower = FanoutTower("mail", doubt=DoubtPolicy.REPEAT)
    (batch,) = batches(tower.report())
    tower.went(batch, AttemptResult.IN_DOUBT, "the connection broke")
    (delivery,) = tower.disk.deliveries.values()
    assert (delivery.error, delivery.in_doubt) == ("in doubt: the connection broke", True)
    (again,) = batches(tower.driver.wait(60))
    assert again.items[0].repeat
    tower.went(again, AttemptResult.IN_DOUBT, "the connection broke")
    assert tower.state() == "unknown"


def test_a_restart_goes_on_with_what_waits_at_its_time() -> None:
    before = FanoutTower("hook")
    (batch,) = batches(before.report())
    before.went(batch, AttemptResult.NOT_SENT, "no")
    after = FanoutTower("hook", disk=before.disk, clock=before.clock, worker="next")
    assert batches(after.driver.wait(4)) == []
    (again,) = batches(after.driver.wait(1))
    assert again.items[0].attempt == 2


def test_an_escalation_is_a_delivery_that_is_due_later() -> None:
    tower = FanoutTower("mail")
    tower.later = (("boss", 10 * MINUTE),)
    (first,) = batches(tower.report())
    tower.went(first)
    assert tower.states() == {("mail", 0): "done", ("boss", 1): "accepted"}
    assert tower.state() == "delivered"
    (second,) = batches(tower.driver.wait(600))
    assert (second.recipient, second.items[0].ref.round) == ("boss", 1)


def test_a_delivery_that_was_removed_from_the_ledger_does_not_go_out() -> None:
    tower = FanoutTower("mail")
    tower.later = (("boss", 10 * MINUTE),)
    tower.report()
    ref = DeliveryRef(tower.event().key, "alert", "boss", 1)
    del tower.disk.deliveries[ref]
    tower.driver.give(MachineEvent(DeliveriesChanged(tower.event().key, ())))
    assert batches(tower.driver.wait(3_600)) == []


def test_what_is_no_longer_wanted_is_not_tried_again() -> None:
    tower = FanoutTower("hook", "mail")
    hook, mail = batches(tower.report())
    tower.went(mail, AttemptResult.NOT_SENT, "down")
    tower.unwanted = {hook.items[0].ref, mail.items[0].ref}
    tower.went(hook, AttemptResult.NOT_SENT, "down")
    assert tower.states()["hook", 0] == "cancelled"
    waiting = OpenDelivery(tower.event(), State.SENT, tower.disk.deliveries[mail.items[0].ref])
    tower.driver.give(MachineEvent(DeliveriesChanged(tower.event().key, (waiting,))))
    assert tower.states()["mail", 0] == "cancelled"
    assert (tower.state(), tower.driver.wait(3_600)) == ("cancelled", [])


def test_a_delivery_that_was_added_to_the_ledger_goes_out() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    tower.went(batch)
    ref = DeliveryRef(tower.event().key, "alert", "other", 200)
    tower.driver.ledger.execute((Deliver(ref, tower.clock.now()),))
    open_ = OpenDelivery(tower.event(), State.DONE, tower.disk.deliveries[ref])
    tower.driver.give(MachineEvent(DeliveriesChanged(ref.key, (open_,))))
    (batch,) = batches(tower.driver.wait(0))
    tower.went(batch)
    assert (tower.states()["other", 200], tower.state()) == ("done", "done")


def test_what_was_just_on_its_way_when_it_was_cancelled_is_followed_by_a_correction() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    tower.cancelled.add(tower.event().key)
    effects = tower.went(batch)
    assert tower.states() == {("mail", 0): "done", ("mail", FIRST_ROUND[DeliveryKind.CORRECTION]): "accepted"}
    assert any(isinstance(e, MachineEffect) and isinstance(e.what, DeliveryRef) for e in effects), (
        "somebody has to look"
    )


def test_a_message_about_another_is_stored_once_with_what_it_changes() -> None:
    tower = FanoutTower("mail")
    change = Message("gate", "change-1", "alert_update", "event-0", b"{}", tower.clock.now())
    amend = Amendment(change, "here", (PutItem("alerts", "x", b"new"),))
    first = tower.driver.give(MachineEvent(amend))
    assert (verdicts(first), tower.disk.buckets["alerts"]) == (["fresh"], {"x": b"new"})
    tower.disk.buckets["alerts"]["x"] = b"newer"
    assert verdicts(tower.driver.give(MachineEvent(amend))) == ["duplicate"]
    assert tower.disk.buckets["alerts"] == {"x": b"newer"}


@pytest.mark.parametrize(("seen", "found"), [(None, b"other"), (b"old", b"other"), (b"old", None)])
def test_a_message_about_what_has_changed_meanwhile_changes_nothing_and_may_be_tried_again(
    seen: bytes | None, found: bytes | None
) -> None:
    """Another hub has changed it between the look and the commit."""
    tower = FanoutTower("mail")
    alerts = tower.disk.buckets.setdefault("alerts", {})
    if found is not None:
        alerts["x"] = found
    before = dict(alerts)
    change = Message("gate", "change-1", "alert_update", "event-0", b"{}", tower.clock.now())
    put = PutItem("alerts", "x", b"new")
    late = Amendment(change, "here", (put,), ItemSeen("alerts", "x", seen))
    (reply,) = only(Reply, tower.driver.give(MachineEvent(late)))
    assert (reply.verdict.retry, alerts) == (True, before)
    again = Amendment(change, "here", (put,), ItemSeen("alerts", "x", found))
    assert verdicts(tower.driver.give(MachineEvent(again))) == ["fresh"], "its id was not burned"
    assert alerts == {"x": b"new"}


def test_an_event_that_is_only_listed_is_answered_with_its_end() -> None:
    tower = FanoutTower()
    effects = tower.report()
    (reply,) = only(Reply, effects)
    assert (reply.verdict.kind, reply.verdict.state) == (VerdictKind.FRESH, State.DONE)
    assert only(ReportOutcome, effects) == [], "it is said once"
    assert tower.disk.messages[tower.event().key].state is State.DONE
    (repeat,) = only(Reply, tower.report())
    assert (repeat.verdict.kind, repeat.verdict.state) == (VerdictKind.DUPLICATE, State.DONE)


def test_an_event_without_recipients_ends_at_once_with_its_reason() -> None:
    tower = FanoutTower()
    tower.end = (State.FAILED, Answer(2, b"", "there is no such profile"))
    (report,) = only(ReportOutcome, tower.report())
    assert (report.state, report.answer.reason) == (State.FAILED, "there is no such profile")
    assert tower.disk.messages[tower.event().key].answer == report.answer
    (repeat,) = only(Reply, tower.report())
    assert repeat.verdict == Verdict(VerdictKind.DUPLICATE, State.FAILED, report.answer)


def test_ten_thousand_events_in_a_minute_are_a_few_batches_and_ten_thousand_ends() -> None:
    tower = FanoutTower("mail", most=10)
    sizes: list[int] = []

    def deliver(effects: list[Effect]) -> None:
        for batch in batches(effects):
            sizes.append(len(batch.items))
            deliver(tower.went(batch))

    for n in range(10_000):
        tower.clock.advance(0.006)
        deliver(tower.report(tower.event(n)))
    for _ in range(5):
        deliver(tower.driver.wait(60))
    assert sum(sizes) == 10_000
    assert len(sizes) <= 25
    assert {d.state for d in tower.disk.deliveries.values()} == {State.DONE}
    assert {r.state for r in tower.disk.messages.values()} == {State.DONE}


@given(
    most=st.integers(1, 5),
    gaps=st.lists(st.tuples(st.sampled_from([0.0, 0.01, 1.0, 30.0]), st.booleans()), min_size=1, max_size=40),
)
def test_what_is_urgent_is_never_held_back_by_a_limit(most: int, gaps: list[tuple[float, bool]]) -> None:
    """However many of whatever kind have gone before, as long as their recipient takes them."""
    tower = FanoutTower("mail", most=most)
    for n, (gap, urgent) in enumerate(gaps):
        told = batches(tower.driver.wait(gap)) if gap else []
        tower.traits = GroupingTraits(urgent=urgent)
        told += batches(tower.report(tower.event(n)))
        if urgent:
            assert told[-1].urgent
            assert [item.message.id for item in told[-1].items] == [f"event-{n}"]
        for batch in told:
            tower.went(batch)


def test_what_becomes_urgent_leaves_the_way_where_it_waits() -> None:
    tower = FanoutTower("mail", most=1)
    (first,) = batches(tower.report(tower.event(0)))
    tower.went(first)
    assert batches(tower.report(tower.event(1))) == [], "the limit"
    tower.traits = GroupingTraits(urgent=True)
    tower.look(1)
    (batch,) = batches(tower.driver.wait(0))
    assert (batch.urgent, [item.message.id for item in batch.items]) == (True, ["event-1"])
    tower.went(batch)
    assert batches(tower.driver.wait(120)) == [], "once"


def test_what_becomes_urgent_on_its_way_tries_again_on_the_other_way() -> None:
    tower = FanoutTower("mail", most=1)
    (first,) = batches(tower.report(tower.event(0)))
    tower.traits = GroupingTraits(urgent=True)
    tower.look(0)
    assert batches(tower.driver.wait(0)) == []
    tower.went(first, AttemptResult.NOT_SENT)
    (again,) = batches(tower.driver.wait(5))
    assert again.urgent
    tower.went(again)
    assert tower.state() == "done"


def test_an_event_from_the_far_future_or_past_is_refused_and_recorded() -> None:
    tower = FanoutTower("mail")
    now = tower.clock.now()
    for n, time in enumerate((now + 2 * DAY, now - 31 * DAY)):
        message = Message("gate", f"odd-{n}", "alert_event", "home", b"{}", time)
        assert verdicts(tower.report(message)) == [["refused", "stale"][n]]
    assert [refusal.word for refusal in tower.disk.refusals] == ["future", "stale"]
    assert tower.disk.messages == {}


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(Malformed):
        FanoutPolicy(lease=0)


# ── what else the engine asks of it ──────────────────────────────────────────────────────────────


def test_it_says_what_is_open_and_answers_repeats_from_memory() -> None:
    tower = FanoutTower("mail")
    tower.report()
    assert tower.fanout.keys == [tower.event().key]
    assert tower.driver.give(Reachable("mail")) == [], "recipients do not connect"
    verdict = Verdict(VerdictKind.DUPLICATE, State.DONE, Answer())
    assert tower.fanout.repeated(tower.event(), verdict, "c1", 0) == [Reply("c1", tower.event(), verdict)]
    (reply,) = tower.fanout.unable(Arrived(tower.event(), "c1"))
    assert isinstance(reply, Reply)
    assert reply.verdict.retry


def test_an_attempt_that_was_called_off_ends_as_cancelled_and_says_nothing_of_the_recipient() -> None:
    tower = FanoutTower("mail", "sms")
    first, second = batches(tower.report())
    tower.went(first, AttemptResult.CALLED_OFF, "nobody is to be told")
    tower.went(second)
    assert set(tower.states().values()) == {"cancelled", "done"}
    assert batches(tower.report(tower.event(1))), "both are tried as before"


def test_what_expires_while_its_attempt_fails_ends_as_expired() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    tower.clock.advance(2 * 86_400)
    tower.went(batch, AttemptResult.NOT_SENT, "no answer")
    assert tower.states() == {("mail", 0): "expired"}
    assert tower.state() == "expired"


def test_a_clock_that_was_set_moves_the_next_attempt_with_it() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    tower.went(batch, AttemptResult.NOT_SENT, "no answer")
    due = tower.fanout.next_wake()
    assert due is not None
    tower.fanout.shift(HOUR)
    assert tower.fanout.next_wake() == due + HOUR


def test_a_delivery_whose_due_was_moved_forward_is_tried_now() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    tower.went(batch, AttemptResult.NOT_SENT, "no answer", HOUR)
    for ref, one in tower.disk.deliveries.items():
        tower.disk.deliveries[ref] = replace(one, due=tower.clock.now())
    tower.look(0)
    assert len(batches(tower.driver.wait(1))) == 1


def test_an_attempt_goes_on_while_the_ledger_is_read_anew() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    open_ = tower.driver._open()
    tower.driver.carry_out(tower.fanout.restore(open_, (), {}, tower.clock.now()))
    assert batches(tower.driver.wait(60)) == [], "it is under way"
    tower.went(batch)
    assert tower.state() == "done"


def test_what_is_not_wanted_any_more_is_cancelled_after_a_restart() -> None:
    first = FanoutTower("mail")
    first.later = (("sms", HOUR),)
    (batch,) = batches(first.report())
    first.went(batch)
    unwanted = {ref for ref in first.disk.deliveries if ref.recipient == "sms"}
    second = FanoutTower("mail", disk=first.disk, clock=first.clock, unwanted=unwanted)
    assert second.states() == {("mail", 0): "done", ("sms", 1): "cancelled"}
    assert second.state() == "done"


def test_a_repeat_of_what_some_have_heard_says_that_it_was_delivered() -> None:
    tower = FanoutTower("mail", "sms")
    first, _ = batches(tower.report())
    tower.went(first)
    (reply,) = only(Reply, tower.report())
    assert (reply.verdict.kind, reply.verdict.state) == (VerdictKind.DUPLICATE, State.DELIVERED)


def test_an_amendment_that_comes_too_late_is_refused() -> None:
    tower = FanoutTower("mail")
    old = Message("gate", "change-1", "alert_change", "home", b"{}", tower.clock.now() - 40 * DAY)
    (reply,) = only(Reply, tower.driver.give(MachineEvent(Amendment(old, "c1", ()))))
    assert reply.verdict.kind is VerdictKind.STALE


def test_a_delivery_that_was_ended_in_the_ledger_ends_its_message_when_its_attempt_fails() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    for ref, one in tower.disk.deliveries.items():
        tower.disk.deliveries[ref] = replace(one, state=State.CANCELLED)
    (end,) = only(ReportOutcome, tower.went(batch, AttemptResult.NOT_SENT, "no answer"))
    assert end.state is State.CANCELLED
    assert tower.fanout.keys == []


def test_who_asks_nothing_wants_every_delivery_and_cancels_none() -> None:
    asks = FanoutQueries(
        plan=lambda message, now: DeliveryPlan(()),
        traits=lambda message: GroupingTraits(),
        route=lambda recipient: RecipientPolicy(),
        doubt=lambda recipient: DoubtPolicy.RESEND,
    )
    assert asks.wanted(DeliveryRef(b"key", "alert", "mail"))
    assert not asks.cancelled(b"key")


def test_the_fanout_says_which_messages_have_open_deliveries() -> None:
    tower = FanoutTower("mail")
    (batch,) = batches(tower.report())
    key = tower.event().key
    assert (tower.fanout.live, tower.fanout.is_live(key)) == (1, True)
    tower.went(batch)
    assert (tower.fanout.live, tower.fanout.is_live(key)) == (0, False)


def test_two_repeats_that_reach_the_ledger_one_after_the_other_are_both_answered() -> None:
    one = FanoutTower("mail", sole=False)
    one.report()
    other = FanoutTower("mail", disk=one.disk, clock=one.clock, worker="other", sole=False)
    other.fanout._active.begin_anew()  # it has not found the message in the ledger yet
    event = Arrived(other.event(), "first")
    first = other.fanout.handle(event, other.clock.now())
    other.fanout._active.begin_anew()  # a failed commit lets it begin anew meanwhile
    second = other.fanout.handle(Arrived(other.event(), "second"), other.clock.now())
    other.driver.carry_out(second)
    other.driver.carry_out(first)
    replies = only(Reply, other.driver.effects)
    assert [(reply.origin, reply.verdict.kind) for reply in replies] == [
        ("second", VerdictKind.DUPLICATE),
        ("first", VerdictKind.DUPLICATE),
    ]
