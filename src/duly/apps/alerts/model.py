"""The model of an alert: its fields, its status, and how people and programs see it.

The alert that a sentinel sent is never changed. Later changes (a newer location, an acknowledgement, a
cancellation) are stored separately as `AlertStatus`, and recipients see both combined.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec
from msgspec import Raw, Struct, structs

from duly.core.fanout.plan import PLANNED, GroupingTraits
from duly.core.messages import Message, names_in
from duly.core.monitor.signals import Severity
from duly.core.operations import DeliveryRef
from duly.core.printable import printable
from duly.core.units import MS
from duly.errors import Malformed, TooLarge
from duly.wire import any_json, optional_fields

FIELD_LIMIT: Final = 64 * 1024
"""The most bytes of a location, of a summary, or of the information about a device."""
NAMED: Final = 50
"""How many alerts a notification about many alerts lists individually for people; programs get all of
them."""


class AlertEvent(Struct, frozen=True, omit_defaults=True):
    """The `data` of an alert. Times are in milliseconds, by the sentinel's clock."""

    profile_id: str
    trigger_reason: str
    timestamp: int = 0
    device_address: str = ""
    session_id: str = ""
    severity: Severity = Severity.WARNING
    device_meta: Raw = Raw(b"null")
    location: Raw = Raw(b"null")
    cancelled_count: int = 0
    offset_ms: int | None = None
    """the tower's clock minus the sentinel's, if it was measured"""
    summary: Raw = Raw(b"null")
    sentinel_id: str | None = None
    undated: bool = False
    """the sentinel does not know whether its timestamp is right, because its clock was set since"""


_decode_strictly: Final = msgspec.json.Decoder(AlertEvent).decode
_decode_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_NULL: Final = Raw(b"null")
_LATEST: Final = 253_370_764_800_000
"""The last time (ms) that can be shown, and so the longest offset."""


def _decode_event(body: bytes) -> AlertEvent:
    """Decode an alert. A time that is not a number of milliseconds is rounded or left out: it is no reason to
    refuse an alert."""
    try:
        event = _decode_strictly(body)
        if -_LATEST < (event.offset_ms or 0) < _LATEST:
            return event
        return structs.replace(event, offset_ms=None)
    except msgspec.ValidationError:
        body = optional_fields.without_nulls(body, AlertEvent)
        fields = _decode_fields(body)
        for name in ("timestamp", "offset_ms"):
            value = any_json.read(fields.pop(name, _NULL))
            if isinstance(value, int | float) and not isinstance(value, bool) and -_LATEST < value < _LATEST:
                fields[name] = Raw(b"%d" % round(value))
        return _decode_strictly(msgspec.json.encode(fields))


def read_event(body: bytes) -> AlertEvent:
    """Decode an alert; raises `Malformed` or `TooLarge` if it is not acceptable."""
    try:
        event = _decode_event(body or b"{}")
    except msgspec.DecodeError as problem:
        raise Malformed(f"this is not an alert: {problem}") from None
    if len(body) > FIELD_LIMIT:
        for name in ("device_meta", "location", "summary"):
            size = len(bytes(getattr(event, name)))
            if size > FIELD_LIMIT:
                raise TooLarge(f"{name} has {size} bytes, the limit is {FIELD_LIMIT}; leave something out")
    if not event.profile_id or not event.trigger_reason:
        raise Malformed("an alert needs its profile_id and its trigger_reason")
    if event.cancelled_count < 0:
        raise Malformed("cancelled_count must not be negative")
    return event


def time_of_arrival(now: int) -> int:
    """Return the time of an alert without a plausible time of its own. It has microseconds, which no
    sentinel's time has."""
    return now // MS * MS + 1


def is_undated(message: Message) -> bool:
    """Return whether the time of an alert is that of its arrival, because its own was missing or
    implausible."""
    return bool(message.time % MS)


def set_age(message: Message, at: int) -> Message:
    """Set the age of a message to this time instead of the one in its id, which comes from its sender's
    clock."""
    structs.force_setattr(message, "made", at)
    return message


def said_time(message: Message) -> int:
    """Return the alert's own time (ms); 0 if it has none."""
    event = _decode_event(message.body)
    return event.timestamp and event.timestamp + (event.offset_ms or 0)


UNSAID: Final = Raw(b"")


class AlertChange(Struct, frozen=True, omit_defaults=True):
    """The `data` of an update or a cancellation."""

    event: str
    location: Raw = UNSAID
    severity: Severity | None = None
    device_meta: Raw = UNSAID
    cancelled_at: int | None = None
    reason: str = ""
    resolved: bool = False
    """of a cancellation: the alert was justified and is over"""


def read_change(body: bytes) -> AlertChange:
    """Decode an update or a cancellation; raises `Malformed` or `TooLarge` if it is not acceptable."""
    try:
        change = optional_fields.decode(body or b"{}", AlertChange)
    except msgspec.DecodeError as problem:
        raise Malformed(f"this is not a change of an alert: {problem}") from None
    for name in ("device_meta", "location"):
        if len(bytes(getattr(change, name))) > FIELD_LIMIT:
            raise TooLarge(f"{name} is longer than {FIELD_LIMIT} bytes; leave something out")
    return change


class AlertState(Enum):
    """What people have decided about an alert; the state of its delivery is that of its message."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    RESOLVED = "resolved"
    CANCELLED = "cancelled"
    """by the sentinel that reported it"""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be done about the alert."""
        return self in (AlertState.RESOLVED, AlertState.CANCELLED)


