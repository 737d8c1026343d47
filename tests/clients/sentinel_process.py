"""Sentinels and their monitors as a process of its own, that can be killed: by us, or by itself at a point.

Run as a script it lets each of its sentinels report its signals, one device each, and ends when the tower has
everything. A monitor that was killed starts again with the first signal that it does not know to be stored:
the sentinel notices if it was. What is known to be stored is on the disk, in `NAME.stored`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from duly.clients.sentinel import Sentinel
from duly.core.monitor.signals import SentinelPolicy
from duly.core.steps import Effect, MachineEffect, ReportOutcome, Transmit
from duly.storage.sqlite.ledger import SqliteLedger
from tests.end_to_end.fused import Fuse, around
from tests.end_to_end.processes import end

POLICY = SentinelPolicy(debounce=3_600, countdown=0.02, retry_first=0.5, retry_most=2)
EFFECTS: dict[str, type[Effect]] = {"telling": MachineEffect, "sending": Transmit, "the end": ReportOutcome}
POINTS = around("commit", *EFFECTS)


class Job(Struct):
    """What a process does: for each sentinel its address and token."""

    folder: str
    signals: int
    sentinels: dict[str, tuple[str, str]]
    pause: float = 0.0
    point: str = ""


class Fleet:
    """Starts, kills and starts again the process of some sentinels."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, point: str = "") -> None:
        job = msgspec.structs.replace(self._job, point=point)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.clients.sentinel_process", msgspec.json.encode(job).decode(),
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    async def ended(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        assert self._process is not None
        await end(self._process)


# ── in the process ───────────────────────────────────────────────────────────────────────────────


def wire(fuse: Fuse) -> None:
    commit, perform = SqliteLedger.commit, Sentinel._perform

    async def deadly_commit(self: SqliteLedger, groups: Any) -> Any:
        fuse("before commit")
        results = await commit(self, groups)
        fuse("after commit")
        return results

    def deadly_perform(self: Sentinel, effect: Effect) -> None:
        name = next(name for name, kind in EFFECTS.items() if isinstance(effect, kind))
        fuse(f"before {name}")
        perform(self, effect)
        fuse(f"after {name}")

    SqliteLedger.commit = deadly_commit  # type: ignore[method-assign, assignment]  # a fuse
    Sentinel._perform = deadly_perform  # type: ignore[method-assign]  # a fuse


async def watch(job: Job, name: str) -> None:
    url, token = job.sentinels[name]
    folder = Path(job.folder)
    book = os.open(folder / f"{name}.stored", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    known = len((folder / f"{name}.stored").read_text().splitlines())
    chance = random.Random(f"{name} {known}")
    async with Sentinel(
        url, token, store=str(folder / f"{name}.db"), profile="home", policy=POLICY
    ) as sentinel:
        for n in range(known, job.signals):
            await sentinel.trigger("fall", f"device-{n}").stored()
            os.write(book, f"device-{n}\n".encode())
            os.fsync(book)
            await asyncio.sleep(chance.uniform(0, 2 * job.pause))
        await sentinel.drained()
    os.close(book)


async def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    wire(Fuse(job.point))
    await asyncio.gather(*(watch(job, name) for name in job.sentinels))


if __name__ == "__main__":
    asyncio.run(main())
