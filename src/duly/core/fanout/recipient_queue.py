"""The queue of one recipient: which deliveries go out together, how often, and whether it can be reached.

The laws. No waiting delivery is lost: deliveries over the rate limit go out together as one batch (a
`StartAttempt`). A recipient gets a limited number of batches per minute; further deliveries wait and go out
in one batch. The later events of an episode go out together after its first one. A recipient is closed after
two failed attempts in a row: then one batch at a time tries it, and as soon as one arrives, all go out.
Urgent deliveries have their own queue without these limits: each goes out alone, and its first attempt goes
out at once even if the recipient is closed, since it may have been back for an hour without any attempt to
show it.

Queues exist in memory only; the deliveries are rows of the ledger. After a restart every recipient counts as
open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from msgspec import Struct

from duly.core.messages import Message
from duly.core.operations import DeliveryRef
from duly.core.timers import Timers
from duly.core.units import FOREVER, MINUTE
from duly.errors import Malformed

CLOSED_AFTER: Final = 2
"""Failed attempts in a row after which a recipient is closed. One failure may be the fault of its
deliveries."""

MOST_IN_A_BATCH: Final = 5_000
"""The most deliveries in one batch."""

EPISODES: Final = 10_000
"""The most episodes remembered; beyond that, those that are over are forgotten."""


QueueName: TypeAlias = tuple[str, bool]
"""The name of a queue: the recipient, and whether the queue is for urgent deliveries."""


class RecipientPolicy(Struct, frozen=True):
    """Limits how much is sent to a recipient, and how often."""

    most: int = 10
    """batches per `window`; 0: no limit"""
    window: int = MINUTE
    together: int = MINUTE
    """how long the later events of an episode wait for each other after its first one; 0: not at all"""
    abreast: int = 8
    """the most batches under way at the same time"""

    def __post_init__(self) -> None:
        if self.most < 0 or self.window <= 0 or self.together < 0 or self.abreast < 1:
            raise Malformed("a recipient's limits need most >= 0, window > 0, together >= 0 and abreast >= 1")

    @property
    def urgent(self) -> RecipientPolicy:
        """Return the policy of the same recipient's urgent queue, in which deliveries do not wait."""
        return RecipientPolicy(0, self.window, 0, self.abreast)


