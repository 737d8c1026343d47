"""The stored events that a sentinel has not sent: they are in their countdown, wait for a connection, or wait
for another event.

The law: a message that waits here is in the ledger as a delivery without an attempt. Timers measure lengths
of time: they move with the wall clock when it is set, and after a restart with a clock that was set back no
message waits longer than its full countdown. An expiry is a length as well: it counts only while the sentinel
runs, since the clock may show any time after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator

from duly.core.messages import Message
from duly.core.monitor.signals import EVENT, EventData, Severity, event_of, read_event
from duly.core.timers import Timers
from duly.core.units import FOREVER


class PendingEvent:
    """A message that was not sent yet."""

    __slots__ = ("data", "due", "event", "expires", "message", "queued", "steps")

    def __init__(self, message: Message, due: int, *, queued: bool = False, steps: int | None = 0) -> None:
        self.message = message
        self.due = due
        self.expires = message.expires or FOREVER
        """when it expires; `FOREVER`: never"""
        self.steps = steps
        """by how much the wall clock was set since it was created; None if an earlier run created it"""
        self.data: EventData | None = read_event(message.body) if message.kind == EVENT else None
        self.event = message.id if self.data is not None else event_of(message.body)
        self.queued = queued
        """its countdown is over, and that was reported"""

    @property
    def cause(self) -> tuple[str, str, bool] | None:
        """Device, reason, and whether it is critical; None for an update or a cancel."""
        data = self.data
        if data is None:
            return None
        return data.device_address, data.trigger_reason, data.severity is Severity.CRITICAL


class PendingEvents:
    """The unsent messages of one sentinel, in order of creation."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, PendingEvent] = {}
        self._counting: dict[tuple[str, str, bool], bytes] = {}
        """events in their countdown, by device, reason and whether they are critical"""
        self._behind: dict[str, list[bytes]] = {}
        """messages that wait for an event, by the event's id"""
        self._timers = Timers[bytes]()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def __getitem__(self, key: bytes) -> PendingEvent:
        return self._waiting[key]

    def get(self, key: bytes) -> PendingEvent | None:
        """Return the message with this key, or None."""
        return self._waiting.get(key)

    def all(self) -> list[PendingEvent]:
        """Return all pending messages in order of creation."""
        return list(self._waiting.values())

    def counting(self, device: str, reason: str, critical: bool) -> PendingEvent | None:
        """Return the event that is in its countdown for this cause, or None."""
        return self._waiting.get(self._counting.get((device, reason, critical), b""))

    def of(self, device: str) -> list[str]:
        """Return the events of a device that were not sent, without the summaries."""
        return [
            waiting.event
            for waiting in self._waiting.values()
            if (data := waiting.data) is not None and data.device_address == device and data.summary is None
        ]

    def behind(self, event: str) -> list[bytes]:
        """Return the keys of the messages that wait for this event."""
        return list(self._behind.get(event, ()))

    def add(self, waiting: PendingEvent) -> None:
        """Add a message, and set its timer."""
        key = waiting.message.key
        self._waiting[key] = waiting
        if waiting.cause is None:
            self._behind.setdefault(waiting.event, []).append(key)
        elif not waiting.queued:
            self._counting[waiting.cause] = key
        self._timers.set(key, waiting.due)

    def add_again(self, waiting: PendingEvent, keep: int, now: int) -> None:
        """Add a message after a restart; its countdown is never longer than before, even if the clock was set
        back. A held signal is older than its event, so the start of the countdown is computed from the
        event's expiry, `keep` after its creation."""
        message = waiting.message
        begun = max(message.time, message.expires - keep) if message.expires else message.time
        waiting.due = min(waiting.due, now + max(0, waiting.due - begun))
        waiting.expires = now + keep if message.expires else FOREVER
        self.add(waiting)

    def remove(self, waiting: PendingEvent) -> None:
        """Remove a message and its timer."""
        key = waiting.message.key
        self._waiting.pop(key, None)
        self._timers.cancel(key)
        self.stop_counting(waiting)
        behind = self._behind.get(waiting.event)
        if behind is not None and key in behind:
            behind.remove(key)
            if not behind:
                del self._behind[waiting.event]

    def stop_counting(self, waiting: PendingEvent) -> None:
        """Note that the countdown of a message is over; harmless if it has none."""
        cause = waiting.cause
        if cause is not None and self._counting.get(cause) == waiting.message.key:
            del self._counting[cause]

    def rest(self, waiting: PendingEvent) -> None:
        """Let a message wait for the tower, with its expiry as its only timer."""
        self._timers.set(waiting.message.key, waiting.expires)

    def due(self, now: int) -> Iterator[PendingEvent]:
        """Yield the messages that are due, each once."""
        for key in self._timers.due(now):
            yield self._waiting[key]

    def next_wake(self) -> int | None:
        """Return when the next message is due, or None."""
        return self._timers.next_wake()

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: countdowns keep their length."""
        for waiting in self._waiting.values():
            waiting.due += by
            if waiting.expires < FOREVER:
                waiting.expires += by
            if waiting.steps is not None:
                waiting.steps += by
        self._timers.shift(by)
