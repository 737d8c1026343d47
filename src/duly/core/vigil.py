"""The vigil: what a sentinel makes of the signals of its devices. Signal → suppression → countdown → upload.

The laws. A signal that passes is an event with an id, on the disk, before anybody is told; from then on it
ends one way only: the tower has it, a person called it off, or it expired. The id is minted once, from the
signal's own time, and never worked out again. An event that has not left can be called off without a trace;
one that may have left is corrected. What belongs to an event follows it: an update or a correction waits
until the tower has the event.

A countdown is a delivery that is booked and not yet due; offline, what is due stays booked. So a restart
finds every countdown and everything queued in the ledger, and the rest (limits, cooldowns, counters) on the
shelf of the devices, written together with what changed it.

What the tower has stored is withdrawn here: a sentinel's file does not grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from duly.core.ids import SeqId, SeqIds, event_id
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, key_of, names_in
from duly.core.outbox import EXPIRED, Outbox, unable
from duly.core.signals import (
    CANCEL,
    DISCONNECT,
    EVENT,
    SUMMARY,
    UPDATE,
    Back,
    CalledOff,
    CallOff,
    CancelData,
    Change,
    EventData,
    Identity,
    Missed,
    Offset,
    Queued,
    Ruled,
    SentinelPolicy,
    Severity,
    Signal,
    SummaryData,
    UpdateData,
    encode,
    event_of,
    raw,
    read_event,
)
from duly.core.steps import (
    Answered,
    Effect,
    Ended,
    Event,
    Origin,
    Reachable,
    Reply,
    Report,
    Step,
    Tell,
    Todo,
    Told,
    Unreachable,
)
from duly.core.suppress import Decision, Ruling, Summary
from duly.core.units import FOREVER, MS, seconds
from duly.core.watched import Device, Watched
from duly.core.writes import (
    Admit,
    Advance,
    Deliver,
    Finish,
    Group,
    Open,
    Put,
    Raise,
    Results,
    Withdraw,
    Write,
)

SCOPE: Final = "sentinel"
TOWER: Final = "tower"
SELF: Final = "sentinel"
OFFSET: Final = "offset"
"""The shelf of what a sentinel knows of itself, and the clock offset on it."""
MINTED: Final = "ids"

CALLED_OFF: Final = Answer(0, b"", "a person called it off before it went out")
SETTLED: Final = Answer(0, b"", "the device was back before the countdown ended")
OVERTAKEN: Final = Answer(0, b"", "a critical event for the same reason took its place")


class _Waiting:
    """Something booked: in its countdown, offline, or behind its event."""

    __slots__ = ("data", "due", "event", "message", "queued")

    def __init__(self, message: Message, due: int, *, queued: bool = False) -> None:
        self.message = message
        self.due = due
        self.data = read_event(message.body) if message.kind == EVENT else None
        self.event = message.id if self.data is not None else event_of(message.body)
        self.queued = queued
        """its countdown is over, and that was told"""

    @property
    def cause(self) -> tuple[str, str, bool] | None:
        data = self.data
        if data is None:
            return None
        return data.device_address, data.trigger_reason, data.severity is Severity.CRITICAL


class Vigil:
    """The sentinel's machine. `remember` it first what lies on its shelves, then `restore` it."""

    def __init__(self, policy: SentinelPolicy, identity: Identity, worker: str) -> None:
        self._policy = policy
        self._identity = identity
        self._watched = Watched(policy.suppress)
        self._outbox = Outbox(policy.outbox, worker, ended=self._ended)
        self._waiting: dict[bytes, _Waiting] = {}
        self._counting: dict[tuple[str, str, bool], bytes] = {}
        """what is in its countdown, by device, reason and whether it is critical"""
        self._behind: dict[str, list[bytes]] = {}
        """what waits for its event, by the event's id"""
        self._starting: set[bytes] = set()
        self._timers: list[tuple[int, bytes]] = []
        self._ids = SeqIds()
        self._reachable = False
        self.offset: int | None = None

    @property
    def channel(self) -> str:
        return self._outbox.channel

    @property
    def keys(self) -> list[bytes]:
        return [*self._outbox.keys, *self._waiting]

    def __len__(self) -> int:
        """How much has not ended."""
        return len(self._outbox) + len(self._waiting) + len(self._starting)

    # ── from the ledger ──────────────────────────────────────────────────────────────────────────

    def remember(self, devices: Mapping[str, bytes], offset: bytes | None) -> None:
        """Take in what lies on the shelves."""
        self._watched.remember(devices)
        if offset is not None:
            self.offset = int(offset)

    def restore(
        self, open_: Sequence[Open], ended: Sequence[Ended], marks: Mapping[str, tuple[int, int]], now: int
    ) -> list[Todo]:
        before = self._outbox.keys
        n, ms = marks.get(MINTED, (-1, 0))
        self._ids = SeqIds(SeqId(ms, n) if n >= 0 else None)
        self._waiting.clear()
        self._counting.clear()
        self._behind.clear()
        self._starting.clear()
        self._timers.clear()
        # What was stored together is not kept in order; the signals' own times say what it was.
        open_ = sorted(open_, key=lambda item: item.message.time)
        todo: list[Todo] = [Report(end.key, end.state, end.answer) for end in ended]
        todo += self._outbox.restore([item for item in open_ if item.delivery.attempt], (), {}, now)
        for item in open_:
            if not item.delivery.attempt:
                todo += self._rebook(_Waiting(item.message, item.delivery.due))
        told = {end.key for end in ended}.union(item.message.key for item in open_)
        # What went out and is gone without a trace was withdrawn: the tower has it.
        todo += [Report(key, State.DONE, Answer()) for key in before if key not in told]
        return todo + self._advance(now)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: int) -> list[Todo]:
        match event:
            case Told(what=Signal() as signal):
                return self._signal(signal, now)
            case Told(what=Back() as back):
                return self._back(back)
            case Told(what=CallOff() as call):
                return self._call_off(call, now)
            case Told(what=Change() as change):
                return self._change(change, now)
            case Told(what=Offset(by=by)):
                return self._measured(by, now)
            case Reachable():
                self._reachable = True
                return self._outbox.reached("", now) + self._advance(now)
            case Unreachable():
                self._reachable = False
                return []
            case Answered(state=State.DONE):
                return self._outbox.handle(msgspec.structs.replace(event, burn=False), now)
            case _:
                return self._outbox.handle(event, now)

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        return [Reply(origin, message, verdict)]

    def unable(self, event: Event) -> list[Effect]:
        return unable(event)

    def _measured(self, offset: int, now: int) -> list[Todo]:
        """The tower's clock is known. What was noticed before it was, and has not left, learns it too: else
        the alarms of a clock that starts in 1970 would be refused for ever."""
        self.offset = offset
        todo: list[Todo] = [Step((Put(SELF, OFFSET, b"%d" % offset),), _nothing)]
        for waiting in list(self._waiting.values()):
            if waiting.data is not None and waiting.data.offset_ms is None:
                data = msgspec.structs.replace(waiting.data, offset_ms=offset // MS)
                todo.append(self._rewrite(waiting, data, now))
        return todo

    # ── signals ──────────────────────────────────────────────────────────────────────────────────

    def _signal(self, signal: Signal, now: int) -> list[Todo]:
        device = self._watched.at(signal.device)
        fell = signal.reason == DISCONNECT and device.back != 0
        if fell:
            device.back = 0
        id_ = self._mint(signal.reason, signal.device, signal.at, critical=signal.critical)
        counting = self._waiting.get(self._counting.get((signal.device, signal.reason, signal.critical), b""))
        if id_ in device.events:
            decision = Decision(Ruling.PASS)  # the same signal again, after a ledger that failed
        elif counting is not None:
            id_, decision = counting.event, Decision(Ruling.DEBOUNCED, counting.due)
        else:
            decision = self._watched.suppressor.signal(
                signal.device, signal.at, signal.critical, signal.reason
            )
            if decision.passes:
                return [self._pass(signal, device, id_, now)]
            id_ = ""
        ruled = Tell(Ruled(signal.origin, signal.device, signal.reason, decision, id_))
        if not fell and decision.ruling is not Ruling.LIMITED:
            return [ruled]
        return [Step((self._watched.save(signal.device),), lambda results, now: [ruled])]

    def _pass(self, signal: Signal, device: Device, id_: str, now: int) -> Step:
        device.add(id_, signal.at)
        lasts = seconds(self._policy.countdown) if signal.countdown is None else signal.countdown
        message = self._message(EVENT, id_, signal.at, self._data(signal))
        due = signal.at + lasts if lasts else min(signal.at, now)
        more: Group = tuple(self._watched.sweep(now))
        then: list[Todo] = [
            Tell(Ruled(signal.origin, signal.device, signal.reason, Decision(Ruling.PASS), id_, due))
        ]
        key = self._counting.get((signal.device, signal.reason, False)) if signal.critical else None
        if key is not None:
            more = (*more, self._drop(key, State.SUPERSEDED, OVERTAKEN, now))
            then.append(Report(key, State.SUPERSEDED, OVERTAKEN))
            device.events.pop(event_in(key), None)
        return self._send(message, due, now, then, (*more, self._watched.save(signal.device)))

    def _data(self, signal: Signal, summary: SummaryData | None = None) -> EventData:
        return EventData(
            self._identity.profile,
            signal.reason,
            signal.device,
            self._identity.session,
            signal.at // MS,
            signal.severity,
            self._watched.at(signal.device).cancels,
            raw(signal.meta),
            raw(signal.location),
            None if self.offset is None else self.offset // MS,
            summary,
        )

    def _mint(self, reason: str, device: str, at: int, *, critical: bool = False) -> str:
        who = self._identity
        return event_id(
            sentinel=who.sentinel, tower=who.tower, profile=who.profile, session=who.session, device=device,
            reason=f"{reason}, critical" if critical else reason, window_start=at,
        )  # fmt: skip

    def _back(self, back: Back) -> list[Todo]:
        device = self._watched.get(back.device)
        if device is None or device.back:
            return []  # nothing of it is remembered, so nothing depends on it
        device.back = back.at
        return [Step((self._watched.save(back.device),), _nothing)]

    # ── what a person says ───────────────────────────────────────────────────────────────────────

    def _call_off(self, call: CallOff, now: int) -> list[Todo]:
        name = call.device or self._watched.of(call.event)
        device = self._watched.get(name)
        if device is None or (call.event and call.event not in device.events):
            return [Tell(CalledOff(name))]
        events = [call.event] if call.event else device.recent(call.at)
        if not events:
            return [Tell(CalledOff(name))]
        dropped: list[str] = []
        corrected: list[str] = []
        writes: list[Finish] = []
        steps: list[Todo] = []
        for event in events:
            del device.events[event]
            key = key_of(SCOPE, event)
            if key in self._waiting:
                dropped.append(event)
                writes += [
                    self._drop(one, State.CANCELLED, CALLED_OFF, now)
                    for one in (key, *self._behind.get(event, ()))
                ]
            else:
                corrected.append(event)
                steps.append(self._follow(CANCEL, event, call.at, CancelData(event, call.at // MS), now))
        device.cancels += 1
        self._watched.suppressor.cancelled(name, call.at)
        told = CalledOff(name, tuple(dropped), tuple(corrected))
        ends: list[Todo] = [Report(finish.ref.key, State.CANCELLED, CALLED_OFF) for finish in writes]
        done = Step((*writes, self._watched.save(name)), lambda results, now: [Tell(told), *ends])
        return [done, *steps]

    def _change(self, change: Change, now: int) -> list[Todo]:
        if not self._watched.of(change.event):
            return [Tell(Missed(change.event))]
        waiting = self._waiting.get(key_of(SCOPE, change.event))
        meta, location = raw(change.meta), raw(change.location)
        if waiting is None or waiting.data is None:
            data = UpdateData(change.event, change.severity, meta, location)
            return [self._follow(UPDATE, change.event, change.at, data, now)]
        # It has not left: it goes out as it is now.
        old = waiting.data
        data_now = msgspec.structs.replace(
            old,
            severity=change.severity or old.severity,
            device_meta=meta if change.meta else old.device_meta,
            location=location if change.location else old.location,
        )
        return [self._rewrite(waiting, data_now, now)]

    def _rewrite(self, waiting: _Waiting, data: EventData, now: int) -> Step:
        message = self._message(EVENT, waiting.event, waiting.message.time, data)
        self._stop_counting(waiting)
        self._book(_Waiting(message, waiting.due, queued=waiting.queued))
        return Step((Withdraw(message.key), self._booking(message, waiting.due, now)), _nothing)

    def _follow(self, kind: str, event: str, at: int, data: UpdateData | CancelData, now: int) -> Step:
        minted = self._ids.next(at)
        message = self._message(kind, str(minted), at, data)
        return self._send(message, at, now, [], (Raise(MINTED, minted.n, minted.ms),))

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    def _message(self, kind: str, id_: str, at: int, data: EventData | UpdateData | CancelData) -> Message:
        return Message(
            SCOPE, id_, kind, TOWER, encode(data), time=at, expires=at + seconds(self._policy.keep)
        )

    def _send(self, message: Message, due: int, now: int, then: list[Todo], more: Group) -> Step:
        """Admit it, and start it at once if nothing stands in the way: one commit."""
        waiting = _Waiting(message, due)
        at_once = due <= now and self._may_start(waiting)
        if at_once:
            self._starting.add(message.key)
            admit = Admit(message, FOREVER, now, State.SENT, (self._outbox.launch(message, now),))
        else:
            if due <= now:
                then = [*then, *self._queue(waiting)]
            self._book(waiting)
            admit = self._booking(message, due, now)

        def done(results: Results, now: int) -> list[Todo]:
            if not at_once:
                return then  # it may have been started meanwhile, by a step of its own
            self._starting.discard(message.key)
            verdict = results[0]
            assert isinstance(verdict, Verdict)
            return [*then, self._outbox.launched(message, 1, -1, now)] if verdict.fresh else then

        return Step((admit, *more), done)

    def _booking(self, message: Message, due: int, now: int) -> Admit:
        return Admit(message, FOREVER, now, then=(Deliver(self._outbox.ref(message), due, message.expires),))

    def _may_start(self, waiting: _Waiting) -> bool:
        if not self._reachable:
            return False
        return waiting.data is not None or not self._open(key_of(SCOPE, waiting.event))

    def _open(self, key: bytes) -> bool:
        return key in self._waiting or key in self._starting or self._outbox.state(key) is not None

    def _start(self, waiting: _Waiting, now: int) -> Step:
        message = waiting.message
        self._uncount(waiting)
        self._starting.add(message.key)

        def done(results: Results, now: int) -> list[Todo]:
            self._starting.discard(message.key)
            return [self._outbox.launched(message, 1, -1, now)] if results[0] else []

        return Step((self._outbox.relaunch(message, 0, now), Advance(message.key, State.SENT, now)), done)

    def _drop(self, key: bytes, state: State, answer: Answer, now: int) -> Finish:
        """It never left, and never will."""
        waiting = self._waiting[key]
        self._uncount(waiting)
        ref = self._outbox.ref(waiting.message)
        return Finish(ref, 0, state, answer.reason, (Advance(key, state, now, answer),))

    def _end(self, waiting: _Waiting, state: State, answer: Answer, now: int) -> Step:
        """It and what waits for it never left, and never will."""
        keys, data = [waiting.message.key], waiting.data
        if data is not None:
            keys += self._behind.get(waiting.event, ())
        writes: list[Write] = [self._drop(key, state, answer, now) for key in keys]
        if data is not None:
            writes += self._watched.forget(data.device_address, waiting.event)
        reports: list[Todo] = [Report(key, state, answer) for key in keys]
        return Step(tuple(writes), lambda results, now: reports)

    def _ended(self, message: Message, state: State, answer: Answer, now: int) -> list[Todo]:
        """The outbox is through with one: what waited for it may go."""
        todo: list[Todo] = [Report(message.key, state, answer)]
        never = message.kind == EVENT and state in (State.FAILED, State.EXPIRED)
        if never and (writes := self._watched.forget(read_event(message.body).device_address, message.id)):
            todo.append(Step(tuple(writes), _nothing))
        for key in list(self._behind.get(message.id, ())):
            waiting = self._waiting[key]
            if never:
                todo.append(self._end(waiting, State.CANCELLED, answer, now))
            elif self._may_start(waiting):
                todo.append(self._start(waiting, now))
        return todo

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    def _book(self, waiting: _Waiting) -> None:
        key = waiting.message.key
        self._waiting[key] = waiting
        if waiting.cause is None:
            self._behind.setdefault(waiting.event, []).append(key)
        elif not waiting.queued:
            self._counting[waiting.cause] = key
        heapq.heappush(self._timers, (waiting.due, key))

    def _rebook(self, waiting: _Waiting) -> list[Todo]:
        """After a restart: a person may still want to call it off."""
        self._book(waiting)
        data = waiting.data
        if data is None:
            return []
        passed = Decision(Ruling.PASS)
        return [
            Tell(Ruled(None, data.device_address, data.trigger_reason, passed, waiting.event, waiting.due))
        ]

    def _queue(self, waiting: _Waiting) -> list[Todo]:
        waiting.queued = True
        data = waiting.data
        return [] if data is None else [Tell(Queued(waiting.event, data.device_address, data.trigger_reason))]

    def _uncount(self, waiting: _Waiting) -> None:
        key = waiting.message.key
        self._waiting.pop(key, None)
        self._stop_counting(waiting)
        behind = self._behind.get(waiting.event)
        if behind is not None and key in behind:
            behind.remove(key)
            if not behind:
                del self._behind[waiting.event]

    def _stop_counting(self, waiting: _Waiting) -> None:
        cause = waiting.cause
        if cause is not None and self._counting.get(cause) == waiting.message.key:
            del self._counting[cause]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Todo]:
        todo = self._outbox.wake(now)
        todo += [self._sum_up(summary, now) for summary in self._watched.suppressor.wake(now)]
        while self._timers and self._timers[0][0] <= now:
            _, key = heapq.heappop(self._timers)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.due > now:
                continue
            todo += self._due(waiting, now)
        return todo

    def _due(self, waiting: _Waiting, now: int) -> list[Todo]:
        """A countdown is over, or something offline has waited too long."""
        if waiting.message.expires <= now:
            return [self._end(waiting, State.EXPIRED, EXPIRED, now)]
        todo: list[Todo] = []
        if waiting.data is not None and not waiting.queued:
            device = self._watched.get(waiting.data.device_address)
            disconnect = waiting.data.trigger_reason == DISCONNECT and self._policy.settle
            if disconnect and device is not None and 0 < device.back <= waiting.due:
                return [self._end(waiting, State.CANCELLED, SETTLED, now)]
            self._stop_counting(waiting)
            todo += self._queue(waiting)
        if self._may_start(waiting):
            return [*todo, self._start(waiting, now)]
        heapq.heappush(self._timers, (waiting.message.expires, waiting.message.key))
        return todo

    def _advance(self, now: int) -> list[Todo]:
        """Everything that is due and may go, in the order it was made."""
        return [
            todo
            for waiting in list(self._waiting.values())
            if waiting.due <= now
            for todo in self._due(waiting, now)
        ]

    def _sum_up(self, summary: Summary, now: int) -> Step:
        data = SummaryData(summary.held, dict(summary.reasons), summary.since // MS)
        self._watched.at(summary.device)
        id_ = self._mint(SUMMARY, summary.device, summary.since)
        event = self._data(Signal(summary.device, SUMMARY, now), data)
        ruled = Tell(Ruled(None, summary.device, SUMMARY, Decision(Ruling.PASS), id_, now))
        message = self._message(EVENT, id_, now, event)
        return self._send(message, now, now, [ruled], (self._watched.save(summary.device),))

    def next_wake(self) -> int | None:
        while self._timers and self._timers[0][1] not in self._waiting:
            heapq.heappop(self._timers)
        timer = self._timers[0][0] if self._timers else None
        wakes = (self._outbox.next_wake(), self._watched.suppressor.next_wake(), timer)
        return min((when for when in wakes if when is not None), default=None)

    def shift(self, by: int) -> None:
        """The wall clock was set: countdowns go on as if it had not been; the tower's clock did not move."""
        self._outbox.shift(by)
        if self.offset is not None:
            self.offset -= by
        for waiting in self._waiting.values():
            waiting.due += by
        self._timers = [(waiting.due, key) for key, waiting in self._waiting.items()]
        heapq.heapify(self._timers)


def _nothing(_: Results, __: int) -> list[Todo]:
    return []


def event_in(key: bytes) -> str:
    """The id in a key of ours: of an event, an update or a cancel."""
    return names_in(key)[1]
