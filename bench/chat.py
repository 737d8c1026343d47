"""What does a line cost, from one person to another, beside the servers people use?

Prosody and ejabberd as Debian packages them, each with and without its archive; none of the four flushes
anything to the disk. duly stores every line with a flush before it is acknowledged or told. The people are
one process with the same bare sockets for all (`bench.chat_load`).

A group of a thousand is compared with a bare aiohttp broadcast, which keeps nothing; the drain of ten
thousand lines with what the others do at login; and duly with itself, as what it has stored grows. Last, two
hubs on PostgreSQL and Redis, with every line going from one to the other: what they ask of those servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from msgspec import Struct

import duly
from bench.chat_load import Found, Person, Work
from bench.gateway import CLIENT_BOUND
from bench.measure import Figure, Median, Options, Report, figure, folder, progress
from bench.processes import Server, answer_of
from bench.servers import hub, postgres_server, redis_server, relay, shared_hub
from bench.xmpp import ejabberd, prosody
from duly.apps.chat import conversations as c
from duly.core.operations import PutItem, Write
from duly.identity.accounts import Accounts, Role

PEOPLE = 100
CROWD = 1_000
LINES = 10_000
AT_A_TIME = 5.0
"""Seconds of lines between two looks at how many are stored."""

Running = Callable[[Path], AbstractContextManager[Server | None]]


async def load(work: Work, *servers: Server) -> Found:
    """What the people find at these servers."""
    found = await answer_of(
        "-m", "bench.chat_load", work=msgspec.json.encode(work), seconds=work.seconds, servers=servers
    )
    return msgspec.json.decode(found, type=Found)


RIVALS: dict[str, Running] = {
    "Prosody": lambda root: prosody(root, archive=False),
    "Prosody with archive": lambda root: prosody(root, archive=True),
    "ejabberd": lambda root: ejabberd(root, archive=False),
    "ejabberd with archive": lambda root: ejabberd(root, archive=True),
}


async def people(root: Path, count: int, *, group: str = "", ledger: str = "") -> list[Person]:
    """Accounts in a hub's ledger, in a group if one is named."""
    await asyncio.to_thread(root.mkdir, 0o700, exist_ok=True)
    async with await duly.open_ledger(ledger or f"sqlite:///{root}/ledger.db") as opened:
        book = Accounts(opened)
        found = [Person(f"u{i}", await book.add(Role.USER, f"u{i}")) for i in range(count)]
        if group:
            writes: list[Write] = [PutItem(c.GROUPS, group, b'{"name":"crowd","made_by":"u0"}')]
            for person in found:
                writes += (
                    PutItem(c.members(group), person.name, c.Rank.MEMBER.body),
                    PutItem(c.convs(person.name), group, b""),
                )
            await opened.write(*writes)
    return found


# ── talking ──────────────────────────────────────────────────────────────────────────────────────


class Talked(Struct):
    """What one round of one contender came to, with the processor time of its server for each line."""

    rate: float
    p99: float
    cost: float
    busy: float


async def talk(root: Path, rounds: int, seconds: float, notes: list[str]) -> dict[str, list[Talked]]:
    """All servers take turns; the others are idle meanwhile."""
    found: dict[str, list[Talked]] = {}
    with contextlib.ExitStack() as stack:
        servers: dict[str, tuple[Server, list[Person]]] = {}
        ours = await people(root / "duly", PEOPLE)
        servers["duly"] = (stack.enter_context(hub(root / "duly")), ours)
        for i, (name, running) in enumerate(RIVALS.items()):
            server = stack.enter_context(running(root / f"rival{i}"))
            if server is None:
                notes.append(f"{name} is not installed: no comparison with it")
            else:
                servers[name] = (server, [Person(f"u{n}") for n in range(PEOPLE)])
        progress.plan(rounds * len(servers))
        for _, (name, (at, who)) in itertools.product(range(rounds), servers.items()):
            gc.collect()
            before = at.worked
            one = await load(Work(at.url, who, seconds=seconds), at)
            cost = (at.worked - before) / one.all * 1e6
            found.setdefault(name, []).append(Talked(one.rate, one.p99, cost, one.busy))
            progress.step(name)
    bound = [name for name, each in found.items() if Median([one.busy for one in each]) > CLIENT_BOUND]
    if bound:
        notes.append(f"the client is the limit of: {', '.join(bound)}")
    return found


