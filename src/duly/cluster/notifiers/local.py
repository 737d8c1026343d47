"""A notifier within one process: several hubs on one ledger, in tests and in simulated worlds."""

from __future__ import annotations

import asyncio

from duly.cluster.notifier import Notifier


class LocalBus:
    """Where the notifiers of one process are."""

    def __init__(self) -> None:
        self.bells: list[LocalNotifier] = []


_HERE = LocalBus()


class LocalNotifier(Notifier):
    def __init__(self, me: str, street: LocalBus | None = None) -> None:
        super().__init__(me)
        self._street = street or _HERE

    async def start(self) -> None:
        self._street.bells.append(self)

    async def stop(self) -> None:
        if self in self._street.bells:
            self._street.bells.remove(self)
        await super().stop()

    async def _send(self, note: bytes) -> None:
        loop = asyncio.get_running_loop()
        for bell in self._street.bells:
            loop.call_soon(bell._heard, note)
