"""The subscriptions: who is connected, in which conversations, and what each of them has been told.

The laws. Every connection is told every line of its conversations, each once, in order. What it has not
acknowledged is told again, ever more slowly, until it does; and only so much goes ahead of what it has
acknowledged, so that ten thousand lines waiting for somebody do not drown them. The stream is the truth:
whoever is behind reads on from the ledger, and who was removed reads no further than the line that says so.

Timers are set when a line is told, and that is often between two steps of the engine: whoever sets one asks
the engine for the time, and tells it that there is a new one.

Memory here is only a cache. `look` is the notifier's: something may be new in a conversation.
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
from duly.wire.session import Session

AGAIN: Final = RetryPolicy.exponential(5 * SECOND, 5 * MINUTE)
"""When a line that was not acknowledged is told again."""
WINDOW: Final = 1_000
"""Lines of a conversation that go ahead of their acknowledgement."""
PAGE: Final = 500
NOTED_AFTER: Final = SECOND
"""How long a line that was told waits to be acknowledged until that is noted in the ledger, for those who ask
at other hubs, or after a restart. Most are acknowledged sooner, and cost nothing."""


class Subscriber:
    """One connection of somebody."""

    __slots__ = ("_early", "loading", "missed", "places", "session", "who")

    def __init__(self, session: Session, who: Principal) -> None:
        self.session = session
        self.who = who
        self.places: dict[str, Subscription] = {}
        self.loading = True
        self.missed: set[str] = set()
        """where something was said while their places were being read"""
        self._early: list[bytes] = []

    def pass_on(self, frame: bytes) -> None:
        """Tell what is told in passing: nothing comes before the welcome."""
        if self.loading:
            self._early.append(frame)
        else:
            self.session.push(frame)

    def greeted(self) -> None:
        self.loading = False
        for frame in self._early:
            self.session.push(frame)
        self._early.clear()


class Subscription:
    """A connection's place in one conversation."""

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
        """how far the ledger knows they have come"""
        self.has = noted
        """the same, with what they have said themselves since. What they claimed when they came is not in it:
        a client may have heard more than it has made use of"""
        self.head = head
        """the last line there is, as far as we know"""
        self.attempt = 1
        self.since = 0
        """since when the oldest line that was told, and is not acknowledged, waits"""
        self.busy = False
        """it is just being told what it missed"""
        self.over = False
        self.waiting = False
        """the ledger says that they have not acknowledged what they were told"""

    @property
    def ready(self) -> bool:
        """Whether it can be told the next line at once."""
        subscriber = self.subscriber
        return not self.busy and not subscriber.loading and self.room > 0 and not subscriber.session.congested

    @property
    def room(self) -> int:
        return WINDOW - (self.told - self.acked)


