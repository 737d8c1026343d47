"""kill -9 of sentinels and of their tower, at every point and at random, over a bad network.

The law: a signal that is known to be stored is one event in the tower, and whoever is told is told of it
once; by the tower's own list, and by what the receiver wrote down.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from duly.cli.bad_network import BadConnection, Damage
from duly.core.monitor.signals import read_event
from duly.storage import open_ledger
from tests.clients.sentinel_process import POINTS, Fleet, Job
from tests.end_to_end.processes import HubProcess
from tests.guard import GUARD
from tests.receivers import receiver


async def listed(hub: HubProcess) -> dict[str, Counter[str]]:
    """How often the tower lists an event of which device, by sentinel."""
    found: dict[str, Counter[str]] = {}
    async with await open_ledger(f"sqlite:///{hub.folder}/ledger.db?mode=ro") as ledger:
        for record in await ledger.of_kind("alert_event", limit=100_000):
            device = read_event(record.message.body).device_address
            found.setdefault(record.message.scope, Counter())[device] += 1
    return found


def devices(count: int) -> Counter[str]:
    return Counter({f"device-{n}": 1 for n in range(count)})


@pytest.fixture
async def hub(tmp_path: Path) -> HubProcess:
    return HubProcess(tmp_path / "hub", allow_private_webhooks="true")


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("point", POINTS)
async def test_a_sentinel_killed_at_a_point_loses_nothing_and_repeats_nothing(
    hub: HubProcess, tmp_path: Path, point: str, count: int
) -> None:
    tokens = await hub.prepare([], [], ["watch"])
    await hub.start()
    try:
        fleet = Fleet(Job(str(tmp_path), 6, {"watch": (hub.url, tokens["watch"])}))
        await fleet.start(f"{point}:{count}")
        assert await fleet.ended() == -signal.SIGKILL
        await fleet.start()
        assert await fleet.ended() == 0
    finally:
        await hub.kill()
    assert await listed(hub) == {"watch": devices(6)}


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("count", "events", "deaths"), [(10, 20, 2), pytest.param(50, 100, 12, marks=pytest.mark.proof)]
)
async def test_many_sentinels_over_a_bad_network_with_kills_all_around(
    hub: HubProcess, tmp_path: Path, count: int, events: int, deaths: int
) -> None:
    """The whole is fifty of them with a hundred events each."""
    chance = random.Random(50)
    names = [f"watch-{n:02}" for n in range(count)]
    damage, enough = Damage(), count * events // 100
    kills = 0
    async with AsyncExitStack() as stack:
        hook = await stack.enter_async_context(receiver())
        tokens = await hub.prepare([], [], names, hook.url)
        await hub.start()
        stack.push_async_callback(hub.kill)
        roads = {name: BadConnection(hub.url, damage, chance) for name in names}
        for road in roads.values():
            await road.start()
            stack.push_async_callback(road.stop)
        fleets = []
        for first in range(0, count, count // 5):
            mine = {name: (roads[name].url, tokens[name]) for name in names[first : first + count // 5]}
            fleets.append(Fleet(Job(str(tmp_path), events, mine, pause=0.15)))
        for fleet in fleets:
            await fleet.start()
            stack.push_async_callback(fleet.kill)
        mortals: list[Fleet | HubProcess] = [*fleets, hub]
        for _ in range(deaths):
            await asyncio.sleep(chance.uniform(0.5, 2))
            victim = chance.choice(mortals)
            await victim.kill()
            await asyncio.sleep(chance.uniform(0, 0.5))
            await victim.start()
            kills += 1
        ending = asyncio.gather(*(fleet.ended() for fleet in fleets))
        while least(damage) <= enough and not ending.done():
            await asyncio.sleep(0.05)
        for road in roads.values():
            road.calm = True
        assert await ending == [0] * 5
        assert await listed(hub) == {name: devices(events) for name in names}
        await grown(lambda: len(hook.events), count * events)
        assert len(hook.events) == len(set(hook.events)) == count * events
    assert kills == deaths
    assert least(damage) > enough


def least(damage: Damage) -> int:
    """How often the rarest of all mischief happened."""
    return min(damage.dropped, damage.repeated, damage.overtaken, damage.cuts)


async def grown(number: Callable[[], int], wanted: int) -> None:
    """Until a number is as large as it should be; it may take its time, but it must not stand still."""
    while (before := number()) < wanted:
        try:
            await until(lambda: number() > before)
        except TimeoutError:
            raise AssertionError(f"it stands still at {before} of {wanted}") from None


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD):
        while not true():
            await asyncio.sleep(0.1)
