"""Apps, devices, people and sentinels that duly did not write, many messages at a time, on a network that
loses, repeats, overtakes, delays and cuts; each writes its own history.

The faults happen at the client's end of a socket, which to the hub is the same as anywhere on the way: a
frame that is dropped is not written, one that overtakes is written before the one it overtakes, and a
connection that is cut first loses everything that comes, and then is reset. A WebSocket is written here by
hand, since a million frames through a library take longer than the hub. Nothing here imports duly.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

Json = dict[str, Any]

DROP: Final = 0.01
REPEAT: Final = 0.02
OVERTAKE: Final = 0.03
DELAY: Final = 0.02
"""How likely each of them is, for each frame or each few frames that are written together."""
LONGEST: Final = 0.3
"""Seconds: the longest delay."""
CUT_AFTER: Final = (400, 4_000)
"""Frames that come until a connection is cut."""
FIRST_CUT: Final = (5, 60)
"""… until the first one is."""
AGAIN: Final = 2.0
"""Seconds after which a client sends again what was not answered."""
SOON: Final = 0.05


class NetworkDamage:
    """What has been done to frames, counted."""

    def __init__(self) -> None:
        self.calm = False
        self.dropped = self.repeated = self.overtaken = self.delayed = self.cuts = 0

    def spoil(self, frames: list[bytes], dice: Random) -> list[bytes]:
        """The frames as they are written: some not, some twice, some before others."""
        if self.calm:
            return frames
        written: list[bytes] = []
        for frame in frames:
            draw = dice.random()
            if draw < DROP:
                self.dropped += 1
                continue
            written.append(frame)
            if draw < DROP + REPEAT:
                self.repeated += 1
                written.append(frame)
        if len(written) > 1 and dice.random() < OVERTAKE * len(written):
            self.overtaken += 1
            n = dice.randrange(len(written) - 1)
            written[n], written[n + 1] = written[n + 1], written[n]
        return written


class BareWebSocket(asyncio.Protocol):
    """One WebSocket connection, as much of it as is needed: text frames, pings and the end."""

    def __init__(self, host: str, heard: Callable[[Json], None]) -> None:
        self._host, self._heard = host, heard
        self._buffer = b""
        self._open = False
        self.deaf = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        transport.write(
            f"GET /v1/ws HTTP/1.1\r\nHost: {self._host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._open:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head.split(b"\r\n")[0]:
                self.transport.abort()
                return
            self._open, self._buffer = True, rest
        buffer, at = self._buffer, 0
        while (end := _end_of(buffer, at)) is not None:
            self._take(buffer[at] & 15, buffer[at + _head_of(buffer, at) : end])
            at = end
        self._buffer = buffer[at:]

    def _take(self, opcode: int, payload: bytes) -> None:
        if opcode == 1 and not self.deaf:
            self._heard(json.loads(payload))
        elif opcode == 9:
            self.transport.write(_frame(payload, 10))
        elif opcode == 8:
            self.transport.abort()

    def write(self, frames: Iterable[bytes]) -> None:
        """Write text frames, all at once."""
        self.transport.write(b"".join(_frame(frame, 1) for frame in frames))


def _frame(payload: bytes, opcode: int) -> bytes:
    """A frame of a client: masked by zeros, which changes nothing."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BBI", 0x80 | opcode, 0x80 | size, 0) + payload
    return struct.pack("!BBHI", 0x80 | opcode, 0x80 | 126, size, 0) + payload


def _head_of(buffer: bytes, at: int) -> int:
    return {126: 4, 127: 10}.get(buffer[at + 1] & 127, 2)


def _end_of(buffer: bytes, at: int) -> int | None:
    """Where the frame that begins here ends; None: it has not come whole."""
    if len(buffer) < at + 2 or len(buffer) < at + (head := _head_of(buffer, at)):
        return None
    size = buffer[at + 1] & 127
    if size > 125:
        size = int.from_bytes(buffer[at + 2 : at + head], "big")
    end = at + head + size
    return end if end <= len(buffer) else None


