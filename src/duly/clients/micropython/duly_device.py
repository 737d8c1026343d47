# MicroPython has no pathlib, no contextlib, and a TimeoutError of its own.
# ruff: noqa: PTH104, PTH107, PTH123, SIM105, UP041
"""duly for MicroPython: a device that does what it is told once. One file, nothing beside MicroPython.

The laws. A command is written to flash before it is run, and its answer before it is sent; a repeat, a
reset or a power cut never repeats an effect. A command that a power cut hit in the middle is not run again
and not answered (nobody can tell, and the hub says so: `unknown`), unless its handler is `at_least_once`.
Commands run one at a time, and those of one sender and order key in its order.

What we no longer remember, we no longer accept: the last 100 ids are kept, and of every sender the newest
id that was forgotten. What is not above that mark may have run, so it never will. Chunks of media are read,
not done: they have a window of their own, in memory only, so that a download neither pushes a command out
nor wears the flash, and a repeat is read again.

    device = Device("ws://192.168.1.5:7800", token)

    @device.on("lock_control")
    def lock_control(command):
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
    from collections.abc import Callable
    from typing import Any
except ImportError:
    pass  # MicroPython reads past annotations

CHUNK = "media_download_chunk"
ORDER_WINDOW = 0.3
"""seconds: how long a command waits for the one that the hub says went before it"""
SILENCE = 60
"""seconds: the hub pings every 20; after three missed ones the connection is dead"""
ANSWER_LIMIT = 256
"""bytes: a longer answer is sent, but only its code is kept"""
WAITING_LIMIT = 100
"""commands: what comes on top is answered with busy"""
PUSHES_LIMIT = 20
"""pushes that the hub has not stored yet"""

DONE, BUSY, BAD_PARAMETERS, HARDWARE_FAULT, TIMEOUT = 0, 1, 2, 3, 4
NOT_AUTHORISED, OUT_OF_RESOURCES, NOT_SUPPORTED = 5, 6, 7


class DeviceError(Exception):
    """Raise it in a handler to fail with a code: nothing was done."""

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Refused(Exception):
    """The hub does not want us."""


KNOWN = ("type", "seq_id", "to", "from", "data", "exp", "order", "timeout")
"""what a command has by the protocol; what it has beside that is its sender's own"""


class Command:
    """What a handler gets: `type`, `data`, `sender`, `id`, and in `fields` what else it carried. A handler
    that takes its time is an async function and says so: `await command.working(50)`."""

    def __init__(
        self, frame: "dict[str, Any]", send: "Callable[[dict[str, Any]], Any] | None" = None
    ) -> None:
        self._send = send
        self.fields = {name: frame[name] for name in frame if name not in KNOWN}
        order: Any = frame.get("order")
        ordered = isinstance(order, dict) and order.get("mode") != "any"
        self.type: str = frame["type"]
        self.data: Any = frame.get("data")
        self.sender: str = frame["from"]
        self.id: str = frame["seq_id"]
        self.at = moment(self.id)
        self.exp: int = frame.get("exp") or 0
        self.lane: str | None = order.get("key", "") if ordered else None
        self.after: int = order.get("after", -1) if ordered else -1
        self.latest: bool = ordered and order.get("mode") == "latest"
        said = [self.type, self.data] + ([sorted(self.fields.items())] if self.fields else [])
        meaning = json.dumps(said).encode()
        self.print = binascii.hexlify(hashlib.sha256(meaning).digest()[:4]).decode()

    async def working(self, progress: object = None) -> None:
        """Say that this is being worked on, and how far it is: the hub repeats nothing and waits anew."""
        said: dict[str, Any] = {"type": "ack", "seq_id": self.id, "to": self.sender, "state": "delivered"}
        if progress is not None:
            said["progress"] = progress
        if self._send is not None:
            await self._send(said)

    def same(self, other: "Command | None") -> bool:
        return other is not None and (self.sender, self.id) == (other.sender, other.id)

    def precedes(self, other: "Command") -> bool:
        """Whether it must take effect before the other, whichever came first."""
        return (
            self.lane is not None
            and (self.sender, self.lane) == (other.sender, other.lane)
            and self.at < other.at
        )


