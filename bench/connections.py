"""What do devices cost that are only there?

A hub with so many connected devices that nobody talks to, beside one without: memory by connection, and the
same load on both in turns. The idle ones answer the hub's pings, as idle ones do; that work counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import msgspec

from bench.gateway import accounts, measure
from bench.load import Pair, Work, allow_many_files
from bench.measure import Figure, Report, batches, folder, rounds
from bench.servers import hub

IN_ONE_PROCESS = 5_000
BOUND = 1_000_000_000


@contextlib.asynccontextmanager
async def connected(url: str, waiting: list[Pair]) -> AsyncIterator[None]:
    """These devices are there, in processes of their own."""
    children = []
    try:
        for some in batches(waiting, IN_ONE_PROCESS):
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bench.load",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            children.append(child)
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(msgspec.json.encode(Work(url, list(some), idle=True)) + b"\n")
            await child.stdin.drain()
            async with asyncio.timeout(120):
                there = int(await child.stdout.readline() or 0)
            if there != len(some):
                raise RuntimeError(f"{there} of {len(some)} devices could connect")
        yield
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            async with asyncio.timeout(30):
                if await child.wait():
                    raise RuntimeError("the hub hung up on idle devices")
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
                await child.wait()


async def run(quick: bool) -> Report:
    count, turns, seconds = (1_000, 3, 1.0) if quick else (10_000, 5, 1.5)
    allow_many_files()
    with folder() as place:
        talking, waiting = await accounts(place / "crowded", 1, count)
        few, _ = await accounts(place / "empty", 1)
        with hub("duly", place / "crowded") as crowded, hub("duly", place / "empty") as empty:
            before = crowded.memory
            async with connected(crowded.url, waiting):
                memory = crowded.memory

                async def with_them() -> float:
                    return (await measure(crowded.url, talking, 100, seconds)).rate

                async def without() -> float:
                    return (await measure(empty.url, few, 100, seconds)).rate

                rate = await rounds({"without": without, "with": with_them}, turns)
                afterwards = crowded.memory
    return Report(
        f"Connections: {count:,} idle devices",
        [
            Figure("memory of the hub, nobody there", before / 1e6, "MB"),
            Figure(f"memory, {count:,} idle devices", memory / 1e6, "MB", memory / BOUND, "1 GB", at_most=1),
            Figure("memory, after the load", afterwards / 1e6, "MB", afterwards / BOUND, "1 GB", at_most=1),
            Figure("memory per connection", (memory - before) / count / 1e3, "kB"),
            Figure("commands, c=100, nobody else there", rate["without"], "cmd/s"),
            Figure(
                f"commands, c=100, {count:,} idle devices",
                rate["with"],
                "cmd/s",
                rate["with"] / rate["without"],
                "nobody else",
                0.8,
            ),
        ],
        {"rates": rate},
    )
