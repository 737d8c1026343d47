"""Does it stay as fast, and as small in memory, however many ids it remembers?

One process of its own fills a ledger through the public verb, with ids in the order of time as they come in
reality, and reports its memory at each size. Copies made at each size are then measured taking turns, so that
a slow minute hits every size alike. The smallest is copied anew for every round: it must not grow by being
measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import duly
from bench.measure import BODY, Figure, Report, batches, folder, messages, rounds, spread
from duly import Message
from duly.storage.ledger import Ledger

SIZES = [1_000, 10_000, 100_000, 300_000, 1_000_000]
QUICK = [1_000, 10_000, 100_000]
BURST = 1_600
HOURS = 20
PLAIN = 100_000
"""How many ids without a body are stored to see what an id alone takes."""


def at_size(place: Path, size: int) -> Path:
    return place / f"{size}.db"


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def fill(ledger: Ledger, begin: int, end: int, of: int, body: bytes) -> None:
    """Messages number `begin` to `end` of so many, which arrived evenly over the last hours."""
    span = HOURS * 3_600_000
    first = time.time_ns() // 1_000_000 - span - 60_000
    for numbers in batches(range(begin, end), BURST):
        made = [
            Message("app-1", f"{first + n * span // of}_{n}", "lock_control", "lock-1", body) for n in numbers
        ]
        await asyncio.gather(*map(ledger.admit_many, batches(made, 16)))


async def grow(place: Path, sizes: list[int]) -> None:
    """In a process of its own: fill, and say how much memory that takes."""
    path, begin = place / "growing.db", 0
    for size in sizes:
        # Opened once per size only because the file is copied; memory is what the last opening has left.
        ledger = await duly.open_ledger(f"sqlite:///{path}")
        await fill(ledger, begin, size, sizes[-1], BODY)
        print(json.dumps([size, resident()]), flush=True)
        await ledger.close()
        shutil.copy(path, at_size(place, size))
        begin = size


async def bytes_per_id(path: Path) -> float:
    """page_count × page_size ÷ ids; the ledger was closed, so the WAL is folded in."""
    async with await duly.open_ledger(f"sqlite:///{path}?mode=ro") as ledger:
        size = await ledger.size()
    return size.bytes / size.messages


async def run(quick: bool) -> Report:
    sizes = QUICK if quick else SIZES
    with folder() as place:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.growth",
            str(place),
            json.dumps(sizes),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await child.communicate()
        if child.returncode:
            raise RuntimeError("the process that fills the ledger failed")
        memory: dict[int, int] = dict(json.loads(line) for line in out.splitlines())

        plain = place / "plain.db"
        async with await duly.open_ledger(f"sqlite:///{plain}") as ledger:
            await fill(ledger, 0, PLAIN, PLAIN, b"")
        disk = {"empty": await bytes_per_id(plain), "214": await bytes_per_id(at_size(place, sizes[-1]))}

        async def burst(path: Path) -> float:
            """Microseconds per admission."""
            async with await duly.open_ledger(f"sqlite:///{path}") as ledger:
                await spread(batches(messages(BURST), 16), 100, ledger.admit_many)  # its pages are warm
                return 1e6 / 16 / await spread(batches(messages(BURST), 16), 100, ledger.admit_many)

        names = itertools.count()

        async def smallest() -> float:
            copy = place / f"small-{next(names)}.db"
            shutil.copy(at_size(place, sizes[0]), copy)
            return await burst(copy)

        def measured(size: int) -> Callable[[], Awaitable[float]]:
            return smallest if size == sizes[0] else lambda: burst(at_size(place, size))

        cost = await rounds({str(size): measured(size) for size in sizes}, 9 if quick else 15)

    least, most = str(sizes[0]), str(sizes[-1])
    figures = []
    for size in sizes:
        ratio = None if str(size) == least else cost[str(size)] / cost[least]
        bound = 1.5 if str(size) == most else None
        figures.append(
            Figure(
                f"cost at {size:,} ids", cost[str(size)], "µs/msg", ratio, f"at {sizes[0]:,}", at_most=bound
            )
        )
    for before, size in zip([0, *sizes], sizes, strict=False):
        ratio = memory[size] / memory[before] if before else None
        bound = 1.1 if before == 300_000 else None
        figures.append(
            Figure(
                f"memory at {size:,} ids", memory[size] / 1e6, "MB", ratio, f"at {before:,}", at_most=bound
            )
        )
    figures.append(Figure("disk per id, no body", disk["empty"], "bytes"))
    figures.append(Figure("disk per id, 214-byte body", disk["214"], "bytes"))
    return Report(
        "Growth on SQLite: cost, memory and disk by remembered ids",
        figures,
        {
            "sizes": sizes,
            "cost": [cost[str(s)] for s in sizes],
            "memory": [memory[s] for s in sizes],
            "disk": disk,
        },
        ["memory rises until SQLite's page cache (64 MB) and the window of hot ids are full, then stays"],
    )


if __name__ == "__main__":
    asyncio.run(grow(Path(sys.argv[1]), json.loads(sys.argv[2])))
