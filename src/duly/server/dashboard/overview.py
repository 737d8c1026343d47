"""The overview of the dashboard: rates, latencies, pending messages, connections, and the health of what the
hub depends on.

Everything here is in memory already or was read within the last seconds, so an open page does not slow
messages down. Dependencies are checked in the background: one that does not answer is shown as such, and
delays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Final

from duly.errors import DulyError, Malformed
from duly.identity.accounts import Role
from duly.runtime.thresholds import judge
from duly.runtime.time_series import ChartStep
from duly.server import diagnostics
from duly.server.dashboard.device_views import DeviceViews
from duly.server.dashboard.requests import text_of
from duly.server.dashboard.visitors import DashboardVisitor
from duly.transports.http.metrics import ClusterTotal

if TYPE_CHECKING:
    from duly.server.hub import Hub

HEALTH_SECONDS: Final = 10.0
"""How long a check of ledger, notifier and disk is reused."""
TROUBLE_SECONDS: Final = 2.0
"""How long a check that found a problem is reused."""
FIRST_SECONDS: Final = 1.0
"""How long the first view waits for the first check."""
TOTALS_WAIT_SECONDS: Final = 1.0
TOTALS_SECONDS: Final = 2.0
"""How long the totals of all hubs are reused."""
SPANS: Final = {"minutes": ChartStep.SECOND, "hours": ChartStep.MINUTE, "days": ChartStep.HOUR}


class OverviewViews:
    """The overview of one hub."""

    def __init__(self, hub: Hub, devices: DeviceViews) -> None:
        self._hub = hub
        self._devices = devices
        self._health: dict[str, object] = {
            "ledger": {"problem": "no answer yet"},
            "notifier": None,
            "disk": None,
        }
        self._examine_due = 0.0
        """when the parts are checked next, by the monotonic clock"""
        self._examining: asyncio.Task[None] | None = None
        self._totals: tuple[float, list[ClusterTotal]] = (-TOTALS_SECONDS, [])

    async def overview(self, _: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return the present metrics. Rates and gauges are this hub's, totals those of all hubs."""
        hub = self._hub
        snapshot = hub.metrics.telemetry.snapshot()
        metrics = {
            metric.name: {"/".join(one.labels.values()): one.value for one in metric.samples}
            for metric in snapshot.metrics
            if metric.samples
        }
        for total in await self._summed():
            metrics.setdefault(total.name, {})["/".join(total.labels.values())] = total.value
        latencies = {
            "/".join((metric.name, *one.labels.values())): {
                "p50": one.p50, "p90": one.p90, "p99": one.p99, "count": one.count,
            }
            for metric in snapshot.metrics
            for one in metric.histograms
        }  # fmt: skip
        accounts = [one for one in hub.accounts.list() if one.role in (Role.DEVICE, Role.NODE)]
        return {
            "time": snapshot.time,
            "hub": snapshot.hub,
            "started": snapshot.started,
            "rates": snapshot.rates,
            "thresholds": [one for one in judge(snapshot) if one.above],
            "metrics": metrics,
            "latencies": latencies,
            "devices": {
                "online": len(hub.gateway.presence()),
                "total": sum(one.role is Role.DEVICE for one in accounts),
                "nodes": sum(one.role is Role.NODE for one in accounts),
                "nodes_online": sum(self._devices.online(one) for one in accounts if one.role is Role.NODE),
            },
            "health": await self._healthy(),
            "hubs": self._hubs(),
        }

    async def _summed(self) -> list[ClusterTotal]:
        """Return the totals of all hubs on the ledger, with those that are gone; none for a ledger that only
        this hub can use, which knows its own."""
        if self._hub.ledger.sole:
            return []
        read_at, found = self._totals
        if monotonic() - read_at > TOTALS_SECONDS:
            with suppress(DulyError, TimeoutError):  # the ledger does not answer: its health says so
                async with asyncio.timeout(TOTALS_WAIT_SECONDS):
                    found = await self._hub.cluster_totals()
            self._totals = (monotonic(), found)
        return found

    def _hubs(self) -> list[dict[str, object]]:
        me, hubs = self._hub.ledger.worker, self._hub.gateway.remote.hubs
        others = sorted(name for hub, name in hubs.items() if hub != me)
        return [{"name": self._hub.name, "here": True}, *({"name": name, "here": False} for name in others)]

    async def _healthy(self) -> dict[str, object]:
        """Return the state of the parts that the hub depends on; they are checked every few seconds."""
        hub, first = self._hub, not self._examine_due
        if self._examining is None and monotonic() >= self._examine_due:
            self._examining = hub.tasks.do("looking at the health of the hub's parts", self._examine_parts())
        if first and self._examining is not None:
            await asyncio.wait([self._examining], timeout=FIRST_SECONDS)
        mqtt = None if hub.mqtt is None else hub.mqtt.state()
        return self._health | {"broker": mqtt, "down": hub.health.down, "problems": hub.health.problems}

    async def _examine_parts(self) -> None:
        try:
            self._health = await self._examine()
        finally:
            parts = (self._health["ledger"], self._health["notifier"])
            trouble = any(isinstance(part, dict) and part.get("problem") for part in parts)
            self._examine_due = monotonic() + (TROUBLE_SECONDS if trouble else HEALTH_SECONDS)
            self._examining = None

    async def _examine(self) -> dict[str, object]:
        hub = self._hub
        try:
            ledger, notifier = await asyncio.gather(
                diagnostics.check_ledger(hub.ledger),
                diagnostics.check_notifier(hub.notifier, hub.settings.notifier or hub.settings.ledger_url),
            )
            return {"ledger": ledger, "notifier": notifier, "disk": diagnostics.check_disk(hub.settings.data)}
        except (DulyError, OSError) as problem:
            return {"ledger": {"problem": str(problem)}, "notifier": None, "disk": None}

    async def chart(self, _: DashboardVisitor, query: Mapping[str, str]) -> object:
        """Return the columns of the charts, for the last minutes, hours or days."""
        span = text_of(query, "span") or "minutes"
        if span not in SPANS:
            raise Malformed(f"{span!r} is not a span of a chart; use one of {', '.join(SPANS)}")
        return self._hub.metrics.telemetry.chart(SPANS[span])
