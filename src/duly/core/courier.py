"""The courier: brings one message to many recipients, each once, and knows how it ended for each.

The laws. A message and its deliveries are committed together, before anybody is told. A delivery is claimed
(an attempt's number, a lease) before it goes out, and its end is recorded before anything builds on it. What
may go out at once is born claimed: one commit. The message ends when its last delivery has: `done` if
somebody was reached, `failed` if nobody could be, `unknown` if nobody can tell.

An attempt that was cut off (a crash between sending and recording, a connection that broke in the middle) is
in doubt, and its recipient's channel has declared what that means: `RESEND` with the same key, since the
receiver can tell; `REPEAT` once, marked as such; `STOP` and show it. The doubt is written down before the
repeat goes out, so that there is never a second one. To whom and when is the application's plan; with whom
it travels, `Route` decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from duly.core import horizon as horizons
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, Word
from duly.core.outbox import EXPIRED, UNABLE, unable
from duly.core.parcels import (
    CORRECTION,
    CUT_OFF,
    DOUBT,
    NOT_WANTED,
    RAISED,
    Amend,
    Carried,
    Carry,
    Counts,
    CourierPolicy,
    Doubt,
    Fate,
    Live,
    Load,
    Look,
    Plan,
    Traits,
    correction,
)
from duly.core.route import Item, RoutePolicy, Routes, Where
from duly.core.steps import (
    Arrived,
    Effect,
    Ended,
    Event,
    Origin,
    Reply,
    Report,
    Step,
    Tell,
    Todo,
    Told,
)
from duly.core.writes import (
    Admit,
    Advance,
    Deliver,
    Finish,
    Group,
    Open,
    Postpone,
    Recall,
    Ref,
    Results,
    Take,
)

LISTENERS: Final = 16
"""Of those who ask again while it is under way, so many hear how it ended."""

AT_ONCE: Final = 500
"""Writes of a large parcel that are committed together: others want to store something, too."""


_Ends: TypeAlias = list[tuple[Item, State, Answer]]


class Courier:
    """The machine. `plan`, `traits`, `route` and `doubt` are the application's policies. `wanted(ref)` says
    whether a delivery should still be tried; `cancelled(key)` whether a message was taken back, so that what
    was just on its way is followed by a correction."""

    def __init__(
        self,
        policy: CourierPolicy,
        worker: str,
        *,
        plan: Callable[[Message, int], Plan],
        traits: Callable[[Message], Traits],
        route: Callable[[str], RoutePolicy],
        doubt: Callable[[str], Doubt],
        wanted: Callable[[Ref], bool] = lambda ref: True,
        cancelled: Callable[[bytes], bool] = lambda key: False,
        sole: bool = True,
    ) -> None:
        self.policy = policy
        self.worker = worker
        self.counts = Counts()
        self._plan = plan
        self._traits = traits
        self._doubt = doubt
        self._wanted = wanted
        self._cancelled = cancelled
        self._sole = sole
        self._live: dict[bytes, Live] = {}
        self._items: dict[Ref, Item] = {}
        self._routes = Routes(route)
        self._expiries: list[tuple[int, int, Item]] = []
        self._serial = 0

    @property
    def channel(self) -> str:
        return self.policy.channel

    @property
    def keys(self) -> list[bytes]:
        return [*self._live]

    def __len__(self) -> int:
        """How many deliveries are open here."""
        return len(self._items)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: int) -> list[Todo]:
        match event:
            case Arrived():
                return self._receive(event.message, event.origin, now)
            case Told(what=Carried() as carried):
                return self._carried(carried, now)
            case Told(what=Amend() as amend):
                return [self._amend(amend, now)]
            case Told(what=Look() as look):
                return self._look(look, now)
            case _:
                return []

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        self.counts.duplicates += 1
        return [Reply(origin, message, verdict)]

    def unable(self, event: Event) -> list[Effect]:
        return unable(event)

    def _receive(self, message: Message, origin: Origin, now: int) -> list[Todo]:
        live = self._live.get(message.key)
        if live is not None and live.message.fingerprint == message.fingerprint:
            self.counts.duplicates += 1
            if not live.committed:
                live.origins.append(origin)
                return []  # it hears with the first, once that is stored
            if len(live.origins) < LISTENERS and origin not in live.origins:
                live.origins.append(origin)
            return [Reply(origin, message, Verdict(Word.DUPLICATE, self._state(live)))]
        refusal = horizons.judge(message, self.policy.horizon, now)
        if refusal is not None or live is not None:
            return [self._recall(message, refusal or UNABLE, origin, now)]
        plan = self._plan(message, now)
        if not plan.deliveries:
            return [self._note(message, plan, origin, now)]
        live = self._live[message.key] = Live(message, [origin], committed=False)
        return [self._admit(live, plan, now)]

    def _recall(self, message: Message, otherwise: Verdict, origin: Origin, now: int) -> Step:
        def done(results: Results, now: int) -> list[Todo]:
            verdict = results[0]
            assert isinstance(verdict, Verdict)
            return [Reply(origin, message, verdict)]

        return Step((Recall(message, otherwise, now),), done, (Reply(origin, message, UNABLE),))

    def _until(self, message: Message, now: int) -> int:
        return max(horizons.remember_until(message, self.policy.horizon), now + self.policy.keep)

    def _note(self, message: Message, plan: Plan, origin: Origin, now: int) -> Step:
        """A message for nobody: it is stored, and has ended."""
        end, answer = plan.end

        def done(results: Results, now: int) -> list[Todo]:
            verdict = results[0]
            assert isinstance(verdict, Verdict)
            if not verdict.fresh:
                self.counts.duplicates += 1
                return [Reply(origin, message, verdict)]
            self.counts.accepted += 1
            return [Reply(origin, message, verdict), Report(message.key, end, answer, (origin,))]

        plain = answer == Answer()
        then = () if plain else (Advance(message.key, end, now, answer),)
        admit = Admit(message, self._until(message, now), now, end if plain else State.ACCEPTED, then)
        return Step((admit,), done, (Reply(origin, message, UNABLE),))

    def _admit(self, live: Live, plan: Plan, now: int) -> Step:
        message, traits = live.message, plan.traits
        launched: list[Item] = []
        waiting: list[Item] = []
        writes: list[Deliver] = []
        for one in plan.deliveries:
            ref = Ref(message.key, self.channel, one.recipient, one.round)
            item = self._item(ref, message, one.due, one.expires, traits)
            if self._routes[one.recipient, traits.urgent].admits(item, now):
                item.attempt = 1
                launched.append(item)
                writes.append(Deliver(ref, now + self.policy.lease, one.expires, 1, self.worker))
            else:
                waiting.append(item)
                writes.append(Deliver(ref, one.due, one.expires))
        state = State.SENT if launched else State.ACCEPTED

        def done(results: Results, now: int) -> list[Todo]:
            verdict = results[0]
            assert isinstance(verdict, Verdict)
            if not verdict.fresh:
                self._not_fresh(live, launched, traits)
                return [Reply(origin, message, verdict) for origin in live.origins]
            live.committed = True
            self.counts.accepted += 1
            todo: list[Todo] = [Reply(live.origins[0], message, verdict)]
            todo += (Reply(origin, message, Verdict(Word.DUPLICATE, state)) for origin in live.origins[1:])
            for item in waiting:
                self._enter(live, item)
                where = (item.ref.recipient, traits.urgent)
                self._routes[where].add(item)
                self._routes.schedule(where)
            for item in launched:
                self._enter(live, item)
                todo.append(self._carry([item], traits.urgent))
            return todo

        admit = Admit(message, self._until(message, now), now, state, tuple(writes))
        failed = tuple(Reply(origin, message, UNABLE) for origin in live.origins)
        return Step((admit,), done, failed)

    def _not_fresh(self, live: Live, launched: Iterable[Item], traits: Traits) -> None:
        self.counts.duplicates += 1
        for item in launched:
            where = (item.ref.recipient, traits.urgent)
            self._routes[where].abandoned()
            self._routes.schedule(where)
        if self._live.get(live.message.key) is live:
            del self._live[live.message.key]

    def _amend(self, amend: Amend, now: int) -> Step:
        message, origin = amend.message, amend.origin
        refusal = horizons.judge(message, self.policy.horizon, now)
        if refusal is not None:
            return self._recall(message, refusal, origin, now)

        def done(results: Results, now: int) -> list[Todo]:
            verdict = results[0]
            assert isinstance(verdict, Verdict)
            return [Reply(origin, message, verdict), *([Tell(amend)] if verdict.fresh else [])]

        admit = Admit(message, self._until(message, now), now, State.DONE, amend.writes)
        return Step((admit,), done, (Reply(origin, message, UNABLE),))

    # ── on the way ───────────────────────────────────────────────────────────────────────────────

    def _item(self, ref: Ref, message: Message, due: int, expires: int, traits: Traits) -> Item:
        # What follows a message that somebody was told of waits for nobody.
        return Item(ref, message, due, expires, "" if ref.round >= RAISED else traits.episode)

    def _enter(self, live: Live, item: Item) -> None:
        self._items[item.ref] = item
        live.items.add(item.ref)
        if item.expires:
            self._serial += 1
            heapq.heappush(self._expiries, (item.expires, self._serial, item))

    def _state(self, live: Live) -> State:
        if live.reached:
            return State.DELIVERED
        return State.SENT if any(self._items[ref].attempt for ref in live.items) else State.ACCEPTED

    def _carry(self, parcel: Sequence[Item], urgent: bool) -> Tell:
        self.counts.parcels += 1
        self.counts.attempts += len(parcel)
        self.counts.retries += sum(item.attempt > 1 for item in parcel)
        marked = self._doubt(parcel[0].ref.recipient) is Doubt.REPEAT
        loads = tuple(Load(item.ref, item.attempt, item.message, marked and item.doubtful) for item in parcel)
        return Tell(Carry(parcel[0].ref.recipient, loads, urgent))

    def _launch(self, parcel: list[Item], where: Where, now: int) -> list[Todo]:
        """Claim all of a parcel, some at a time, and send what is ours."""
        if not parcel:
            self._routes[where].abandoned()
            return []
        ours: list[Item] = []

        def claim(start: int, now: int) -> Step:
            some = parcel[start : start + AT_ONCE]
            writes = tuple(
                Take(item.ref, item.attempt, self.worker, now + self.policy.lease) for item in some
            )

            def done(results: Results, now: int) -> list[Todo]:
                todo: list[Todo] = []
                for item, taken in zip(some, results, strict=True):
                    if taken:
                        item.attempt += 1
                        ours.append(item)
                    else:
                        todo += self._lose(item, now)
                if start + AT_ONCE < len(parcel):
                    return [*todo, claim(start + AT_ONCE, now)]
                if ours:
                    return [*todo, self._carry(ours, where[1])]
                self._routes[where].abandoned()
                self._routes.schedule(where)
                return todo

            return Step(writes, done)

        return [claim(0, now)]

    def _drop(self, item: Item) -> None:
        """It is no longer ours to deliver."""
        item.gone = True
        self._items.pop(item.ref, None)
        live = self._live.get(item.ref.key)
        if live is not None:
            live.items.discard(item.ref)
            if not live.items:
                del self._live[item.ref.key]

    def _lose(self, item: Item, now: int) -> list[Todo]:
        """Somebody ended it in the ledger, or another worker has it. If it was the last of its message here,
        and nobody else could have others, the message is over."""
        live = self._live.get(item.ref.key)
        self._drop(item)
        if live is None or live.items or not self._sole:
            return []
        end, answer = (State.DONE if live.reached else State.CANCELLED), Answer()

        def done(results: Results, now: int) -> list[Todo]:
            return [Report(live.message.key, end, answer, tuple(live.origins), live.message.recipient)]

        return [Step((Advance(live.message.key, end, now, answer),), done)]

    # ── how it went ──────────────────────────────────────────────────────────────────────────────

    def _carried(self, carried: Carried, now: int) -> list[Todo]:
        parcel, fate, reason = carried.parcel, carried.fate, carried.reason
        where = (parcel.recipient, parcel.urgent)
        route = self._routes[where]
        items = [
            item
            for load in parcel.loads
            if (item := self._items.get(load.ref)) is not None
            and item.flying
            and item.attempt == load.attempt
        ]
        todo: list[Todo] = []
        if fate in (Fate.ARRIVED, Fate.REFUSED):
            # A refusal is an answer, too: the way is open.
            if route.arrived():
                self._routes.hurry(parcel.recipient, now)
        else:
            route.failed(now + max(carried.rest, self._delay(items)))
        ends: _Ends = []
        for item in items:
            item.flying = False
            match fate:
                case Fate.ARRIVED:
                    self.counts.arrived += 1
                    self.counts.retried_well += item.attempt > 1
                    ends.append((item, State.DONE, Answer()))
                case Fate.REFUSED:
                    ends.append((item, State.FAILED, Answer(1, b"", reason)))
                case Fate.NOT_SENT:
                    todo += self._again(item, where, reason, carried.rest, now, ends)
                case Fate.IN_DOUBT:
                    todo += self._in_doubt(item, where, reason, carried.rest, now, ends)
        todo += self._end_all(ends, now)
        self._routes.schedule(where)
        return todo

    def _delay(self, items: Sequence[Item]) -> int:
        """How long a way is left alone after these could not go it."""
        delays = (self.policy.retry.delay(item.attempt, item.salt) for item in items)
        return min((delay for delay in delays if delay is not None), default=self.policy.retry.first)

    def _again(
        self, item: Item, where: Where, reason: str, rest: int | None, now: int, ends: _Ends
    ) -> list[Todo]:
        """This attempt came to nothing: the next one, if there is one; at once if `rest` is None."""
        if item.doubtful and not reason.startswith(DOUBT):
            reason = DOUBT + reason  # an earlier one may have arrived all the same
        item.error = reason
        # Who travelled together tries again together.
        delay = self.policy.retry.delay(item.attempt, b"" if item.bundle else item.salt)
        if delay is None:
            ends.append(_given_up(item, State.FAILED, f"given up after {item.attempt} attempts: {reason}"))
            return []
        if item.expires and item.expires <= now:
            ends.append(_given_up(item, State.EXPIRED, f"{EXPIRED.reason}; the last attempt: {reason}"))
            return []
        if not self._wanted(item.ref):
            ends.append(_given_up(item, State.CANCELLED, f"{NOT_WANTED}; the last attempt: {reason}"))
            return []
        item.due = now if rest is None else now + max(delay, rest)
        write = Postpone(item.ref, item.attempt, item.due, reason)

        def done(results: Results, now: int) -> list[Todo]:
            if not results[0]:
                return self._lose(item, now)
            if not item.gone:
                self._routes[where].add(item)
                self._routes.schedule(where)
            return []

        return [Step((write,), done)]

    def _in_doubt(
        self, item: Item, where: Where, reason: str, rest: int | None, now: int, ends: _Ends
    ) -> list[Todo]:
        self.counts.in_doubt += 1
        declared = self._doubt(item.ref.recipient)
        if declared is Doubt.RESEND or (declared is Doubt.REPEAT and not item.doubtful):
            return self._again(item, where, DOUBT + reason, rest, now, ends)
        why = "once repeated, and again " if item.doubtful else ""
        ends.append((item, State.UNKNOWN, Answer(4, b"", f"{why}{DOUBT}{reason}")))
        return []

    def _end_all(self, ends: _Ends, now: int) -> list[Todo]:
        """End deliveries, some at a time; the last one of a message ends the message."""
        if not ends:
            return []
        some, left = ends[:AT_ONCE], ends[AT_ONCE:]
        writes: list[Finish] = []
        over: dict[bytes, tuple[Live, State, Answer]] = {}
        for item, state, answer in some:
            then: Group = ()
            key = item.ref.key
            live = self._live.get(key)
            self._drop(item)
            if live is not None:
                first = state is State.DONE and not live.reached
                live.reached |= state is State.DONE
                live.in_doubt |= state is State.UNKNOWN
                if not live.items:
                    how = self._summary(live, state, answer)
                    then = (Advance(key, how[0], now, how[1]),)
                    over[key] = (live, *how)
                elif first:
                    then = (Advance(key, State.DELIVERED, now),)
            if self._cancelled(key) and state in (State.DONE, State.UNKNOWN) and item.ref.round < CORRECTION:
                then = (*then, correction(item.ref, now, item.expires))
            self.counts.failed += state is State.FAILED
            writes.append(Finish(item.ref, item.attempt, state, answer.reason, then))

        def done(results: Results, now: int) -> list[Todo]:
            todo: list[Todo] = []
            left_over = iter(results)
            for write in writes:
                if not next(left_over):
                    continue  # fenced: a newer attempt is under way, or it had ended already
                for _ in write.then:
                    next(left_over)
                key = write.ref.key
                if key in over:
                    live, state, answer = over[key]
                    todo.append(Report(key, state, answer, tuple(live.origins), live.message.recipient))
                if self._cancelled(key):
                    todo.append(Tell(write.ref))
            return [*todo, *self._end_all(left, now)]

        return [Step(tuple(writes), done)]

    def _summary(self, live: Live, state: State, answer: Answer) -> tuple[State, Answer]:
        if live.reached:
            return State.DONE, Answer()
        if live.in_doubt:
            return State.UNKNOWN, answer
        return state, answer

    # ── changed from outside ─────────────────────────────────────────────────────────────────────

    def _look(self, look: Look, now: int) -> list[Todo]:
        still = {one.delivery.ref: one for one in look.open}
        live = self._live.get(look.key)
        known = sorted(live.items if live is not None else (), key=lambda ref: (ref.recipient, ref.round))
        todo: list[Todo] = []
        ends: _Ends = []
        for ref, one in still.items():
            if ref not in self._items:  # before others are lost: the message is not over
                todo += self._take_up(one, now)
        for ref in known:
            item = self._items[ref]
            if item.flying:
                continue
            if ref not in still:
                todo += self._lose(item, now)
            elif not self._wanted(ref):
                ends.append(_given_up(item, State.CANCELLED, NOT_WANTED))
            elif still[ref].delivery.due < item.due:
                # Somebody wants it tried now, so the way is tried.
                item.due = still[ref].delivery.due
                self._routes[_way(ref, self._traits(item.message))].add(item)
                self._routes.hurry(ref.recipient, now)
        return todo + self._end_all(ends, now)

    def restore(
        self, open_: Sequence[Open], ended: Sequence[Ended], marks: Mapping[str, tuple[int, int]], now: int
    ) -> list[Todo]:
        before, known, self._live, self._items = self._live, self._items, {}, {}
        flying = {ref: item for ref, item in known.items() if item.flying}
        self._routes = self._routes.afresh()
        self._expiries = []
        todo: list[Todo] = [
            Report(end.key, end.state, end.answer, tuple(before[end.key].origins)) for end in ended
        ]
        for one in open_:
            old = flying.get(one.delivery.ref)
            if old is not None and one.delivery.worker == self.worker and old.attempt == one.delivery.attempt:
                # Our attempt goes on; what comes of it is still to be heard.
                live = self._revive(one, before)
                self._enter(live, old)
                continue
            todo += self._take_up(one, now, before)
        return todo

    def _revive(self, one: Open, before: Mapping[bytes, Live]) -> Live:
        key = one.message.key
        live = self._live.get(key)
        if live is None:
            listening = before[key].origins if key in before else []
            live = self._live[key] = Live(one.message, listening, committed=True)
            live.reached = one.state is State.DELIVERED
        return live

    def _take_up(self, one: Open, now: int, before: Mapping[bytes, Live] | None = None) -> list[Todo]:
        """Go on with an open delivery of the ledger."""
        message, delivery = one.message, one.delivery
        traits = self._traits(message)
        live = self._revive(one, before or {})
        item = self._item(delivery.ref, message, delivery.due, delivery.expires, traits)
        item.attempt, item.error = delivery.attempt, delivery.error
        self._enter(live, item)
        where = _way(delivery.ref, traits)
        if delivery.state is State.SENT:
            if self._sole or delivery.due <= now:
                return self._cut_off(item, where, now)
            item.leased = True
        elif not self._wanted(item.ref):
            return self._end_all([_given_up(item, State.CANCELLED, NOT_WANTED)], now)
        self._routes[where].add(item)
        self._routes.schedule(where)
        return []

    def _cut_off(self, item: Item, where: Where, now: int) -> list[Todo]:
        """Whoever was delivering it died over it."""
        item.leased = False
        ends: _Ends = []
        todo = self._in_doubt(item, where, CUT_OFF, None, now, ends)
        return todo + self._end_all(ends, now)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Todo]:
        todo: list[Todo] = []
        late: _Ends = []
        while self._expiries and self._expiries[0][0] <= now:
            item = heapq.heappop(self._expiries)[2]
            if not item.gone and not item.flying:
                why = f"; the last attempt: {item.error}" if item.error else ""
                late.append(_given_up(item, State.EXPIRED, EXPIRED.reason + why))
        todo += self._end_all(late, now)
        for where, parcel in self._routes.collect(now):
            dead = [item for item in parcel if item.leased]
            for item in dead:
                item.flying = False
                todo += self._cut_off(item, where, now)
            todo += self._launch([item for item in parcel if item not in dead], where, now)
        return todo

    def next_wake(self) -> int | None:
        while self._expiries and self._expiries[0][2].gone:
            heapq.heappop(self._expiries)
        wakes = (self._routes.next_wake(), self._expiries[0][0] if self._expiries else None)
        return min((when for when in wakes if when is not None), default=None)

    def shift(self, by: int) -> None:
        self._routes.shift(by)


def _way(ref: Ref, traits: Traits) -> Where:
    return ref.recipient, traits.urgent or ref.round == RAISED


def _given_up(item: Item, state: State, reason: str) -> tuple[Item, State, Answer]:
    """The end of what is not tried any more. If one attempt was in doubt, nobody can tell."""
    return item, State.UNKNOWN if item.doubtful else state, Answer(EXPIRED.code, b"", reason)
