"""The timing of commands, validated: how old they may be, and how long they wait, are resent and are
remembered.

The law: per device and order key a sender's commands take effect in its order. Only a gap makes commands
wait, for at most the window; a command that arrives later is superseded, and its sender is told. A command
older than `max_age` when it first arrives is refused as stale: a late "unlock" is dangerous.

`duly.core.ordering` implements the ordering. This module validates its settings once, including that ids are
remembered longer than a command can be repeated.
"""

from __future__ import annotations

from msgspec import Struct

from duly.core.horizon import Horizon
from duly.core.ordering import LanePolicy
from duly.core.retry import COMMAND, RetryPolicy
from duly.core.units import DAY, MINUTE, MS, SECOND
from duly.errors import Malformed


class CommandTiming(Struct, frozen=True):
    """How long commands wait, are resent, are answered and are remembered."""

    window: int = 300 * MS
    """how long a gap is waited for"""
    max_age: int = 10 * MINUTE
    """how old a command may be when it first arrives, by its own seq_id"""
    drift: int = 2 * SECOND
    """how far ahead a sender's clock may be where it has no counter"""
    remember: int = DAY
    """how long ids and answers are remembered"""
    skew: int = 5 * MINUTE
    """how wrong a sender's clock may be"""
    lasts: int = 30 * SECOND
    """how long a command without `exp` may take to reach its device"""
    patience: int = 10 * SECOND
    """how long a device may take to answer before the outcome is unknown"""
    resend: RetryPolicy = COMMAND

    def __post_init__(self) -> None:
        for name in ("max_age", "remember", "lasts", "patience"):
            if getattr(self, name) <= 0:
                raise Malformed(f"{name} must be longer than 0")
        try:
            self.horizon().covers(self.max_age, self.resend.span() or 0)
        except Malformed as problem:
            names = "the horizon is 'remember', the expiry 'max_age', in seconds"
            raise Malformed(f"{problem}: {names}") from None
        LanePolicy(self.window, self.drift)

    def horizon(self) -> Horizon:
        """Return how long the ids of commands are remembered."""
        return Horizon(keep=self.remember, skew=self.skew, fresh=min(self.max_age, self.remember))

    def lanes(self) -> LanePolicy:
        """Return how commands of one sender to one device are ordered."""
        return LanePolicy(self.window, self.drift, gated=True)
