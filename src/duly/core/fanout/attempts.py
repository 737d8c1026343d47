"""What follows an attempt: another attempt, or the end of the delivery. A message ends with its last
delivery.

The laws. The end of a delivery is recorded before anything relies on it. An attempt that was cut off (a crash
between sending and recording, a connection that broke midway) is in doubt, and its channel declares what to
do then: `RESEND` with the same key, since the receiver recognises it; `REPEAT` once, marked as such; `STOP`
and show it. The doubt is recorded before the repeat goes out, so there is never a second repeat. A delivery
that is given up after a doubt is `unknown`, not `failed`.

Where several workers deliver from one ledger, none of them knows alone whether it has ended the last delivery
of a message. A worker that has ended all of them itself reports the outcome. Otherwise it records, together
with the end of its delivery, that the message may be over, and the application asks the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from duly.core.fanout.active_messages import ActiveMessage, ActiveMessages
from duly.core.fanout.plan import (
    CUT_OFF,
    DOUBT,
    NOT_WANTED,
    TELLING,
    AttemptEnded,
    AttemptResult,
    DeliveryPlan,
    DoubtPolicy,
    FanoutCounts,
    GroupingTraits,
    MessageUnsettled,
    correction,
)
from duly.core.fanout.recipient_queue import QueuedDelivery, RecipientPolicy
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Advance, DeliveryRef, Finish, Group, Postpone, Results
from duly.core.outbox import EXPIRED
from duly.core.retry import RetryPolicy
from duly.core.steps import MachineEffect, ReportOutcome, Step, Todo

AT_ONCE: Final = 500
"""The most writes of a large attempt in one commit, so that other commits can come in between."""

Ends: TypeAlias = list[tuple[QueuedDelivery, State, Answer]]


def _always(_: DeliveryRef) -> bool:
    return True


def _never(_: bytes) -> bool:
    return False


def _any(_: Message) -> int:
    return 0


def _nothing(_: Message, __: State) -> Group:
    return ()


def _unnoted(_: bytes) -> Group:
    return ()


class FanoutQueries(Struct, frozen=True):
    """The questions that a fanout asks its application."""

    plan: Callable[[Message, int], DeliveryPlan]
    traits: Callable[[Message], GroupingTraits]
    route: Callable[[str], RecipientPolicy]
    doubt: Callable[[str], DoubtPolicy]
    tries: Callable[[Message], int] = _any
    """the most attempts per delivery; 0: until it expires"""
    wanted: Callable[[DeliveryRef], bool] = _always
    """whether a delivery is still worth trying"""
    cancelled: Callable[[bytes], bool] = _never
    """whether a message was withdrawn, so that a delivery just under way is followed by a correction"""
    notes: Callable[[Message, State], Group] = _nothing
    """writes that are stored together with the end of a message"""
    unsettled: Callable[[bytes], Group] = _unnoted
    """the writes that note that a message may be over, because one of its deliveries has ended"""
    settled: Callable[[bytes], Group] = _unnoted
    """the writes that remove that note"""


class Attempts:
    """Ends or repeats the attempts of one fanout. `sole` means that no other worker delivers from the same
    ledger."""

    def __init__(
        self,
        retry: Callable[[], RetryPolicy],
        active: ActiveMessages,
        counts: FanoutCounts,
        asks: FanoutQueries,
        *,
        sole: bool,
    ) -> None:
        self._retry = retry
        self._active = active
        self._counts = counts
        self._asks = asks
        self._sole = sole

    def ended(self, ended: AttemptEnded, now: int) -> list[Todo]:
        """End or repeat the deliveries of an attempt, depending on its result."""
        batch, result, reason = ended.batch, ended.result, ended.reason
        where = (batch.recipient, batch.urgent)
        queue = self._active.queues[where]
        items = [
            item
            for sent in batch.items
            if (item := self._active.items.get(sent.ref)) is not None
            and item.under_way
            and item.attempt == sent.attempt
        ]
        todo: list[Todo] = []
        if result in (AttemptResult.ARRIVED, AttemptResult.REFUSED):
            # A refusal is an answer too: the recipient can be reached.
            if queue.arrived():
                self._active.queues.hurry(batch.recipient, now)
        elif result is AttemptResult.CALLED_OFF:
            queue.abandoned()
        else:
            queue.failed(now + max(ended.rest, self._delay(items)))
        ends: Ends = []
        for item in items:
            item.under_way = False
            match result:
                case AttemptResult.ARRIVED:
                    self._counts.arrived += 1
                    self._counts.retried_well += item.attempt > 1
                    self._counts.retries_well += item.attempt - 1
                    ends.append((item, State.DONE, Answer()))
                case AttemptResult.REFUSED:
                    ends.append((item, State.FAILED, Answer(1, b"", reason)))
                case AttemptResult.CALLED_OFF:
                    ends.append(given_up(item, State.CANCELLED, reason))
                case AttemptResult.NOT_SENT:
                    todo += self._again(item, reason, ended.rest, now, ends)
                case AttemptResult.IN_DOUBT:  # pragma: no branch
                    todo += self._in_doubt(item, reason, ended.rest, now, ends)
        todo += self.end_all(ends, now)
        self._active.queues.schedule(where)
        return todo

    def _delay(self, items: Sequence[QueuedDelivery]) -> int:
        """Return how long to wait before trying this recipient again."""
        delays = (self._retry().delay(item.attempt, item.salt) for item in items)
        return min((delay for delay in delays if delay is not None), default=self._retry().first)

    def _again(self, item: QueuedDelivery, reason: str, rest: int | None, now: int, ends: Ends) -> list[Todo]:
        """Postpone a delivery whose attempt had no effect, or end it. If `rest` is None it is due at once."""
        if item.in_doubt:
            reason = DOUBT + reason  # this attempt, or an earlier one, may have arrived after all
        item.error = reason
        # Deliveries that went out together are tried again together.
        delay = self._retry().delay(item.attempt, b"" if item.bundle else item.salt)
        if delay is None or 1 <= self._asks.tries(item.message) <= item.attempt:
            ends.append(given_up(item, State.FAILED, f"given up after {_attempts(item.attempt)}: {reason}"))
            return []
        if item.expires and item.expires <= now:
            ends.append(given_up(item, State.EXPIRED, f"{EXPIRED.reason}; the last attempt: {reason}"))
            return []
        if not self._asks.wanted(item.ref):
            ends.append(given_up(item, State.CANCELLED, f"{NOT_WANTED}; the last attempt: {reason}"))
            return []
        item.due = now if rest is None else now + max(delay, rest)
        write = Postpone(item.ref, item.attempt, item.due, reason, item.in_doubt)

        def done(results: Results, now: int) -> list[Todo]:
            if not results.of(write):
                return self.lose(item, now)
            if not item.gone:
                self._active.queues[item.where].add(item)
                self._active.queues.schedule(item.where)
            return []

        return [Step((write,), done)]

    def _in_doubt(
        self, item: QueuedDelivery, reason: str, rest: int | None, now: int, ends: Ends
    ) -> list[Todo]:
        self._counts.in_doubt += 1
        declared = self._asks.doubt(item.ref.recipient)
        if declared is DoubtPolicy.RESEND or (declared is DoubtPolicy.REPEAT and not item.in_doubt):
            item.in_doubt = True
            return self._again(item, reason, rest, now, ends)
        why = "once repeated, and again " if item.in_doubt else ""
        ends.append((item, State.UNKNOWN, Answer(4, b"", f"{why}{DOUBT}{reason}")))
        return []

    def end_all(self, ends: Ends, now: int) -> list[Todo]:
        """End deliveries in groups; the last delivery of a message ends the message."""
        if not ends:
            return []
        some, left = ends[:AT_ONCE], ends[AT_ONCE:]
        writes: list[Finish] = []
        over: dict[bytes, tuple[ActiveMessage, State, Answer]] = {}
        for item, state, answer in some:
            then: Group = ()
            key = item.ref.key
            live = self._active.lives.get(key)
            self._active.strike(item)
            if live is not None:
                first = state is State.DONE and not live.reached
                live.reached |= state is State.DONE
                live.in_doubt |= state is State.UNKNOWN
                if not live.items and not live.shared:
                    how = self._summary(live, state, answer)
                    then = (Advance(key, how[0], now, how[1]), *self._asks.notes(live.message, how[0]))
                    then += self._asks.settled(key) if live.noted else ()
                    over[key] = (live, *how)
                else:
                    then = (Advance(key, State.DELIVERED, now),) if first else ()
                    then += self._note_unsettled(live)
            if (
                self._asks.cancelled(key)
                and state in (State.DONE, State.UNKNOWN)
                and item.ref.kind in TELLING
            ):
                then = (*then, correction(item.ref, now, item.expires))
            self._counts.failed += state is State.FAILED
            writes.append(Finish(item.ref, item.attempt, state, answer.reason, then))

        def done(results: Results, now: int) -> list[Todo]:
            todo: list[Todo] = []
            for write, ended in zip(writes, results.of_each(writes), strict=True):
                if not ended:
                    continue  # fenced: a newer attempt is under way, or the delivery had already ended
                key = write.ref.key
                if key in over:
                    live, state, answer = over[key]
                    todo.append(
                        ReportOutcome(key, state, answer, tuple(live.origins), live.message.recipient)
                    )
                elif key not in self._active.lives:
                    todo.append(MachineEffect(MessageUnsettled(key)))
                if self._asks.cancelled(key):
                    todo.append(MachineEffect(write.ref))
            return [*todo, *self.end_all(left, now)]

        return [Step(tuple(writes), done)]

    def _note_unsettled(self, live: ActiveMessage) -> Group:
        """Return the writes that note that a message may be over. There are none if this worker has claimed
        all its open deliveries."""
        items = self._active.items
        if self._sole or (not live.shared and all(items[ref].under_way for ref in live.items)):
            return ()
        live.noted = True
        return self._asks.unsettled(live.message.key)

    def _summary(self, live: ActiveMessage, state: State, answer: Answer) -> tuple[State, Answer]:
        if live.reached:
            return State.DONE, Answer()
        if live.in_doubt:
            return State.UNKNOWN, answer
        return state, answer

    def cut_off(self, item: QueuedDelivery, now: int) -> list[Todo]:
        """Mark an attempt as in doubt because its worker died before it recorded the end."""
        item.leased = False
        ends: Ends = []
        todo = self._in_doubt(item, CUT_OFF, None, now, ends)
        return todo + self.end_all(ends, now)

    def lose(self, item: QueuedDelivery, now: int) -> list[Todo]:
        """Drop a delivery that has ended in the ledger or belongs to another worker. If it was this worker's
        last delivery of its message, the message ends; where there are other workers, the ledger is asked
        first."""
        live = self._active.lives.get(item.ref.key)
        self._active.strike(item)
        if live is None:
            return []
        live.shared |= not self._sole
        if live.items:
            return []
        if not self._sole:
            return [MachineEffect(MessageUnsettled(live.message.key))]
        end, answer = (State.DONE if live.reached else State.CANCELLED), Answer()

        def done(results: Results, now: int) -> list[Todo]:
            return [ReportOutcome(live.message.key, end, answer, tuple(live.origins), live.message.recipient)]

        return [Step((Advance(live.message.key, end, now, answer),), done)]


def given_up(item: QueuedDelivery, state: State, reason: str) -> tuple[QueuedDelivery, State, Answer]:
    """Return the end of a delivery that is not tried again: `unknown` if an attempt was in doubt."""
    return item, State.UNKNOWN if item.in_doubt else state, Answer(EXPIRED.code, b"", reason)


def _attempts(number: int) -> str:
    """
    >>> _attempts(1), _attempts(2)
    ('1 attempt', '2 attempts')
    """
    return "1 attempt" if number == 1 else f"{number} attempts"
