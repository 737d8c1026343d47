"""Pushes of a device that reports too often: some are dropped, and no later one is stored before them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from duly.apps.gateway import mqtt_devices
from duly.apps.gateway.pushes import stream_of
from duly.core.rate_limits import Rate
from duly.core.units import SECOND
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from duly.wire import frames
from tests import servers
from tests.guard import GUARD
from tests.paho_device import PahoDevice

AT_ONCE = 3
"""How many reports the hub takes at once here; one more a second."""


class FloodedHub:
    """A hub whose time for rates stands still, and the lock that reports to it."""

    def __init__(self, hub: Hub, lock: PahoDevice) -> None:
        self.hub = hub
        self.lock = lock
        self.seconds = 0.0
        self._began = round(time.time() * 1000)

    def wait(self) -> None:
        """Let the time pass after which as many reports as at first are taken."""
        self.seconds += AT_ONCE

    def push(self, *numbers: int, kind: str = "event_report") -> None:
        for n in numbers:
            push = {"type": kind, "data": n, "seq_id": f"{self._began}_{n}"}
            status = {"online": True, "session": "1", "data": push}
            self.lock.client.publish("nodes/lock/status", json.dumps(status).encode(), qos=1)

    async def answers(self, count: int) -> list[tuple[str, int]]:
        """The hub's next answers: their topic and the number of their push."""
        answers: list[tuple[str, int]] = []
        while len(answers) < count:
            heard = await self.lock.hear()
            kind = heard.topic.rpartition("/")[2]
            if kind != "status":
                answers.append((kind, int(json.loads(heard.payload)["msg_id"].partition("_")[2])))
        return answers

    async def dropped(self, count: int) -> None:
        """Wait until the hub has dropped so many reports."""
        assert self.hub.mqtt is not None
        async with asyncio.timeout(GUARD):
            while self.hub.mqtt.devices.refusals.total < count:
                await asyncio.sleep(0.01)

    async def stored(self) -> list[object]:
        entries = await self.hub.ledger.entries(stream_of("lock"), 0, 100)
        pushes = [frames.decode(entry.body) for entry in entries]
        return [frames.load(push.data) for push in pushes if push.type == "event_report"]


@pytest.fixture
async def flooded(
    mosquitto_server: servers.Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FloodedHub]:
    monkeypatch.setattr(mqtt_devices, "TOLD", Rate(1, SECOND, burst=AT_ONCE))
    hub = Hub(Settings(data=str(tmp_path), port=0, mqtt=mosquitto_server.url("hub")))
    lock = PahoDevice(mosquitto_server.port, "nodes/lock/+", MQTTProtocolVersion.MQTTv311, "lock")
    it = FloodedHub(hub, lock)
    monkeypatch.setattr(mqtt_devices, "_now", lambda: it.seconds)
    await hub.start()
    try:
        await hub.accounts.add(Role.DEVICE, "lock")
        assert hub.mqtt is not None
        for link in hub.mqtt.links.values():
            await link.connected(GUARD)
        async with lock:
            yield it
    finally:
        await hub.stop()


async def test_a_push_is_not_stored_before_one_that_was_dropped(flooded: FloodedHub) -> None:
    flooded.push(1, 2, 3, 4)
    assert await flooded.answers(3) == [("ack", 1), ("ack", 2), ("ack", 3)]
    await flooded.dropped(1)
    flooded.wait()
    flooded.push(5)
    assert await flooded.answers(1) == [("failed", 5)], "it is sent again, after the one before it"
    flooded.wait()
    flooded.push(4, 5)
    assert await flooded.answers(2) == [("ack", 4), ("ack", 5)]
    assert await flooded.stored() == [1, 2, 3, 4, 5]


async def test_repeats_of_stored_pushes_that_were_dropped_as_well_do_not_count(flooded: FloodedHub) -> None:
    flooded.push(1, 2, 3, 1, 2, 3, 4)
    assert await flooded.answers(3) == [("ack", 1), ("ack", 2), ("ack", 3)]
    await flooded.dropped(4)
    flooded.wait()
    flooded.push(5, 4, 5)
    assert await flooded.answers(3) == [("failed", 5), ("ack", 4), ("ack", 5)]
    assert await flooded.stored() == [1, 2, 3, 4, 5]


async def test_after_repeats_alone_the_next_push_is_stored_at_once(flooded: FloodedHub) -> None:
    flooded.push(1, 2, 3, 1, 2, 3)
    assert await flooded.answers(3) == [("ack", 1), ("ack", 2), ("ack", 3)]
    await flooded.dropped(3)
    flooded.wait()
    flooded.push(4)
    assert await flooded.answers(1) == [("ack", 4)]


async def test_one_that_is_dropped_again_still_comes_first(flooded: FloodedHub) -> None:
    flooded.push(1, 2, 3, 4, 5)
    assert await flooded.answers(3) == [("ack", 1), ("ack", 2), ("ack", 3)]
    await flooded.dropped(2)
    flooded.wait()
    flooded.push(6, 6, 6, 4, 5)
    assert await flooded.answers(3) == [("failed", 6)] * 3
    await flooded.dropped(7)
    flooded.wait()
    flooded.push(6, 4, 5, 6)
    assert await flooded.answers(3) == [("failed", 6), ("ack", 4), ("ack", 5)]
    await flooded.dropped(9)
    flooded.wait()
    flooded.push(7, 6, 7)
    assert await flooded.answers(3) == [("failed", 7), ("ack", 6), ("ack", 7)]
    assert await flooded.stored() == [1, 2, 3, 4, 5, 6, 7]


async def test_one_that_is_refused_for_good_is_not_waited_for(flooded: FloodedHub) -> None:
    flooded.push(1, 2, 3)
    flooded.push(4, kind="not a type")
    assert await flooded.answers(3) == [("ack", 1), ("ack", 2), ("ack", 3)]
    await flooded.dropped(1)
    flooded.wait()
    flooded.push(4, kind="not a type")
    flooded.push(5)
    assert await flooded.answers(2) == [("failed", 4), ("ack", 5)]
