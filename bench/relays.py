"""The contenders in the middle, each in a process of its own: `python -m bench.relays NAME FOLDER [PORT]`.

bare       a WebSocket relay with no guarantees: what the libraries can do at all.
durable    the same, with one grouped SQLite commit before a command is acknowledged and passed on: the least
           that survives kill -9. It has no lifecycle, no order, no resend, and does not store how it ended.
lean       duly's promises in the fewest steps: `bench.lean_relay`.
broadcast  what one says, all others are sent.
redis      the bare relay, with SET NX before a command is passed on: what people write. PORT is its Redis.

All speak the same frames through the same libraries (aiohttp, msgspec, uvloop), and say `ready URL` when they
serve. A token is a name; it is not checked.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import msgspec
import uvloop
from aiohttp import WSMsgType, web
from msgspec import Raw, Struct

from bench.lean_relay import LeanRelay


class Frame(Struct, omit_defaults=True):
    """What of a frame a relay reads and writes."""

    type: str
    seq_id: str
    to: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    data: Raw = Raw(b"")
    code: int | None = None


decode = msgspec.json.Decoder(Frame).decode
encode = msgspec.json.Encoder().encode


class Relay:
    """Passes a frame on to whom it is for, with `from` added."""

    def __init__(self) -> None:
        self.sockets: dict[str, web.WebSocketResponse] = {}

    async def start(self) -> None:
        pass

    async def welcome(self, request: web.Request) -> tuple[web.WebSocketResponse, str]:
        """The socket of a client that connects, and its name."""
        socket = web.WebSocketResponse(heartbeat=20, compress=False)
        await socket.prepare(request)
        name = request.headers["Authorization"].removeprefix("Bearer ")
        self.sockets[name] = socket
        await socket.send_frame(b'{"type":"welcome"}', WSMsgType.TEXT)
        return socket, name

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket, name = await self.welcome(request)
        async for message in socket:
            frame = decode(message.data)
            if frame.type == "ack":
                await self.pass_on(frame, name)
            else:
                await self.take(frame, name)
        return socket

    async def pass_on(self, frame: Frame, sender: str) -> None:
        other, frame.to, frame.from_ = self.sockets[frame.to or ""], None, sender
        await other.send_frame(encode(frame), WSMsgType.TEXT)

    async def take(self, frame: Frame, sender: str) -> None:
        await self.pass_on(frame, sender)

    async def acknowledge(self, frame: Frame, sender: str, fresh: bool) -> None:
        ack = encode(Frame("server_ack", frame.seq_id, code=0 if fresh else 5))
        await self.sockets[sender].send_frame(ack, WSMsgType.TEXT)
        if fresh:
            await self.pass_on(frame, sender)


class DurableRelay(Relay):
    """While one group is being flushed the one before is answered, and the next gathers."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1)
        self.waiting: list[tuple[Frame, str]] = []
        self.news = asyncio.Event()
        self.db = apsw.Connection(str(root / "relay.db"))
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute("PRAGMA cache_size = -65536")
        self.db.execute("PRAGMA wal_autocheckpoint = 2000")
        self.db.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID")

    async def start(self) -> None:
        self.task = asyncio.create_task(self.flush())

    async def take(self, frame: Frame, sender: str) -> None:
        self.waiting.append((frame, sender))
        self.news.set()

    async def flush(self) -> None:
        loop = asyncio.get_running_loop()
        stored: list[tuple[Frame, str, bool]] = []
        while True:
            if not self.waiting:
                await self.answer(stored)
                stored = []
                self.news.clear()
                if not self.waiting:
                    await self.news.wait()
            group, self.waiting = self.waiting, []
            flushed = loop.run_in_executor(self.thread, self.store, group)
            await self.answer(stored)
            stored = await flushed

    async def answer(self, stored: list[tuple[Frame, str, bool]]) -> None:
        for one in stored:
            await self.acknowledge(*one)

    def store(self, group: list[tuple[Frame, str]]) -> list[tuple[Frame, str, bool]]:
        stored = []
        run, changes = self.db.cursor().execute, self.db.changes
        run("BEGIN IMMEDIATE")
        for frame, sender in group:
            run("INSERT OR IGNORE INTO seen VALUES (?, ?)", (f"{frame.seq_id}/{sender}", bytes(frame.data)))
            stored.append((frame, sender, changes() > 0))
        run("COMMIT")
        return stored


class RedisRelay(Relay):
    def __init__(self, port: int) -> None:
        super().__init__()
        from redis.asyncio import Redis

        self.redis: Any = Redis(host="127.0.0.1", port=port)

    async def take(self, frame: Frame, sender: str) -> None:
        fresh = await self.redis.set(f"seen:{sender}:{frame.seq_id}", 1, nx=True, ex=86_400)
        await self.acknowledge(frame, sender, bool(fresh))


class Broadcast(Relay):
    """What one says, all others are sent."""

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket, name = await self.welcome(request)
        async for message in socket:
            text = message.data.encode()
            for other, listener in self.sockets.items():
                if other != name:
                    await listener.send_frame(text, WSMsgType.TEXT)
        return socket


async def serve(contender: Relay | LeanRelay) -> None:
    """Serves until it is killed."""
    await contender.start()
    app = web.Application()
    app.add_routes([web.get("/v1/ws", contender.serve)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"ready http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])

    async def run() -> None:
        match name:
            case "bare":
                await serve(Relay())
            case "broadcast":
                await serve(Broadcast())
            case "durable":
                await serve(DurableRelay(root))
            case "lean":
                await serve(LeanRelay(root))
            case "redis":
                await serve(RedisRelay(int(sys.argv[3])))

    uvloop.run(run())


if __name__ == "__main__":
    main()