class AlertStatus(Struct, frozen=True, omit_defaults=True):
    """The changes to an alert after it was reported."""

    standing: AlertState = AlertState.OPEN
    by: str = ""
    """the account that made the last change"""
    at: int = 0
    note: str = ""
    claimed: str = ""
    """the name that the client of that account gave; not checked"""
    location: Raw = UNSAID
    severity: Severity | None = None
    device_meta: Raw = UNSAID
    updated_at: int = 0
    reported_over: bool = False
    """whether the sentinel itself reported that it is resolved"""
    instead: dict[str, str] = {}
    """recipients that a person has replaced by another address, with the label of that address"""

    @property
    def corrects(self) -> bool:
        """Return whether recipients that were notified are also notified of the end: its sentinel has
        cancelled the alert or reported that it is over. When a person resolves it, the others are not
        notified."""
        return self.standing is AlertState.CANCELLED or self.reported_over


_decode_status: Final = msgspec.json.Decoder(AlertStatus).decode
NOTHING_SAID: Final = AlertStatus()


def read_status(body: bytes | None) -> AlertStatus:
    """Decode a status; None stands for an alert that was never changed."""
    return NOTHING_SAID if body is None else _decode_status(body)


def updated(status: AlertStatus, change: AlertChange, at: int) -> AlertStatus:
    """Return the status after an update."""
    return structs.replace(status, updated_at=at, **_said(change))


def ended_by_reporter(status: AlertStatus, change: AlertChange, by: str, at: int) -> AlertStatus:
    """Return the status after its sentinel has cancelled an alert or reported that it is resolved."""
    standing = AlertState.RESOLVED if change.resolved else AlertState.CANCELLED
    return structs.replace(
        status, standing=standing, by=by, at=at, note=change.reason, reported_over=change.resolved
    )


def current(event: AlertEvent, status: AlertStatus) -> AlertEvent:
    """Return the alert with all later changes."""
    fresh = _said(status)
    return structs.replace(event, **fresh) if fresh else event


def _said(by: AlertChange | AlertStatus) -> dict[str, Raw | Severity | None]:
    """Return the fields that a change or a status replaces."""
    fields = {"location": by.location, "device_meta": by.device_meta, "severity": by.severity}
    return {name: value for name, value in fields.items() if value not in (UNSAID, None)}


def traits_of(message: Message, event: AlertEvent | None = None) -> GroupingTraits:
    """Return how notifications about an alert are grouped: events of one device in one session are one
    episode."""
    event = event or _decode_event(message.body)
    urgent = event.severity is Severity.CRITICAL
    if not event.session_id:
        return GroupingTraits(urgent=urgent)
    return GroupingTraits(f"{message.scope}/{event.session_id}/{event.device_address}", urgent)


# ── presentation ─────────────────────────────────────────────────────────────────────────────────


def shown(message: Message, status: AlertStatus, ref: DeliveryRef | None = None) -> dict[str, object]:
    """Return an alert as a dictionary for programs."""
    event = current(_decode_event(message.body), status)
    seen: dict[str, object] = {
        "event": message.id,
        "sentinel": message.scope,
        "profile": event.profile_id,
        "reason": event.trigger_reason,
        "severity": event.severity.value,
        "device": event.device_address,
        "session": event.session_id,
        "time": message.time // MS,
        "status": status.standing.value,
    }
    if is_undated(message):
        seen |= {"undated": True, "said_time": said_time(message) or None}
    if event.cancelled_count:
        seen["cancelled_count"] = event.cancelled_count
    for name in ("location", "device_meta", "summary"):
        value = getattr(event, name)
        if bytes(value) != b"null":
            seen[name] = value
    if ref is not None and ref.round and ref.kind in PLANNED:
        seen["escalation"] = ref.round
    return seen


def line(message: Message, status: AlertStatus) -> str:
    """Return an alert as one line for people."""
    event = current(_decode_event(message.body), status)
    device = f" {event.device_address}" if event.device_address else ""
    return printable(f"{event.severity.value}: {event.trigger_reason}{device} ({message.scope})")


def text(message: Message, status: AlertStatus) -> str:
    """Return an alert as text for people."""
    event = current(_decode_event(message.body), status)
    lines = [
        f"Reason: {event.trigger_reason}",
        f"Severity: {event.severity.value}",
        f"Sentinel: {message.scope}",
        f"Device: {event.device_address}" if event.device_address else "",
        f"Location: {plain(event.location)}" if bytes(event.location) != b"null" else "",
        f"About the device: {plain(event.device_meta)}" if bytes(event.device_meta) != b"null" else "",
        f"Cancelled before: {event.cancelled_count}" if event.cancelled_count else "",
        f"Event: {message.id}",
    ]
    return "\n".join(printable(one) for one in lines if one)


def plain(raw: Raw) -> str:
    """Return a JSON value as a text for people."""
    try:
        fields = _decode_fields(raw)
    except msgspec.ValidationError:
        return _short(raw)
    return ", ".join(f"{name} {_short(one)}" for name, one in fields.items())


def _short(raw: Raw) -> str:
    """Return a value as text; a number that is out of range is shown as it was written."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return msgspec.json.format(bytes(raw), indent=-1).decode()[:200]
    return (value if isinstance(value, str) else msgspec.json.encode(value).decode())[:200]


def name_in_bucket(key: bytes) -> str:
    """Return the name of an alert's items in buckets: its sentinel and its id."""
    scope, id_ = names_in(key)
    return f"{scope}/{id_}"
