"""What do devices cost that are only there?

A hub with so many connected devices that get no commands, beside one without: memory by connection, and the
same load on both in turns. The idle ones answer the hub's pings, as idle ones do; that work counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from bench.gateway import accounts, measure
from bench.load import Pair, Work, allow_many_files
from bench.measure import Options, Report, batches, figure, folder, progress, rounds
from bench.processes import Load, Server, load
from bench.servers import hub

IN_ONE_PROCESS = 5_000
CONNECTING = 120.0
"""Seconds that so many devices may take to connect."""


@contextlib.asynccontextmanager
async def connected(server: Server, waiting: list[Pair]) -> AsyncIterator[None]:
    """These devices are there, in processes of their own."""
    async with contextlib.AsyncExitStack() as running:
        children: list[Load] = []
        progress.plan(-(-len(waiting) // IN_ONE_PROCESS))
        for some in batches(waiting, IN_ONE_PROCESS):
            child = await running.enter_async_context(load("-m", "bench.load", servers=[server]))
            await child.tell(msgspec.json.encode(Work(server.url, list(some), idle=True)))
            there = int(await child.line(CONNECTING))
            if there != len(some):
                raise RuntimeError(f"{there} of {len(some)} devices could connect")
            children.append(child)
            progress.step(f"{there:,} devices connected")
        yield
        for child in children:
            assert child.process.stdin is not None
            child.process.stdin.close()
            if await child.process.wait():
                raise RuntimeError("the hub hung up on idle devices")


async def run(options: Options) -> Report:
    count, turns, seconds = options.pick((1_000, 3, 1.0), (10_000, 5, 1.5))
    allow_many_files()
    with folder() as root:
        talking, waiting = await accounts(root / "crowded", 1, count)
        few, _ = await accounts(root / "empty", 1)
        with hub(root / "crowded") as crowded, hub(root / "empty") as empty:
            before = crowded.memory
            async with connected(crowded, waiting):
                memory = crowded.memory

                async def with_them() -> float:
                    return (await measure(crowded, talking, 100, seconds)).rate

                async def without() -> float:
                    return (await measure(empty, few, 100, seconds)).rate

                rate = await rounds({"without": without, "with": with_them}, turns)
                afterwards = crowded.memory
    return Report(
        f"Connections: {count:,} idle devices",
        [
            figure("memory of the hub, nobody there", before / 1e6, "MB"),
            figure(f"memory, {count:,} devices", memory / 1e6, "MB"),
            figure("memory, after the load", afterwards / 1e6, "MB"),
            figure("memory per connection", (memory - before) / count / 1e3, "kB"),
            figure("commands, nobody else", rate["without"], "cmd/s"),
            figure(f"commands, {count:,} devices", rate["with"], "cmd/s", rate["without"], "nobody else"),
        ],
        dict(rate),
    )
