"""What does something cost that goes on beside the commands? The same load with it and without, taking turns.

Judged by the least processor time of a command in many rounds: what is measured is small, and whatever else a
machine does only adds to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
from collections.abc import Coroutine
from pathlib import Path

from bench.gateway import measure
from bench.load import Pair
from bench.measure import Median, Report, figure, progress
from bench.processes import Server
from bench.servers import serving

DEPTH = 100


def hub_of(root: Path, **env: str) -> contextlib.AbstractContextManager[Server]:
    """A hub with settings by environment."""
    command = ["-m", "duly", "up", "--no-mqtt", "--port", "0", "--data", str(root)]
    return serving([sys.executable, *command], "the hub", **env)


class Overhead:
    """Rounds under two names: `base` without it, `other` with it."""

    def __init__(self, base: str, other: str) -> None:
        self._base, self._other = base, other
        self._costs: dict[str, list[float]] = {base: [], other: []}
        """processor time of a command, in µs"""
        self._rates: dict[str, list[float]] = {base: [], other: []}

    async def round(
        self,
        name: str,
        server: Server,
        talking: list[Pair],
        seconds: float,
        beside: Coroutine[None, None, None] | None = None,
    ) -> None:
        """Measure one round, with this beside it."""
        gc.collect()
        going_on = None if beside is None else asyncio.create_task(beside)
        try:
            before = server.worked
            found = await measure(server, talking, DEPTH, seconds)
            self._costs[name].append((server.worked - before) / found.count * 1e6)
            self._rates[name].append(found.rate)
        finally:
            if going_on is not None:
                going_on.cancel()
                await asyncio.gather(going_on, return_exceptions=True)
        progress.step(name)

    def report(self, title: str) -> Report:
        """What the rounds have shown."""
        base, other = self._base, self._other
        costs, rates = self._costs, self._rates
        least, cost, rate = min(costs[base]), Median(costs[base]), Median(rates[base])
        rounds = [with_it / without for without, with_it in zip(costs[base], costs[other], strict=True)]
        return Report(
            title,
            [
                figure(f"{base}, processor time", cost, "µs/cmd"),
                figure(f"{other}, processor time", Median(costs[other]), "µs/cmd", cost, base),
                figure(f"{base}, least processor time", least, "µs/cmd"),
                figure(f"{other}, least processor time", min(costs[other]), "µs/cmd", least, base),
                figure(f"{base}, 1 app × 100", rate, "cmd/s"),
                figure(f"{other}, 1 app × 100", Median(rates[other]), "cmd/s", rate, base),
            ],
            notes=[
                "judged by the least of the rounds: other work on the machine only adds",
                f"round by round {statistics.median(rounds):.3f} ×, "
                f"give or take {statistics.pstdev(rounds):.2f}",
            ],
        )
