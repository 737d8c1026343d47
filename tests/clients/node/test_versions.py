"""Nodes of MQTT 5 and of 3.1.1 work together, and a task says in properties of MQTT 5 until when it is of use
and where its end is awaited."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from duly.clients.node.node import Node
from tests import servers
from tests.clients.node.nodes import Brokered
from tests.paho_device import PahoDevice


@pytest.fixture
def at(at_mosquitto: Brokered) -> Brokered:
    return at_mosquitto


@pytest.mark.parametrize(("asks", "answers"), [(5, 3), (3, 5)])
async def test_a_node_of_each_version_calls_one_of_the_other(at: Brokered, asks: int, answers: int) -> None:
    def node(name: str, version: int) -> Node:
        return Node(f"{at.server.url(name)}?version={version}", name=name)

    b = node(at.b, answers)

    @b.task("echo", effect="at_least_once")
    async def echo(task: Any) -> object:
        return task.payload

    async with node(at.a, asks) as a, b:
        await b.ready()
        assert await a.call(at.b, "echo", {"n": 1}) == {"n": 1}
        assert (a._mailbox.link.version, b._mailbox.link.version) == (asks, answers)


async def test_a_task_has_an_expiry_and_a_topic_for_its_answer(at: Brokered) -> None:
    peer = PahoDevice(at.server.port, f"nodes/{at.b}/pending", MQTTProtocolVersion.MQTTv5)
    async with peer, at.node(at.a) as a:
        sent = await a.send(at.b, "turn_on", {}, expires=60)
        message, about = await peer.hear_with_properties()
        assert 1 <= about.MessageExpiryInterval <= 61
        assert (about.ResponseTopic, about.CorrelationData) == (f"nodes/{at.a}/complete", sent.id.encode())
        answer = {"msg_id": json.loads(message.payload)["msg_id"], "value": 7}
        peer.client.publish(about.ResponseTopic, json.dumps(answer), qos=1)
        async with asyncio.timeout(20):
            assert await sent.result == 7


async def test_a_task_that_the_broker_refuses_is_recorded_with_the_reason(tmp_path: Path) -> None:
    """With MQTT 3.1.1 the broker would have confirmed it, and the task would have ended as unknown."""
    server = servers.Mosquitto("acl_file {folder}/acl")
    (server.folder / "acl").write_text("pattern readwrite nodes/a/#\n")
    try:
        server.start()
        async with Node(server.url("a"), store=str(tmp_path / "a.db")) as a:
            await a.ready()
            sent = await a.send("b", "turn_on", {}, expires=60)
            assert a._ledger is not None
            async with asyncio.timeout(20):
                while not (found := await a._ledger.refusals(10, of=("a", sent.id))):
                    await asyncio.sleep(0.01)
            assert found[0].word == "not_allowed"
            assert "refuses a message to nodes/b/pending: not authorized (0x87)" in found[0].reason
    finally:
        server.remove()
