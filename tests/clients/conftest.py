from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.auth import Role
from duly.hub import Hub
from duly.settings import Settings


class Place:
    """A hub with an app and devices that may use each other; it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.tokens: dict[str, str] = {}

    async def start(self) -> None:
        self.hub = Hub(Settings(data=str(self.folder), port=self.port, no_mqtt=True))
        await self.hub.start()
        self.port = int(self.hub.url.rsplit(":", 1)[1])

    async def stop(self) -> None:
        await self.hub.stop()

    async def add(self, role: Role, *names: str) -> None:
        for name in names:
            self.tokens[name] = await self.hub.accounts.add(role, name)

    @property
    def url(self) -> str:
        return self.hub.url


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    it = Place(tmp_path / "hub")
    await it.start()
    await it.add(Role.APP, "phone", "tablet")
    await it.add(Role.DEVICE, "lock", "lamp")
    for device in ("lock", "lamp"):
        await it.hub.accounts.grant("phone", device)
    yield it
    await it.stop()
