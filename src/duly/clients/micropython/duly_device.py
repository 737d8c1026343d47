# MicroPython has no pathlib, no contextlib, and a TimeoutError of its own.
# ruff: noqa: PTH104, PTH107, PTH123, SIM105
"""duly for MicroPython: a device that carries out each command once. One file, which needs only MicroPython;
for a hub behind an MQTT broker `duly_mqtt.py` beside it.

The laws. A command is written to flash before it is run, and its answer before it is sent; no repeat, reset
or power cut repeats an effect. A command that a power cut interrupted is not run again and not answered (the
hub ends it as `unknown`), unless its handler is `at_least_once`. Commands run one at a time, and those of one
sender and order key in its order.

An id that is no longer remembered is no longer accepted: the last 100 ids are kept, and of every sender the
newest id that was forgotten; a command that is not newer may have run, so it is not run. Chunks of media are
only read: they have a window of their own, in memory, so that a download neither pushes a command out nor
wears the flash, and a repeat is read again.

A push is in flash, with its id, before it is sent, and until the hub has stored it.

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

    Json = dict[str, Any]
    Row = list[Any]
    Handler = Callable[["Command"], Any]
except ImportError:
    pass  # MicroPython skips annotations, so only type checkers need these names

CHUNK = "media_download_chunk"
ORDER_WINDOW = 0.3
"""seconds: how long a command waits for the one that goes before it"""
SILENCE = 60
"""seconds: the hub pings every 20; after three missed pings the connection is dead"""
ANSWER_LIMIT = 256
"""bytes: of a longer answer only the code is kept"""
WAITING_LIMIT = 100
"""commands: further ones are answered with BUSY"""
PUSHES_LIMIT = 20
"""pushes that the hub has not stored yet"""

DONE, BUSY, BAD_PARAMETERS, HARDWARE_FAULT, TIMEOUT = 0, 1, 2, 3, 4
NOT_AUTHORISED, OUT_OF_RESOURCES, NOT_SUPPORTED = 5, 6, 7


class DeviceError(Exception):
    """A handler raises it to fail with a code: nothing was done."""

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


class Refused(Exception):
    """The hub refuses this device."""


KNOWN = ("type", "seq_id", "to", "from", "data", "exp", "order", "timeout")
"""the fields of the protocol; other fields of a command are its sender's own"""


class Command:
    """A command, as its handler gets it: `type`, `data`, `sender`, `id`, and in `fields` what else it
    carried. A handler that takes long is an async function, and reports it: `await command.working(50)`."""

    def __init__(self, frame: "Json", send: "Callable[[Json], Any] | None" = None) -> None:
        self._send = send
        self.fields = {name: frame[name] for name in frame if name not in KNOWN}
        order = frame.get("order") or {}
        ordered = isinstance(order, dict) and order.get("mode") != "any"
        self.type: str = frame["type"]
        self.data = frame.get("data")
        self.sender: str = frame["from"]
        self.id: str = frame["seq_id"]
        self.at = moment(self.id)
        self.exp: int = frame.get("exp") or 0
        self.lane: str | None = order.get("key", "") if ordered else None
        self.after: int = order.get("after", -1) if ordered else -1
        if not isinstance(self.exp, (int, float)) or not isinstance(self.after, int):
            raise ValueError("exp is milliseconds, order.after a counter")
        self.latest: bool = ordered and order.get("mode") == "latest"
        said = [self.type, self.data] + ([sorted(self.fields.items())] if self.fields else [])
        meaning = json.dumps(said).encode()
        self.print = binascii.hexlify(hashlib.sha256(meaning).digest()[:4]).decode()

    async def working(self, progress: object = None) -> None:
        """Report that it is being worked on, and how far it is: the hub sends no repeat and waits anew."""
        said: Json = {"type": "ack", "seq_id": self.id, "to": self.sender, "state": "delivered"}
        if progress is not None:
            said["progress"] = progress
        if self._send is not None:
            await self._send(said)

    def same(self, other: "Command | None") -> bool:
        """Whether the other is a repeat of it."""
        return other is not None and (self.sender, self.id) == (other.sender, other.id)

    def precedes(self, other: "Command") -> bool:
        """Whether it must take effect before the other, whichever came first."""
        same_lane = (self.sender, self.lane) == (other.sender, other.lane)
        return self.lane is not None and same_lane and self.at < other.at