class FloodClient:
    """A client that connects again and again, and keeps what it has not been answered."""

    def __init__(
        self, url: str, name: str, token: str, folder: Path, damage: NetworkDamage, seed: str
    ) -> None:
        self.name, self._token, self._damage = name, token, damage
        where = urlsplit(url)
        self._host, self._port = where.hostname or "", where.port or 0
        self._dice = Random(f"{seed} {name}")
        self._history = (folder / f"{name}.history").open("w", buffering=1 << 16)
        self._wire: BareWebSocket | None = None
        self._welcomed = False
        self._left = 0
        self._queue: list[bytes] = []
        self._flushing = False
        self.connections = 0

    def note(self, *what: object) -> None:
        """Add a line to this client's history."""
        self._history.write(json.dumps(what) + "\n")

    def close(self) -> None:
        """Finish the history."""
        self._history.close()

    async def run(self) -> None:
        """Connect again and again."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                _, wire = await loop.create_connection(
                    lambda: BareWebSocket(f"{self._host}:{self._port}", self._hear), self._host, self._port
                )
                self._wire, self._welcomed = wire, False
                self._left = self._dice.randint(*(CUT_AFTER if self.connections else FIRST_CUT))
                wire.write([json.dumps({"type": "auth", "token": self._token} | self.greeting()).encode()])
                try:
                    await wire.ended
                finally:
                    self._wire = None
                    wire.transport.abort()
            await asyncio.sleep(SOON)

    def greeting(self) -> Json:
        """What its first frame says beside the token."""
        return {}

    def hang_up(self) -> None:
        """Cut the connection now."""
        if self._wire is not None:
            self._wire.transport.abort()

    def _hear(self, frame: Json) -> None:
        self._left -= 1
        if self._left <= 0 and self._wire is not None and not self._damage.calm:
            self._wire.deaf = self._dice.random() < 0.7
            self._damage.cuts += 1
            wire = self._wire
            asyncio.get_running_loop().call_later(self._dice.random() * 0.05, wire.transport.abort)
            self._left = 1_000_000
        if frame["type"] == "welcome":
            self._welcomed = True
            self.connections += 1
            self.note("connected")
            self._queue.clear()
            self.welcomed()
        else:
            self.heard(frame)

    def welcomed(self) -> None:
        """The hub has greeted this client: what it was not answered is sent again."""

    def heard(self, frame: Json) -> None:
        """A frame has come."""

    def send(self, frame: Json) -> None:
        """Write a frame, with those of the same moment; without a connection it is lost."""
        if not self._welcomed or self._wire is None:
            return
        self._queue.append(json.dumps(frame).encode())
        if not self._flushing:
            self._flushing = True
            loop, dice = asyncio.get_running_loop(), self._dice
            late = not self._damage.calm and dice.random() < DELAY
            self._damage.delayed += late
            loop.call_later(dice.random() * LONGEST if late else 0.001, self._flush)

    def _flush(self) -> None:
        self._flushing = False
        frames, self._queue = self._queue, []
        if self._wire is not None and self._welcomed:
            self._wire.write(self._damage.spoil(frames, self._dice))


class FloodSender(FloodClient):
    """A client with messages of its own: so many under way at a time, each until it has ended."""

    def __init__(self, *args: Any, window: int, many: int) -> None:
        super().__init__(*args)
        self._window, self._many = window, many
        self._n = -1
        self.under_way: dict[str, tuple[Json, float]] = {}
        self.finished = asyncio.Event()

    @property
    def sent(self) -> int:
        """How many messages it has sent for the first time."""
        return self._n + 1

    def make(self, seq_id: str) -> Json:
        """The frame of the next message."""
        raise NotImplementedError

    def fill(self) -> None:
        """Send new messages, as many as may be under way."""
        while len(self.under_way) < self._window and self.sent < self._many and self._welcomed:
            self._n += 1
            seq_id = f"{time.time_ns() // 1_000_000}_{self._n}"
            frame = self.make(seq_id)
            self.under_way[seq_id] = (frame, asyncio.get_running_loop().time())
            self.note("sent", seq_id, frame.get("to", ""))
            self.send(frame)
        if not self.under_way and self.sent >= self._many:
            self.finished.set()

    def allow(self, more: int) -> None:
        """So many more are sent: a load that is spread over time."""
        self._many += more
        self.finished.clear()
        self.fill()

    def end(self, seq_id: str) -> None:
        """A message has ended: there is room for another."""
        if self.under_way.pop(seq_id, None) is not None:
            self.fill()

    def welcomed(self) -> None:
        now = asyncio.get_running_loop().time()
        for seq_id, (frame, _) in self.under_way.items():
            self.under_way[seq_id] = (frame, now)
            self.send(frame)
        self.fill()

    async def repeat(self) -> None:
        """Send again what was not answered for a while."""
        while True:
            await asyncio.sleep(AGAIN / 4)
            now = asyncio.get_running_loop().time()
            for seq_id, (frame, since) in list(self.under_way.items()):
                if now - since > AGAIN:
                    self.under_way[seq_id] = (frame, now)
                    self.send(frame)
            self.fill()


class FloodApp(FloodSender):
    """An app: commands to its devices in turn, each until its `ack`."""

    def __init__(self, *args: Any, devices: list[str], ordered: bool, **more: Any) -> None:
        super().__init__(*args, **more)
        self._devices, self._ordered = devices, ordered
        self._doubts: dict[str, Json] = {}
        """its commands of which it has learned that nobody can tell, yet"""
        self.note("ordered", ordered)

    def make(self, seq_id: str) -> Json:
        frame: Json = {
            "type": "lock_control",
            "seq_id": seq_id,
            "to": self._devices[self._n % len(self._devices)],
        }
        return frame | {"data": {"n": seq_id}} | ({} if self._ordered else {"order": False})

    def heard(self, frame: Json) -> None:
        seq_id, code = frame.get("seq_id", ""), frame.get("code")
        if frame["type"] == "ack":
            self.note("end", seq_id, frame["state"], frame.get("data"))
            asked = self._doubts.pop(seq_id, None)
            if frame["state"] == "unknown" and asked is None and seq_id in self.under_way:
                self._doubts[seq_id] = self.under_way[seq_id][0]
            self.end(seq_id)
        elif frame["type"] == "server_ack" and code in (0, 5):
            self.note("accepted", seq_id, code)
        elif frame["type"] == "server_ack" and not _for_now(frame):
            self.note("refused", seq_id, frame)
            self.end(seq_id)

    async def ask_again(self) -> None:
        """Ask for the end of what nobody could tell of, until each is answered once more: the news that it
        has ended may have been lost on the way."""
        while self._doubts:
            for frame in list(self._doubts.values()):
                self.send(frame)
            await asyncio.sleep(AGAIN / 4)


def _for_now(frame: Json) -> bool:
    """Whether a refusal is one that does not burn the id: the hub is in trouble, a device away, or the hub's
    clock is of another hour."""
    return frame["code"] in (1, 4) or frame.get("error") in ("stale", "future")


class FloodDevice(FloodClient):
    """A device: it does what is new, in order, writes that down, and answers a repeat from memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._answers: dict[tuple[str, str], Json] = {}

    def heard(self, frame: Json) -> None:
        if "from" not in frame or "seq_id" not in frame:
            return
        key = (frame["from"], frame["seq_id"])
        if key not in self._answers:
            self.note("did", *key, frame["data"]["n"])
            self._answers[key] = frame["data"]
        self.send({"type": "ack", "seq_id": key[1], "to": key[0], "code": 0, "data": self._answers[key]})


