"""Connections to PostgreSQL that are given up leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from asyncpg import connect_utils

from duly.storage.postgres.watch import asyncpg


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
