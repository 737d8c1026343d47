"""The messages and deliveries that a fanout has under way, and when each expires.

All of this is kept in memory only and is read from the ledger again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from duly.core.fanout.recipient_queue import QueuedDelivery, RecipientPolicy, RecipientQueues
from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.operations import DeliveryRef, OpenDelivery
from duly.core.steps import Origin
from duly.core.timers import Timers
from duly.core.units import FOREVER


class ActiveMessage:
    """A message with open deliveries at this worker, and the senders that wait for its outcome."""

    __slots__ = (
        "committed", "in_doubt", "items", "message", "noted", "origins", "planned", "reached", "shared",
    )  # fmt: skip

    def __init__(self, message: Message, origins: list[Origin], *, committed: bool) -> None:
        self.message = message
        self.origins = origins
        self.committed = committed
        self.items: set[DeliveryRef] = set()
        self.planned: Sequence[QueuedDelivery] = ()
        """its deliveries while they are being committed"""
        self.reached = False
        self.in_doubt = False
        self.shared = False
        """another worker has claimed or ended one of its deliveries, so this worker cannot tell the outcome
        alone"""
        self.noted = False
        """the note that another worker may end it has been written"""


class ActiveMessages:
    """The messages and deliveries that one fanout has under way."""

    def __init__(self, policy: Callable[[str], RecipientPolicy]) -> None:
        self.lives: dict[bytes, ActiveMessage] = {}
        self.items: dict[DeliveryRef, QueuedDelivery] = {}
        self.queues = RecipientQueues(policy)
        self._expiries = Timers[QueuedDelivery]()

    def begin_anew(self) -> tuple[dict[bytes, ActiveMessage], dict[DeliveryRef, QueuedDelivery]]:
        """Forget everything, as after a restart, and return what was there."""
        before = self.lives, self.items
        self.lives, self.items = {}, {}
        self.queues = self.queues.afresh()
        self._expiries.clear()
        return before

    def enter(self, live: ActiveMessage, item: QueuedDelivery) -> None:
        """Add a delivery of this message."""
        self.items[item.ref] = item
        live.items.add(item.ref)
        self.set_expiry(item)

    def set_expiry(self, item: QueuedDelivery) -> None:
        """Set the timer of a delivery's expiry."""
        if item.expires and item.waits_for_lengths:
            self._expiries.set(item, item.expires)
        elif item.expires:
            self._expiries.set(item, FOREVER, until=item.expires)

    @property
    def closed(self) -> list[QueuedDelivery]:
        """The deliveries that wait for a time of day and were never tried."""
        return [item for item in self.items.values() if item.opens and not item.attempt]

    def strike(self, item: QueuedDelivery) -> None:
        """Remove a delivery that has ended or belongs to another worker."""
        item.gone = True
        self._expiries.cancel(item)
        self.queues.drop(item)
        self.items.pop(item.ref, None)
        live = self.lives.get(item.ref.key)
        if live is not None:
            live.items.discard(item.ref)
            if not live.items:
                del self.lives[item.ref.key]

    def revive(self, one: OpenDelivery, before: Mapping[bytes, ActiveMessage]) -> ActiveMessage:
        """Return the message of an open delivery, with the senders that waited for it before a restart."""
        key = one.message.key
        live = self.lives.get(key)
        if live is None:
            listening = before[key].origins if key in before else []
            live = self.lives[key] = ActiveMessage(one.message, listening, committed=True)
            live.reached = one.state is State.DELIVERED
        return live

    def state(self, live: ActiveMessage) -> State:
        """Return the state of a message."""
        if live.reached:
            return State.DELIVERED
        return State.SENT if any(self.items[ref].attempt for ref in live.items) else State.ACCEPTED

    def expired(self, now: int) -> Iterator[QueuedDelivery]:
        """Yield the expired deliveries, except those with an attempt under way, which may still arrive."""
        for item in self._expiries.due(now):
            if not item.under_way:
                yield item

    def shift(self, by: int, seen: int) -> None:
        """Adjust to a wall clock that was set by this much after `seen`, also deliveries that are being
        committed and are in no queue yet."""
        for item in self.items.values():
            if 0 < item.opens <= seen:
                item.opens = 0
                self.queues.opened(item)
                self.set_expiry(item)
        self.queues.shift(by)
        self._expiries.shift(by)
        for live in self.lives.values():
            for item in live.planned:
                item.shift(by)
        for item in self.items.values():
            item.shift(by)

    def next_expiry(self) -> int | None:
        """Return when the next delivery expires, or None."""
        return self._expiries.next_wake()
