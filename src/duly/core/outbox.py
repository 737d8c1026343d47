"""The outbox: sends a message to its recipient until the outcome is known.

The law: the outbox sends a message again with the same id until it is answered, expired or given up, and
every message ends. Repeating is harmless because the recipient's inbox recognises the id. If the recipient is
a local handler that must not run twice, an attempt that a crash interrupted is not repeated: the message ends
as `unknown`.

A message that was transmitted and never answered is `unknown`, not `expired`: it may have taken effect, and a
late answer may still settle it. Without an answer, a message expires or fails only if it had no effect.

A recipient that is working on a message may report that repeatedly; each report restarts the time that it
has. A recipient that does not remember ids is sent each message once; if it stays silent, the message is
`unknown` at the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Struct

from duly.core.ids import SeqId
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import (
    Admit,
    Advance,
    Deliver,
    DeliveryRef,
    Finish,
    Group,
    OpenDelivery,
    Postpone,
    RaiseMark,
    Results,
    Take,
    Withdraw,
)
from duly.core.retry import COMMAND, RetryPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    AttemptFailed,
    CancelMessages,
    DeliveriesFound,
    Effect,
    Ended,
    Event,
    MachineEvent,
    NumberRefused,
    Origin,
    Reachable,
    Received,
    Reply,
    ReportOutcome,
    Step,
    TimesLowered,
    Todo,
    Transmit,
    Unreachable,
)
from duly.core.transmissions import Transmission, Transmissions
from duly.core.units import FOREVER, SECOND
from duly.errors import Malformed

REFUSED: Final = 2
TIMED_OUT: Final = 4
NOT_ALLOWED: Final = 5
"""The codes of answers that the outbox itself makes; the gateway's devices use the same codes."""


_DONE: Final = State.DONE
TOOK_EFFECT: Final = frozenset({State.DONE, State.UNKNOWN})
"""The final states of messages that took effect, or may have."""


class OutboxPolicy(Struct, frozen=True):
    """How an outbox repeats, waits and gives up."""

    channel: str
    """the name of this outbox's deliveries in the ledger"""
    resend: RetryPolicy | None = COMMAND
    """when to send again without an answer; None for a local handler, whose silence means that it works"""
    retry: RetryPolicy = RetryPolicy.never()
    """when to try again after an `AttemptFailed`"""
    patience: int = 10 * SECOND
    """the time from the first transmission, or from the receipt, until the message ends as unknown; `FOREVER`
    for a local handler"""
    beyond_expiry: bool = False
    """patience starts at the message's expiry, if it has one: the recipient may wait that long itself"""
    quiet: bool = False
    """a message that the recipient has acknowledged is sent again only when the recipient reconnects"""
    remember: int = FOREVER
    """how long a sender remembers a message, from now or from the message's expiry if that is later"""

    def __post_init__(self) -> None:
        if not self.channel:
            raise Malformed("an outbox needs a channel name")
        if self.patience <= 0:
            raise Malformed("patience must be a length of time greater than 0")


def always(_: Message) -> bool:
    """Return True for every message: the default of `repeatable`."""
    return True


def never(_: Message) -> bool:
    """Return False for every message: the default of `once`."""
    return False


def no_time(_: Message) -> int:
    """Return 0 for every message, which has no time limit of its own: the default of `patience`."""
    return 0


def _no_effects(_: Message) -> tuple[Effect, ...]:
    return ()


def _no_writes(_: Message) -> Group:
    return ()


def _forgotten(_: Message, __: int) -> list[Todo]:
    return []


def _report(message: Message, state: State, answer: Answer, now: int) -> list[Todo]:
    return [ReportOutcome(message.key, state, answer, recipient=message.recipient)]


