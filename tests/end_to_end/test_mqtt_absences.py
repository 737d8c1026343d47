"""A device that was offline before the hub was started anew stays offline until it says something itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic_ns

import pytest

from duly.apps.gateway.pushes import stream_of
from duly.identity.accounts import Principal, Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.raw import join
from tests.end_to_end.test_mqtt_firmware import Firmware
from tests.guard import GUARD
from tests.servers import Mosquitto


async def until(what: Callable[[], bool], then: Callable[[], Awaitable[None]] | None = None) -> None:
    async with asyncio.timeout(GUARD):  # a broker may wait for 30 s before it repeats what was under way
        while not what():
            if then is not None:
                await then()
            await asyncio.sleep(0.01)


@asynccontextmanager
async def started(folder: Path, mqtt: str = "") -> AsyncIterator[Hub]:
    hub = Hub(Settings(data=str(folder), port=0, mqtt_port=0, mqtt=mqtt, patience=1))
    await hub.start()
    try:
        assert hub.mqtt is not None
        links = hub.mqtt.links.values()
        await until(lambda: all(link.up for link in links))
        yield hub
    finally:
        await hub.stop()


def is_busy(hub: Hub) -> bool:
    """Whether something that was heard is still being handled."""
    assert hub.mqtt is not None
    return bool(hub.mqtt.devices._reader._queues)


async def heard_of(hub: Hub, name: str) -> None:
    """The broker has handed out what it kept of this device."""
    assert hub.mqtt is not None
    reported = hub.mqtt.devices.reported
    await until(lambda: bool(reported.of(name)))
    await until(lambda: not is_busy(hub))


async def test_what_a_broker_kept_of_a_device_that_was_offline_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a will and a heartbeat, what it said last is for ever that it is online."""
    async with started(tmp_path) as hub:
        phone, lock = await hub.accounts.add(Role.APP, "phone"), await hub.accounts.add(Role.DEVICE, "lock")
        await hub.accounts.grant("phone", "lock")
        firmware = Firmware(hub.mqtt_url, "lock", lock)
        await until(lambda: hub.gateway.online("lock"))
        monkeypatch.setattr("duly.apps.gateway.mqtt_presence.GRACE", 0.05)
        firmware.stop()
        assert hub.mqtt is not None
        await until(lambda: not hub.gateway.online("lock"), hub.mqtt.devices.sweep)
        monkeypatch.undo()
        told = await hub.ledger.extent(stream_of("lock"))
    async with started(tmp_path) as hub:
        await heard_of(hub, "lock")
        assert not hub.gateway.online("lock")
        async with join(hub.url, phone) as app:
            seq_id = await app.command("lock")
            assert (await app.hear_of(seq_id))["error"] == "offline"
        assert await hub.ledger.extent(stream_of("lock")) == told, "apps are told nothing"
        assert "lock" not in hub.gateway.devices._heard
        firmware = Firmware(hub.mqtt_url, "lock", lock)
        await until(lambda: hub.gateway.online("lock"))
        firmware.stop()


