"""The hub's own connection to the embedded broker: over it the hub learns who is connected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from duly.broker.embedded import EmbeddedBroker
from tests.broker.test_embedded import Client, node, running, until


async def test_a_client_that_left_while_the_hub_was_not_connected_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = EmbeddedBroker(tmp_path)
    await broker.set_users([node("kitchen"), node("cellar")])
    callout, told = broker.clients.callout, list[tuple[str, bool]]()
    callout.on_connections = lambda name, connected: told.append((name, connected))
    connect, left = callout._connect, asyncio.Event()

    async def connect_late(port: int) -> asyncio.StreamReader:
        await left.wait()
        return await connect(port)

    async with running(broker), Client(broker, "cellar", "secret"):
        async with Client(broker, "kitchen", "secret"):
            monkeypatch.setattr(callout, "_connect", connect_late)
            assert callout._writer is not None
            callout._writer.transport.abort()
            await until(lambda: callout._writer is None)
        left.set()
        await until(lambda: ("kitchen", False) in told)
        await until(lambda: [connected for name, connected in told if name == "cellar"][-1])


async def test_others_wait_until_the_first_account_is_in(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path)
    await broker.set_users([node("hub"), node("kitchen")])
    callout, told = broker.clients.callout, list[tuple[str, bool]]()
    callout.on_connections = lambda name, connected: told.append((name, connected))
    callout.admit_first("hub")
    async with running(broker):
        kitchen = Client(broker, "kitchen", "secret")
        await kitchen.link.start()
        try:
            await until(lambda: callout._judging)
            async with Client(broker, "hub", "secret"):
                assert ("kitchen", True) not in told
                assert not kitchen.link.up
                callout.admit_all()
                await until(lambda: kitchen.link.up)
        finally:
            await kitchen.link.stop()