def moment(seq_id: str) -> "tuple[int, int]":
    """Returns an id's time and counter, by which ids are compared."""
    ms, _, n = seq_id.partition("_")
    sound = ms.isdigit() and n.isdigit() and seq_id == f"{int(ms)}_{int(n)}"
    if not sound or int(ms) >= 1 << 48 or int(n) >= 1 << 63:
        raise ValueError("a seq_id is milliseconds, an underscore and a counter")
    return int(ms), int(n)


def next_id(last: str, now: int) -> str:
    """Returns the id after `last` ("": there was none)."""
    ms, n = moment(last) if last else (0, -1)
    return f"{max(now, ms)}_{n + 1}"


def load_json(text: "str | bytes") -> "Any":
    """Returns what a text means. MicroPython reads a text that is cut off as if it were whole; with something
    behind it, it does not."""
    raw = text.encode() if isinstance(text, str) else text
    found = json.loads(b"[" + raw + b",0]")
    if len(found) != 2 or found[1] != 0:
        raise ValueError("no JSON, or not all of it")
    return found[0]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────

SENDER, ID, PRINT, LANE, ANSWER = 0, 1, 2, 3, 4


class Memory:
    """The last `size` ids in order of arrival, each with its fingerprint and answer (None: begun, or not
    kept), and of every sender the newest forgotten id. With `file` it is in flash."""

    def __init__(self, size: int, file: "str | None" = None) -> None:
        self.size, self.file = size, file
        self.entries: list[Row] = []
        self.marks: dict[str, str] = {}
        self.lost = file is not None and not self._load(file)

    def find(self, command: Command) -> "Row | None":
        """Returns the entry of a command."""
        for entry in self.entries:
            if entry[ID] == command.id and entry[SENDER] == command.sender:
                return entry
        return None

    def forgot(self, command: Command) -> bool:
        """Whether it may have run before. The mark of "" holds for every sender."""
        marks = [self.marks[name] for name in (command.sender, "") if name in self.marks]
        return any(command.at <= moment(mark) for mark in marks)

    def newest(self, command: Command) -> "tuple[int, int]":
        """Returns the newest id of this sender in this lane that has not failed."""
        newest = moment(self.marks[command.sender]) if command.sender in self.marks else (0, -1)
        for entry in self.entries:
            failed = entry[ANSWER] is not None and entry[ANSWER][0] != DONE
            if entry[SENDER] == command.sender and entry[LANE] == command.lane and not failed:
                newest = max(newest, moment(entry[ID]))
        return newest

    def add(self, command: Command) -> "Row":
        """Remember a command, and forget the oldest."""
        entry = [command.sender, command.id, command.print, command.lane, None]
        self.entries.append(entry)
        while len(self.entries) > self.size:
            oldest = self.entries.pop(0)
            # They arrive in any order: the mark is the newest forgotten id, not the last one forgotten.
            if moment(self.marks.get(oldest[SENDER], "0_0")) <= moment(oldest[ID]):
                self.marks[oldest[SENDER]] = oldest[ID]
        return entry

    def save(self) -> None:
        """Write everything to flash; if that fails the old file stays."""
        if self.file is None:
            return
        write_file(self.file, {"marks": self.marks, "ids": self.entries})

    def _load(self, file: str) -> bool:
        """Returns False if there is a file that cannot be read."""
        known, unreadable = read_file(file)
        try:
            self.marks, self.entries = known["marks"], known["ids"]
        except (KeyError, TypeError):
            return not unreadable
        return True