class QueuedDelivery:
    """An open delivery: its attempt, its due time, and what decides which others go with it."""

    __slots__ = (
        "attempt", "bundle", "due", "episode", "error", "expires", "gone", "in_doubt", "leased", "message",
        "opens", "ref", "under_way", "urgent",
    )  # fmt: skip

    def __init__(
        self, ref: DeliveryRef, message: Message, due: int, expires: int, episode: str, urgent: bool = False
    ) -> None:
        self.ref = ref
        self.message = message
        self.due = due
        self.expires = expires
        self.episode = episode
        self.urgent = urgent
        """whether it is in the queue of urgent deliveries"""
        self.opens = 0
        """the time of day that it waits for; 0: it waits for lengths of time only"""
        self.bundle: object = None
        """identifies the batch of its last attempt; a repeat goes out with the same deliveries"""
        self.attempt = 0
        self.error = ""
        self.in_doubt = False
        """whether one of its attempts may have arrived"""
        self.under_way = False
        self.leased = False
        """another worker holds the claim until this delivery is due; after that, the attempt is in doubt"""
        self.gone = False
        """it has ended, or belongs to another worker"""

    @property
    def where(self) -> QueueName:
        """The name of its queue."""
        return self.ref.recipient, self.urgent

    @property
    def waits_for_lengths(self) -> bool:
        """Whether its due time and its expiry move with the wall clock when that is set."""
        return self.urgent or not self.opens

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much."""
        if self.waits_for_lengths:
            self.due += by
            self.expires += by if self.expires else 0

    @property
    def salt(self) -> bytes:
        """The bytes that seed the jitter of its retries."""
        return self.ref.key + self.ref.recipient.encode()


class RecipientQueue:
    """The deliveries that wait for one recipient."""

    def __init__(self, policy: RecipientPolicy, *, urgent: bool = False) -> None:
        self.policy = policy
        self._waiting = Timers[QueuedDelivery]()
        self._first = Timers[QueuedDelivery]() if urgent else self._waiting
        """never tried before; urgent ones do not wait for the others"""
        self._under_way = 0
        self._failures = 0
        self._rest = 0
        self._sent: deque[int] = deque()
        self._episodes: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        """Whether the last attempts failed to reach the recipient."""
        return self._failures >= CLOSED_AFTER

    def add(self, item: QueuedDelivery) -> None:
        """Add a delivery, which waits until `collect` returns it. Adding it again updates its due time."""
        self.drop(item)
        if item.attempt:
            self._waiting.set(item, item.due)
        elif item.waits_for_lengths:
            self._first.set(item, item.due)
        else:
            self._first.set(item, FOREVER, until=item.due)

    def opened(self, item: QueuedDelivery) -> None:
        """Note that a delivery does not wait for a time of day any more; harmless if it is not waiting
        here."""
        if item in self._first:
            self.add(item)

    def drop(self, item: QueuedDelivery) -> None:
        """Remove a delivery; harmless if it is not waiting here."""
        self._waiting.cancel(item)
        self._first.cancel(item)

    def admits(self, item: QueuedDelivery, now: int) -> bool:
        """Return whether a delivery may go out alone at once; if so, it counts as under way."""
        closed = self.closed and not self._urgent
        if item.due > now or closed or self._held(item, now) or self._room(now) < 1:
            return False
        first = self._first.next_wake()
        if first is not None and first <= now:
            return False  # not before those that already wait
        self._begin([item], now)
        return True

    def collect(self, now: int) -> list[list[QueuedDelivery]]:
        """Return the batches to send now. Each counts as under way until `arrived`, `failed` or `abandoned`
        is called."""
        urgent = self._collect_first(now) if self._urgent else []
        return urgent + self._collect(now)

    def _collect_first(self, now: int) -> list[list[QueuedDelivery]]:
        """Return the urgent deliveries to send now for the first time, one per batch."""
        batches: list[list[QueuedDelivery]] = []
        while self._room(now) > 0 and (item := self._first.pop(now)) is not None:
            if not item.under_way:
                self._begin([item], now)
                batches.append([item])
        return batches

    def _collect(self, now: int) -> list[list[QueuedDelivery]]:
        room = self._room(now)
        if self.closed:
            room = 0 if self._under_way or now < self._rest else min(room, 1)
        if room < 1:
            return []
        batches = self._pack(now, 1 if self.closed else None)
        if len(batches) > room:
            allowance = self._allowance(now)
            if allowance is not None and allowance < len(batches):
                batches = [[item for batch in batches for item in batch]]
            for batch in batches[room:]:
                for item in batch:
                    self.add(item)
            del batches[room:]
        for batch in batches:
            for item in batch[MOST_IN_A_BATCH:]:
                self.add(item)
            del batch[MOST_IN_A_BATCH:]
            self._begin(batch, now)
        return batches

    def abandoned(self) -> None:
        """Stop counting a batch that was not sent or whose result is void."""
        self._under_way = max(0, self._under_way - 1)

    def arrived(self) -> bool:
        """Record that a batch reached the recipient; return whether earlier attempts had been failing."""
        self.abandoned()
        was, self._failures, self._rest = self._failures, 0, 0
        return was > 0

    def failed(self, until: int) -> None:
        """Record that a batch did not arrive; a closed recipient is not tried again before `until`."""
        self.abandoned()
        self._failures += 1
        self._rest = max(self._rest, until)

    def hurry(self, now: int) -> None:
        """Open the queue again, and make deliveries that wait for a retry due now."""
        self._failures, self._rest = 0, 0
        for item in list(self._waiting):
            if item.attempt and item.due > now:
                item.due = now
                self.add(item)

    def next_wake(self) -> int | None:
        """Return when `collect` may next have a batch, or None."""
        when = self._next_wake()
        if not self._urgent or self._under_way >= self.policy.abreast:
            return when
        return min((one for one in (when, self._first.next_wake()) if one is not None), default=None)

    def _next_wake(self) -> int | None:
        when = self._waiting.next_wake()
        if when is None or self._under_way >= (1 if self.closed else self.policy.abreast):
            return None
        if self.closed:
            when = max(when, self._rest)
        if self.policy.most and len(self._sent) >= self.policy.most:
            when = max(when, self._sent[-self.policy.most] + self.policy.window)
        return when

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much; lengths of time stay the same. The deliveries'
        own due times are adjusted by their owner."""
        self._rest += by if self._rest else 0
        self._sent = deque(at + by for at in self._sent)
        self._episodes = {episode: at + by for episode, at in self._episodes.items()}
        self._waiting.shift(by)
        if self._urgent:
            self._first.shift(by)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _urgent(self) -> bool:
        return self._first is not self._waiting

    def _allowance(self, now: int) -> int | None:
        """Return how many more batches may go out in this window; None means any number."""
        sent, policy = self._sent, self.policy
        while sent and sent[0] + policy.window <= now:
            sent.popleft()
        return max(0, policy.most - len(sent)) if policy.most else None

    def _room(self, now: int) -> int:
        allowance = self._allowance(now)
        abreast = self.policy.abreast - self._under_way
        return abreast if allowance is None else min(abreast, allowance)

    def _held(self, item: QueuedDelivery, now: int) -> int:
        """Return until when a delivery waits for others of its episode; 0 if it does not."""
        if not item.episode or item.attempt:
            return 0
        first = self._episodes.get(item.episode)
        if first is None or first + self.policy.together <= now:
            return 0
        return first + self.policy.together

    def _pack(self, now: int, most: int | None) -> list[list[QueuedDelivery]]:
        """Return the due deliveries in order, those of one episode together."""
        batches: dict[object, list[QueuedDelivery]] = {}
        while len(batches) != most and (item := self._waiting.pop(now)) is not None:
            if item.under_way:
                continue
            if until := self._held(item, now):
                item.due = until
                self.add(item)
                continue
            alone = (item.episode, item.ref.round) if item.episode else item
            batches.setdefault(item.bundle or alone, []).append(item)
        return list(batches.values())

    def _begin(self, batch: list[QueuedDelivery], now: int) -> None:
        self._under_way += 1
        if self.policy.most:
            self._sent.append(now)
        bundle = object() if len(batch) > 1 else None
        for item in batch:
            item.under_way = True
            item.bundle = bundle
            if item.episode and self.policy.together:
                if len(self._episodes) >= EPISODES:
                    over = now - self.policy.together
                    self._episodes = {each: at for each, at in self._episodes.items() if at > over}
                self._episodes[item.episode] = now


