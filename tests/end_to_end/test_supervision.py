"""Every background task of a running hub is killed, one after the other: each comes back, the hub is healthy
again and commands go through. What cannot come back makes `GET /v1/health` say 503, and which part it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duly.broker.embedded import EmbeddedBroker
from duly.clients.device import Command, Device
from duly.errors import PortTaken
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.many import LocalCluster
from tests.end_to_end.raw import curl, join
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.servers import Postgres

STEP = GUARD


async def until(true: Callable[[], bool], what: str) -> None:
    over = time.monotonic() + STEP
    while not true():
        assert time.monotonic() < over, what
        await asyncio.sleep(0.02)


async def healthy(hub: Hub) -> None:
    over = time.monotonic() + STEP
    while (await curl(f"{hub.url}/v1/health")).status != 200:
        assert time.monotonic() < over, hub.tasks.problems
        await asyncio.sleep(0.05)


async def obeys(hub: Hub, tokens: dict[str, str]) -> None:
    async with join(hub.url, tokens["lock"]) as lock, join(hub.url, tokens["phone"]) as phone:
        seq_id = await phone.command("lock")
        await lock.obey()
        while (await phone.hear_of(seq_id))["type"] != "ack":
            pass


def background(hub: Hub) -> list[asyncio.Task[object]]:
    """What runs in the background by name: the supervised parts and the engines under them."""
    return [
        task
        for task in asyncio.all_tasks()
        if task.get_name().startswith("duly") and task is not asyncio.current_task()
    ]


async def lasting(hub: Hub) -> list[asyncio.Task[object]]:
    """What runs in the background and stays, without small jobs and without what is under way at this moment:
    a notification that is being sent, a commit of an engine. Those end by themselves."""
    before: list[asyncio.Task[object]] = []
    over = time.monotonic() + STEP
    while not before or set(before) != set(staying(hub)):
        assert time.monotonic() < over, [task.get_name() for task in staying(hub)]
        before = staying(hub)
        await asyncio.sleep(0.3)
    return before


def staying(hub: Hub) -> list[asyncio.Task[object]]:
    return [task for task in background(hub) if not task.get_name().startswith("duly job: ")]


async def kill_each(hub: Hub, tokens: dict[str, str]) -> list[str]:
    victims = await lasting(hub)
    names = sorted(task.get_name() for task in victims)
    for victim in victims:
        if victim.done():
            continue  # it went down with another one, and is back already
        victim.cancel()
        await until(victim.done, victim.get_name())
        await until(lambda: sorted(t.get_name() for t in staying(hub)) == names, victim.get_name())
        await healthy(hub)
    await obeys(hub, tokens)
    assert sorted(task.get_name() for task in await lasting(hub)) == names
    return names


async def test_each_task_of_a_hub_with_a_broker_comes_back(tmp_path: Path) -> None:
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0))
    await hub.start()
    try:
        tokens = {name: await hub.accounts.add(Role.DEVICE, name) for name in ("lock", "lamp")}
        tokens["phone"] = await hub.accounts.add(Role.APP, "phone")
        for device in ("lock", "lamp"):
            await hub.accounts.grant("phone", device)
        names = await kill_each(hub, tokens)
        assert names.count("duly-engine") == 3
        assert {
            "duly broker",
            "duly broker log",
            "duly broker callout",
            "duly broker rates",
            "duly mqtt link",
        } <= set(names)
        url = hub.mqtt_url.replace("//", f"//lamp:{tokens['lamp']}@")
        async with Device(url, store=str(tmp_path / "lamp")) as lamp:

            @lamp.on("lock_control")
            async def on(command: Command) -> dict[str, bool]:
                return {"on": True}

            await until(lambda: hub.gateway.online("lamp"), "the lamp is not seen")
            async with join(hub.url, tokens["phone"]) as phone:
                seq_id = await phone.command("lamp")
                while (said := await phone.hear_of(seq_id))["type"] != "ack":
                    pass
                assert said["data"] == {"on": True}
    finally:
        await hub.stop()
    assert not background(hub), "something goes on after the stop"


async def test_each_task_of_hubs_on_postgres_comes_back(tmp_path: Path, postgres_server: Postgres) -> None:
    cluster = LocalCluster(tmp_path, postgres_server)
    await cluster.start(1)
    try:
        names = await kill_each(cluster.hubs[0], cluster.tokens)
        assert "duly notifier" in names
        assert "duly chat's look at other hubs" in names
    finally:
        await cluster.stop()
    assert not background(cluster.hubs[0])


async def test_an_engine_that_dies_of_one_event_goes_on_with_the_next(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug ends the engine: senders are told to try again, and the hub serves the others."""
    machine = local.hub.gateway.engine._machine
    handle = machine.handle

    def broken(event: Any, now: int) -> object:
        if "poison" in repr(event):
            raise AssertionError("a planted bug")
        return handle(event, now)

    monkeypatch.setattr(machine, "handle", broken)
    async with join(local.url, local.tokens["phone"]) as phone:
        for _ in range(2):
            await phone.command("lock", data={"a": "poison"})
            await until(lambda: local.hub.tasks.failures["gateway engine"] > 0, "it did not die")
            await healthy(local.hub)
            local.hub.tasks.failures.clear()
    await obeys(local.hub, local.tokens)


