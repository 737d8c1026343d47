"""Sends the messages of a sentinel to its tower, each when it is due and may go.

The laws. A message is stored before it is sent. It is sent when its countdown is over and the tower is
reachable; an update or a cancel is sent when the tower has its event. A message that is due at once is stored
and started in one commit. A sent message does not expire by the wall clock: the outbox waits for its answer
for a length of time.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.pending_events import PendingEvent, PendingEvents
from duly.core.monitor.signals import EventQueued, SignalRuling
from duly.core.monitor.suppression import Ruling, SuppressionDecision
from duly.core.monitor.unstored_events import UnstoredEvents
from duly.core.operations import Admit, Advance, Deliver, Finish, Group, OpenDelivery, Results, Withdraw
from duly.core.outbox import Outbox
from duly.core.steps import MachineEffect, Origin, Step, Todo
from duly.core.units import FOREVER


class EventSender:
    """Sends the messages of one sentinel: those that are `pending`, and those in its outbox."""

    def __init__(self, outbox: Outbox, unstored: UnstoredEvents, keep: int) -> None:
        self.outbox = outbox
        self.unstored = unstored
        self.pending = PendingEvents()
        self.reachable = False
        self._keep = keep
        self._starting: dict[bytes, int] = {}
        """when each message that is being started was due"""

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages that have not ended."""
        return [*self.outbox.keys, *self.pending]

    def __len__(self) -> int:
        return len(self.outbox) + len(self.pending) + len(self._starting)

    def restore(self, open_: Sequence[OpenDelivery], now: int) -> list[Todo]:
        """Continue from the ledger, and report each waiting event: a person may still cancel it. An event
        that was sent unstored is stored in the form that the tower may have."""
        before, self.pending = self.pending, PendingEvents()
        self._starting.clear()
        self.unstored.judge_again()
        sent = [
            structs.replace(item, message=_lasting(item.message)) for item in open_ if item.delivery.attempt
        ]
        todo = self.outbox.restore(sent, (), {}, now)
        for item in open_:
            if not item.delivery.attempt:
                known = before.get(item.message.key)
                waiting = PendingEvent(item.message, item.delivery.due, steps=known.steps if known else None)
                self.pending.add_again(waiting, self._keep, now)
                data, passed = waiting.data, SuppressionDecision(Ruling.PASS)
                if data is not None:
                    device, reason = data.device_address, data.trigger_reason
                    ruling = SignalRuling(None, device, reason, passed, waiting.event, waiting.due)
                    todo.append(MachineEffect(ruling))
                unstored = self.unstored.get(item.message.key)
                if unstored is not None and unstored.body != item.message.body:
                    todo.append(self.replace(waiting, unstored, now))
        return todo

    def send(
        self, message: Message, due: int, now: int, then: list[Todo], more: Group, origin: Origin = None
    ) -> Step:
        """Admit a message, and start it in the same commit if nothing prevents that."""
        waiting = PendingEvent(message, due)
        at_once = due <= now and self.may_start(waiting)
        if at_once:
            self._starting[message.key] = due
            admit = Admit(message, FOREVER, now, State.SENT, (self.outbox.launch(message, now),))
        else:
            if due <= now:
                then = [*then, *self.queue(waiting)]
            self.pending.add(waiting)
            admit = self._admit(message, due, now)

        def done(results: Results, now: int) -> list[Todo]:
            if not at_once:
                return then  # it may have been started meanwhile by another step
            self._starting.pop(message.key, None)
            fresh = results.of(admit).fresh
            return [*then, self.outbox.launched(_lasting(message), 1, -1, now)] if fresh else then

        return Step((admit, *more), done, self.unstored.failed(message, origin) if due <= now else ())

    def replace(self, waiting: PendingEvent, message: Message, now: int) -> Step:
        """Store an unsent message again in its present form."""
        self.pending.stop_counting(waiting)
        self.pending.add(PendingEvent(message, waiting.due, queued=waiting.queued, steps=waiting.steps))
        return Step((Withdraw(message.key), self._admit(message, waiting.due, now)), lambda results, now: [])

    def _admit(self, message: Message, due: int, now: int) -> Admit:
        return Admit(message, FOREVER, now, then=(Deliver(self.outbox.ref(message), due, message.expires),))

    def queue(self, waiting: PendingEvent) -> list[Todo]:
        """Note that a message's countdown is over, and report it."""
        waiting.queued = True
        data = waiting.data
        if data is None:
            return []
        return [MachineEffect(EventQueued(waiting.event, data.device_address, data.trigger_reason))]

    def may_start(self, waiting: PendingEvent) -> bool:
        """Return whether the tower is reachable and has the event that a message refers to."""
        if not self.reachable:
            return False
        return waiting.data is not None or not self._is_open(key_of(SCOPE, waiting.event))

    def settled(self, key: bytes, at: int) -> None:
        """Note that the device of a message was back at this time; a message that was not due by then is not
        sent unstored."""
        if at <= self._starting.get(key, 0):
            self.unstored.withhold(key)

    def _is_open(self, key: bytes) -> bool:
        return key in self.pending or key in self._starting or key in self.outbox.transmissions

    def start(self, waiting: PendingEvent, now: int) -> Step:
        """Hand a waiting message to the outbox."""
        message = _lasting(waiting.message)
        self.pending.remove(waiting)
        self._starting[message.key] = waiting.due

        def done(results: Results, now: int) -> list[Todo]:
            self._starting.pop(message.key, None)
            return [self.outbox.launched(message, 1, -1, now)] if results.of(take) else []

        take = self.outbox.relaunch(message, 0, now)
        return Step((take, Advance(message.key, State.SENT, now)), done, self.unstored.failed(message))

    def drop(self, key: bytes, state: State, answer: Answer, now: int) -> Finish:
        """Remove a message that was not sent, and return the write that ends it."""
        waiting = self.pending[key]
        self.pending.remove(waiting)
        ref = self.outbox.ref(waiting.message)
        return Finish(ref, 0, state, answer.reason, (Advance(key, state, now, answer),))

    def next_wake(self) -> int | None:
        """Return when the next message is due, or None."""
        wakes = (self.outbox.next_wake(), self.pending.next_wake())
        return min((when for when in wakes if when is not None), default=None)

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much."""
        self.outbox.shift(by)
        self.pending.shift(by)
        self._starting = {key: due + by for key, due in self._starting.items()}


def _lasting(message: Message) -> Message:
    """Return a message without its expiry."""
    return structs.replace(message, expires=0) if message.expires else message
