"""Retention: forgets messages that have ended and cannot be repeated; alerts are archived first.

It works in small steps and lets other work run in between. Only messages that have ended and are outside
their horizon are forgotten: the ledger's floor ensures that their ids are never fresh again. Deliveries have
their own period, which may be shorter than that of their alert; a mark records up to which alert they are
gone. The deliveries of an alert that has not ended by then stay as long as the alert.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from duly.apps.alerts.alert_queries import show, show_forgotten
from duly.apps.alerts.archive import ALERTS, DELIVERIES, Archive
from duly.apps.alerts.operations import AlertOperations
from duly.core.monitor.signals import EVENT
from duly.core.operations import RaiseMark
from duly.core.units import MS
from duly.storage.ledger import OLDEST, AgedMessage, Ledger

STEP: Final = 500
"""Messages that are forgotten in one step."""
COUNTED: Final = 100_000
"""The most messages that a dry run counts."""
MARK: Final = "retention/deliveries"
"""The mark before which the deliveries of alerts are forgotten."""


async def prune(
    ledger: Ledger, operations: AlertOperations, archive: Archive, deliveries_kept: int
) -> dict[str, object]:
    """Forget everything that is due; return how much that was."""
    now = ledger.clock.now()
    messages = alerts = 0
    await ledger.prune(keys=())  # raises the floor to trusted time, even if nothing is due
    while old := await ledger.prunable(STEP):
        events = [record.message.key for record in old if record.message.kind == EVENT]
        whole = [alert for key in events if (alert := await operations.get(key)) is not None]
        await archive.add(ALERTS, (show(alert) for alert in whole), now)
        messages += await ledger.prune(limit=STEP, keys=[record.message.key for record in old])
        await operations.forget(events)
        alerts += len(events)
        if len(old) < STEP:
            break
    deliveries = await _prune_deliveries(ledger, archive, now, deliveries_kept)
    return {
        "messages": messages,
        "alerts": alerts,
        "deliveries": deliveries,
        "archives": await archive.sweep(now),
    }


async def _prune_deliveries(ledger: Ledger, archive: Archive, now: int, kept: int) -> int:
    gone = 0
    before = now - kept
    async for page in _aged(ledger, before):
        ended = [one for alert in page for one in alert.deliveries]
        await archive.add(DELIVERIES, map(show_forgotten, ended), now)
        gone += await ledger.forget_deliveries([one.ref for one in ended])
        reached = page[-1].accepted_at if len(page) == STEP else before
        await ledger.write(RaiseMark(MARK, reached, reached // MS))
    return gone


async def _aged(ledger: Ledger, before: int) -> AsyncIterator[list[AgedMessage]]:
    """Yield alerts whose deliveries are due to be forgotten, page by page."""
    reached, _ = (await ledger.marks(MARK)).get(MARK, (0, 0))
    after = (reached, OLDEST[1])
    while page := await ledger.aged(EVENT, after, before, STEP):
        yield page
        after = (page[-1].accepted_at, page[-1].key)
        if len(page) < STEP:
            break


async def would_prune(ledger: Ledger, archive: Archive, deliveries_kept: int) -> dict[str, object]:
    """Return what `prune` would forget, without doing it."""
    now = ledger.clock.now()
    old = await ledger.prunable(COUNTED)
    going = {record.message.key for record in old}
    deliveries = 0
    async for page in _aged(ledger, now - deliveries_kept):
        deliveries += sum(len(alert.deliveries) for alert in page if alert.key not in going)
        if deliveries >= COUNTED:
            break
    return {
        "messages": len(old),
        "alerts": sum(record.message.kind == EVENT for record in old),
        "deliveries": deliveries,
        "archives": [path.name for path in archive.old(now)],
    }
