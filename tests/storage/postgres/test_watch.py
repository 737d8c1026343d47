"""Connections to PostgreSQL that are given up leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from asyncpg import connect_utils

from duly.storage.postgres import watch
from duly.storage.postgres.watch import StatementWatch, asyncpg


@asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """A server that accepts connections and says nothing; its port."""
    ends = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.wait()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        ends.set()
        server.close()


async def test_a_connect_that_is_cancelled_as_tcp_connects_leaves_no_error_unretrieved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost, connecting = asyncio.Event(), list[asyncio.Task[object]]()

    class CancelledUpgrade(connect_utils.TLSUpgradeProto):
        """Asks for TLS on a connection whose connect is cancelled before it waits for the answer."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connecting[0].cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    monkeypatch.setattr(connect_utils, "TLSUpgradeProto", CancelledUpgrade)
    async with silent_server() as port:
        url = f"postgresql://duly@127.0.0.1:{port}/duly"
        connecting.append(asyncio.create_task(asyncpg.connect(url)))
        with contextlib.suppress(asyncio.CancelledError):
            await connecting[0]
        await lost.wait()
    connecting.clear()  # it holds what it was cancelled in
    for _ in range(3):  # the loop's own calls hold it for a turn
        await asyncio.sleep(0)
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_connect_that_waits_for_the_answer_is_told_that_the_server_hung_up() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((ConnectionError, asyncpg.PostgresError)):
            await asyncpg.connect(f"postgresql://duly@127.0.0.1:{port}/duly")


class WaitingConnection:
    """A connection whose statement gets no answer."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def terminate(self) -> None:
        self.ended.set()


@pytest.mark.parametrize(
    "said", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT, None], ids=str
)
async def test_a_server_that_the_network_cannot_reach_ends_the_statements_that_wait(
    monkeypatch: pytest.MonkeyPatch, said: int | None
) -> None:
    """'No route to host' was taken for an answer of the server: statements waited until a later look, or,
    behind a router that always says so, for as long as TCP does."""

    async def unreachable(*_: object, **__: object) -> None:
        raise OSError("Multiple exceptions") if said is None else OSError(said, "planted")

    monkeypatch.setattr(asyncpg, "connect", unreachable)
    monkeypatch.setattr(watch, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.001)
    statements, connection = StatementWatch("postgresql://there"), WaitingConnection()
    with contextlib.suppress(ConnectionError), statements.over(connection):
        await connection.ended.wait()
        assert statements.silent
        raise ConnectionError
    statements.close()


@pytest.mark.parametrize("said", [ConnectionRefusedError(), asyncpg.CannotConnectNowError()], ids=repr)
async def test_a_refusal_is_an_answer_and_a_slow_statement_goes_on(
    monkeypatch: pytest.MonkeyPatch, said: Exception
) -> None:
    looks = asyncio.Semaphore(0)

    async def refuse(*_: object, **__: object) -> None:
        looks.release()
        raise said

    monkeypatch.setattr(asyncpg, "connect", refuse)
    for name in ("SLOW_SECONDS", "HEARTBEAT_SECONDS"):
        monkeypatch.setattr(watch, name, 0.0)
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.001)
    statements, connection = StatementWatch("postgresql://there"), WaitingConnection()
    with statements.over(connection):
        for _ in range(3):
            await looks.acquire()
        assert not connection.ended.is_set()
        assert not statements.silent
    statements.close()
