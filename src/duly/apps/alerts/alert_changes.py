"""Updates and cancellations that sentinels send about their own alerts.

A change is stored once, together with what follows from it, and only if the status that it was derived from
is still the same.
"""

from __future__ import annotations

from duly.apps.alerts.alert_queries import STATUSES
from duly.apps.alerts.commits import commit
from duly.apps.alerts.configuration import AlertConfiguration
from duly.apps.alerts.limited_alerts import LimitedAlerts
from duly.apps.alerts.model import (
    AlertChange,
    current,
    ended_by_reporter,
    name_in_bucket,
    read_change,
    read_event,
    set_age,
    updated,
)
from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.planner import AlertPlanner
from duly.apps.alerts.unnotified_alerts import UnnotifiedAlerts, note
from duly.core.fanout.plan import Amendment, FanoutPolicy, ItemSeen
from duly.core.messages import Message, key_of
from duly.core.monitor.signals import CANCEL, Severity
from duly.core.operations import Deliver
from duly.core.steps import MachineEvent
from duly.errors import LedgerUnavailable, RateLimited
from duly.identity.accounts import Principal
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame
from duly.wire.session import Session


class AlertChanges:
    """Stores the changes of alerts at one tower."""

    def __init__(
        self,
        ledger: Ledger,
        policy: FanoutPolicy,
        configuration: AlertConfiguration,
        operations: AlertOperations,
        planner: AlertPlanner,
        limited: LimitedAlerts,
        unnotified: UnnotifiedAlerts,
        engine: Engine,
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._configuration = configuration
        self._operations = operations
        self._planner = planner
        self._limited = limited
        self._unnotified = unnotified
        self._engine = engine

    async def take(self, session: Session, who: Principal, frame: Frame) -> bool:
        """Store an update or a cancellation; one at a time, since each depends on the previous status."""
        body = bytes(frame.data)
        change = read_change(body)
        if not self._ledger.sole:
            await self._configuration.catch_up()
        await self._count(who, change, frame.seq_id, len(body))
        async with self._operations.changing:
            now = self._ledger.clock.now()
            alert = await self._operations.get(key_of(who.name, change.event))
            if alert is None:
                # The alert may still be under way; a sentinel that sends in order succeeds soon.
                raise LedgerUnavailable(f"{who.name} has not reported {change.event!r} (yet); try again")
            message = Message(who.name, str(frame.seq_id), frame.type, change.event, body, now)
            if not now - self._policy.horizon.keep < message.made <= now:
                set_age(message, now)  # it knows no offset; as long as its alert is here, so is its id
            status = updated(alert.status, change, now)
            if frame.type == CANCEL and not status.standing.over:
                status = ended_by_reporter(status, change, who.name, now)
            reported = alert.record.message
            silence = self._planner.silence_over(reported, current(read_event(reported.body), status), now)
            writes = self._operations.writes(alert, status, now, silenced=silence is not None)
            notified = any(isinstance(one, Deliver) for one in writes)
            missed = not notified and silence is None and self._operations.is_unnotified(alert, status)
            writes = (*writes, note(alert.key)) if missed else writes
            seen = ItemSeen(STATUSES, name_in_bucket(alert.key), alert.said)
            await commit(self._engine, MachineEvent(Amendment(message, session, writes, seen)))
        if missed:
            await self._unnotified.notify(alert.key)
        return True

    async def _count(self, who: Principal, change: AlertChange, id_: str | None, size: int) -> None:
        """Count a change against its sentinel's limit. Before one that makes an alert critical is refused,
        people are notified."""
        now = self._ledger.clock.now()
        refusal = self._limited.excess(who.name, size, now)
        if refusal is not None and await self._limited.is_refused(who.name, id_, refusal):
            try:
                self._limited.take_reserve(who.name, size, now, refusal)
            except RateLimited:
                alert = await self._operations.get(key_of(who.name, change.event))
                if alert is not None and change.severity is Severity.CRITICAL:
                    await self._limited.tell(who.name, alert.record.message.recipient, str(refusal), now)
                raise
