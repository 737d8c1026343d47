"""What of the alerts on one ledger still needs a person or is under way: dead letters, those of them that may
have arrived, critical alerts that reached no recipient, and open deliveries.

An alert that may need a person because of what happened here is read again within a second. All alerts are
counted again from time to time if anything has happened, or if other hubs use the same ledger; the more
alerts there are, the longer the time between two counts.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

from msgspec import Struct

from duly.apps.alerts.alert_queries import SEARCHED, AlertRecord, dead_letters
from duly.apps.alerts.model import AlertState
from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.unnotified_alerts import LONG_TRIED
from duly.core.fanout.machine import Fanout
from duly.core.lifecycle import State
from duly.core.monitor.signals import Severity

COUNTED: Final = 1_000
"""Dead letters are counted up to here."""
RECOUNT_SECONDS: Final = 15.0
SHARE: Final = 30.0
"""Counting all alerts takes at most one part in this many of the time."""
TOUCHED: Final = 200
"""How many alerts are read again at once."""
TOUCHED_MOST: Final = 10_000
"""Beyond this many changed alerts, all alerts are counted again instead."""


class AlertNeeds(Struct, frozen=True):
    """What one alert needs of a person."""

    dead_letters: int
    in_doubt: int
    """how many of them may have arrived"""
    untold: bool
    """whether it is critical and open, and no recipient has surely been reached"""


NOTHING_NEEDED: Final = AlertNeeds(0, 0, untold=False)


def needs_of(alert: AlertRecord) -> AlertNeeds:
    """Return what an alert needs of a person."""
    letters = dead_letters(alert)
    in_vain = any(one.attempt >= LONG_TRIED for one in alert.deliveries if not one.state.terminal)
    return AlertNeeds(
        len(letters),
        sum(one.state is State.UNKNOWN for one in letters),
        untold=(bool(letters) or in_vain)
        and alert.status.standing is AlertState.OPEN
        and not any(one.state is State.DONE for one in alert.deliveries)
        and alert.severity is Severity.CRITICAL,
    )


class AlertBacklog:
    """Counts what needs a person, and what is under way. `shared` says whether other hubs use the ledger as
    well; `fanout` has this hub's open deliveries."""

    def __init__(
        self,
        operations: AlertOperations,
        fanout: Fanout,
        *,
        shared: bool,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._operations = operations
        self._fanout = fanout
        self._shared = shared
        self._now = now
        self._needs: dict[bytes, AlertNeeds] = {}
        """what alerts need that need anything, by key"""
        self._elsewhere = 0
        """deliveries that were open at other hubs when all were counted"""
        self._touched: dict[bytes, None] = {}
        self._changes = 0
        self._counted_at: tuple[int, ...] = ()
        """what had happened before the last count"""
        self._due = 0.0

    @property
    def dead_letters(self) -> int:
        """How many dead letters there are, as far as they were counted."""
        return min(sum(one.dead_letters for one in self._needs.values()), COUNTED)

    @property
    def in_doubt(self) -> int:
        """How many dead letters may have arrived."""
        return sum(one.in_doubt for one in self._needs.values())

    @property
    def untold(self) -> int:
        """How many critical alerts are open of which no recipient has surely been reached."""
        return sum(one.untold for one in self._needs.values())

    @property
    def open_deliveries(self) -> int:
        """How many deliveries have not ended: at this hub now, at others when all were last counted."""
        return len(self._fanout) + self._elsewhere

    def touch(self, key: bytes) -> None:
        """Note that what an alert needs may have changed."""
        self._changes += 1
        self._touched[key] = None

    async def refresh(self) -> None:
        """Read alerts that may have changed, and count all again if that is due."""
        if self._now() >= self._due or len(self._touched) > TOUCHED_MOST:
            await self._count_all()
        keys = list(self._touched)[:TOUCHED]
        for key in keys:
            del self._touched[key]
        try:
            alerts = await self._operations.get_all(keys)
        except BaseException:
            self._touched.update(dict.fromkeys(keys))  # the next refresh tries again
            raise
        for key in keys:
            self._needs.pop(key, None)
        self._needs.update(_needs(alerts))

    async def _count_all(self) -> None:
        counts, began = self._fanout.counts, self._now()
        seen = (counts.accepted, counts.attempts, counts.failed, counts.in_doubt, self._changes)
        if self._shared or seen != self._counted_at:
            self._touched.clear()
            await self._read_all()
            self._counted_at = seen
        now = self._now()
        self._due = now + max(RECOUNT_SECONDS, SHARE * (now - began))

    async def _read_all(self) -> None:
        needs: dict[bytes, AlertNeeds] = {}
        letters = under_way = 0
        async for records in self._operations.newest_pages(SEARCHED):
            alerts = await self._operations.wholes(records)
            found = _needs(alerts)
            needs |= found
            letters += sum(one.dead_letters for one in found.values())
            under_way += sum(not one.state.terminal for alert in alerts for one in alert.deliveries)
            if letters >= COUNTED:
                break
        self._needs = needs
        self._elsewhere = max(0, under_way - len(self._fanout)) if self._shared else 0


def _needs(alerts: list[AlertRecord]) -> dict[bytes, AlertNeeds]:
    """Return what alerts need, without those that need nothing."""
    found = {alert.key: needs_of(alert) for alert in alerts}
    return {key: needs for key, needs in found.items() if needs != NOTHING_NEEDED}