async def test_what_cannot_be_started_again_makes_health_503_and_is_named(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = local.hub.gateway.engine._machine

    def broken(*_: object) -> object:
        raise AssertionError("a planted bug")

    monkeypatch.setattr(machine, "restore", broken)
    monkeypatch.setattr(machine, "handle", broken)
    run = asyncio.create_task(local.hub.run())
    async with join(local.url, local.tokens["phone"]) as phone:
        await phone.command("lock")
        with pytest.raises(AssertionError, match="a planted bug"):
            async with asyncio.timeout(STEP):
                await run
        said = await curl(f"{local.url}/v1/health")
        assert (said.status, said.json["parts"]) == (503, ["gateway engine"])
        seq_id = await phone.command("lock")
        assert (await phone.hear_of(seq_id))["code"] == 4, "who asks meanwhile is told to try again"
    assert "gateway engine" in (await curl(f"{local.url}/v1/health")).json["detail"]


async def test_health_says_that_an_outside_broker_does_not_answer(tmp_path: Path) -> None:
    """It takes connections and says nothing. The hub still takes requests, and all hubs use that broker: so a
    load balancer is told 200, and a person what does not work."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        writer.close()

    broker = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = broker.sockets[0].getsockname()[1]
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt=f"mqtt://hub:secret@127.0.0.1:{port}"))
    await hub.start()
    try:
        said = await curl(f"{hub.url}/v1/health")
        assert (said.status, said.json) == (200, {"ok": True, "degraded": ["mqtt"]})
    finally:
        await hub.stop()
        broker.close()


async def test_health_is_503_while_the_hubs_own_broker_is_dead(tmp_path: Path) -> None:
    """It is a child of the hub, so clients are better off at another hub until it is back."""
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0))
    await hub.start()
    try:
        assert (await curl(f"{hub.url}/v1/health")).json == {"ok": True}
        assert hub.mqtt is not None
        broker = hub.mqtt.broker
        assert broker is not None
        with await take_the_port_of(broker):
            said = await curl(f"{hub.url}/v1/health")
            assert (said.status, said.json["parts"]) == (503, ["embedded broker"])
            assert (await curl(f"{hub.url}/readyz")).status == 503
            assert (await curl(f"{hub.url}/healthz")).status == 200, "a restart would not help"
        await healthy(hub)
        assert (await curl(f"{hub.url}/v1/health")).json == {"ok": True}
    finally:
        await hub.stop()


async def take_the_port_of(broker: EmbeddedBroker) -> socket.socket:
    """Kill a broker and hold its port, so that it cannot come back."""
    over = time.monotonic() + STEP
    while True:
        assert time.monotonic() < over, "the broker is always faster"
        if broker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(broker.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            taken = socket.create_server(("127.0.0.1", broker.port))
            await until(lambda: isinstance(broker.problem, PortTaken), "it is not told")
            return taken
        await asyncio.sleep(0.005)
