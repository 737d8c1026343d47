"""The monitor turns signals into events for the tower: signal → suppression → countdown → upload.

The laws. A signal that passes becomes an event with an id, which is stored before it is reported anywhere. It
ends in exactly one of three ways: the tower has it, a person cancelled it, or it expired. The id is created
once, from the signal's own time. An event that was not sent is cancelled without a trace; one that may have
been sent is corrected. An update or a correction waits until the tower has the event. A critical event that
is due goes out even if it cannot be stored; see `unstored_events`.

No emergency is lost. A held signal that no event reports is judged again when its window ends, unless the
device is back by then or a person has cancelled it. A critical signal is held back only if an event already
reports the same, and it never expires here.

A countdown is a stored delivery that is not yet due; without a connection, due deliveries stay stored. So a
restart finds every countdown and every queued event in the ledger, and the rest (limits, cooldowns, counters)
in the bucket of devices, which is written together with each change. An event that the tower has stored is
removed here, so that a sentinel's file does not grow. Times follow the tower's clock, which is measured with
every connection; see `event_times`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, key_of, names_in
from duly.core.monitor.devices import MonitoredDevice, MonitoredDevices
from duly.core.monitor.event_messages import MINTED, SCOPE, EventMessages
from duly.core.monitor.event_sender import EventSender
from duly.core.monitor.event_times import dated, dated_again
from duly.core.monitor.pending_events import PendingEvent
from duly.core.monitor.signals import (
    CANCEL,
    DISCONNECT,
    EVENT,
    SUMMARY,
    UPDATE,
    CancelData,
    CancelRequest,
    CancelResult,
    ClockOffset,
    DeviceBack,
    EventChange,
    EventData,
    HeartbeatDue,
    Identity,
    NothingToChange,
    Report,
    SentinelPolicy,
    Signal,
    SignalRuling,
    Stamped,
    StopHeartbeat,
    SummaryData,
    UpdateData,
    raw,
    read_event,
)
from duly.core.monitor.suppression import Ruling, Summary, SuppressionDecision
from duly.core.monitor.unstored_events import UnstoredEvents, is_critical
from duly.core.operations import (
    Finish,
    Group,
    OpenDelivery,
    Results,
    Write,
)
from duly.core.outbox import EXPIRED, Outbox, unable
from duly.core.steps import (
    Answered,
    Effect,
    Ended,
    Event,
    MachineEffect,
    MachineEvent,
    Origin,
    Reachable,
    Reply,
    ReportOutcome,
    Step,
    Todo,
    Unreachable,
)
from duly.core.units import FOREVER, MS, seconds

SELF: Final = "sentinel"
"""The bucket of the sentinel's own state."""

CALLED_OFF: Final = Answer(0, b"", "a person called it off before it went out")
SETTLED: Final = Answer(0, b"", "the device was back before the countdown ended")
OVERTAKEN: Final = Answer(0, b"", "a critical event for the same reason took its place")


