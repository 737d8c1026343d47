# MicroPython has no contextlib, no stars in tuples, and a TimeoutError of its own.
# ruff: noqa: RUF005, SIM105, UP041
"""The way to a hub through an MQTT broker, for `duly_device`: copy this file beside it for `mqtt:` URLs.

The laws. The session at the broker is kept, and everything goes with QoS 1. A task is acknowledged to the
broker when the device has heard it, and to the hub (`ack`) when it is in flash. A status with `online:true`
is retained and renewed every minute; the will says `online:false` in the same session. To the device a task
is a frame, as over WebSocket, and so are its answers. With a key everything that is said is signed.
"""

import asyncio
import binascii
import hashlib
import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from duly.clients.micropython.duly_device import HubLink, Json, Refused, load_json, steady_diff, steady_ms
else:
    device = __import__("duly_device")  # it stands beside this file, not in a package
    HubLink, Refused, load_json = device.HubLink, device.Refused, device.load_json
    steady_ms, steady_diff = device.steady_ms, device.steady_diff

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, PINGREQ = 0x10, 0x20, 0x30, 0x40, 0x82, 0xC0
KEEP_ALIVE = 30
"""seconds: after half of it the broker is pinged, after one and a half the connection is dead"""
HEARTBEAT = 60
"""seconds between two reports of the status"""
TASKS = 200
"""commands whose msg_id is known; the hub sends the others again"""
FAILED = 2
"""the code of a push that is refused without one"""


def clock() -> int:
    """Returns the board's time in ms since 1970; 0 while it is not set."""
    seconds = int(time.time()) + (946684800 if time.gmtime(0)[0] == 2000 else 0)
    return seconds * 1000 if seconds > 1704067200 else 0


DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def content(raw: object, enc: object) -> object:
    """Returns what a payload, value or error means. Base64 holds JSON or text; what is no base64 is what it
    says, and what holds neither is left as it is."""
    if not isinstance(raw, str) or not raw:
        return None if raw == "" else raw
    if enc != "base64" or len(raw) % 4 or not all(c in DIGITS + "+/" for c in raw.rstrip("=")):
        return raw
    try:
        text = binascii.a2b_base64(raw).decode()
    except ValueError:
        return raw
    try:
        found: object = load_json(text)
    except ValueError:
        return text
    return found


TAG = 24
"""characters of the tag with which the hub binds a task to its device"""


def split_id(msg_id: str) -> "tuple[str, str]":
    """Returns the app and the seq_id in the msg_id of a task, {app}:{seq_id}:{tag}."""
    app, colon, rest = msg_id.partition(":")
    cut = rest.rfind(":")
    tag = rest[cut + 1 :]
    if cut >= 0 and len(tag) == TAG and all(c in DIGITS + "-_" for c in tag):
        rest = rest[:cut]
    if not app or not colon or not rest:
        raise ValueError("a msg_id is {app}:{seq_id}:{tag}")
    return app, rest


class Key:
    """A secret that device and hub share, as `duly add device NAME --key shared` prints it."""

    def __init__(self, text: str) -> None:
        self.kid, _, secret = text.partition(":")
        try:
            self._secret = binascii.a2b_base64(secret)
        except ValueError:
            self._secret = b""
        if len(self.kid) != 16 or len(self._secret) != 32:
            raise ValueError("a key is KID:SECRET, as 'duly add device --key shared' prints it")

    def sign(self, fields: "tuple[object, ...]") -> str:
        """Returns the HMAC-SHA256 of these fields, each led by its length in four bytes."""
        inner = self._hash(0x36)
        for field in fields:
            raw = field if isinstance(field, bytes) else str(field).encode()
            inner.update(len(raw).to_bytes(4, "big"))
            inner.update(raw)
        outer = self._hash(0x5C)
        outer.update(inner.digest())
        return binascii.b2a_base64(outer.digest()).decode().strip()

    def _hash(self, pad: int) -> "hashlib._Hash":
        block = self._secret + bytes(64 - len(self._secret))
        return hashlib.sha256(bytes([byte ^ pad for byte in block]))