class FloodPerson(FloodSender):
    """A person: lines to others and to a group in turn; what is told is acknowledged as far as it is
    whole."""

    def __init__(self, *args: Any, others: list[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._others = others
        self._seen: dict[str, set[int]] = {}
        self._whole: dict[str, int] = {}
        self._acks: dict[str, int] = {}

    def make(self, seq_id: str) -> Json:
        to = self._others[self._n % len(self._others)]
        kind = "group_chat" if to.startswith("#") else "one_chat"
        return {"type": kind, "seq_id": seq_id, "to": to, "data": {"text": f"<{self.name} {seq_id}>"}}

    def heard(self, frame: Json) -> None:
        if frame["type"] == "server_ack":
            if frame["code"] in (0, 5):
                self.note("stored", frame["seq_id"], frame["conv"], frame["n"])
                self._has(frame["conv"], frame["n"])  # one's own lines are not told
                self.end(frame["seq_id"])
            elif not _for_now(frame):
                self.note("refused", frame["seq_id"], frame)
                self.end(frame["seq_id"])
        elif "conv" in frame and "n" in frame and frame["type"] != "receipt":
            self._told(frame["conv"], frame["n"], (frame.get("data") or {}).get("text", ""))

    def _told(self, conv: str, n: int, text: str) -> None:
        self.note("told", conv, n, text)
        self._has(conv, n)

    def _has(self, conv: str, n: int) -> None:
        seen = self._seen.setdefault(conv, set())
        whole = self._whole.get(conv, 0)
        if n > whole:
            seen.add(n)
        while whole + 1 in seen:
            whole += 1
            seen.discard(whole)
        self._whole[conv] = whole
        if not self._acks:
            asyncio.get_running_loop().call_later(0.005, self._acknowledge)
        self._acks[conv] = whole

    def _acknowledge(self) -> None:
        acks, self._acks = self._acks, {}
        for conv, n in acks.items():
            self.send({"type": "ack", "conv": conv, "n": n})

    @property
    def whole(self) -> dict[str, int]:
        """How far it has been told each conversation without a gap."""
        return self._whole


class FloodSentinel(FloodSender):
    """A sentinel: one alert after the other."""

    def make(self, seq_id: str) -> Json:
        data = {
            "profile_id": "home", "trigger_reason": "disconnect", "device_address": f"d{self._n}",
            "timestamp": time.time_ns() // 1_000_000,
        }  # fmt: skip
        return {"type": "alert_event", "seq_id": f"{self.name}-{seq_id}", "data": data}

    def heard(self, frame: Json) -> None:
        if frame["type"] == "server_ack" and "seq_id" in frame:
            seq_id = str(frame["seq_id"])
            if frame["code"] in (0, 5):
                self.note("stored", seq_id)
                self.end(seq_id.removeprefix(f"{self.name}-"))
            elif not _for_now(frame):
                self.note("refused", seq_id, frame)
                self.end(seq_id.removeprefix(f"{self.name}-"))
