"""How fast each account publishes at the embedded broker, and which of them publish too fast.

nats-server has no rate limits, and one client alone can keep it and the hub busy. What a device answers to
tasks that it was given is allowed besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from duly.broker.acl_dialects import DEVICES, NODES
from duly.broker.callout import BrokerConnection
from duly.core.acl import HUB
from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import SECOND

PUBLISHED: Final = {
    DEVICES: Rate(1_000, SECOND, burst=2_000),
    NODES: Rate(20_000, SECOND, burst=40_000),
}
"""The messages that a user may publish, by its account of the broker; a large message counts as several.
The limit for devices is low since the hub reads all of them in one session: each of them waits for what
any one publishes."""

ANSWERED: Final = 64
"""Messages that a device may publish besides for each task it is given: acks, and a result with a piece of
a file."""
ANSWERED_LATER: Final = 2_000
"""The most of these messages that a device may save for later."""

BACKLOG: Final = 256 * 1024
"""Unread bytes for the hub above which it reconnects after a flood instead of reading them."""


class PublishRates:
    """Counts what the connections of each user publish."""

    def __init__(self) -> None:
        self._published = {account: RateLimits(rate) for account, rate in PUBLISHED.items()}
        self._answers: Counter[str] = Counter()
        """messages that each user may publish besides, as answers"""
        self._before: dict[int, int] = {}
        """messages that each connection had published at the last check"""

    def flooding(
        self, connections: Iterable[BrokerConnection], given: Mapping[str, int], now: int
    ) -> Iterator[BrokerConnection]:
        """Yield the connections whose users have published too fast since the last check. `given` is how many
        tasks each user was given since then."""
        connections, before = list(connections), self._before
        self._before = {one.cid: one.published for one in connections}
        for name, tasks in given.items():
            self._answers[name] += ANSWERED * tasks
        for one in connections:
            fresh = one.published - before.get(one.cid, 0)
            if fresh > 0 and one.account in self._published and one.user != HUB:
                answers = min(fresh, self._answers[one.user])
                if answers:
                    self._answers[one.user] -= answers
                if self._published[one.account].spend(one.user, now, fresh - answers):
                    yield one
        for name, left in self._answers.items():
            self._answers[name] = min(left, ANSWERED_LATER)

    def forget(self, name: str) -> None:
        """Forget a user that was removed."""
        self._answers.pop(name, None)


def backlogged(connections: Iterable[BrokerConnection]) -> list[int]:
    """Return the connections of the hub for which a flood has left much to read."""
    return [one.cid for one in connections if one.user == HUB and one.waiting > BACKLOG]
