"""Several hubs on one PostgreSQL, in this process, with two apps and two devices that may use each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.conftest import Joining
from tests.end_to_end.raw import join
from tests.guard import GUARD
from tests.servers import Postgres

NAMES = {
    "phone": Role.APP, "tablet": Role.APP, "lock": Role.DEVICE, "lamp": Role.DEVICE, "root": Role.ADMIN,
}  # fmt: skip


class LocalCluster:
    """Hubs that can be stopped one by one; without `hints` each looks in the ledger now and then."""

    def __init__(self, folder: Path, server: Postgres, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        self.ledger_url = server.create_database()
        self.hubs: list[Hub] = []
        self.tokens: dict[str, str] = {}

    async def start(self, count: int, *, hints: bool = True) -> None:
        for n in range(count):
            where = Settings(
                data=str(self._folder / f"hub{n}"),
                port=0,
                ledger=self.ledger_url,
                secret_key=str(self._folder / "secret.key"),
                **{"no_mqtt": True} | self._settings,
            )
            hub = Hub(where)
            await hub.start()
            if not hints:
                assert hub.notifier is not None
                hub.notifier._listeners.clear()
            self.hubs.append(hub)
        accounts = self.hubs[0].accounts
        for name, role in NAMES.items():
            self.tokens[name] = await accounts.add(role, name)
        for app in ("phone", "tablet"):
            for device in ("lock", "lamp"):
                await accounts.grant(app, device)
        for hub in self.hubs:
            await hub.accounts.refresh()
            for link in hub.mqtt.links.values() if hub.mqtt is not None else ():
                await link.connected(GUARD)  # a hub does not wait for a broker that is not its own

    async def stop(self) -> None:
        for hub in self.hubs:
            await hub.stop()

    def join(self, hub: int, name: str, cursors: dict[str, int] | None = None) -> Joining:
        return join(self.hubs[hub].url, self.tokens[name], cursors)

    async def known(self, device: str) -> None:
        """Until every hub knows that a device is there."""
        await until(lambda: all(hub.gateway.online(device) for hub in self.hubs))


@asynccontextmanager
async def with_or_without_hints(
    request: pytest.FixtureRequest, hubs: int, folder: Path, server: Postgres, **settings: Any
) -> AsyncIterator[LocalCluster]:
    """Hubs that hear each other's notifications, or only look in the ledger from time to time."""
    hints = request.param == "hints"
    with pytest.MonkeyPatch.context() as patch:
        if not hints:
            patch.setattr("duly.cluster.remote.POLL_SECONDS", 0.2)  # without hints, all wait for it
        cluster = LocalCluster(folder, server, **settings)
        await cluster.start(hubs, hints=hints)
        yield cluster
        await cluster.stop()


async def until(true: Callable[[], bool], seconds: float = GUARD) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
