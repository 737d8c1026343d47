"""How far a clock can be trusted, and so what may be forgotten.

The law: the floor never rises beyond time that can be trusted, so a clock that was wrong for a minute makes
nothing stale. Trusted time is what the ledger held as such when it was opened, plus what has passed on the
monotonic clock since. It lags when the machine was off, or when the ledger is new; then the wall clock is
ahead of it, and what the wall clock shows is a *claim*. A claim is trusted when it was not contradicted for
an hour: neither by this process, whose clock is then set back behind it, nor by another one on the same
ledger, whose clock is still behind it. A process that does not live that long takes over the claim of an
earlier one, if the clock is an hour further now. Lagging costs memory, since ids are kept longer; never a
message.

A floor that has risen too far all the same (a clock that was wrong for hours) can be mended: what is made
after that moment is then fresh again, and what is older stays stale, since its id may have been forgotten.

A ledger that was restored from a backup does not know what was accepted after it. So what was made before the
loss, and is not known, is stale; see `refusal`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from duly.core.messages import FORGOTTEN, Verdict, VerdictKind
from duly.core.units import DAY, HOUR, MINUTE, MS, YEAR, show

CONFIRM: Final = HOUR
DRIFT: Final = MINUTE
"""Clocks are corrected by so much all the time, and processes restarted."""
RESTORED_TIMED: Final = YEAR
RESTORED_AGELESS: Final = DAY
"""How long after a restore ids that it does not know are stale, if they are from before it."""
YOUNG: Final = YEAR
"""An earlier trusted time was not shown by a clock, but counted from zero."""


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
    """The floor of a ledger: until when ids may have been forgotten, and the time that it trusts (µs)."""

    until: int = 0
    """messages that could be accepted until then, or before, may have been forgotten"""
    trusted: int = 0
    claim: int = 0
    """a later time that a clock has shown; 0: there is none"""
    mended: int = 0
    """when a floor that had risen too far was mended"""
    barrier: int = 0
    """how far that one had risen: up to there, only what was made after the mending is fresh"""
    restored: int = 0
    """what was made until then may have been accepted by the ledger of which this one is a backup"""

    def refusal(self, until: int, made: int, now: int) -> Verdict | None:
        """Return what the sender of a message is told that could be accepted until then and may have been
        forgotten: what to do, and when; None if it cannot have been.

        After a restore that is so for everything made before the loss, if it could be accepted for a year at
        most: alerts can be for longer, and one that is told twice is better than one that is lost. What does
        not say when it was made (0) is stale if it expires within a day; one that never does is accepted,
        since otherwise nothing of its kind would be, ever.
        """
        if self._forgets(until, made):
            span = until - made if made else 0
            return AHEAD if span and self._forgets(now + span, now) else FORGOTTEN
        if not self._lost(until, made):
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
        """Return whether a message may have been accepted after the backup of which this ledger is made."""
        span = RESTORED_TIMED if made else RESTORED_AGELESS
        return self.restored > 0 and made <= self.restored and until <= self.restored + span

    @property
    def top(self) -> int:
        """The time above which nothing was ever forgotten."""
        return max(self.until, self.barrier)

    @property
    def young(self) -> bool:
        """Whether no clock is trusted yet: in a new ledger trusted time is counted from zero.

        >>> Floor(trusted=5_000_000).young, Floor(trusted=1_790_000_000_000_000).young
        (True, False)
        """
        return self.trusted < YOUNG

    def mend(self, now: int, *, everything: bool = False) -> Floor:
        """Return the floor for a clock that is right now. With `everything`, what is older than the
        mending is fresh again too, though its id may have been forgotten."""
        if self.until <= now and not (everything and (self.barrier or self.restored)):
            return self
        until, trusted = min(self.until, now), min(self.trusted, now)
        if everything:
            return Floor(until, trusted)
        return Floor(until, trusted, 0, now, max(self.barrier, self.until), self.restored)

    def restore(self, lost: int, now: int) -> Floor:
        """Return the floor of a ledger that is made from a backup: what was made until `lost` may have been
        accepted since. A clock that was wrong when the backup was made is not believed again."""
        return Floor(
            self.until, min(self.trusted, now), 0, self.mended, self.barrier, max(self.restored, lost)
        )


class TrustedClock:
    """Judges by a process's monotonic clock (`steady`) how far its wall clock (`now`) can be trusted."""

    def __init__(self, now: int, steady: int, confirm: int = CONFIRM) -> None:
        self._confirm = confirm
        self._opened = (now, steady)
        self._anchor: tuple[int, int] | None = None
        """a trusted time, and what the monotonic clock showed then"""
        self._claim: tuple[int, int] | None = None
        """the claim that stands, and since when"""
        self._first = True
        self._mended = 0

    def begin(self, floor: Floor) -> None:
        """Start from the floor that was stored when the ledger was opened."""
        self._anchor = (floor.trusted, self._opened[1])
        self._mended = floor.mended

    def judge(self, floor: Floor, now: int, steady: int) -> Floor:
        """Return the floor as it may stand now, given the stored one."""
        reached = self._reached(floor, steady)
        if now <= reached + DRIFT:
            trusted, claim = self._in_step(now, reached, steady), 0
        else:
            trusted, claim = self._ahead(floor.claim, now, reached, steady)
        self._first = False
        trusted = max(floor.trusted, trusted)
        return replace(floor, until=max(floor.until, min(now, trusted)), trusted=trusted, claim=claim)

    def _reached(self, floor: Floor, steady: int) -> int:
        """The time that can be trusted by what has passed since we last could."""
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
            trusted, stored = max(reached, stored), 0  # an earlier process's, never contradicted
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
        """Return the claim that was not contradicted yet, and since when it stands."""
        if self._first:
            shown, opened = self._opened
            if 0 < stored <= now:
                self._claim = (stored, opened)
            else:
                self._claim = (shown, opened) if shown <= now else (now, steady)
        elif self._claim is None or stored != self._claim[0] or now < stored:
            self._claim = (stored if 0 < stored <= now else now, steady)
        return self._claim
