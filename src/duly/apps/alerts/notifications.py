"""The texts of notifications about alerts, for people and for programs.

Every notification says when the event happened, with the time zone. If it is late it also says how long ago
that was and, if different, when the event was received. Times are shown in the zone of the profile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Struct

from duly.apps.alerts.channels.channel import Notification
from duly.apps.alerts.model import (
    NAMED,
    NOTHING_SAID,
    AlertStatus,
    is_undated,
    line,
    plain,
    read_event,
    said_time,
    shown,
    text,
)
from duly.core.fanout.plan import BatchItem, StartAttempt
from duly.core.messages import Message
from duly.core.monitor.signals import SILENT, SummaryData
from duly.core.operations import DeliveryKind, DeliveryRef
from duly.core.printable import printable
from duly.core.units import DAY, HOUR, MINUTE, MS, SECOND

_LAST: Final = 253_370_764_800_000
"""Times (ms) from the year 9999 on cannot be shown as a date."""
LATE: Final = MINUTE
"""A notification that is later than this says how long ago the event was, and when it was received."""


class NotificationContext(Struct, frozen=True):
    """What a notification is built from: the time, the statuses of its alerts, when each was received (if
    known), the time zone of each profile, and the links of its recipient."""

    now: int
    statuses: Mapping[bytes, AlertStatus]
    received: Mapping[bytes, int]
    zones: Mapping[str, str]
    links: Mapping[bytes, str] = {}
    """the links by which the recipient acknowledges each alert"""

    def status(self, message: Message) -> AlertStatus:
        """Return the status of an alert."""
        return self.statuses.get(message.key, NOTHING_SAID)

    def times(self, message: Message) -> list[str]:
        """Return lines with the time of the event and, if it differs, of its receipt."""
        zone = self.zones.get(message.recipient, "UTC")
        if is_undated(message):
            return [
                f"Arrived: {moment(message.time, zone)}{ago(message.time, self.now)}",
                _undated(message, zone),
            ]
        lines = [f"Happened: {moment(message.time, zone)}{ago(message.time, self.now)}"]
        received = self.received.get(message.key)
        if received is not None and abs(received - message.time) >= LATE:
            lines.append(f"Received: {moment(received, zone)}{ago(received, self.now)}")
        return lines

    def held_back(self, message: Message) -> list[str]:
        """Return a line with what a summary tells of: how many signals, of which reasons, since when."""
        raw = read_event(message.body).summary
        if bytes(raw) == b"null":
            return []
        try:
            summary = msgspec.json.decode(raw, type=SummaryData)
        except msgspec.ValidationError:  # of a sentinel that says it in a form of its own
            return [printable(f"Held back: {plain(raw)}")]
        zone, dated = self.zones.get(message.recipient, "UTC"), 0 < summary.since < _LAST
        since = f" since {moment(summary.since * MS, zone)}" if dated else ""
        reasons = Counter(summary.reasons).most_common(10)
        figures = ", ".join(f"{count} × {reason}" for reason, count in reasons)
        return [printable(f"Held back: {summary.held}{since}{f': {figures}' if figures else ''}")]


def _undated(message: Message, zone: str) -> str:
    """Return why the time of an alert's event is not known."""
    said = said_time(message)
    if not said:
        clock = "gives no time"
    elif 0 < said < _LAST:
        clock = f"says {moment(said * MS, zone)}, which cannot be right"
    else:
        clock = f"says {said}, which is not a time in milliseconds"
    return f"When it happened is not known: its sentinel {clock}"


