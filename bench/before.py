"""Is the program faster than it was? One hub of this tree and one of an earlier revision, taking turns.

`--before REV` names the revision; its files are unpacked into a folder of their own, and its hub runs with
the same Python and the same libraries. Both are used through what both have: the command line and the
wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

from bench.gateway import measure, pairs
from bench.load import Found, Pair
from bench.measure import ROOT, Figure, Median, Options, Report, figure, folder, progress
from bench.processes import Server
from bench.servers import hub, postgres_server

APPS, DEPTH = 4, 25
"""On PostgreSQL: a hundred under way, from four apps."""
NOW, BEFORE = "now", "before"

Hubs = dict[str, tuple[Server, list[Pair]]]


async def command(source: Path | None, *args: str) -> str:
    """What `duly` of that version prints; the tree of this run if no source is named."""
    env = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "duly", *args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    try:
        async with asyncio.timeout(60):
            out, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise RuntimeError(f"'duly {' '.join(args[:3])}' failed: {out.decode()[-300:]}")
    return out.decode()


async def accounts(source: Path | None, count: int, where: list[str]) -> list[Pair]:
    """Apps and devices, made by the command line of that version."""
    made = pairs(count)
    for pair in made:
        tokens = []
        for kind, name in (("app", pair.app), ("device", pair.device)):
            found = re.search(r"duly_[\w-]{20,}", await command(source, "add", kind, name, *where))
            if found is None:
                raise RuntimeError(f"'duly add {kind} {name}' printed no token")
            tokens.append(found[0])
        pair.app_token, pair.device_token = tokens
        await command(source, "grant", pair.app, pair.device, *where)
    return made


def unpack(revision: str, root: Path) -> Path:
    """The source of a revision. A copy needs no clearing up in the repository, however the run ends."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise RuntimeError(f"there is no revision {revision!r}: {archive.stderr.decode().strip()}")
    root.mkdir()
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive.stdout, check=True)
    return root / "src"


async def take_turns(hubs: Hubs, depth: int, turns: int, seconds: float, what: str) -> list[Figure]:
    """Rates, processor time of the hub, and what a command takes by itself; now beside before."""
    rates: dict[str, list[float]] = {name: [] for name in hubs}
    costs: dict[str, list[float]] = {name: [] for name in hubs}
    waits: dict[str, list[float]] = {name: [] for name in hubs}
    progress.plan(turns * len(hubs))
    for _ in range(turns):
        for name, (server, talking) in hubs.items():
            gc.collect()
            before = server.worked
            found: Found = await measure(server, talking, depth, seconds)
            costs[name].append((server.worked - before) / found.count * 1e6)
            rates[name].append(found.rate)
            waits[name].append((await measure(server, talking[:1], 1, seconds / 2)).p50)
            progress.step(f"{what}, {name}")
    figures: list[Figure] = []
    for suffix, unit, values in (
        ("", "cmd/s", rates),
        (", processor time", "µs/cmd", costs),
        (", c=1, p50", "ms", waits),
    ):
        base, value = Median(values[BEFORE]), Median(values[NOW])
        figures.append(figure(f"before, {what}{suffix}", base, unit))
        figures.append(figure(f"duly, {what}{suffix}", value, unit, base, BEFORE))
    return figures


async def run(options: Options) -> Report:
    title = f"Now and before ({options.before or 'no revision'}), taking turns"
    if not options.before:
        return Report(title, notes=["name a revision with --before REV to compare this program with it"])
    turns, seconds = options.pick((3, 1.0), (7, 2.0))
    figures: list[Figure] = []
    notes: list[str] = []
    with folder() as root:
        source = unpack(options.before, root / "source")
        versions = {BEFORE: source, NOW: None}
        with contextlib.ExitStack() as running:
            hubs: Hubs = {}
            for name, path in versions.items():
                talking = await accounts(path, 1, ["--data", str(root / name)])
                hubs[name] = (running.enter_context(hub(root / name, source=path)), talking)
            figures += await take_turns(hubs, 100, turns, seconds, "1 app × 100")
        with contextlib.ExitStack() as running:
            hubs = {}
            for name, path in versions.items():
                postgres = running.enter_context(postgres_server())
                if postgres is None:
                    notes.append("postgresql is not installed: one hub on it was not compared")
                    break
                where = ["--data", str(root / f"{name}-pg"), "--ledger", postgres.url]
                talking = await accounts(path, APPS, where)
                server = running.enter_context(hub(root / f"{name}-pg", *where[2:], source=path))
                hubs[name] = (server, talking)
            if len(hubs) == len(versions):
                figures += await take_turns(hubs, DEPTH, turns, seconds, "one hub on PostgreSQL")
    return Report(title, figures, notes=notes)
