"""A route: the way to one recipient. What goes out together, how often, and whether the way is open.

The laws. Nothing that waits here is lost: what may not go out one by one goes out as one parcel. A recipient
gets at most so many parcels in a minute; when more is waiting, all of it goes as one. Events of one episode
follow their first one together, not each for itself. A way that has failed twice in a row is closed: one
parcel at a time asks whether it is open again, and as soon as it is, everything goes. What is urgent has a
way of its own without such limits: each goes alone, and at once.

Routes are memory. The truth is in the deliveries' rows; after a restart a route begins as if it were open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from msgspec import Struct

from duly.core.fanout.plan import DOUBT
from duly.core.messages import Message
from duly.core.operations import DeliveryRef
from duly.core.timers import Timers
from duly.core.units import FOREVER, MINUTE
from duly.errors import Malformed

CLOSED_AFTER: Final = 2
"""Failures in a row, of any parcel: one alone may be the parcel's own fault."""

PARCEL: Final = 5_000
"""Most items in one parcel."""

EPISODES: Final = 10_000
"""Most episodes remembered; then those that are over are forgotten."""


Where: TypeAlias = tuple[str, bool]
"""A route's name: the recipient, and whether it is the way for what is urgent."""


class RecipientPolicy(Struct, frozen=True):
    """How much a recipient can be asked to take."""

    most: int = 10
    """parcels in a `window`; 0: as many as there are"""
    window: int = MINUTE
    together: int = MINUTE
    """how long after the first event of an episode the others wait for each other; 0: they do not"""
    abreast: int = 8
    """parcels under way at the same time"""

    def __post_init__(self) -> None:
        if self.most < 0 or self.window <= 0 or self.together < 0 or self.abreast < 1:
            raise Malformed("a route needs most >= 0, window > 0, together >= 0 and abreast >= 1")

    @property
    def urgent(self) -> RecipientPolicy:
        """The same recipient's for what is urgent: nothing waits for a window or for others."""
        return RecipientPolicy(0, self.window, 0, self.abreast)