class Pushes:
    """The pushes that the hub has not stored yet, in order, and the last id that was minted; in flash."""

    def __init__(self, file: str) -> None:
        self.file, self.is_saved = file, True
        known, _ = read_file(file)
        try:
            self.waiting: list[Json] = known["waiting"]
            self.last: str = known["last"]
            next_id(self.last, 0)
        except (KeyError, TypeError, ValueError):
            self.waiting, self.last = [], ""

    def save(self) -> None:
        """Write them to flash; if that fails the old file stays."""
        write_file(self.file, {"waiting": self.waiting, "last": self.last})
        self.is_saved = True

    def mint(self, now: int) -> None:
        """Give an id to those that have none."""
        for push in self.waiting:
            if "seq_id" not in push:
                self.last = push["seq_id"] = next_id(self.last, now)
                self.is_saved = False

    def remove(self, seq_id: str) -> None:
        """Forget a push, if it waits."""
        left = [push for push in self.waiting if push.get("seq_id") != seq_id]
        if len(left) < len(self.waiting):
            self.waiting, self.is_saved = left, False
            self.save()


def write_file(file: str, value: object) -> None:
    """Replace a file by a new one, as a whole, durably."""
    new = file + ".new"
    with open(new, "w") as text:
        text.write(json.dumps(value))
        text.flush()  # on MicroPython this syncs
        if hasattr(os, "fsync"):
            os.fsync(text.fileno())
    try:
        os.rename(new, file)
    except OSError:  # FAT does not rename over a file; after a power cut in between, `.new` is whole
        os.remove(file)
        os.rename(new, file)


def read_file(file: str) -> "tuple[Json, bool]":
    """Returns what a file holds, {} if nothing can be read, and whether there is one."""
    there = False
    for name in (file, file + ".new"):
        try:
            with open(name) as text:
                there = True
                known: Json = load_json(text.read())
            return known, True
        except (OSError, ValueError):
            pass
    return {}, there


# ── WebSocket ────────────────────────────────────────────────────────────────────────────────────

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


class HubLink:
    """A connection to the hub, which carries frames."""

    async def log_in(self, token: str) -> "Json":
        """Say who we are. Returns the hub's welcome."""
        raise NotImplementedError

    async def say(self, frame: "Json") -> None:
        """Send a frame."""
        raise NotImplementedError

    async def receive(self) -> "bytes | None":
        """Returns the next frame, b"" for one that cannot be read, None at the end."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connection."""
        raise NotImplementedError


class WebSocket(HubLink):
    """The client's side of RFC 6455, as far as a hub needs it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int, host: str
    ) -> None:
        self._reader, self._writer, self._limit, self._host = reader, writer, limit, host
        # Two drains at once send the same bytes twice on MicroPython.
        self._lock = asyncio.Lock()

    async def shake_hands(self, host: str) -> None:
        """Upgrade the connection."""
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
        while line := await self._line():
            name, _, value = line.partition(b":")
            if name.lower() == b"sec-websocket-accept":
                accept = value.strip()
        sha1 = getattr(hashlib, "sha1", None)  # small ports have none
        if sha1 is not None:
            proof = sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            if accept != binascii.b2a_base64(proof).strip():
                raise Refused(f"{host} does not speak WebSocket")

    async def log_in(self, token: str) -> "Json":
        """Upgrade the connection and say who we are. Returns the hub's welcome."""
        await self.shake_hands(self._host)
        await self.say({"type": "auth", "token": token})
        said = await asyncio.wait_for(self.receive(), 10)
        welcome: Json = load_json(said or b"{}")
        return welcome

    async def say(self, frame: "Json") -> None:
        """Send a frame of the protocol."""
        await self.send(TEXT, json.dumps(frame).encode())

    async def send(self, kind: int, data: bytes) -> None:
        """Send one frame, masked."""
        size = len(data)
        key = os.urandom(4)
        code, width = (size, 0) if size < 126 else (126, 2) if size < 65536 else (127, 8)
        head = bytes([0x80 | kind, 0x80 | code]) + (size.to_bytes(width, "big") if width else b"")
        body = bytearray(data)
        for i in range(size):
            body[i] ^= key[i & 3]
        async with self._lock:
            self._writer.write(head + key + body)
            await self._writer.drain()

    async def receive(self) -> "bytes | None":
        """Returns the next message, b"" for one that is too large, None at the end. Pings are answered."""
        message = b""
        skipped = False
        while True:
            first, second = await self._read(2)
            kind, size = first & 15, second & 127
            if second & 128 or first & 0x70:
                raise Refused("the hub sends frames that are masked or extended")
            if size > 125:
                size = int.from_bytes(await self._read(2 if size == 126 else 8), "big")
            if kind >= CLOSE and size > 125:
                raise Refused("the hub sends control frames that are too long")
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
        """Close the connection."""
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


