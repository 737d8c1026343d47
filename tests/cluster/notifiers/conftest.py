"""One contract, every notifier: a test that asks for `house` runs on local, Redis and PostgreSQL."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import pytest

from duly.cluster.notifier import Notifier
from duly.cluster.notifiers import open_notifier
from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from tests import servers
from tests.guard import GUARD


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.Redis]:
    server = servers.Redis()
    try:
        server.start()
        yield server
    finally:
        server.remove()


class NotifiedHub:
    """A hub with a notifier, and the hints that it has heard."""

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self.heard: list[str] = []
        notifier.listen("device", self.heard.append)

    async def hears(self, name: str, hint: Callable[[], None] | None = None) -> None:
        """Until this name was heard; `hint` is tried again and again, where one may be lost."""
        async with asyncio.timeout(GUARD):
            while name not in self.heard:
                if hint is not None:
                    hint()
                await asyncio.sleep(0.02)


class NotifierBus:
    """Where the notifiers meet; the server behind them can be stopped and started."""

    def __init__(self, url: str, server: servers.Redis | servers.Postgres | None) -> None:
        self.url, self.server = url, server
        self._local_bus = LocalBus()
        self._hubs: list[NotifiedHub] = []

    async def join(self) -> NotifiedHub:
        name = secrets.token_hex(4)
        hub = NotifiedHub(
            LocalNotifier(name, self._local_bus) if self.server is None else open_notifier(self.url, name)
        )
        await hub.notifier.start()
        self._hubs.append(hub)
        return hub

    async def pair(self) -> tuple[NotifiedHub, NotifiedHub]:
        """Two who hear each other."""
        one, other = await self.join(), await self.join()
        await other.hears("hello", lambda: one.notifier.hint("device", "hello"))
        await one.hears("hello", lambda: other.notifier.hint("device", "hello"))
        return one, other

    async def close(self) -> None:
        for hub in self._hubs:
            await hub.notifier.stop()


@pytest.fixture(params=["local", "redis", "postgres"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[NotifierBus]:
    match request.param:
        case "redis":
            server = request.getfixturevalue("redis_server")
            bus = NotifierBus(server.url, server)
        case "postgres":
            server = request.getfixturevalue("postgres_server")
            bus = NotifierBus(server.create_database(), server)
        case _:
            bus = NotifierBus("local", None)
    yield bus
    await bus.close()


def restart(server: servers.Redis | servers.Postgres, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        server.stop(how)
    server.start()