class Subscriptions:
    """Everybody connected to one hub's chat. `moved` hears how far somebody has come, once that is stored;
    `now` and `nudge` are those of the engine that wakes us."""

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
        """Somebody has come; what is said from now on is not missed."""
        subscriber = self._subscribers[session] = Subscriber(session, who)
        self._by_name.setdefault(who.name, []).append(subscriber)
        return subscriber

    async def find_places(self, subscriber: Subscriber, cursors: dict[str, int] | None) -> dict[str, int]:
        """Where they stand in each of their conversations: by their own word, else as this device, else as
        anybody of this name has acknowledged. Returns after which lines they are told on."""
        name = subscriber.who.name
        await self._stand(subscriber, [*await self._ledger.bucket(c.convs(name)), c.notes(name)], cursors)
        return {conv: place.told for conv, place in subscriber.places.items()}

    async def _stand(self, subscriber: Subscriber, known: list[str], cursors: dict[str, int] | None) -> None:
        name, device = subscriber.who.name, subscriber.who.device
        readers = [name, c.begins_for(name)] + ([f"{name}/{device}"] if device else [])
        found = await self._ledger.standing([(c.stream(conv), r) for conv in known for r in readers])
        rows = [found[i : i + len(readers)] for i in range(0, len(found), len(readers))]
        for conv, (own, begins, *of_device) in zip(known, rows, strict=True):
            here = of_device[0].cursor if of_device else own.cursor
            told = here if here is not None else own.cursor or 0
            if cursors is not None and conv in cursors:
                told = cursors[conv]
            if conv not in subscriber.places:
                told = min(max(told, begins.cursor or 0, 0), own.last)
                self._sit(subscriber, conv, told, own.last, here or 0)

    def begin(self, subscriber: Subscriber) -> None:
        """They have been greeted: tell them what they missed."""
        subscriber.greeted()
        if subscriber.missed:
            self.do(self.look_up(subscriber.who.name))
        for place in list(subscriber.places.values()):
            self._go_on(place)

    def leave(self, session: Session) -> Subscriber | None:
        subscriber = self._subscribers.pop(session, None)
        if subscriber is None:
            return None
        subscribers = self._by_name[subscriber.who.name]
        subscribers.remove(subscriber)
        if not subscribers:
            del self._by_name[subscriber.who.name]
        for conv, place in list(subscriber.places.items()):
            # What they said themselves they have; that needs to be known only when they come back.
            self._note(place, place.has)
            self._stand_up(subscriber, conv)
        return subscriber

    def subscribers(self, name: str) -> list[Subscriber]:
        return self._by_name.get(name, [])

    def subscriber(self, session: Session) -> Subscriber | None:
        return self._subscribers.get(session)

    def here(self, conv: str) -> list[Subscriber]:
        """The connections that are in a conversation."""
        return list(self._present.get(conv, ()))

    def concerns(self, conv: str) -> bool:
        """Whether anybody here is in this conversation, or is just coming into it."""
        return conv in self._present or any(self.subscribers(name) for name in c.pair_in(conv))

    def convs(self) -> list[str]:
        """The conversations that people here are in."""
        return list(self._present)

    def head(self, conv: str) -> int | None:
        """How far the one here who is furthest behind knows a conversation to go; None: nobody is in it."""
        places = self._present.get(conv)
        return min(place.head for place in places.values()) if places else None

    def counts(self) -> dict[str, int]:
        """Who is connected, and in how many conversations they are, notes to them aside; of several
        connections the least."""
        return {
            name: min(len(subscriber.places) for subscriber in subscribers) - 1
            for name, subscribers in self._by_name.items()
        }

    def join(self, name: str, conv: str, told: int = 0) -> None:
        """Somebody is in this conversation now."""
        for subscriber in self.subscribers(name):
            if subscriber.loading:
                subscriber.missed.add(conv)
            elif conv not in subscriber.places:
                self._sit(subscriber, conv, told, told, 0)

    def part(self, name: str, conv: str) -> None:
        """Somebody is not in this conversation any more."""
        for subscriber in self.subscribers(name):
            self._stand_up(subscriber, conv)

    def _sit(self, subscriber: Subscriber, conv: str, told: int, head: int, noted: int) -> None:
        if subscriber.session in self._subscribers:
            place = subscriber.places[conv] = Subscription(subscriber, conv, told, head, noted)
            self._present.setdefault(conv, {})[subscriber] = place

    def _stand_up(self, subscriber: Subscriber, conv: str) -> None:
        place = subscriber.places.pop(conv, None)
        if place is not None:
            place.over = True
            self._timers.cancel(place)
            present = self._present[conv]
            del present[subscriber]
            if not present:
                del self._present[conv]

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def tell(self, conv: str, n: int, frame: bytes, by: Session, now: int) -> None:
        """A line was stored: tell it to those whose turn it is; the others read on to it. The connection it
        came `by` knows it from its `server_ack`."""
        for name in c.pair_in(conv) if n == 1 else ():
            self.join(name, conv)
        for place in self._present.get(conv, {}).values():
            place.head = max(place.head, n)
            if n == place.told + 1 and place.ready:
                place.told = n
                if place.subscriber.session is by:
                    place.acked += place.acked == n - 1
                    place.has += place.has == n - 1
                    continue
                place.subscriber.session.push(frame)
                if place.acked == n - 1:
                    place.since = now
                if place not in self._timers:
                    self._watch(place, now)
            elif n > place.told:
                self._go_on(place)

    def look(self, conv: str) -> None:
        """Something may be new in this conversation."""
        self.do(self._look(conv))

    async def _look(self, conv: str) -> None:
        (own,) = await self._ledger.standing([(c.stream(conv), "")])
        for name in c.pair_in(conv):
            self.join(name, conv)
        for place in list(self._present.get(conv, {}).values()):
            place.head = max(place.head, own.last)
            self._go_on(place)

    async def look_up(self, name: str) -> None:
        """Somebody may be in more conversations than before. (That they left one, its own lines say.)"""
        now = await self._ledger.bucket(c.convs(name))
        for subscriber in list(self.subscribers(name)):
            await self._stand(subscriber, sorted(now.keys() - subscriber.places.keys()), None)
            for place in list(subscriber.places.values()):
                self._go_on(place)

    def _go_on(self, place: Subscription) -> None:
        if (
            not (place.busy or place.over or place.subscriber.loading)
            and place.told < place.head
            and place.room > 0
        ):
            place.busy = True
            self.do(self._catch_up(place))

    async def _catch_up(self, place: Subscription) -> None:
        """Read on to what is new. A ledger that fails is asked again when it is looked whether they have
        acknowledged."""
        try:
            count = size = 0
            while place.told < place.head and place.room > 0 and not place.over:
                limit = next_page(count, size, min(PAGE, place.room))
                page = await self._ledger.entries(c.stream(place.conv), place.told, limit)
                if not page:
                    break
                count, size = len(page), sum(len(entry.body) for entry in page)
                await self._hand(place, page, 1)
        except LedgerError:
            pass
        finally:
            place.busy = False
            if place not in self._timers and not place.over and place.acked < place.head:
                place.since = self._now()
                self._watch(place, place.since)

    async def _hand(self, place: Subscription, page: list[StreamEntry], attempt: int) -> None:
        now = self._ledger.clock.now()
        for shown in await self.show(place.conv, page, now, attempt):
            entry, frame = shown
            if place.subscriber.session.congested:
                await place.subscriber.session.drained()
            if place.over:
                return
            if attempt == 1:
                if entry.n != place.told + 1:
                    continue
                place.told = entry.n
            place.subscriber.session.push(frame)
            if c.is_group(place.conv) and c.leaver_in(entry) == place.subscriber.who.name:
                self._stand_up(place.subscriber, place.conv)

    async def show(
        self, conv: str, page: list[StreamEntry], now: int, attempt: int = 1
    ) -> list[tuple[StreamEntry, bytes]]:
        """Entries with the frames they go out as. An edit is shown with what its line says now."""
        shown: list[tuple[StreamEntry, bytes]] = []
        for entry in page:
            edited = c.edit_of(entry)
            if edited is None:
                shown.append((entry, c.show_entry(conv, entry, now, attempt)))
                continue
            (line,) = await self._ledger.entries(c.stream(conv), edited - 1, 1)
            frame = c.read_line(entry)
            data = b""
            if line.body and not c.is_over(said := c.read_line(line), now):
                data = bytes(said.data)
            text = c.edit_line(frame, frame.from_ or "", edited, data)
            shown.append((entry, c.show(conv, entry.n, text, entry.at, attempt)))
        return shown

    # ── acknowledging ────────────────────────────────────────────────────────────────────────────

    def acknowledge(self, subscriber: Subscriber, conv: str, n: int) -> bool:
        """They have everything up to `n`. Whether they are in this conversation."""
        place = subscriber.places.get(conv)
        if place is None:
            return False
        n = min(n, place.told)
        if n > place.acked:
            place.acked = n
            place.attempt = 1
            place.since = self._now()
            if place.waiting:
                place.waiting = False
                self._note_waiting(place, None)
            if place.told < place.head:
                self._go_on(place)
        self._note(place, n)
        return True

    def _note(self, place: Subscription, n: int) -> None:
        if n <= place.noted:
            return
        place.noted = n
        place.has = max(place.has, n)
        conv, subscriber = place.conv, place.subscriber
        name, device = subscriber.who.name, subscriber.who.device
        others = [other.places.get(conv) for other in self.subscribers(name) if other is not subscriber]
        if not any(other is not None and other.noted >= n for other in others):
            self.move(conv, name, n)
        if device:
            self.move(conv, f"{name}/{device}", n)

    def move(self, conv: str, reader: str, n: int) -> None:
        """Note how far a reader has come. What gathers while the ledger flushes goes with the next flush."""
        key = (conv, reader)
        if n > self._moves.get(key, 0):
            self._moves[key] = n
        self._begin_saving()

    def _note_waiting(self, place: Subscription, waiting: AwaitedReceipt | None) -> None:
        """Note for how long, and after how many attempts, somebody has not acknowledged; None: no longer."""
        self._waits[place.conv, place.subscriber.who.name] = waiting
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
                writes: list[Write] = [
                    MoveCursor(c.stream(conv), reader, n) for (conv, reader), n in moves.items()
                ]
                writes += [note_waiting(conv, name, waiting) for (conv, name), waiting in waits.items()]
                try:
                    reached = await self._ledger.write(*writes)
                except LedgerError:
                    self._moves = moves | self._moves
                    self._waits = waits | self._waits
                    return  # until the ledger is back
                for (conv, reader), n in zip(moves, reached, strict=False):
                    assert isinstance(n, int)
                    self._moved(conv, reader, n)
        finally:
            self._saving = False

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, place: Subscription, since: int) -> None:
        """Look at a place again when its time has come. This is the only place where a timer is set, and the
        engine may be asleep: it is told."""
        lasts = self._patience(place)
        if place.acked < place.told and not place.waiting:
            lasts = min(lasts, NOTED_AFTER)
        self._timers.set(place, since + lasts)
        if self._timers.next_wake() == since + lasts:
            self._nudge()

    def _patience(self, place: Subscription) -> int:
        return self._again.delay(place.attempt, place.conv.encode()) or 0

    def wake(self, now: int) -> None:
        for place in self._timers.due(now):
            if place.acked >= place.head:
                continue
            since = now
            if place.acked >= place.told or place.busy:
                self._go_on(place)
            elif place.since + self._patience(place) > now:
                since = place.since  # they have come further since we began to wait
                if since + NOTED_AFTER <= now:
                    self._waits_on(place)
            else:
                place.attempt += 1
                self.do(self._tell_again(place))
                self._waits_on(place)
            self._watch(place, since)

    def _waits_on(self, place: Subscription) -> None:
        place.waiting = True
        self._note_waiting(place, AwaitedReceipt(place.acked, place.told, place.attempt, place.since // MS))

    async def _tell_again(self, place: Subscription) -> None:
        if place.subscriber.session.congested:
            return  # what it was told is still on its way
        after, last = place.acked, min(place.told, place.acked + PAGE)
        count = size = 0
        while after < last and not place.over:
            limit = next_page(count, size, last - after)
            page = await self._ledger.entries(c.stream(place.conv), after, limit)
            if not page:
                return
            count, size, after = len(page), sum(len(entry.body) for entry in page), page[-1].n
            await self._hand(place, [entry for entry in page if entry.n > place.acked], place.attempt)

    def next_wake(self) -> int | None:
        return self._timers.next_wake()

    def shift(self, by: int) -> None:
        """The wall clock was set; timers go on as if it had not been."""
        self._timers.shift(by)
        for place in self._timers:
            place.since += by

    def restored(self) -> None:
        """The ledger is back after a failure: what was stored all the same nobody has been told, and it may
        have begun a conversation."""
        if self._moves or self._waits:
            self._begin_saving()
        for name in list(self._by_name):
            self.do(self.look_up(name))
        for conv in list(self._present):
            self.look(conv)

    def attempts(self, conv: str, n: int) -> int:
        """How often a line has been told to whoever here has not acknowledged it yet; 0: nobody waits."""
        waiting = [p.attempt for p in self._present.get(conv, {}).values() if p.acked < n <= p.told]
        return max(waiting, default=0)

    # ── small things ─────────────────────────────────────────────────────────────────────────────

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this in the background. A ledger that fails, or is closed, is no bug: what was not told is told
        again."""
        self.tasks.do("a job of chat", work, expected=(DulyError,))

    async def close(self) -> None:
        """Note what was acknowledged; the rest is in the ledger."""
        await self.tasks.finish()
        await self.tasks.stop()

    def kill(self) -> None:
        self.tasks.kill()
