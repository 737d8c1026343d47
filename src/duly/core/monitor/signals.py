"""The events and effects of a monitor: signals and their results.

The law: a signal carries its own time, taken when it was noticed. So the id of its event stays the same if
the signal has to be handled again (after the ledger failed), and the second handling is recognised.
"""

from __future__ import annotations

from enum import Enum
from math import isfinite
from typing import Final, TypeAlias

import msgspec
from msgspec import Raw, Struct

from duly.core.monitor.suppression import SuppressionDecision, SuppressPolicy
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import Origin
from duly.core.units import FOREVER, seconds
from duly.errors import Malformed

DISCONNECT: Final = "disconnect"
SUMMARY: Final = "summary"
SILENT: Final = "silent"
REFUSED: Final = "alerts_refused"
"""Reasons with a meaning here; the monitor's own reasons are separate."""

EVENT, UPDATE, CANCEL, HEARTBEAT = "alert_event", "alert_update", "alert_cancel", "alert_heartbeat"
"""The kinds of messages that a sentinel sends."""


class Severity(Enum):
    """The severity of an event. A critical event bypasses the sentinel's limit and cooldown as well as
    people's quiet hours, and has its own delivery queue."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class SentinelPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """All limits of a sentinel, validated once. Lengths are in seconds.

    >>> SentinelPolicy(countdown=10).per_hour
    10
    """

    debounce: float = 30.0
    """repeats for one reason within this time are one event; 0: every signal is an event"""
    per_hour: int = 10
    """events per device and hour; further signals are reported in a summary"""
    summary: float = 300.0
    """the longest time from the first signal over the limit to the summary"""
    cooldown: float = 300.0
    """after a cancel, only critical signals pass for this long; 0: no cooldown"""
    countdown: float = 15.0
    """how long a person may cancel an event before it is sent; 0: it is sent at once"""
    settle: bool = True
    """a device that is back when the countdown of its disconnect ends raises no alarm"""
    keep: float = 7 * 86_400.0
    """an event that cannot be delivered for this long expires; a critical one never does"""
    heartbeat: float = 0.0
    """how often the sentinel sends a heartbeat to the tower; 0: never, and it promises none"""
    retry_first: float = 5.0
    retry_most: float = 3_600.0
    """the shortest and the longest delay before an unanswered message is sent again; a reconnect sends it at
    once"""
    tries: int = 0
    """how often a message is sent over one connection; 0: until it is answered"""

    def __post_init__(self) -> None:
        for name in (
            "debounce",
            "summary",
            "cooldown",
            "countdown",
            "keep",
            "heartbeat",
            "retry_first",
            "retry_most",
        ):
            value = getattr(self, name)
            if not (isfinite(value) and 0 <= value <= _LONGEST):
                raise Malformed(f"{name} must be a number of seconds from 0 to {_LONGEST:.0f}, not {value}")
        if self.countdown >= self.keep:
            raise Malformed("an event would expire before its countdown ends; make keep longer")
        if 0 < self.heartbeat < 1:
            raise Malformed(f"heartbeat must be 0 or at least a second, not {self.heartbeat}")
        if self.tries < 0:
            raise Malformed(
                f"tries must be the number of times an event is sent, or 0 for no limit, not {self.tries}"
            )
        _ = self.suppress, self.outbox  # they reject the other invalid values

    @property
    def suppress(self) -> SuppressPolicy:
        """The policy of its suppressor."""
        return SuppressPolicy(
            debounce=seconds(self.debounce), per_hour=self.per_hour, cooldown=seconds(self.cooldown),
            summary=seconds(self.summary),
        )  # fmt: skip

    @property
    def outbox(self) -> OutboxPolicy:
        """The policy of its outbox."""
        resend = RetryPolicy.exponential(
            seconds(self.retry_first), seconds(self.retry_most), tries=self.tries or None
        )
        return OutboxPolicy("tower", resend, patience=FOREVER)


_LONGEST: Final = 10 * 366 * 86_400.0


class Identity(Struct, frozen=True):
    """The names that are part of an event's id, besides the event itself."""

    sentinel: str
    tower: str
    profile: str
    session: str


# ── what happens ─────────────────────────────────────────────────────────────────────────────────


