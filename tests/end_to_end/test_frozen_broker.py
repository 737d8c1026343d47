"""A frozen broker: its connections stay open and it says nothing. Within ten seconds health tells it, also
while nothing is sent: the hub is unhealthy with its own broker, and degraded with an outside one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.end_to_end.raw import curl
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.servers import Mosquitto
from tests.stopwatch import MachineStopwatch

WITHIN = 10.0


@pytest.fixture(params=["embedded", "mosquitto"])
async def frozen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[LocalHub, int]]:
    """A hub, and the process of its broker."""
    server = Mosquitto() if request.param == "mosquitto" else None
    if server is not None:
        await asyncio.to_thread(server.start)
    local = LocalHub(tmp_path / "hub", no_mqtt=False, mqtt="" if server is None else server.url("hub"))
    await local.start()
    assert local.hub.mqtt is not None
    embedded = local.hub.mqtt.broker
    pid = server.pid if server is not None else embedded and embedded.pid
    assert pid
    yield local, pid
    os.kill(pid, signal.SIGCONT)
    await local.stop()
    if server is not None:
        await asyncio.to_thread(server.remove)


async def health(local: LocalHub, wanted: int, degraded: list[str]) -> bytes:
    """Return the body of the first answer with this status that names these parts as degraded."""
    async with asyncio.timeout(GUARD):
        while True:
            said = await curl(f"{local.url}/v1/health")
            if (said.status, json.loads(said.body).get("degraded", [])) == (wanted, degraded):
                return said.body
            await asyncio.sleep(0.05)


async def test_a_frozen_broker_shows_in_health_within_ten_seconds(
    frozen: tuple[LocalHub, int], caplog: pytest.LogCaptureFixture
) -> None:
    local, pid = frozen
    assert local.hub.mqtt is not None
    await health(local, 200, [])
    os.kill(pid, signal.SIGSTOP)
    took = MachineStopwatch()
    if local.hub.mqtt.broker is None:
        await health(local, 200, ["mqtt"])
    else:
        assert b"embedded broker" in await health(local, 503, [])
    assert took.seconds < WITHIN
    assert "the broker did not answer within 5 s" in caplog.text
    os.kill(pid, signal.SIGCONT)
    await health(local, 200, [])
