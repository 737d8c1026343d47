"""Measures what a command and a connected device cost on PostgreSQL, and prints what so many devices need.

python -m bench.scale [--quick] [--devices N] [--commands-an-hour N] [--json]

Costs are processor time of the hub and of PostgreSQL, read from the kernel, and PostgreSQL's own counters;
they do not depend on what else runs on the machine as rates do. The model (`bench.scale_model`) is checked in
the same run: a command costs less the more of them share a transaction, so a light and a heavy load together
say what one in between costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from contextlib import AbstractContextManager

import asyncpg
import msgspec
from msgspec import Struct

from bench.connections import connected
from bench.gateway import accounts, measure
from bench.load import Pair, allow_many_files
from bench.measure import folder
from bench.processes import Server
from bench.scale_model import Demand, MeasuredCosts, between_of, largest_group, needs, shards
from bench.servers import postgres_server, shared_hub

APPS = 10
SETTLING = 5.0
"""Seconds after which what starting and connecting have caused is over."""
LEAVING = 15.0
"""Seconds after which the hub has stored that the devices have left."""
DEPTHS = (1, 3, 10)
"""Commands that each app has under way: a light, a middling and a heavy load."""
COUNTERS = """
    SELECT w.wal_bytes::bigint, d.xact_commit, d.tup_inserted + d.tup_updated + d.tup_deleted,
           pg_database_size(current_database())
    FROM pg_stat_wal w, pg_stat_database d WHERE d.datname = current_database()
"""


class LoadCost(Struct):
    """What one load has cost, for each of its commands."""

    rate: float
    hub_us: float
    postgres_us: float
    wal_bytes: float
    commits: float
    rows: float
    stored_bytes: float


async def counters(url: str) -> tuple[int, ...]:
    """PostgreSQL's own counters, as they are when every process of it has told its own."""
    await asyncio.sleep(1.5)  # they are told once a second
    connection = await asyncpg.connect(url)
    try:
        (row,) = await connection.fetch(COUNTERS)
        return tuple(map(int, row))
    finally:
        await connection.close()


async def cost_of(hub: Server, postgres: Server, talking: list[Pair], depth: int, seconds: float) -> LoadCost:
    """Load a hub, and divide what it, and PostgreSQL, have used by the number of commands."""
    before, hub_before, postgres_before = await counters(postgres.url), hub.worked, postgres.worked
    found = await measure(hub, talking, depth, seconds)
    hub_after, postgres_after = hub.worked, postgres.worked
    used = [then - first for first, then in zip(before, await counters(postgres.url), strict=True)]
    return LoadCost(
        found.rate,
        (hub_after - hub_before) / found.count * 1e6,
        (postgres_after - postgres_before) / found.count * 1e6,
        *(each / found.count for each in used),
    )


async def idle_cost(seconds: float, *servers: Server) -> list[float]:
    """Processor time, as a part of a core, of each of these servers while no command is sent."""
    began, before = time.monotonic(), [server.worked for server in servers]
    await asyncio.sleep(seconds)
    lasted = time.monotonic() - began
    return [(server.worked - first) / lasted for server, first in zip(servers, before, strict=True)]


class IdleCost(Struct):
    """What connected devices cost that are only there, as parts of a core."""

    memory: int
    hub: float
    other: float
    postgres_hub: float
    """PostgreSQL, for the hub that has the devices"""
    postgres_other: float
    """PostgreSQL, for each other hub"""


async def idle_costs(
    hub: Server, other: AbstractContextManager[Server], postgres: Server, waiting: list[Pair], seconds: float
) -> IdleCost:
    """Connect devices to one of two hubs, and measure what changes at each; then end the other hub."""
    (alone,) = await idle_cost(seconds, postgres)
    with contextlib.ExitStack() as two:
        neighbour = two.enter_context(other)
        await asyncio.sleep(SETTLING)
        rest = await idle_cost(seconds, hub, neighbour, postgres)
        memory = hub.memory
        async with connected(hub, waiting):
            grown = hub.memory - memory
            await asyncio.sleep(SETTLING)
            busy = await idle_cost(seconds, hub, neighbour, postgres)
            two.close()
            await asyncio.sleep(LEAVING)
            (still,) = await idle_cost(seconds, postgres)
    here, there, both = (max(0.0, after - first) for first, after in zip(rest, busy, strict=True))
    single = max(0.0, still - alone)
    return IdleCost(grown, here, there, single, max(0.0, both - single))


