"""Subscriptions: sends every connection the lines of its conversations, and resends unacknowledged ones.

The laws. Every connection gets every line of its conversations once, in order. An unacknowledged line is sent
again, more and more slowly, until it is acknowledged. The number of unacknowledged lines is limited, so that
ten thousand waiting lines do not flood a connection. A connection that is behind is served from the stream in
the ledger, and a removed member gets no line after the one that says so.

Timers are set when a line is sent, often between two steps of the engine, so setting one uses the engine's
clock and notifies the engine.

The memory here is only a cache. A hint that a conversation may have something new calls `refresh`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from itertools import islice
from typing import Final

from duly.apps.chat import conversations as c
from duly.apps.chat.connections import Connections, Subscriber, Subscription
from duly.apps.chat.history import show_page
from duly.apps.chat.new_entries import NewEntries
from duly.apps.chat.reader_cursors import ReaderCursors
from duly.apps.chat.receipts import AwaitedReceipt, note_again
from duly.core.flow_control import next_page
from duly.core.retry import RetryPolicy
from duly.core.timers import Timers
from duly.core.units import MINUTE, MS, SECOND
from duly.errors import DulyError, LedgerError
from duly.runtime.tasks import Supervisor
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger, StreamEntry
from duly.storage.restored_streams import RestoredStreams
from duly.wire.outgoing import LineFrame
from duly.wire.session import Session

WELCOMED: Final = 500
"""The most conversations in a welcome, so that it fits into a frame however long their names are: a person
whom others have brought into very many groups can still connect."""
AGAIN: Final = RetryPolicy.exponential(5 * SECOND, 5 * MINUTE)
"""When an unacknowledged line is sent again."""
PAGE: Final = 500
WOKEN: Final = 500
"""The most timers that are handled in one step of the engine; the next step follows at once."""
NOTED_AFTER: Final = SECOND
"""How long after it was sent an unacknowledged line is noted in the ledger, for queries at other hubs or
after a restart. Most lines are acknowledged sooner and cost nothing."""


class Subscriptions:
    """Feeds the connections of one hub's chat. `cursors` stores their acknowledgements; `now` and `nudge`
    belong to the engine that wakes them."""

    def __init__(
        self,
        ledger: Ledger,
        connections: Connections,
        cursors: ReaderCursors,
        tasks: Supervisor,
        *,
        now: Callable[[], int],
        nudge: Callable[[], None],
        again: RetryPolicy = AGAIN,
        trail: Trail | None = None,
    ) -> None:
        self._trail = Trail(ledger) if trail is None else trail
        self._ledger = ledger
        self._restored = RestoredStreams(ledger)
        self._connections = connections
        self._cursors = cursors
        self._tasks = tasks
        self._now = now
        self._nudge = nudge
        self._again = again
        self._timers = Timers[Subscription]()
        self._new_entries = NewEntries(ledger, connections, tasks, self)

    # ── coming and going ─────────────────────────────────────────────────────────────────────────

    async def load_subscriptions(
        self, subscriber: Subscriber, cursors: dict[str, int] | None
    ) -> dict[str, int]:
        """Read how far a connection has come in each conversation: by its own account, else as this device
        has acknowledged, else as any device of the person has. Returns the lines after which it is served, as
        far as they fit into a frame: a client takes the first line of a conversation that it does not
        know."""
        name = subscriber.who.name
        known = [*await self._ledger.bucket(c.convs(name)), c.notes(name)]
        streams = {conv: c.stream(conv) for conv in known}
        seen, generation = await self._restored.valid(cursors or {}, streams)
        await self._load(subscriber, known, seen)
        fits = islice(subscriber.subscriptions.items(), WELCOMED)
        return {conv: subscription.told for conv, subscription in fits} | generation

    async def _load(self, subscriber: Subscriber, known: list[str], seen: Mapping[str, int]) -> None:
        name, device = subscriber.who.name, subscriber.who.device
        readers = [name, c.begins_for(name)] + ([f"{name}/{device}"] if device else [])
        found = await self._ledger.standing([(c.stream(conv), r) for conv in known for r in readers])
        rows = [found[i : i + len(readers)] for i in range(0, len(found), len(readers))]
        for conv, (own, begins, *of_device) in zip(known, rows, strict=True):
            here = of_device[0].cursor if of_device else own.cursor
            told = here if here is not None else own.cursor or 0
            told = seen.get(conv, told)
            if conv not in subscriber.subscriptions:
                told = min(max(told, begins.cursor or 0, 0), own.last)
                self._connections.subscribe(subscriber, conv, told, own.last, here or 0)

    def begin(self, subscriber: Subscriber) -> None:
        """Send a connection what it missed, after the welcome."""
        subscriber.greeted()
        if subscriber.missed:
            self.refresh_person(subscriber.who.name)
        for subscription in list(subscriber.subscriptions.values()):
            self._read_on(subscription)

    def end(self, session: Session) -> Subscriber | None:
        """Remove a connection that has ended; return it if it was one of chat."""
        subscriber = self._connections.remove(session)
        if subscriber is not None:
            for conv, subscription in list(subscriber.subscriptions.items()):
                # People have their own lines anyway; that matters only when they reconnect.
                self._note(subscription, subscription.has)
                self._unsubscribe(subscriber, conv)
        return subscriber

    def join(self, name: str, conv: str, told: int = 0) -> None:
        """Subscribe a person to a conversation they have joined."""
        for subscriber in self._connections.of_person(name):
            if subscriber.loading:
                subscriber.missed.add(conv)
            elif conv not in subscriber.subscriptions:
                self._connections.subscribe(subscriber, conv, told, told)

    def part(self, name: str, conv: str, after: int = 0) -> None:
        """End the subscriptions of a person who is no longer in this conversation, as soon as they have been
        sent line `after`."""
        for subscriber in self._connections.of_person(name):
            subscription = subscriber.subscriptions.get(conv)
            if subscription is not None and subscription.told >= after:
                self._unsubscribe(subscriber, conv)

    def _unsubscribe(self, subscriber: Subscriber, conv: str) -> None:
        subscription = self._connections.unsubscribe(subscriber, conv)
        if subscription is not None:
            self._timers.cancel(subscription)

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def tell(self, conv: str, n: int, frame: LineFrame, by: Session | None, now: int) -> bool:
        """Send a stored line to the subscriptions that have everything before it; the others read up to it.
        The connection that sent it (`by`), if it is at this hub, knows it from its `server_ack`. Returns
        whether it was sent to any other one."""
        sent = False
        for name in c.pair_in(conv) if n == 1 else ():
            self.join(name, conv)
        for subscription in self._connections.subscriptions(conv):
            subscription.head = max(subscription.head, n)
            if n == subscription.told + 1 and subscription.ready:
                subscription.told = n
                session = subscription.subscriber.session
                if session is by:
                    subscription.acked += subscription.acked == n - 1
                    subscription.has += subscription.has == n - 1
                    continue
                session.push(frame)
                sent = True
                if subscription.acked == n - 1:
                    subscription.since = now
                if subscription not in self._timers:
                    self._watch(subscription, now)
            elif n > subscription.told:
                self._read_on(subscription)
        return sent

    def refresh(self, conv: str) -> None:
        """Look for new lines in this conversation."""
        self._new_entries.read_soon(conv)

    def refresh_person(self, name: str) -> None:
        """Look for new conversations of a person."""
        self._do(self.load_new(name))

    def raise_head(self, conv: str, n: int) -> None:
        """Note that a conversation has lines up to `n`, and let the connections read that lack some."""
        for subscription in list(self._connections.subscriptions(conv)):
            subscription.head = max(subscription.head, n)
            self._read_on(subscription)

    async def load_new(self, name: str) -> None:
        """Subscribe a person to conversations that they have joined. (That they left one is in its own
        lines.)"""
        now = await self._ledger.bucket(c.convs(name))
        for subscriber in list(self._connections.of_person(name)):
            await self._load(subscriber, sorted(now.keys() - subscriber.subscriptions.keys()), {})
            for subscription in list(subscriber.subscriptions.values()):
                self._read_on(subscription)

    def _read_on(self, subscription: Subscription) -> None:
        if (
            not (subscription.busy or subscription.over or subscription.subscriber.loading)
            and subscription.told < subscription.head
            and subscription.room > 0
        ):
            subscription.busy = True
            subscription.subscriber.catch_up(subscription, self._catch_up, self._do)

    async def _catch_up(self, subscription: Subscription) -> None:
        """Read and send new lines. If the ledger fails it is read again when the timer of the acknowledgement
        is due."""
        try:
            count = size = 0
            while subscription.told < subscription.head and subscription.room > 0 and not subscription.over:
                limit = next_page(count, size, min(PAGE, subscription.room))
                page = await self._ledger.entries(c.stream(subscription.conv), subscription.told, limit)
                if not page:
                    break
                count, size = len(page), sum(len(entry.body) for entry in page)
                await self._push_page(subscription, page, 1)
        except LedgerError:
            pass
        finally:
            subscription.busy = False
            waits = not subscription.over and subscription.acked < subscription.head
            if waits and subscription not in self._timers:
                subscription.since = self._now()
                self._watch(subscription, subscription.since)

    async def _push_page(self, subscription: Subscription, page: list[StreamEntry], attempt: int) -> None:
        now = self._ledger.clock.now()
        for line in await show_page(self._ledger, subscription.conv, page, now, attempt):
            n = line.n or 0
            if subscription.subscriber.session.congested:
                await subscription.subscriber.session.drained()
            if subscription.over:
                return
            if attempt == 1:
                if n != subscription.told + 1:
                    continue
                subscription.told = n
                if subscription.acked == n - 1:
                    subscription.since = self._now()
            subscription.subscriber.session.push(line)
            if c.is_group(subscription.conv) and c.leaver_in(line) == subscription.subscriber.who.name:
                self._unsubscribe(subscription.subscriber, subscription.conv)

    # ── acknowledging ────────────────────────────────────────────────────────────────────────────

    def acknowledge(self, subscriber: Subscriber, conv: str, n: int) -> bool:
        """Note that a connection has everything up to `n`. Returns whether it is in this conversation."""
        subscription = subscriber.subscriptions.get(conv)
        if subscription is None:
            return False
        n = min(n, subscription.told)
        if n > subscription.acked:
            subscription.acked = n
            subscription.attempt = 1
            if n < subscription.head:  # else the next line that is sent sets it
                subscription.since = self._now()
            if subscription.waiting:
                subscription.waiting = False
                self._cursors.note_waiting(conv, subscriber.who.name, None)
            if subscription.told < subscription.head:
                self._read_on(subscription)
        self._note(subscription, n)
        return True

    def _note(self, subscription: Subscription, n: int) -> None:
        if n <= subscription.noted:
            return
        subscription.noted = n
        subscription.has = max(subscription.has, n)
        conv, subscriber = subscription.conv, subscription.subscriber
        name, device = subscriber.who.name, subscriber.who.device
        others = self._others(subscription)
        if not others or not any(other.noted >= n for other in others):
            self._cursors.move(conv, name, n)
        if device:
            self._cursors.move(conv, f"{name}/{device}", n)

    def _others(self, subscription: Subscription) -> list[Subscription]:
        """Return the subscriptions of the same person's other connections to this conversation; usually
        none."""
        subscriber, conv = subscription.subscriber, subscription.conv
        theirs = self._connections.of_person(subscriber.who.name)
        if len(theirs) == 1 and theirs[0] is subscriber:
            return []
        return [
            other.subscriptions[conv]
            for other in theirs
            if other is not subscriber and conv in other.subscriptions
        ]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, subscription: Subscription, since: int) -> None:
        """Set the timer of a subscription. Timers are set only here, and the engine is told, since it may be
        asleep."""
        lasts = self._patience(subscription)
        if subscription.acked < subscription.told and not subscription.waiting:
            lasts = min(lasts, NOTED_AFTER)
        self._timers.set(subscription, since + lasts)
        if self._timers.next_wake() == since + lasts:
            self._nudge()

    def _patience(self, subscription: Subscription) -> int:
        return self._again.delay(subscription.attempt, subscription.conv.encode()) or 0

    def wake(self, now: int) -> None:
        """Handle the timers that are due: note missing acknowledgements, and send the lines again."""
        for subscription in islice(self._timers.due(now), WOKEN):
            if subscription.acked >= subscription.head:
                continue
            since = now
            if subscription.acked >= subscription.told or subscription.busy:
                self._read_on(subscription)
            elif subscription.since + self._patience(subscription) > now:
                since = subscription.since  # the connection has acknowledged more since the timer was set
                if since + NOTED_AFTER <= now:
                    self._note_unacknowledged(subscription)
            else:
                subscription.attempt += 1
                name = subscription.subscriber.who.name
                note_again(self._trail, subscription.conv, name, subscription.attempt, subscription.acked)
                self._do(self._tell_again(subscription))
                self._note_unacknowledged(subscription)
            self._watch(subscription, since)

    def _note_unacknowledged(self, subscription: Subscription) -> None:
        subscription.waiting = True
        waiting = AwaitedReceipt(
            subscription.acked, subscription.told, subscription.attempt, subscription.since // MS
        )
        self._cursors.note_waiting(subscription.conv, subscription.subscriber.who.name, waiting)

    async def _tell_again(self, subscription: Subscription) -> None:
        if subscription.subscriber.session.congested:
            return  # what it was sent is still under way
        after, last = subscription.acked, min(subscription.told, subscription.acked + PAGE)
        count = size = 0
        while after < last and not subscription.over:
            limit = next_page(count, size, last - after)
            page = await self._ledger.entries(c.stream(subscription.conv), after, limit)
            if not page:
                return
            count, size, after = len(page), sum(len(entry.body) for entry in page), page[-1].n
            await self._push_page(
                subscription, [entry for entry in page if entry.n > subscription.acked], subscription.attempt
            )

    def next_wake(self) -> int | None:
        """Return when the next timer is due."""
        return self._timers.next_wake()

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set: timers keep their length."""
        self._timers.shift(by)
        for subscription in self._timers:
            subscription.since += by

    def restored(self) -> None:
        """Catch up after a failure of the ledger: a line may have been stored without being sent, and may
        have started a conversation."""
        for name in self._connections.people():
            self.refresh_person(name)
        for conv in self._connections.conversations():
            self.refresh(conv)

    def _do(self, work: Coroutine[object, None, None]) -> None:
        """Run a job in the background. A ledger that fails or is closed is not a bug: what was not sent is
        sent later."""
        self._tasks.do("a job of chat", work, expected=(DulyError,))
