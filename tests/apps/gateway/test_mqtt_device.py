"""What a device behind an outside broker sees of a command: with MQTT 5 its properties, with 3.1.1 the same
payload and nothing else; and what a sender learns if the broker refuses it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests import servers
from tests.end_to_end.raw import join
from tests.guard import GUARD
from tests.paho_device import PahoDevice

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PENDING, STATUS = "nodes/lock/pending", "nodes/lock/status"


def is_online(lock: PahoDevice) -> None:
    lock.client.publish(STATUS, json.dumps({"online": True, "session": "1"}).encode(), qos=1)


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
            await link.connected(GUARD)
        yield hub, phone
    finally:
        await hub.stop()


async def online(hub: Hub) -> None:
    async with asyncio.timeout(GUARD):
        while not hub.gateway.online("lock"):
            await asyncio.sleep(0.01)


async def test_with_5_a_device_sees_the_expiry_the_trace_and_where_to_answer_with_3_the_same_payload(
    mosquitto_server: servers.Mosquitto, tmp_path: Path
) -> None:
    new, old = (
        PahoDevice(mosquitto_server.port, PENDING, version)
        for version in (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
    )
    async with hub_at(mosquitto_server, tmp_path) as (hub, token), new, old, join(hub.url, token) as phone:
        assert hub.mqtt is not None
        assert hub.mqtt.state()["version"] == 5
        is_online(new)
        await online(hub)
        seq_id = await phone.command(
            "lock",
            exp=round(time.time() * 1000) + 60_000,
            traceparent=PARENT,
            tracestate="vendor=1",
        )
        message, about = await new.hear_with_properties()
        task = json.loads(message.payload)
        assert 1 <= about.MessageExpiryInterval <= 60
        assert about.ResponseTopic == "nodes/hub/complete"
        assert about.CorrelationData == task["msg_id"].encode()
        properties = dict(about.UserProperty)
        assert properties == {"traceparent": task["traceparent"], "tracestate": "vendor=1"}
        assert properties["traceparent"][:35] == PARENT[:35], "the same trace"
        assert (await old.hear()).payload == message.payload
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
    lock = PahoDevice(forbidding.port, PENDING, MQTTProtocolVersion.MQTTv311, "lock")
    async with hub_at(forbidding, tmp_path) as (hub, token), lock, join(hub.url, token) as phone:
        is_online(lock)
        await online(hub)
        seq_id = await phone.command("lock", exp=round(time.time() * 1000) + 60_000)
        async with asyncio.timeout(GUARD):
            while not (found := await hub.ledger.refusals(10, of=("phone", seq_id))):
                await asyncio.sleep(0.05)
    assert found[0].word == "not_allowed"
    assert "not sent to lock: mqtt://" in found[0].reason
    assert "refuses a message to nodes/lock/pending: not authorized (0x87)" in found[0].reason
