from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest

from tests import servers

Server = TypeVar("Server", bound=servers.MqttServer)


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