async def run(*, quick: bool) -> tuple[MeasuredCosts, list[LoadCost]]:
    """Measure everything; returns the costs, and what a light, a middling and a heavy load have cost."""
    seconds, devices, resting = (3.0, 1_000, 10.0) if quick else (10.0, 5_000, 30.0)
    allow_many_files()
    with contextlib.ExitStack() as running:
        postgres = running.enter_context(postgres_server())
        if postgres is None:
            raise SystemExit("postgresql is not installed: make servers")
        root = running.enter_context(folder())
        talking, waiting = await accounts(root, APPS, devices, ledger=postgres.url)
        hub = running.enter_context(shared_hub(root / "hub", postgres.url))
        idle = await idle_costs(hub, shared_hub(root / "other", postgres.url), postgres, waiting, resting)
        await asyncio.sleep(LEAVING)
        loads = [await cost_of(hub, postgres, talking, depth, seconds) for depth in DEPTHS]
    light, _, heavy = loads
    costs = MeasuredCosts(
        hub_us=light.hub_us,
        postgres_us=light.postgres_us,
        wal_bytes=light.wal_bytes,
        commits=light.commits,
        rows=light.rows,
        stored_bytes=heavy.stored_bytes,
        connection_kb=idle.memory / devices / 1_000,
        idle_us=idle.hub / devices * 1e6,
        idle_other_us=idle.other / devices * 1e6,
        idle_postgres_us=idle.postgres_hub / devices * 1e6,
        idle_postgres_other_us=idle.postgres_other / devices * 1e6,
    )
    return costs, loads


def show(costs: MeasuredCosts, loads: list[LoadCost], demand: Demand) -> None:
    """Print the costs, how well they predict a load in between, and what the demand needs."""
    light, between, heavy = loads
    print(f"measured, for each command, at {light.rate:,.0f} a second:")
    print(f"  hub, processor time          {costs.hub_us:10.0f} µs")
    print(f"  PostgreSQL, processor time   {costs.postgres_us:10.0f} µs")
    print(f"  write-ahead log              {costs.wal_bytes:10.0f} bytes")
    print(f"  rows written                 {costs.rows:10.1f}")
    print(f"  transactions                 {costs.commits:10.2f}")
    print(f"  database, while remembered   {costs.stored_bytes:10.0f} bytes")
    print("measured, for each connected device:")
    print(f"  hub, memory                  {costs.connection_kb:10.1f} kB")
    print(f"  its hub, processor time      {costs.idle_us:10.2f} µs/s")
    print(f"  PostgreSQL, for its hub      {costs.idle_postgres_us:10.2f} µs/s")
    print(f"  each other hub               {costs.idle_other_us:10.2f} µs/s")
    print(f"  PostgreSQL, for that hub     {costs.idle_postgres_other_us:10.2f} µs/s")
    print(
        f"at {heavy.rate:,.0f} a second: hub {heavy.hub_us:.0f} µs, PostgreSQL {heavy.postgres_us:.0f} µs, "
    )
    print(f"  {heavy.wal_bytes:.0f} bytes of log, {heavy.commits:.2f} transactions, {heavy.rows:.1f} rows,")
    print(f"  {heavy.stored_bytes:.0f} bytes in the database")
    print(f"at {between.rate:,.0f} a second, beside what the two others say of it:")
    for name in ("hub_us", "postgres_us", "wal_bytes", "rows"):
        ends = [(load.commits, getattr(load, name)) for load in (light, heavy)]
        said, now = between_of(ends[0], ends[1], between.commits), getattr(between, name)
        print(f"  {name:<28} {now:10.1f}  model {said:10.1f}  ratio {now / said:5.2f}")
    most = largest_group(costs, demand.commands_an_hour, peak=demand.peak)
    count = shards(costs, demand)
    print(f"a group of three hubs carries {most:,} devices; {demand.devices:,} devices need {count} groups")
    share = msgspec.structs.replace(demand, devices=-(-demand.devices // count))
    for name, value in msgspec.structs.asdict(needs(costs, share)).items():
        print(f"  each group, {name:<16} {value:12,.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--commands-an-hour", type=float, default=6.0, help="to each device")
    parser.add_argument("--json", action="store_true", help="print the costs as JSON")
    asked = parser.parse_args()
    costs, loads = asyncio.run(run(quick=asked.quick))
    if asked.json:
        print(msgspec.json.encode(costs).decode())
    else:
        show(costs, loads, Demand(asked.devices, asked.commands_an_hour))


if __name__ == "__main__":
    main()