def moment(seq_id: str) -> "tuple[int, int]":
    """When an id was minted, and its number: what ids are compared by."""
    ms, _, n = seq_id.partition("_")
    if not (ms.isdigit() and n.isdigit()) or seq_id != f"{int(ms)}_{int(n)}":
        raise ValueError("a seq_id is milliseconds, an underscore and a counter")
    return int(ms), int(n)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────

SENDER, ID, PRINT, LANE, ANSWER = 0, 1, 2, 3, 4


class Memory:
    """The last `size` ids in order of arrival, each with what it meant and its answer (None: begun, or not
    kept), and of every sender the newest id forgotten. With `file` it is in flash."""

    def __init__(self, size: int, file: "str | None" = None) -> None:
        self.size = size
        self.file = file
        self.entries: list[list[Any]] = []
        self.marks: dict[str, str] = {}
        self.lost = file is not None and not self._load(file)

    def find(self, command: Command) -> "list[Any] | None":
        for entry in self.entries:
            if entry[ID] == command.id and entry[SENDER] == command.sender:
                return entry
        return None

    def forgot(self, command: Command) -> bool:
        """Whether it may have run, for all we know. The mark of nobody is everybody's."""
        for name in (command.sender, ""):
            if name in self.marks and command.at <= moment(self.marks[name]):
                return True
        return False

    def newest(self, command: Command) -> "tuple[int, int]":
        """The newest id of this sender in this lane; one that failed does not count."""
        newest = moment(self.marks[command.sender]) if command.sender in self.marks else (0, -1)
        for entry in self.entries:
            failed = entry[ANSWER] is not None and entry[ANSWER][0] != DONE
            if entry[SENDER] == command.sender and entry[LANE] == command.lane and not failed:
                newest = max(newest, moment(entry[ID]))
        return newest

    def add(self, command: Command) -> "list[Any]":
        entry = [command.sender, command.id, command.print, command.lane, None]
        self.entries.append(entry)
        while len(self.entries) > self.size:
            oldest = self.entries.pop(0)
            # Arrival is not order: the mark is the newest id forgotten, not the last one.
            if moment(self.marks.get(oldest[SENDER], "0_0")) <= moment(oldest[ID]):
                self.marks[oldest[SENDER]] = oldest[ID]
        return entry

    def save(self) -> None:
        """All of it, or the file stays what it was."""
        if self.file is None:
            return
        new = self.file + ".new"
        with open(new, "w") as file:
            file.write(json.dumps({"marks": self.marks, "ids": self.entries}))
            file.flush()  # on MicroPython this syncs
            if hasattr(os, "fsync"):
                os.fsync(file.fileno())
        try:
            os.rename(new, self.file)
        except OSError:  # FAT does not rename over a file; after a power cut in between, `.new` is whole
            os.remove(self.file)
            os.rename(new, self.file)

    def _load(self, file: str) -> bool:
        """False if there was a memory, and it cannot be read."""
        unreadable = False
        for name in (file, file + ".new"):
            try:
                with open(name) as text:
                    unreadable = True
                    known = json.loads(text.read())
                self.marks, self.entries = known["marks"], known["ids"]
                return True
            except (OSError, ValueError, KeyError, TypeError):
                pass
        return not unreadable


# ── WebSocket ────────────────────────────────────────────────────────────────────────────────────

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


