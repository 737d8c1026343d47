"""Critical alerts that nobody could be told of: the people of the profile `default` are told, and it is
recorded.

The law: that somebody else has to be told is noted in the transaction that ends the alert, and taken off in
the one that plans those deliveries and records the failure. So no crash in between loses it: what is still
noted is done at the next start, or by another hub on the same ledger, once.
"""

from __future__ import annotations

import contextlib
import logging

from duly.apps.alerts.model import name_in_bucket
from duly.apps.alerts.operations import DEAD, UNTOLD, AlertOperations
from duly.core.lifecycle import State
from duly.core.messages import key_of
from duly.core.monitor.signals import Severity
from duly.core.operations import DropItem, Group, PutItem
from duly.errors import DulyError
from duly.runtime.audit import AuditLog
from duly.storage.ledger import Ledger

_LOG = logging.getLogger("duly.alerts")


def note(key: bytes) -> PutItem:
    """Goes with what ends an alert that nobody was told of."""
    return PutItem(UNTOLD, name_in_bucket(key), b"")


def notes(key: bytes, state: State, *, urgent: bool) -> Group:
    """What is stored together with the end of an alert."""
    return (note(key),) if urgent and state in DEAD else ()


class Untold:
    """Those of one hub."""

    def __init__(self, ledger: Ledger, operations: AlertOperations, journal: AuditLog) -> None:
        self._ledger = ledger
        self._operations = operations
        self._journal = journal
        self.count = 0
        """since the start"""

    async def tell(self, key: bytes) -> None:
        """Tell those of the default profile, if that is noted; what fails now stays noted."""
        with contextlib.suppress(DulyError):
            alert = await self._operations.get(key)
            if alert is None or alert.severity is not Severity.CRITICAL:
                await self._ledger.write(DropItem(UNTOLD, name_in_bucket(key)))
                return
            said = "" if alert.record.answer is None else alert.record.answer.reason
            reason = said or "nobody was told"
            if not await self._operations.fall_back(alert, reason):
                return  # it has been done
            self.count += 1
            message = alert.record.message
            _LOG.error("nobody was told of the critical alert %s/%s: %s", message.scope, message.id, reason)
            self._journal.see("refused", scope=message.scope, id=message.id, word="untold", reason=reason)

    async def catch_up(self) -> None:
        """Do what is noted: whoever noted it has died since, or the ledger could not be written to."""
        with contextlib.suppress(DulyError):
            for name in await self._ledger.bucket(UNTOLD):
                scope, _, id_ = name.partition("/")
                await self.tell(key_of(scope, id_))
