"""Attempts to notify recipients of alerts: makes each, records how it went, and stores the result."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from duly.apps.alerts.alert_queries import STATUSES
from duly.apps.alerts.commits import commit
from duly.apps.alerts.model import NAMED, name_in_bucket, read_status
from duly.apps.alerts.notification_sender import NotificationSender, SendResult
from duly.apps.alerts.planner import AlertPlanner
from duly.core.fanout.plan import AttemptEnded, AttemptResult, StartAttempt
from duly.core.steps import MachineEvent
from duly.errors import DulyError
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import Engine
from duly.runtime.outages import Outages
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger


class AlertAttempts:
    """Makes the attempts of one tower. `changed` reads an alert again that was cancelled during one; `missed`
    is called with each attempt that did not surely arrive."""

    def __init__(
        self,
        ledger: Ledger,
        planner: AlertPlanner,
        engine: Engine,
        trail: Trail,
        activity: ActivityLog,
        outages: Outages,
        changed: Callable[[bytes], Awaitable[None]],
        missed: Callable[[StartAttempt], None],
    ) -> None:
        self._ledger = ledger
        self._planner = planner
        self._engine = engine
        self._trail = trail
        self._activity = activity
        self._outages = outages
        self._changed = changed
        self._missed = missed

    async def make(self, attempt: StartAttempt, sender: NotificationSender) -> None:
        """Make one attempt and store its result."""
        sent = await sender.send(attempt)
        why = f"{attempt.recipient}: {sent.reason}" if sent.reason else attempt.recipient
        for item in attempt.items:
            self._trail.note(item.message.key, sent.result.value, item.attempt, why)
        self._note_channel(attempt.recipient, sent)
        if self._activity.watchers:
            for item in attempt.items:
                self._activity.see(
                    "told",
                    scope=item.message.scope,
                    id=item.message.id,
                    to=attempt.recipient,
                    fate=sent.result.value,
                )
        # the hub stops: the ledger records that the attempt was under way
        with contextlib.suppress(DulyError):
            ended = AttemptEnded(attempt, sent.result, sent.reason, sent.rest)
            await commit(self._engine, MachineEvent(ended))
            if sent.result is not AttemptResult.ARRIVED:
                self._missed(attempt)
            # A concurrent cancellation at another hub did not know that this recipient was notified.
            for key in await self._catch_up_on(attempt):
                await self._changed(key)

    async def is_wanted(self, attempt: StartAttempt) -> bool:
        """Return whether one of the deliveries of an attempt is still to be made."""
        with contextlib.suppress(DulyError):  # without the ledger, memory decides
            await self._catch_up_on(attempt)
        return any(self._planner.is_wanted(item.ref) for item in attempt.items)

    def _note_channel(self, recipient: str, sent: SendResult) -> None:
        """Note whether a channel works; a change is logged."""
        if sent.result is AttemptResult.CALLED_OFF:
            return
        works = sent.result is AttemptResult.ARRIVED
        self._outages.see({f"the channel to {recipient}": None if works else sent.reason or "no answer"})

    async def _catch_up_on(self, attempt: StartAttempt) -> list[bytes]:
        """Read what other hubs have changed about these alerts; returns those that were cancelled."""
        if self._ledger.sole:
            return []
        names = {name_in_bucket(item.message.key): item.message.key for item in attempt.items}
        if len(names) > NAMED:
            stored = await self._ledger.bucket(STATUSES)
        else:
            found = {name: await self._ledger.item(STATUSES, name) for name in names}
            stored = {name: body for name, body in found.items() if body is not None}
        for name in names.keys() & stored.keys():
            self._planner.statuses[names[name]] = read_status(stored[name])
        return [key for key in names.values() if self._planner.is_corrected(key)]
