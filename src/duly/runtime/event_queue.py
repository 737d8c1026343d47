"""The events that wait for an engine, and the senders that wait for room among them.

The laws. The queue is bounded. While all events fit into one commit, no sender delays another, and events are
taken in order of arrival; beyond that, senders take turns. A sender whose share is full is refused (`offer`)
or waits for room in order of arrival (`put`); while one of its events waits for room, none of its later ones
overtakes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from duly.core.fair_queue import NO_SENDER, FairQueue
from duly.core.steps import Arrived, Event

SHARE: Final = 1_000
"""How many events of one sender may wait in the queue."""

LET_IN: Final = 16
"""How many events of one sender are admitted at once when there is room again."""

LINE: Final = 500
"""How many events are kept in order of arrival: as many as one commit takes. With more, senders take
turns."""

LINE_BYTES: Final = 16 * 1024
"""The largest message in the line; with a larger one, senders take turns."""

QueuedEvent: TypeAlias = tuple[Event, Callable[[], None] | None]
"""An event, and what to call when it is committed."""


class EventQueue:
    """The queue of one engine. With `fair`, senders take turns; otherwise events are taken in order of
    arrival."""

    def __init__(self, capacity: int, *, fair: bool) -> None:
        self._events: FairQueue[QueuedEvent] = FairQueue(capacity=capacity, share=SHARE)
        self._fair = fair
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """senders whose share is full, with their events in order of arrival"""
        self._events.barred = self._waiting
        self._capacity = capacity
        self._line: list[QueuedEvent] = []
        """the waiting events, while there are few"""
        self._room = min(LINE, capacity)
        """how many events the line may hold; 0 while senders take turns"""

    def offer(self, event: Event, committed: Callable[[], None] | None) -> bool:
        """Add an event if there is room for it; return whether there was."""
        line = self._line
        if len(line) < self._room and (type(event) is not Arrived or len(event.message.body) <= LINE_BYTES):
            line.append((event, committed))
            return True
        self._take_turns()
        return self._events.offer(self._sender(event), (event, committed), _size(event))

    def excess(self, event: Event) -> str:
        """Return a sentence about why there is no room for an event."""
        sender = self._sender(event)
        return f"{len(self)} events{f' of {sender}' if sender else ''} are waiting"

    async def wait_for_room(self, event: Event) -> None:
        """Return when there is room for an event, or when no more events are accepted."""
        if len(self._line) < self._room:
            return
        self._take_turns()
        sender = self._sender(event)
        if sender not in self._waiting and self._events.room(sender) > 0:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(sender, deque())
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in waiting:
                waiting.remove(turn)
            else:
                self.make_room()  # the room goes to the next waiting event
            raise

    def append(self, event: Event, committed: Callable[[], None] | None) -> None:
        """Add an event, whether or not there is room."""
        if not self.offer(event, committed):
            self._events.append(self._sender(event), (event, committed), _size(event))

    def take(self, most: int, most_bytes: int) -> tuple[list[QueuedEvent], int]:
        """Remove and return the next events, at most this many, with the approximate bytes of their
        messages."""
        line = self._line
        if len(line) <= most and len(line) * LINE_BYTES <= most_bytes and not self._events:
            self._line = []
            return line, len(line) * LINE_BYTES
        self._take_turns()
        taken = self._events.take(most, most_bytes)
        self._set_room()
        return taken

    def reserve(self, room: int) -> None:
        """Reserve room for events without a sender that were taken and are not committed yet."""
        self._events.reserved = room
        self._set_room()
        if self._waiting:
            self.make_room()

    def _take_turns(self) -> None:
        """Sort the line by sender; from now on senders take turns until the queue is empty."""
        self._room = 0
        line, self._line = self._line, []
        for event, committed in line:
            self._events.append(self._sender(event), (event, committed), _size(event))

    def _set_room(self) -> None:
        """Keep events in order of arrival, if no sender waits for its turn."""
        if self._events or self._waiting:
            self._take_turns()
        else:
            self._room = min(LINE, self._capacity - self._events.reserved)

    def put_back(self, events: Iterable[QueuedEvent]) -> None:
        """Put events without a sender back at the front; messages are dropped, since their senders are told
        to send them again."""
        self._take_turns()
        self._events.put_back(each for each in events if not isinstance(each[0], Arrived))

    def remove_arrivals(self) -> list[Arrived]:
        """Remove the messages, and return them; other events stay."""
        self._take_turns()
        waiting = list(self._events)
        self._events.clear()
        self._events.put_back(each for each in waiting if not isinstance(each[0], Arrived))
        return [event for event, _ in waiting if isinstance(event, Arrived)]

    def clear(self) -> None:
        """Remove every event."""
        self._line = []
        self._events.clear()

    def make_room(self, *, all_: bool = False) -> None:
        """Admit waiting events as far as there is room, a few at a time, since their messages may be large.
        With `all_`, wake all of them, because no more events are accepted."""
        for sender, waiting in list(self._waiting.items()):
            room = len(waiting) if all_ else min(self._events.room(sender), LET_IN)
            while waiting and room > 0:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    room -= 1
            if not waiting:
                del self._waiting[sender]

    def _sender(self, event: Event) -> str:
        """Return the sender whose share of the queue an event uses."""
        return event.message.scope if self._fair and type(event) is Arrived else NO_SENDER

    def __len__(self) -> int:
        return len(self._line) + len(self._events)


def _size(event: Event) -> int:
    """Return the bytes of an event's message."""
    return len(event.message.body) if type(event) is Arrived else 0
