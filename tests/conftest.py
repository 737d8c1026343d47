from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import paho.mqtt.client as paho
import pytest
from aiohttp import web_app
from argon2 import PasswordHasher
from hypothesis import settings as hypothesis_settings
from paho.mqtt.enums import MQTTErrorCode

from duly.identity.accounts import Role
from duly.server.hub import COLLECT_AFTER
from tests import fork_server, run_folder, servers, time_limit
from tests.local_hub import LocalHub
from tests.patient_loop import PatientPolicy

Server = TypeVar("Server", bound=servers.MqttServer)

fork_server.install()

# Hypothesis would measure each example by the clock on the wall, and that measures the machine: a test ends
# at its own limit (tests/time_limit.py), which leaves starved time out.
hypothesis_settings.register_profile("duly", deadline=None)
hypothesis_settings.load_profile("duly")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has started this run in the background; programs of tests would ignore Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.set_event_loop_policy(PatientPolicy())
    config.pluginmanager.register(run_folder)
    config.pluginmanager.register(time_limit)


def pytest_collection_finish() -> None:
    """Leave what is loaded by now, six thousand tests among it, out of garbage collections: each would look
    through all of it, a thirtieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Three workers for each core, for `-n auto`: a test mostly waits for timers, disks and servers.
    Each takes up to a gigabyte with its servers, so there are never more than sixteen."""
    chosen = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    return None if chosen else min(16, 3 * (os.cpu_count() or 1))


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
def rabbitmq_server(pytestconfig: pytest.Config) -> servers.RabbitMqHost:
    """One for all workers: a test that stops or configures it takes one of its own."""
    return servers.shared_rabbitmq(Path(pytestconfig.stash[run_folder.FOLDER], "servers"))


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        servers.remove_shared_rabbitmq(Path(config.stash[run_folder.FOLDER], "servers"))


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
        patch.setattr("duly.identity.passwords.PasswordHasher", cheap)
        yield


@pytest.fixture(scope="session", autouse=True)
def closed_paho_clients() -> Iterator[None]:
    """A client of paho that was stopped closes its pair of sockets. By itself it leaves them to the garbage
    collector, which may find them before the client: an error of the test that runs just then."""
    stop = paho.Client.loop_stop

    def stop_and_close(client: paho.Client) -> MQTTErrorCode:
        said = stop(client)
        client._reset_sockets(sockpair_only=True)
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paho.Client, "loop_stop", stop_and_close)
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
