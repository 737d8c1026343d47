"""Does a command cost the same, however many the hub remembers?

The ledgers are filled by real commands through a hub, since that is what leaves behind what commands leave
behind. A hub runs on each of them; they take turns.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from bench.gateway import accounts, measure
from bench.load import Pair
from bench.measure import Contender, Options, Report, figure, folder, progress, rounds
from bench.processes import Server
from bench.servers import hub

SIZES = [1_000, 100_000, 1_000_000]
QUICK = [1_000, 20_000]
AT_A_TIME = 5.0
"""Seconds of commands between two looks at how many there are."""


async def remembering(root: Path, size: int) -> list[Pair]:
    """Fills a hub's folder with so many commands that have ended, and kills the hub."""
    talking, _ = await accounts(root, 1)
    done = 0
    with hub(root) as server:
        while done < size:
            seconds = 0.2 if size <= SIZES[0] else AT_A_TIME
            progress.plan(1)
            done += (await measure(server, talking, 200, seconds)).count
            progress.step(f"{done:,} of {size:,} commands")
    return talking


def cost_at(server: Server, talking: list[Pair], seconds: float) -> Contender:
    """Processor time of the hub per command, in microseconds."""

    async def cost() -> float:
        before = server.worked
        found = await measure(server, talking, 100, seconds)
        return (server.worked - before) / found.count * 1e6

    return cost


async def run(options: Options) -> Report:
    sizes, turns, seconds = options.pick((QUICK, 3, 1.0), (SIZES, 7, 1.5))
    with folder() as root, contextlib.ExitStack() as running:
        contenders: dict[str, Contender] = {}
        for size in sizes:
            talking = await remembering(root / str(size), size)
            server = running.enter_context(hub(root / str(size)))
            contenders[f"{size:,} remembered"] = cost_at(server, talking, seconds)
        cost = await rounds(contenders, turns)
    least, *more = cost
    return Report(
        "Remembered commands: processor time of one more, c=100",
        [
            figure(least, cost[least], "µs/cmd"),
            *(figure(name, cost[name], "µs/cmd", cost[least], f"at {sizes[0]:,}") for name in more),
        ],
    )
