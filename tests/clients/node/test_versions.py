"""Nodes of MQTT 5 and of 3.1.1 work together, and a task says in properties of MQTT 5 until when it is of use
and where its end is awaited."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from duly.clients.node.node import Node
from tests.clients.node.nodes import Brokered


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
    loop, heard = asyncio.get_running_loop(), asyncio.Queue[paho.MQTTMessage]()
    subscribed = asyncio.Event()
    peer = paho.Client(CallbackAPIVersion.VERSION2, at.b, protocol=MQTTProtocolVersion.MQTTv5)
    peer.on_message = lambda c, u, m: loop.call_soon_threadsafe(heard.put_nowait, m)
    peer.on_subscribe = lambda *_: loop.call_soon_threadsafe(subscribed.set)
    peer.connect("127.0.0.1", at.server.port)
    peer.loop_start()
    peer.subscribe(f"nodes/{at.b}/pending", 1)
    try:
        async with asyncio.timeout(20), at.node(at.a) as a:
            await subscribed.wait()
            sent = await a.send(at.b, "turn_on", {}, expires=60)
            message = await heard.get()
            task, about = json.loads(message.payload), message.properties
            assert about is not None
            assert 1 <= about.MessageExpiryInterval <= 61
            assert (about.ResponseTopic, about.CorrelationData) == (
                f"nodes/{at.a}/complete",
                sent.id.encode(),
            )
            peer.publish(about.ResponseTopic, json.dumps({"msg_id": task["msg_id"], "value": 7}), qos=1)
            assert await sent.result == 7
    finally:
        peer.disconnect()
        await asyncio.to_thread(peer.loop_stop)
