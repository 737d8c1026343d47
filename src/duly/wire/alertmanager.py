"""Translates webhooks of Prometheus Alertmanager and Grafana into frames of a sentinel.

The law: an alert is identified by its labels (its `fingerprint`) and by when it began to fire. So a webhook
that is sent again, by a retry, by `repeat_interval` or by a second Alertmanager, contains the same ids, and
an alert that fires again later has a new id. Annotations, which may change while an alert fires, are not part
of the id. Grafana sends what Alertmanager sends, and a few fields more.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from duly.core.monitor.signals import CANCEL, EVENT, Severity
from duly.core.units import DAY, MS
from duly.errors import Malformed
from duly.wire import limits, optional_fields
from duly.wire.frames import Frame, dump, encode

PROFILE: Final = "duly_profile"
"""The label that names the profile of an alert."""
_OWN_PLACE: Final = frozenset({"alertname", "severity", "instance", PROFILE})
"""The labels that become fields of their own."""
_MORE: Final = (
    "generatorURL", "dashboardURL", "panelURL", "silenceURL", "imageURL", "valueString", "values"
)  # fmt: skip
"""The fields besides labels and annotations that are kept."""
_CRITICAL: Final = frozenset(
    {"critical", "page", "emergency", "fatal", "disaster", "high", "error", "p1", "sev1"}
)
_INFO: Final = frozenset({"info", "notice", "none", "debug", "low", "ok", "p5", "sev5"})


class FiringState(Enum):
    """Whether an alert fires."""

    FIRING = "firing"
    RESOLVED = "resolved"


class FiringAlert(Struct, frozen=True, rename="camel"):
    """One alert in a webhook."""

    status: FiringState
    starts_at: Annotated[datetime, Meta(tz=True)]
    labels: dict[str, str] = {}
    annotations: dict[str, str] | None = None
    fingerprint: str = ""
    generator_url: str = msgspec.field(default="", name="generatorURL")
    dashboard_url: str = msgspec.field(default="", name="dashboardURL")
    panel_url: str = msgspec.field(default="", name="panelURL")
    silence_url: str = msgspec.field(default="", name="silenceURL")
    image_url: str = msgspec.field(default="", name="imageURL")
    value_string: str = ""
    values: dict[str, float] | None = None
    """what Grafana has measured, by the name of the query"""

    @property
    def id(self) -> str:
        """The id of its event: what fires, and since when."""
        return f"{self.fingerprint or _fingerprint(self.labels)}-{self.since}"

    @property
    def since(self) -> int:
        """When it began to fire, in milliseconds."""
        return round(self.starts_at.timestamp() * 1000)

    @property
    def severity(self) -> Severity:
        """Its label `severity` as one of ours; a warning if the label is missing or unknown."""
        word = self.labels.get("severity", "").strip().lower()
        if word in _CRITICAL:
            return Severity.CRITICAL
        return Severity.INFO if word in _INFO else Severity.WARNING


class AlertmanagerWebhook(Struct, frozen=True):
    """The body of a webhook: the alerts of one group."""

    alerts: list[FiringAlert]


class _UndecodedAlerts(Struct, frozen=True):
    alerts: list[Raw]


def split_webhook(body: bytes) -> list[Raw]:
    """Return the undecoded alerts in the body of a webhook, which may be 100,000; raises `Malformed` if it is
    no webhook."""
    try:
        return optional_fields.decode(body, _UndecodedAlerts).alerts
    except (msgspec.DecodeError, ValueError) as problem:
        raise _malformed(problem) from None


def read_alert(part: Raw, which: str) -> FiringAlert:
    """Decode one alert of a webhook; raises `Malformed` with `which` alert it is if it is invalid."""
    limits.check_depth(bytes(part), f"{which} of the webhook")
    try:
        return optional_fields.decode(part, FiringAlert)
    except (msgspec.DecodeError, ValueError) as problem:
        raise _malformed(problem, f"{which}: ") from None


def _malformed(problem: Exception, which: str = "") -> Malformed:
    return Malformed(
        f"this is not a webhook of Alertmanager or Grafana: {which}{problem}; no alert of it was stored; "
        "leave the custom payload of Grafana empty"
    )


def event_frame(alert: FiringAlert, profile: str, now: int) -> bytes:
    """Return the frame that reports a firing alert. An alert that has fired for more than a day is dated now,
    since it may be older than a hub remembers."""
    meta: dict[str, object] = {name: value for name, value in alert.labels.items() if name not in _OWN_PLACE}
    meta |= alert.annotations or {}
    given = msgspec.to_builtins(alert)
    meta |= {name: given[name] for name in _MORE if given[name]}
    since = alert.since
    if since * MS < now - DAY:
        meta["startsAt"] = alert.starts_at.isoformat()
        since = now // MS
    data = {
        "profile_id": alert.labels.get(PROFILE) or profile,
        "trigger_reason": alert.labels.get("alertname") or "alert",
        "device_address": alert.labels.get("instance", ""),
        "timestamp": since,
        "severity": alert.severity.value,
        "device_meta": meta,
    }
    return encode(Frame(EVENT, alert.id, data=dump(data)))


def resolved_frame(alert: FiringAlert) -> bytes:
    """Return the frame that reports that an alert is over."""
    data = {"event": alert.id, "resolved": True, "reason": "it fires no more"}
    return encode(Frame(CANCEL, f"{alert.id}-resolved", data=dump(data)))


def _fingerprint(labels: dict[str, str]) -> str:
    """Return a substitute for the fingerprint, which old versions of Alertmanager do not send."""
    pairs = msgspec.json.encode(sorted(labels.items()))
    return blake2b(pairs, digest_size=8).hexdigest()
