"""One contract, every ledger: a test that asks for `store` runs on memory, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from duly.storage.memory import Disk, MemoryLedger
from duly.testing import ManualClock


class Store:
    """A place where a ledger lives; it can be opened, closed, and opened again."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.clock = ManualClock()
        self._disk = Disk()
        self._open: list[Ledger] = []

    async def open(self) -> Ledger:
        ledger: Ledger
        if self.kind == "memory":
            ledger = MemoryLedger(self.clock, disk=self._disk)
        else:
            ledger = await open_ledger(self.url, clock=self.clock)
        self._open.append(ledger)
        return ledger

    async def reopen(self) -> Ledger:
        await self.close()
        return await self.open()

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()


@pytest.fixture(params=["memory", "sqlite", "shared", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    match request.param:
        case "sqlite":
            url = f"sqlite:///{tmp_path}/ledger.db"
        case "shared":
            url = f"sqlite:///{tmp_path}/ledger.db?mode=shared"
        case "postgres":
            server = request.getfixturevalue("postgres_server")
            url = server.create_database()
        case _:
            url = "memory:"
    place = Store(request.param, url)
    yield place
    await place.close()


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    return await store.open()
