"""Limits of accounts: how many messages of each kind one account may send, and how many bytes it may store.

The laws. What one account sends and stores is bounded, so that it neither fills the disk nor keeps a hub
busy that all share; another account is not affected. A refusal counts nothing and says how long to wait, and
every refusal is counted. All kinds share one allowance of bytes. A message whose rate is free and whose bytes
do not fit costs neither. What a limit of 0 stands for is not limited. A repeat of a message that was taken is
answered, whatever its sender has used up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from duly.core.quota import Quota, Rate
from duly.core.units import DAY, MINUTE
from duly.errors import Malformed, RateLimited

REMEMBERED: Final = 1_000_000
"""Accounts that are counted each for itself: they have authenticated, so a hub has no more than it made."""
UNIT_BITS: Final = 8
"""Bytes are counted in units of 256, and at least one for each message: about what its id and its row take
besides."""
REFUSED_NAMES: Final = 1_000
"""Accounts whose refusals are counted each for itself."""
MB: Final = 1024 * 1024


class LimitPolicy(Struct, frozen=True):
    """What one account may do: messages a minute by kind, and megabytes a day; 0 does not limit.

    As much as a minute (or a day) allows may come at once.
    """

    commands: int = 600_000
    lines: int = 600_000
    pushes: int = 600_000
    alerts: int = 600_000
    stored_mb: int = 4_096

    def __post_init__(self) -> None:
        if min(self.commands, self.lines, self.pushes, self.alerts, self.stored_mb) < 0:
            raise Malformed("a limit is a number of messages or megabytes, or 0 for no limit")


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

    def __init__(self, kind: str, amount: int, stored_mb: int, stored: Quota) -> None:
        self.kind = kind
        self.amount = amount
        """messages a minute; 0: not limited"""
        self.refused = 0
        self.names: Counter[str] = Counter()
        """how many messages of each account were refused"""
        self._stored_mb = stored_mb
        self._sent = Quota(Rate(amount or 1, MINUTE), REMEMBERED)
        self._stored = stored
        self._take_sent = self._sent.take if amount else _unlimited
        self._take_stored = stored.take if stored_mb else _unlimited

    def take(self, name: str, size: int, now: int) -> None:
        """Count a message of this account with so many bytes; raises `RateLimited` if that is too much."""
        refusal = self.excess(name, size, now)
        if refusal is not None:
            raise self.refuse(name, refusal)

    def excess(self, name: str, size: int, now: int) -> RateLimited | None:
        """Count a message of this account, or return why it is too much; a message that is refused for that
        is counted by `refuse`."""
        wait = self._take_sent(name, now)
        if wait:
            return RateLimited(
                f"{name} may send {self.amount:,} {self.kind} a minute ({self.kind}_per_minute)", wait
            )
        wait = self._take_stored(name, now, 1 + (size >> UNIT_BITS))
        if wait:
            self._sent.give_back(name)
            return RateLimited(f"{name} may store {self._stored_mb:,} MB a day (stored_mb_per_day)", wait)
        return None

    def refuse(self, name: str, refusal: RateLimited) -> RateLimited:
        """Count a refusal, and return it."""
        self.refused += 1
        if name in self.names or len(self.names) < REFUSED_NAMES:
            self.names[name] += 1
        return refusal


class AccountLimits:
    """The limits of every account at one hub."""

    def __init__(self, policy: LimitPolicy | None = None) -> None:
        self.policy = policy = policy or LimitPolicy()
        units = max(1, policy.stored_mb * MB >> UNIT_BITS)
        stored = Quota(Rate(units, DAY), REMEMBERED)
        self.commands = AccountLimit("commands", policy.commands, policy.stored_mb, stored)
        self.lines = AccountLimit("lines", policy.lines, policy.stored_mb, stored)
        self.pushes = AccountLimit("pushes", policy.pushes, policy.stored_mb, stored)
        self.alerts = AccountLimit("alerts", policy.alerts, policy.stored_mb, stored)

    def __iter__(self) -> Iterator[AccountLimit]:
        yield from (self.commands, self.lines, self.pushes, self.alerts)

    def worst(self, most: int = 5) -> list[tuple[str, int]]:
        """The accounts of which most was refused, and how much."""
        total: Counter[str] = Counter()
        for limit in self:
            total.update(limit.names)
        return total.most_common(most)


def _unlimited(_name: str, _now: int, _amount: int = 1) -> int:
    return 0
