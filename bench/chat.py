"""What does a line cost, from one person to another, beside the servers people use?

Prosody and ejabberd as Debian packages them, each with and without its archive; none of the four flushes
anything to the disk. duly stores every line with a flush before it is acknowledged or told. The people are
one process with the same bare sockets for all (`bench.chat_load`).

A group of a thousand is compared with a bare aiohttp broadcast, which keeps nothing; the drain of ten
thousand lines with what the others do at login; and duly with itself, as what it has stored grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from msgspec import Struct

import duly
from bench.chat_load import Found, Person, Work
from bench.measure import Figure, Median, Report, folder
from bench.servers import Server, hub
from bench.xmpp import ejabberd, prosody
from duly.apps.chat import conversations as c
from duly.core.messages import Message
from duly.core.operations import PutItem, Write
from duly.core.units import FOREVER
from duly.identity.accounts import Accounts, Role
from duly.wire.frames import Frame

PEOPLE = 100
CROWD = 1_000
LINES = 10_000

Running = Callable[[Path], AbstractContextManager[Server | None]]


async def load(work: Work) -> Found:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.chat_load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(msgspec.json.encode(work) + b"\n")
    return msgspec.json.decode(out, type=Found)


def duly_hub(place: Path) -> AbstractContextManager[Server]:
    return hub("duly", place)


RIVALS: dict[str, Running] = {
    "Prosody": lambda place: prosody(place, archive=False),
    "Prosody with archive": lambda place: prosody(place, archive=True),
    "ejabberd": lambda place: ejabberd(place, archive=False),
    "ejabberd with archive": lambda place: ejabberd(place, archive=True),
}


async def people(place: Path, count: int, *, group: str = "", stored: int = 0) -> list[Person]:
    """Accounts in a hub's ledger, in a group if one is named, beside so many lines of others."""
    await asyncio.to_thread(place.mkdir, exist_ok=True)
    async with await duly.open_ledger(f"sqlite:///{place}/ledger.db") as ledger:
        book = Accounts(ledger)
        found = [Person(f"u{i}", await book.add(Role.USER, f"u{i}")) for i in range(count)]
        if group:
            writes: list[Write] = [PutItem(c.GROUPS, group, b'{"name":"crowd","made_by":"u0"}')]
            for person in found:
                writes += (
                    PutItem(c.members(group), person.name, c.Rank.MEMBER.body),
                    PutItem(c.convs(person.name), group, b""),
                )
            await ledger.write(*writes)
        for start in range(0, stored, 2_000):
            await ledger.commit([_old(i, count) for i in range(start, min(stored, start + 2_000))])
    return found


def _old(i: int, count: int) -> tuple[Write, ...]:
    """A line from before, of people who read everything since."""
    sender, other = f"old{i % count}", f"old{(i + 1) % count}"
    ms = 1_700_000_000_000 + i
    message = Message(sender, f"{ms}_{i}", "one_chat", other, b"x" * 16)
    line = c.line_of(Frame("one_chat", message.id, data=msgspec.Raw(b'{"text":"%b"}' % (b"x" * 110))), sender)
    return c.Request(message, c.direct(sender, other), line).writes(FOREVER, ms * 1000)


# ── talking ──────────────────────────────────────────────────────────────────────────────────────


class Talked(Struct):
    """What one round of one contender came to, with the processor time of its server for each line."""

    rate: float
    p99: float
    cost: float


async def talk(place: Path, rounds: int, seconds: float) -> dict[str, list[Talked]]:
    """Everybody takes turns; whoever is not measured sits idle."""
    found: dict[str, list[Talked]] = {}
    with contextlib.ExitStack() as stack:
        servers: dict[str, tuple[Server, list[Person]]] = {}
        ours = await people(place / "duly", PEOPLE)
        servers["duly"] = (stack.enter_context(duly_hub(place / "duly")), ours)
        for i, (name, running) in enumerate(RIVALS.items()):
            server = stack.enter_context(running(place / f"rival{i}"))
            if server is not None:
                servers[name] = (server, [Person(f"u{n}") for n in range(PEOPLE)])
        for _ in range(rounds):
            for name, (server, who) in servers.items():
                gc.collect()
                before = server.worked
                one = await load(Work(server.url, who, seconds=seconds))
                cost = (server.worked - before) / one.all * 1e6
                found.setdefault(name, []).append(Talked(one.rate, one.p99, cost))
    return found