class RecipientQueues:
    """The queues of all recipients, and when each may next have a batch. A queue is created at its first
    use."""

    def __init__(self, policy: Callable[[str], RecipientPolicy]) -> None:
        self._policy = policy
        self._queues: dict[QueueName, RecipientQueue] = {}
        self._wakes = Timers[QueueName]()

    def afresh(self) -> RecipientQueues:
        """Return empty queues under the same policy, as after a restart."""
        return RecipientQueues(self._policy)

    def __getitem__(self, where: QueueName) -> RecipientQueue:
        queue = self._queues.get(where)
        policy = self._policy(where[0])
        if where[1]:
            policy = policy.urgent
        if queue is None:
            queue = self._queues[where] = RecipientQueue(policy, urgent=where[1])
        queue.policy = policy
        return queue

    def schedule(self, where: QueueName) -> None:
        """Set the timer of a queue that has changed."""
        wake = self[where].next_wake()
        if wake != self._wakes.get(where):
            self._wakes.set(where, FOREVER if wake is None else wake)

    def drop(self, item: QueuedDelivery) -> None:
        """Remove a delivery from its queue; harmless if it does not wait."""
        queue = self._queues.get(item.where)
        if queue is not None:
            queue.drop(item)

    def opened(self, item: QueuedDelivery) -> None:
        """Note that a delivery does not wait for a time of day any more; harmless if it does not wait."""
        queue = self._queues.get(item.where)
        if queue is not None:
            queue.opened(item)

    def hurry(self, recipient: str, now: int) -> None:
        """Open all queues of a channel, because one of its recipients was reached again."""
        channel = recipient.partition("#")[0]
        for where, queue in self._queues.items():
            if where[0].partition("#")[0] == channel:
                queue.hurry(now)
                self.schedule(where)

    def collect(self, now: int) -> list[tuple[QueueName, list[QueuedDelivery]]]:
        """Return the batches to send now, from all queues."""
        batches: list[tuple[QueueName, list[QueuedDelivery]]] = []
        for where in self._wakes.due(now):
            batches += ((where, batch) for batch in self._queues[where].collect(now))
            self.schedule(where)
        return batches

    def next_wake(self) -> int | None:
        """Return when `collect` may next have a batch."""
        return self._wakes.next_wake()

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set."""
        for where, queue in self._queues.items():
            queue.shift(by)
            self.schedule(where)
