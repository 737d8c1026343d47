"""The figures of a hub: reads gauges off its parts, samples charts, and stores totals and the trail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from duly.core.units import HOUR, SECOND
from duly.errors import DulyError
from duly.runtime.durable_totals import DurableTotals
from duly.runtime.telemetry import CounterCell, Labels, Telemetry
from duly.runtime.trail import FLUSH_SECONDS, Hop, Trail
from duly.storage.ledger import Record

if TYPE_CHECKING:
    from duly.server.hub import Hub

SAMPLE_SECONDS: Final = 1.0
STORE_SECONDS: Final = 2.0
TRIM_SECONDS: Final = 60.0
DEAD_SECONDS: Final = 15.0
"""How often dead letters are counted, which reads the ledger."""
DEAD_COUNTED: Final = 1_000
"""Dead letters are counted up to here."""
EARLIER: Final = HOUR
"""How long before its acceptance a message may have been refused under the same id."""


class HubFigures:
    """The telemetry of one hub, with what keeps it up to date."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub = hub
        ledger = hub.ledger
        self.telemetry = Telemetry(name, ledger.clock)
        self.trail = Trail(ledger, self.telemetry)
        self.totals = DurableTotals(ledger, self.telemetry)
        self._dead = 0
        self._dead_at: tuple[int, ...] = ()

    async def load(self) -> None:
        """Go on from the totals in the ledger."""
        await self.totals.load()

    def start(self) -> None:
        """Read and store everything from time to time."""
        hub, telemetry = self._hub, self.telemetry
        for application in hub.applications:
            application.engine.on_commit = telemetry.commits.observe
        telemetry.read("duly_pending", lambda: hub.gateway.pending + hub.alerts.pending)
        telemetry.read("duly_oldest_pending_seconds", self._oldest)
        telemetry.read("duly_reorder_held", lambda: hub.gateway.held)
        telemetry.read("duly_dead_letters", lambda: self._dead)
        telemetry.read("duly_clock_skew_seconds", self.trail.skew)
        telemetry.read("duly_connections", self._connections)
        telemetry.read("duly_cluster_hubs", lambda: max(1, len(hub.gateway.remote.hubs)))
        telemetry.read("duly_notifier_up", lambda: float(hub.notifier is None or not hub.notifier.problem))
        telemetry.read("duly_alert_average_retries", self._average_retries)
        hub.tasks.every("sample of the figures", SAMPLE_SECONDS, self._sample)
        hub.tasks.every("storing the trail", FLUSH_SECONDS, self.trail.flush)
        hub.tasks.every("storing totals", STORE_SECONDS, self.totals.store)
        hub.tasks.every("trimming the trail", TRIM_SECONDS, self.trail.trim)
        hub.tasks.every("count of dead letters", DEAD_SECONDS, self._count_dead)

    async def stop(self) -> None:
        """Store what is not stored yet."""
        self.trail.fold()
        self._take_counts()
        try:
            await self.trail.flush()
            await self.totals.store()
        except DulyError:
            pass  # the ledger cannot be used, and the hub stops all the same

    async def _sample(self) -> None:
        self.trail.fold()
        self._take_counts()
        self.telemetry.sample()

    def _take_counts(self) -> None:
        """Take over what parts of the hub count by themselves."""
        hub, telemetry = self._hub, self.telemetry
        telemetry.auth_failures.value = hub.login_guard.failures
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

    async def _count_dead(self) -> None:
        """Count dead letters again if anything was attempted or has ended since the last count."""
        counts = self._hub.alerts.counts
        seen = (counts.accepted, counts.attempts, counts.failed, counts.in_doubt)
        if seen == self._dead_at:
            return
        self._dead_at = seen
        found = await self._hub.alerts.operations.deliveries(state="dead", limit=DEAD_COUNTED)
        self._dead = len(found)

    def _oldest(self) -> float:
        gateway, alerts = self._hub.gateway.answers, self._hub.alerts
        return self.trail.oldest(lambda key: gateway.is_under_way(key) or alerts.is_under_way(key))

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

    async def hops(self, record: Record) -> list[Hop]:
        """What happened to a message, hop by hop; also refusals under its id shortly before it was
        accepted."""
        made = record.message.made or record.accepted_at
        since = max(min(made - SECOND, record.accepted_at), record.accepted_at - EARLIER)
        return await self.trail.of(record.message.key, since)