async def test_what_a_late_broker_kept_does_not_bring_a_device_online_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died with its broker, so that no will was told, and the hub was started before the broker was."""
    broker, reports = Mosquitto(), {"online": True, "time": 100, "heartbeat": 3_600}
    broker.start()
    try:
        async with started(tmp_path, broker.url("hub")) as hub:
            await hub.accounts.add(Role.DEVICE, "lock")
            firmware = Firmware(f"127.0.0.1:{broker.port}", "lock", "", mute=True)
            said = firmware.say("nodes/lock/status", reports, retain=True)
            await asyncio.to_thread(said.wait_for_publish, 45)
            await until(lambda: hub.gateway.online("lock"))
        broker.stop()
        firmware.stop()
        monkeypatch.setattr("duly.apps.gateway.presence.GRACE", 0.05)
        hub = Hub(Settings(data=str(tmp_path), port=0, mqtt=broker.url("hub"), patience=1))
        await hub.start()
        try:
            await until(lambda: hub.gateway.remote.has_given_up("lock"))
            told = await hub.ledger.extent(stream_of("lock"))
            broker.start()
            await heard_of(hub, "lock")
            assert not hub.gateway.online("lock")
            assert await hub.ledger.extent(stream_of("lock")) == told, "apps are told nothing"
            firmware = Firmware(f"127.0.0.1:{broker.port}", "lock", "", mute=True)
            firmware.say("nodes/lock/status", reports | {"time": 200}, retain=True)
            await until(lambda: hub.gateway.online("lock"))
            assert not hub.gateway.remote.has_given_up("lock")
            firmware.stop()
        finally:
            await hub.stop()
    finally:
        broker.stop()


@pytest.mark.parametrize(
    ("said", "online"),
    [
        ({"online": True, "time": 100}, False),
        ({"online": True, "time": 101}, True),
        ({"battery": 50}, False),
    ],
)
async def test_what_was_said_while_the_hub_was_away_is_news(
    tmp_path: Path, mosquitto_server: Mosquitto, said: dict[str, object], online: bool
) -> None:
    url, lock = mosquitto_server.url("hub"), f"lock-{monotonic_ns()}"
    async with started(tmp_path, url) as hub:
        await hub.accounts.add(Role.DEVICE, lock)
        firmware = Firmware(f"127.0.0.1:{mosquitto_server.port}", lock, "", mute=True)
        firmware.say(f"nodes/{lock}/status", {"online": True, "time": 100})
        await until(lambda: hub.gateway.online(lock))
        firmware.say(f"nodes/{lock}/status", {"online": False, "time": 100})
        await until(lambda: not hub.gateway.online(lock))
    await asyncio.to_thread(firmware.say(f"nodes/{lock}/status", said, retain=True).wait_for_publish, 10)
    firmware.stop()
    async with started(tmp_path, f"{url}?client_id={lock}") as hub:
        await heard_of(hub, lock)
        if online:
            await until(lambda: hub.gateway.online(lock))
        assert hub.gateway.online(lock) is online
        assert lock not in hub.gateway.devices._heard, "the device has said nothing since"


async def test_what_a_broker_kept_of_a_removed_device_does_not_bring_its_successor_online(
    tmp_path: Path, mosquitto_server: Mosquitto
) -> None:
    """An outside broker keeps it: a hub that is started anew would accept commands for a device that has
    never connected."""
    url, lock = mosquitto_server.url("hub"), f"lock-{monotonic_ns()}"
    async with started(tmp_path, url) as hub:
        await hub.accounts.add(Role.DEVICE, lock)
        firmware = Firmware(f"127.0.0.1:{mosquitto_server.port}", lock, "", mute=True)
        firmware.say(f"nodes/{lock}/status", {"online": True, "time": 100}, retain=True)
        await until(lambda: hub.gateway.online(lock))
        firmware.stop()
        await hub.admin.run(Principal("local", Role.ADMIN), "remove", {"name": lock})
        await until(lambda: not hub.gateway.online(lock))
        await hub.accounts.add(Role.DEVICE, lock)
    async with started(tmp_path, f"{url}?client_id={lock}") as hub:
        await heard_of(hub, lock)
        assert not hub.gateway.online(lock)
        firmware = Firmware(f"127.0.0.1:{mosquitto_server.port}", lock, "")
        await until(lambda: hub.gateway.online(lock))
        firmware.stop()


async def test_a_status_that_says_nothing_is_refused(tmp_path: Path, mosquitto_server: Mosquitto) -> None:
    lock = f"lock-{monotonic_ns()}"
    async with started(tmp_path, mosquitto_server.url("hub")) as hub:
        await hub.accounts.add(Role.DEVICE, lock)
        firmware = Firmware(f"127.0.0.1:{mosquitto_server.port}", lock, "", mute=True)
        firmware.say(f"nodes/{lock}/status", {})
        firmware.say(f"nodes/{lock}/status", {"time": 1, "online": False})
        await heard_of(hub, lock)
        firmware.stop()
        assert not hub.gateway.online(lock)
        async with asyncio.timeout(GUARD):
            while not (refused := [one for one in await hub.ledger.refusals() if one.scope == lock]):
                await hub.activity.settle()
                await asyncio.sleep(0.05)
        assert [one.word for one in refused] == ["malformed"]


async def say_unheard(hub: Hub, token: str) -> None:
    """A device without a will says that it is online, and leaves; the hub does not hear it yet."""
    assert hub.mqtt is not None
    await hub.mqtt.links["reports"].stop()
    firmware = Firmware(hub.mqtt_url, "lock", token, mute=True)
    await asyncio.to_thread(firmware.say("nodes/lock/status", {"online": True}).wait_for_publish, 10)
    firmware.stop()


async def test_what_waited_while_the_broker_died_does_not_bring_a_device_online(tmp_path: Path) -> None:
    """It comes unmarked when the broker is back, and the device may have died with the broker."""
    async with started(tmp_path) as hub:
        assert hub.mqtt is not None
        assert hub.mqtt.broker is not None
        broker = hub.mqtt.broker
        token = await hub.accounts.add(Role.DEVICE, "lock")
        await say_unheard(hub, token)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        await until(lambda: broker.restarts == 1)
        await hub.mqtt.links["reports"].start()
        await heard_of(hub, "lock")
        assert not hub.gateway.online("lock")
        assert "lock" not in hub.gateway.devices._heard, "the device has said nothing since"
        firmware = Firmware(hub.mqtt_url, "lock", token)
        await until(lambda: hub.gateway.online("lock"))
        firmware.stop()
