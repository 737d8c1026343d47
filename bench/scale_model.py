"""What so many devices need, computed from what one command and one connection cost.

The model: costs add up. A command costs the hub and PostgreSQL processor time and PostgreSQL writes; a
connected device costs memory, and some processor time each second at its hub (heartbeats) and, much less, at
each other hub of its group. A hub has one core for its loop.
"""

from __future__ import annotations

from math import ceil

from msgspec import Struct

MICRO = 1e-6
GB = 1e9


class MeasuredCosts(Struct, frozen=True):
    """What was measured on one machine (`python -m bench.scale`)."""

    hub_us: float
    """processor time of a hub for a command, µs"""
    postgres_us: float
    """processor time of PostgreSQL for a command, µs"""
    wal_bytes: float
    """write-ahead log for a command"""
    commits: float
    """transactions for a command, under load"""
    rows: float
    """rows inserted, updated or deleted for a command"""
    stored_bytes: float
    """what a command takes in the database while it is remembered"""
    connection_kb: float
    """memory of a hub for a connected device, kB"""
    idle_us: float
    """processor time of a hub for a device that is connected to it, µs a second"""
    idle_other_us: float
    """processor time of each other hub of the group for such a device, µs a second"""
    idle_postgres_us: float
    """processor time of PostgreSQL for such a device and its hub, µs a second"""
    idle_postgres_other_us: float
    """processor time of PostgreSQL for such a device and each other hub, µs a second"""


class Demand(Struct, frozen=True):
    """What is asked of a system."""

    devices: int
    commands_an_hour: float
    """commands to each device"""
    peak: float = 4.0
    """how many times the average a busy minute has"""
    remembered_hours: float = 24.0

    @property
    def rate(self) -> float:
        """Commands a second in a busy minute."""
        return self.devices * self.commands_an_hour / 3600 * self.peak


class Needs(Struct, frozen=True):
    """What one group of hubs with its PostgreSQL needs in a busy minute."""

    rate: float
    """commands a second"""
    hub_cores: float
    postgres_cores: float
    memory_gb: float
    wal_mb: float
    """megabytes a second"""
    stored_gb: float
    hubs: int


def between_of(light: tuple[float, float], heavy: tuple[float, float], commits: float) -> float:
    """What a command costs at so many transactions for each, by two loads of which both are known: each
    transaction has a cost of its own, and each command has.

    >>> between_of((0.5, 200.0), (0.1, 100.0), 0.3)
    150.0
    """
    (many, dear), (few, cheap) = light, heavy
    if many == few:
        return (dear + cheap) / 2
    return cheap + (dear - cheap) * (commits - few) / (many - few)


def needs(costs: MeasuredCosts, demand: Demand, *, busy: float = 0.5) -> Needs:
    """What a group needs if none of its hubs uses more than `busy` of its core. Each further hub costs
    something for all devices, so the number of hubs is found by trying."""
    work = demand.rate * costs.hub_us * MICRO
    stored = demand.devices * demand.commands_an_hour * demand.remembered_hours * costs.stored_bytes
    hubs = 1
    while True:
        looks = demand.devices * (costs.idle_us + costs.idle_other_us * (hubs - 1)) * MICRO
        if (work + looks) / hubs <= busy or hubs > 1_000:
            break
        hubs = max(hubs + 1, min(ceil((work + looks) / busy), 1_001))
    idle = costs.idle_postgres_us + costs.idle_postgres_other_us * (hubs - 1)
    return Needs(
        rate=demand.rate,
        hub_cores=work + looks,
        postgres_cores=(demand.rate * costs.postgres_us + demand.devices * idle) * MICRO,
        memory_gb=demand.devices * costs.connection_kb * 1_000 / GB,
        wal_mb=demand.rate * costs.wal_bytes / 1e6,
        stored_gb=stored / GB,
        hubs=hubs,
    )


def largest_group(
    costs: MeasuredCosts, commands_an_hour: float, *, hubs: int = 3, busy: float = 0.5, peak: float = 4.0
) -> int:
    """How many devices a group of so many hubs carries, each at most `busy`, with one hub to spare."""
    working = max(1, hubs - 1)
    there = (working - 1) / working
    per_device = (commands_an_hour / 3600 * peak * costs.hub_us + costs.idle_us) / working
    per_device += costs.idle_other_us * there
    return int(busy / (per_device * MICRO))


def shards(costs: MeasuredCosts, demand: Demand, *, hubs: int = 3) -> int:
    """How many groups of so many hubs carry the demand."""
    most = largest_group(costs, demand.commands_an_hour, hubs=hubs, peak=demand.peak)
    return max(1, ceil(demand.devices / most))
