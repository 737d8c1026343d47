"""The metrics of a hub: reads gauges off its parts, samples charts, and stores totals, charts and trail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from duly.apps.alerts.held_back_counts import REASONS
from duly.core.units import DAY, SECOND
from duly.errors import DulyError, LedgerError
from duly.runtime.durable_totals import DurableTotals
from duly.runtime.kept_charts import KeptCharts
from duly.runtime.outages import Outages
from duly.runtime.telemetry import CounterCell, Labels, Telemetry, TelemetrySnapshot
from duly.runtime.trail import FLUSH_SECONDS, Trail
from duly.transports.http.metrics import ClusterTotal

if TYPE_CHECKING:
    from duly.server.hub import Hub

MEGABYTE: Final = 1024 * 1024
SAMPLE_SECONDS: Final = 1.0
STORE_SECONDS: Final = 2.0
CHART_SECONDS: Final = 15.0
TRIM_SECONDS: Final = 60.0
SCRAPE_SECONDS: Final = 2.0
"""How long a scrape waits for the ledger."""
WAITING_SECONDS: Final = 5.0
"""How often the commands that wait in a shared ledger are counted."""
DEAD_SECONDS: Final = 1.0
"""How often alerts that have changed are searched for dead letters."""


class HubMetrics:
    """The telemetry of one hub, and the jobs that keep it up to date."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        ledger, settings = hub.ledger, hub.settings
        self.telemetry = Telemetry(hub.name, ledger.clock)
        self.trail = Trail(
            ledger, self.telemetry, kept=round(settings.trail_kept * DAY), size=settings.trail_mb * MEGABYTE
        )
        self.outages = Outages()
        self.totals = DurableTotals(ledger, self.telemetry)
        self._charts = KeptCharts(ledger, self.telemetry.series, hub.name)
        self._started = False
        self._watches = False
        """outages are logged"""

    async def load(self) -> None:
        """Continue from the totals and charts in the ledger."""
        await self.totals.load()
        await self._charts.load()

    def start(self) -> None:
        """Read and store everything from time to time."""
        self._started = True
        hub, telemetry = self._hub, self.telemetry
        for application in hub.applications:
            application.engine.on_commit = telemetry.commits.observe
            application.engine.on_problem = self._check_outages
        if hub.notifier is not None:
            hub.notifier.on_problem = self._check_outages
        if hub.mqtt is not None:
            hub.mqtt.on_problem = self._check_outages
        self._watches = True
        telemetry.read("duly_pending", lambda: hub.gateway.pending + hub.alerts.pending)
        telemetry.read("duly_waiting", lambda: sum(hub.gateway.unheld.by_device.values()))
        telemetry.read("duly_oldest_pending_seconds", self._oldest)
        telemetry.read("duly_reorder_held", lambda: hub.gateway.held)
        telemetry.read("duly_dead_letters", lambda: hub.alerts.backlog.dead_letters)
        telemetry.read("duly_clock_skew_seconds", self.trail.skew)
        telemetry.read("duly_connections", self._connections)
        telemetry.read("duly_cluster_hubs", lambda: max(1, len(hub.gateway.remote.hubs)))
        telemetry.read("duly_ready", lambda: float(hub.health.ready))
        telemetry.read("duly_notifier_up", lambda: float(hub.notifier is None or not hub.notifier.problem))
        telemetry.read(
            "duly_limit", lambda: {(kind,): float(most) for kind, most in hub.health.limits_in_force()}
        )
        telemetry.read("duly_alert_average_retries", self._average_retries)
        hub.tasks.every("sample of the metrics", SAMPLE_SECONDS, self._sample)
        for name, seconds, work in (
            ("storing the trail", FLUSH_SECONDS, self.trail.flush),
            ("storing traces", FLUSH_SECONDS, hub.gateway.kept_traces.store),
            ("storing totals", STORE_SECONDS, self.totals.store),
            ("storing charts", CHART_SECONDS, self._charts.store),
            ("trimming the trail", TRIM_SECONDS, self.trail.trim),
            ("count of what alerts need", DEAD_SECONDS, hub.alerts.backlog.refresh),
            ("count of waiting commands", WAITING_SECONDS, hub.gateway.unheld.refresh),
        ):
            hub.tasks.every(name, seconds, partial(_when_possible, work))

    def end_watch(self) -> None:
        """Log no more outages: the hub stops its parts."""
        self._watches = False

    async def stop(self) -> None:
        """Store what is not stored yet; a hub that could not be started has nothing to store."""
        if not self._started:
            return
        self._count()
        with contextlib.suppress(DulyError):  # if the ledger cannot be used, the hub stops all the same
            await self.trail.flush()
            await self._hub.gateway.kept_traces.store()
            await self.totals.store()
            await self._charts.store()

    async def measure(self, *, stored: bool = False) -> TelemetrySnapshot:
        """Return all metrics. With `stored` the totals are stored first and shown as they are stored; if that
        fails, the last stored values are shown."""
        self._count()
        if stored:
            with contextlib.suppress(DulyError, TimeoutError):
                async with asyncio.timeout(SCRAPE_SECONDS):
                    await self.totals.store()
        return self.telemetry.snapshot(stored=stored)

    async def cluster_totals(self) -> list[ClusterTotal]:
        """Return the totals of all hubs on the ledger, including what this one has not stored yet."""
        self._count()
        found = await self.totals.summed()
        metrics, own = self.telemetry.metrics, self.telemetry.unsaved()
        places = sorted({*found, *own})
        return [
            ClusterTotal(name, dict(zip(metrics[name].labels, labels, strict=True)), total)
            for name, labels in places
            if name in metrics and (total := found.get((name, labels), 0) + own.get((name, labels), 0))
        ]

    async def _sample(self) -> None:
        self._count()
        self.telemetry.sample()
        self._check_outages()

    def _check_outages(self) -> None:
        """Log what has stopped or begun to work. A part reports each change of its problem, since an outage
        may be shorter than the time between two samples; some problems are only found by looking."""
        hub = self._hub
        if not self._watches:
            return
        broker = None if hub.mqtt is None else hub.mqtt.state()["problem"]
        self.outages.see(
            {
                "the ledger": hub.health.down,
                "the notifier": None if hub.notifier is None else hub.notifier.problem,
                "the broker": None if broker is None else str(broker),
            }
        )

    def _count(self) -> None:
        """Count the newest hops, and take over counts of other parts of the hub."""
        self.trail.fold()
        hub, telemetry = self._hub, self.telemetry
        failed_logins = hub.login_guard.failures
        if hub.mqtt is not None:
            failed_logins += hub.mqtt.failed_logins
            telemetry.broker_refused.value = hub.mqtt.refused
        telemetry.auth_failures.value = failed_logins
        for kind, refused in hub.health.limited().items():
            telemetry.counter("duly_limited_total", kind).value = refused
        counts = hub.alerts.counts
        attempts = telemetry.counter("duly_alert_retry_attempts_total")
        telemetry.retried(counts.retries - attempts.value)
        for name, value in (
            ("duly_alert_events_total", counts.accepted),
            ("duly_alert_duplicates_total", counts.duplicates),
            ("duly_alert_retry_attempts_total", counts.retries),
            ("duly_alert_retry_successes_total", counts.retried_well),
            ("duly_alert_retries_of_successes_total", counts.retries_well),
        ):
            telemetry.counter(name).value = value
        held = hub.alerts.held_back.counts
        for reason in REASONS:
            telemetry.counter("duly_alert_held_back_total", reason).value = held[reason]

    def _oldest(self) -> float:
        hub, gateway, alerts = self._hub, self._hub.gateway.answers, self._hub.alerts
        here = self.trail.oldest(lambda key: gateway.is_under_way(key) or alerts.is_under_way(key))
        since = hub.gateway.unheld.since
        return max(here, (hub.ledger.clock.now() - since) / SECOND) if since else here

    def _connections(self) -> dict[Labels, float]:
        hub = self._hub
        sessions = hub.gateway.sessions
        return {
            ("app",): sum(map(len, sessions.apps.values())),
            ("device",): len(sessions.devices),
            ("user",): len(hub.chat.connections),
            ("sentinel",): len(hub.alerts.online),
        }

    def _average_retries(self) -> float:
        took: CounterCell = self.telemetry.counter("duly_alert_retries_of_successes_total")
        well = self.telemetry.counter("duly_alert_retry_successes_total")
        return took.total / well.total if well.total else 0.0


async def _when_possible(work: Callable[[], Awaitable[None]]) -> None:
    """Do this work; if the ledger cannot be used now, skip it until the next time."""
    with contextlib.suppress(LedgerError):
        await work()
