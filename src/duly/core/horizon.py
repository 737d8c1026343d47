"""How long an id is remembered, and so how long its message may be accepted.

The law: *what we no longer remember, we no longer accept.* Every message says by itself until when
it could be accepted: until its expiry if it has one, otherwise until its own time plus the horizon.
The ledger keeps the id at least that long. When it forgets, it raises a durable floor, and a message
whose time ended below the floor is `stale`, even if the clock has been set back since.
So memory is bounded and no replay, however old, runs twice.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.core.messages import Message, Verdict, VerdictKind
from duly.core.units import DAY, FOREVER, MINUTE, show
from duly.errors import Malformed


class Horizon(Struct, frozen=True):
    """What admission needs to know about time, validated once."""

    keep: int = DAY
    """how far back ids are remembered"""
    skew: int = 5 * MINUTE
    """how far ahead a sender's clock may be"""
    fresh: int = 0
    """how old a message may be when it first comes, if less than `keep`; 0 is `keep`"""
    grace: int = 0
    """how long after its expiry a message is still taken, for senders whose clock is behind"""
    ageless: bool = True
    """accept a message that says neither its age nor its expiry; its id is then kept for ever"""
    lapse: int | None = None
    """where a message says when it expires, that alone decides, not its own time; its id is kept this much
    longer, so that a late repeat still finds the answer. None: its own time counts as well"""

    def __post_init__(self) -> None:
        if (self.lapse or 0) < 0:
            raise Malformed("a horizon's lapse is a length of time, 0 or more, or None")
        if self.keep <= 0 or self.skew < 0 or self.grace < 0 or not 0 <= self.fresh <= self.keep:
            raise Malformed("a horizon needs keep > 0, skew >= 0, grace >= 0 and fresh no longer than keep")

    def covers(self, expiry: int, retry_span: int) -> None:
        """Refuse settings under which a legitimate resend could arrive after its id is forgotten."""
        needed = expiry + retry_span + self.skew
        if self.keep < needed:
            raise Malformed(
                f"the horizon of {show(self.keep)} is shorter than expiry {show(expiry)} + retries "
                f"{show(retry_span)} + clock skew {show(self.skew)}; set it to at least {show(needed)}"
            )


DEFAULT: Final = Horizon()


def remember_until(message: Message, horizon: Horizon) -> int:
    """Until when this message's id must be kept: no later resend of it can be accepted."""
    made, expires = message.made, message.expires
    if expires and horizon.lapse is not None:
        return expires + horizon.grace + horizon.lapse
    until = made + horizon.keep + horizon.skew if made else 0
    if expires and until < expires + horizon.grace:
        return expires + horizon.grace
    return until or FOREVER


def judge(message: Message, horizon: Horizon, now: int) -> Verdict | None:
    """None if the message may be admitted now; otherwise why it may not.

    The caller still asks the ledger before refusing: a repeat of something that was accepted in its
    time gets its stored answer, not a lecture about its age.
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
