"""How many alerts a second are accepted, beside Prometheus Alertmanager; and how soon is somebody told?

Both get the same alerts through the same connections, both would tell of each alert for itself (Alertmanager:
`group_by: ['...']`), and both have nobody to tell (a receiver and a profile without addresses). duly has
stored an alert with a flush before it answers; Alertmanager keeps it in memory, and a kill -9 loses it. The
third question is duly's alone: from the post to the first webhook, at 100 a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

import duly
from bench.measure import Figure, Median, Report, folder
from bench.posts import Found, Work
from bench.servers import Server, free_port, hub, until_open
from duly.apps.alerts.profiles import ProfileDraft, Profiles
from duly.identity.accounts import Accounts, Role

SHAPES = {"1 connection": (1, 1), "16 connections": (16, 1), "100 per request": (4, 100)}
DULY, RIVAL = "duly", "Alertmanager"


@contextlib.contextmanager
def alertmanager(place: Path) -> Iterator[Server | None]:
    """With a receiver that tells nobody; None if it is not installed."""
    found = shutil.which("prometheus-alertmanager")
    if found is None:
        yield None
        return
    port = free_port()
    place.mkdir()
    (place / "config.yml").write_text(
        "route: { receiver: nobody, group_by: ['...'] }\nreceivers: [ { name: nobody } ]\n"
    )
    command = [
        found, f"--config.file={place}/config.yml", f"--storage.path={place}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        until_open(port, process)
        yield Server(f"http://127.0.0.1:{port}/api/v2/alerts", process.pid)
    finally:
        process.terminate()
        process.wait(10)


async def sentinel(place: Path) -> str:
    """A sentinel's token, and a profile that tells nobody."""
    await asyncio.to_thread(place.mkdir, exist_ok=True)
    async with await duly.open_ledger(f"sqlite:///{place}/ledger.db") as ledger:
        profiles = Profiles(ledger)
        await profiles.set("bench", ProfileDraft(nobody=True))
        return await Accounts(ledger).add(Role.SENTINEL, "gate")


async def post(work: Work) -> Found:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.posts", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(60 + work.seconds):
            child.stdin.write(msgspec.json.encode(work) + b"\n")
            if work.pace:
                hook = (await child.stdout.readline()).decode().strip()
                await tell(work, hook)
                child.stdin.write(b"\n")
            found = msgspec.json.decode(await child.stdout.readline(), type=Found)
            await child.wait()
            return found
    finally:
        if child.returncode is None:
            child.kill()


async def tell(work: Work, hook: str) -> None:
    """Have the hub tell this address, one by one."""
    import aiohttp

    draft = msgspec.json.encode({"send": [hook], "most": 0, "together": 0}).decode()
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            work.url.replace("/v1/messages", "/v1/admin/profile.set"),
            json={"name": "bench", "draft": draft},
            headers={"Authorization": f"Bearer {work.token}"},
        ) as answer,
    ):
        answer.raise_for_status()


async def run(quick: bool) -> Report:
    turns, seconds = (3, 1.0) if quick else (5, 2.0)
    notes: list[str] = []
    with contextlib.ExitStack() as running:
        place = running.enter_context(folder())
        places = (place / f"{n}" for n in itertools.count())
        home = next(places)
        token = await sentinel(home)
        tower = running.enter_context(hub("duly", home))
        servers = {DULY: tower}
        contenders = {DULY: (tower.url + "/v1/messages", token)}
        rival = running.enter_context(alertmanager(next(places)))
        if rival is None:
            notes.append("prometheus-alertmanager is not installed: no comparison with it")
        else:
            servers[RIVAL] = rival
            contenders[RIVAL] = (rival.url, "")
        rates: dict[tuple[str, str, bool], list[float]] = {}
        work_of: dict[tuple[str, str], list[float]] = {}
        for _ in range(turns):
            for shape, (connections, batch) in SHAPES.items():
                for repeats in (False, True):
                    for name, (url, who) in contenders.items():
                        gc.collect()
                        kind = "alertmanager" if name == RIVAL else "duly"
                        work = Work(url, kind, who, connections, batch, seconds, repeats)
                        before = servers[name].worked
                        found = await post(work)
                        if not repeats:
                            used = (servers[name].worked - before) / max(1, found.count) * 1e6
                            work_of.setdefault((name, shape), []).append(used)
                        if found.refused:
                            raise RuntimeError(f"{name} refused {found.refused} requests")
                        rates.setdefault((name, shape, repeats), []).append(found.rate)
        url, _ = contenders[DULY]
        admin = msgspec.json.decode((home / "hub.json").read_bytes())["token"]
        soon = await post(Work(url, "duly", admin, seconds=3.0 if quick else 10.0, pace=100))
    rate = {key: Median(values) for key, values in rates.items()}
    figures: list[Figure] = []
    for shape in SHAPES:
        new, again = rate[DULY, shape, False], rate[DULY, shape, True]
        if rival is not None:
            other, other_again = rate[RIVAL, shape, False], rate[RIVAL, shape, True]
            figures.append(Figure(f"{RIVAL}, {shape}, new", other, "alerts/s"))
            figures.append(Figure(f"{RIVAL}, {shape}, repeats", other_again, "alerts/s"))
            figures.append(Figure(f"duly, {shape}, new", new, "alerts/s", new / other, RIVAL, 1))
        else:
            figures.append(Figure(f"duly, {shape}, new", new, "alerts/s"))
        figures.append(Figure(f"duly, {shape}, repeats", again, "alerts/s", again / new, "new", 2))
    figures += [
        Figure(f"{name}, {shape}, new, processor time", Median(found), "µs/alert")
        for (name, shape), found in work_of.items()
    ]
    figures.append(Figure("post to webhook, 100/s, p50", soon.p50, "ms", soon.p50 / 10, "10 ms", at_most=1))
    figures.append(Figure("post to webhook, 100/s, p99", soon.p99, "ms"))
    if soon.refused:
        notes.append(f"{soon.refused} webhooks did not come")
    return Report("Alerts accepted", figures, {"rates": {str(k): v for k, v in rate.items()}}, notes)
