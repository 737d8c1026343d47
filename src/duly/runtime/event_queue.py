"""The events that wait for an engine, and the senders that wait for room among them.

The laws. What waits is bounded. While all of it fits into one commit, no sender delays another, and events
are taken in the order they came; beyond that, senders take turns. A sender whose share is full is refused
(`offer`) or waits for room in the order it came (`put`); while one of its events waits for room, none of its
later ones gets in before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from duly.core.fair_queue import NO_SENDER, FairQueue
from duly.core.steps import Arrived, Event

SHARE: Final = 1_000
"""Of one sender. What others send is taken in turns with it."""

LET_IN: Final = 16
"""Of one sender at once, when there is room again."""

LINE: Final = 500
"""Events that wait in the order they came: as many as one commit takes. With more, senders take turns."""

LINE_BYTES: Final = 16 * 1024
"""Of one message in the line; with a larger one, senders take turns."""

QueuedEvent: TypeAlias = tuple[Event, Callable[[], None] | None]
"""An event, and what to call when it is committed."""


class EventQueue:
    """The queue of one engine. `fair`: senders take turns; otherwise everything is taken in the order it
    came, from any sender."""

    def __init__(self, capacity: int, *, fair: bool) -> None:
        self._events: FairQueue[QueuedEvent] = FairQueue(capacity=capacity, share=SHARE)
        self._fair = fair
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """senders whose share is full, each in the order they came"""
        self._events.barred = self._waiting
        self._capacity = capacity
        self._line: list[QueuedEvent] = []
        """the events that wait, while they are few"""
        self._room = min(LINE, capacity)
        """how many the line may hold; 0 while senders take turns"""

    def offer(self, event: Event, committed: Callable[[], None] | None) -> bool:
        """Add an event if there is room for it, and return whether there was."""
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
        """Return when there is room for an event, or when no event is taken any more."""
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
                self.make_room()  # it was our turn: the next one's now
            raise

    def append(self, event: Event, committed: Callable[[], None] | None) -> None:
        """Add an event, whether or not there is room."""
        if not self.offer(event, committed):
            self._events.append(self._sender(event), (event, committed), _size(event))

    def take(self, most: int, most_bytes: int) -> tuple[list[QueuedEvent], int]:
        """Remove the next events, at most so many, and return them with about the bytes of their messages."""
        line = self._line
        if len(line) <= most and len(line) * LINE_BYTES <= most_bytes and not self._events:
            self._line = []
            return line, len(line) * LINE_BYTES
        self._take_turns()
        taken = self._events.take(most, most_bytes)
        self._set_room()
        return taken

    def reserve(self, room: int) -> None:
        """Keep so much room free of events without a sender: that many were taken and are not committed."""
        self._events.reserved = room
        self._set_room()
        if self._waiting:
            self.make_room()

    def _take_turns(self) -> None:
        """Sort the line by sender; from now on senders take turns, until nothing waits any more."""
        self._room = 0
        line, self._line = self._line, []
        for event, committed in line:
            self._events.append(self._sender(event), (event, committed), _size(event))

    def _set_room(self) -> None:
        """Let events stand in line, if no sender waits for its turn."""
        if self._events or self._waiting:
            self._take_turns()
        else:
            self._room = min(LINE, self._capacity - self._events.reserved)

    def put_back(self, events: Iterable[QueuedEvent]) -> None:
        """Put events that have no sender back before the others; messages are left out, since their senders
        are told to send them again."""
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
        """Let in those who wait, as far as there is room for them now; a few at a time, since their messages
        may be large. With `all_`, every one of them: they are told that no event is taken any more."""
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
        """Return whose share of the queue an event takes."""
        return event.message.scope if self._fair and type(event) is Arrived else NO_SENDER

    def __len__(self) -> int:
        return len(self._line) + len(self._events)


def _size(event: Event) -> int:
    """Return the bytes of an event's message."""
    return len(event.message.body) if type(event) is Arrived else 0