class Device:
    """A device. `log` is called with a sentence whenever something is not done; `ssl` is True or a context
    for `wss:` and `mqtts:`; a frame of more than `limit` bytes is not answered. For `mqtt:` its `name` has to
    be given; with `key` it signs there. A `timeless` board never learns the time: no command is refused for
    coming late."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        file: str = "duly.json",
        window: int = 100,
        limit: int = 65536,
        ssl: object = None,
        name: str = "",
        key: str = "",
        timeless: bool = False,
        log: "Callable[[str], None]" = lambda text: None,
    ) -> None:
        scheme, _, rest = url.partition("://")
        self._address = rest.split("/")[0]
        host, _, port = self._address.partition(":")
        self._mqtt = scheme in ("mqtt", "mqtts")
        if self._mqtt and not name:
            raise ValueError("say which device it is: Device(url, token, name='lock-1')")
        secure = scheme in ("wss", "https", "mqtts")
        usual = (8883 if secure else 1883) if self._mqtt else 443 if secure else 80
        self._where = (host, int(port or usual), ssl or secure or None)
        self._key = __import__("duly_mqtt").Key(key) if key and self._mqtt else None
        self._token, self._limit, self._log = token, limit, log
        self._timeless = timeless
        self._memory, self._chunks = Memory(window, file), Memory(window)
        self._handlers: dict[str, tuple[Handler, bool]] = {}
        self._waiting: list[Command] = []
        self._running: Command | None = None
        self._pushes = Pushes(file + ".pushes")
        self._telling = asyncio.Lock()
        self._news = asyncio.Event()
        self._socket: HubLink | None = None
        self._time = 0
        self._ticks = steady_ms()
        self.name = name

    def on(self, *types: str, effect: str = "at_most_once") -> "Callable[[Handler], Handler]":
        """Declare a handler of these command types: a function or an async function, which returns the
        answer's data or raises `DeviceError`."""
        if effect not in ("at_most_once", "at_least_once"):
            raise ValueError("effect is 'at_most_once' or 'at_least_once'")

        def decorate(handler: "Handler") -> "Handler":
            for type_ in types:
                self._handlers[type_] = (handler, effect == "at_least_once" or type_ == CHUNK)
            return handler

        return decorate

    async def push(self, type: str, data: object = None) -> bool:
        """Push something to the apps. It is kept in flash, and sent again after a reconnect or a restart,
        until the hub has stored it. Returns False if too many wait already, or if it cannot be kept: then it
        is lost."""
        pushes = self._pushes
        if len(pushes.waiting) >= PUSHES_LIMIT:
            return False
        frame: Json = {"type": type} if data is None else {"type": type, "data": data}
        async with self._telling:
            pushes.waiting.append(frame)
            try:
                if self._has_time():
                    pushes.mint(self._now())
                pushes.save()
            except OSError as problem:
                pushes.waiting.remove(frame)
                self._log(f"a push could not be kept: {problem!r}")
                return False
            if "seq_id" in frame and self._socket is not None:
                await self._send(frame)
        return True

    async def _tell_all(self) -> None:
        """Send what waits, in order. An id is in flash before it is sent, so a restart does not change it."""
        if not self._has_time():
            return
        self._pushes.mint(self._now())
        try:
            if not self._pushes.is_saved:
                self._pushes.save()
        except OSError as problem:
            self._log(f"pushes wait until flash can be written: {problem!r}")
            return
        for frame in list(self._pushes.waiting):
            await self._send(frame)

    def _has_time(self) -> bool:
        """Whether an id can be minted: the time is known, or there was an id before."""
        return self._now() > 0 or self._pushes.last != ""

    def _stored(self, frame: "Json") -> None:
        if frame.get("code") in (4, None):
            return  # it is sent again
        if frame["code"] not in (0, 5):
            self._log(f"the hub refuses a push: {frame.get('detail')}")
        try:
            self._pushes.remove(frame["seq_id"])
        except OSError as problem:  # after a restart it is sent again, and the hub knows it
            self._log(f"flash cannot be written: {problem!r}")

    async def run(self) -> None:
        """Serve until cancelled; a lost connection is made again."""
        worker = asyncio.create_task(self._work())
        pause = 0.2
        try:
            while True:
                try:
                    await self._session()
                except Refused as problem:
                    self._log(f"refused: {problem}")
                    if not self._socket:
                        pause = 60.0  # frequent tries would only be blocked
                except Exception as problem:  # whatever the other side sends, the device goes on
                    self._log(f"connection lost: {problem!r}")
                if self._socket is not None:
                    self._socket, pause = None, 0.2
                await asyncio.sleep(pause * (1 - os.urandom(1)[0] / 1280))
                pause = min(2 * pause, 10.0)
        finally:
            worker.cancel()

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    async def _session(self) -> None:
        host, port, secure = self._where
        options: Json = {"ssl": secure} if secure else {}  # before 1.23 there is no such option
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, **options), 10)
        socket = self._link(reader, writer)
        try:
            self._greet(await socket.log_in(self._token))
            async with self._telling:  # waiting pushes go before new ones
                self._socket = socket
                await self._tell_all()
            while (text := await socket.receive()) is not None:
                self._now()
                await self._hear(text)
        finally:
            await socket.close()

    def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HubLink:
        if not self._mqtt:
            return WebSocket(reader, writer, self._limit, self._address)
        link: HubLink = __import__("duly_mqtt").Mqtt(reader, writer, self._limit, self.name, self._key)
        return link

    def _greet(self, welcome: "Json") -> None:
        if welcome.get("type") != "welcome":
            raise Refused(welcome.get("detail") or "the hub does not know this token")
        self.name = welcome["you"]
        self._time, self._ticks = welcome["time"], steady_ms()
        self._log(f"connected as {self.name}")
        self._settle_lost_memory()

    def _settle_lost_memory(self) -> None:
        """What has run is not known: no id from before now is accepted; none while now is not known."""
        if not self._memory.lost:
            return
        now = self._now()
        if not now:
            self._log(
                "the memory was unreadable, and the clock is not set: no command is accepted until it is"
            )
            return
        self._memory.marks[""] = f"{now}_0"
        self._memory.lost = False
        self._memory.save()
        self._log("the memory was unreadable; ids from before now are refused")

    def _now(self) -> int:
        """Returns the hub's time in ms, since many devices have no clock; called at every frame, before ticks
        wrap. Over MQTT it is the board's own time; 0 while that is not known."""
        ticks = steady_ms()
        if not self._time and self._mqtt:
            self._time, self._ticks = __import__("duly_mqtt").clock(), ticks
        if not self._time:
            return 0
        self._time += steady_diff(ticks, self._ticks)
        self._ticks = ticks
        return self._time

    async def _hear(self, text: bytes) -> None:
        try:
            frame = load_json(text)
            named = isinstance(frame.get("seq_id"), str)
            if frame.get("type") == "server_ack" and named:
                self._stored(frame)
            if not named or not isinstance(frame.get("from"), str) or not isinstance(frame.get("type"), str):
                return
        except Exception:
            self._log("a frame that is too large, or no JSON object")
            return
        try:
            command = Command(frame, self._send)
        except Exception as problem:
            await self._say(frame["from"], frame["seq_id"], [BAD_PARAMETERS, None, str(problem)])
            return
        await self._take(command)

    async def _say(self, sender: str, seq_id: str, answer: "Row", state: str = "") -> None:
        code, data, detail = answer
        frame: Json = {"type": "ack", "seq_id": seq_id, "to": sender, "code": code}
        for name, value in (("data", data), ("detail", detail or None), ("state", state or None)):
            if value is not None:
                frame[name] = value
        await self._send(frame)

    async def _refuse(self, command: Command, code: int, detail: str, state: str = "") -> None:
        await self._say(command.sender, command.id, [code, None, detail], state)

    async def _send(self, frame: "Json") -> bool:
        if self._socket is None:
            return False
        try:
            await self._socket.say(frame)
        except OSError:
            return False  # the reader notices it, too, and the hub repeats
        return True

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    async def _take(self, command: Command) -> None:
        if any(command.same(other) for other in self._waiting) or command.same(self._running):
            return  # it is answered when it is done
        memory = self._memory_of(command)
        entry = memory.find(command)
        if entry is None:
            self._settle_lost_memory()
            if memory.lost:
                self._log(f"{command.id} of {command.sender} may have run: the memory was unreadable")
            elif memory.forgot(command):
                self._log(f"{command.id} of {command.sender} is too old: it may have run")
            elif command.type not in self._handlers:
                await self._refuse(command, NOT_SUPPORTED, f"{self.name} does not know {command.type}")
            else:
                await self._queue(command)
        elif entry[PRINT] != command.print:
            await self._refuse(command, BAD_PARAMETERS, "this id was used before, for something else")
        elif entry[ANSWER] is not None:
            await self._say(command.sender, command.id, entry[ANSWER])
        elif self._handlers.get(command.type, (None, False))[1]:
            await self._queue(command)
        else:
            self._log(f"{command.id} of {command.sender} was begun before a restart: its outcome is unknown")

    async def _queue(self, command: Command) -> None:
        if len(self._waiting) >= WAITING_LIMIT:
            await self._refuse(command, BUSY, "too many commands wait already")
            return
        place = 0
        while place < len(self._waiting) and not command.precedes(self._waiting[place]):
            place += 1
        self._waiting.insert(place, command)
        self._news.set()

    async def _supersede(self, command: Command) -> None:
        await self._refuse(command, TIMEOUT, "a later one took effect before it", "superseded")

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
            await asyncio.sleep(ORDER_WINDOW)  # a command that goes before it may come meanwhile

    def _is_outdated(self, command: Command) -> bool:
        """Whether only the latest counts, and a newer one that can still be done is next in its lane."""
        if command.latest:
            for other in self._waiting:
                if other.lane == command.lane and not self._is_expired(other):
                    return other.latest
        return False

    def _is_expired(self, command: Command) -> bool:
        return 0 < command.exp <= self._now()  # a time that is not known is 0

    async def _run(self, command: Command) -> None:
        memory = self._memory_of(command)
        handler, repeatable = self._handlers[command.type]
        entry = memory.find(command)
        unsure = bool(command.exp and not self._now() and not self._timeless)
        if entry is not None and (unsure or self._is_expired(command)):
            self._log(f"{command.id} of {command.sender} was begun before a restart: its outcome is unknown")
            return
        if unsure:
            # A broker may have kept it for hours.
            await self._refuse(command, BUSY, "the clock is not set: it may be late, and was not done")
            return
        if self._is_expired(command):
            await self._refuse(command, TIMEOUT, "it expired before it could be done", "expired")
            return
        if entry is None and command.lane is not None and memory.newest(command) > command.at:
            await self._supersede(command)
            return
        if entry is None and command.type != CHUNK:
            entry = memory.add(command)
            try:
                memory.save()
            except OSError as problem:
                memory.entries.remove(entry)
                detail = f"it could not be stored, and was not done: {problem!r}"
                await self._refuse(command, OUT_OF_RESOURCES, detail)
                return
        if self._mqtt:
            await command.working()  # to the hub this says that it is stored
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

    async def _call(self, handler: "Handler", command: Command) -> "Row":
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
                json.loads(json.dumps(data))  # MicroPython writes values that are not JSON, too
        except (ValueError, TypeError) as problem:
            return [DONE, None, f"done, but what it returned cannot be sent: {problem!r}"]
        return [DONE, data, ""]

    def _memory_of(self, command: Command) -> Memory:
        return self._chunks if command.type == CHUNK else self._memory


def steady_ms() -> int:
    """Returns milliseconds of a clock that no time setting moves; they wrap."""
    return int(time.ticks_ms() if hasattr(time, "ticks_ms") else time.monotonic() * 1000)


def steady_diff(late: int, early: int) -> int:
    """Returns the milliseconds between two of them."""
    return int(time.ticks_diff(late, early)) if hasattr(time, "ticks_diff") else late - early