class QueuedDelivery:
    """A delivery on its way: where it stands, and what decides with whom it travels."""

    __slots__ = (
        "attempt", "bundle", "due", "episode", "error", "expires", "flying", "gone", "leased", "message",
        "ref", "urgent",
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
        """whether it goes the way for what is urgent"""
        self.bundle: object = None
        """what it travelled with the last time: a repeat should look the same"""
        self.attempt = 0
        self.error = ""
        self.flying = False
        self.leased = False
        """another worker's, until it is due: then his attempt is in doubt"""
        self.gone = False
        """ended, or no longer ours: to be passed over"""

    @property
    def doubtful(self) -> bool:
        """Whether an attempt of it may have arrived."""
        return self.error.startswith(DOUBT)

    @property
    def where(self) -> Where:
        return self.ref.recipient, self.urgent

    @property
    def salt(self) -> bytes:
        return self.ref.key + self.ref.recipient.encode()


class RecipientQueue:
    """One recipient's."""

    def __init__(self, policy: RecipientPolicy) -> None:
        self.policy = policy
        self._waiting = Timers[QueuedDelivery]()
        self._under_way = 0
        self._failures = 0
        self._rest = 0
        self._sent: deque[int] = deque()
        self._episodes: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        return self._failures >= CLOSED_AFTER

    def add(self, item: QueuedDelivery) -> None:
        """It waits here until `collect` gives it out. Added again with another due, it waits for that one."""
        if item.attempt:
            self._waiting.set(item, item.due)
        else:  # planned for a moment of the wall clock
            self._waiting.set(item, FOREVER, until=item.due)

    def drop(self, item: QueuedDelivery) -> None:
        """It does not wait here any more."""
        self._waiting.cancel(item)

    def admits(self, item: QueuedDelivery, now: int) -> bool:
        """Whether it may go out at once, alone; if so it counts as under way."""
        if item.due > now or self.closed or self._held(item, now) or self._room(now) < 1:
            return False
        first = self._waiting.next_wake()
        if first is not None and first <= now:
            return False  # not before those who wait already
        self._begin([item], now)
        return True

    def collect(self, now: int) -> list[list[QueuedDelivery]]:
        """The parcels that go out now. Each counts as under way until `arrived` or `failed` says how it
        ended."""
        room = self._room(now)
        if self.closed:
            room = 0 if self._under_way or now < self._rest else min(room, 1)
        if room < 1:
            return []
        parcels = self._pack(now, 1 if self.closed else None)
        if len(parcels) > room:
            allowance = self._allowance(now)
            if allowance is not None and allowance < len(parcels):
                parcels = [[item for parcel in parcels for item in parcel]]
            for parcel in parcels[room:]:
                for item in parcel:
                    self.add(item)
            del parcels[room:]
        for parcel in parcels:
            for item in parcel[PARCEL:]:
                self.add(item)
            del parcel[PARCEL:]
            self._begin(parcel, now)
        return parcels

    def abandoned(self) -> None:
        """A parcel that was given out did not go, or nobody can tell any more how it went."""
        self._under_way = max(0, self._under_way - 1)

    def arrived(self) -> bool:
        """A parcel got through; whether the way had been failing until now."""
        self.abandoned()
        was, self._failures, self._rest = self._failures, 0, 0
        return was > 0

    def failed(self, until: int) -> None:
        """A parcel did not get through; if the way is closed, it is not tried again before `until`."""
        self.abandoned()
        self._failures += 1
        self._rest = max(self._rest, until)

    def hurry(self, now: int) -> None:
        """The way is open again: what waits for its next attempt need not wait any longer."""
        self._failures, self._rest = 0, 0
        for item in list(self._waiting):
            if item.attempt and item.due > now:
                item.due = now
                self.add(item)

    def next_wake(self) -> int | None:
        """When `collect` may have something to give out; None: not before something else happens."""
        when = self._waiting.next_wake()
        if when is None or self._under_way >= (1 if self.closed else self.policy.abreast):
            return None
        if self.closed:
            when = max(when, self._rest)
        if self.policy.most and len(self._sent) >= self.policy.most:
            when = max(when, self._sent[-self.policy.most] + self.policy.window)
        return when

    def shift(self, by: int) -> None:
        """The wall clock was set; what measures lengths goes on as if it had not been."""
        self._rest += by if self._rest else 0
        self._sent = deque(at + by for at in self._sent)
        self._episodes = {episode: at + by for episode, at in self._episodes.items()}
        self._waiting.shift(by)
        for item in self._waiting:
            item.due += by if item.attempt else 0

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _allowance(self, now: int) -> int | None:
        """How many parcels may still go out in this window; None: any number."""
        sent, policy = self._sent, self.policy
        while sent and sent[0] + policy.window <= now:
            sent.popleft()
        return max(0, policy.most - len(sent)) if policy.most else None

    def _room(self, now: int) -> int:
        allowance = self._allowance(now)
        abreast = self.policy.abreast - self._under_way
        return abreast if allowance is None else min(abreast, allowance)

    def _held(self, item: QueuedDelivery, now: int) -> int:
        """Until when it waits for others of its episode; 0: it need not. What was tried has waited."""
        if not item.episode or item.attempt:
            return 0
        first = self._episodes.get(item.episode)
        if first is None or first + self.policy.together <= now:
            return 0
        return first + self.policy.together

    def _pack(self, now: int, most: int | None) -> list[list[QueuedDelivery]]:
        """What is ready, in the order it became due, with those of one episode together."""
        parcels: dict[object, list[QueuedDelivery]] = {}
        while len(parcels) != most and (item := self._waiting.pop(now)) is not None:
            if item.flying:
                continue
            if until := self._held(item, now):
                item.due = until
                self.add(item)
                continue
            alone = (item.episode, item.ref.round) if item.episode else item
            parcels.setdefault(item.bundle or alone, []).append(item)
        return list(parcels.values())

    def _begin(self, parcel: list[QueuedDelivery], now: int) -> None:
        self._under_way += 1
        if self.policy.most:
            self._sent.append(now)
        bundle = object() if len(parcel) > 1 else None
        for item in parcel:
            item.flying = True
            item.bundle = bundle
            if item.episode and self.policy.together:
                if len(self._episodes) >= EPISODES:
                    over = now - self.policy.together
                    self._episodes = {each: at for each, at in self._episodes.items() if at > over}
                self._episodes[item.episode] = now


class RecipientQueues:
    """All of them, and which is to be looked at next. A route is made when it is first asked for."""

    def __init__(self, policy: Callable[[str], RecipientPolicy]) -> None:
        self._policy = policy
        self._routes: dict[Where, RecipientQueue] = {}
        self._wakes = Timers[Where]()

    def afresh(self) -> RecipientQueues:
        """As after a restart."""
        return RecipientQueues(self._policy)

    def __getitem__(self, where: Where) -> RecipientQueue:
        route = self._routes.get(where)
        policy = self._policy(where[0])
        if where[1]:
            policy = policy.urgent
        if route is None:
            route = self._routes[where] = RecipientQueue(policy)
        route.policy = policy
        return route

    def schedule(self, where: Where) -> None:
        """Something has changed on this one."""
        wake = self[where].next_wake()
        if wake != self._wakes.get(where):
            self._wakes.set(where, FOREVER if wake is None else wake)

    def drop(self, item: QueuedDelivery) -> None:
        """It does not wait any more."""
        route = self._routes.get(item.where)
        if route is not None:
            route.drop(item)

    def hurry(self, recipient: str, now: int) -> None:
        """One way of a channel is open again: all of them are."""
        channel = recipient.partition("#")[0]
        for where, route in self._routes.items():
            if where[0].partition("#")[0] == channel:
                route.hurry(now)
                self.schedule(where)

    def collect(self, now: int) -> list[tuple[Where, list[QueuedDelivery]]]:
        """The parcels that go out now, on all of them."""
        parcels: list[tuple[Where, list[QueuedDelivery]]] = []
        for where in self._wakes.due(now):
            parcels += ((where, parcel) for parcel in self._routes[where].collect(now))
            self.schedule(where)
        return parcels

    def next_wake(self) -> int | None:
        return self._wakes.next_wake()

    def shift(self, by: int) -> None:
        for where, route in self._routes.items():
            route.shift(by)
            self.schedule(where)
