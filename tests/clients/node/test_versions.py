"""Nodes of MQTT 5 and of 3.1.1 work together, and a task says in properties of MQTT 5 until when it is of use
and where its end is awaited."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from duly.clients.node.node import Node
from tests import servers
from tests.clients.node.nodes import Brokered
from tests.guard import GUARD
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
        async with asyncio.timeout(GUARD):
            assert await sent.result == 7


def foreign_properties(seconds: int, correlation: bytes) -> Properties:
    """What a sender that is not duly may say of its message beside the payload."""
    untyped: Any = Properties
    about = untyped(PacketTypes.PUBLISH)
    about.MessageExpiryInterval = seconds
    about.ResponseTopic = "elsewhere/answers"
    about.CorrelationData = correlation
    about.ContentType = "application/json"
    about.PayloadFormatIndicator = 1
    about.UserProperty = [("traceparent", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"), ("trace", "ü" * 5_000)]
    return cast("Properties", about)


async def test_properties_of_a_foreign_task_change_neither_what_it_is_nor_where_it_is_answered(
    at: Brokered,
) -> None:
    ran: list[object] = []
    b = at.node(at.b)

    @b.task("count", effect="at_most_once")
    async def count(task: Any) -> object:
        ran.append(task.payload)
        return len(ran)

    v5, now = MQTTProtocolVersion.MQTTv5, int(time.time())
    task = {"sender": at.a, "receiver": at.b, "msg_id": "task-1", "action": "count", "payload": {"n": 1}}
    sent = json.dumps(task | {"time": now, "exp": now + 600})
    answers = PahoDevice(at.server.port, f"nodes/{at.a}/complete", v5)
    async with answers, PahoDevice(at.server.port, "elsewhere/#", v5) as elsewhere, b:
        await b.ready()
        for about in (foreign_properties(30, b"one"), foreign_properties(7, b"\0\xff" * 100), None):
            answers.client.publish(f"nodes/{at.b}/pending", sent, qos=1, properties=about)
            answer = await answers.hear()
            assert json.loads(answer.payload)["msg_id"] == "task-1"
        assert ran == [{"n": 1}], "the same task, whatever its properties are"
        elsewhere.client.publish("elsewhere/end", b"", qos=1)
        assert (await elsewhere.hear()).topic == "elsewhere/end", "a response topic is not obeyed"


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
            async with asyncio.timeout(GUARD):
                while not (found := await a._ledger.refusals(10, of=("a", sent.id))):
                    await asyncio.sleep(0.01)
            assert found[0].word == "not_allowed"
            assert "refuses a message to nodes/b/pending: not authorized (0x87)" in found[0].reason
    finally:
        server.remove()
