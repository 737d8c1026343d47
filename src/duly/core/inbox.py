"""The inbox: deduplicates messages, orders them, runs each once, and remembers the answer.

The law: a message is admitted, ordered and started in one atomic step, and no reply goes out before the
commit. A repeat never starts anything: it gets the state and the answer of the first message. While the first
is under way, the origin of the repeat is added to those that get its outcome.

The outbox runs a message: it hands the message to a device (the hub) or to a local handler (a receiver). The
inbox ends the message once and reports the outcome to every origin that asked. Where hubs share a ledger, a
message for a recipient that is not connected here is only stored: the hub of that recipient finds it in the
ledger, orders it and runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from duly.core import horizon as horizons
from duly.core.backlog import Backlog
from duly.core.horizon import Horizon
from duly.core.lane import Move, Release, Supersede
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import (
    Admit,
    Advance,
    CheckItem,
    Finish,
    Group,
    OpenDelivery,
    RaiseMark,
    Recall,
    Results,
    Write,
)
from duly.core.ordering import LATE, LanePolicy, Lanes, in_senders_order
from duly.core.outbox import (
    EXPIRED,
    NOT_ALLOWED,
    TIMED_OUT,
    TOOK_EFFECT,
    UNABLE,
    Outbox,
    OutboxPolicy,
    always,
    never,
    no_time,
    unable,
)
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
    Unreachable,
    once_each,
)
from duly.core.timers import Timers
from duly.core.units import FOREVER, MS

_ACCEPTED: Final = State.ACCEPTED  # reading a member from its class takes nine times as long
_SENT: Final = State.SENT
_SUPERSEDED: Final = State.SUPERSEDED
_FRESH: Final = VerdictKind.FRESH


class _Live(Struct, eq=False, gc=False):
    """A message that is being admitted, or was admitted and has not ended."""

    message: Message
    origins: list[Origin]  # one for each copy, until the message is stored
    committed: bool
    away: bool = False
    """another hub runs the message as soon as it is stored"""
    given: tuple[CheckItem, ...] = ()
    """conditions that must hold when the message is admitted"""


def _same_horizon(_: str) -> Horizon:
    return horizons.DEFAULT


def _welcome(_: Arrived, __: int) -> Verdict | None:
    return None


def _allow(_: Message) -> str | None:
    return None


class Inbox:
    """The receiver's machine.

    `horizon(kind)` and `repeatable(message)` are the application's policies. `refuse(event, now)` may refuse
    a new message; a repeat of an accepted message is still answered. `shared`: other workers serve the same
    channel, each the recipients that it can reach. `adopt`: if a waiting message that another worker stored
    also arrives here, this inbox starts it, so that later messages do not overtake it. `permit(message)` is
    called when a message that waited gets its turn; it returns why the message may no longer be handed over,
    or None. `minted` names the mark that keeps the last id of a local sender that mints `SeqId`s. `backlog`
    counts the messages that wait.
    """

    def __init__(
        self,
        policy: OutboxPolicy,
        worker: str,
        *,
        lanes: LanePolicy | None = None,
        horizon: Callable[[str], Horizon] = _same_horizon,
        repeatable: Callable[[Message], bool] = always,
        refuse: Callable[[Arrived, int], Verdict | None] = _welcome,
        permit: Callable[[Message], str | None] = _allow,
        shared: bool = False,
        adopt: bool = False,
        minted: str = "",
        backlog: Backlog | None = None,
        once: Callable[[Message], bool] = never,
        patience: Callable[[Message], int] = no_time,
    ) -> None:
        self._refuse = refuse
        self._permit = permit
        self._minted = minted
        self.backlog = Backlog() if backlog is None else backlog
        self._shared = shared
        self._adopt = adopt
        self.outbox = Outbox(
            policy, worker, repeatable=repeatable, ended=self._ended, lost=self._lost,
            once=once, patience=patience, fails=self._step_back,
        )  # fmt: skip
        self._lane_policy = lanes or LanePolicy()
        self.lanes = Lanes(self._lane_policy)
        self._horizon = horizon
        self._live: dict[bytes, _Live] = {}
        self._expiries = Timers[bytes]()

    @property
    def channel(self) -> str:
        """The name of this inbox's deliveries in the ledger."""
        return self.outbox.channel

    @property
    def live(self) -> int:
        """The number of messages that have not ended; apart from bounded caches, only they use memory."""
        return len(self._live)

    def is_live(self, key: bytes) -> bool:
        """Return whether the message with this key is here and has not ended."""
        return key in self._live

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: int) -> list[Todo]:
        """Handle an event; return what to commit and what to do."""
        if type(event) is Arrived:  # nearly all events are of these two types
            return self.receive(event, now)
        if type(event) is Answered:
            return self.outbox.answered(event, now)
        match event:
            case Arrived():
                return self.receive(event, now)
            case Reachable(recipient=recipient):
                again = self.outbox.reached(recipient, now)
                return again + self._move_all(self.lanes.reach(recipient, now), now)
            case Unreachable(recipient=recipient):
                if self._shared:
                    self._forget(recipient)
                else:
                    self.lanes.lose(recipient)
                return []
            case DeliveriesFound(open_=open_, marks=marks):
                self.lanes.learn(marks)
                return [todo for item in open_ for todo in self._find(item, now)]
            case Received(key=key):
                message = self.outbox.transmissions.message(key)
                todo = self.outbox.received(key, now)
                if message is not None:
                    todo += self._move_all(self.lanes.acknowledged(message, now), now)
                return todo
            case CancelMessages():
                return self._cancel(event, now)
            case Answered() | AttemptFailed():
                return self.outbox.handle(event, now)
            case TimesLowered(limit=limit):
                self.lanes.lower(limit)
                return []
            case NumberRefused(scope=scope, n=n, made=made):
                return self._move_all(self.lanes.arrived(scope, n, made, now), now)
            case MachineEvent():  # pragma: no branch
                return []

    def receive(self, event: Arrived, now: int) -> list[Todo]:
        """Admit a new message, attach a repeat to the message it repeats, or refuse."""
        message = event.message
        live = self._live.get(message.key)
        if live is not None and live.message.fingerprint == message.fingerprint:
            return self._attach(live, event.origin)
        horizon = self._horizon(message.kind)
        refusal = horizons.judge(message, horizon, now) or self._refuse(event, now)
        if refusal is not None or live is not None:
            return [_recall(message, refusal or UNABLE, event.origin, now), *self._count(message, now)]
        if self._shared and message.recipient not in self.lanes.reachable:
            return self._leave(event, horizon, now)
        live = self._live[message.key] = _Live(message, [event.origin], False, False, event.given)
        moves = self.lanes.offer(message, now)
        if not moves:
            self._wait(message)
            return [self._admit(live, None, horizon, now)]
        if len(moves) == 1 and moves[0].message is message:
            return [self._admit(live, moves[0], horizon, now)]
        todo: list[Todo] = []
        own: Move | None = None
        for move in moves:
            if move.message is message:
                own = move
                # The messages are committed and started in the order of the moves.
                todo.append(self._admit(live, move, horizon, now))
            else:
                todo += self._move_all([move], now)
        if own is None:
            todo.append(self._admit(live, None, horizon, now))
            self._wait(message)
        return todo

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        """Answer a repeat of an ended message with the verdict that memory holds."""
        return [Reply(origin, message, verdict), *self._count(message, now)]

    def unable(self, event: Event) -> list[Effect]:
        """Return the replies to an event that cannot be stored now."""
        return unable(event)

    def wake(self, now: int) -> list[Todo]:
        """Resend, release and expire the messages that are due."""
        todo = self.outbox.wake(now)
        todo += self._move_all(self.lanes.wake(now), now)
        for key in self._expiries.due(now):
            live = self._live.get(key)
            if live is not None and self.outbox.transmissions.state(key) is None:
                todo.append(self._finish(live.message, State.EXPIRED, EXPIRED, now))
        return todo

    def next_wake(self) -> int | None:
        """Return when `wake` has something to do, or None if no timer is set."""
        wake, gap = self.outbox.next_wake(), self.lanes.next_wake()
        if gap is not None and (wake is None or gap < wake):
            wake = gap
        expiry = self._expiries.next_wake()
        if expiry is not None and (wake is None or expiry < wake):
            wake = expiry
        return wake

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: timers keep their length."""
        self.outbox.shift(by)
        self.lanes.shift(by)
        self._expiries.shift(by)

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages that have not ended here."""
        return list(self._live)

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        """Rebuild from the ledger: continue started messages, queue waiting ones, report those that ended."""
        before, self._live = self._live, {}
        reachable = self.lanes.reachable
        self.lanes = Lanes(self._lane_policy, marks)
        self.lanes.reachable = reachable
        self._expiries.clear()
        self.backlog.clear()
        todo: list[Todo] = []
        waiting: list[Message] = []
        started: list[OpenDelivery] = []
        for item in in_senders_order(open_):
            key = item.message.key
            listening = once_each(before[key].origins) if key in before else []
            self._live[key] = _Live(item.message, listening, committed=True)
            if item.delivery.attempt:
                self.lanes.occupy(item.message)
                started.append(item)
            else:
                waiting.append(item.message)
        todo += self.outbox.restore(started, (), {}, now)
        for end in ended:
            old = before[end.key]
            asked, to = tuple(once_each(old.origins)), old.message.recipient
            todo.append(ReportOutcome(end.key, end.state, end.answer, asked, to))
        for message in waiting:
            todo += self._queue(message, now)
        return todo

    def _queue(self, message: Message, now: int) -> list[Todo]:
        """Put a stored message into its lane."""
        if message.expires and message.expires <= now:
            return [self._finish(message, State.EXPIRED, EXPIRED, now), *self._count(message, now)]
        self._wait(message)
        todo = self._move_all(self.lanes.offer(message, now), now)
        return todo + self._move_all(self.lanes.catch_up(message), now)

    def _wait(self, message: Message) -> None:
        """Count a message that waits for its turn, and set the timer of its expiry."""
        self.backlog.add(message.key, message.scope, message.recipient, len(message.body))
        if message.expires:
            self._expiries.set(message.key, FOREVER, until=message.expires)

    def _stop_waiting(self, key: bytes) -> None:
        """Stop counting a message and cancel its expiry; harmless if it does not wait."""
        self.backlog.remove(key)
        self._expiries.cancel(key)

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def _attach(self, live: _Live, origin: Origin) -> list[Todo]:
        if not live.committed:
            live.origins.append(origin)
            return []  # `_admitted` replies to each copy once the message is stored
        if origin not in live.origins:
            live.origins.append(origin)
        state = self.outbox.transmissions.state(live.message.key) or State.ACCEPTED
        return [Reply(origin, live.message, Verdict(VerdictKind.DUPLICATE, state))]

    def _count(self, message: Message, now: int) -> list[Todo]:
        """Note that a refused number has arrived, so that no message waits for it."""
        if message.order is None or message.order.n is None or message.order.after is not None:
            return []
        return self._move_all(self.lanes.arrived(message.scope, message.order.n, message.made, now), now)

    def _admit(self, live: _Live, move: Move | None, horizon: Horizon, now: int) -> Step:
        message = live.message
        state = _ACCEPTED
        raised: RaiseMark | None = None
        then: Group
        if type(move) is Release:
            # The message is stored as sent; the mark changes that to superseded if it is late.
            state = _SENT
            then = (self.outbox.launch(message, now),)
            if move.mark:
                late = Advance(message.key, _SUPERSEDED, now, _TOO_LATE)
                raised = RaiseMark(move.mark, move.n, move.ms, then, (late,))
                then = (raised,)
        elif type(move) is Supersede:
            then = (_supersede(message, move.reason, now),)
        else:
            then = (self.outbox.book(message),)
        if self._minted and message.order is not None and message.order.n is not None:
            then = (*then, RaiseMark(self._minted, message.order.n, message.made // MS))

        adopt = self._start(move, now) if self._adopt and type(move) is Release else None
        otherwise: Group = () if adopt is None else adopt.writes
        until = horizons.remember_until(message, horizon)
        admit = Admit(message, until, now, state, then, otherwise=otherwise)
        first: Write = admit
        if live.given:
            refused = (Recall(message, REVOKED, now),)
            for given in reversed(live.given):
                first = CheckItem(given.bucket, given.name, given.body, (first,), refused)
        done = partial(self._admitted, live, move, admit, raised, adopt)
        return Step((first,), done, (Reply(live.origins[0], message, UNABLE),))

    def _admitted(
        self,
        live: _Live,
        move: Move | None,
        admit: Admit,
        raised: RaiseMark | None,
        adopt: Step | None,
        results: Results,
        now: int,
    ) -> list[Todo]:
        message, origins = live.message, live.origins
        # If a condition did not hold, a `Recall` ran instead of the admission.
        recalled = results.first(Recall) if live.given else None
        verdict = recalled or results.of(admit)
        if verdict.kind is not _FRESH:
            if verdict.kind is not VerdictKind.DUPLICATE or verdict.state is not State.ACCEPTED:
                return self._not_fresh(live, verdict, now)
            if not self._adopt or recalled is not None or live.away or (adopt is None and move is not None):
                return self._not_fresh(live, verdict, now)
            live.committed = True
            live.origins = once_each(origins)
            told = [Reply(origin, message, verdict) for origin in origins]
            return [*told, *(() if adopt is None else adopt.done(results, now))]
        live.committed = True
        if live.away:
            self._live.pop(message.key, None)  # the backlog counts it until its end is known
        todo: list[Todo] = [Reply(origins[0], message, verdict)]
        if type(move) is Release and (raised is None or results.of(raised)):
            here = _SENT
            todo.append(self.outbox.launched(message, 1, move.after, now))
        elif move is not None:
            here = _SUPERSEDED
            todo += self._superseded(message, getattr(move, "reason", LATE), now)
        else:
            here = _ACCEPTED
        if len(origins) > 1:
            again = Verdict(VerdictKind.DUPLICATE, here)
            todo[1:1] = [Reply(origin, message, again) for origin in origins[1:]]
            live.origins = once_each(origins)
        return todo

    def _not_fresh(self, live: _Live, verdict: Verdict, now: int) -> list[Todo]:
        message = live.message
        if self._live.get(message.key) is live:
            del self._live[message.key]
            self._stop_waiting(message.key)
        todo: list[Todo] = [Reply(origin, message, verdict) for origin in live.origins]
        return todo + self._next(message, now, counts=False)

    # ── other hubs ───────────────────────────────────────────────────────────────────────────────

    def _leave(self, event: Arrived, horizon: Horizon, now: int) -> list[Todo]:
        """Store a message for a recipient that is not connected here."""
        message, moves = self.lanes.leave(event.message, now)
        self.backlog.add(message.key, message.scope, message.recipient, len(message.body))
        live = self._live[message.key] = _Live(message, [event.origin], False, True, event.given)
        return [self._admit(live, None, horizon, now), *self._move_all(moves, now)]

    def _find(self, item: OpenDelivery, now: int) -> list[Todo]:
        """Take over a delivery that another hub left in the ledger."""
        message = item.message
        live = self._live.get(message.key)
        if item.delivery.attempt:
            if live is None:
                self._live[message.key] = _Live(message, [], committed=True)
            self.lanes.occupy(message)
            self._stop_waiting(message.key)
            return self.outbox.resume(item, now)
        if live is not None:
            return []
        self._live[message.key] = _Live(message, [], committed=True)
        return self._queue(message, now)

    def _forget(self, recipient: str) -> None:
        """Drop the messages that wait for a recipient that has left: the ledger has them. Messages under way
        stay."""
        self.lanes.forget(recipient)
        for message in self.waiting():
            if message.recipient == recipient:
                del self._live[message.key]
                self._stop_waiting(message.key)

    # ── order ────────────────────────────────────────────────────────────────────────────────────

    def _move_all(self, moves: list[Move], now: int) -> list[Todo]:
        """Start or end stored messages whose turn has come or that were superseded."""
        if not moves:
            return []
        todo: list[Todo] = []
        waiting = deque(moves)
        while waiting:
            move = waiting.popleft()
            live = self._live.get(move.message.key)
            if live is None or live.message is not move.message:
                # The message turned out to be a repeat, or has ended.
                waiting.extend(self.lanes.finished(move.message, now, counts=False))
            else:
                todo += self._move(move, now)
        return todo

    def _move(self, move: Move, now: int) -> list[Todo]:
        message = move.message
        if isinstance(move, Supersede) and move.mark and self._shared:
            # The position of the mark in memory may come from a repeat of this same message.
            move = Release(message, move.mark, move.n, move.ms, -1)
        if isinstance(move, Supersede):
            return [self._finish(message, State.SUPERSEDED, Answer(TIMED_OUT, b"", move.reason), now)]
        if message.expires and message.expires <= now:
            return [self._finish(message, State.EXPIRED, EXPIRED, now)]
        if (reason := self._permit(message)) is not None:
            return [self._finish(message, State.CANCELLED, Answer(NOT_ALLOWED, b"", reason), now)]
        return [self._start(move, now)]

    def _start(self, move: Release, now: int) -> Step:
        """Return the step that starts a stored message, or supersedes it if its mark says that it is late. If
        it does not wait any more, nothing is written: a repeat of a message that failed must not make earlier
        ones late."""
        message = move.message
        start: Group = (Advance(message.key, State.SENT, now),)
        late = Finish(self.outbox.ref(message), 1, State.SUPERSEDED, LATE, (_supersede(message, LATE, now),))
        # A message without order has no mark, and is never late.
        mark = RaiseMark(move.mark, move.n, move.ms, start, (late,)) if move.mark else None
        take = self.outbox.relaunch(message, 0, now, start if mark is None else (mark,))

        def done(results: Results, now: int) -> list[Todo]:
            if not results.of(take):
                return self._lost(message, now)
            if mark is not None and not results.of(mark):
                return self._superseded(message, LATE, now)
            self._stop_waiting(message.key)
            return [self.outbox.launched(message, 1, move.after, now)]

        return Step((take,), done)

    def _finish(self, message: Message, state: State, answer: Answer, now: int) -> Step:
        end = Advance(message.key, state, now, answer)
        finish = Finish(self.outbox.ref(message), 0, state, answer.reason, (end,))
        self.lanes.drop(message)

        def done(results: Results, now: int) -> list[Todo]:
            ended = results.of(finish)
            return self._ended(message, state, answer, now) if ended else self._lost(message, now)

        return Step((finish,), done)

    def _step_back(self, message: Message) -> Group:
        """Return the write that lowers the mark of a failed message to the newest earlier message that
        counts."""
        back = self.lanes.without(message)
        return () if back is None else (RaiseMark(back.mark, back.n, back.ms),)

    def _superseded(self, message: Message, reason: str, now: int) -> list[Todo]:
        return self._ended(message, State.SUPERSEDED, Answer(TIMED_OUT, b"", reason), now)

    def _lost(self, message: Message, now: int) -> list[Todo]:
        """Drop a message that another worker has taken over; do nothing if it has just started here."""
        if self.outbox.transmissions.state(message.key) is not None:
            return []
        self._live.pop(message.key, None)
        self._stop_waiting(message.key)
        return self._next(message, now)

    def _cancel(self, event: CancelMessages, now: int) -> list[Todo]:
        """End messages that wait, here or at another hub; end started ones as well if the event says so."""
        todo: list[Todo] = []
        for message in event.messages:
            if self.outbox.transmissions.state(message.key) is None:
                cancelled = Answer(NOT_ALLOWED, b"", event.reason)
                todo.append(self._finish(message, State.CANCELLED, cancelled, now))
            elif event.started:
                todo += self.outbox.given_up(message.key, event.reason, now)
        return todo

    def waiting(self) -> list[Message]:
        """Return the messages that are stored and wait for their turn."""
        return [
            live.message
            for key, live in self._live.items()
            if live.committed and self.outbox.transmissions.state(key) is None
        ]

    def _next(self, message: Message, now: int, *, counts: bool = True) -> list[Todo]:
        return self._move_all(self.lanes.finished(message, now, counts=counts), now)

    def _ended(self, message: Message, state: State, answer: Answer, now: int) -> list[Todo]:
        key = message.key
        live = self._live.pop(key, None)
        if self.backlog.waiting:
            self._stop_waiting(key)
        origins = () if live is None else tuple(live.origins)
        todo: list[Todo] = [ReportOutcome(key, state, answer, origins, message.recipient)]
        if moves := self.lanes.finished(message, now, counts=state in TOOK_EFFECT):
            todo += self._move_all(moves, now)
        return todo


def _recall(message: Message, otherwise: Verdict, origin: Origin, now: int) -> Step:
    """Return the step that looks up a message that is not admitted, and replies with the verdict."""
    recall = Recall(message, otherwise, now)

    def done(results: Results, now: int) -> list[Todo]:
        return [Reply(origin, message, results.of(recall))]

    return Step((recall,), done, (Reply(origin, message, UNABLE),))


def _supersede(message: Message, reason: str, now: int) -> Advance:
    return Advance(message.key, State.SUPERSEDED, now, Answer(TIMED_OUT, b"", reason))


REVOKED: Final = Verdict(
    VerdictKind.REFUSED,
    reason="you may not do that (any more); ask for a grant, or log in again",
    cause="not_allowed",
)
"""The reply to a sender that lost its permission before its message was admitted."""
_TOO_LATE: Final = Answer(TIMED_OUT, b"", LATE)
