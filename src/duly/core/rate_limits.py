"""Rate limits: how much each account or address may do in a given time.

What an account may send and store is in `duly.core.account_limits`, which counts with this module.

The laws. A refusal says how long to wait. Memory is bounded, and a flood of new names does not reset the
count of a limited name: when every remembered name is active, new names share one allowance. When the clock
is set back, counts in the future are dropped and the allowance is full again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from duly.core.units import SECOND
from duly.errors import Malformed

REMEMBERED: Final = 10_000
"""The most names that are counted individually."""
DEBT: Final = 10
"""How many bursts can be spent in advance; more is forgiven."""
_TRIED: Final = 4
"""How many names are examined, for each new one, to find one that can be forgotten."""
_REST: Final = ""
"""The name shared by all that are not counted individually."""


class Rate(Struct, frozen=True):
    """A rate: `amount` per `per` microseconds, of which `burst` may come at once.

    >>> Rate(100, SECOND).interval
    10000
    """

    amount: int
    per: int = SECOND
    burst: int = 0
    """0: as many as `amount`"""

    def __post_init__(self) -> None:
        if self.amount < 1 or self.per < 1 or self.burst < 0:
            raise Malformed("a rate needs amount >= 1, per >= 1 µs and burst >= 0")

    @property
    def interval(self) -> int:
        """How long one unit takes to refill, in microseconds."""
        return max(self.per // self.amount, 1)

    @property
    def span(self) -> int:
        """How long a whole burst takes to refill, in microseconds."""
        return self.interval * (self.burst or self.amount)


class RateLimits:
    """Counts by name against one rate.

    >>> limits = RateLimits(Rate(2, SECOND))
    >>> [limits.take("ann", now) for now in (0, 0, 0, 500_000)]
    [0, 0, 500000, 0]
    """

    def __init__(self, rate: Rate, remembered: int = REMEMBERED) -> None:
        self._interval = rate.interval
        self._span = rate.span
        self._remembered = remembered
        self._full_at: OrderedDict[str, int] = OrderedDict()
        """when each name's allowance is full again; a name that is missing here has all of it"""

    def take(self, name: str, now: int, amount: int = 1) -> int:
        """Count `amount` for this name. Returns 0 if that is within its rate; otherwise counts nothing and
        returns how long to wait, in microseconds. An amount beyond the burst counts as a whole burst: it
        would never fit."""
        full_at = self._full_at.get(name)
        if full_at is None:
            if len(self._full_at) >= self._remembered and not self._forget(now):
                name = _REST
            full_at = self._full_at.get(name, now)
        span = self._span
        # This runs for every message, so it avoids unnecessary calls.
        cost = self._interval if amount == 1 else min(self._interval * amount, span)
        latest = now + span
        if full_at <= now or full_at > latest:  # the allowance is full, or the clock was set back
            self._full_at[name] = now + cost
            return 0
        over = full_at + cost - latest
        if over > 0:
            return over
        self._full_at[name] = full_at + cost
        return 0

    def spend(self, name: str, now: int, amount: int) -> int:
        """Count what was done already, even beyond the rate. Returns how long it takes until the allowance is
        within the burst again, in microseconds, or 0 if it is. So an occasional check finds names that are
        too fast."""
        full_at = self._full_at.get(name)
        if full_at is None and len(self._full_at) >= self._remembered and not self._forget(now):
            name = _REST
            full_at = self._full_at.get(name)
        begin = now if full_at is None or full_at < now else full_at
        self._full_at[name] = min(begin + self._interval * amount, now + DEBT * self._span)
        return max(0, self._full_at[name] - now - self._span)

    def wait(self, name: str, now: int) -> int:
        """Return how long to wait before one more is within the rate, in microseconds; 0: not at all. Counts
        nothing."""
        full_at = self._full_at.get(name)
        if full_at is None and len(self._full_at) >= self._remembered and not self._forget(now):
            full_at = self._full_at.get(_REST)
        if full_at is None or full_at > now + self._span:
            return 0
        return max(0, full_at + self._interval - now - self._span)

    def give_back(self, name: str, amount: int = 1) -> None:
        """Undo a `take` of something that turned out not to count."""
        if name not in self._full_at:
            name = _REST
        if name in self._full_at:
            self._full_at[name] -= min(self._interval * amount, self._span)

    def _forget(self, now: int) -> bool:
        """Make room by dropping names whose allowance is whole; whether there is room."""
        for name in [name for name, _ in zip(self._full_at, range(_TRIED), strict=False)]:
            if self._full_at[name] <= now:
                del self._full_at[name]
            else:
                self._full_at.move_to_end(name)
        return len(self._full_at) < self._remembered

    def __len__(self) -> int:
        return len(self._full_at)
