# ruff: noqa: PTH, UP041, SIM105 -- MicroPython has no pathlib, no contextlib, and a TimeoutError of its own
"""duly for MicroPython: a device that does what it is told once. One file, nothing beside MicroPython.

The laws. A command is written to flash before it is run, and its answer before it is sent; a repeat, a
reset or a power cut never repeats an effect. A command that a power cut hit in the middle is not run again
and not answered (nobody can tell, and the hub says so: `unknown`), unless its handler is `at_least_once`.

What we no longer remember, we no longer accept: the last 100 ids are kept, and of every sender the newest
id that was forgotten. What is not above that mark may have run, so it never will. Chunks of media are read,
not done: they have a window of their own, in memory only, so that a download neither pushes a command out
nor wears the flash.

    device = Device("ws://192.168.1.5:7800", token)

    @device.on("lock_control")
    async def lock_control(command):
        motor.turn()
        return {"open": True}

    asyncio.run(device.run())
"""

import asyncio
import binascii
import hashlib
import json
import os
import time

try:
    from typing import Any
except ImportError:
    pass  # MicroPython reads past annotations

CHUNK = "media_download_chunk"
ORDER_WINDOW = 0.3
"""seconds: how long a command waits for one that the hub says came before it"""
SILENCE = 60
"""seconds: the hub pings every 20; after three missed ones the connection is dead"""
ANSWER_LIMIT = 256
"""bytes: a longer answer is sent, but only its code is kept"""
WAITING_LIMIT = 100
"""commands: more than that at once are answered with busy"""

DONE, BUSY, BAD_PARAMETERS, HARDWARE_FAULT, TIMEOUT = 0, 1, 2, 3, 4
NOT_AUTHORISED, OUT_OF_RESOURCES, NOT_SUPPORTED = 5, 6, 7


class DeviceError(Exception):
    """Raise it in a handler to fail with a code: nothing was done."""

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Refused(Exception):
    """The hub does not know our token, or does not talk our language."""


class Command:
    """What a handler gets."""

    def __init__(self, frame: "dict[str, Any]") -> None:
        order = frame.get("order") or {}
        self.type: str = frame["type"]
        self.data: Any = frame.get("data")
        self.sender: str = frame["from"]
        self.id: str = frame["seq_id"]
        self.at = moment(self.id)
        self.exp: int = frame.get("exp") or 0
        self.mode: str = order.get("mode", "replay")
        self.lane: str | None = None if self.mode == "any" or "order" not in frame else order.get("key", "")
        self.after: int = order.get("after", -1)
        meaning = json.dumps([self.type, self.data]).encode()
        self.print = binascii.hexlify(hashlib.sha256(meaning).digest()[:4]).decode()


def moment(seq_id: str) -> "tuple[int, int]":
    """When an id was minted, and its number: what ids are compared by."""
    ms, _, n = seq_id.partition("_")
    if not (ms.isdigit() and n.isdigit()):
        raise ValueError("a seq_id is milliseconds, '_' and a counter")
    return int(ms), int(n)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────

SENDER, ID, PRINT, LANE, ANSWER = range(5)


class Memory:
    """The last `size` ids in order of arrival, each with what it meant and its answer (None: it was begun),
    and of every sender the newest id forgotten. With `file` it is in flash."""

    def __init__(self, size: int, file: "str | None" = None) -> None:
        self.size = size
        self.file = file
        self.entries: list[list[Any]] = []
        self.marks: dict[str, str] = {}
        self.lost = file is not None and not self._load(file)

    def find(self, sender: str, seq_id: str) -> "list[Any] | None":
        for entry in self.entries:
            if entry[ID] == seq_id and entry[SENDER] == sender:
                return entry
        return None

    def forgot(self, command: Command) -> bool:
        """Whether it may have run, as far as we can still tell. The mark of "" is everybody's."""
        for name in (command.sender, ""):
            mark = self.marks.get(name)
            if mark is not None and command.at <= moment(mark):
                return True
        return False

    def latest(self, command: Command) -> "tuple[int, int] | None":
        """The newest of the same sender in the same lane."""
        return max(
            (
                moment(entry[ID])
                for entry in self.entries
                if entry[SENDER] == command.sender and entry[LANE] == command.lane
            ),
            default=None,
        )

    def add(self, command: Command, answer: "list[Any] | None" = None) -> "list[Any]":
        entry = [command.sender, command.id, command.print, command.lane, answer]
        self.entries.append(entry)
        while len(self.entries) > self.size:
            sender, seq_id = self.entries.pop(0)[:2]
            mark = self.marks.get(sender)
            # Arrival is not order: the mark is the newest id forgotten, not the last one.
            if mark is None or moment(mark) < moment(seq_id):
                self.marks[sender] = seq_id
        return entry

    def save(self) -> None:
        """All of it, or the file stays what it was."""
        if self.file is None:
            return
        new = self.file + ".new"
        with open(new, "w") as file:
            file.write(json.dumps({"marks": self.marks, "ids": self.entries}))
            file.flush()  # on MicroPython this is a sync
            if hasattr(os, "fsync"):
                os.fsync(file.fileno())
        try:
            os.rename(new, self.file)
        except OSError:  # FAT cannot rename over a file; `_load` knows the gap
            os.remove(self.file)
            os.rename(new, self.file)

    def _load(self, file: str) -> bool:
        found = False
        for name in (file, file + ".new"):
            try:
                with open(name) as text:
                    found = True
                    known = json.loads(text.read())
                self.marks, self.entries = known["marks"], known["ids"]
                return True
            except (OSError, ValueError, KeyError):
                continue
        return not found


# ── WebSocket ────────────────────────────────────────────────────────────────────────────────────

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


class WebSocket:
    """The client's side of RFC 6455, as much of it as the hub needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        self._reader = reader
        self._writer = writer
        self._limit = limit
        # MicroPython's drain is not made for two at once: they would send the same bytes twice.
        self._lock = asyncio.Lock()

    async def shake_hands(self, host: str, path: str) -> None:
        key = binascii.b2a_base64(os.urandom(16)).strip()
        self._writer.write(
            b"GET %b HTTP/1.1\r\nHost: %b\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: %b\r\nSec-WebSocket-Version: 13\r\n\r\n"
            % (path.encode(), host.encode(), key)
            if hasattr(os, "fsync")
            else (
                b"GET " + path.encode() + b" HTTP/1.1\r\nHost: " + host.encode() + b"\r\nUpgrade: websocket\r\n"
            )
        )
        await self._writer.drain()
