"""The health of a hub: whether it can accept requests, what does not work, and its limits.

Load balancers, `duly doctor` and the dashboard show the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from duly.errors import LedgerError

if TYPE_CHECKING:
    from duly.server.hub import Hub

BROKER: Final = "embedded broker"
"""The name of the hub's own broker among the parts that do not run."""


class HubHealth:
    """The state of one hub, read from its parts."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    @property
    def down(self) -> str | None:
        """Why the hub can accept nothing now; None if it can."""
        hub = self._hub
        try:
            hub.ledger.check()
        except LedgerError as unusable:
            return str(unusable)
        engines = (application.engine.down for application in hub.applications)
        problem = hub.floor.problem or next(filter(None, engines), None) or hub.gateway.remote.trouble
        return str(problem) if problem else None

    @property
    def problems(self) -> dict[str, str]:
        """The parts that do not run, with the reason: background tasks, and the embedded broker, which is a
        child of this hub: clients are better off at another one while it is dead or does not answer."""
        mqtt = self._hub.mqtt
        broken = None if mqtt is None or mqtt.broker is None else mqtt.problem
        return self._hub.tasks.problems | ({} if broken is None else {BROKER: broken})

    @property
    def ready(self) -> bool:
        """Whether the hub accepts messages and all its parts run."""
        return self.down is None and not self.problems

    @property
    def refuses_as_stale(self) -> bool:
        """Whether new messages are refused because the ledger's floor is in the future."""
        return self._hub.floor.problem is not None

    @property
    def degraded(self) -> list[str]:
        """What does not work although this hub accepts requests: `mqtt` if an outside broker does not answer.
        All hubs use the same broker, so a load balancer has no reason to send clients to another hub."""
        mqtt = self._hub.mqtt
        return [] if mqtt is None or mqtt.broker is not None or mqtt.problem is None else ["mqtt"]

    def limits_in_force(self) -> list[tuple[str, int]]:
        """Return the limits of one account: messages a minute by kind, groups a day, waiting commands,
        megabytes a day."""
        limits = self._hub.limits
        by_kind = [(limit.kind, limit.amount) for limit in limits]
        queue = self._hub.gateway.policy.backlog.messages
        return [*by_kind, ("queue", queue), ("stored", limits.policy.stored_mb)]

    def limited(self) -> dict[str, int]:
        """Return how much the limits have refused since the start, by kind."""
        refused = {limit.kind: limit.refused for limit in self._hub.limits}
        return refused | {"queue": self._hub.gateway.refused_waiting}

    def state(self) -> dict[str, object]:
        """Return the state of the hub, as `duly doctor` and the dashboard show it."""
        hub = self._hub
        return {
            "url": hub.url,
            "ledger": type(hub.ledger).__name__,
            "down": self.down,
            "devices": hub.gateway.presence(),
            "mqtt": None if hub.mqtt is None else hub.mqtt.state(),
            "conflicts": hub.gateway.connections.conflicts()
            + ([] if hub.mqtt is None else hub.mqtt.conflicts()),
            "alerts": hub.alerts.state(),
            "unforgotten": hub.maintenance.problem,
            "problems": self.problems,
            "failures": dict(hub.tasks.failures),
            "floor": hub.floor.state(),
            "limits": {
                "in_force": dict(self.limits_in_force()),
                "refused": self.limited(),
                "accounts": dict(hub.limits.worst()),
            },
            "hubs": sorted(hub.gateway.remote.hubs),
        }
