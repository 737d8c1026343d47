"""Settlement: ends an alert whose last deliveries were ended by several hubs.

If another hub has ended some deliveries of an alert, no hub alone can tell which one is the last. So the
transaction that ends a delivery also notes that the alert may be over, and the ledger is asked: a noted alert
without open deliveries ends in the transaction that removes the note. A crash in between loses nothing: the
next check of any hub settles what is still noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Final

from duly.apps.alerts.alert_queries import AlertRecord
from duly.apps.alerts.model import name_in_bucket
from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.unnotified_alerts import notes
from duly.core.lifecycle import State
from duly.core.messages import Answer, key_of
from duly.core.monitor.signals import Severity
from duly.core.operations import Advance, CheckItem, Delivery, DropItem, Group, PutItem
from duly.errors import DulyError
from duly.storage.ledger import Ledger

UNSETTLED: Final = "unsettled"
"""The bucket of alerts that may be over."""
_ENDS: Final = ((State.DONE, 0), (State.UNKNOWN, 4), (State.FAILED, 1), (State.EXPIRED, 4))
"""The ends of an alert with their codes, by the ends of its deliveries; the first that matches counts."""


def unsettled(key: bytes) -> Group:
    """Return the writes that note that an alert may be over."""
    return (PutItem(UNSETTLED, name_in_bucket(key), b""),)


def settled(key: bytes) -> Group:
    """Return the writes that remove that note."""
    return (DropItem(UNSETTLED, name_in_bucket(key)),)


class AlertSettlement:
    """Settles the alerts of one hub; `ended` is called with how each ended."""

    def __init__(
        self,
        ledger: Ledger,
        operations: AlertOperations,
        ended: Callable[[bytes, State, Answer], None],
    ) -> None:
        self._ledger = ledger
        self._operations = operations
        self._ended = ended

    async def settle(self, key: bytes) -> None:
        """End an alert that is noted, if none of its deliveries is open."""
        with contextlib.suppress(DulyError):  # it stays noted
            alert = await self._operations.get(key)
            if alert is None:
                await self._ledger.write(*settled(key))
                return
            if any(not one.state.terminal for one in alert.deliveries):
                return
            # Its state is read after its deliveries, because the hub that ended the last one may have ended
            # the alert as well.
            record = await self._ledger.find(key)
            if record is None or record.state.terminal:
                await self._ledger.write(*settled(key))
                return
            state, answer = end_of(alert.deliveries)
            if await self._ledger.apply(self._end(alert, state, answer)):
                self._ended(key, state, answer)

    def _end(self, alert: AlertRecord, state: State, answer: Answer) -> CheckItem:
        urgent = alert.severity is Severity.CRITICAL
        end = Advance(alert.key, state, self._ledger.clock.now(), answer)
        then = (*settled(alert.key), end, *notes(alert.key, state, urgent=urgent))
        return CheckItem(UNSETTLED, name_in_bucket(alert.key), then=then)

    async def catch_up(self, open_: Collection[bytes]) -> None:
        """Settle everything that is noted, except the alerts that have open deliveries."""
        for name in await self._ledger.bucket(UNSETTLED):
            scope, _, id_ = name.partition("/")
            key = key_of(scope, id_)
            if key not in open_:
                await self.settle(key)


def end_of(deliveries: Sequence[Delivery]) -> tuple[State, Answer]:
    """Return how an alert has ended, given the ends of its deliveries."""
    for state, code in _ENDS:
        for one in deliveries:
            if one.state is state:
                return state, Answer() if state is State.DONE else Answer(code, b"", one.error)
    return State.CANCELLED, Answer(0, b"", deliveries[-1].error if deliveries else "")
