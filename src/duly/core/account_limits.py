"""Limits of accounts: how many messages of each kind one account may send, and how many bytes it may store.

The laws. An account may send and store only so much, so that it can neither fill the shared disk nor keep a
shared hub busy; other accounts are not affected. A refused message uses up no allowance, and its refusal says
how long to wait; refusals are counted. All kinds share one allowance of bytes. A message that is within its
rate but over the allowance of bytes uses up neither, and one that is refused for another reason, or turns
out to be a repeat, gives its bytes back. A limit of 0 means no limit. A repeat of an accepted
message is always answered, even if its sender has reached a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import DAY, MINUTE
from duly.errors import Malformed, RateLimited

REMEMBERED: Final = 1_000_000
"""The most accounts with counters of their own. They have authenticated, so there are no more of them than a
hub has created."""
UNIT_BITS: Final = 8
"""Bytes are counted in units of 256, at least one unit per message; that covers its id and its row in the
ledger."""
UNDER_WAY: Final = 100_000
"""The most messages that are remembered between being counted and being answered."""
REFUSED_NAMES: Final = 1_000
"""The most accounts whose refusals are counted one by one."""
MB: Final = 1024 * 1024


class LimitPolicy(Struct, frozen=True):
    """How much one account may send: messages a minute by kind, megabytes and new groups a day; 0 means no
    limit.

    A whole minute's (or day's) allowance may be used at once.
    """

    commands: int = 600_000
    lines: int = 600_000
    pushes: int = 600_000
    alerts: int = 600_000
    stored_mb: int = 4_096
    groups: int = 200

    def __post_init__(self) -> None:
        if min(self.commands, self.lines, self.pushes, self.alerts, self.stored_mb, self.groups) < 0:
            raise Malformed("a limit must be a number of messages, megabytes or groups, or 0 for no limit")


class AccountLimit:
    """The limit of one kind of messages, for every account.

    >>> lines = AccountLimits(LimitPolicy(lines=1)).lines
    >>> lines.take("ann", 100, now=0)
    >>> lines.take("ann", 100, now=0)
    Traceback (most recent call last):
    duly.errors.RateLimited: ann may send 1 lines a minute (lines_per_minute)
    >>> lines.refused
    1
    """

    def __init__(
        self, kind: str, amount: int, stored_mb: int, stored: RateLimits, *, daily: bool = False
    ) -> None:
        self.kind = kind
        self.amount = amount
        """messages a minute, or a day; 0: no limit"""
        self._daily = daily
        self.refused = 0
        self.names: Counter[str] = Counter()
        """refused messages by account"""
        self._stored_mb = stored_mb
        self._sent = RateLimits(Rate(amount or 1, DAY if daily else MINUTE), REMEMBERED)
        self._stored = stored
        self._take_sent = self._sent.take if amount else _unlimited
        self._take_stored = stored.take if stored_mb else _unlimited

    def take(self, name: str, size: int, now: int) -> None:
        """Count a message of this account and its bytes; raises `RateLimited` if it exceeds a limit."""
        refusal = self.excess(name, size, now)
        if refusal is not None:
            raise self.refuse(name, refusal)

    def excess(self, name: str, size: int, now: int) -> RateLimited | None:
        """Count a message of this account, or return why it exceeds a limit. The caller then counts the
        refusal with `refuse`."""
        wait = self._take_sent(name, now)
        if wait:
            reason = (
                f"{name} may make {self.amount:,} {self.kind} a day ({self.kind}_per_day)"
                if self._daily
                else f"{name} may send {self.amount:,} {self.kind} a minute ({self.kind}_per_minute)"
            )
            return RateLimited(reason, wait)
        wait = self._take_stored(name, now, 1 + (size >> UNIT_BITS))
        if wait:
            self._sent.give_back(name)
            return RateLimited(f"{name} may store {self._stored_mb:,} MB a day (stored_mb_per_day)", wait)
        return None

    def give_back(self, name: str, size: int) -> None:
        """Give back the bytes of a message that was counted and is not stored."""
        if self._stored_mb:
            self._stored.give_back(name, 1 + (size >> UNIT_BITS))

    def refuse(self, name: str, refusal: RateLimited) -> RateLimited:
        """Count a refused message and return the error for its sender."""
        self.refused += 1
        if name in self.names or len(self.names) < REFUSED_NAMES:
            self.names[name] += 1
        return refusal


class CountedBytes:
    """The bytes of messages that were counted and are on their way to the ledger, by key.

    >>> limit = AccountLimits(LimitPolicy(stored_mb=1)).lines
    >>> under_way = CountedBytes(limit)
    >>> for _ in range(9):
    ...     limit.take("ann", 1_000_000, now=0)
    ...     under_way.begin(b"key", 1_000_000)
    ...     under_way.end(b"key", "ann", stored=False)
    """

    def __init__(self, limit: AccountLimit) -> None:
        self._limit = limit
        self._sizes: dict[bytes, int] = {}

    def begin(self, key: bytes, size: int) -> None:
        """Note that a message was counted with this size."""
        self._sizes[key] = size
        if len(self._sizes) > UNDER_WAY:  # these were never answered: the ledger has failed
            del self._sizes[next(iter(self._sizes))]

    def end(self, key: bytes, name: str, *, stored: bool) -> None:
        """Give the bytes of a message back if it is not stored. Of the answers to its key only the first one
        counts: a repeat meanwhile gives nothing back."""
        size = self._sizes.pop(key, None)
        if size is not None and not stored:
            self._limit.give_back(name, size)


class AccountLimits:
    """The limits of every account at one hub."""

    def __init__(self, policy: LimitPolicy | None = None) -> None:
        self.policy = policy = policy or LimitPolicy()
        units = max(1, policy.stored_mb * MB >> UNIT_BITS)
        stored = RateLimits(Rate(units, DAY), REMEMBERED)
        self.commands = AccountLimit("commands", policy.commands, policy.stored_mb, stored)
        self.lines = AccountLimit("lines", policy.lines, policy.stored_mb, stored)
        self.pushes = AccountLimit("pushes", policy.pushes, policy.stored_mb, stored)
        self.alerts = AccountLimit("alerts", policy.alerts, policy.stored_mb, stored)
        # A group that is made counts as a line as well, with its bytes.
        self.groups = AccountLimit("groups", policy.groups, 0, stored, daily=True)

    def __iter__(self) -> Iterator[AccountLimit]:
        yield from (self.commands, self.lines, self.pushes, self.alerts, self.groups)

    def worst(self) -> list[tuple[str, int]]:
        """Return the five accounts with the most refused messages, and how many each had."""
        total: Counter[str] = Counter()
        for limit in self:
            total.update(limit.names)
        return total.most_common(5)


def _unlimited(_name: str, _now: int, _amount: int = 1) -> int:
    return 0
