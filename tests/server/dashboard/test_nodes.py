"""Nodes on the page: online, offline and gone, behind the embedded broker and an outside one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from duly import Node
from duly.identity.accounts import Role
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from tests.end_to_end.test_mqtt_removal import run
from tests.end_to_end.test_mqtt_strangers import HubWithBroker
from tests.guard import GUARD

ANN = DashboardVisitor("ann", DashboardRole.VIEWER)
SENSOR = "sensor-of-the-page"


@pytest.fixture(params=["embedded", "outside"])
async def local(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HubWithBroker]:
    outside = (
        ""
        if request.param == "embedded"
        else f"mqtt://hub:x@127.0.0.1:{request.getfixturevalue('mosquitto_server').port}"
    )
    it = HubWithBroker(tmp_path / "hub", outside)
    await it.start()
    await it.add(Role.NODE, SENSOR, "valve")
    yield it
    await it.stop()


def sensor_of(local: HubWithBroker) -> Node:
    url = f"mqtt://{SENSOR}:{local.tokens[SENSOR]}@127.0.0.1:{local.port}"
    return Node(url, serve=True)


async def until_seen(local: HubWithBroker, fits: Callable[[dict[str, Any]], bool]) -> None:
    """Until the sensor is shown so."""
    async with asyncio.timeout(GUARD):
        while True:
            shown = await local.hub.dashboard.view(ANN, "device", {"name": SENSOR})
            assert isinstance(shown, dict)
            if fits(shown):
                return
            await asyncio.sleep(0.05)


async def online(local: HubWithBroker) -> tuple[object, object]:
    """What the overview says: how many nodes are online, and how many there are."""
    overview = await local.hub.dashboard.view(ANN, "overview", {})
    assert isinstance(overview, dict)
    return overview["devices"]["nodes_online"], overview["devices"]["nodes"]


async def test_a_node_is_online_while_it_is_connected_also_after_a_restart_of_the_hub(
    local: HubWithBroker,
) -> None:
    assert await online(local) == (0, 2)
    async with sensor_of(local) as node:
        node.report(version="2.0", battery=80)
        await until_seen(local, lambda it: it["online"] and it["battery"] == 80)
        assert await online(local) == (1, 2)
        await local.stop()
        await local.start()
        await until_seen(local, lambda it: it["online"] and it["version"] == "2.0" and not it["stale"])
    await until_seen(local, lambda it: not it["online"] and it["last_heard"])
    assert await online(local) == (0, 2)


@pytest.mark.parametrize("local", ["embedded"], indirect=True)
async def test_a_new_node_is_not_what_an_earlier_one_of_its_name_reported(local: HubWithBroker) -> None:
    async with sensor_of(local) as node:
        node.report(battery=80)
        await until_seen(local, lambda it: it["battery"] == 80)
    await until_seen(local, lambda it: not it["online"])
    await run(local, "remove", name=SENSOR)
    await local.add(Role.NODE, SENSOR)
    await until_seen(local, lambda it: it["battery"] is None)
    await local.stop()
    await local.start()
    await until_seen(local, lambda it: it["battery"] is None)
