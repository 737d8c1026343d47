"""A command whose hub was killed keeps its trace: the hub that hands it over finds it in the ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.runtime.kept_traces import BUCKETS, HUBS
from duly.storage import open_ledger
from tests.end_to_end.processes import HubProcess
from tests.end_to_end.raw import join
from tests.guard import GUARD
from tests.servers import Postgres

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FAR = 600_000
"""Milliseconds that a command has."""


class TwoHubs:
    """Two hubs as processes on one PostgreSQL."""

    def __init__(self, folder: Path, ledger_url: str) -> None:
        settings = {"ledger": ledger_url, "secret_key": str(folder / "secret.key")}
        self.first = HubProcess(folder / "first", **settings)
        self.second = HubProcess(folder / "second", **settings)
        self.tokens: dict[str, str] = {}

    async def start(self) -> None:
        self.tokens = await self.first.prepare(["phone"], ["lock"])
        self.second.folder.mkdir(mode=0o700)
        await asyncio.gather(self.first.start(), self.second.start())

    async def trace_is_kept(self) -> None:
        """Until a hub has kept a trace in the ledger."""
        async with asyncio.timeout(GUARD), await open_ledger(self.first.ledger_url) as ledger:
            while not any([await ledger.bucket(BUCKETS + hub) for hub in await ledger.bucket(HUBS)]):
                await asyncio.sleep(0.05)


@pytest.fixture
async def hubs(tmp_path: Path, postgres_server: Postgres) -> AsyncIterator[TwoHubs]:
    it = TwoHubs(tmp_path, postgres_server.create_database())
    await it.start()
    yield it
    await asyncio.gather(it.first.kill(), it.second.kill())


async def test_a_command_that_waited_at_a_hub_that_died_is_traced(hubs: TwoHubs) -> None:
    async with join(hubs.first.url, hubs.tokens["phone"]) as phone:
        exp = round(time.time() * 1000) + FAR
        await phone.command("lock", queue=True, exp=exp, traceparent=PARENT)
        assert (await phone.hear())["code"] == 0
        await hubs.trace_is_kept()
        await hubs.first.kill()
    async with join(hubs.second.url, hubs.tokens["lock"]) as lock:
        assert (await lock.hear(GUARD))["traceparent"] == PARENT


async def test_a_command_under_way_at_a_hub_that_died_is_traced_at_the_next(hubs: TwoHubs) -> None:
    async with join(hubs.first.url, hubs.tokens["phone"]) as phone:
        async with join(hubs.first.url, hubs.tokens["lock"]) as lock:
            id_ = await phone.command("lock", exp=round(time.time() * 1000) + FAR, traceparent=PARENT)
            assert (await lock.hear())["seq_id"] == id_
            await hubs.trace_is_kept()
            await hubs.first.kill()
        async with join(hubs.second.url, hubs.tokens["lock"]) as lock:
            again = await lock.first(lambda frame: frame.get("seq_id") == id_, GUARD)
            assert again["traceparent"] == PARENT