class WebSocket:
    """The client's side of RFC 6455, as much of it as a hub needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        self._reader = reader
        self._writer = writer
        self._limit = limit
        # MicroPython's drain is not made for two at once: they would send the same bytes twice.
        self._lock = asyncio.Lock()

    async def shake_hands(self, host: str) -> None:
        key = binascii.b2a_base64(os.urandom(16)).strip().decode()
        request = (
            f"GET /v1/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        self._writer.write(request.encode())
        await self._writer.drain()
        status = await self._line()
        if b" 101 " not in status:
            raise Refused(f"{host} does not speak WebSocket: {status.decode()}")
        accept = b""
        line = await self._line()
        while line:
            name, _, value = line.partition(b":")
            if name.lower() == b"sec-websocket-accept":
                accept = value.strip()
            line = await self._line()
        sha1 = getattr(hashlib, "sha1", None)  # small ports go without
        if sha1 is not None:
            proof = sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            if accept != binascii.b2a_base64(proof).strip():
                raise Refused(f"{host} does not speak WebSocket")

    async def send(self, kind: int, data: bytes) -> None:
        size = len(data)
        key = os.urandom(4)
        if size < 126:
            head = bytes([0x80 | kind, 0x80 | size])
        elif size < 65536:
            head = bytes([0x80 | kind, 0x80 | 126]) + size.to_bytes(2, "big")
        else:
            head = bytes([0x80 | kind, 0x80 | 127]) + size.to_bytes(8, "big")
        body = bytearray(data)
        for i in range(size):
            body[i] ^= key[i & 3]
        async with self._lock:
            self._writer.write(head + key + body)
            await self._writer.drain()

    async def receive(self) -> "bytes | None":
        """The next message, b"" for one too large for us; None at the end. Pings are answered on the way."""
        message = b""
        skipped = False
        while True:
            first, second = await self._read(2)
            kind, size = first & 15, second & 127
            if second & 128 or first & 0x70:
                raise Refused("the hub sends frames that are masked or extended")
            if size > 125:
                size = int.from_bytes(await self._read(2 if size == 126 else 8), "big")
            if kind >= CLOSE:
                data = await self._read(size)
                if kind == PING:
                    await self.send(PONG, data)
                elif kind == CLOSE:
                    await self.send(CLOSE, data[:2])
                    return None
                continue
            if skipped or len(message) + size > self._limit:
                message, skipped = b"", True
                while size:
                    size -= len(await self._read(min(size, 1024)))
            else:
                message += await self._read(size)
            if first & 128:
                return message

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass

    async def _read(self, size: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(size), SILENCE)

    async def _line(self) -> bytes:
        return (await asyncio.wait_for(self._reader.readline(), 10)).strip()


# ── the device ───────────────────────────────────────────────────────────────────────────────────


def _quiet(text: str) -> None:
    pass


class Device:
    """A device's side of the wire. `log` is told, in words, why nothing happened; `ssl` is True or a context
    for `wss:`; a frame of more than `limit` bytes does not fit into us and is left unanswered."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        file: str = "duly.json",
        window: int = 100,
        limit: int = 65536,
        ssl: "Any" = None,
        log: "Callable[[str], None]" = _quiet,
    ) -> None:
        scheme, _, rest = url.partition("://")
        self._address = rest.split("/")[0]
        host, _, port = self._address.partition(":")
        secure = scheme in ("wss", "https")
        self._where = (host, int(port or (443 if secure else 80)), ssl or secure or None)
        self._token = token
        self._limit = limit
        self._log = log
        self._memory = Memory(window, file)
        self._chunks = Memory(window)
        self._handlers: dict[str, tuple[Callable[[Command], Any], bool]] = {}
        self._waiting: list[Command] = []
        self._running: Command | None = None
        self._pushes: list[dict[str, Any]] = []
        self._told = 0
        self._telling = asyncio.Lock()
        self._news = asyncio.Event()
        self._socket: WebSocket | None = None
        self._time = 0
        self._ticks = _ticks()
        self.name = ""

    def on(
        self, *types: str, effect: str = "at_most_once"
    ) -> "Callable[[Callable[[Command], Any]], Callable[[Command], Any]]":
        """Handle these types of commands, in a function or an async function. Return the answer's data, or
        raise `DeviceError`."""
        if effect not in ("at_most_once", "at_least_once"):
            raise ValueError("effect is 'at_most_once' or 'at_least_once'")

        def decorate(handler: "Callable[[Command], Any]") -> "Callable[[Command], Any]":
            for type_ in types:
                self._handlers[type_] = (handler, effect == "at_least_once" or type_ == CHUNK)
            return handler

        return decorate

    async def push(self, type: str, data: object = None) -> bool:
        """Tell the apps something. It is kept in memory, and sent again after a reconnect, until the hub has
        stored it. False if too many wait already: then it is lost."""
        if len(self._pushes) >= PUSHES_LIMIT:
            return False
        frame: dict[str, Any] = {"type": type}
        if data is not None:
            frame["data"] = data
        self._pushes.append(frame)
        async with self._telling:
            await self._tell([frame])
        return True

    async def _tell(self, pushes: "list[dict[str, Any]]") -> None:
        for frame in pushes:
            if self._socket is None:
                return
            if "seq_id" not in frame:
                frame["seq_id"] = f"{self._now()}_{self._told}"
                self._told += 1
            await self._send(frame)

    def _stored(self, frame: "dict[str, Any]") -> None:
        if frame["code"] == 4:
            return  # it comes again
        if frame["code"] not in (0, 5):
            self._log(f"the hub does not take a push: {frame.get('detail')}")
        self._pushes = [push for push in self._pushes if push.get("seq_id") != frame["seq_id"]]

    async def run(self) -> None:
        """Serve until cancelled, connecting again for as long as it takes."""
        worker = asyncio.create_task(self._work())
        pause = 0.2
        try:
            while True:
                try:
                    await self._session()
                except Refused as problem:
                    self._log(f"refused: {problem}")
                    if not self._socket:
                        pause = 60.0  # asking often would only lock us out
                except (OSError, EOFError, ValueError, asyncio.TimeoutError) as problem:
                    self._log(f"connection lost: {problem!r}")
                if self._socket is not None:
                    self._socket, pause = None, 0.2
                await asyncio.sleep(pause * (1 - os.urandom(1)[0] / 1280))
                pause = min(2 * pause, 10.0)
        finally:
            worker.cancel()

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────

    async def _session(self) -> None:
        host, port, secure = self._where
        options = {"ssl": secure} if secure else {}  # before 1.23 there is no such option
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, **options), 10)
        socket = WebSocket(reader, writer, self._limit)
        try:
            await socket.shake_hands(self._address)
            await socket.send(TEXT, json.dumps({"type": "auth", "token": self._token}).encode())
            welcome = await asyncio.wait_for(socket.receive(), 10)
            self._greet(json.loads(welcome or b"{}"))
            async with self._telling:  # what waits goes before what is pushed from now on
                self._socket = socket
                await self._tell(list(self._pushes))
            while True:
                text = await socket.receive()
                if text is None:
                    return
                self._now()
                await self._hear(text)
        finally:
            await socket.close()

    def _greet(self, welcome: "dict[str, Any]") -> None:
        if welcome.get("type") != "welcome":
            raise Refused(welcome.get("detail") or "the hub does not know this token")
        self.name = welcome["you"]
        self._time, self._ticks = welcome["time"], _ticks()
        self._log(f"connected as {self.name}")
        if self._memory.lost:
            # We cannot tell what has run. Nothing that was minted before now will run again.
            self._memory.marks[""] = f"{self._time}_0"
            self._memory.lost = False
            self._memory.save()
            self._log("the memory was unreadable; ids from before now are refused")

    def _now(self) -> int:
        """The hub's time in ms, since many devices have no clock; asked at every frame, lest ticks wrap."""
        ticks = _ticks()
        self._time += _ticks_diff(ticks, self._ticks)
        self._ticks = ticks
        return self._time

    async def _hear(self, text: bytes) -> None:
        try:
            frame = json.loads(text)
            if frame.get("type") == "server_ack" and "seq_id" in frame:
                self._stored(frame)
            if "from" not in frame or "seq_id" not in frame:
                return
        except (ValueError, TypeError):
            self._log("a frame that is too large for us, or not JSON")
            return
        try:
            await self._take(Command(frame, self._send))
        except ValueError as problem:
            await self._say(frame["from"], frame["seq_id"], [BAD_PARAMETERS, None, str(problem)])

    async def _say(self, sender: str, seq_id: str, answer: "list[Any]", state: str = "") -> None:
        code, data, detail = answer
        frame: dict[str, Any] = {"type": "ack", "seq_id": seq_id, "to": sender, "code": code}
        if data is not None:
            frame["data"] = data
        if detail:
            frame["detail"] = detail
        if state:
            frame["state"] = state
        await self._send(frame)

    async def _send(self, frame: "dict[str, Any]") -> bool:
        if self._socket is None:
            return False
        try:
            await self._socket.send(TEXT, json.dumps(frame).encode())
        except OSError:
            return False  # the reader notices, too, and the hub repeats
        return True

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    async def _take(self, command: Command) -> None:
        if any(command.same(other) for other in self._waiting) or command.same(self._running):
            return  # it is answered when it is done
        memory = self._memory_of(command)
        entry = memory.find(command)
        if entry is None:
            if memory.forgot(command):
                self._log(f"{command.id} of {command.sender} is too old: it may have run")
            elif command.type not in self._handlers:
                detail = f"{self.name} does not know {command.type}"
                await self._say(command.sender, command.id, [NOT_SUPPORTED, None, detail])
            else:
                await self._queue(command)
        elif entry[PRINT] != command.print:
            detail = "this id was used before, for something else"
            await self._say(command.sender, command.id, [BAD_PARAMETERS, None, detail])
        elif entry[ANSWER] is not None:
            await self._say(command.sender, command.id, entry[ANSWER])
        elif self._handlers.get(command.type, (None, False))[1]:
            await self._queue(command)
        else:
            self._log(f"{command.id} of {command.sender} was begun before we stopped: nobody can tell")

    async def _queue(self, command: Command) -> None:
        if len(self._waiting) >= WAITING_LIMIT:
            await self._say(command.sender, command.id, [BUSY, None, "too many commands wait already"])
            return
        place = 0
        while place < len(self._waiting) and not command.precedes(self._waiting[place]):
            place += 1
        self._waiting.insert(place, command)
        self._news.set()

    async def _supersede(self, command: Command) -> None:
        answer = [TIMEOUT, None, "a later one took effect before it"]
        await self._say(command.sender, command.id, answer, "superseded")

    # ── what is run ──────────────────────────────────────────────────────────────────────────────

    async def _work(self) -> None:
        while True:
            self._running = await self._next()
            try:
                await self._run(self._running)
            except Exception as problem:
                self._log(f"{self._running.id} of {self._running.sender}: {problem!r}")
            self._running = None

    async def _next(self) -> Command:
        held: Command | None = None
        while True:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
                continue
            first = self._waiting[0]
            if first is held or first.after <= self._memory_of(first).newest(first)[1]:
                self._waiting.pop(0)
                if not self._is_outdated(first):
                    return first
                await self._supersede(first)
                continue
            held = first
            await asyncio.sleep(ORDER_WINDOW)  # what goes before it is put before it, if it comes meanwhile

    def _is_outdated(self, command: Command) -> bool:
        """Whether only the latest counts, and a newer one that can still be done is next in its lane."""
        if command.latest:
            for other in self._waiting:
                if other.lane == command.lane and not (other.exp and other.exp <= self._now()):
                    return other.latest
        return False

    async def _run(self, command: Command) -> None:
        memory = self._memory_of(command)
        handler, repeatable = self._handlers[command.type]
        entry = memory.find(command)
        if command.exp and command.exp <= self._now():
            late = [TIMEOUT, None, "it expired before it could be done"]
            await self._say(command.sender, command.id, late, "expired")
            return
        if entry is None and command.lane is not None and memory.newest(command) > command.at:
            await self._supersede(command)
            return
        if not repeatable:
            entry = memory.add(command)
            try:
                memory.save()
            except OSError as problem:
                memory.entries.remove(entry)
                full = [OUT_OF_RESOURCES, None, f"it could not be stored, and was not done: {problem!r}"]
                await self._say(command.sender, command.id, full)
                return
        answer = await self._call(handler, command)
        entry = entry or memory.add(command)
        kept = len(json.dumps(answer)) <= ANSWER_LIMIT
        if kept or not repeatable:
            entry[ANSWER] = answer if kept else [answer[0], None, "the answer was too long to be kept"]
        try:
            memory.save()
        except OSError as problem:
            self._log(f"the answer of {command.id} is not in flash: {problem!r}")
        await self._say(command.sender, command.id, answer)

    async def _call(self, handler: "Callable[[Command], Any]", command: Command) -> "list[Any]":
        try:
            data = handler(command)
            if hasattr(data, "send"):
                data = await data
        except DeviceError as problem:
            return [problem.code, None, problem.detail]
        except Exception as problem:
            return [HARDWARE_FAULT, None, repr(problem)[:200]]
        try:
            if command.type != CHUNK:  # its text is large, and memory small
                json.loads(json.dumps(data))  # MicroPython writes what is not JSON without a word
        except (ValueError, TypeError) as problem:
            return [DONE, None, f"done, but what came of it cannot be told: {problem!r}"]
        return [DONE, data, ""]

    def _memory_of(self, command: Command) -> Memory:
        return self._chunks if command.type == CHUNK else self._memory


def _ticks() -> int:
    if hasattr(time, "ticks_ms"):
        return int(time.ticks_ms())
    return int(time.monotonic() * 1000)


def _ticks_diff(late: int, early: int) -> int:
    if hasattr(time, "ticks_diff"):
        return int(time.ticks_diff(late, early))
    return late - early
