"""Connections: which people are connected to this hub's chat, and in which conversations each connection is.

The laws. A person may have several connections, and each has a subscription of its own to every conversation
of that person. Everything here is in memory and about this hub alone; the ledger has the cursors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from duly.apps.chat import conversations as c
from duly.identity.accounts import Principal
from duly.wire.outgoing import OutgoingFrame
from duly.wire.session import Session

WINDOW: Final = 1_000
"""Lines of a conversation that go ahead of their acknowledgement."""


class Subscriber:
    """One connection of a person."""

    __slots__ = ("_early", "loading", "missed", "session", "subscriptions", "who")

    def __init__(self, session: Session, who: Principal) -> None:
        self.session = session
        self.who = who
        self.subscriptions: dict[str, Subscription] = {}
        self.loading = True
        self.missed: set[str] = set()
        """conversations in which a line was stored while the subscriptions were being read"""
        self._early: list[OutgoingFrame] = []

    def pass_on(self, frame: OutgoingFrame) -> None:
        """Sends a frame that is kept nowhere (typing, presence, a receipt), but none before the welcome."""
        if self.loading:
            self._early.append(frame)
        else:
            self.session.push(frame)

    def greeted(self) -> None:
        """The welcome is sent: what waited for it follows."""
        self.loading = False
        for frame in self._early:
            self.session.push(frame)
        self._early.clear()


class Subscription:
    """One connection's subscription to one conversation: how far it has been sent, and has acknowledged."""

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
        """how far the ledger knows that the connection has acknowledged"""
        self.has = noted
        """the same, with the person's own lines since. What a client claimed when it connected is not:
        a client may have received more than it has made use of"""
        self.head = head
        """the number of the last line, as far as this hub knows"""
        self.attempt = 1
        self.since = 0
        """since when the oldest line that was sent, and is not acknowledged, waits"""
        self.busy = False
        """it is just being sent what it missed"""
        self.over = False
        self.waiting = False
        """the ledger says that what was sent is not acknowledged"""

    @property
    def ready(self) -> bool:
        """Whether it can be sent the next line at once."""
        if self.busy or self.told - self.acked >= WINDOW:
            return False
        subscriber = self.subscriber
        return not (subscriber.loading or subscriber.session.congested)

    @property
    def room(self) -> int:
        """How many more lines may go ahead of the acknowledgement."""
        return WINDOW - (self.told - self.acked)


class Connections:
    """The connections to one hub's chat, by session, by person and by conversation."""

    def __init__(self) -> None:
        self._by_session: dict[Session, Subscriber] = {}
        self._by_name: dict[str, list[Subscriber]] = {}
        self._by_conv: dict[str, dict[Subscriber, Subscription]] = {}

    def add(self, session: Session, who: Principal) -> Subscriber:
        """A person has connected."""
        subscriber = self._by_session[session] = Subscriber(session, who)
        self._by_name.setdefault(who.name, []).append(subscriber)
        return subscriber

    def remove(self, session: Session) -> Subscriber | None:
        """A connection has ended; returns what it was, if it was one of chat. It is still subscribed to its
        conversations."""
        subscriber = self._by_session.pop(session, None)
        if subscriber is not None:
            subscribers = self._by_name[subscriber.who.name]
            subscribers.remove(subscriber)
            if not subscribers:
                del self._by_name[subscriber.who.name]
        return subscriber

    def subscribe(self, subscriber: Subscriber, conv: str, told: int, head: int, noted: int = 0) -> None:
        """A connection is in this conversation, unless it has ended."""
        if subscriber.session in self._by_session:
            subscription = subscriber.subscriptions[conv] = Subscription(subscriber, conv, told, head, noted)
            self._by_conv.setdefault(conv, {})[subscriber] = subscription

    def unsubscribe(self, subscriber: Subscriber, conv: str) -> Subscription | None:
        """A connection is not in this conversation any more; returns the subscription that is over."""
        subscription = subscriber.subscriptions.pop(conv, None)
        if subscription is not None:
            subscription.over = True
            present = self._by_conv[conv]
            del present[subscriber]
            if not present:
                del self._by_conv[conv]
        return subscription

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._by_session)

    def of_session(self, session: Session) -> Subscriber | None:
        """The connection behind a session, if it is one of chat."""
        return self._by_session.get(session)

    def of_person(self, name: str) -> list[Subscriber]:
        """The connections of a person."""
        return self._by_name.get(name, [])

    def people(self) -> list[str]:
        """The people who are connected."""
        return list(self._by_name)

    def in_conversation(self, conv: str) -> list[Subscriber]:
        """The connections that are in a conversation."""
        return list(self._by_conv.get(conv, ()))

    def subscriptions(self, conv: str) -> Collection[Subscription]:
        """The subscriptions to a conversation; it changes as connections come and go."""
        return self._by_conv[conv].values() if conv in self._by_conv else ()

    def conversations(self) -> list[str]:
        """The conversations that people here are in."""
        return list(self._by_conv)

    def concern(self, conv: str) -> bool:
        """Whether a connection here is in this conversation, or may just be getting into it."""
        return conv in self._by_conv or any(self.of_person(name) for name in c.pair_in(conv))

    def head(self, conv: str) -> int | None:
        """The last line of a conversation that every subscription here knows of; None if there is none."""
        return min((each.head for each in self.subscriptions(conv)), default=None)

    def attempts(self, conv: str, n: int) -> int:
        """How often a line has been sent to the connections here that have not acknowledged it; 0 if none."""
        waiting = [each.attempt for each in self.subscriptions(conv) if each.acked < n <= each.told]
        return max(waiting, default=0)

    def counts(self) -> dict[str, int]:
        """The people who are connected, and in how many conversations each is, without the notes to them; of
        several connections the least."""
        return {
            name: min(len(subscriber.subscriptions) for subscriber in subscribers) - 1
            for name, subscribers in self._by_name.items()
        }