def talked(found: dict[str, list[Talked]]) -> list[Figure]:
    rates = {name: Median([one.rate for one in each]) for name, each in found.items()}
    lates = {name: Median([one.p99 for one in each]) for name, each in found.items()}
    bounds = {"Prosody": 1.0, "Prosody with archive": 4.0}
    figures = []
    for name, rate in rates.items():
        figures.append(Figure(f"{name}, delivered", rate, "a second"))
        figures.append(Figure(f"{name}, p99", lates[name], "ms"))
        cost = Median([one.cost for one in found[name]])
        figures.append(Figure(f"{name}, a line", cost, "µs of processor"))
    for name, rate in rates.items():
        if name != "duly":
            least = bounds.get(name)
            figures.append(
                Figure("duly", rates["duly"], "a second", rates["duly"] / rate, name, at_least=least)
            )
    if "Prosody" in rates:
        ratio = lates["duly"] / lates["Prosody"]
        figures.append(Figure("duly, p99", lates["duly"], "ms", ratio, "Prosody", at_most=1.0))
    return figures


# ── a crowd ──────────────────────────────────────────────────────────────────────────────────────


async def crowd(place: Path, rounds: int, seconds: float) -> list[Figure]:
    group = "#crowd"
    who = await people(place / "crowd", CROWD, group=group)
    rates: dict[str, list[float]] = {"duly": [], "bare broadcast": []}
    with duly_hub(place / "crowd") as ours, hub("broadcast", place / "bare") as bare:
        for _ in range(rounds):
            for name, url in (("duly", ours.url), ("bare broadcast", bare.url.replace("http:", "bare:"))):
                work = Work(url, who, "crowd", seconds, group=group)
                rates[name].append((await load(work)).rate)
    ours_rate, bare_rate = Median(rates["duly"]), Median(rates["bare broadcast"])
    ratio = ours_rate / bare_rate
    return [
        Figure(f"a group of {CROWD:,}: bare broadcast", bare_rate, "deliveries a second"),
        Figure(f"a group of {CROWD:,}: duly", ours_rate, "deliveries a second", ratio, "bare", at_least=0.5),
    ]


# ── coming back ──────────────────────────────────────────────────────────────────────────────────


async def drain(place: Path, rounds: int) -> list[Figure]:
    rates: dict[str, list[float]] = {}
    for i in range(rounds):
        ours = place / f"drain{i}"
        who = await people(ours, 2)
        with duly_hub(ours) as server:
            work = Work(server.url, who, "drain", 2.0, LINES)
            rates.setdefault("duly", []).append((await load(work)).rate)
        for k, (name, running) in enumerate(RIVALS.items()):
            if "archive" in name:
                continue
            with running(place / f"drain{i}-{k}") as server:
                if server is not None:
                    work = Work(server.url, [Person("u0"), Person("u1")], "drain", 6.0, LINES)
                    rates.setdefault(name, []).append((await load(work)).rate)
    figures = [
        Figure(f"{LINES:,} lines at login: {name}", Median(r), "a second") for name, r in rates.items()
    ]
    if "ejabberd" in rates:
        ratio = statistics.median(rates["duly"]) / statistics.median(rates["ejabberd"])
        figures.append(
            Figure("duly at login", Median(rates["duly"]), "a second", ratio, "ejabberd", at_least=1.0)
        )
    return figures


# ── growth ───────────────────────────────────────────────────────────────────────────────────────


async def growth(
    place: Path, rounds: int, seconds: float, largest: int
) -> tuple[list[Figure], list[list[float]]]:
    """Processor time of the hub per line, by how many lines it has stored."""
    sizes = [10**3, largest]
    servers: list[tuple[Server, list[Person]]] = []
    costs: list[list[float]] = [[] for _ in sizes]
    with contextlib.ExitStack() as stack:
        for size in sizes:
            at = place / f"grown{size}"
            who = await people(at, PEOPLE, stored=size)
            servers.append((stack.enter_context(duly_hub(at)), who))
        for _ in range(rounds):
            for cost, (server, who) in zip(costs, servers, strict=True):
                before = server.worked
                found = await load(Work(server.url, who, seconds=seconds))
                cost.append((server.worked - before) / found.all * 1e6)
    small, large = (Median(cost) for cost in costs)
    figures = [
        Figure(f"a line, {sizes[0]:,} stored", small, "µs of processor"),
        Figure(
            f"a line, {largest:,} stored", large, "µs of processor", large / small, "at 1,000", at_most=1.3
        ),
    ]
    return figures, [[float(size), cost] for size, cost in zip(sizes, (small, large), strict=True)]


async def run(quick: bool) -> Report:
    rounds, seconds = (3, 2.0) if quick else (5, 4.0)
    report = Report("Chat: 100 people, one line each under way; a group; coming back; growth")
    with folder() as place:
        report.figures += talked(await talk(place, rounds, seconds))
        report.figures += await crowd(place, rounds, seconds)
        report.figures += await drain(place, min(rounds, 3))
        figures, series = await growth(place, rounds, seconds, 10**5 if quick else 10**6)
        report.figures += figures
        report.series["growth"] = series
    report.notes.append("duly flushes every line to the disk first; the others flush nothing.")
    return report
