"""A relay with the gateway's promises in the fewest steps: how fast plain Python can be that keeps them.

A command is acknowledged and passed on after the flush that holds it; its end goes back to the app after
the flush that holds the end. A flush is one row of a journal: what happened to all commands in it, as one
blob (WAL, FULL). The table of outcomes is brought up to date behind the journal, in bulk, in the
transaction of a later flush; then the journal is cut. An id that is known gets its stored answer, one that
is too old is refused, and a mark for each (device, app) says which number came last.

It has no retry, no deadline, no permissions, no waiting for a gap, no limits for its senders, and cannot
restart. Of ids it keeps the newest in memory; an older one is refused by its number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import apsw
import msgspec
from aiohttp import WSMsgType, web
from msgspec import Raw, Struct

HORIZON_MS: Final = 24 * 3_600_000
FLUSHES_BEHIND: Final = 16
"""How many flushes the table may be behind the journal."""
HOT_IDS: Final = 50_000
OK, STALE, OFFLINE, LATE = 0, 1, 2, 6

Push = Callable[[bytes], None]


class LeanFrame(Struct, omit_defaults=True, gc=False):
    """What of a frame the relay reads and writes."""

    type: str
    seq_id: str
    to: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    data: Raw = Raw(b"")
    code: int | None = None


class LeanCommand(Struct, gc=False):
    """A command, from its arrival until it is in the table."""

    sender: str
    frame: LeanFrame
    answer: LeanFrame | None = None


Key = tuple[str, str]
"""The sender and the id."""
Entry = tuple[str, str, str, bytes] | tuple[str, str, int, bytes]
"""What the journal says: accepted (sender, id, device, data), or ended (sender, id, code, data)."""

decode = msgspec.json.Decoder(LeanFrame).decode
encode = msgspec.json.Encoder().encode
pack = msgspec.msgpack.Encoder().encode


class LeanStore:
    """The journal and the table in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._db = apsw.Connection(str(path))
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "cache_size=-65536",
            "wal_autocheckpoint=2000",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE journal (n INTEGER PRIMARY KEY, entries BLOB NOT NULL)")
        self._db.execute(
            "CREATE TABLE outcomes (sender TEXT, id TEXT, device TEXT, data BLOB, code INT, answer BLOB, "
            "PRIMARY KEY (sender, id)) WITHOUT ROWID"
        )
        self._flushes = 0

    def flush(self, entries: list[Entry], ended: list[LeanCommand]) -> bool:
        """Commits the entries as one row; now and then also what has ended. Says whether it did that."""
        self._flushes += 1
        behind = self._flushes % FLUSHES_BEHIND == 0
        cursor = self._db.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        cursor.execute("INSERT INTO journal VALUES (?, ?)", (self._flushes, pack(entries)))
        if behind:
            cursor.executemany("INSERT OR IGNORE INTO outcomes VALUES (?, ?, ?, ?, ?, ?)", map(_row, ended))
            cursor.execute("DELETE FROM journal WHERE n < ?", (self._flushes,))
        cursor.execute("COMMIT")
        return behind


def _row(command: LeanCommand) -> tuple[str, str, str | None, bytes, int | None, bytes]:
    frame, answer = command.frame, command.answer
    assert answer is not None
    return command.sender, frame.seq_id, frame.to, bytes(frame.data), answer.code, bytes(answer.data)


class LeanRelay:
    """One flush is under way at a time; meanwhile the next gathers."""

    def __init__(self, root: Path) -> None:
        self._store = LeanStore(root / "lean.db")
        self._thread = ThreadPoolExecutor(1)
        self._pushes: dict[str, Push] = {}
        self._known: dict[Key, LeanCommand] = {}
        self._marks: dict[Key, int] = {}
        self._entries: list[Entry] = []
        self._told: list[tuple[LeanCommand, bool]] = []
        """commands that were accepted or have ended, to be told of after the flush"""
        self._ended: list[LeanCommand] = []
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Starts the task that flushes."""
        self._task = asyncio.create_task(self._flushing())

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Serves one connection."""
        socket = web.WebSocketResponse(heartbeat=20, compress=False)
        await socket.prepare(request)
        name = request.headers["Authorization"].removeprefix("Bearer ")
        transport, loop = request.transport, asyncio.get_running_loop()
        assert transport is not None
        sending: list[bytes] = []

        def write() -> None:
            transport.write(b"".join(sending))
            sending.clear()

        def push(payload: bytes) -> None:
            if not sending:
                loop.call_soon(write)
            size = len(payload)
            sending.append(bytes((0x81, size)) if size < 126 else b"\x81\x7e" + size.to_bytes(2, "big"))
            sending.append(payload)

        self._pushes[name] = push
        push(b'{"type":"welcome"}')
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                frame = decode(message.data)
                if frame.type == "ack":
                    self._end(frame)
                else:
                    self._accept(frame, name, push)
        return socket

    def _accept(self, frame: LeanFrame, sender: str, push: Push) -> None:
        key, device = (sender, frame.seq_id), frame.to or ""
        known = self._known.get(key)
        if known is not None:
            push(encode(known.answer or LeanFrame("server_ack", frame.seq_id, code=OK)))
            return
        ms, _, n = frame.seq_id.partition("_")
        code = OK
        if int(ms) < time.time() * 1000 - HORIZON_MS:
            code = STALE
        elif device not in self._pushes:
            code = OFFLINE
        elif int(n) <= self._marks.get((device, sender), -1) and int(n):
            code = LATE
        if code:
            push(encode(LeanFrame("server_ack", frame.seq_id, code=code)))
            return
        self._marks[device, sender] = int(n)
        command = self._known[key] = LeanCommand(sender, frame)
        if len(self._known) > HOT_IDS:
            del self._known[next(iter(self._known))]
        self._entries.append((sender, frame.seq_id, device, bytes(frame.data)))
        self._told.append((command, False))
        self._news.set()

    def _end(self, ack: LeanFrame) -> None:
        command = self._known.get((ack.to or "", ack.seq_id))
        if command is None or command.answer is not None:
            return
        command.answer = LeanFrame("ack", ack.seq_id, from_=command.frame.to, data=ack.data, code=ack.code)
        self._entries.append((command.sender, ack.seq_id, ack.code or 0, bytes(ack.data)))
        self._told.append((command, True))
        self._ended.append(command)
        self._news.set()

    async def _flushing(self) -> None:
        loop = asyncio.get_running_loop()
        ended: list[LeanCommand] = []
        while True:
            if not self._entries:
                self._news.clear()
                await self._news.wait()
            entries, self._entries = self._entries, []
            told, self._told = self._told, []
            ended += self._ended
            self._ended = []
            if await loop.run_in_executor(self._thread, self._store.flush, entries, ended):
                ended = []
            for command, over in told:
                self._tell(command, over)

    def _tell(self, command: LeanCommand, over: bool) -> None:
        frame = command.frame
        if over:
            self._pushes[command.sender](encode(command.answer))
            return
        self._pushes[command.sender](encode(LeanFrame("server_ack", frame.seq_id, code=OK)))
        passed = LeanFrame(frame.type, frame.seq_id, from_=command.sender, data=frame.data)
        self._pushes[frame.to or ""](encode(passed))
