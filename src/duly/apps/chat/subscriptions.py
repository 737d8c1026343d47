"""Subscriptions: which people are connected, in which conversations, and which lines each has been sent.

The laws. Every connection is sent every line of its conversations, each once, in order. A line that is not
acknowledged is sent again, ever more slowly, until it is; and only so many lines go ahead of what was
acknowledged, so that ten thousand waiting lines do not drown a connection. The stream is the truth: a
connection that is behind reads on from the ledger, and a member who was removed reads no further than the
line that says so.

Timers are set when a line is sent, which is often between two steps of the engine: setting one takes the
engine's time, and tells the engine that there is a new one.

Memory here is only a cache. `refresh` is called by a hint: something may be new in a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from duly.apps.chat import conversations as c
from duly.apps.chat.receipts import AwaitedReceipt, note_waiting
from duly.core.operations import MoveCursor, Write
from duly.core.retry import RetryPolicy
from duly.core.timers import Timers
from duly.core.units import MINUTE, MS, SECOND
from duly.core.window import next_page
from duly.errors import DulyError, LedgerError
from duly.identity.accounts import Principal
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger, StreamEntry
from duly.wire.fields import NOTHING
from duly.wire.outgoing import LineFrame, OutgoingFrame
from duly.wire.session import Session

AGAIN: Final = RetryPolicy.exponential(5 * SECOND, 5 * MINUTE)
"""When a line that was not acknowledged is sent again."""
WINDOW: Final = 1_000
"""Lines of a conversation that go ahead of their acknowledgement."""
PAGE: Final = 500
NOTED_AFTER: Final = SECOND
"""How long a line that was sent waits for its acknowledgement until that is noted in the ledger, for requests
at other hubs, or after a restart. Most lines are acknowledged sooner, and cost nothing."""


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
        subscriber = self.subscriber
        return not self.busy and not subscriber.loading and self.room > 0 and not subscriber.session.congested

    @property
    def room(self) -> int:
        """How many more lines may go ahead of the acknowledgement."""
        return WINDOW - (self.told - self.acked)


class Subscriptions:
    """The connections to one hub's chat. `moved` is called when it is stored how far a reader has come; `now`
    and `nudge` are those of the engine that wakes them."""

    def __init__(
        self,
        ledger: Ledger,
        moved: Callable[[str, str, int], None],
        *,
        now: Callable[[], int],
        nudge: Callable[[], None],
        again: RetryPolicy = AGAIN,
    ) -> None:
        self._ledger = ledger
        self._moved = moved
        self._now = now
        self._nudge = nudge
        self._again = again
        self._subscribers: dict[Session, Subscriber] = {}
        self._by_name: dict[str, list[Subscriber]] = {}
        self._present: dict[str, dict[Subscriber, Subscription]] = {}
        self._timers = Timers[Subscription]()
        self._moves: dict[tuple[str, str], int] = {}
        self._waits: dict[tuple[str, str], AwaitedReceipt | None] = {}
        self.tasks = Supervisor()
        self._saving = False

    # ── coming and going ─────────────────────────────────────────────────────────────────────────

    def enter(self, session: Session, who: Principal) -> Subscriber:
        """A person has connected; lines that are stored from now on are not missed."""
        subscriber = self._subscribers[session] = Subscriber(session, who)
        self._by_name.setdefault(who.name, []).append(subscriber)
        return subscriber

    async def load_subscriptions(
        self, subscriber: Subscriber, cursors: dict[str, int] | None
    ) -> dict[str, int]:
        """Reads how far a connection has come in each conversation: by its own word, else as this device has
        acknowledged, else as any device of the person. Returns after which lines it is sent on."""
        name = subscriber.who.name
        await self._load(subscriber, [*await self._ledger.bucket(c.convs(name)), c.notes(name)], cursors)
        return {conv: subscription.told for conv, subscription in subscriber.subscriptions.items()}

    async def _load(self, subscriber: Subscriber, known: list[str], cursors: dict[str, int] | None) -> None:
        name, device = subscriber.who.name, subscriber.who.device
        readers = [name, c.begins_for(name)] + ([f"{name}/{device}"] if device else [])
        found = await self._ledger.standing([(c.stream(conv), r) for conv in known for r in readers])
        rows = [found[i : i + len(readers)] for i in range(0, len(found), len(readers))]
        for conv, (own, begins, *of_device) in zip(known, rows, strict=True):
            here = of_device[0].cursor if of_device else own.cursor
            told = here if here is not None else own.cursor or 0
            if cursors is not None and conv in cursors:
                told = cursors[conv]
            if conv not in subscriber.subscriptions:
                told = min(max(told, begins.cursor or 0, 0), own.last)
                self._subscribe(subscriber, conv, told, own.last, here or 0)

    def begin(self, subscriber: Subscriber) -> None:
        """The welcome is sent: what the connection missed follows."""
        subscriber.greeted()
        if subscriber.missed:
            self.do(self.look_up(subscriber.who.name))
        for subscription in list(subscriber.subscriptions.values()):
            self._read_on(subscription)

    def leave(self, session: Session) -> Subscriber | None:
        """A connection has ended; returns what it was, if it was one of chat."""
        subscriber = self._subscribers.pop(session, None)
        if subscriber is None:
            return None
        subscribers = self._by_name[subscriber.who.name]
        subscribers.remove(subscriber)
        if not subscribers:
            del self._by_name[subscriber.who.name]
        for conv, subscription in list(subscriber.subscriptions.items()):
            # A person has their own lines; that needs to be known only when they come back.
            self._note(subscription, subscription.has)
            self._unsubscribe(subscriber, conv)
        return subscriber

    def subscribers(self, name: str) -> list[Subscriber]:
        """The connections of a person."""
        return self._by_name.get(name, [])

    def subscriber(self, session: Session) -> Subscriber | None:
        """The subscriber behind a session, if it is one of chat."""
        return self._subscribers.get(session)

    def here(self, conv: str) -> list[Subscriber]:
        """The connections that are in a conversation."""
        return list(self._present.get(conv, ()))

    def concerns(self, conv: str) -> bool:
        """Whether a connection here is in this conversation, or may just be getting into it."""
        return conv in self._present or any(self.subscribers(name) for name in c.pair_in(conv))

    def convs(self) -> list[str]:
        """The conversations that people here are in."""
        return list(self._present)

    def head(self, conv: str) -> int | None:
        """The last line of a conversation that every subscription here knows of; None if there is none."""
        subscriptions = self._present.get(conv)
        return min(subscription.head for subscription in subscriptions.values()) if subscriptions else None

    def counts(self) -> dict[str, int]:
        """The people who are connected, and in how many conversations each is, without the notes to them; of
        several connections the least."""
        return {
            name: min(len(subscriber.subscriptions) for subscriber in subscribers) - 1
            for name, subscribers in self._by_name.items()
        }

    def join(self, name: str, conv: str, told: int = 0) -> None:
        """A person is in this conversation from now on."""
        for subscriber in self.subscribers(name):
            if subscriber.loading:
                subscriber.missed.add(conv)
            elif conv not in subscriber.subscriptions:
                self._subscribe(subscriber, conv, told, told, 0)

    def part(self, name: str, conv: str) -> None:
        """A person is not in this conversation any more."""
        for subscriber in self.subscribers(name):
            self._unsubscribe(subscriber, conv)

    def _subscribe(self, subscriber: Subscriber, conv: str, told: int, head: int, noted: int) -> None:
        if subscriber.session in self._subscribers:
            subscription = subscriber.subscriptions[conv] = Subscription(subscriber, conv, told, head, noted)
            self._present.setdefault(conv, {})[subscriber] = subscription

    def _unsubscribe(self, subscriber: Subscriber, conv: str) -> None:
        subscription = subscriber.subscriptions.pop(conv, None)
        if subscription is not None:
            subscription.over = True
            self._timers.cancel(subscription)
            present = self._present[conv]
            del present[subscriber]
            if not present:
                del self._present[conv]

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def tell(self, conv: str, n: int, frame: LineFrame, by: Session, now: int) -> None:
        """A line was stored: it is sent to the subscriptions that have everything before it; the others read
        on to it. The connection it came `by` knows it from its `server_ack`."""
        for name in c.pair_in(conv) if n == 1 else ():
            self.join(name, conv)
        for subscription in self._present.get(conv, {}).values():
            subscription.head = max(subscription.head, n)
            if n == subscription.told + 1 and subscription.ready:
                subscription.told = n
                if subscription.subscriber.session is by:
                    subscription.acked += subscription.acked == n - 1
                    subscription.has += subscription.has == n - 1
                    continue
                subscription.subscriber.session.push(frame)
                if subscription.acked == n - 1:
                    subscription.since = now
                if subscription not in self._timers:
                    self._watch(subscription, now)
            elif n > subscription.told:
                self._read_on(subscription)

    def refresh(self, conv: str) -> None:
        """Something may be new in this conversation."""
        self.do(self._refresh(conv))

    async def _refresh(self, conv: str) -> None:
        (own,) = await self._ledger.standing([(c.stream(conv), "")])
        for name in c.pair_in(conv):
            self.join(name, conv)
        for subscription in list(self._present.get(conv, {}).values()):
            subscription.head = max(subscription.head, own.last)
            self._read_on(subscription)

    async def look_up(self, name: str) -> None:
        """A person may be in more conversations than before. (That they left one, its own lines say.)"""
        now = await self._ledger.bucket(c.convs(name))
        for subscriber in list(self.subscribers(name)):
            await self._load(subscriber, sorted(now.keys() - subscriber.subscriptions.keys()), None)
            for subscription in list(subscriber.subscriptions.values()):
                self._read_on(subscription)

    def _read_on(self, subscription: Subscription) -> None:
        if (
            not (subscription.busy or subscription.over or subscription.subscriber.loading)
            and subscription.told < subscription.head
            and subscription.room > 0
        ):
            subscription.busy = True
            self.do(self._catch_up(subscription))

    async def _catch_up(self, subscription: Subscription) -> None:
        """Reads on to what is new. A ledger that fails is asked again when the timer of the acknowledgement
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
        for line in await self.show(subscription.conv, page, now, attempt):
            n = line.n or 0
            if subscription.subscriber.session.congested:
                await subscription.subscriber.session.drained()
            if subscription.over:
                return
            if attempt == 1:
                if n != subscription.told + 1:
                    continue
                subscription.told = n
            subscription.subscriber.session.push(line)
            if c.is_group(subscription.conv) and c.leaver_in(line) == subscription.subscriber.who.name:
                self._unsubscribe(subscription.subscriber, subscription.conv)

    async def show(self, conv: str, page: list[StreamEntry], now: int, attempt: int = 1) -> list[LineFrame]:
        """The lines of a page as they go to their readers. An edit is shown with what its line says now."""
        shown: list[LineFrame] = []
        for entry in page:
            line = c.shown_line(entry, now)
            edited = c.edit_of(line)
            if edited is not None:
                (original,) = await self._ledger.entries(c.stream(conv), edited - 1, 1)
                data = NOTHING
                if original.body and not c.is_over(said := c.read_line(original), now):
                    data = said.data
                line = c.edit_line(line, line.from_ or "", edited, data)
            shown.append(c.show(conv, entry.n, line, entry.at, attempt))
        return shown

    # ── acknowledging ────────────────────────────────────────────────────────────────────────────

    def acknowledge(self, subscriber: Subscriber, conv: str, n: int) -> bool:
        """A connection has everything up to `n`. Returns whether it is in this conversation."""
        subscription = subscriber.subscriptions.get(conv)
        if subscription is None:
            return False
        n = min(n, subscription.told)
        if n > subscription.acked:
            subscription.acked = n
            subscription.attempt = 1
            subscription.since = self._now()
            if subscription.waiting:
                subscription.waiting = False
                self._note_waiting(subscription, None)
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
        others = [
            other.subscriptions.get(conv) for other in self.subscribers(name) if other is not subscriber
        ]
        if not any(other is not None and other.noted >= n for other in others):
            self.move(conv, name, n)
        if device:
            self.move(conv, f"{name}/{device}", n)

    def move(self, conv: str, reader: str, n: int) -> None:
        """Notes how far a reader has come. What gathers while the ledger flushes goes with the next flush."""
        key = (conv, reader)
        if n > self._moves.get(key, 0):
            self._moves[key] = n
        self._begin_saving()

    def _note_waiting(self, subscription: Subscription, waiting: AwaitedReceipt | None) -> None:
        """Notes for how long, and after how many attempts, a person has not acknowledged; None: no longer."""
        self._waits[subscription.conv, subscription.subscriber.who.name] = waiting
        self._begin_saving()

    def _begin_saving(self) -> None:
        if not self._saving:
            self._saving = True
            self.do(self._save())

    async def _save(self) -> None:
        try:
            while self._moves or self._waits:
                moves, self._moves = self._moves, {}
                waits, self._waits = self._waits, {}
                cursors = [MoveCursor(c.stream(conv), reader, n) for (conv, reader), n in moves.items()]
                writes: list[Write] = [*cursors]
                writes += [note_waiting(conv, name, waiting) for (conv, name), waiting in waits.items()]
                try:
                    results = await self._ledger.write(*writes)
                except LedgerError:
                    self._moves = moves | self._moves
                    self._waits = waits | self._waits
                    return  # until the ledger is back
                for (conv, reader), n in zip(moves, results.of_each(cursors), strict=True):
                    self._moved(conv, reader, n)
        finally:
            self._saving = False

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, subscription: Subscription, since: int) -> None:
        """Sets the timer of a subscription. Timers are set only here, and the engine may be asleep: it is
        told."""
        lasts = self._patience(subscription)
        if subscription.acked < subscription.told and not subscription.waiting:
            lasts = min(lasts, NOTED_AFTER)
        self._timers.set(subscription, since + lasts)
        if self._timers.next_wake() == since + lasts:
            self._nudge()

    def _patience(self, subscription: Subscription) -> int:
        return self._again.delay(subscription.attempt, subscription.conv.encode()) or 0

    def wake(self, now: int) -> None:
        """Handles the timers that are due: what is not acknowledged is noted, and sent again."""
        for subscription in self._timers.due(now):
            if subscription.acked >= subscription.head:
                continue
            since = now
            if subscription.acked >= subscription.told or subscription.busy:
                self._read_on(subscription)
            elif subscription.since + self._patience(subscription) > now:
                since = subscription.since  # they have come further since we began to wait
                if since + NOTED_AFTER <= now:
                    self._note_unacknowledged(subscription)
            else:
                subscription.attempt += 1
                self.do(self._tell_again(subscription))
                self._note_unacknowledged(subscription)
            self._watch(subscription, since)

    def _note_unacknowledged(self, subscription: Subscription) -> None:
        subscription.waiting = True
        self._note_waiting(
            subscription,
            AwaitedReceipt(
                subscription.acked, subscription.told, subscription.attempt, subscription.since // MS
            ),
        )

    async def _tell_again(self, subscription: Subscription) -> None:
        if subscription.subscriber.session.congested:
            return  # what it was told is still on its way
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
        """When the next timer is due."""
        return self._timers.next_wake()

    def shift(self, by: int) -> None:
        """The wall clock was set; timers go on as if it had not been."""
        self._timers.shift(by)
        for subscription in self._timers:
            subscription.since += by

    def restored(self) -> None:
        """The ledger is back after a failure: a line may have been stored all the same and sent to no
        connection, and it may have begun a conversation."""
        if self._moves or self._waits:
            self._begin_saving()
        for name in list(self._by_name):
            self.do(self.look_up(name))
        for conv in list(self._present):
            self.refresh(conv)

    def attempts(self, conv: str, n: int) -> int:
        """How often a line has been sent to the connections here that have not acknowledged it; 0 if none."""
        waiting = [p.attempt for p in self._present.get(conv, {}).values() if p.acked < n <= p.told]
        return max(waiting, default=0)

    # ── small things ─────────────────────────────────────────────────────────────────────────────

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a job in the background; `close` waits for it. A ledger that fails, or is closed, is no bug:
        what was not sent is sent later."""
        self.tasks.do("a job of chat", work, expected=(DulyError,))

    async def close(self) -> None:
        """Waits until what was acknowledged is noted; the rest is in the ledger."""
        await self.tasks.finish()
        await self.tasks.stop()

    def kill(self) -> None:
        """Cancels the jobs, as a crash would."""
        self.tasks.kill()
