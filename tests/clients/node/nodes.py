"""What tests of nodes share: a broker, names of one's own in it, and a peer that knows no duly (paho)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from duly.clients.node.node import Node
from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.transports.mqtt.address import BrokerAddress
from tests import servers
from tests.guard import GUARD

SOON = RetryPolicy.fixed(300 * MS, tries=None)
_numbers = itertools.count()


def own_name(name: str) -> str:
    """Nobody else's at a broker that many tests use."""
    return f"{name}-{os.getpid()}-{next(_numbers)}"


class Brokered:
    """A broker, and nodes at it."""

    def __init__(self, server: servers.MqttServer) -> None:
        self.server = server
        self.a, self.b = own_name("A"), own_name("B")

    def node(self, name: str, **more: Any) -> Node:
        return Node(self.server.url(name), name=name, **({"resend": SOON} | more))

    def peer(self, name: str) -> PahoPeer:
        return PahoPeer(BrokerAddress.parse(self.server.url(f"{name}-peer")), name)


class PahoPeer:
    """Somebody who knows the seed and MQTT, and nothing of duly."""

    def __init__(self, address: BrokerAddress, name: str) -> None:
        self.name = name
        self.heard: list[tuple[str, Any]] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, address.client_id, clean_session=True)
        if address.username:
            self._client.username_pw_set(address.username, address.password or None)
        self._client.on_message = self._on_message
        self._client.on_subscribe = self._on_subscribe
        self._ready = asyncio.Event()
        self._address = address

    async def __aenter__(self) -> PahoPeer:
        self._client.connect(self._address.host, self._address.port)
        self._client.loop_start()
        kinds = ("pending", "ack", "complete", "failed")
        self._client.subscribe([(f"nodes/{self.name}/{kind}", 1) for kind in kinds])
        async with asyncio.timeout(GUARD):
            await self._ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)

    def _on_subscribe(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ready.set)

    def _on_message(self, _: paho.Client, __: Any, message: paho.MQTTMessage) -> None:
        self._loop.call_soon_threadsafe(self._hear, message.topic.rpartition("/")[2], bytes(message.payload))

    def _hear(self, kind: str, payload: bytes) -> None:
        self.heard.append((kind, json.loads(payload)))
        self._news.set()

    def say(self, to: str, kind: str, message: object, *, retain: bool = False) -> None:
        text = message if isinstance(message, bytes) else json.dumps(message).encode()
        self._client.publish(f"nodes/{to}/{kind}", text, qos=1, retain=retain)

    def ask(self, to: str, id: str, action: str = "turn_on", **more: Any) -> None:
        task = {"sender": self.name, "receiver": to, "msg_id": id, "action": action, "payload": {}}
        self.say(to, "pending", task | {"time": 1234567890, "exp": 9999999999} | more)

    async def hear(self, kind: str, count: int = 1, within: float = GUARD) -> list[Any]:
        """The first so many of a kind."""

        def found() -> list[Any]:
            return [message for k, message in self.heard if k == kind]

        await until(lambda: len(found()) >= count, within, self._news)
        return found()[:count]


async def until(true: Callable[[], Any], within: float = GUARD, news: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(within):
        while not true():
            if news is None:
                await asyncio.sleep(0.01)
            else:
                news.clear()
                await news.wait()
