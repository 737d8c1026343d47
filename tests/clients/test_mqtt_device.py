"""The same device behind an MQTT broker: the embedded one, Mosquitto, RabbitMQ."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from duly.apps.gateway.mqtt_device import MqttDevice
from duly.clients.app import App, Push
from duly.clients.device import Command, Device
from duly.errors import DeviceError, Refused
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from duly.transports.mqtt.link import MqttLink
from duly.wire.outgoing import CommandFrame, OutgoingFrame
from duly.wire.session import Acknowledge
from tests.end_to_end.processes import DeviceProcess
from tests.guard import GUARD
from tests.servers import Mosquitto


class MqttHub:
    """A hub with MQTT, and where its devices find it."""

    def __init__(self, hub: Hub, device_url: str, phone: str) -> None:
        self.hub = hub
        self.device_url = device_url
        self.phone = phone

    def kill_broker(self) -> None:
        assert self.hub.mqtt is not None
        broker = self.hub.mqtt.broker
        assert broker is not None
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)

    def leave_unacknowledged(self, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub hears what is published there, but its broker does not learn that it has."""
        assert self.hub.mqtt is not None
        link = self.hub.mqtt.links["reports"]
        hear = link._on_message

        def without_ack(heard: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
            hear(heard, payload, old, (lambda: None) if heard == topic else ack)

        monkeypatch.setattr(link, "_on_message", without_ack)

    async def restart(self) -> None:
        """The hub, and its broker with it, on the same ports."""
        port = int(self.hub.mqtt_url.rsplit(":", 1)[1])
        await self.hub.stop()
        self.hub = Hub(msgspec.structs.replace(self.hub.settings, mqtt_port=port))
        await self.hub.start()

    async def online(self, name: str, wanted: bool = True) -> None:
        async with asyncio.timeout(GUARD):
            while self.hub.gateway.online(name) is not wanted:
                await asyncio.sleep(0.01)


@pytest.fixture(params=["embedded", "mosquitto", "rabbitmq"])
async def local(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MqttHub]:
    monkeypatch.setattr("duly.server.mqtt_service.SWEEP_SECONDS", 0.2)
    outside = ""
    if request.param != "embedded":
        broker = request.getfixturevalue(f"{request.param}_server")
        outside = broker.url("hub")
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0, mqtt=outside))
    await hub.start()
    assert hub.mqtt is not None
    for link in hub.mqtt.links.values():
        await link.connected(GUARD)  # RabbitMQ shows no retained status to a later wildcard subscription
    phone = await hub.accounts.add(Role.APP, "phone")
    token = await hub.accounts.add(Role.DEVICE, "lock")
    await hub.accounts.grant("phone", "lock")
    inside = hub.mqtt_url.replace("mqtt://", f"mqtt://lock:{token}@")
    it = MqttHub(hub, broker.url("lock") if outside else inside, phone)
    yield it
    await it.hub.stop()


def lock(local: MqttHub, effects: list[str], store: Path | None = None) -> Device:
    device = Device(local.device_url, store=str(store) if store else None, name="lock")

    @device.on("lock_control")
    async def lock_control(command: Command) -> dict[str, bool]:
        effects.append(command.id)
        return {"open": command.data["open"]}

    @device.on("query")
    async def query(command: Command) -> None:
        raise DeviceError(3, "the sensor is broken")

    return device


async def test_a_command_is_done_and_its_answer_comes_back(local: MqttHub) -> None:
    effects: list[str] = []
    async with lock(local, effects), App(local.hub.url, local.phone) as app:
        await local.online("lock")
        ack = await app.send("lock", "lock_control", {"open": True})
        assert (ack.done, ack.data) == (True, {"open": True})
        ack = await app.send("lock", "query")
        assert (ack.state, ack.code, ack.detail) == ("failed", 3, "the sensor is broken")
    assert len(effects) == 1


async def test_a_device_that_says_goodbye_is_offline(local: MqttHub) -> None:
    async with App(local.hub.url, local.phone) as app:
        async with lock(local, []):
            await local.online("lock")
        await local.online("lock", False)
        with pytest.raises(Refused, match="offline"):
            await app.send("lock", "lock_control", {"open": True})


async def test_a_device_that_dies_is_offline_by_its_will(local: MqttHub, tmp_path: Path) -> None:
    device = DeviceProcess(tmp_path / "lock", "lock", local.device_url)
    for _ in range(2):  # a will belongs to its own connection, not to the one before
        await device.start()
        await local.online("lock")
        await device.kill()
        await local.online("lock", False)


