"""Trusted time: how far a clock can be trusted, and so which ids may be forgotten.

The law: the floor never rises above trusted time, so a clock that was wrong for a minute makes nothing stale.
Trusted time is the value stored in the ledger when it was opened, plus the time that has passed on the
monotonic clock since. It lags behind if the machine was off or the ledger is new; then the time of the wall
clock is a *claim*. A claim is trusted after an hour without contradiction: this process's clock was not set
back behind it, and no other process on the same ledger has a clock that is still behind it. A process that
does not run that long takes over the claim of an earlier process if the clock is now an hour later. Lagging
costs memory, because ids are kept longer, but never a message.

A floor that rose too far anyway (because a clock was wrong for hours) can be repaired: messages created after
the repair are fresh again, and older ones stay stale, since their ids may have been forgotten.

A ledger restored from a backup does not know what was accepted after the backup. So an unknown message that
was created before the loss is stale; see `refusal`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from duly.core.messages import FORGOTTEN, Verdict, VerdictKind
from duly.core.units import DAY, HOUR, MINUTE, MS, YEAR, show

CONFIRM: Final = HOUR
DRIFT: Final = MINUTE
"""Differences up to this are normal: clocks are corrected and processes restarted all the time."""
RESTORED_TIMED: Final = YEAR
RESTORED_AGELESS: Final = DAY
"""How long after a restore unknown ids from before it are stale."""
YOUNG: Final = YEAR
"""A trusted time below this did not come from a clock: it was counted from zero."""


AHEAD: Final = Verdict(
    VerdictKind.STALE,
    reason="this hub's floor lies in the future, since a clock was wrong: no id is accepted before "
    "'duly floor --mend' has taken it back; send it again then, with a new id",
)
RESTORED: Final = Verdict(
    VerdictKind.STALE,
    reason="this hub's ledger was restored from a backup, and may have accepted this before the loss; "
    "if it is still wanted, use a new id",
)
RESTORED_UNTIMED: Final = Verdict(
    VerdictKind.STALE,
    reason="this hub's ledger was restored from a backup, and may have accepted this before the loss; "
    "its id does not tell its age; if it is still wanted, use one that does, such as a UUIDv7",
)


class Floor(Struct, frozen=True):
    """The floor of a ledger: until when ids may have been forgotten, and its trusted time (µs)."""

    until: int = 0
    """messages that could be accepted only until this time may have been forgotten"""
    trusted: int = 0
    claim: int = 0
    """a later time shown by a clock; 0 if there is none"""
    mended: int = 0
    """when a floor that had risen too far was repaired"""
    barrier: int = 0
    """how far that floor had risen: below it, only messages created after the repair are fresh"""
    restored: int = 0
    """messages created before this may have been accepted by the ledger that this one is a backup of"""

    def refusal(self, until: int, made: int, now: int, *, repeatable: bool = False) -> Verdict | None:
        """Return the error for a message that could be accepted until then and may have been forgotten: what
        to do, and when. Returns None if it cannot have been forgotten.

        After a restore this applies to everything created before the loss that could be accepted for at most
        a year. Alerts can be accepted for longer, and one that is reported twice is better than one that is
        lost; so is anything else `repeatable`. A message without a creation time (0) is stale if it expires
        within a day. One that never expires is accepted, since otherwise no message of its kind ever would
        be.
        """
        if until > self.until and not self.barrier and not self.restored:
            return None  # nearly every ledger was neither repaired nor restored
        if self._forgets(until, made):
            span = until - made if made else 0
            return AHEAD if span and self._forgets(now + span, now) else FORGOTTEN
        if repeatable or not self._lost(until, made):
            return None
        if not made:
            return RESTORED_UNTIMED
        wait = max(0, self.restored + MS - now)
        if not wait:
            return RESTORED
        reason = (
            "this hub's ledger was restored from a backup, and may have accepted this before the loss; "
            f"nothing new is accepted in the next {show(wait)}; send it after that, with an id made then"
        )
        return Verdict(VerdictKind.STALE, reason=reason, wait=wait)

    def _forgets(self, until: int, made: int) -> bool:
        """Return whether the id of a message may have been pruned."""
        return until <= self.until or (until <= self.barrier and made <= self.mended)

    def _lost(self, until: int, made: int) -> bool:
        """Return whether a message may have been accepted after this ledger's backup."""
        span = RESTORED_TIMED if made else RESTORED_AGELESS
        return self.restored > 0 and made <= self.restored and until <= self.restored + span

    @property
    def young(self) -> bool:
        """Whether no clock is trusted yet: a new ledger counts trusted time from zero.

        >>> Floor(trusted=5_000_000).young, Floor(trusted=1_790_000_000_000_000).young
        (True, False)
        """
        return self.trusted < YOUNG

    def mend(self, now: int, *, everything: bool = False) -> Floor:
        """Return the repaired floor for a clock that is right now. With `everything`, messages older than the
        repair are fresh again as well, though their ids may have been forgotten."""
        if self.until <= now and not (everything and (self.barrier or self.restored)):
            return self
        until, trusted = min(self.until, now), min(self.trusted, now)
        if everything:
            return Floor(until, trusted)
        return Floor(until, trusted, 0, now, max(self.barrier, self.until), self.restored)

    def restore(self, lost: int, now: int) -> Floor:
        """Return the floor of a ledger restored from a backup: messages created until `lost` may have been
        accepted since. A clock that was wrong at the time of the backup is not trusted again."""
        return Floor(
            self.until, min(self.trusted, now), 0, self.mended, self.barrier, max(self.restored, lost)
        )


