"""The load measures a server; a server that hangs up is an error, never a low figure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from bench.load import SIZE, Found, Pair, Work, commands
from bench.processes import ProcessDied, answer_of
from bench.servers import relay

PAIR = Pair("app-0", "lock-0", "app-0", "lock-0")
UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\n\r\n\x81\x12" + b'{"type":"welcome"}'


def test_commands_are_as_long_as_announced_and_numbered() -> None:
    made = commands(PAIR)
    for n in range(3):
        seq_id, frame = next(made)
        decoded = msgspec.json.decode(frame)
        assert (len(frame), decoded["seq_id"], decoded["to"]) == (SIZE, seq_id, "lock-0")
        assert seq_id.endswith(f"_{n}")


async def test_it_tells_the_rate_and_how_busy_it_was_itself(tmp_path: Path) -> None:
    with relay("bare", tmp_path) as server:
        work = msgspec.json.encode(Work(server.url, [PAIR], 10, 0.2))
        found = msgspec.json.decode(
            await answer_of("-m", "bench.load", work=work, seconds=0.2, servers=[server]), type=Found
        )
    assert found.count >= found.rate * 0.2 > 0
    assert found.busy > 0


async def test_a_server_that_hangs_up_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(UPGRADED)
        await reader.read(1)  # the first command
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        work = msgspec.json.encode(Work(f"http://127.0.0.1:{port}", [PAIR], 10, 600.0))
        with pytest.raises(ProcessDied, match="ended with code 1"):
            await answer_of("-m", "bench.load", work=work, seconds=600.0)