def talked(found: dict[str, list[Talked]]) -> list[Figure]:
    """duly beside the others."""
    rates = {name: Median([one.rate for one in each]) for name, each in found.items()}
    lates = {name: Median([one.p99 for one in each]) for name, each in found.items()}
    others = [name for name in found if name != "duly"]
    figures: list[Figure] = []
    for name in others or ["duly"]:
        figures.append(figure(f"{name}, delivered", rates[name], "a second"))
        figures.append(figure(f"{name}, p99", lates[name], "ms"))
    figures += [figure("duly, delivered", rates["duly"], "a second", rates[name], name) for name in others]
    figures += [figure("duly, p99", lates["duly"], "ms", lates[name], name) for name in others]
    figures += [
        figure(f"{name}, a line", Median([one.cost for one in each]), "µs of processor")
        for name, each in found.items()
    ]
    return figures


# ── a crowd ──────────────────────────────────────────────────────────────────────────────────────


async def crowd(root: Path, rounds: int, seconds: float) -> list[Figure]:
    """A group of a thousand who are here."""
    group = "#crowd"
    who = await people(root / "crowd", CROWD, group=group)
    rates: dict[str, list[float]] = {"duly": [], "bare broadcast": []}
    progress.plan(2 * rounds)
    with hub(root / "crowd") as ours, relay("broadcast", root / "bare") as bare:
        for _ in range(rounds):
            for name, server in (("duly", ours), ("bare broadcast", bare)):
                url = server.url.replace("http:", "bare:") if server is bare else server.url
                found = await load(Work(url, who, "crowd", seconds, group=group), server)
                rates[name].append(found.rate)
                progress.step(f"a group, {name}")
    base, ours_rate = Median(rates["bare broadcast"]), Median(rates["duly"])
    return [
        figure("bare broadcast, a group of 1,000", base, "deliveries a second"),
        figure("duly, a group of 1,000", ours_rate, "deliveries a second", base, "bare broadcast"),
    ]


# ── coming back ──────────────────────────────────────────────────────────────────────────────────


async def drain(root: Path, rounds: int) -> list[Figure]:
    """Ten thousand lines for a person who comes back."""
    rates: dict[str, list[float]] = {}
    others = {name: running for name, running in RIVALS.items() if "archive" not in name}
    progress.plan(rounds)
    for i in range(rounds):
        ours = root / f"drain{i}"
        who = await people(ours, 2)
        with hub(ours) as server:
            found = await load(Work(server.url, who, "drain", 2.0, LINES), server)
            rates.setdefault("duly", []).append(found.rate)
        for k, (name, running) in enumerate(others.items()):
            with running(root / f"drain{i}-{k}") as other:
                if other is not None:
                    work = Work(other.url, [Person("u0"), Person("u1")], "drain", 6.0, LINES)
                    rates.setdefault(name, []).append((await load(work, other)).rate)
        progress.step("lines at login")
    medians = {name: Median(found) for name, found in rates.items()}
    what = f"{LINES:,} lines at login"
    compared = [name for name in medians if name != "duly"]
    figures = [figure(f"{name}, {what}", medians[name], "a second") for name in compared or ["duly"]]
    return figures + [
        figure(f"duly, {what}", medians["duly"], "a second", medians[name], name) for name in compared
    ]


# ── growth ───────────────────────────────────────────────────────────────────────────────────────


async def stored(root: Path, size: int) -> list[Person]:
    """Fills a hub's folder with so many lines, and ends the hub."""
    who = await people(root, PEOPLE)
    done = 0
    with hub(root) as server:
        while done < size:
            progress.plan(1)
            seconds = 0.2 if size <= 1_000 else AT_A_TIME
            done += (await load(Work(server.url, who, seconds=seconds), server)).all
            progress.step(f"{done:,} of {size:,} lines")
    return who