class Signal(Struct, frozen=True):
    """A signal from a device. `meta` and `location` are JSON; its own `countdown` overrides the policy's."""

    device: str
    reason: str
    at: int
    severity: Severity = Severity.WARNING
    meta: bytes = b""
    location: bytes = b""
    countdown: int | None = None
    origin: Origin = None

    @property
    def critical(self) -> bool:
        """Whether its severity is critical."""
        return self.severity is Severity.CRITICAL

    @property
    def lasting(self) -> bool:
        """Whether it reports a state that lasts until `DeviceBack`; other signals report a moment."""
        return self.reason == DISCONNECT


class DeviceBack(Struct, frozen=True):
    """A device is reachable again."""

    device: str
    at: int


class CancelRequest(Struct, frozen=True):
    """A person says that all is well: cancels one event, or everything at a device."""

    at: int
    device: str = ""
    event: str = ""


class EventChange(Struct, frozen=True):
    """New information about an event."""

    event: str
    at: int
    severity: Severity | None = None
    meta: bytes = b""
    location: bytes = b""


class ClockOffset(Struct, frozen=True):
    """How far the tower's clock is ahead of ours."""

    by: int


Report: TypeAlias = Signal | DeviceBack | CancelRequest | EventChange | ClockOffset
"""What a sentinel reports to its monitor, with a time of the wall clock."""


class Stamped(Struct, frozen=True):
    """A report that waits for the monitor. `steps` is the monitor's own when the time was read: if the clock
    is set while the report waits, its time is moved as far as those that the monitor already knows."""

    what: Report
    steps: int


class StopHeartbeat(Struct, frozen=True):
    """Stops heartbeats, because the promise was withdrawn."""


# ── what became of it ────────────────────────────────────────────────────────────────────────────


class SignalRuling(Struct, frozen=True):
    """The result of a signal, after it is stored. `event` is its id, or that of the event it repeats; `due`
    is when the countdown ends."""

    origin: Origin
    device: str
    reason: str
    decision: SuppressionDecision
    event: str = ""
    due: int = 0


class HeartbeatDue(Struct, frozen=True):
    """A heartbeat is due."""


class EventQueued(Struct, frozen=True):
    """The countdown of an event is over: it is sent as soon as the tower is reachable."""

    event: str
    device: str
    reason: str


class CancelResult(Struct, frozen=True):
    """The result of a cancel: the events in `dropped` were not sent and never will be, those in `corrected`
    are followed by a correction, and signals held for the reasons in `held` are not judged again."""

    device: str
    dropped: tuple[str, ...] = ()
    corrected: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


class NothingToChange(Struct, frozen=True):
    """There is nothing to change: the event was cancelled, never existed, or is too old."""

    event: str


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────


NOTHING: Final = Raw(b"")


class SummaryData(Struct, frozen=True):
    """The `summary` of an `alert_event`: how many signals were held back, by reason, and since when (ms)."""

    held: int
    reasons: dict[str, int]
    since: int


class EventData(Struct, frozen=True, omit_defaults=True):
    """The `data` of an `alert_event`. Times in milliseconds, by the sentinel's clock."""

    profile_id: str
    trigger_reason: str
    device_address: str
    session_id: str
    timestamp: int
    severity: Severity
    cancelled_count: int
    device_meta: Raw = NOTHING
    location: Raw = NOTHING
    offset_ms: int | None = None
    summary: SummaryData | None = None
    undated: bool = False
    """the clock was set since by an unknown amount, so the timestamp is meaningless"""


class UpdateData(Struct, frozen=True, omit_defaults=True):
    """The `data` of an `alert_update`."""

    event: str
    severity: Severity | None = None
    device_meta: Raw = NOTHING
    location: Raw = NOTHING


class CancelData(Struct, frozen=True):
    """The `data` of an `alert_cancel`."""

    event: str
    cancelled_at: int


read_event: Final = msgspec.json.Decoder(EventData).decode
encode: Final = msgspec.json.Encoder().encode


class _About(Struct):
    event: str


_read_about: Final = msgspec.json.Decoder(_About).decode


def event_of(data: bytes) -> str:
    """Return the id of the event that an update or a cancel refers to."""
    return _read_about(data).event


def raw(text: bytes) -> Raw:
    """Return JSON text as a field; empty text omits the field."""
    return Raw(text) if text else NOTHING
