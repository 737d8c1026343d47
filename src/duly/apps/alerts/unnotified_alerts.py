"""Critical alerts that reached no recipient: the recipients of the profile `default` are notified instead,
and that is recorded.

An alert that has ended has reached none, and one whose recipients are still being tried has not after
`LONG_TRIED` attempts. The need for this is noted in the transaction that ends the alert, and the note is
removed in the transaction that plans the other deliveries and records the failure. So a crash in between
loses nothing: a remaining note is acted on once, at the next start or by another hub on the same ledger.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from duly.apps.alerts.alert_queries import DEAD, AlertRecord, calls_off
from duly.apps.alerts.model import name_in_bucket
from duly.apps.alerts.operations import UNTOLD, AlertOperations
from duly.core.lifecycle import State
from duly.core.messages import key_of
from duly.core.monitor.signals import Severity
from duly.core.operations import DeliveryKind, DropItem, Group, PutItem
from duly.errors import DulyError
from duly.runtime.activity_log import ActivityLog
from duly.storage.ledger import Ledger

_LOG = logging.getLogger("duly.alerts")
LONG_TRIED: Final = 6
"""After so many attempts, two or three minutes, the recipients of `default` are notified as well: the others
are tried for a day. It is no time, which would depend on a clock."""
LONG_TRIED_KEPT: Final = 1_000
"""How many such alerts are remembered, so that their deliveries are not read at every further attempt."""


def note(key: bytes) -> PutItem:
    """Return the write that notes an alert that reached no recipient; it belongs to the transaction that ends
    the alert."""
    return PutItem(UNTOLD, name_in_bucket(key), b"")


def notes(key: bytes, state: State, *, urgent: bool) -> Group:
    """Return the writes that belong to the end of an alert."""
    return (note(key),) if urgent and state in DEAD else ()


class UnnotifiedAlerts:
    """The critical alerts without a notified recipient, at one hub."""

    def __init__(self, ledger: Ledger, operations: AlertOperations, activity: ActivityLog) -> None:
        self._ledger = ledger
        self._operations = operations
        self._activity = activity
        self.count = 0
        """how many there were since the start"""
        self._long_tried: set[bytes] = set()

    async def tried(self, key: bytes, attempt: int) -> None:
        """Notify the recipients of the default profile of an alert whose own recipients have not been reached
        by this attempt, if that goes on for too long."""
        if attempt < LONG_TRIED or key in self._long_tried:
            return
        with contextlib.suppress(DulyError):
            alert = await self._operations.get(key)
            if alert is None or calls_off(alert.status.standing, DeliveryKind.FALLBACK):
                return
            if any(
                one.state is State.DONE or one.ref.kind is DeliveryKind.FALLBACK for one in alert.deliveries
            ):
                return
            if len(self._long_tried) >= LONG_TRIED_KEPT:
                self._long_tried.clear()
            self._long_tried.add(key)
            error = next((one.error for one in alert.deliveries if one.error), "no answer")
            await self._ledger.write(note(key))
            await self._fall_back(alert, f"no recipient was reached by {attempt} attempts: {error}")

    async def notify(self, key: bytes) -> None:
        """Notify the recipients of the default profile if that is noted; if it fails, the note stays."""
        with contextlib.suppress(DulyError):
            alert = await self._operations.get(key)
            if alert is None or alert.severity is not Severity.CRITICAL:
                await self._ledger.write(DropItem(UNTOLD, name_in_bucket(key)))
                return
            known = "" if alert.record.answer is None else alert.record.answer.reason
            await self._fall_back(alert, known or "no recipient was told")

    async def _fall_back(self, alert: AlertRecord, reason: str) -> None:
        if not await self._operations.fall_back(alert, reason):
            return  # it was done before
        self.count += 1
        message = alert.record.message
        _LOG.error("no recipient was told of the critical alert %s/%s: %s", message.scope, message.id, reason)
        self._activity.see("refused", scope=message.scope, id=message.id, word="untold", reason=reason)

    async def is_noted(self, key: bytes) -> bool:
        """Return whether the recipients of the default profile are still to be notified of this alert: it has
        ended, but it is not known yet whether any recipient will be notified."""
        return await self._ledger.item(UNTOLD, name_in_bucket(key)) is not None

    async def catch_up(self) -> None:
        """Act on remaining notes, after a crash or a failure of the ledger."""
        with contextlib.suppress(DulyError):
            for name in await self._ledger.bucket(UNTOLD):
                scope, _, id_ = name.partition("/")
                await self.notify(key_of(scope, id_))