class TrustedClock:
    """Decides by a process's monotonic clock (`steady`) how far its wall clock (`now`) can be trusted."""

    def __init__(self, now: int, steady: int, confirm: int = CONFIRM) -> None:
        self._confirm = confirm
        self._opened = (now, steady)
        self._anchor: tuple[int, int] | None = None
        """a trusted time, and the monotonic time at that moment"""
        self._claim: tuple[int, int] | None = None
        """the present claim, and since when it stands"""
        self._first = True
        self._mended = 0

    def begin(self, floor: Floor) -> None:
        """Start from the floor that was stored when the ledger was opened."""
        self._anchor = (floor.trusted, self._opened[1])
        self._mended = floor.mended

    def judge(self, floor: Floor, now: int, steady: int) -> Floor:
        """Return the floor as of now, given the stored one."""
        reached = self._reached(floor, steady)
        if now <= reached + DRIFT:
            trusted, claim = self._in_step(now, reached, steady), 0
        else:
            trusted, claim = self._ahead(floor.claim, now, reached, steady)
        self._first = False
        trusted = max(floor.trusted, trusted)
        return replace(floor, until=max(floor.until, min(now, trusted)), trusted=trusted, claim=claim)

    def _reached(self, floor: Floor, steady: int) -> int:
        """Return the trusted time, from the last trusted moment and the time since."""
        if floor.mended > self._mended:
            self._anchor = self._claim = None
            self._mended = floor.mended
        time, then = self._anchor or (0, 0)
        reached = time + steady - then
        if self._anchor is None or floor.trusted > reached:
            self._anchor, reached = (floor.trusted, steady), floor.trusted
        return reached

    def _in_step(self, now: int, reached: int, steady: int) -> int:
        self._claim = None
        trusted = min(now, reached + DRIFT)
        if trusted >= reached - DRIFT:
            self._anchor = (trusted, steady)
        return trusted

    def _ahead(self, stored: int, now: int, reached: int, steady: int) -> tuple[int, int]:
        trusted = reached
        if self._first and 0 < stored <= now - self._confirm:
            trusted, stored = max(reached, stored), 0  # from an earlier process, never contradicted
        claim, since = self._standing(stored, now, steady)
        if steady - since >= self._confirm:
            trusted = max(trusted, min(now, claim + steady - since))
            self._claim = None
            claim = 0
            if now > trusted + DRIFT:
                claim, _ = self._claim = (now, steady)
        if trusted > reached:
            self._anchor = (trusted, steady)
        return trusted, claim

    def _standing(self, stored: int, now: int, steady: int) -> tuple[int, int]:
        """Return the claim that has not been contradicted, and since when it stands."""
        if self._first:
            shown, opened = self._opened
            if 0 < stored <= now:
                self._claim = (stored, opened)
            else:
                self._claim = (shown, opened) if shown <= now else (now, steady)
        elif self._claim is None or stored != self._claim[0] or now < stored:
            self._claim = (stored if 0 < stored <= now else now, steady)
        return self._claim
