"""PostgreSQL's notifier has one connection and several tasks that use it: they take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from duly.cluster.notifiers import postgres
from tests.cluster.notifiers.conftest import NotifierBus
from tests.servers import Postgres


async def test_hints_and_the_test_of_the_connection_do_not_meet_on_the_connection(
    postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects = 0
    connect = asyncpg.connect

    async def counted(*args: Any, **more: Any) -> Any:
        nonlocal connects
        connects += 1
        return await connect(*args, **more)

    monkeypatch.setattr(postgres, "ALIVE_SECONDS", 0.001)
    monkeypatch.setattr(asyncpg, "connect", counted)
    bus = NotifierBus(postgres_server.create_database(), postgres_server)
    one, other = await bus.pair()
    for n in range(300):
        one.notifier.hint("device", f"{n}")
        await asyncio.sleep(0.001)
    await other.hears("last", lambda: one.notifier.hint("device", "last"))
    assert connects == 2, "a statement in the way of another one cost a connection"
    await bus.close()


async def test_a_listener_that_fails_does_not_end_the_notifier(postgres_server: Postgres) -> None:
    bus = NotifierBus(postgres_server.create_database(), postgres_server)
    one, other = await bus.pair()

    def broken(_: str) -> None:
        raise KeyError("a bug")

    other.notifier.listen("chat", broken)
    one.notifier.hint("chat", "x")
    await other.hears("after", lambda: one.notifier.hint("device", "after"))
    assert other.notifier.tasks.failures["notifier"] == 1
    await bus.close()


async def test_whatever_asyncpg_fails_of_the_notifier_listens_again(
    postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = NotifierBus(postgres_server.create_database(), postgres_server)
    one, other = await bus.pair()
    assert isinstance(other.notifier, postgres.PostgresNotifier)
    line = other.notifier._connected
    assert line is not None
    monkeypatch.setattr(postgres, "ALIVE_SECONDS", 0.01)

    async def odd(*_: Any, **__: Any) -> None:
        raise asyncpg.InternalClientError("got result for unknown protocol state 3")

    monkeypatch.setattr(line, "execute", odd)
    line._connection.terminate()
    await other.hears("back", lambda: one.notifier.hint("device", "back"))
    await bus.close()