@pytest.mark.parametrize("local", ["embedded"], indirect=True)
@pytest.mark.parametrize("what", ["the broker", "the broker, before it knew that the hub knew", "the hub"])
async def test_a_device_that_dies_with_its_broker_is_not_believed_in_for_ever(
    local: MqttHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its will died too, and what the broker has kept says that it is online."""
    monkeypatch.setattr("duly.apps.gateway.mqtt_presence.GRACE", 3.0)
    monkeypatch.setattr("duly.server.maintenance.REFRESH_SECONDS", 0.1)
    lamp = await local.hub.accounts.add(Role.DEVICE, "lamp")
    login = f"mqtt://lamp:{lamp}@{local.device_url.partition('@')[2]}"
    dead, alive = DeviceProcess(tmp_path / "lock", "lock", local.device_url), Device(login)
    async with alive:
        if what.endswith("knew"):
            local.leave_unacknowledged("nodes/lock/status", monkeypatch)
        await dead.start()
        await local.online("lock")
        dead.suspend()
        if what.startswith("the broker"):
            local.kill_broker()
        else:
            await local.restart()
        await dead.kill()
        await local.online("lamp")
        await local.online("lock", False)
        await local.online("lamp")  # it came back, and said so


def reporting(session: str, online: bool = True) -> bytes:
    return msgspec.json.encode({"online": online, "session": session})


@pytest.mark.parametrize("local", ["embedded"], indirect=True)
@pytest.mark.parametrize("late", [reporting("1"), reporting("2", online=False)], ids=["other", "goodbye"])
async def test_a_status_from_before_that_comes_after_the_newest_says_nothing(
    local: MqttHub, late: bytes
) -> None:
    """The embedded broker may pass a status on, and then answer the subscription with the one before."""
    assert local.hub.mqtt is not None
    local.hub.mqtt.devices.connections("lock", True)
    hear, handled = local.hub.mqtt.links["reports"]._on_message, asyncio.Event()
    hear("nodes/lock/status", reporting("2"), False, lambda: None)
    hear("nodes/lock/status", late, True, handled.set)
    await asyncio.wait_for(handled.wait(), GUARD)
    session = local.hub.gateway.sessions.devices["lock"]
    assert isinstance(session, MqttDevice)
    assert session.session == "2"


@pytest.mark.parametrize("local", ["embedded"], indirect=True)
async def test_a_push_in_a_status_from_before_is_still_stored(local: MqttHub) -> None:
    assert local.hub.mqtt is not None
    local.hub.mqtt.devices.connections("lock", True)
    hear, handled = local.hub.mqtt.links["reports"]._on_message, asyncio.Event()
    push = {"type": "event_report", "data": {"battery": 7}}
    late = msgspec.json.encode({"online": True, "session": "1", "data": push})
    async with App(local.hub.url, local.phone) as app:
        pushes = app.pushes()
        hear("nodes/lock/status", reporting("2", online=False), False, lambda: None)
        hear("nodes/lock/status", late, True, handled.set)
        await asyncio.wait_for(handled.wait(), GUARD)
        assert not local.hub.gateway.online("lock")
        async with asyncio.timeout(GUARD):
            async for told in pushes:
                if isinstance(told, Push) and told.type == "event_report":
                    assert told.data == {"battery": 7}
                    return


@pytest.mark.parametrize("local", ["embedded"], indirect=True)
async def test_a_status_that_the_broker_kept_to_itself_is_asked_for_again(
    local: MqttHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded broker may not pass a status on that is published while the hub subscribes."""
    assert local.hub.mqtt is not None
    link = local.hub.mqtt.links["reports"]
    hear, subscribe, asked = link._on_message, link.subscribe, asyncio.Event()

    def unheard(topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        if asked.is_set():
            hear(topic, payload, old, ack)
        else:
            ack()

    async def ask(*filters: str) -> None:
        asked.set()
        await subscribe(*filters)

    monkeypatch.setattr(link, "_on_message", unheard)
    monkeypatch.setattr(link, "subscribe", ask)
    device = MqttLink(local.device_url, lambda topic, payload, old, ack: ack())
    await device.start()
    try:
        await device.connected(GUARD)
        await device.publish("nodes/lock/status", reporting("1"), retain=True)
        assert not local.hub.gateway.online("lock")
        monkeypatch.setattr(link, "_clean", True)  # the broker does not know the session of this client
        link.reconnect("a new session")
        await local.online("lock")
    finally:
        await device.stop()


async def test_a_device_that_dies_with_an_outside_broker_is_not_believed_in_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that has forgotten its sessions has forgotten the wills."""
    monkeypatch.setattr("duly.apps.gateway.mqtt_presence.GRACE", 3.0)
    monkeypatch.setattr("duly.server.maintenance.REFRESH_SECONDS", 0.1)
    broker = Mosquitto("persistence false")
    broker.start()
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt=broker.url("hub")))
    try:
        await hub.start()
        local = MqttHub(hub, "", "")
        for name in ("lock", "lamp"):
            await hub.accounts.add(Role.DEVICE, name)
        dead = DeviceProcess(tmp_path / "lock", "lock", broker.url("lock"))
        async with Device(broker.url("lamp")):
            await dead.start()
            await local.online("lock")
            await local.online("lamp")
            dead.suspend()
            broker.stop(signal.SIGKILL)
            await dead.kill()
            broker.start()
            await local.online("lock", False)
            assert hub.gateway.online("lamp"), "it came back, and said so"
    finally:
        await hub.stop()
        broker.remove()


async def test_who_says_how_often_he_speaks_is_given_up_after_three_times_that_in_silence(
    local: MqttHub,
) -> None:
    link = MqttLink(local.device_url, lambda topic, payload, old, ack: ack())
    await link.start()
    try:
        await link.connected(GUARD)
        for _ in range(2):  # who speaks again is there again
            await link.publish(
                "nodes/lock/status", b'{"online":true,"session":"1","heartbeat":1}', retain=True
            )
            await local.online("lock")
            heard = asyncio.get_running_loop().time()
            await local.online("lock", False)
            assert asyncio.get_running_loop().time() - heard > 2
    finally:
        await link.stop()


async def test_a_device_says_how_often_it_speaks_and_keeps_to_it(
    local: MqttHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.clients.mqtt_link.HEARTBEAT", 1)
    statuses: list[bytes] = []

    def hear(topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        statuses.append(payload)
        ack()

    url = local.device_url + "?client_id=listener"
    link = MqttLink(url, hear, subscriptions=["nodes/lock/status"])
    await link.start()
    try:
        await link.connected(GUARD)
        async with lock(local, []), asyncio.timeout(GUARD):
            while sum(b'"heartbeat":1' in status for status in statuses) < 3:
                await asyncio.sleep(0.05)
    finally:
        await link.stop()


async def test_a_queued_command_waits_for_its_device(local: MqttHub) -> None:
    effects: list[str] = []
    async with App(local.hub.url, local.phone) as app:
        command = await app.post("lock", "lock_control", {"open": True}, queue=True, expires=60)
        await command.accepted()
        async with lock(local, effects):
            assert (await asyncio.wait_for(command.ended(), GUARD)).done
    assert effects == [command.id]


async def test_a_repeat_does_nothing_twice_also_after_the_device_was_restarted(
    local: MqttHub, tmp_path: Path
) -> None:
    effects: list[str] = []
    memory = tmp_path / "lock.db"
    async with App(local.hub.url, local.phone) as app:
        async with lock(local, effects, memory):
            await local.online("lock")
            command = await app.post("lock", "lock_control", {"open": True})
            await command.ended()
        async with lock(local, effects, memory):
            await local.online("lock")
            assert (await app.send("lock", "lock_control", {"open": True}, id=command.id)).done
    assert len(effects) == 1


async def test_tasks_that_overtake_each_other_take_effect_in_order(
    local: MqttHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a broker dies with the first, and only the second finds its device listening again."""
    held: list[OutgoingFrame] = []

    def push(self: MqttDevice, frame: OutgoingFrame) -> None:
        if isinstance(frame, CommandFrame) and frame.type == "lock_control":
            held.append(frame)
            for one in reversed(held) if len(held) == 2 else ():
                whole(self, one)

    whole = MqttDevice.push
    monkeypatch.setattr(MqttDevice, "push", push)
    effects: list[str] = []
    async with lock(local, effects), App(local.hub.url, local.phone) as app:
        await local.online("lock")
        commands = [await app.post("lock", "lock_control", {"open": True}) for _ in range(2)]
        assert [(await command.ended()).state for command in commands] == ["done", "done"]
    assert effects == [command.id for command in commands]


async def test_a_push_is_kept_until_the_hub_has_stored_it(local: MqttHub) -> None:
    async with lock(local, []) as device:
        await local.online("lock")
        async with asyncio.timeout(GUARD):
            await device.push("event_report", 0)
        await local.hub.stop()
        sent = [device.push("event_report", n) for n in range(1, 20)]
        await asyncio.sleep(0.2)
        assert not any(push.stored for push in sent)
        settings = local.hub.settings
        port = int(local.hub.mqtt_url.rsplit(":", 1)[1]) if not settings.mqtt else 0
        local.hub = Hub(msgspec.structs.replace(settings, mqtt_port=port))
        await local.hub.start()
        async with asyncio.timeout(GUARD):
            for push in sent:
                await push
        entries = await local.hub.ledger.entries("push/lock", 0, 1_000)
        told = [msgspec.json.decode(entry.body) for entry in entries]
        assert [frame["data"] for frame in told if frame["type"] == "event_report"] == list(range(20))


async def test_what_a_device_pushes_reaches_the_apps(local: MqttHub) -> None:
    async with lock(local, []) as device, App(local.hub.url, local.phone) as app:
        await local.online("lock")
        device.push("event_report", {"n": 1})
        async with asyncio.timeout(GUARD):
            async for push in app.pushes():
                if isinstance(push, Push) and push.type == "event_report":
                    assert push.data == {"n": 1}
                    break
