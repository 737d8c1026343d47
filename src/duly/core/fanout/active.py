"""The active: what a fanout has under way, by message, by delivery and by route, and when it expires.

It is memory. The truth is in the ledger, and after a restart the active is written anew from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from duly.core.fanout.recipient_queue import QueuedDelivery, RecipientPolicy, RecipientQueues
from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.operations import DeliveryRef, OpenDelivery
from duly.core.steps import Origin
from duly.core.timers import Timers
from duly.core.units import FOREVER


class ActiveMessage:
    """A message under way here."""

    __slots__ = ("committed", "in_doubt", "items", "message", "origins", "reached")

    def __init__(self, message: Message, origins: list[Origin], *, committed: bool) -> None:
        self.message = message
        self.origins = origins
        self.committed = committed
        self.items: set[DeliveryRef] = set()
        self.reached = False
        self.in_doubt = False


class ActiveMessages:
    """One fanout's."""

    def __init__(self, route: Callable[[str], RecipientPolicy]) -> None:
        self.lives: dict[bytes, ActiveMessage] = {}
        self.items: dict[DeliveryRef, QueuedDelivery] = {}
        self.routes = RecipientQueues(route)
        self._expiries = Timers[QueuedDelivery]()

    def begin_anew(self) -> tuple[dict[bytes, ActiveMessage], dict[DeliveryRef, QueuedDelivery]]:
        """As after a restart; what was in it."""
        before = self.lives, self.items
        self.lives, self.items = {}, {}
        self.routes = self.routes.afresh()
        self._expiries.clear()
        return before

    def enter(self, live: ActiveMessage, item: QueuedDelivery) -> None:
        self.items[item.ref] = item
        live.items.add(item.ref)
        if item.expires:
            self._expiries.set(item, FOREVER, until=item.expires)

    def strike(self, item: QueuedDelivery) -> None:
        """It is no longer ours to deliver."""
        item.gone = True
        self._expiries.cancel(item)
        self.routes.drop(item)
        self.items.pop(item.ref, None)
        live = self.lives.get(item.ref.key)
        if live is not None:
            live.items.discard(item.ref)
            if not live.items:
                del self.lives[item.ref.key]

    def revive(self, one: OpenDelivery, before: Mapping[bytes, ActiveMessage]) -> ActiveMessage:
        """The message of an open delivery, and who was waiting for it before."""
        key = one.message.key
        live = self.lives.get(key)
        if live is None:
            listening = before[key].origins if key in before else []
            live = self.lives[key] = ActiveMessage(one.message, listening, committed=True)
            live.reached = one.state is State.DELIVERED
        return live

    def state(self, live: ActiveMessage) -> State:
        if live.reached:
            return State.DELIVERED
        return State.SENT if any(self.items[ref].attempt for ref in live.items) else State.ACCEPTED

    def expired(self, now: int) -> Iterator[QueuedDelivery]:
        """What has expired; what is just on its way may still arrive."""
        for item in self._expiries.due(now):
            if not item.flying:
                yield item

    def next_expiry(self) -> int | None:
        return self._expiries.next_wake()
