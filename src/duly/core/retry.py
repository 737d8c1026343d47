"""Retry policies: when to try again, and when to give up.

The law: **the time of the next attempt is computed here and stored in the ledger**; no other code has a retry
timer or backoff loop of its own. Jitter only shortens a delay, so that ``span`` is a true upper bound and the
horizon can be checked against it. It is a hash of the message's own salt: messages that failed together
spread out, and a run can be repeated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isfinite
from typing import Final

from duly.core.units import FOREVER, HOUR, SECOND
from duly.errors import Malformed, ProgramError

DRAWN: Final = 1_024
"""How many jitter values are cached: each is needed when a try is stored and again when it goes out."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait after each try, and when to give up.

    ``tries`` counts every time the message goes out, the first one too: four tries are one send and three
    resends. With None it is tried until it expires.

    >>> policy = RetryPolicy.exponential(5 * SECOND, 60 * SECOND, jitter=0)
    >>> [policy.delay(attempt, b"") // SECOND for attempt in (1, 2, 3, 4, 5, 6)]
    [5, 10, 20, 40, 60, 60]
    """

    first: int
    """the delay after the first try, in microseconds"""
    factor: float
    """the factor between one delay and the next"""
    cap: int
    """the longest delay, in microseconds"""
    tries: int | None
    """how often the message goes out in all; None: until it expires"""
    jitter: float
    """the largest fraction, from 0 to 1, by which a delay is shortened at random"""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.cap <= FOREVER:
            raise Malformed(f"delays need 0 < first ≤ cap, not first {self.first} and cap {self.cap}")
        if not (isfinite(self.factor) and self.factor >= 1):
            raise Malformed(f"the factor must be 1 or more, or delays would shrink; got {self.factor}")
        if self.tries is not None and self.tries < 1:
            raise Malformed(f"tries must be 1 or more, not {self.tries}; for no resends use never()")
        if not 0 <= self.jitter <= 1:
            raise Malformed(f"jitter must be a fraction from 0 to 1, not {self.jitter}")

    @classmethod
    def fixed(cls, every: int, tries: int | None) -> RetryPolicy:
        """Return a policy with the same delay after every try."""
        return cls(first=every, factor=1.0, cap=every, tries=tries, jitter=0.0)

    @classmethod
    def exponential(
        cls, first: int, cap: int, factor: float = 2.0, tries: int | None = None, jitter: float = 0.2
    ) -> RetryPolicy:
        """Return a policy with delays that grow from ``first`` to ``cap``."""
        return cls(first=first, factor=factor, cap=cap, tries=tries, jitter=jitter)

    @classmethod
    def never(cls) -> RetryPolicy:
        """Return a policy with one try and no resends."""
        return cls.fixed(every=1, tries=1)

    def delay(self, attempt: int, salt: bytes) -> int | None:
        """Return how long to wait after the ``attempt``-th try (the first is 1), or None if that was the last
        one."""
        if attempt < 1:
            raise ProgramError(f"tries are counted from 1, not {attempt}")
        if self.tries is not None and attempt >= self.tries:
            return None
        longest = self.first if attempt == 1 or self.factor == 1 else self._longest(attempt)
        if not self.jitter:
            return longest
        return longest - int(longest * self.jitter * _drawn(attempt, salt))

    def span(self) -> int | None:
        """Return the longest time from the first try to the last, or None if only expiry ends it.

        >>> COMMAND.span() == 9 * SECOND
        True
        """
        if self.tries is None:
            return None
        total, resends = 0, self.tries - 1
        if self.factor == 1:
            return resends * self.first
        for attempt in range(1, resends + 1):
            longest = self._longest(attempt)
            if longest == self.cap:
                return total + (resends - attempt + 1) * self.cap
            total += longest
        return total

    def _longest(self, attempt: int) -> int:
        try:
            return int(min(self.cap, self.first * self.factor ** (attempt - 1)))
        except OverflowError:  # past every float, so past the cap
            return self.cap


@lru_cache(DRAWN)
def _drawn(attempt: int, salt: bytes) -> float:
    """Return a number from 0 to 1 that is always the same for the same try of the same message."""
    return int.from_bytes(blake2b(b"%d:%b" % (attempt, salt), digest_size=6).digest(), "big") / (1 << 48)


COMMAND: Final = RetryPolicy.fixed(3 * SECOND, tries=4)
"""For commands, where a person is waiting: one send and three resends, 3 s apart."""

DELIVERY: Final = RetryPolicy.exponential(5 * SECOND, HOUR)
"""For channels that may be down for long: 5 s, then more slowly, up to once an hour, until it expires."""
