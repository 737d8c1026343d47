"""Leases of runs, on a ledger that other processes write too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from duly.core.operations import DeliveryRef, Renew
from duly.core.units import SECOND
from duly.errors import DulyError
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger


class Leases:
    """Renews the leases of the runs of one function in this process, all with one timer. Where no other
    process writes, a lease lasts as long as the process, and there is nothing to do."""

    def __init__(self, ledger: Ledger, lease: int, ref_of: Callable[[bytes], DeliveryRef]) -> None:
        self._ledger = ledger
        self._lease = lease
        self._ref_of = ref_of
        self._runs: dict[bytes, int] = {}
        self._tasks = Supervisor()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: bytes, attempt: int) -> None:
        """Renew the lease of the run of this message from now on, unless no other process can take it."""
        if not self._ledger.sole:
            self._runs[key] = attempt
            if self._timer is None:
                self._schedule()

    def remove(self, key: bytes) -> None:
        """Stop renewing the lease of this run."""
        self._runs.pop(key, None)

    def _schedule(self) -> None:
        # The timer outlives a run: most runs are short, and making one for each would cost more than they do.
        self._timer = asyncio.get_running_loop().call_later(self._lease / SECOND / 3, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._runs:
            self._tasks.do("renewing leases", self._renew())
            self._schedule()

    async def _renew(self) -> None:
        due = self._ledger.clock.now() + self._lease
        # If it fails the next round tries again; if the lease runs out before, the fence holds.
        with suppress(DulyError):
            await self._ledger.commit(
                [(Renew(self._ref_of(key), attempt, due),) for key, attempt in self._runs.items()]
            )
