"""A memory ledger that behaves like a disk: commits take time, and its process may die just before or
after one.

A dead process writes no more. What is on the `Disk` is what the next process finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from duly.core import operations as w
from duly.core.units import SECOND
from duly.errors import LedgerUnavailable
from duly.runtime.clock import Clock
from duly.storage.memory import Disk, MemoryLedger


class SimLedger(MemoryLedger):
    """A ledger with faults: `fault(moment)` is called before and after every commit and returns 'crash',
    'fail' or ''."""

    confirm = 60 * SECOND  # the horizon of simulated worlds is minutes

    def __init__(
        self,
        clock: Clock,
        disk: Disk,
        worker: str,
        fault: Callable[[str], str],
        crash: Callable[[], None],
        watch: Callable[[Disk, w.Write, w.Result], None],
    ) -> None:
        super().__init__(clock, disk=disk, recent=64)
        self.worker = worker
        self._fault = fault
        self._crash = crash
        self._watch = watch
        self.dead = False
        self.hangs_until = 0.0

    async def commit(self, groups: Sequence[w.Group]) -> list[w.Results]:
        """Commit; before and after that the disk may hang, fail or crash its process."""
        await asyncio.sleep(max(0.0005, self.hangs_until - asyncio.get_running_loop().time()))
        await self._moment("before")
        committed = await super().commit(groups)
        await asyncio.sleep(0.0005)
        await self._moment("after")
        return committed

    def _learn(self, committed: Iterable[w.Results]) -> None:
        committed = list(committed)
        super()._learn(committed)
        for results in committed:
            for operation, result in zip(results.operations, results.values, strict=True):
                self._watch(self.disk, operation, result)

    async def _moment(self, moment: str) -> None:
        if self.dead:
            raise asyncio.CancelledError
        match self._fault(moment):
            case "crash":
                self._crash()
                raise asyncio.CancelledError
            case "fail":
                raise LedgerUnavailable(f"the disk failed {moment} the commit")
