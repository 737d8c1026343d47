"""How many alerts a second are accepted, beside Prometheus Alertmanager; and how soon is a recipient told?

Both get the same alerts through the same connections, both would tell of each alert for itself (Alertmanager:
`group_by: ['...']`), and neither has a recipient to tell (a receiver and a profile without addresses). duly
has stored an alert with a flush before it answers; Alertmanager keeps it in memory, and a kill -9 loses it.
The third question is duly's alone: from the post to the first webhook, at 100 a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

import duly
from bench.gateway import CLIENT_BOUND
from bench.measure import Figure, Median, Options, Report, figure, folder, progress
from bench.posts import Found, Work
from bench.processes import GRACE, Server, load
from bench.servers import free_port, hub, running, until_open
from duly.apps.alerts.profiles import ProfileDraft, Profiles
from duly.identity.accounts import Accounts, Role

SHAPES = {"1 connection": (1, 1), "16 connections": (16, 1), "100 per request": (4, 100)}
DULY, RIVAL = "duly", "Alertmanager"


@contextlib.contextmanager
def alertmanager(root: Path) -> Iterator[Server | None]:
    """With a receiver that tells no recipient; None if it is not installed."""
    found = shutil.which("prometheus-alertmanager")
    if found is None:
        yield None
        return
    port = free_port()
    root.mkdir()
    (root / "config.yml").write_text(
        "route: { receiver: nobody, group_by: ['...'] }\nreceivers: [ { name: nobody } ]\n"
    )
    command = [
        found, f"--config.file={root}/config.yml", f"--storage.path={root}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    with running(process):
        until_open(port, process, RIVAL)
        yield Server(f"http://127.0.0.1:{port}/api/v2/alerts", process.pid, RIVAL)


async def sentinel(root: Path) -> str:
    """A sentinel's token, and a profile without recipients."""
    await asyncio.to_thread(root.mkdir, exist_ok=True)
    async with await duly.open_ledger(f"sqlite:///{root}/ledger.db") as ledger:
        profiles = Profiles(ledger)
        await profiles.set("bench", ProfileDraft(nobody=True))
        return await Accounts(ledger).add(Role.SENTINEL, "gate")


async def post(work: Work, server: Server) -> Found:
    """What the load finds at this server."""
    within = GRACE + work.seconds
    async with load("-m", "bench.posts", servers=[server]) as child:
        await child.tell(msgspec.json.encode(work))
        if work.pace:
            hook = await child.line(within, begins=b"http")
            await tell(work, hook.decode())
            await child.tell(b"")
        return msgspec.json.decode(await child.line(within, begins=b"{"), type=Found)


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


Rates = dict[tuple[str, str, bool], list[float]]
Costs = dict[tuple[str, str], list[float]]


async def run(options: Options) -> Report:
    turns, seconds = options.pick((3, 1.0), (5, 2.0))
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(folder())
        roots = (root / f"{n}" for n in itertools.count())
        home = next(roots)
        token = await sentinel(home)
        tower = stack.enter_context(hub(home, "--allow-private-webhooks"))
        posts = f"{tower.url}/v1/messages"
        contenders = {DULY: (tower, posts, token)}
        rival = stack.enter_context(alertmanager(next(roots)))
        if rival is None:
            notes.append("prometheus-alertmanager is not installed: no comparison with it")
        else:
            contenders[RIVAL] = (rival, rival.url, "")
        rates: Rates = {}
        costs: Costs = {}
        busy: set[str] = set()
        progress.plan(turns * len(SHAPES) * 2 * len(contenders) + 1)
        for _, (shape, (connections, batch)), repeats, (name, (server, url, who)) in itertools.product(
            range(turns), SHAPES.items(), (False, True), contenders.items()
        ):
            gc.collect()
            kind = "alertmanager" if name == RIVAL else "duly"
            before = server.worked
            found = await post(Work(url, kind, who, connections, batch, seconds, repeats), server)
            if found.refused:
                raise RuntimeError(f"{name} refused {found.refused} requests")
            if not repeats:
                used = (server.worked - before) / max(1, found.count) * 1e6
                costs.setdefault((name, shape), []).append(used)
            if found.busy > CLIENT_BOUND:
                busy.add(f"{name}, {shape}, {'repeats' if repeats else 'new'}")
            rates.setdefault((name, shape, repeats), []).append(found.rate)
            progress.step(f"{name}, {shape}")
        admin = msgspec.json.decode((home / "hub.json").read_bytes())["token"]
        soon = await post(Work(posts, "duly", admin, seconds=options.pick(3.0, 10.0), pace=100), tower)
        progress.step("post to webhook")
    if busy:
        notes.append(f"the client is the limit of: {'; '.join(sorted(busy))}")
    if soon.refused:
        notes.append(f"{soon.refused} webhooks did not come")
    rate = {key: Median(values) for key, values in rates.items()}
    named = {
        f"{name}, {shape}{', repeats' if again else ''}": value
        for (name, shape, again), value in rate.items()
    }
    return Report("Alerts accepted", [*figures(rate, costs), *webhook(soon)], dict(named), notes=notes)


def figures(rate: dict[tuple[str, str, bool], Median], costs: Costs) -> list[Figure]:
    """Alerts a second in each shape, beside Alertmanager; repeats beside new ones."""
    made: list[Figure] = []
    for shape in SHAPES:
        new, again = rate[DULY, shape, False], rate[DULY, shape, True]
        other = rate.get((RIVAL, shape, False))
        if other is not None:
            made.append(figure(f"{RIVAL}, {shape}, new", other, "alerts/s"))
            made.append(figure(f"{RIVAL}, {shape}, repeats", rate[RIVAL, shape, True], "alerts/s"))
        made.append(figure(f"duly, {shape}, new", new, "alerts/s", other, RIVAL if other is not None else ""))
        made.append(figure(f"duly, {shape}, repeats", again, "alerts/s", new, "new"))
    made += [
        figure(f"{name}, {shape}, new, processor time", Median(found), "µs/alert")
        for (name, shape), found in costs.items()
    ]
    return made


def webhook(soon: Found) -> list[Figure]:
    """How soon the webhook of an alert is there."""
    return [
        figure("post to webhook, 100/s, p50", soon.p50, "ms"),
        figure("post to webhook, 100/s, p99", soon.p99, "ms"),
    ]
