"""Planner: decides who is notified of an alert, and whether a delivery is still wanted.

The laws. A critical alert is never silent: with a profile without recipients it fails instead of being only
listed, and a silence covers it only if the silence says so. Open deliveries of a cancelled alert are no
longer wanted.

A profile says when each step of its escalation is due (`profiles`).
"""

from __future__ import annotations

from typing import Final

from msgspec import structs

from duly.apps.alerts.alert_queries import DEAD, calls_off
from duly.apps.alerts.model import AlertEvent, AlertStatus, read_event, traits_of
from duly.apps.alerts.profiles import Profiles
from duly.apps.alerts.silences import Silence
from duly.apps.alerts.unnotified_alerts import notes
from duly.core.fanout.plan import DeliveryPlan, GroupingTraits
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.monitor.signals import Severity
from duly.core.operations import DeliveryRef, Group

READ_KEPT: Final = 1_000
"""How many decoded alerts are kept until they are planned."""
_LISTED: Final = DeliveryPlan()
"""The plan of a profile that deliberately notifies no recipient: its alerts are only listed."""
_CRITICAL: Final = Severity.CRITICAL


class AlertPlanner:
    """Plans the deliveries of one tower's alerts, from its profiles, silences and the statuses of alerts."""

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles
        self.statuses: dict[bytes, AlertStatus] = {}
        """the status of alerts that were changed after they were reported"""
        self.sent_again: set[bytes] = set()
        """alerts that had ended before a person sent them again: they do not end once more"""
        self.silences: list[Silence] = []
        self._read: dict[bytes, tuple[Message, AlertEvent]] = {}
        """alerts that were just decoded and will be planned next"""

    def expect(self, message: Message, event: AlertEvent) -> None:
        """Keep a decoded alert that is planned next, unless it is a repeat."""
        if len(self._read) >= READ_KEPT:
            self._read.clear()  # repeats are never planned
        self._read[message.key] = (message, event)

    def plan(self, message: Message, now: int) -> DeliveryPlan:
        """Return the deliveries of a new alert, or how it ends without any."""
        known = self._read.pop(message.key, None)
        event = known[1] if known is not None and known[0] is message else read_event(message.body)
        silence = self.silence_over(message, event, now)
        if silence is not None:
            by = f" by {silence.by}" if silence.by else ""
            return DeliveryPlan(end=(State.DONE, Answer(0, b"", f"silenced{by}; no recipient was told")))
        profile = self._profiles.get(event.profile_id)
        if profile is None:
            reason = (
                f"there is no profile {event.profile_id!r}, so no recipient was told; see 'duly profile set'"
            )
            return DeliveryPlan(end=(State.FAILED, Answer(2, b"", reason)))
        if profile.steps:
            traits = traits_of(message, event)
            return DeliveryPlan(profile.plan(now, urgent=traits.urgent), traits=traits)
        if event.severity is not _CRITICAL:
            return _LISTED
        reason = f"profile {event.profile_id!r} names no recipient; see 'duly profile set'"
        return DeliveryPlan(end=(State.FAILED, Answer(2, b"", reason)))

    def silence_over(self, message: Message, event: AlertEvent, now: int) -> Silence | None:
        """Return the silence that covers an alert now."""
        for silence in self.silences:
            if silence.covers(message, event, now):
                return silence
        return None

    def traits(self, message: Message) -> GroupingTraits:
        """Return how notifications about an alert are grouped; an alert that has become critical is urgent
        from then on."""
        traits, status = traits_of(message), self.statuses.get(message.key)
        raised = status is not None and status.severity is Severity.CRITICAL
        return structs.replace(traits, urgent=True) if raised else traits

    def notes(self, message: Message, state: State) -> Group:
        """Return what is noted with the end of an alert: that a critical one has reached no recipient."""
        return notes(message.key, state, urgent=self.traits(message).urgent) if state in DEAD else ()

    def is_wanted(self, ref: DeliveryRef) -> bool:
        """Return whether a delivery is still to be made."""
        status = self.statuses.get(ref.key)
        return status is None or not calls_off(status.standing, ref.kind)

    def is_corrected(self, key: bytes) -> bool:
        """Return whether recipients that were notified of an alert are notified of its end."""
        status = self.statuses.get(key)
        return status is not None and status.corrects
