"""The messages of a sentinel to its tower: their ids, bodies and expiry.

The laws. The id of an event is created once, from the signal's own time and the number of cancels, so that a
signal in the same microsecond as a cancelled one is a different event. Updates and cancels are numbered, and
the last number is stored with them. A critical event never expires here.
"""

from __future__ import annotations

from typing import Final

from duly.core.ids import SeqId, SeqIds, event_id
from duly.core.messages import Message
from duly.core.monitor.signals import (
    EVENT,
    SUMMARY,
    CancelData,
    EventData,
    Identity,
    Severity,
    Signal,
    SummaryData,
    UpdateData,
    encode,
    raw,
)
from duly.core.monitor.suppression import Summary
from duly.core.operations import RaiseMark
from duly.core.units import MS

SCOPE: Final = "sentinel"
TOWER: Final = "tower"
MINTED: Final = "ids"
"""The mark that stores the last number."""


class EventMessages:
    """Creates the messages of one sentinel; they expire `keep` microseconds later."""

    def __init__(self, identity: Identity, keep: int) -> None:
        self._identity = identity
        self._keep = keep
        self._ids = SeqIds()
        self.offset: int | None = None
        """how far the tower's clock is ahead of ours; None if it was never measured"""

    def restore(self, mark: tuple[int, int]) -> None:
        """Continue the numbers of updates and cancels from this mark."""
        n, ms = mark
        self._ids = SeqIds(SeqId(ms, n) if n >= 0 else None)

    def id_of(self, signal: Signal, cancels: int) -> str:
        """Return the id of the event that a signal becomes."""
        reason = f"{signal.reason}, critical" if signal.critical else signal.reason
        return self._mint(reason, signal.device, signal.at + cancels)

    def id_of_summary(self, summary: Summary) -> str:
        """Return the id of the event that a summary becomes."""
        return self._mint(SUMMARY, summary.device, summary.since)

    def _mint(self, reason: str, device: str, at: int) -> str:
        who = self._identity
        return event_id(
            sentinel=who.sentinel, tower=who.tower, profile=who.profile, session=who.session, device=device,
            reason=reason, window_start=at,
        )  # fmt: skip

    def event(
        self, id_: str, signal: Signal, cancels: int, now: int, summary: SummaryData | None = None
    ) -> Message:
        """Return the event that a signal becomes."""
        data = EventData(
            self._identity.profile,
            signal.reason,
            signal.device,
            self._identity.session,
            signal.at // MS,
            signal.severity,
            cancels,
            raw(signal.meta),
            raw(signal.location),
            None if self.offset is None else self.offset // MS,
            summary,
        )
        return self.event_of(id_, signal.at, data, now)

    def event_of(self, id_: str, at: int, data: EventData, now: int) -> Message:
        """Return an event with this body."""
        expires = 0 if data.severity is Severity.CRITICAL else max(at, now) + self._keep
        return Message(SCOPE, id_, EVENT, TOWER, encode(data), time=at, expires=expires)

    def about(self, kind: str, at: int, data: UpdateData | CancelData, now: int) -> tuple[Message, RaiseMark]:
        """Return an update or a cancel of an event, and the mark to store with it."""
        minted = self._ids.next(at)
        expires = max(at, now) + self._keep
        message = Message(SCOPE, str(minted), kind, TOWER, encode(data), time=at, expires=expires)
        return message, RaiseMark(MINTED, minted.n, minted.ms)
