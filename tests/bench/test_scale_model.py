"""The model of what so many devices need: costs add up, and more is never cheaper."""

from __future__ import annotations

from bench.scale_model import Demand, MeasuredCosts, largest_group, needs, shards
from hypothesis import given
from hypothesis import strategies as st

COSTS = MeasuredCosts(
    hub_us=150, postgres_us=90, wal_bytes=1_000, commits=0.2, rows=4, stored_bytes=400,
    connection_kb=20, idle_us=5, idle_other_us=0.5,
    idle_postgres_us=2, idle_postgres_other_us=0.5,
)  # fmt: skip
demands = st.builds(
    Demand, devices=st.integers(1, 2_000_000), commands_an_hour=st.floats(0.1, 60), peak=st.floats(1, 10)
)


def test_a_small_house_needs_one_hub() -> None:
    small = needs(COSTS, Demand(1_000, 6))
    assert (small.hubs, shards(COSTS, Demand(1_000, 6))) == (1, 1)
    assert small.rate == 1_000 * 6 / 3600 * 4
    assert small.hub_cores == small.rate * 150e-6 + 1_000 * 5e-6


def test_what_a_group_carries_it_carries_with_the_hubs_it_has() -> None:
    most = largest_group(COSTS, 6, hubs=3)
    assert needs(COSTS, Demand(most, 6)).hubs <= 2, "the third is to spare"


@given(demand=demands)
def test_shards_carry_what_is_asked_and_one_fewer_would_not(demand: Demand) -> None:
    count = shards(COSTS, demand)
    most = largest_group(COSTS, demand.commands_an_hour, peak=demand.peak)
    assert count * most >= demand.devices
    assert count == 1 or (count - 1) * most < demand.devices


@given(demand=demands, more=st.integers(1, 1_000_000))
def test_more_devices_never_need_less(demand: Demand, more: int) -> None:
    larger = Demand(demand.devices + more, demand.commands_an_hour, demand.peak)
    few, many = needs(COSTS, demand), needs(COSTS, larger)
    assert few.hubs <= many.hubs
    assert few.memory_gb < many.memory_gb
    assert few.stored_gb < many.stored_gb
