"""What a device behind an outside broker sees of a command: with MQTT 5 its properties, with 3.1.1 the same
payload and nothing else; and what a sender learns if the broker refuses it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests import servers
from tests.end_to_end.raw import join

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PENDING, STATUS = "nodes/lock/pending", "nodes/lock/status"


class PahoDevice:
    """A device that knows MQTT and nothing of duly."""

    def __init__(self, port: int, version: MQTTProtocolVersion) -> None:
        self._loop = asyncio.get_running_loop()
        self.tasks: asyncio.Queue[paho.MQTTMessage] = asyncio.Queue()
        self._ready = asyncio.Event()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, f"paho-{version}", protocol=version)
        self.client.on_message = lambda c, u, m: self._soon(self.tasks.put_nowait, m)
        self.client.on_subscribe = lambda *_: self._soon(self._ready.set)
        self.client.connect("127.0.0.1", port)

    def _soon(self, function: Any, *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    async def __aenter__(self) -> PahoDevice:
        self.client.loop_start()
        self.client.subscribe(PENDING, 1)
        async with asyncio.timeout(20):
            await self._ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.disconnect()
        await asyncio.to_thread(self.client.loop_stop)

    async def task(self) -> paho.MQTTMessage:
        async with asyncio.timeout(20):
            return await self.tasks.get()

    def is_online(self) -> None:
        self.client.publish(STATUS, json.dumps({"online": True, "session": "1"}).encode(), qos=1)


@asynccontextmanager
async def hub_at(server: servers.Mosquitto, folder: Path) -> AsyncIterator[tuple[Hub, str]]:
    hub = Hub(Settings(data=str(folder), port=0, mqtt=server.url("hub")))
    await hub.start()
    try:
        phone = await hub.accounts.add(Role.APP, "phone")
        await hub.accounts.add(Role.DEVICE, "lock")
        await hub.accounts.grant("phone", "lock")
        assert hub.mqtt is not None
        for link in hub.mqtt.links.values():
            await link.connected()
        yield hub, phone
    finally:
        await hub.stop()


async def online(hub: Hub) -> None:
    async with asyncio.timeout(20):
        while not hub.gateway.online("lock"):
            await asyncio.sleep(0.01)


async def test_with_5_a_device_sees_the_expiry_the_trace_and_where_to_answer_with_3_the_same_payload(
    mosquitto_server: servers.Mosquitto, tmp_path: Path
) -> None:
    new, old = (
        PahoDevice(mosquitto_server.port, version)
        for version in (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
    )
    async with hub_at(mosquitto_server, tmp_path) as (hub, token), new, old, join(hub.url, token) as phone:
        assert hub.mqtt is not None
        assert hub.mqtt.state()["version"] == 5
        new.is_online()
        await online(hub)
        seq_id = await phone.command(
            "lock",
            exp=round(time.time() * 1000) + 60_000,
            traceparent=PARENT,
            tracestate="vendor=1",
        )
        message = await new.task()
        task, about = json.loads(message.payload), message.properties
        assert about is not None
        assert 1 <= about.MessageExpiryInterval <= 60
        assert about.ResponseTopic == "nodes/hub/complete"
        assert about.CorrelationData == task["msg_id"].encode()
        properties = dict(about.UserProperty)
        assert properties == {"traceparent": task["traceparent"], "tracestate": "vendor=1"}
        assert properties["traceparent"][:35] == PARENT[:35], "the same trace"
        assert (await old.task()).payload == message.payload
        answer = {"msg_id": task["msg_id"], "value": {"open": True}}
        new.client.publish(about.ResponseTopic, json.dumps(answer).encode(), qos=1)
        end = await phone.first(lambda frame: frame.get("seq_id") == seq_id and frame["type"] == "ack")
        assert (end["state"], end["data"]) == ("done", {"open": True})


@pytest.fixture
def forbidding() -> Iterator[servers.Mosquitto]:
    """A broker that lets no client command the lock."""
    server = servers.Mosquitto("acl_file {folder}/acl")
    (server.folder / "acl").write_text("pattern readwrite nodes/hub/#\npattern readwrite nodes/+/status\n")
    try:
        server.start()
        yield server
    finally:
        server.remove()


async def test_a_command_that_the_broker_refuses_has_the_reason_under_its_id(
    forbidding: servers.Mosquitto, tmp_path: Path
) -> None:
    """With MQTT 3.1.1 the broker would have confirmed it."""
    lock = PahoDevice(forbidding.port, MQTTProtocolVersion.MQTTv311)
    lock.client.username_pw_set("lock")
    async with hub_at(forbidding, tmp_path) as (hub, token), lock, join(hub.url, token) as phone:
        lock.is_online()
        await online(hub)
        seq_id = await phone.command("lock", exp=round(time.time() * 1000) + 60_000)
        async with asyncio.timeout(20):
            while not (found := await hub.ledger.refusals(10, of=("phone", seq_id))):
                await asyncio.sleep(0.05)
    assert found[0].word == "not_allowed"
    assert "not sent to lock: mqtt://" in found[0].reason
    assert "refuses a message to nodes/lock/pending: not authorized (0x87)" in found[0].reason