class Outbox:
    """The sender's machine.

    `repeatable(message)` returns whether an attempt that a crash interrupted may be started again. `ended` is
    called for every message that ends, after the commit; `lost` for every message that another worker has
    taken over or ended. `minted` names the mark that keeps the last id sent, for a sender that mints
    `SeqId`s: the mark is committed with the message, so a restart never mints an id that was sent before.
    `once(message)` returns whether its recipient is sent each message only once; `patience(message)` returns
    the message's own time limit, or 0. `fails(message)` returns the writes that are committed when a message
    ends without effect; `unstored(message)` returns the effects to perform if its next attempt cannot be
    committed.
    """

    def __init__(
        self,
        policy: OutboxPolicy,
        worker: str,
        *,
        repeatable: Callable[[Message], bool] = always,
        ended: Callable[[Message, State, Answer, int], list[Todo]] = _report,
        lost: Callable[[Message, int], list[Todo]] = _forgotten,
        minted: str = "",
        once: Callable[[Message], bool] = never,
        patience: Callable[[Message], int] = no_time,
        fails: Callable[[Message], Group] = _no_writes,
        unstored: Callable[[Message], tuple[Effect, ...]] = _no_effects,
    ) -> None:
        self._fails = fails
        self._unstored = unstored
        self._minted = minted
        self.policy = policy
        self.worker = worker
        self._repeatable = repeatable
        self._ended = ended
        self._lost = lost
        self.transmissions = Transmissions(policy, once, patience)

    def __len__(self) -> int:
        return len(self.transmissions)

    @property
    def channel(self) -> str:
        """The name of this outbox's deliveries in the ledger."""
        return self.policy.channel

    # ── a sender of its own ──────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: int) -> list[Todo]:
        """Handle an event; return what to commit and what to do."""
        match event:
            case Arrived(message=message, origin=origin):
                return [self._send(message, origin, now)]
            case Received(key=key):
                return self.received(key, now)
            case Answered():
                return self.answered(event, now)
            case AttemptFailed(key=key, attempt=attempt, reason=reason):
                return self.failed(key, attempt, reason, now)
            case Reachable(recipient=recipient):
                return self.reached(recipient, now)
            case Unreachable() | NumberRefused() | TimesLowered() | MachineEvent() | CancelMessages():
                return []
            case DeliveriesFound(open_=open_):  # pragma: no branch
                return [todo for item in open_ for todo in self.resume(item, now)]

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        """Answer a repeat of an ended message with the verdict that memory holds."""
        return [Reply(origin, message, verdict)]

    def unable(self, event: Event) -> list[Effect]:
        """Return the replies to an event that cannot be stored now."""
        return unable(event)

    def _send(self, message: Message, origin: Origin, now: int) -> Step:
        def done(results: Results, now: int) -> list[Todo]:
            verdict = results.of(admit)
            todo: list[Todo] = [Reply(origin, message, verdict)]
            return [*todo, self.launched(message, 1, -1, now)] if verdict.fresh else todo

        then: Group = (self.launch(message, now),)
        if self._minted:
            # An id of another form was not minted here, and does not move the mark.
            with suppress(Malformed):
                last = SeqId.parse(message.id)
                then = (*then, RaiseMark(self._minted, last.n, last.ms))
        until = min(FOREVER, max(now, message.expires) + self.policy.remember)
        admit = Admit(message, until, now, State.SENT, then)
        return Step((admit,), done, (Reply(origin, message, UNABLE),))

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages under way."""
        return list(self.transmissions)

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        """Rebuild from the ledger: continue every message that has not ended."""
        before = self.transmissions.take_all()
        todo: list[Todo] = [ReportOutcome(end.key, end.state, end.answer) for end in ended]
        for item in open_:
            todo += self._resume(item, before.get(item.message.key), now)
        return todo

    # ── building blocks for an inbox ─────────────────────────────────────────────────────────────

    def ref(self, message: Message) -> DeliveryRef:
        """Return the reference of a message's delivery."""
        return DeliveryRef(message.key, self.policy.channel, message.recipient)

    def book(self, message: Message) -> Deliver:
        """Return the write that creates the delivery of a message whose turn has not come."""
        return Deliver(self.ref(message), FOREVER, message.expires)

    def launch(self, message: Message, now: int) -> Deliver:
        """Return the write that creates the delivery of a message that starts at once."""
        return Deliver(
            self.ref(message), self.transmissions.next_try(message, 1, now), message.expires, 1, self.worker
        )

    def relaunch(self, message: Message, attempt: int, now: int, then: Group = ()) -> Take:
        """Return the write that starts the attempt after `attempt`, and writes `then` if it does."""
        next_try = self.transmissions.next_try(message, attempt + 1, now)
        return Take(self.ref(message), attempt, self.worker, next_try, then)

    def launched(self, message: Message, attempt: int, after: int, now: int) -> Transmit:
        """Track an attempt that was committed, and return its transmission."""
        one = self.transmissions.transmitted(message, attempt, after, now)
        return Transmit(message, attempt, one.after, attempt > 1)

    def resume(self, item: OpenDelivery, now: int) -> list[Todo]:
        """Take over a delivery that another worker began; do nothing if a newer attempt is under way here."""
        known = self.transmissions.get(item.message.key)
        if known is not None and known.attempt >= item.delivery.attempt:
            return []
        return self._resume(item, known, now)

    def _resume(self, item: OpenDelivery, known: Transmission | None, now: int) -> list[Todo]:
        message, delivery, under_way = item.message, item.delivery, self.transmissions
        ours = delivery.worker == self.worker
        begun = known is not None and known.begun and known.attempt == delivery.attempt
        if known is not None and begun and ours and self.policy.resend is None:
            # The local handler is working on the message; its answer is still to come.
            known.resting = False
            under_way.keep(known)
            return []
        one = under_way.begin(message, delivery.attempt, known.after if known else -1, now)
        under_way.cancel(one)
        one.received = item.state is State.DELIVERED
        one.resting = delivery.state is State.ACCEPTED
        if one.resting and delivery.due > now:
            under_way.schedule(one, delivery.due)
            return []
        if (begun or not ours) and not one.resting and under_way.is_sent_once(message):
            one.begun = True  # it may have been sent, and must not be sent twice
            under_way.schedule(one, FOREVER)
            return []
        # An attempt of this worker that is not in memory was committed but never begun.
        if one.resting or ours or self._repeatable(message):
            return self._try_again(one, now)
        return self._end(one, _unanswered(one, State.UNKNOWN, CRASHED, delivery.attempt), now)

    # ── what the recipient says ──────────────────────────────────────────────────────────────────

    def reached(self, recipient: str, now: int) -> list[Todo]:
        """Send again at once, in order, the messages that a newly connected recipient has not answered; an
        empty name means every recipient. Their tries are counted from zero."""
        if self.policy.resend is None:
            return []
        again: list[Todo] = []
        for one in self.transmissions.to(recipient):
            if one.begun and not self.transmissions.is_sent_once(one.message):
                one.tries = 1
                self.transmissions.repeat_later(one, now)
                again.append(Transmit(one.message, one.attempt, one.after, again=True))
        return again

    def received(self, key: bytes, now: int) -> list[Todo]:
        """Record that the recipient has a message, or still works on it; its time limit starts again."""
        one = self.transmissions.get(key)
        if one is None:
            return []
        self.transmissions.be_patient(one, now)
        self.transmissions.schedule(one, FOREVER if self.policy.quiet else one.next_try)
        if one.received:
            return []
        one.received = True
        return [Step((Advance(key, State.DELIVERED, now),), _nothing)]

    def answered(self, event: Answered, now: int) -> list[Todo]:
        """End a message with the recipient's answer. A late answer settles an `unknown`."""
        key = event.key
        one = self.transmissions.get(key)
        if one is not None:
            return [] if event.by and event.by != one.message.recipient else self._end(one, event, now)
        state, answer = event.state, event.answer

        def done(results: Results, now: int) -> list[Todo]:
            settled = results.of(advance).moved
            return [ReportOutcome(key, state, answer, recipient=event.by)] if settled else []

        stored = answer if event.keep else Answer(answer.code, b"", answer.reason)
        # The message is not under way here. The answer may settle an `unknown`, or end a message that another
        # worker has; otherwise the first end stands.
        advance = Advance(key, state, now, stored)
        end: Group = (advance,)
        if event.by:
            end = (
                advance,
                Finish(DeliveryRef(key, self.policy.channel, event.by), None, state, answer.reason),
            )
        return [Step(end, done)]

    def failed(self, key: bytes, attempt: int, reason: str, now: int) -> list[Todo]:
        """Postpone a message whose attempt failed without effect, or end it if that was the last attempt."""
        one = self.transmissions.get(key)
        if one is None or one.attempt != attempt or one.resting:
            return []
        delay = self.policy.retry.delay(attempt, key)
        if delay is None:
            return self._end(one, _unanswered(one, State.FAILED, Answer(1, b"", reason), attempt), now)
        one.resting = True
        self.transmissions.schedule(one, now + delay)
        return [Step((Postpone(self.ref(one.message), attempt, now + delay, reason),), _nothing)]

    def given_up(self, key: bytes, reason: str, now: int) -> list[Todo]:
        """End a message under way as unknown, without waiting for its answer; a late answer may settle it."""
        one = self.transmissions.get(key)
        unknown = Answer(TIMED_OUT, b"", f"{reason}; whether it took effect is not known")
        return [] if one is None else self._end(one, Answered(key, State.UNKNOWN, unknown), now)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Todo]:
        """Repeat, expire or give up the messages that are due."""
        todo: list[Todo] = []
        for one in self.transmissions.due(now):
            if one.resting and now >= self.transmissions.expiry(one):
                todo += self._end(one, _unanswered(one, State.EXPIRED, EXPIRED, one.attempt), now)
            elif now >= self.transmissions.deadline(one):
                todo += self._end(one, _unanswered(one, State.UNKNOWN, SILENT, one.attempt), now)
            else:
                todo += self._try_again(one, now)
        return todo

    def next_wake(self) -> int | None:
        """Return when `wake` has something to do, or None if no timer is set."""
        return self.transmissions.next_wake()

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: timers keep their length."""
        self.transmissions.shift(by)

    def _try_again(self, one: Transmission, now: int) -> list[Todo]:
        attempt = one.attempt
        if not one.resting and self.transmissions.has_no_more_tries(one):
            self.transmissions.schedule(one, FOREVER)
            return []

        def done(results: Results, now: int) -> list[Todo]:
            if results.of(take):
                return [self.launched(one.message, attempt + 1, one.after, now)]
            return self._give_away(one, attempt, now)

        self.transmissions.cancel(one)
        take = self.relaunch(one.message, attempt, now)
        return [Step((take,), done, self._unstored(one.message))]

    def _end(self, one: Transmission, end: Answered, now: int) -> list[Todo]:
        message, state, answer = one.message, end.state, end.answer
        stored = answer if end.keep else Answer(answer.code, b"", answer.reason)
        last = Advance(message.key, state, now, stored) if end.burn else Withdraw(message.key)
        then: Group = (last, *end.effects) if end.effects else (last,)
        if state not in TOOK_EFFECT:
            then += self._fails(message)
        # That it was done at the first attempt is what the message itself says.
        kept = state is not _DONE or one.attempt != 1
        finish = Finish(self.ref(message), end.attempt, state, answer.reason, then, kept=kept)
        return [Step((finish,), partial(self._finished, one, finish, answer))]

    def _finished(
        self, one: Transmission, finish: Finish, answer: Answer, results: Results, now: int
    ) -> list[Todo]:
        if not results.of(finish):
            return self._give_away(one, finish.attempt, now)
        message = one.message
        self.transmissions.remove(message.key)
        return self._ended(message, finish.state, answer, now)

    def _give_away(self, one: Transmission, attempt: int | None, now: int) -> list[Todo]:
        """Handle a write that was refused because its attempt is not the newest. Unless a newer attempt is
        under way here or the message has ended here, another worker has taken over or ended the message, and
        it is dropped here."""
        message = one.message
        if self.transmissions.get(message.key) is not one or attempt not in (None, one.attempt):
            return []
        self.transmissions.remove(message.key)
        return self._lost(message, now)


def heard(key: bytes, verdict: Verdict) -> Event | None:
    """Translate the verdict of a recipient's inbox into an event for the sender's outbox.

    `stale` is not a refusal for a sender that sends a message again: an earlier transmission may have taken
    effect and been forgotten since, so the message is `unknown`.
    """
    match verdict.kind:
        case VerdictKind.FRESH:
            return Received(key)
        case VerdictKind.DUPLICATE if verdict.state is not None and verdict.state.terminal:
            return Answered(key, verdict.state, verdict.answer or Answer())
        case VerdictKind.DUPLICATE:
            return Received(key)
        case VerdictKind.STALE:
            return Answered(key, State.UNKNOWN, Answer(REFUSED, b"", verdict.reason))
        case VerdictKind.EXPIRED:
            return Answered(key, State.EXPIRED, Answer(REFUSED, b"", verdict.reason))
        case VerdictKind.CONFLICT | VerdictKind.REFUSED:  # pragma: no branch
            return (
                None if verdict.retry else Answered(key, State.FAILED, Answer(REFUSED, b"", verdict.reason))
            )


def unable(event: Event) -> list[Effect]:
    """Return the replies to an event that cannot be stored now. Only an arriving message gets one: a
    recipient repeats its answer when the message is sent again."""
    return [Reply(event.origin, event.message, UNABLE)] if isinstance(event, Arrived) else []


def _unanswered(one: Transmission, state: State, answer: Answer, attempt: int) -> Answered:
    """Return the end of a message that its recipient did not answer."""
    return Answered(one.message.key, state, answer, attempt)


def _nothing(_: Results, __: int) -> list[Todo]:
    return []


CRASHED: Final = Answer(TIMED_OUT, b"", "we stopped in the middle of it; whether it took effect is not known")
SILENT: Final = Answer(
    TIMED_OUT, b"", "the recipient did not answer in time; whether it took effect is not known"
)
EXPIRED: Final = Answer(TIMED_OUT, b"", "it expired before it could be done")
UNABLE: Final = Verdict(
    VerdictKind.REFUSED,
    reason="it was not stored just now, or that is not known; send it again with the same id, which is safe",
    retry=True,
)
"""The reply when a commit failed. It does not say that nothing was stored: a commit whose answer was lost may
have reached the ledger."""
