from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web_app
from argon2 import PasswordHasher

from duly.identity.accounts import Role
from tests import fork_server, servers
from tests.local_hub import LocalHub

Server = TypeVar("Server", bound=servers.MqttServer)

fork_server.install()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[servers.Embedded]:
    yield from _running(servers.Embedded())


@pytest.fixture(scope="session")
def mosquitto_server() -> Iterator[servers.Mosquitto]:
    yield from _running(servers.Mosquitto())


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[servers.RabbitMq]:
    yield from _running(servers.RabbitMq())


def _running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(autouse=True)
def forget_stopped_hubs() -> Iterator[None]:
    """aiohttp remembers the handlers of a thousand applications, and with them every hub that a worker has
    stopped: a gigabyte, and thousands of tasks that every `asyncio.run` looks through."""
    yield
    web_app._cached_build_middleware.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def cheap_passwords() -> Iterator[None]:
    """Hubs of this process take a thousandth of the time over a password: that it is slow guards what was
    stolen, and no test is about that. Hubs in processes of their own hash as always."""
    with pytest.MonkeyPatch.context() as patch:
        cheap = functools.partial(PasswordHasher, time_cost=1, memory_cost=8, parallelism=1)
        patch.setattr("duly.identity.people.PasswordHasher", cheap)
        yield


@pytest.fixture
def settings() -> dict[str, Any]:
    """Of the hub; a test has its own by `parametrize`."""
    return {}


@pytest.fixture
async def local(tmp_path: Path, settings: dict[str, Any]) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", **settings)
    await it.start()
    await it.add(Role.APP, "phone", "tablet")
    await it.add(Role.DEVICE, "lock", "lamp")
    for device in ("lock", "lamp"):
        await it.hub.accounts.grant("phone", device)
    yield it
    await it.stop()
