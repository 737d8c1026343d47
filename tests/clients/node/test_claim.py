"""A process reads a mailbox only when no second one can find it free (docs/adr/0007)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from duly.clients.node import claim
from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.units import FOREVER
from duly.testing.conform.mqtt_server import MqttClient, MqttMessage, MqttServer
from duly.testing.conform.transcript import Transcript
from duly.wire import fd
from tests.clients.node.nodes import until
from tests.guard import GUARD


class LateServer(MqttServer):
    """A broker that confirms what it retains, and shows it to new subscriptions later, as NATS does."""

    def __init__(self) -> None:
        super().__init__(Transcript())
        self.hidden: list[MqttMessage] | None = []
        self.looks = 0

    async def _subscribe(self, client: MqttClient, writer: asyncio.StreamWriter, body: bytes) -> None:
        self.looks += 1
        await super()._subscribe(client, writer, body)

    def _hand_out(self, message: MqttMessage) -> None:
        if message.retained and self.hidden is not None:
            self.hidden.append(message)
            message = MqttMessage(message.topic, message.payload)
        super()._hand_out(message)

    def show(self) -> None:
        hidden, self.hidden = self.hidden or [], None
        self.retained |= {message.topic: message for message in hidden}


@asynccontextmanager
async def late_server() -> AsyncIterator[LateServer]:
    server = LateServer()
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def working(server: MqttServer) -> AsyncIterator[tuple[Node, list[object]]]:
    """A node that notes what it has run."""
    began: list[object] = []
    node = Node(f"mqtt://B@127.0.0.1:{server.port}?version=3")

    @node.task("work")
    async def work(task: Task) -> str:
        began.append(task.payload)
        return "done"

    await node.start()
    try:
        yield node, began
    finally:
        await node.stop()


async def test_a_node_takes_nothing_before_the_broker_shows_its_status() -> None:
    """Until then a second process would be told that the mailbox is free, and would get the same tasks."""
    async with (
        late_server() as server,
        working(server) as (node, began),
        Node(f"mqtt://A@127.0.0.1:{server.port}?version=3") as a,
        asyncio.timeout(GUARD),
    ):
        task = await a.send("B", "work", 1)
        looks = server.looks
        await until(lambda: server.hidden and server.looks > looks + 3)
        assert (began, node.situation) == ([], "connecting")
        server.show()
        assert await task.result == "done"
        assert (began, node.situation) == ([1], "online")


@pytest.mark.parametrize("online", [b"true", b"false"], ids=["online", "its will"])
async def test_a_node_steps_back_from_a_process_that_is_heard_before_it_may_begin(online: bytes) -> None:
    """A broker may go on with a connection for a while after it has given its client id to another. A process
    whose will is heard had the mailbox until then, and may have begun."""
    async with late_server() as server, working(server) as (node, began), asyncio.timeout(GUARD):
        await until(lambda: server.hidden)
        server.publish("nodes/B/pending", pending(1))
        before = node._mailbox.link.connections
        server.publish("nodes/B/status", b'{"online":%b,"session":"another.1"}' % online)
        await until(lambda: node._mailbox.link.problem or node._mailbox.link.connections > before)
        server.show()
        assert began == []


class TakenServer(MqttServer):
    """A broker whose session of a node has a task; another process takes it over before the node has
    subscribed."""

    def __init__(self) -> None:
        super().__init__(Transcript())
        self.taken = False

    async def _subscribe(self, client: MqttClient, writer: asyncio.StreamWriter, body: bytes) -> None:
        if self.taken or client.clean:
            await super()._subscribe(client, writer, body)
            return
        self.taken = True
        client.deliver(MqttMessage("nodes/B/pending", pending(1)))
        client.unacknowledged.clear()  # the other process has acknowledged it
        self._gone(client)
        writer.close()


async def test_a_node_drops_what_came_on_a_connection_that_ended_before_it_had_subscribed() -> None:
    """Another process got that as well. Forty tasks ran twice when this one took the mailbox over later."""
    server = TakenServer()
    await server.start("127.0.0.1", 0)
    try:
        async with working(server) as (node, began), asyncio.timeout(GUARD):
            await until(lambda: server.taken)
            await node.ready()
            server.publish("nodes/B/pending", pending(2))
            await until(lambda: began)
            assert began == [2]
    finally:
        await server.stop()


def pending(payload: int) -> bytes:
    return fd.encode(
        fd.FdPending(
            "A", "B", f"task-{payload}", "work", exp=FOREVER, payload=fd.content_of(payload, fd.Form.JSON)
        )
    )


async def test_a_node_goes_on_at_a_broker_that_retains_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claim, "SHOWN_WITHIN", 2 * claim.LOOK_EVERY)
    with caplog.at_level(logging.WARNING):
        async with late_server() as server, working(server) as (node, _):
            async with asyncio.timeout(GUARD):
                await node.ready()
    assert "does not retain the status of B" in caplog.text
