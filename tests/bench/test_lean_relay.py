"""The lean relay does what it is measured for: what it acknowledged is on the disk, and an id runs once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import apsw
import msgspec
from bench.lean_relay import LATE, OK, STALE
from bench.load import Found, Pair, Work
from bench.processes import answer_of
from bench.servers import relay
from bench.websocket import WebSocketClient, connect


class Listener(WebSocketClient):
    """A client that keeps what it hears."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.heard: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    def text(self, payload: bytes) -> None:
        self.heard.put_nowait(msgspec.json.decode(payload))

    def command(self, seq_id: str) -> None:
        self.send(msgspec.json.encode({"type": "open", "seq_id": seq_id, "to": "lock", "data": {"n": 1}}))


async def test_every_end_that_was_told_is_on_the_disk_after_kill_9(tmp_path: Path) -> None:
    with relay("lean", tmp_path) as server:
        work = Work(server.url, [Pair("app", "lock", "app", "lock")], 50, 0.3)
        found = msgspec.json.decode(
            await answer_of(
                "-m", "bench.load", work=msgspec.json.encode(work), seconds=0.3, servers=[server]
            ),
            type=Found,
        )
    db = apsw.Connection(str(tmp_path / "lean.db"))
    ended = {id_ for (id_,) in db.execute("SELECT id FROM outcomes WHERE code = 0")}
    for (entries,) in db.execute("SELECT entries FROM journal"):
        ended |= {entry[1] for entry in msgspec.msgpack.decode(entries) if entry[2] == 0}
    db.close()
    assert len(ended) >= found.count > 0


async def test_a_repeat_gets_the_answer_and_an_older_number_is_refused(tmp_path: Path) -> None:
    with relay("lean", tmp_path) as server:
        lock, app = Listener("lock"), Listener("app")
        await connect(server.url, lock)
        await connect(server.url, app)
        now = time.time_ns() // 1_000_000
        app.command(f"{now}_7")
        assert await app.heard.get() == {"type": "server_ack", "seq_id": f"{now}_7", "code": OK}
        told = await lock.heard.get()
        assert (told["from"], told["data"]) == ("app", {"n": 1})
        lock.send(msgspec.json.encode({"type": "ack", "seq_id": f"{now}_7", "to": "app", "code": 0}))
        end = await app.heard.get()
        assert end == {"type": "ack", "seq_id": f"{now}_7", "from": "lock", "code": 0}
        app.command(f"{now}_7")
        assert await app.heard.get() == end
        app.command(f"{now}_6")
        assert (await app.heard.get())["code"] == LATE
        app.command("1600000000000_8")
        assert (await app.heard.get())["code"] == STALE
        assert lock.heard.empty()
        app.close()
        lock.close()