class Monitor:
    """The sentinel's state machine. Call `remember` with the contents of its buckets first, then
    `restore`."""

    def __init__(self, policy: SentinelPolicy, identity: Identity, worker: str) -> None:
        self._policy = policy
        self._devices = MonitoredDevices(policy.suppress)
        self._keep = keep = seconds(policy.keep)
        self.messages = EventMessages(identity, keep)
        self.unstored = UnstoredEvents()
        self._outbox = Outbox(
            policy.outbox, worker, ended=self._ended, patience=self._patience, unstored=self.unstored.failed
        )
        self._sender = EventSender(self._outbox, self.unstored, keep)
        self.steps = 0
        """by how much the wall clock was set since the start; see `Stamped`"""
        self._promised = policy.heartbeat > 0
        self._beat_at: int | None = None
        """when the next heartbeat is due; None if the tower is unreachable or none was promised"""

    @property
    def channel(self) -> str:
        """The name of the monitor's deliveries in the ledger."""
        return self._outbox.channel

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages that have not ended."""
        return self._sender.keys

    def __len__(self) -> int:
        """Return the number of open messages and of signals that may become one."""
        return len(self._sender) + self._devices.holding

    # ── from the ledger ──────────────────────────────────────────────────────────────────────────

    def remember(self, devices: Mapping[str, bytes]) -> None:
        """Take over the contents of the bucket of devices."""
        self._devices.remember(devices)

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        """Start from the ledger: continue, wait again, and report what has ended."""
        before = self._outbox.keys
        self.messages.restore(marks.get(MINTED, (-1, 0)))
        self._devices.bound(now)
        # Messages that were stored together are not in order; the signals' own times restore it.
        open_ = sorted(open_, key=lambda item: item.message.time)
        todo: list[Todo] = [ReportOutcome(end.key, end.state, end.answer) for end in ended]
        todo += self._sender.restore(open_, now)
        told = {end.key for end in ended}.union(item.message.key for item in open_)
        # A sent message that is gone without a trace was removed because the tower has it.
        todo += [ReportOutcome(key, State.DONE, Answer()) for key in before if key not in told]
        return todo + self._advance(now)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: int) -> list[Todo]:
        """Handle an event; return what to commit and what to do."""
        match event:
            case MachineEvent(what=Stamped(what=report, steps=steps)):
                return self._reported(report, self.steps - steps, now)
            case MachineEvent(
                what=Signal() | DeviceBack() | CancelRequest() | EventChange() | ClockOffset() as report
            ):
                return self._reported(report, 0, now)
            case Reachable():
                self._sender.reachable = True
                self._beat_at = now if self._promised else None
                return self._outbox.reached("", now) + self._advance(now)
            case Unreachable():
                self._sender.reachable, self._beat_at = False, None
                return []
            case MachineEvent(what=StopHeartbeat()):
                self._promised, self._beat_at = False, None
                return []
            case Answered(key=key) if self.unstored.answered(key) and key not in self._outbox.transmissions:
                return []  # it is handled again once the event is stored
            case Answered(state=State.DONE):
                return self._outbox.handle(msgspec.structs.replace(event, burn=False), now)
            case _:
                return self._outbox.handle(event, now)

    def _reported(self, report: Report, by: int, now: int) -> list[Todo]:
        """Handle a report; since its time was read, the wall clock was set by `by`."""
        match report:
            case Signal(at=at):
                return self._signal(msgspec.structs.replace(report, at=max(0, at + by)), now, report)
            case DeviceBack(device=device, at=at):
                return self._back(device, max(1, at + by))
            case CancelRequest(at=at):
                return self._call_off(msgspec.structs.replace(report, at=max(0, at + by)), now)
            case EventChange(at=at):
                return self._change(msgspec.structs.replace(report, at=max(0, at + by)), now)
            case ClockOffset(by=offset):
                return self._measured(offset - by, now)

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        """Answer a repeat of an ended message with the remembered verdict."""
        return [Reply(origin, message, verdict)]

    def unable(self, event: Event) -> list[Effect]:
        """Return the replies to an event that cannot be stored at the moment."""
        return unable(event)

    def _measured(self, offset: int, now: int) -> list[Todo]:
        """Date unsent events by the tower's clock; ours may have started in 1970 and have been set since."""
        self.messages.offset = offset
        todo: list[Todo] = []
        for waiting in self._sender.pending.all():
            before, steps = waiting.data, waiting.steps
            key = waiting.message.key
            if before is None or key not in self._sender.pending or key in self.unstored:
                continue
            if steps is None:
                data = dated_again(before, offset, now, self._keep)
            else:
                data = dated(before, steps, offset)
            if data is None and waiting.expires < FOREVER:
                todo.append(self._end(waiting, State.EXPIRED, EXPIRED, now))
            elif data is not None and data != before:
                todo.append(self._rewrite(waiting, data, now))
        return todo

    def _patience(self, message: Message) -> int:
        """Return how long to wait for the tower's answer to a message; 0 means without limit."""
        return 0 if is_critical(message) else self._keep

    # ── signals ──────────────────────────────────────────────────────────────────────────────────

    def _signal(self, signal: Signal, now: int, stamped: Signal) -> list[Todo]:
        """Judge a signal. Its id comes from its time as it was stamped, which stays the same if the signal is
        handled again after the ledger failed."""
        device, suppressor = self._devices.at(signal.device), self._devices.suppressor
        fell = signal.lasting and device.back != 0
        if fell:
            device.back, device.covered = 0, ""
        id_ = self.messages.id_of(stamped, device.cancels)
        counting = self._sender.pending.counting(signal.device, signal.reason, signal.critical)
        changed = fell
        if id_ in device.events:
            decision = SuppressionDecision(Ruling.PASS)  # the same signal again, after the ledger failed
        elif counting is not None:
            id_, decision = counting.event, SuppressionDecision(Ruling.DEBOUNCED, counting.due)
            if signal.lasting and device.covered != id_:
                device.covered, changed = id_, True
        else:
            if signal.critical and signal.lasting and not device.covered:
                suppressor.forgive(signal.device, signal.reason, critical=True)
            decision = suppressor.signal(signal.device, signal.at, signal.critical, signal.reason)
            if decision.passes:
                return [self._pass(signal, device, id_, min(signal.at, now), now)]
            changed |= self._devices.hold(signal, decision)
            # the summary reports it, before the limit allows events again
            if decision.ruling is Ruling.LIMITED:
                decision = SuppressionDecision(Ruling.LIMITED, suppressor.summary_due(signal.device))
            id_ = ""
        ruled = MachineEffect(SignalRuling(signal.origin, signal.device, signal.reason, decision, id_))
        if not changed:
            return [ruled]
        return [Step((self._devices.save(signal.device),), lambda results, now: [ruled])]

    def _back(self, name: str, at: int) -> list[Todo]:
        device = self._devices.get(name)
        if device is not None and device.covered and self._policy.settle:
            self._sender.settled(key_of(SCOPE, device.covered), at)
        write = self._devices.came_back(name, at)
        return [] if write is None else [Step((write,), _nothing)]

    def _judge_again(self, now: int) -> list[Todo]:
        """Turn held signals into events if their window has ended and their state still lasts."""
        todo: list[Todo] = []
        for name, reason, held in self._devices.lapsed(now):
            device, suppressor = self._devices.at(name), self._devices.suppressor
            signal = held.signal(name, reason)
            if signal.lasting and (device.back or device.covered):
                todo.append(Step((self._devices.save(name),), _nothing))
                continue
            decision = suppressor.signal(name, now, signal.critical, reason, limit=not held.limited)
            if decision.passes:
                if held.limited:
                    suppressor.remove_from_summary(name, reason)
                id_ = self.messages.id_of(signal, device.cancels)
                todo.append(self._pass(signal, device, id_, now, now))
            else:
                self._devices.hold(signal, decision)
                todo.append(Step((self._devices.save(name),), _nothing))
        return todo

    def _pass(self, signal: Signal, device: MonitoredDevice, id_: str, begins: int, now: int) -> Step:
        """Turn a signal into an event, whose countdown begins at `begins`."""
        device.add(id_, signal.at)
        device.held.pop(signal.reason, None)
        if signal.lasting:
            device.covered = id_
        lasts = seconds(self._policy.countdown) if signal.countdown is None else signal.countdown
        message = self.unstored.get(key_of(SCOPE, id_))
        message = message or self.messages.event(id_, signal, device.cancels, now)
        due = begins + lasts if lasts else min(begins, now)
        more: Group = tuple(self._devices.sweep(now))
        then: list[Todo] = [
            MachineEffect(
                SignalRuling(
                    signal.origin, signal.device, signal.reason, SuppressionDecision(Ruling.PASS), id_, due
                )
            )
        ]
        milder = (
            self._sender.pending.counting(signal.device, signal.reason, False) if signal.critical else None
        )
        if milder is not None:
            key = milder.message.key
            more = (*more, self._sender.drop(key, State.SUPERSEDED, OVERTAKEN, now))
            then.append(ReportOutcome(key, State.SUPERSEDED, OVERTAKEN))
            device.events.pop(event_in(key), None)
        more = (*more, self._devices.save(signal.device))
        return self._sender.send(message, due, now, then, more, signal.origin)

    # ── what a person says ───────────────────────────────────────────────────────────────────────

    def _call_off(self, call: CancelRequest, now: int) -> list[Todo]:
        name = call.device or self._devices.of(call.event)
        device = self._devices.get(name)
        if device is None or (call.event and call.event not in device.events):
            return [MachineEffect(CancelResult(name))]
        # an unsent event can be cancelled however old it is, and whatever the clock shows
        recent = (*device.recent(call.at), *self._sender.pending.of(name))
        events = [call.event] if call.event else list(dict.fromkeys(recent))
        held = () if call.event else tuple(device.held)
        if not events and not held:
            return [MachineEffect(CancelResult(name))]
        if held:
            device.held.clear()
        dropped: list[str] = []
        corrected: list[str] = []
        writes: list[Finish] = []
        steps: list[Todo] = []
        for event in events:
            device.events.pop(event, None)
            key = key_of(SCOPE, event)
            self.unstored.withhold(key)
            if key in self._sender.pending and key not in self.unstored:
                dropped.append(event)
                writes += [
                    self._sender.drop(one, State.CANCELLED, CALLED_OFF, now)
                    for one in (key, *self._sender.pending.behind(event))
                ]
            else:
                corrected.append(event)
                steps.append(self._follow(CANCEL, call.at, CancelData(event, call.at // MS), now))
        if device.covered in events:
            device.covered = ""
        device.cancels += 1
        self._devices.suppressor.cancelled(name, call.at)
        told = CancelResult(name, tuple(dropped), tuple(corrected), held)
        ends: list[Todo] = [ReportOutcome(finish.ref.key, State.CANCELLED, CALLED_OFF) for finish in writes]
        done = Step((*writes, self._devices.save(name)), lambda results, now: [MachineEffect(told), *ends])
        return [done, *steps]

    def _change(self, change: EventChange, now: int) -> list[Todo]:
        if not self._devices.of(change.event):
            return [MachineEffect(NothingToChange(change.event))]
        waiting = self._sender.pending.get(key_of(SCOPE, change.event))
        meta, location = raw(change.meta), raw(change.location)
        if waiting is None or waiting.data is None or waiting.message.key in self.unstored:
            data = UpdateData(change.event, change.severity, meta, location)
            return [self._follow(UPDATE, change.at, data, now)]
        # It has not been sent yet: it goes out in its present form.
        old = waiting.data
        data_now = msgspec.structs.replace(
            old,
            severity=change.severity or old.severity,
            device_meta=meta if change.meta else old.device_meta,
            location=location if change.location else old.location,
        )
        return [self._rewrite(waiting, data_now, now)]

    def _rewrite(self, waiting: PendingEvent, data: EventData, now: int) -> Step:
        message = self.messages.event_of(waiting.event, waiting.message.time, data, now)
        return self._sender.replace(waiting, message, now)

    def _follow(self, kind: str, at: int, data: UpdateData | CancelData, now: int) -> Step:
        message, mark = self.messages.about(kind, at, data, now)
        return self._sender.send(message, at, now, [], (mark,))

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _end(self, waiting: PendingEvent, state: State, answer: Answer, now: int) -> Step:
        """End a message that was not sent, and the messages that wait for it."""
        keys, data = [waiting.message.key], waiting.data
        if data is not None:
            keys += self._sender.pending.behind(waiting.event)
        writes: list[Write] = [self._sender.drop(key, state, answer, now) for key in keys]
        if data is not None:
            writes += self._devices.forget(data, waiting.event, settled=answer is SETTLED)
        reports: list[Todo] = [ReportOutcome(key, state, answer) for key in keys]
        return Step(tuple(writes), lambda results, now: reports)

    def _ended(self, message: Message, state: State, answer: Answer, now: int) -> list[Todo]:
        """Report the end of a message, and start or end the messages that waited for it."""
        self.unstored.forget(message.key)
        todo: list[Todo] = [ReportOutcome(message.key, state, answer)]
        never = message.kind == EVENT and state in (State.FAILED, State.EXPIRED)
        if never and (writes := self._devices.forget(read_event(message.body), message.id)):
            todo.append(Step(tuple(writes), _nothing))
        for key in self._sender.pending.behind(message.id):
            waiting = self._sender.pending[key]
            if never:
                todo.append(self._end(waiting, State.CANCELLED, answer, now))
            elif self._sender.may_start(waiting):
                todo.append(self._sender.start(waiting, now))
        return todo

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wake(self, now: int) -> list[Todo]:
        """Send, judge again, summarise and expire what is due."""
        todo = self._outbox.wake(now) + self._judge_again(now)
        todo += [self._sum_up(summary, now) for summary in self._devices.suppressor.wake(now)]
        for waiting in self._sender.pending.due(now):
            todo += self._due(waiting, now)
        if self._beat_at is not None and self._beat_at <= now:
            self._beat_at = now + seconds(self._policy.heartbeat)
            todo.append(MachineEffect(HeartbeatDue()))
        return todo

    def _due(self, waiting: PendingEvent, now: int) -> list[Todo]:
        """Handle a message whose countdown or expiry has passed."""
        if waiting.expires <= now:
            return [self._end(waiting, State.EXPIRED, EXPIRED, now)]
        todo: list[Todo] = []
        data = waiting.data
        if data is not None and not waiting.queued:
            device = self._devices.get(data.device_address)
            disconnect = data.trigger_reason == DISCONNECT and self._policy.settle
            if disconnect and device is not None and 0 < device.back <= waiting.due:
                return [self._end(waiting, State.CANCELLED, SETTLED, now)]
            self._sender.pending.stop_counting(waiting)
            todo += self._sender.queue(waiting)
        if self._sender.may_start(waiting):
            return [*todo, self._sender.start(waiting, now)]
        self._sender.pending.rest(waiting)
        return todo

    def _advance(self, now: int) -> list[Todo]:
        """Start every message that is due and may go, in order of creation."""
        return [
            todo
            for waiting in self._sender.pending.all()
            if waiting.due <= now
            for todo in self._due(waiting, now)
        ]

    def _sum_up(self, summary: Summary, now: int) -> Step:
        data = SummaryData(summary.held, dict(summary.reasons), summary.since // MS)
        device = self._devices.at(summary.device)
        signal = Signal(summary.device, SUMMARY, now)
        id_ = self.messages.id_of_summary(summary)
        ruled = MachineEffect(
            SignalRuling(None, summary.device, SUMMARY, SuppressionDecision(Ruling.PASS), id_, now)
        )
        message = self.messages.event(id_, signal, device.cancels, now, data)
        return self._sender.send(message, now, now, [ruled], (self._devices.save(summary.device),))

    def next_wake(self) -> int | None:
        """Return when `wake` has something to do, or None."""
        devices = self._devices
        wakes = (
            self._sender.next_wake(), devices.suppressor.next_wake(), devices.next_wake(), self._beat_at,
        )  # fmt: skip
        return min((when for when in wakes if when is not None), default=None)

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much; the tower's clock did not move."""
        self.steps += by
        self._sender.shift(by)
        if self.messages.offset is not None:
            self.messages.offset -= by
        self._devices.shift(by)
        if self._beat_at is not None:
            self._beat_at += by


def _nothing(_: Results, __: int) -> list[Todo]:
    return []


def event_in(key: bytes) -> str:
    """Return the id in a key of the monitor: that of an event, an update or a cancel."""
    return names_in(key)[1]
