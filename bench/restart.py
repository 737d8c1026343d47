"""How long does a hub take to serve again, after kill -9 in the middle of its work?

A hub that remembers a million commands is killed under load, with whatever its journal holds then, and
started anew: from the start of the process to `ready`. An empty hub takes turns with it, to tell what
starting Python and the program costs by itself. At last its journal is filled as far as a ledger lets it
grow while its tables cannot follow.

python -m bench.restart LEDGER fills the journal of a ledger and dies by SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import duly
from bench.gateway import measure
from bench.load import Pair
from bench.measure import Median, Options, Report, batches, figure, folder, messages, progress
from bench.processes import NoAnswer, ProcessDied
from bench.remembered import remembering
from bench.servers import hub
from duly.storage.sqlite import flushes

FILLING_SECONDS = 300


def seconds_to_ready(root: Path) -> float:
    """Starts a hub and ends it."""
    began = time.perf_counter()
    with hub(root):
        return time.perf_counter() - began


async def kill_under_load(root: Path, talking: list[Pair], seconds: float) -> int:
    """Kills a hub in the middle of its work, and returns the bytes that its ledger takes then."""
    with hub(root) as server:
        work = asyncio.create_task(measure(server, talking, 100, 10 * seconds))
        await asyncio.wait({work}, timeout=seconds)
        if work.done():
            await work
        os.kill(server.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessDied):
            await work
    return on_disk(root)


async def fill_journal(path: Path) -> None:
    """Fills the journal of a ledger whose tables do not follow, as far as that goes, and kills this
    process."""
    most = flushes.MOST_BEHIND
    for bound in ("CHANGES_BEHIND", "BYTES_BEHIND", "SECONDS_BEHIND"):
        setattr(flushes, bound, 1 << 40)
    ledger = await duly.open_ledger(f"sqlite:///{path}")
    for some in batches(messages(most // 2), 500):  # a new message is two changes
        await ledger.admit_many(some)
    os.kill(os.getpid(), signal.SIGKILL)


def with_full_journal(path: Path) -> None:
    """Has the journal of a ledger filled by a process that is killed."""
    command = [sys.executable, "-m", "bench.restart", str(path)]
    ended = subprocess.run(command, timeout=FILLING_SECONDS, check=False).returncode
    if ended != -signal.SIGKILL:
        raise NoAnswer(f"the journal was not filled (code {ended})")


def on_disk(root: Path) -> int:
    """The bytes of the ledger's files."""
    return sum(path.stat().st_size for path in root.glob("ledger.db*"))


async def run(options: Options) -> Report:
    size, turns, seconds = options.pick((5_000, 2, 3.0), (1_000_000, 5, 10.0))
    with folder() as root:
        talking = await remembering(root / "full", size)
        full: list[float] = []
        empty: list[float] = []
        held: list[float] = []
        progress.plan(turns)
        for turn in range(turns):
            held.append(await kill_under_load(root / "full", talking, seconds) / 1e6)
            full.append(seconds_to_ready(root / "full"))
            empty.append(seconds_to_ready(root / f"empty{turn}"))
            progress.step(f"killed {turn + 1} times")
        await asyncio.to_thread(with_full_journal, root / "full" / "ledger.db")
        behind = seconds_to_ready(root / "full")
    what = f"kill -9 to ready, {size:,} commands"
    return Report(
        f"Start after kill -9 under load, {size:,} commands remembered",
        [
            figure("an empty hub to ready", Median(empty), "s"),
            figure(f"{what}, median", Median(full), "s", Median(empty), "an empty hub"),
            figure(f"{what}, worst", max(full), "s"),
            figure(f"a full journal to ready, {size:,} commands", behind, "s"),
            figure("the ledger on the disk", Median(held), "MB"),
        ],
    )


if __name__ == "__main__":
    asyncio.run(fill_journal(Path(sys.argv[1])))
