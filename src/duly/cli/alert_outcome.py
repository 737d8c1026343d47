"""Finds out whether the recipients of an alert were notified, for the verbs that report alerts.

A critical alert that no recipient was told of is a failure, and the exit code says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from duly.cli.common import Exit, HubClient, JsonObject, poll

URGENT_SECONDS: Final = 10.0
"""How long to wait until a person is told of a critical alert."""


@dataclass(frozen=True)
class AlertOutcome:
    """Whether people were told of an alert: None if that is not known yet. `problem` says why not."""

    told: bool | None
    problem: str = ""

    @property
    def exit(self) -> Exit:
        """The exit code of the verb."""
        return Exit.OK if self.told else Exit.UNKNOWN if self.told is None else Exit.FAILED

    @property
    def as_json(self) -> JsonObject:
        """The fields that the verb adds to the hub's answer: `told`, and an error unless that is true."""
        if self.told:
            return {"told": True}
        return {
            "told": self.told, "error": self.exit.name.lower(), "detail": self.problem, "exit": self.exit,
        }  # fmt: skip


def waited(event: str, ack: JsonObject | None) -> AlertOutcome:
    """Return the outcome of an alert that is not critical, after waiting for its end."""
    if ack is None:
        return AlertOutcome(
            None, f"not every recipient was told yet; 'duly alert show {event}' shows who was"
        )
    if ack["state"] == "done":
        return AlertOutcome(True)
    why = ack.get("detail") or f"it is {ack['state']}"
    if ack["state"] == "unknown":
        return AlertOutcome(None, f"it is not known whether every recipient was told: {why}")
    return AlertOutcome(False, f"not every recipient was told: {why}")


def wait_until_told(hub: HubClient, event: str, patience: float) -> AlertOutcome:
    """Wait until a person is told of a critical alert, at most `patience` seconds."""
    return poll(lambda: _judge(_reported(hub, event)), patience) or AlertOutcome(
        None, f"it is not known yet whether a recipient was told; see 'duly alert show {event}'"
    )


def _judge(alert: JsonObject) -> AlertOutcome | None:
    """Return the outcome of a critical alert, or None while its recipients are still being told."""
    states = [one["state"] for one in alert["deliveries"]]
    if "done" in states:
        return AlertOutcome(True)
    open_ = alert.get("falls_back") or not {"accepted", "sent", "unknown"}.isdisjoint(states)
    if open_ or alert["state"] in ("accepted", "sent", "delivered"):
        return None
    why = alert.get("detail") or "its profile names no recipient"
    return AlertOutcome(False, f"NO RECIPIENT WAS TOLD of this critical alert: {why}")


def _reported(hub: HubClient, event: str) -> JsonObject:
    """Return the alert that this account has just reported, with its deliveries."""
    from urllib.parse import quote

    found = hub.ask(f"/v1/messages?id={quote(event, safe='')}")["messages"]
    alerts = [one for one in found if one["type"] == "alert_event"]
    newest = max(alerts, key=lambda one: int(one["accepted_at"]))
    return hub.ask(f"/v1/alerts/{quote(newest['scope'], safe='')}/{quote(event, safe='')}")
