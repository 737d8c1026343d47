"""A notifier within one process: several hubs on one ledger, in tests and in simulated worlds."""

from __future__ import annotations

import asyncio

from duly.cluster.notifier import Notifier


class LocalBus:
    """Connects the notifiers of one process to each other."""

    def __init__(self) -> None:
        self.notifiers: list[LocalNotifier] = []


_PROCESS = LocalBus()


class LocalNotifier(Notifier):
    """Hints over a bus in memory; without one, over that of the process."""

    def __init__(self, me: str, bus: LocalBus | None = None) -> None:
        super().__init__(me)
        self._bus = bus or _PROCESS

    async def start(self) -> None:
        """Join the bus."""
        self._bus.notifiers.append(self)

    async def stop(self) -> None:
        """Leave the bus."""
        if self in self._bus.notifiers:
            self._bus.notifiers.remove(self)
        await super().stop()

    async def _send(self, note: bytes) -> None:
        loop = asyncio.get_running_loop()
        for notifier in self._bus.notifiers:
            loop.call_soon(notifier.receive, note)
