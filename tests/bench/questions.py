"""Questions that go wrong, and one that does not; each asked in a process of its own, as in the bench."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from bench.load import Pair, Work
from bench.measure import Options, Report, figure, progress
from bench.processes import Load, Server, load
from bench.servers import relay

PAIRS = [Pair("app-0", "lock-0", "app-0", "lock-0")]
SECONDS = 600.0
"""Much longer than a test waits: what ends the question is the death of a process."""


async def answers(options: Options) -> Report:
    """Is answered at once."""
    progress.plan(1)
    progress.step("one")
    return Report("Answers", [figure("rate", 42.0, "a second")])


async def load_dies(options: Options) -> Report:
    """The load is killed while it measures."""
    return await _killed(lambda child, server: child.process.pid)


async def server_dies(options: Options) -> Report:
    """The contender is killed while it is measured."""
    return await _killed(lambda child, server: server.pid)


async def makes_no_step(options: Options) -> Report:
    """Waits for ever."""
    await asyncio.Event().wait()
    return Report("Not reached")


async def serves_for_ever(options: Options) -> Report:
    """Starts a server, says which, and waits for ever."""
    with TemporaryDirectory() as place, relay("bare", Path(place)) as server:
        progress.step(str(server.pid))
        await asyncio.Event().wait()
    return Report("Not reached")


async def raises(options: Options) -> Report:
    """Finds that it can't be answered."""
    raise RuntimeError("the disk is full")


async def _killed(pid_of: Callable[[Load, Server], int]) -> Report:
    with TemporaryDirectory() as place, relay("bare", Path(place)) as server:
        async with load("-m", "bench.load", servers=[server]) as child:
            await child.tell(msgspec.json.encode(Work(server.url, PAIRS, 1, SECONDS)))
            os.kill(pid_of(child, server), signal.SIGKILL)
            await child.line(SECONDS)
    return Report("Not reached")
