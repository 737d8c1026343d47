"""Connections: the people connected to this hub's chat, and the conversations of each connection.

The laws. A person may have several connections, each with its own subscription to every conversation of that
person. All of this is in memory and concerns this hub alone; the cursors are in the ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Coroutine
from typing import Final, TypeAlias

from duly.apps.chat import conversations as c
from duly.identity.accounts import Principal
from duly.wire.outgoing import OutgoingFrame
from duly.wire.session import Session

FEEDS: Final = 8
"""In how many conversations of a connection missed lines are read at the same time."""
WINDOW: Final = 1_000
"""How many lines of a conversation may be sent ahead of their acknowledgement."""

ReadSubscription: TypeAlias = "Callable[[Subscription], Coroutine[object, None, None]]"
"""Sends a subscription what it missed."""
Start: TypeAlias = Callable[[Coroutine[object, None, None]], None]
"""Runs a coroutine in the background."""


class Subscriber:
    """One connection of a person."""

    __slots__ = ("_behind", "_early", "_feeds", "loading", "missed", "session", "subscriptions", "who")

    def __init__(self, session: Session, who: Principal) -> None:
        self.session = session
        self.who = who
        self.subscriptions: dict[str, Subscription] = {}
        self.loading = True
        self.missed: set[str] = set()
        """conversations in which a line was stored while the subscriptions were read"""
        self._behind: deque[Subscription] = deque()
        """subscriptions that wait to be sent what they missed"""
        self._feeds = 0
        """how many tasks send that"""
        self._early: list[OutgoingFrame] = []

    def pass_on(self, frame: OutgoingFrame) -> None:
        """Send a frame that is not stored (typing, presence, a receipt), unless the welcome is still to
        come."""
        if self.loading:
            self._early.append(frame)
        else:
            self.session.push(frame)

    def greeted(self) -> None:
        """Note that the welcome was sent, and send what waited for it."""
        self.loading = False
        for frame in self._early:
            self.session.push(frame)
        self._early.clear()

    def catch_up(self, subscription: Subscription, read: ReadSubscription, start: Start) -> None:
        """Read what a subscription has missed, in a few of them at a time: a person may have thousands."""
        self._behind.append(subscription)
        self._start_feed(read, start)

    def _start_feed(self, read: ReadSubscription, start: Start) -> None:
        if self._behind and self._feeds < FEEDS:
            self._feeds += 1
            start(self._feed(read, start))

    async def _feed(self, read: ReadSubscription, start: Start) -> None:
        try:
            while self._behind:
                await read(self._behind.popleft())
        except Exception:
            self._feeds -= 1
            self._start_feed(read, start)
            raise
        self._feeds -= 1


class Subscription:
    """One connection's subscription to one conversation: up to which line it was sent, and has
    acknowledged."""

    __slots__ = (
        "acked",
        "attempt",
        "busy",
        "conv",
        "has",
        "head",
        "noted",
        "over",
        "since",
        "subscriber",
        "told",
        "waiting",
    )  # fmt: skip

    def __init__(self, subscriber: Subscriber, conv: str, told: int, head: int, noted: int) -> None:
        self.subscriber = subscriber
        self.conv = conv
        self.told = self.acked = told
        self.noted = noted
        """up to which line the ledger knows the connection's acknowledgement"""
        self.has = noted
        """the same, including the person's own lines since; not what a client claimed at its connection,
        since it may have received more than it has processed"""
        self.head = head
        """the number of the last line, as far as this hub knows"""
        self.attempt = 1
        self.since = 0
        """when the oldest unacknowledged line was sent"""
        self.busy = False
        """it is being sent what it missed"""
        self.over = False
        self.waiting = False
        """the ledger has a note that it does not acknowledge"""

    @property
    def ready(self) -> bool:
        """Whether the next line can be sent to it at once."""
        if self.busy or self.told - self.acked >= WINDOW:
            return False
        subscriber = self.subscriber
        return not (subscriber.loading or subscriber.session.congested)

    @property
    def room(self) -> int:
        """How many more lines may be sent ahead of the acknowledgement."""
        return WINDOW - (self.told - self.acked)


