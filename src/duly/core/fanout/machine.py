"""The fanout: delivers one message to many recipients, once to each, and records the outcome for each.

The laws. A message and its deliveries are committed together, before any reply. A delivery is claimed (an
attempt's number, a lease) before it goes out, and its end is recorded before anything relies on it. A
delivery that may go out at once is created already claimed, in one commit. The message ends with its last
delivery: `done` if a recipient was reached, `failed` if none could be, `unknown` if that is in doubt.

The application's plan says who receives the message, and when. `RecipientQueue` decides what goes out
together, `Attempts` what follows an attempt, and `ActiveMessages` holds the open messages. This module
accepts messages, sends them out, and resumes them after a restart or the death of another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from duly.core import horizon as horizons
from duly.core.fanout.active_messages import ActiveMessage, ActiveMessages
from duly.core.fanout.attempts import AT_ONCE, Attempts, Ends, FanoutQueries, given_up
from duly.core.fanout.plan import (
    NOT_WANTED,
    PLANNED,
    Amendment,
    AttemptEnded,
    BatchItem,
    DeliveriesChanged,
    DeliveryPlan,
    DoubtPolicy,
    FanoutCounts,
    FanoutPolicy,
    GroupingTraits,
    StartAttempt,
)
from duly.core.fanout.recipient_queue import QueuedDelivery, QueueName
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import (
    Admit,
    Advance,
    CheckItem,
    Deliver,
    Delivery,
    DeliveryKind,
    DeliveryRef,
    Group,
    OpenDelivery,
    Recall,
    Results,
    Take,
)
from duly.core.outbox import EXPIRED, UNABLE, unable
from duly.core.steps import (
    Arrived,
    Effect,
    Ended,
    Event,
    MachineEffect,
    MachineEvent,
    Origin,
    Reply,
    ReportOutcome,
    Step,
    Todo,
)

LISTENERS: Final = 16
"""The most senders that are told the outcome of a message they repeated while it was under way."""


_NOTHING_MORE: Final = Answer()
_FRESH: Final = VerdictKind.FRESH
_DONE: Final = State.DONE
_DONE_AT_ONCE: Final = Verdict(_FRESH, _DONE)
"""The verdict on a message that ended as soon as it was stored; its outcome is not reported again."""


class Fanout:
    """The state machine of a fanout. `sole` means that no other worker delivers from the same ledger.

    A message without recipients is done as soon as it is stored. The verdict in its reply says so, and no
    separate outcome is reported.
    """

    def __init__(self, policy: FanoutPolicy, worker: str, asks: FanoutQueries, *, sole: bool = True) -> None:
        self.policy = policy
        self.worker = worker
        self.counts = FanoutCounts()
        self._asks = asks
        self._sole = sole
        self._active = ActiveMessages(asks.route)
        self._seen = 0
        """the time when the last event was handled, before the clock was set"""
        self._set_back = False
        """the clock was set back: what waits for a time of day is planned anew"""
        self._attempts = Attempts(lambda: self.policy.retry, self._active, self.counts, asks, sole=sole)

    @property
    def channel(self) -> str:
        """The name of this fanout's deliveries in the ledger."""
        return self.policy.channel

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages with open deliveries."""
        return [*self._active.lives]

    @property
    def live(self) -> int:
        """The number of messages with open deliveries."""
        return len(self._active.lives)

    def is_live(self, key: bytes) -> bool:
        """Return whether the message with this key has open deliveries."""
        return key in self._active.lives

    def __len__(self) -> int:
        """Return the number of open deliveries."""
        return len(self._active.items)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: int) -> list[Todo]:
        """Handle an event; return what to commit and what to do."""
        self._seen = now
        match event:
            case Arrived():
                return self._receive(event.message, event.origin, now)
            case MachineEvent(what=AttemptEnded() as ended):
                return self._attempts.ended(ended, now)
            case MachineEvent(what=Amendment() as amend):
                return [self._amend(amend, now)]
            case MachineEvent(what=DeliveriesChanged() as changed):
                return self._apply_changes(changed, now)
            case _:
                return []

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        """Answer a repeat of an ended message with the remembered verdict."""
        self.counts.duplicates += 1
        return [Reply(origin, message, verdict)]

    def unable(self, event: Event) -> list[Effect]:
        """Return the replies to an event that cannot be stored at the moment."""
        return unable(event)

    def _receive(self, message: Message, origin: Origin, now: int) -> list[Todo]:
        live = self._active.lives.get(message.key)
        if live is not None and live.message.fingerprint == message.fingerprint:
            self.counts.duplicates += 1
            if not live.committed:
                live.origins.append(origin)
                return []  # it is answered together with the first one, once that is stored
            if len(live.origins) < LISTENERS and origin not in live.origins:
                live.origins.append(origin)
            return [Reply(origin, message, Verdict(VerdictKind.DUPLICATE, self._active.state(live)))]
        refusal = horizons.judge(message, self.policy.horizon, now)
        if refusal is not None or live is not None:
            return [self._recall(message, refusal or UNABLE, origin, now)]
        plan = self._asks.plan(message, now)
        if not plan.deliveries:
            return [self._note(message, plan, origin, now)]
        live = self._active.lives[message.key] = ActiveMessage(message, [origin], committed=False)
        return [self._admit(live, plan, now)]

    def _recall(self, message: Message, otherwise: Verdict, origin: Origin, now: int) -> Step:
        recall = Recall(message, otherwise, now)

        def done(results: Results, now: int) -> list[Todo]:
            return [Reply(origin, message, results.of(recall))]

        return Step((recall,), done, (Reply(origin, message, UNABLE),))

    def _until(self, message: Message, now: int) -> int:
        return max(horizons.remember_until(message, self.policy.horizon), now + self.policy.keep)

    def _note(self, message: Message, plan: DeliveryPlan, origin: Origin, now: int) -> Step:
        """Store a message without recipients, which ends at once."""
        end, answer = plan.end
        plain = answer == _NOTHING_MORE

        def done(results: Results, now: int) -> list[Todo]:
            verdict = results.of(admit)
            if verdict.kind is not _FRESH:
                self.counts.duplicates += 1
                return [Reply(origin, message, verdict)]
            self.counts.accepted += 1
            if plain and end is _DONE:
                return [Reply(origin, message, _DONE_AT_ONCE)]
            return [Reply(origin, message, verdict), ReportOutcome(message.key, end, answer, (origin,))]

        then: Group = () if plain else (Advance(message.key, end, now, answer),)
        then += self._asks.notes(message, end)
        state = end if plain else State.ACCEPTED
        admit = Admit(message, self._until(message, now), now, state, then, listed=True)
        return Step((admit,), done, (Reply(origin, message, UNABLE),))

    def _admit(self, live: ActiveMessage, plan: DeliveryPlan, now: int) -> Step:
        message, traits = live.message, plan.traits
        launched: list[QueuedDelivery] = []
        waiting: list[QueuedDelivery] = []
        writes: list[Deliver] = []
        for one in plan.deliveries:
            ref = DeliveryRef(message.key, self.channel, one.recipient, one.round)
            item = self._item(ref, message, one.due, one.expires, traits)
            item.opens = one.opens
            if self._active.queues[item.where].admits(item, now):
                item.attempt = 1
                launched.append(item)
                writes.append(Deliver(ref, now + self.policy.lease, one.expires, 1, self.worker))
            else:
                waiting.append(item)
                writes.append(Deliver(ref, one.due, one.expires))
        state = State.SENT if launched else State.ACCEPTED
        live.planned = (*launched, *waiting)

        def done(results: Results, now: int) -> list[Todo]:
            live.planned = ()
            verdict = results.of(admit)
            if not verdict.fresh:
                self._not_fresh(live, launched)
                return [Reply(origin, message, verdict) for origin in live.origins]
            live.committed = True
            self.counts.accepted += 1
            todo: list[Todo] = [Reply(live.origins[0], message, verdict)]
            todo += (
                Reply(origin, message, Verdict(VerdictKind.DUPLICATE, state)) for origin in live.origins[1:]
            )
            for item in waiting:
                self._active.enter(live, item)
                self._active.queues[item.where].add(item)
                self._active.queues.schedule(item.where)
            for item in launched:
                self._active.enter(live, item)
                todo.append(self._start([item], item.urgent))
            return todo

        admit = Admit(message, self._until(message, now), now, state, tuple(writes), listed=True)
        failed = tuple(Reply(origin, message, UNABLE) for origin in live.origins)
        return Step((admit,), done, failed)

    def _not_fresh(self, live: ActiveMessage, launched: Iterable[QueuedDelivery]) -> None:
        self.counts.duplicates += 1
        for item in launched:
            self._active.queues[item.where].abandoned()
            self._active.queues.schedule(item.where)
        if self._active.lives.get(live.message.key) is live:
            del self._active.lives[live.message.key]

    def _amend(self, amend: Amendment, now: int) -> Step:
        message, origin = amend.message, amend.origin
        refusal = horizons.judge(message, self.policy.horizon, now)
        if refusal is not None:
            return self._recall(message, refusal, origin, now)

        def done(results: Results, now: int) -> list[Todo]:
            verdict = results.find(admit) or UNABLE
            return [Reply(origin, message, verdict), *([MachineEffect(amend)] if verdict.fresh else [])]

        admit = Admit(message, self._until(message, now), now, State.DONE, amend.writes)
        return Step((_unless_changed(amend, admit),), done, (Reply(origin, message, UNABLE),))

    # ── on the way ───────────────────────────────────────────────────────────────────────────────

    def _item(
        self, ref: DeliveryRef, message: Message, due: int, expires: int, traits: GroupingTraits
    ) -> QueuedDelivery:
        # An urgent delivery, and one that follows up on an earlier one, does not wait for others.
        alone = traits.urgent or ref.kind not in PLANNED
        urgent = traits.urgent or ref.kind is DeliveryKind.RAISED
        return QueuedDelivery(ref, message, due, expires, "" if alone else traits.episode, urgent)

    def _start(self, batch: Sequence[QueuedDelivery], urgent: bool) -> MachineEffect:
        self.counts.batches += 1
        self.counts.attempts += len(batch)
        self.counts.retries += sum(item.attempt > 1 for item in batch)
        marked = self._asks.doubt(batch[0].ref.recipient) is DoubtPolicy.REPEAT
        items = tuple(
            BatchItem(item.ref, item.attempt, item.message, marked and item.in_doubt) for item in batch
        )
        return MachineEffect(StartAttempt(batch[0].ref.recipient, items, urgent))

    def _launch(self, batch: list[QueuedDelivery], where: QueueName, now: int) -> list[Todo]:
        """Claim the deliveries of an attempt, some at a time, and send those that this worker got."""
        if not batch:
            self._active.queues[where].abandoned()
            self._active.queues.schedule(where)
            return []
        ours: list[QueuedDelivery] = []

        def claim(start: int, now: int) -> Step:
            some = batch[start : start + AT_ONCE]
            writes = tuple(
                Take(item.ref, item.attempt, self.worker, now + self.policy.lease) for item in some
            )

            def done(results: Results, now: int) -> list[Todo]:
                todo: list[Todo] = []
                for item, taken in zip(some, results.of_each(writes), strict=True):
                    if taken:
                        item.attempt += 1
                        ours.append(item)
                    else:
                        todo += self._attempts.lose(item, now)
                if start + AT_ONCE < len(batch):
                    return [*todo, claim(start + AT_ONCE, now)]
                if ours:
                    return [*todo, self._start(ours, where[1])]
                self._active.queues[where].abandoned()
                self._active.queues.schedule(where)
                return todo

            return Step(writes, done)

        return [claim(0, now)]

    # ── changed from outside ─────────────────────────────────────────────────────────────────────

    def _apply_changes(self, changed: DeliveriesChanged, now: int) -> list[Todo]:
        still = {one.delivery.ref: one for one in changed.open}
        live = self._active.lives.get(changed.key)
        known = sorted(live.items if live is not None else (), key=lambda ref: (ref.recipient, ref.round))
        todo: list[Todo] = []
        ends: Ends = []
        for ref, one in still.items():
            if ref not in self._active.items:  # before deliveries are dropped: the message is not over yet
                todo += self._take_up(one, now)
        for ref in known:
            item = self._active.items[ref]
            self._hasten(item)
            if item.under_way:
                continue
            if ref not in still:
                todo += self._attempts.lose(item, now)
            elif item.leased:
                todo += self._read_claim_again(item, still[ref].delivery, now)
            elif not self._asks.wanted(ref):
                ends.append(given_up(item, State.CANCELLED, NOT_WANTED))
            elif still[ref].delivery.due < item.due:
                # The ledger has moved its due time forward, so its recipient is tried now.
                item.due = still[ref].delivery.due
                self._active.queues[item.where].add(item)
                self._active.queues.hurry(ref.recipient, now)
        return todo + self._attempts.end_all(ends, now)

    def _read_claim_again(self, item: QueuedDelivery, found: Delivery, now: int) -> list[Todo]:
        """Read a delivery that another worker had claimed from the ledger, and continue: that worker has
        given it back, still has it, or has let its lease expire."""
        item.attempt, item.error, item.in_doubt = found.attempt, found.error, found.in_doubt
        item.due = found.due
        item.leased = found.state is State.SENT
        if item.leased and found.due <= now:
            return self._attempts.cut_off(item, now)
        if not item.leased and not self._asks.wanted(item.ref):
            return self._attempts.end_all([given_up(item, State.CANCELLED, NOT_WANTED)], now)
        self._active.queues[item.where].add(item)
        self._active.queues.schedule(item.where)
        return []

    def _hasten(self, item: QueuedDelivery) -> None:
        """Move a delivery to the urgent queue because its message has become urgent; one that is under way
        moves there with its next attempt."""
        if item.urgent or not self._asks.traits(item.message).urgent:
            return
        if not item.under_way:
            self._active.queues[item.where].drop(item)
            self._active.queues.schedule(item.where)
        item.urgent, item.opens, item.episode, item.bundle = True, 0, "", None
        self._active.set_expiry(item)
        if not item.under_way:
            self._active.queues[item.where].add(item)
            self._active.queues.schedule(item.where)

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        """Start from the ledger: resume open deliveries, and report messages that have ended."""
        before, known = self._active.begin_anew()
        under_way = {ref: item for ref, item in known.items() if item.under_way}
        todo: list[Todo] = [
            ReportOutcome(end.key, end.state, end.answer, tuple(before[end.key].origins)) for end in ended
        ]
        for one in open_:
            old = under_way.get(one.delivery.ref)
            if old is not None and one.delivery.worker == self.worker and old.attempt == one.delivery.attempt:
                # Our own attempt is still under way; its result is yet to come.
                live = self._active.revive(one, before)
                self._active.enter(live, old)
                continue
            todo += self._take_up(one, now, before)
        return todo

    def _take_up(
        self, one: OpenDelivery, now: int, before: Mapping[bytes, ActiveMessage] | None = None
    ) -> list[Todo]:
        """Resume an open delivery from the ledger."""
        message, delivery = one.message, one.delivery
        traits = self._asks.traits(message)
        live = self._active.revive(one, before or {})
        item = self._item(delivery.ref, message, delivery.due, delivery.expires, traits)
        item.attempt, item.error, item.in_doubt = delivery.attempt, delivery.error, delivery.in_doubt
        if item.urgent and 0 < item.expires <= now:
            # The clock was set ahead, or no worker ran for days: it is tried before it is given up.
            item.expires = now + self.policy.retry.cap
        if delivery.state is not State.SENT:
            self._plan_anew(item, now)
        self._active.enter(live, item)
        if delivery.state is State.SENT:
            if self._sole or delivery.due <= now:
                return self._attempts.cut_off(item, now)
            item.leased = True
        elif not self._asks.wanted(item.ref):
            return self._attempts.end_all([given_up(item, State.CANCELLED, NOT_WANTED)], now)
        self._active.queues[item.where].add(item)
        self._active.queues.schedule(item.where)
        return []

    def _plan_anew(self, item: QueuedDelivery, now: int) -> None:
        """Set when a waiting delivery is due. That is never later than if it were planned or postponed now,
        since the clock may have been set back, or another worker's clock may be ahead."""
        if item.due <= now:
            return
        longest = now + self.policy.retry.cap  # the recipient may have asked for a rest
        if item.attempt and item.urgent:
            longest = now + (self.policy.retry.delay(item.attempt, item.salt) or self.policy.retry.cap)
        if not item.attempt:
            place = item.ref.recipient, item.ref.round
            planned = self._asks.plan(item.message, now).deliveries
            found = [one for one in planned if (one.recipient, one.round) == place]
            longest = max((one.due for one in found), default=longest)
            opens = max((one.opens for one in found), default=0)
            item.opens = opens if opens <= item.due else 0
        item.due = min(item.due, longest)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Todo]:
        """Expire the deliveries that are too old, and send those that are due."""
        todo: list[Todo] = []
        late: Ends = []
        self._seen = now
        if self._set_back:
            self._set_back = False
            for item in self._active.closed:
                self._plan_anew(item, now)
                self._active.queues.opened(item)
                self._active.queues.schedule(item.where)
        for item in self._active.expired(now):
            why = f"; the last attempt: {item.error}" if item.error else ""
            late.append(given_up(item, State.EXPIRED, EXPIRED.reason + why))
        todo += self._attempts.end_all(late, now)
        for where, batch in self._active.queues.collect(now):
            claimed = [item for item in batch if item.leased]
            for item in claimed:
                # Its worker may have given it back or claimed it again; the ledger knows.
                item.under_way, item.due = False, now + self.policy.lease
                self._active.queues[where].add(item)
                todo.append(MachineEffect(item.ref))
            todo += self._launch([item for item in batch if item not in claimed], where, now)
        return todo

    def next_wake(self) -> int | None:
        """Return when `wake` has something to do, or None."""
        if self._set_back:
            return 0
        wake, expiry = self._active.queues.next_wake(), self._active.next_expiry()
        if wake is None or expiry is None:
            return expiry if wake is None else wake
        return min(wake, expiry)

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much."""
        self._active.shift(by, self._seen)
        self._set_back |= by < 0 and bool(self._active.closed)


def _unless_changed(amend: Amendment, admit: Admit) -> Admit | CheckItem:
    """Return the write that accepts an amendment only if the item it was derived from has not changed."""
    seen = amend.seen
    if seen is None:
        return admit
    if seen.body is None:
        return CheckItem(seen.bucket, seen.name, otherwise=(admit,))
    return CheckItem(seen.bucket, seen.name, seen.body, then=(admit,))
