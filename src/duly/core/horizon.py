"""The horizon: how long an id is remembered, and so how long its message may be accepted.

The law: *what we no longer remember, we no longer accept.* A message can be accepted until its expiry if it
has one, otherwise until its own time plus the horizon. The ledger keeps the id at least that long. When it
forgets ids, it raises a durable floor, and a message that could only be accepted before the floor is `stale`,
even if the clock has been set back since. So memory is bounded, and no replay runs twice, however old it is.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.core.messages import Message, Verdict, VerdictKind
from duly.core.units import DAY, FOREVER, MINUTE, show
from duly.errors import Malformed


class Horizon(Struct, frozen=True):
    """The time limits of admission, validated once."""

    keep: int = DAY
    """how long ids are remembered"""
    skew: int = 5 * MINUTE
    """how far ahead a sender's clock may be"""
    fresh: int = 0
    """the greatest age of a message at its first arrival, if less than `keep`; 0 means `keep`"""
    grace: int = 0
    """how long after its expiry a message is still accepted, for senders whose clock is behind"""
    ageless: bool = True
    """accept messages that carry neither their age nor an expiry; their ids are then kept for ever"""
    lapse: int | None = None
    """if set, the expiry of a message alone decides, not its own time, and its id is kept this much longer so
    that a late repeat still gets its answer; if None, its own time counts as well"""

    def __post_init__(self) -> None:
        if (self.lapse or 0) < 0:
            raise Malformed("the lapse of a horizon must be a length of time, 0 or more, or None")
        if self.keep <= 0 or self.skew < 0 or self.grace < 0 or not 0 <= self.fresh <= self.keep:
            raise Malformed("a horizon needs keep > 0, skew >= 0, grace >= 0 and fresh no longer than keep")

    def covers(self, expiry: int, retry_span: int) -> None:
        """Refuse settings under which a legitimate resend could arrive after its id was forgotten."""
        needed = expiry + retry_span + self.skew
        if self.keep < needed:
            raise Malformed(
                f"the horizon of {show(self.keep)} is shorter than expiry {show(expiry)} + retries "
                f"{show(retry_span)} + clock skew {show(self.skew)}; set it to at least {show(needed)}"
            )


DEFAULT: Final = Horizon()


def remember_until(message: Message, horizon: Horizon) -> int:
    """Return until when this message's id must be kept; no later resend can be accepted."""
    made, expires = message.made, message.expires
    if expires and horizon.lapse is not None:
        return expires + horizon.grace + horizon.lapse
    until = made + horizon.keep + horizon.skew if made else 0
    if expires and until < expires + horizon.grace:
        return expires + horizon.grace
    return until or FOREVER


def judge(message: Message, horizon: Horizon, now: int) -> Verdict | None:
    """Return None if the message may be admitted now, otherwise why not.

    The caller asks the ledger before refusing: a repeat of a message that was accepted in time gets its
    stored answer, not an error about its age.
    """
    made = message.made
    if made > now + horizon.skew and not (message.expires and horizon.lapse is not None):
        return Verdict(
            VerdictKind.REFUSED,
            reason=f"its time is {show(made - now)} in the future, {show(horizon.skew)} are allowed; "
            "set the sender's clock",
            cause="future",
        )
    if message.expires:
        if message.expires + horizon.grace <= now:
            return Verdict(
                VerdictKind.EXPIRED,
                reason=f"it expired {show(now - message.expires)} ago; send a new one if it is still wanted",
            )
        return None
    if made:
        oldest = horizon.fresh or horizon.keep
        if made + oldest <= now:
            return Verdict(
                VerdictKind.STALE,
                reason=f"it is {show(now - made)} old, {show(oldest)} are allowed; "
                "if it is still wanted, send it anew: with a new id, and a time of now",
            )
        return None
    if not horizon.ageless:
        return Verdict(
            VerdictKind.REFUSED,
            reason="it says neither how old it is nor when it expires; add one of them",
            cause="ageless",
        )
    return None
