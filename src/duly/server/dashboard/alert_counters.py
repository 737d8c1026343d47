"""The counters of the status page, each with the limits at which it turns yellow or red.

Totals are those of all hubs on the ledger and survive a restart. What needs a person now is counted in the
ledger, so it is the same at every hub, and goes when a person has seen to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from duly.server.hub import Hub


class CounterLimits(Struct, frozen=True):
    """The value from which a counter is a warning, and from which it is bad; None: never."""

    warning: float | None = None
    bad: float | None = None

    def level(self, value: float) -> str:
        """Return `ok`, `warning` or `bad`."""
        if self.bad is not None and value >= self.bad:
            return "bad"
        return "warning" if self.warning is not None and value >= self.warning else "ok"


LIMITS: Final = {
    "total_events": CounterLimits(),
    "duplicate_events": CounterLimits(),
    "held_back_debounce": CounterLimits(),
    "held_back_limit": CounterLimits(),
    "held_back_cooldown": CounterLimits(),
    "retry_attempts": CounterLimits(),
    "retry_successes": CounterLimits(),
    "average_retries": CounterLimits(warning=3, bad=6),
    "open_deliveries": CounterLimits(warning=100, bad=1_000),
    "dead_letters": CounterLimits(bad=1),
    "in_doubt": CounterLimits(warning=1, bad=10),
    "critical_untold": CounterLimits(bad=1),
    "silent_sentinels": CounterLimits(bad=1),
}
"""The counters in the order in which the page shows them."""


TOTALS: Final = {
    "total_events": ("duly_alert_events_total",),
    "duplicate_events": ("duly_alert_duplicates_total",),
    "held_back_debounce": ("duly_alert_held_back_total", "debounce"),
    "held_back_limit": ("duly_alert_held_back_total", "limit"),
    "held_back_cooldown": ("duly_alert_held_back_total", "cooldown"),
    "retry_attempts": ("duly_alert_retry_attempts_total",),
    "retry_successes": ("duly_alert_retry_successes_total",),
}
"""The counters that survive a restart, by metric and labels."""


class AlertCounters:
    """Reads the counters of the towers on one ledger."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def shown(self, silent: int) -> list[dict[str, object]]:
        """Return all counters with their levels; `silent` is the number of silent sentinels."""
        backlog = self._hub.alerts.backlog
        values = await self._totals() | {
            "open_deliveries": backlog.open_deliveries,
            "in_doubt": backlog.in_doubt,
            "critical_untold": backlog.untold,
            "silent_sentinels": silent,
        }
        shown: list[dict[str, object]] = []
        for name, limits in LIMITS.items():
            value = values.get(name, 0.0)
            shown.append(
                {
                    "name": name,
                    "value": value,
                    "level": limits.level(value),
                    "warning": limits.warning,
                    "bad": limits.bad,
                }
            )
        return shown

    async def _totals(self) -> dict[str, float]:
        """Return the totals of all hubs on the ledger."""
        summed = {(one.name, *one.labels.values()): one.value for one in await self._hub.cluster_totals()}
        found: dict[str, float] = {name: summed.get(metric, 0) for name, metric in TOTALS.items()}
        successes = found["retry_successes"]
        retries = summed.get(("duly_alert_retries_of_successes_total",), 0)
        average = retries / successes if successes else 0.0
        dead = self._hub.metrics.telemetry.gauge("duly_dead_letters").get((), 0.0)
        return found | {"average_retries": round(average, 2), "dead_letters": dead}
