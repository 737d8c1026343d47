"""Does it stay as fast, and as small in memory, however many ids it remembers?

One process of its own fills a ledger through the public verb, with ids in the order of time as they come in
reality, and reports its memory at each size. Copies made at each size are then measured taking turns, so that
a slow minute hits every size alike. The smallest is copied anew for every round: it must not grow by being
measured. Ten million ids take some gigabytes of disk and many minutes: only with `--long`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duly
from bench.measure import (
    BODY,
    Contender,
    Figure,
    Options,
    Report,
    batches,
    figure,
    folder,
    messages,
    progress,
    rounds,
    spread,
)
from bench.processes import load
from duly import Ledger, Message

QUICK = [1_000, 10_000, 100_000]
SIZES = [*QUICK, 300_000, 1_000_000]
LONG = [*SIZES, 10_000_000]
BURST = 1_600
HOURS = 20
PLAIN = 100_000
"""How many ids without a body are stored to see what an id alone takes."""
REPORT_EVERY = 100_000
SLOWEST = 300.0
"""Seconds that so many ids may take."""


def at_size(root: Path, size: int) -> Path:
    """The ledger as it was with so many ids."""
    return root / f"{size}.db"


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def fill(
    ledger: Ledger, begin: int, end: int, of: int, body: bytes, told: Callable[[int], None] = lambda n: None
) -> None:
    """Messages number `begin` to `end` of so many, which arrived evenly over the last hours."""
    span = HOURS * 3_600_000
    first = time.time_ns() // 1_000_000 - span - 60_000
    for numbers in batches(range(begin, end), BURST):
        made = [
            Message("app-1", f"{first + n * span // of}_{n}", "lock_control", "lock-1", body) for n in numbers
        ]
        await asyncio.gather(*map(ledger.admit_many, batches(made, 16)))
        if numbers[0] // REPORT_EVERY != numbers[-1] // REPORT_EVERY:
            told(numbers[-1])


async def grow(root: Path, sizes: list[int]) -> None:
    """In a process of its own: fill, and say how much memory that takes."""
    path, begin = root / "growing.db", 0
    for size in sizes:
        # Opened once per size only because the file is copied; memory is what the last opening has left.
        ledger = await duly.open_ledger(f"sqlite:///{path}")
        await fill(ledger, begin, size, sizes[-1], BODY, lambda n: print(json.dumps([n, 0]), flush=True))
        memory = resident()
        await ledger.close()
        if size == sizes[-1]:
            path.rename(at_size(root, size))
        else:
            shutil.copy(path, at_size(root, size))
        print(json.dumps([size, memory]), flush=True)
        begin = size


async def filled(root: Path, sizes: list[int]) -> dict[int, int]:
    """Ledgers of all sizes, and the memory of the process that filled them."""
    memory: dict[int, int] = {}
    progress.plan(sizes[-1] // REPORT_EVERY)
    async with load("-m", "bench.growth", str(root), json.dumps(sizes)) as child:
        while sizes[-1] not in memory:
            size, held = json.loads(await child.line(SLOWEST))
            progress.step(f"{size:,} ids")
            if held:
                memory[size] = held
    return memory


async def bytes_per_id(path: Path) -> float:
    """What the ledger takes on the disk, by its ids."""
    async with await duly.open_ledger(f"sqlite:///{path}") as ledger:
        size = await ledger.size()
    return size.bytes / size.messages


async def run(options: Options) -> Report:
    sizes = LONG if options.long else options.pick(QUICK, SIZES)
    with folder() as root:
        memory = await filled(root, sizes)
        plain = root / "plain.db"
        async with await duly.open_ledger(f"sqlite:///{plain}") as ledger:
            await fill(ledger, 0, PLAIN, PLAIN, b"")
        disk = {
            "no body": await bytes_per_id(plain),
            "214 bytes": await bytes_per_id(at_size(root, sizes[-1])),
        }

        async def burst(path: Path) -> float:
            """Microseconds per admission."""
            async with await duly.open_ledger(f"sqlite:///{path}") as ledger:
                await spread(batches(messages(BURST), 16), 100, ledger.admit_many)  # its pages are warm
                return 1e6 / 16 / await spread(batches(messages(BURST), 16), 100, ledger.admit_many)

        names = itertools.count()

        def measured(size: int) -> Contender:
            async def smallest() -> float:
                copy = root / f"small-{next(names)}.db"
                shutil.copy(at_size(root, size), copy)
                return await burst(copy)

            async def grown() -> float:
                return await burst(at_size(root, size))

            return smallest if size == sizes[0] else grown

        cost = await rounds({f"{size:,} ids": measured(size) for size in sizes}, options.pick(5, 15))
    by_size = [cost[f"{size:,} ids"] for size in sizes]
    figures: list[Figure] = []
    for size, each in zip(sizes, by_size, strict=True):
        base: float | None = None if size == sizes[0] else by_size[0]
        figures.append(
            figure(f"cost at {size:,} ids", each, "µs/msg", base, f"at {sizes[0]:,}" if base else "")
        )
    for before, size in zip([0, *sizes], sizes, strict=False):
        base = memory[before] / 1e6 if before else None
        figures.append(
            figure(
                f"memory at {size:,} ids", memory[size] / 1e6, "MB", base, f"at {before:,}" if base else ""
            )
        )
    figures += [figure(f"disk per id, {name}", value, "bytes") for name, value in disk.items()]
    return Report(
        "Growth on SQLite: cost, memory and disk by remembered ids",
        figures,
        sizes={"ids": [*map(float, sizes)], "cost": [*by_size], "memory": [float(memory[s]) for s in sizes]},
        notes=["memory rises until caches are full, then stays"],
    )


if __name__ == "__main__":
    asyncio.run(grow(Path(sys.argv[1]), json.loads(sys.argv[2])))