class Connections:
    """The connections of one hub's chat, by session, by person and by conversation."""

    def __init__(self) -> None:
        self._by_session: dict[Session, Subscriber] = {}
        self._by_name: dict[str, list[Subscriber]] = {}
        self._by_conv: dict[str, dict[Subscriber, Subscription]] = {}

    def add(self, session: Session, who: Principal) -> Subscriber:
        """Add the connection of a person."""
        subscriber = self._by_session[session] = Subscriber(session, who)
        self._by_name.setdefault(who.name, []).append(subscriber)
        return subscriber

    def remove(self, session: Session) -> Subscriber | None:
        """Remove a connection that has ended; return it if it was one of chat. It stays subscribed to its
        conversations."""
        subscriber = self._by_session.pop(session, None)
        if subscriber is not None:
            subscribers = self._by_name[subscriber.who.name]
            subscribers.remove(subscriber)
            if not subscribers:
                del self._by_name[subscriber.who.name]
        return subscriber

    def subscribe(self, subscriber: Subscriber, conv: str, told: int, head: int, noted: int = 0) -> None:
        """Subscribe a connection to a conversation, unless it has ended."""
        if subscriber.session in self._by_session:
            subscription = subscriber.subscriptions[conv] = Subscription(subscriber, conv, told, head, noted)
            self._by_conv.setdefault(conv, {})[subscriber] = subscription

    def unsubscribe(self, subscriber: Subscriber, conv: str) -> Subscription | None:
        """Unsubscribe a connection from a conversation; return the ended subscription."""
        subscription = subscriber.subscriptions.pop(conv, None)
        if subscription is not None:
            subscription.over = True
            present = self._by_conv[conv]
            del present[subscriber]
            if not present:
                del self._by_conv[conv]
        return subscription

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._by_session)

    def of_session(self, session: Session) -> Subscriber | None:
        """Return the connection of a session, if it is one of chat."""
        return self._by_session.get(session)

    def of_person(self, name: str) -> list[Subscriber]:
        """Return the connections of a person."""
        return self._by_name.get(name, [])

    def people(self) -> list[str]:
        """Return the people who are connected."""
        return list(self._by_name)

    def in_conversation(self, conv: str) -> list[Subscriber]:
        """Return the connections that are in a conversation."""
        return list(self._by_conv.get(conv, ()))

    def count(self, conv: str) -> int:
        """Return how many connections are in a conversation."""
        return len(self._by_conv.get(conv, ()))

    def subscriptions(self, conv: str) -> Collection[Subscription]:
        """Return the subscriptions to a conversation; the result changes as connections come and go."""
        return self._by_conv[conv].values() if conv in self._by_conv else ()

    def conversations(self) -> list[str]:
        """Return the conversations of the people connected here."""
        return list(self._by_conv)

    def concern(self, conv: str) -> bool:
        """Return whether a connection here is in this conversation, or may be about to join it."""
        return conv in self._by_conv or any(self.of_person(name) for name in c.pair_in(conv))

    def head(self, conv: str) -> int | None:
        """Return the last line of a conversation that every subscription here knows of, or None."""
        return min((each.head for each in self.subscriptions(conv)), default=None)

    def attempts(self, conv: str, n: int, names: Container[str]) -> int:
        """Return how often a line was sent to the connections of these people here that have not
        acknowledged it; 0 if none."""
        waiting = [
            each.attempt
            for each in self.subscriptions(conv)
            if each.acked < n <= each.told and each.subscriber.who.name in names
        ]
        return max(waiting, default=0)

    def counts(self) -> dict[str, int]:
        """Return the connected people with the number of their conversations, not counting the notes to them;
        among several connections the least."""
        return {
            name: min(len(subscriber.subscriptions) for subscriber in subscribers) - 1
            for name, subscribers in self._by_name.items()
        }
