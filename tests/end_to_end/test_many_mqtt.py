"""MQTT devices of several hubs on one broker: each has one home, and everybody reaches it through that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from duly.apps.gateway.remote_hubs import GatewayRemoteHubs
from duly.clients.app import App, Push
from duly.clients.device import Command, Device
from duly.errors import LedgerError
from duly.wire import fd, frames
from tests.end_to_end.many import LocalCluster, until
from tests.guard import GUARD
from tests.servers import Mosquitto, Postgres

LOG = logging.getLogger(__name__)


@pytest.fixture
async def cluster(
    tmp_path: Path, postgres_server: Postgres, mosquitto_server: Mosquitto
) -> AsyncIterator[LocalCluster]:
    it = LocalCluster(tmp_path, postgres_server, mqtt=mosquitto_server.url("hub"), no_mqtt=False)
    await it.start(3)
    yield it
    await it.stop()


def registry(cluster: LocalCluster, name: str) -> list[int]:
    return [n for n, hub in enumerate(cluster.hubs) if name in hub.gateway.sessions.devices]


def lock(broker: Mosquitto, effects: list[str]) -> Device:
    device = Device(broker.url("lock"), name="lock")

    @device.on("lock_control")
    async def lock_control(command: Command) -> object:
        effects.append(command.id)
        return command.data

    return device


async def test_a_device_has_one_home_and_is_commanded_from_every_hub(
    cluster: LocalCluster, mosquitto_server: Mosquitto
) -> None:
    effects: list[str] = []
    async with lock(mosquitto_server, effects):
        await cluster.known("lock")
        assert len(registry(cluster, "lock")) == 1
        for n, hub in enumerate(cluster.hubs):
            async with App(hub.url, cluster.tokens["phone"]) as app:
                ack = await app.send("lock", "lock_control", {"n": n}, order=False)
                assert (ack.done, ack.data) == (True, {"n": n})
    assert len(effects) == 3
    await until(lambda: not any(hub.gateway.online("lock") for hub in cluster.hubs))
    refused = [r for r in await cluster.hubs[0].ledger.refusals() if "reports its status" not in r.reason]
    assert refused == [], "that others hear an answer too is nobody's mistake"


async def test_when_its_home_stops_another_hub_takes_it_in_with_what_was_under_way(
    cluster: LocalCluster, mosquitto_server: Mosquitto
) -> None:
    effects: list[str] = []
    asked, go = asyncio.Event(), asyncio.Event()
    device = lock(mosquitto_server, effects)

    @device.on("query")
    async def query(command: Command) -> object:
        asked.set()
        await go.wait()
        return "late but true"

    async with device:
        await cluster.known("lock")
        (home,) = registry(cluster, "lock")
        other = cluster.hubs[(home + 1) % 3]
        async with App(other.url, cluster.tokens["phone"]) as app:
            command = await app.post("lock", "query")
            await asked.wait()
            await cluster.hubs.pop(home).stop()
            await until(lambda: len(registry(cluster, "lock")) == 1)
            go.set()
            async with asyncio.timeout(GUARD):
                assert (await command.settled()).data == "late but true"
            assert (await app.send("lock", "lock_control", 1)).data == 1


async def test_what_it_pushes_is_told_once_at_every_hub(
    cluster: LocalCluster, mosquitto_server: Mosquitto
) -> None:
    async with lock(mosquitto_server, []) as device:
        await cluster.known("lock")
        for hub in cluster.hubs:
            async with App(hub.url, cluster.tokens["phone"]) as app:
                device.push("event_report", {"at": hub.url})
                async with asyncio.timeout(GUARD):
                    async for push in app.pushes():
                        if isinstance(push, Push) and push.type == "event_report":
                            assert push.data == {"at": hub.url}
                            break
        stored = await cluster.hubs[0].ledger.entries("push/lock")
        assert sum(b"event_report" in entry.body for entry in stored) == 3


async def test_what_it_pushes_while_its_home_is_dead_is_kept(
    cluster: LocalCluster, mosquitto_server: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_a_word() -> None:
        return None

    async with lock(mosquitto_server, []) as device:
        await cluster.known("lock")
        (home,) = registry(cluster, "lock")
        dying = cluster.hubs.pop(home)
        assert isinstance(dying.gateway.remote, GatewayRemoteHubs)
        monkeypatch.setattr(dying.gateway.remote.registry, "leave", without_a_word)
        told = 0

        def tell() -> None:
            nonlocal told
            device.push("status_report", {"n": told, "battery": 80})
            device.push("status_report", {"battery": 80})  # the same words, again and again
            told += 1

        async def stored(true: Callable[[int], bool]) -> None:
            async with asyncio.timeout(GUARD):
                while not true(len(await reports())):
                    await asyncio.sleep(0.02)

        async def reports() -> list[Any]:
            entries = await cluster.hubs[0].ledger.entries("push/lock", limit=1_000)
            return [frames.load(frames.decode(e.body).data) for e in entries if b"status_report" in e.body]

        for _ in range(5):
            tell()
        await stored(lambda count: count == 10)
        await dying.stop()
        while not registry(cluster, "lock"):
            tell()
            await asyncio.sleep(0.2)
        tell()
        await stored(lambda count: count >= 2 * told)
        found = await reports()
        assert [one["n"] for one in found if "n" in one] == list(range(told)), "each once, in order"
        assert len(found) == 2 * told
        assert told > 10, "it really was away for a while"


async def test_what_comes_while_the_ledger_is_away_waits_for_it(
    cluster: LocalCluster, mosquitto_server: Mosquitto, postgres_server: Postgres
) -> None:
    """If an answer were dropped it would never be acknowledged, and nothing after it either. A forged one
    is recorded at every hub, each of which hears it."""
    stranger = fd.encode(fd.FdComplete("phone:1700000000000_0", fd.Content(b"1")))
    asked, go = asyncio.Event(), asyncio.Event()
    device = lock(mosquitto_server, [])

    @device.on("query")
    async def query(command: Command) -> object:
        asked.set()
        await go.wait()
        return "late but true"

    async with device:
        await cluster.known("lock")
        async with App(cluster.hubs[0].url, cluster.tokens["phone"]) as app:
            command = await app.post("lock", "query")
            await asked.wait()
            await asyncio.to_thread(postgres_server.stop)
            try:
                go.set()
                await publish(mosquitto_server, "nodes/hub/complete", stranger)
                await until(lambda: any("the ledger" in hub.metrics.outages.current for hub in cluster.hubs))
            finally:
                await asyncio.to_thread(postgres_server.start)
            async with asyncio.timeout(GUARD):
                assert (await command.settled()).data == "late but true"
    seen: list[str] = []
    async with asyncio.timeout(GUARD):
        while seen.count("nodes/hub/complete") < len(cluster.hubs):
            before = seen
            with suppress(LedgerError):
                seen = [refusal.id for refusal in await cluster.hubs[0].ledger.refusals()]
            if seen != before:
                LOG.info("recorded so far: %s", seen)
            await asyncio.sleep(0.05)


async def publish(broker: Mosquitto, topic: str, payload: bytes) -> None:
    """Publish as a client of another program."""
    said = await asyncio.create_subprocess_exec(
        "mosquitto_pub", "-p", str(broker.port), "-q", "1", "-t", topic, "-m", payload.decode()
    )
    assert await said.wait() == 0


async def test_hubs_keep_their_sessions_at_the_broker_apart_and_their_names(cluster: LocalCluster) -> None:
    services = [hub.mqtt for hub in cluster.hubs if hub.mqtt is not None]
    names = [link.address.client_id for service in services for link in service.links.values()]
    assert len(set(names)) == 6
    kept = [hub._folder / "client_id" for hub in cluster.hubs]
    assert {place.read_text() for place in kept} < set(names)
    assert {place.stat().st_mode & 0o777 for place in kept} == {0o600}, "they are secret"
