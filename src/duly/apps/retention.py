"""Retention: what has ended and can no longer be repeated is forgotten, alerts only after they are archived.

The law: in small steps, with a breath between them, so that nobody waits for it. What is forgotten was ended
and outside its horizon: the ledger's floor makes sure that its id is never fresh again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from duly.apps.desk import Desk, show
from duly.archive import Archive
from duly.core.signals import EVENT
from duly.ledger import Ledger

STEP: Final = 500
COUNTED: Final = 100_000
"""A dry run counts so far."""


async def prune(ledger: Ledger, desk: Desk, archive: Archive) -> dict[str, Any]:
    """Forget what is due; what was done."""
    messages = alerts = 0
    now = ledger.clock.now()
    while old := await ledger.prunable(STEP):
        events = [record.message.key for record in old if record.message.kind == EVENT]
        whole = [alert for key in events if (alert := await desk.get(key)) is not None]
        await archive.add((show(alert) for alert in whole), now)
        messages += await ledger.prune(limit=STEP, keys=[record.message.key for record in old])
        await desk.forget(events)
        alerts += len(events)
        if len(old) < STEP:
            break
        await asyncio.sleep(0)
    return {"messages": messages, "alerts": alerts, "archives": await archive.sweep(now)}


async def would_prune(ledger: Ledger, archive: Archive) -> dict[str, Any]:
    """The same, without doing it."""
    old = await ledger.prunable(COUNTED)
    return {
        "messages": len(old),
        "alerts": sum(record.message.kind == EVENT for record in old),
        "archives": [path.name for path in archive.old(ledger.clock.now())],
    }
