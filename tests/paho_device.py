"""A device that knows MQTT, of the version that a test wants, and nothing of duly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.guard import GUARD


class PahoDevice:
    """A client of paho's that hears one topic. `async with` connects and subscribes."""

    def __init__(self, port: int, topic: str, version: MQTTProtocolVersion, username: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self._topic = topic
        self._heard: asyncio.Queue[paho.MQTTMessage] = asyncio.Queue()
        self._ready = asyncio.Event()
        self._port = port
        self.client = paho.Client(CallbackAPIVersion.VERSION2, f"paho-{id(self)}", protocol=version)
        if username:
            self.client.username_pw_set(username)
        self.client.on_message = lambda c, u, message: self._soon(self._heard.put_nowait, message)
        self.client.on_subscribe = lambda *_: self._soon(self._ready.set)

    def _soon(self, function: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    async def __aenter__(self) -> PahoDevice:
        self.client.connect("127.0.0.1", self._port)
        self.client.loop_start()
        self.client.subscribe(self._topic, 1)
        async with asyncio.timeout(GUARD):
            await self._ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.disconnect()
        await asyncio.to_thread(self.client.loop_stop)

    async def hear(self) -> paho.MQTTMessage:
        """The next message."""
        async with asyncio.timeout(GUARD):
            return await self._heard.get()

    async def hear_with_properties(self) -> tuple[paho.MQTTMessage, Any]:
        """The next message and its properties, which paho's type does not name."""
        message = await self.hear()
        assert message.properties is not None
        return message, message.properties
