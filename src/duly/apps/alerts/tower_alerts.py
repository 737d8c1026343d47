"""Alerts of the tower itself: a silent sentinel, or critical alerts that a limit refuses.

They are dated when they are reported, since the clock that first dated them may be another hub's.
"""

from __future__ import annotations

from duly.apps.alerts.commits import commit
from duly.apps.alerts.model import AlertState, set_age
from duly.apps.alerts.operations import AlertOperations
from duly.core.messages import Message
from duly.core.steps import Arrived
from duly.runtime.engine import Engine


class TowerAlerts:
    """Reports and cancels the alerts of one tower itself."""

    def __init__(self, engine: Engine, operations: AlertOperations) -> None:
        self._engine = engine
        self._operations = operations

    async def report(self, message: Message) -> None:
        """Have an alert stored and delivered."""
        await self._engine.put(self._arrived(message))

    async def store(self, message: Message) -> None:
        """Report an alert; returns when it is stored with its deliveries."""
        await commit(self._engine, self._arrived(message))

    async def take_back(self, key: bytes, note: str) -> None:
        """Cancel an alert; its recipients are notified of that."""
        alert = await self._operations.get(key)
        if alert is not None and not alert.status.standing.over:
            await self._operations.say(alert, AlertState.CANCELLED, "tower", note)

    def _arrived(self, message: Message) -> Arrived:
        return Arrived(set_age(message, self._operations.now()), None)