def moment(at: int, zone: str) -> str:
    """Return a time as a text for people, with its zone.

    >>> moment(1_794_786_893_877_000, "Asia/Shanghai")
    '2026-11-16 07:54:53 CST (UTC+08:00)'
    """
    here = datetime.fromtimestamp(at // SECOND, UTC).astimezone(ZoneInfo(zone))
    name, offset = here.tzname() or "", here.isoformat()[-6:]
    where = f"UTC{offset}"
    named = "UTC" if name == "UTC" else f"{name} ({where})" if name.isalpha() else where
    return f"{here:%Y-%m-%d %H:%M:%S} {named}"


def ago(at: int, now: int) -> str:
    """Return how long ago a time was, as a text; empty for a short while.

    >>> ago(0, 3 * HOUR + 2 * MINUTE), ago(0, 5 * SECOND), ago(2 * HOUR, 0)
    (', 3 h 2 min ago', '', ', 2 h ahead of our clock')
    """
    if abs(now - at) < LATE:
        return ""
    return f", {span(now - at)} ago" if now > at else f", {span(at - now)} ahead of our clock"


def span(length: int) -> str:
    """Return a length of time as a text for people.

    >>> span(26 * HOUR), span(61 * MINUTE)
    ('1 d 2 h', '1 h 1 min')
    """
    for unit, word, smaller, less in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min")):
        if length >= unit:
            rest = length % unit // smaller
            return f"{length // unit} {word}{f' {rest} {less}' if rest else ''}"
    return f"{length // MINUTE} min"


def notification(attempt: StartAttempt, known: NotificationContext) -> Notification:
    """Return the notification that an attempt sends to its recipient."""
    items = attempt.items
    if len(items) > 1:
        return _digest(attempt, known)
    (item,) = items
    status = known.status(item.message)
    type_, first, said = _news(item, status)
    mark = "This may be a repeat: an earlier attempt may have arrived.\n" if item.repeat else ""
    mark += f"{said}.\n" if said else ""
    words = "\n".join(
        [
            text(item.message, status),
            *known.held_back(item.message),
            *known.times(item.message),
            *_link(item, known),
        ]
    )
    return Notification(
        delivery_id(item.ref),
        f"{'Repeat? ' if item.repeat else ''}{first}{line(item.message, status)}",
        mark + words,
        {
            "type": type_,
            "timestamp": iso(item.message.time),
            "data": _shown(item, known),
        },
        attempt.urgent,
    )


def _news(item: BatchItem, status: AlertStatus) -> tuple[str, str, str]:
    """Return the kind of news about an alert: its type for programs, and its title and first sentence for
    people."""
    if item.ref.kind is DeliveryKind.RAISED:
        return "alert.raised", "Now ", ""
    if item.ref.kind is not DeliveryKind.CORRECTION:
        return "alert.event", "", ""
    if status.reported_over:
        return "alert.resolved", "Resolved: ", "What you were alerted to is over"
    if read_event(item.message.body).trigger_reason == SILENT:
        return "alert.cancelled", "Heard again: ", status.note
    return "alert.cancelled", "Cancelled: ", "The alert you were sent has been taken back"


def _digest(attempt: StartAttempt, known: NotificationContext) -> Notification:
    """Return a notification about many alerts: people get numbers and the first alerts, programs get all of
    them."""
    items = attempt.items
    reasons = Counter(read_event(item.message.body).trigger_reason for item in items)
    lines = [_line(item, known) for item in items[:NAMED]]
    more = f"\n… and {len(items) - NAMED} more: duly alert list" if len(items) > NAMED else ""
    figures = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common(10))
    id_ = blake2b(b"\0".join(delivery_id(item.ref).encode() for item in items), digest_size=12).hexdigest()
    mark = "Some of this may be a repeat.\n" if any(item.repeat for item in items) else ""
    return Notification(
        f"alerts_{id_}",
        f"{len(items)} alerts: {figures}",
        mark + "\n".join(lines) + more,
        {
            "type": "alert.digest",
            "timestamp": iso(max(item.message.time for item in items)),
            "data": {
                "count": len(items),
                "reasons": dict(reasons),
                "events": [_shown(item, known) for item in items],
            },
        },
        attempt.urgent,
    )


def _line(item: BatchItem, known: NotificationContext) -> str:
    message = item.message
    status = known.status(message)
    end = "resolved: " if status.reported_over else "cancelled: "
    first = end if item.ref.kind is DeliveryKind.CORRECTION else ""
    when = moment(message.time, known.zones.get(message.recipient, "UTC"))
    arrived = "arrived " if is_undated(message) else ""
    words = f"{first}{line(message, status)}, {arrived}{when}{ago(message.time, known.now)}"
    return "\n  ".join([words, *_link(item, known)])


def _link(item: BatchItem, known: NotificationContext) -> list[str]:
    """Return a line with the link that acknowledges an alert, or none if the alert was cancelled."""
    link = "" if item.ref.kind is DeliveryKind.CORRECTION else known.links.get(item.message.key, "")
    return [f"Acknowledge: {link}"] if link else []


def _shown(item: BatchItem, known: NotificationContext) -> dict[str, object]:
    message = item.message
    seen = shown(message, known.status(message), item.ref) | {"delivery": delivery_id(item.ref)}
    if not is_undated(message):
        seen["happened"] = iso(message.time)
    received = known.received.get(message.key)
    if received is not None:
        seen["received"] = received // MS
    link = known.links.get(message.key, "")
    if link and item.ref.kind is not DeliveryKind.CORRECTION:
        seen["acknowledge"] = link
    return seen | {"repeat": True} if item.repeat else seen


def delivery_id(ref: DeliveryRef) -> str:
    """Return the id of a delivery. It is the same in every attempt, so that a receiver recognises a
    repeat."""
    named = b"%b\0%b\0%d" % (ref.key, ref.recipient.encode(), ref.round)
    return f"alert_{blake2b(named, digest_size=12).hexdigest()}"


def iso(micros: int) -> str:
    """Return a time as ISO 8601 in UTC, for programs."""
    return datetime.fromtimestamp(micros / SECOND, UTC).isoformat(timespec="milliseconds")