async def growth(root: Path, rounds: int, seconds: float, largest: int) -> list[Figure]:
    """Processor time of the hub per line and its memory, by how many lines it has stored."""
    sizes = [1_000, largest]
    costs: list[list[float]] = [[] for _ in sizes]
    with contextlib.ExitStack() as stack:
        servers: list[tuple[Server, list[Person]]] = []
        for size in sizes:
            who = await stored(root / f"grown{size}", size)
            servers.append((stack.enter_context(hub(root / f"grown{size}")), who))
        progress.plan(rounds * len(sizes))
        for _ in range(rounds):
            for cost, (server, who) in zip(costs, servers, strict=True):
                before = server.worked
                found = await load(Work(server.url, who, seconds=seconds), server)
                cost.append((server.worked - before) / found.all * 1e6)
                progress.step("growth")
        small_memory, large_memory = (server.memory for server, _ in servers)
    small, large = (Median(cost) for cost in costs)
    per_id = (large_memory - small_memory) / (largest - sizes[0])
    return [
        figure("a line, 1,000 stored", small, "µs of processor"),
        figure("a line, most stored", large, "µs of processor", small, "at 1,000"),
        figure("memory, 1,000 stored", small_memory / 1e6, "MB"),
        figure("memory, most stored", large_memory / 1e6, "MB", small_memory / 1e6, "at 1,000"),
        figure("memory per remembered id", per_id, "bytes"),
    ]


# ── what is asked of PostgreSQL and Redis ────────────────────────────────────────────────────────

SETTLING = 1.5
"""Seconds until PostgreSQL has counted what its sessions did: they tell it once a second."""


class Asked(Struct):
    """What PostgreSQL and Redis have done so far, and the processor time of all, in seconds."""

    transactions: float
    commands: float
    postgres: float
    redis: float
    hubs: float


async def asked(postgres: Server, redis: Server, hubs: list[Server]) -> Asked:
    """Reads their own counters."""
    import asyncpg
    from redis.asyncio import Redis

    await asyncio.sleep(SETTLING)
    link = await asyncpg.connect(postgres.url)
    try:
        transactions = await link.fetchval("SELECT sum(xact_commit) FROM pg_stat_database")
    finally:
        await link.close()
    async with Redis.from_url(redis.url) as client:
        commands = (await client.info("stats"))["total_commands_processed"]
    used = sum(server.worked for server in hubs)
    return Asked(float(transactions), float(commands), postgres.worked, redis.worked, used)


async def asked_per_line(root: Path, seconds: float, notes: list[str]) -> list[Figure]:
    """Two hubs; each line goes from one to the other."""
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        redis = stack.enter_context(redis_server(root / "redis"))
        if postgres is None or redis is None:
            notes.append("PostgreSQL or Redis is not installed: what hubs ask of them was not measured")
            return []
        who = await people(root / "shared", PEOPLE, ledger=postgres.url)
        notifier = ("--notifier", redis.url)
        hubs = [
            stack.enter_context(shared_hub(root / "shared" / f"{n}", postgres.url, *notifier))
            for n in range(2)
        ]
        progress.plan(1)
        first = await asked(postgres, redis, hubs)
        work = Work(hubs[0].url, who, seconds=seconds, other_url=hubs[1].url)
        found = await load(work, *hubs, postgres, redis)
        then = await asked(postgres, redis, hubs)
        progress.step("PostgreSQL and Redis")
    transactions = (then.transactions - first.transactions) / found.all
    commands = (then.commands - first.commands) / found.all
    return [
        figure("two hubs on PostgreSQL and Redis, delivered", found.rate, "a second"),
        figure("asked of PostgreSQL", transactions * found.rate, "transactions a second"),
        figure("asked of PostgreSQL per line", transactions, "transactions"),
        figure("asked of Redis", commands * found.rate, "commands a second"),
        figure("asked of Redis per line", commands, "commands"),
        figure("PostgreSQL, a line", (then.postgres - first.postgres) / found.all * 1e6, "µs of processor"),
        figure("Redis, a line", (then.redis - first.redis) / found.all * 1e6, "µs of processor"),
        figure("the two hubs, a line", (then.hubs - first.hubs) / found.all * 1e6, "µs of processor"),
    ]


async def run(options: Options) -> Report:
    rounds, seconds = options.pick((3, 1.5), (5, 4.0))
    report = Report("Chat: 100 people, one line each under way; a group; coming back; growth")
    notes = ["duly flushes every line to the disk first; the others flush nothing"]
    with folder() as root:
        report.figures = [
            *talked(await talk(root, rounds, seconds, notes)),
            *await crowd(root, rounds, seconds),
            *await drain(root, options.pick(1, 3)),
            *await growth(root, rounds, seconds, options.pick(20_000, 1_000_000)),
            *await asked_per_line(root, 2 * seconds, notes),
        ]
    report.notes = notes
    return report
