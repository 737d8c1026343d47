"""A hub for tests to use, with people and things in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from duly.core.lifecycle import State
from duly.core.messages import key_of
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.guard import GUARD


class LocalHub:
    """A hub with an app and devices that may use each other; it can be stopped and started again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._settings = {"no_mqtt": True, **settings}
        self.port = 0
        self.tokens: dict[str, str] = {}

    async def start(self) -> None:
        self.hub = Hub(Settings(data=str(self.folder), port=self.port, **self._settings))
        await self.hub.start()
        self.port = int(self.hub.url.rsplit(":", 1)[1])

    async def stop(self) -> None:
        await self.hub.stop()

    async def ended(self, id_: str) -> None:
        """Until a command of the phone is done, by the hub's ledger."""
        async with asyncio.timeout(GUARD):
            while (found := await self.hub.ledger.find(key_of("phone", id_))) is None or (
                found.state is not State.DONE
            ):
                await asyncio.sleep(0.01)

    async def add(self, role: Role, *names: str) -> None:
        for name in names:
            self.tokens[name] = await self.hub.accounts.add(role, name)

    @property
    def url(self) -> str:
        return self.hub.url