def tagged(value: object) -> bytes:
    """Returns what is signed of a value that is written as JSON."""
    if value is None:
        return b"n"
    return b"t" + value.encode() if isinstance(value, str) else b"j" + json.dumps(value).encode()


class Mqtt(HubLink):
    """A connection to the broker: MQTT 3.1.1, as far as a device needs it. With `key` it signs."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: int,
        name: str,
        key: "Key | None" = None,
    ) -> None:
        self._reader, self._writer, self._limit, self._name = reader, writer, limit, name
        self._key = key
        self._lock = asyncio.Lock()  # two drains at once send the same bytes twice on MicroPython
        self._session = binascii.hexlify(os.urandom(8)).decode()
        self._tasks: dict[tuple[str, str], str] = {}
        self._packet = 1
        self._unacknowledged = 0
        self._heard = self._said = steady_ms()

    async def log_in(self, token: str) -> "Json":
        """Connect, subscribe and report online. Returns the welcome that a hub would send."""
        name = self._name
        will = _string(f"nodes/{name}/status") + _string(json.dumps(self._status(False)))
        head = _string("MQTT") + b"\x04\xec" + KEEP_ALIVE.to_bytes(2, "big")
        await self._write(CONNECT, head + _string(name) + will + _string(name) + _string(token))
        kind, body = await asyncio.wait_for(self._read_packet(), 10)
        if kind & 0xF0 != CONNACK or len(body) < 2 or body[1]:
            code = body[1] if len(body) > 1 else "none"
            raise Refused(f"the broker does not let {name} in (code {code}): wrong name or token?")
        topics = b"".join(_string(f"nodes/{name}/{kind}") + b"\x01" for kind in ("pending", "ack", "failed"))
        await self._write(SUBSCRIBE, b"\x00\x01" + topics)
        await self._report()
        return {"type": "welcome", "you": name, "time": clock()}

    async def say(self, frame: "Json") -> None:
        """Send an answer or a push."""
        if frame["type"] != "ack":
            push: Json = {name: frame[name] for name in ("type", "data", "seq_id") if name in frame}
            await self._publish(f"nodes/{self._name}/status", self._status(True, push))
            return
        key = (frame["to"], frame["seq_id"])
        said: Json = {"msg_id": self._tasks.get(key)}
        if said["msg_id"] is None:
            return  # it came over another connection; the hub sends it again
        if frame.get("state") == "delivered":
            kind, field, value = "ack", "progress", frame.get("progress")
        elif frame["code"] == 0:
            kind, field, value = "complete", "value", frame.get("data")
        else:
            why = {name: frame[name] for name in ("code", "detail", "state") if frame.get(name)}
            kind, field, value = "failed", "error", why
        if kind != "ack":
            del self._tasks[key]
        if value is not None:
            said[field], said["enc"] = value, "json"
        self._sign(said, kind, "hub", (said["msg_id"], tagged(value)))
        await self._publish(f"nodes/hub/{kind}", said)

    async def receive(self) -> bytes:
        """Returns the next frame, b"" for one that cannot be read. What was heard before is acknowledged."""
        while True:
            if self._unacknowledged:
                known, self._unacknowledged = self._unacknowledged, 0
                await self._write(PUBACK, known.to_bytes(2, "big"))
            kind, body = await self._next_packet()
            if kind & 0xF0 != PUBLISH:
                continue
            size = int.from_bytes(body[:2], "big")
            topic, body = body[2 : 2 + size], body[2 + size :]
            if kind & 6:
                self._unacknowledged, body = int.from_bytes(body[:2], "big"), body[2:]
            try:
                last = topic.decode().split("/")[-1]
                return json.dumps(self._frame(last, load_json(body))).encode()
            except Exception:
                return b""

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass

    # ── messages as frames ───────────────────────────────────────────────────────────────────────

    def _frame(self, kind: str, said: "Json") -> "Json":
        if kind == "ack":
            return {"type": "server_ack", "seq_id": said["msg_id"], "code": 0}
        if kind == "failed":
            why = content(said.get("error"), said.get("enc"))
            answer: Json = {"code": FAILED, "detail": ""}
            answer.update(why if isinstance(why, dict) else {})
            answer.update({"type": "server_ack", "seq_id": said["msg_id"]})
            return answer
        if said.get("receiver") not in (None, "", self._name):
            raise ValueError("it is for another device")
        app, seq_id = split_id(said["msg_id"])
        while len(self._tasks) >= TASKS:
            del self._tasks[next(iter(self._tasks))]
        self._tasks[app, seq_id] = said["msg_id"]
        frame: Json = {"type": said["action"], "from": app, "seq_id": seq_id}
        data = content(said.get("payload"), said.get("enc"))
        if data is not None:
            frame["data"] = data
        if said.get("exp"):
            frame["exp"] = said["exp"] * 1000
        if said.get("order"):
            frame["order"] = said["order"]
        return frame

    def _status(self, online: bool, push: "Json | None" = None) -> "Json":
        status: Json = {"time": clock() // 1000, "online": online, "session": self._session}
        heartbeat: tuple[int, ...] = (HEARTBEAT * 1000,) if online else ()
        if online:
            status["heartbeat"] = HEARTBEAT
        if push is not None:
            status["data"], status["enc"] = push, "json"
        unsaid = ("", "", "", "", 0)  # battery, rssi, ip, version and uptime
        said = (self._session, tagged(push))
        self._sign(status, "status", "", (status["time"], int(online)) + unsaid + said + heartbeat)
        return status

    def _sign(self, said: "Json", kind: str, reader: str, fields: "tuple[object, ...]") -> None:
        """Adds the signature to what is said: who says what kind of thing to which reader, and its fields."""
        if self._key is not None:
            place = ("duly-fd-1", "nodes", kind, self._name, reader)
            said["sig"], said["kid"] = self._key.sign(place + fields), self._key.kid

    async def _report(self) -> None:
        self._said = steady_ms()
        await self._publish(f"nodes/{self._name}/status", self._status(True), 1)

    # ── packets ──────────────────────────────────────────────────────────────────────────────────

    async def _next_packet(self) -> "tuple[int, bytes]":
        """Returns the next packet. Meanwhile the broker is pinged, and the status renewed."""
        while True:
            try:
                first = await asyncio.wait_for(self._reader.readexactly(1), KEEP_ALIVE / 2)
            except asyncio.TimeoutError:
                if _seconds_since(self._heard) > 1.5 * KEEP_ALIVE:
                    raise OSError("the broker is silent") from None
                await self._write(PINGREQ, b"")
                first = b""
            if _seconds_since(self._said) >= HEARTBEAT:
                await self._report()
            if first:
                self._heard = steady_ms()
                return await asyncio.wait_for(self._read_packet(first), KEEP_ALIVE)

    async def _read_packet(self, first: bytes = b"") -> "tuple[int, bytes]":
        kind = (first or await self._reader.readexactly(1))[0]
        size = shift = 0
        while True:
            (byte,) = await self._reader.readexactly(1)
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 21:
                raise OSError("the broker sends a length that is none")
        body = await self._reader.readexactly(min(size, self._limit))
        size -= len(body)
        while size:  # of a packet that is too long only the beginning is kept: it is no JSON
            size -= len(await self._reader.readexactly(min(size, 1024)))
        return kind, body

    async def _publish(self, topic: str, said: "Json", retain: int = 0) -> None:
        self._packet = self._packet % 65535 + 1
        body = _string(topic) + self._packet.to_bytes(2, "big") + json.dumps(said).encode()
        await self._write(PUBLISH | 2 | retain, body)

    async def _write(self, kind: int, body: bytes) -> None:
        size, head = len(body), bytes([kind])
        while size > 127:
            head += bytes([size & 127 | 128])
            size >>= 7
        async with self._lock:
            self._writer.write(head + bytes([size]) + body)
            await self._writer.drain()


def _seconds_since(ticks: int) -> float:
    """Returns how long ago that was; a clock that is set meanwhile changes nothing."""
    return steady_diff(steady_ms(), ticks) / 1000


def _string(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data
