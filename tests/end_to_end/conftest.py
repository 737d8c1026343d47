"""A hub in this process, with two apps and two devices that may use each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from duly.core.units import SECOND
from duly.identity.accounts import Role
from duly.runtime.clock import Clock, SystemClock
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.people import Person, enter
from tests.end_to_end.raw import PATIENCE, Peer, join
from tests.patient_loop import PatientClock
from tests.servers import Postgres


class Ahead:
    """The machine's clock, that far ahead: how a test lets hours pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = 0.0

    def now(self) -> int:
        return self._clock.now() + round(self.seconds * SECOND)

    def steady(self) -> int:
        return self._clock.steady() + round(self.seconds * SECOND)


class HubUnderTest:
    """A hub that can be stopped and started again on the same data and port."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._settings, self._port = folder, settings, 0
        self.tokens: dict[str, str] = {}
        self.clock = Ahead(PatientClock() if "patience" in settings else SystemClock())

    async def start(self) -> None:
        self.hub = Hub(Settings(data=str(self._folder), port=self._port, no_mqtt=True, **self._settings))
        await self.hub.start()
        self.hub.ledger.clock = self.clock
        self._port = int(self.hub.url.rsplit(":", 1)[1])

    async def restart(self) -> None:
        await self.hub.stop()
        await self.start()

    async def people(self) -> None:
        accounts = self.hub.accounts
        for role, name in (
            (Role.APP, "phone"), (Role.APP, "tablet"), (Role.DEVICE, "lock"), (Role.DEVICE, "lamp"),
            (Role.ADMIN, "root"),
        ):  # fmt: skip
            self.tokens[name] = await accounts.add(role, name)
        for app in ("phone", "tablet"):
            for device in ("lock", "lamp"):
                await accounts.grant(app, device)

    @property
    def url(self) -> str:
        return self.hub.url

    def join(self, name: str, cursors: dict[str, int] | None = None, **options: Any) -> Joining:
        return join(self.url, self.tokens[name], cursors, **options)

    async def until(self, true: Callable[[], bool]) -> None:
        """Until something inside the hub is so that no frame tells of."""
        async with asyncio.timeout(PATIENCE):
            while not true():
                await asyncio.sleep(0.005)

    async def refused(self) -> list[tuple[str, str]]:
        """(who, word) of everything that was refused, oldest first."""
        return [(r.scope, r.word) for r in reversed(await self.hub.ledger.refusals(10_000))]

    async def state(self, scope: str, seq_id: str) -> str | None:
        record = await self.hub.ledger.outcome(scope, seq_id)
        return None if record is None else record.state.word

    async def reaches(self, scope: str, seq_id: str, state: str) -> None:
        """Wait until a message is in this state."""
        async with asyncio.timeout(PATIENCE):
            while await self.state(scope, seq_id) != state:
                await asyncio.sleep(0.005)


class HubWithPeople(HubUnderTest):
    """A hub with people in it."""

    async def add_users(self, *names: str) -> None:
        for name in names:
            self.tokens[name] = await self.hub.accounts.add(Role.USER, name)

    def enter(self, name: str, cursors: dict[str, int] | None = None) -> AbstractAsyncContextManager[Person]:
        return enter(self.url, self.tokens[name], cursors)


Joining = AbstractAsyncContextManager[Peer]
Open = Callable[..., Awaitable[HubUnderTest]]


@pytest.fixture
async def open_local(tmp_path: Path) -> AsyncIterator[Open]:
    """Makes a hub with settings of the test's own."""
    opened: list[HubUnderTest] = []

    async def make(**settings: Any) -> HubUnderTest:
        local = HubUnderTest(tmp_path / f"hub{len(opened)}", settings)
        await local.start()
        opened.append(local)
        await local.people()
        return local

    yield make
    for local in opened:
        await local.hub.stop()


@pytest.fixture
async def local(open_local: Open) -> HubUnderTest:
    return await open_local()


@pytest.fixture
async def open_chat_hub(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[HubWithPeople]]]:
    chat_hubs: list[HubWithPeople] = []

    async def make(**settings: Any) -> HubWithPeople:
        chat_hub = HubWithPeople(tmp_path / f"chat{len(chat_hubs)}", settings)
        await chat_hub.start()
        chat_hubs.append(chat_hub)
        await chat_hub.add_users("ann", "bob", "cid", "eve")
        return chat_hub

    yield make
    for chat_hub in chat_hubs:
        await chat_hub.hub.stop()


@pytest.fixture
async def chat_hubs(
    postgres_server: Postgres, tmp_path: Path
) -> AsyncIterator[tuple[HubWithPeople, HubWithPeople]]:
    """Two hubs on one PostgreSQL, with the same people."""
    url = postgres_server.create_database()
    shared = {"ledger": url, "secret_key": str(tmp_path / "secret.key")}
    here, there = (HubWithPeople(tmp_path / name, shared) for name in ("here", "there"))
    for chat_hub in (here, there):
        await chat_hub.start()
    await here.add_users("ann", "bob", "cid")
    await there.hub.accounts.refresh()
    there.tokens = here.tokens
    yield here, there
    for chat_hub in (here, there):
        await chat_hub.hub.stop()


@pytest.fixture
async def chat_hub(open_chat_hub: Callable[..., Awaitable[HubWithPeople]]) -> HubWithPeople:
    return await open_chat_hub()


@pytest.fixture
async def hasty(open_local: Open) -> HubUnderTest:
    """A hub that waits 0.3 s for a device's answer."""
    return await open_local(patience=0.3)
