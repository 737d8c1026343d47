"""The embedded broker's questions: who may connect, answered by us.

nats-server asks over a NATS connection of ours (its "auth callout", docs/adr/0015) for every MQTT client that
connects, and says its username, password and client id. The answer is a signed token that names the account
and the permissions, or a refusal. Over the same connection we ask the broker who is connected and how much
each client has sent, and hang up on clients.

The law: a client gets in only by our answer. Without one, because the hub is gone or too slow, the broker
refuses it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct

from duly.broker.rules import BrokerUser, subjects
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import BrokerError, DulyError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import SupervisedTask, Supervisor

LOG: Final = logging.getLogger("duly.broker.embedded")

USER: Final = "$duly"
"""Our own user, in the broker's system account."""

ANSWER_WITHIN: Final = 5.0
"""Seconds the broker has for an answer to us."""

VISITORS_KEPT: Final = 20_000
"""Connections of which we remember whose they are; the broker's log names only their numbers."""

GONE_KEPT: Final = 1_000
"""The same, of connections that have ended."""

LARGE: Final = 4_096
"""Bytes that count as much as one message."""

LISTED: Final = 100_000
"""Connections that are listed where all of them matter."""

AT_ONCE: Final = 256
"""Visitors who are judged at the same time."""

_RECONNECT: Final = RetryPolicy.exponential(20 * MS, SECOND, jitter=0.0)
_QUESTION: Final = b"$SYS.REQ.USER.AUTH"
_GONE: Final = b"$SYS.ACCOUNT.*.DISCONNECT"
_ACCOUNT_KEY: Final = 0
"""What the text of an account's public key begins with, before base32: an A."""


class ConnectingClient(Struct, frozen=True):
    """A client that wants to connect."""

    username: str
    password: str
    client_id: str
    address: str


Judge = Callable[[ConnectingClient], Awaitable[BrokerUser]]
"""Says as whom a visitor is let in; raises a `DulyError` that says why it is not."""


class BrokerConnection(Struct, frozen=True):
    """A client that is connected, and how much it has published so far: messages, and so many more for large
    ones."""

    cid: int
    user: str
    account: str
    published: int
    waiting: int = 0
    """bytes that the broker has for it, and that it has not read yet"""


class _ClientInfo(Struct):
    host: str = ""
    id: int = 0
    type: str = ""
    mqtt_id: str = ""


class _ConnectOptions(Struct):
    user: str = ""
    password: str = msgspec.field(default="", name="pass")


class _ServerId(Struct):
    id: str


class _Request(Struct):
    server_id: _ServerId
    user_nkey: str
    client_info: _ClientInfo
    connect_opts: _ConnectOptions


class _Question(Struct):
    nats: _Request


class _Client(Struct):
    id: int = 0


class _Gone(Struct):
    client: _Client


class _Conn(Struct):
    cid: int
    authorized_user: str = ""
    account: str = ""
    mqtt_client: str = ""
    in_msgs: int = 0
    in_bytes: int = 0
    pending_bytes: int = 0


class _Conns(Struct):
    connections: list[_Conn] = []


class _Connz(Struct):
    data: _Conns


class Issuer:
    """Signs what the broker believes."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        raw = bytes([_ACCOUNT_KEY]) + self._key.public_key().public_bytes_raw()
        self.name = base64.b32encode(raw + _crc16(raw).to_bytes(2, "little")).decode().rstrip("=")
        """its public key, as NATS writes it"""

    def admit(self, question: _Request, user: BrokerUser) -> bytes:
        """The answer that lets a client in as this user."""
        permissions = {
            "type": "user",
            "version": 2,
            "pub": {"allow": subjects(user.publish)},
            "sub": {"allow": subjects(user.subscribe)},
            "subs": -1,
            "data": -1,
            "payload": -1,
            "allowed_connection_types": ["MQTT"],
        }
        who = {"sub": question.user_nkey, "aud": user.account, "name": user.name, "nats": permissions}
        return self._answer(question, {"jwt": self._signed(who).decode()})

    def refuse(self, question: _Request, reason: str) -> bytes:
        return self._answer(question, {"error": reason})

    def _answer(self, question: _Request, result: dict[str, Any]) -> bytes:
        says = {"type": "authorization_response", "version": 2} | result
        return self._signed({"sub": question.user_nkey, "aud": question.server_id.id, "nats": says})

    def _signed(self, claims: dict[str, Any]) -> bytes:
        claims = claims | {"iss": self.name, "iat": int(time.time())}
        digest = hashlib.sha256(msgspec.json.encode(claims)).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        text = _JWT_HEAD + b"." + _base64(msgspec.json.encode(claims))
        return text + b"." + _base64(self._key.sign(text))


class Callout:
    """Our connection to the broker's own port, from `start` until `stop`; made anew when it breaks."""

    def __init__(self, judge: Judge, tasks: Supervisor | None = None) -> None:
        self.issuer = Issuer()
        self.password = secrets.token_urlsafe(32)
        self._judge = judge
        self._writer: asyncio.StreamWriter | None = None
        self._server = b""
        self._judging: set[int] = set()
        """clients that we are asked about, and have not answered yet"""
        self._visitors: OrderedDict[int, ConnectingClient] = OrderedDict()
        self._gone: OrderedDict[int, ConnectingClient] = OrderedDict()
        self._answers: dict[bytes, asyncio.Future[bytes]] = {}
        self._inbox = f"_INBOX.{secrets.token_hex(8)}".encode()
        self._asked = 0
        self._door = asyncio.Semaphore(AT_ONCE)
        self._tasks = tasks or Supervisor()
        self._answering: SupervisedTask | None = None

    async def start(self, port: int) -> None:
        """Connect, and answer from now on."""
        await self.stop()
        self._reader: asyncio.StreamReader | None = await self._connect(port)
        self._answering = self._tasks.spawn("broker callout", lambda: self._run(port))

    async def stop(self) -> None:
        if self._answering is not None:
            await self._answering.stop()
            self._answering = None
        self._close()
        self._judging.clear()
        self._visitors.clear()
        self._gone.clear()

    def visitor(self, cid: int) -> ConnectingClient | None:
        """Whose connection this was, by its number in the broker's log."""
        return self._visitors.get(cid) or self._gone.get(cid)

    async def connections(self, user: str = "") -> list[BrokerConnection]:
        """The clients that are connected, those that have published most first; of one user, or the first
        thousand of all."""
        asked: dict[str, object] = {"auth": True, "sort": "msgs_from", "limit": 1000}
        if user:
            asked["user"] = user
        return [
            BrokerConnection(
                one.cid,
                one.authorized_user,
                one.account,
                one.in_msgs + one.in_bytes // LARGE,
                one.pending_bytes,
            )
            for one in await self._listed(asked)
        ]

    async def _listed(self, asked: dict[str, object]) -> list[_Conn]:
        return msgspec.json.decode(await self._ask(b"CONNZ", asked), type=_Connz).data.connections

    async def kick(self, cid: int) -> None:
        """Hang up on a client."""
        await self._ask(b"KICK", {"cid": cid})

    async def kick_user(self, user: str) -> None:
        """Hang up on all clients of a user."""
        for connection in await self.connections(user):
            await self.kick(connection.cid)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    async def _connect(self, port: int) -> asyncio.StreamReader:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
                info = msgspec.json.decode((await reader.readline()).removeprefix(b"INFO "))
                self._server = str(info["server_id"]).encode()
                hello = {"verbose": False, "user": USER, "pass": self.password, "protocol": 1}
                self._send(b"CONNECT %b" % msgspec.json.encode(hello))
                for number, subject in enumerate((_QUESTION, _GONE, self._inbox + b".*"), 1):
                    self._send(b"SUB %b %d" % (subject, number))
                self._send(b"PING")
                while not (line := await reader.readline()).startswith(b"PONG"):
                    if not line or line.startswith(b"-ERR"):
                        raise BrokerError(f"the broker does not take our questions: {line.decode()}")
                return reader
        except (OSError, TimeoutError, msgspec.DecodeError) as problem:
            self._close()
            raise BrokerError(f"the broker's own port {port} does not answer: {problem}") from None

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BrokerError("the connection to the broker has broken"))
        self._answers.clear()

    async def _run(self, port: int) -> None:
        backoff = Backoff(_RECONNECT)
        while True:
            if self._reader is None:
                await backoff.wait()
                try:
                    self._reader = await self._connect(port)
                except BrokerError:  # it is being started anew, or stopped: then we are stopped, too
                    continue
            self._tasks.do("hanging up on the unheard", self._kick_unheard())
            try:
                await self._read(self._reader)
            except (OSError, ValueError, asyncio.IncompleteReadError) as problem:
                LOG.warning("the connection to the broker's own port has broken: %s", problem)
            finally:  # also when a bug ends this task: it is started again, with a new connection
                self._reader = None
                self._close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line.startswith(b"MSG "):
                words = line.split()
                body = (await reader.readexactly(int(words[-1]) + 2))[:-2]
                self._heard(words, body)
            elif line.startswith(b"PING"):
                self._send(b"PONG")

    def _heard(self, words: list[bytes], body: bytes) -> None:
        subject, number = words[1], words[2]
        if number == b"1":
            self._tasks.do("broker callout answer", self._answer(words[3], body))
        elif number == b"2":
            self._left(msgspec.json.decode(body, type=_Gone).client.id)
        elif (answer := self._answers.pop(subject, None)) is not None and not answer.done():
            answer.set_result(body)

    def _left(self, cid: int) -> None:
        """A client has left. Lines about it may still be in the log: so it is remembered a little longer."""
        visitor = self._visitors.pop(cid, None)
        if visitor is not None:
            self._gone[cid] = visitor
            if len(self._gone) > GONE_KEPT:
                self._gone.popitem(last=False)

    def _send(self, line: bytes, body: bytes | None = None) -> None:
        if self._writer is not None:
            self._writer.write(line + b"\r\n" if body is None else b"%b\r\n%b\r\n" % (line, body))

    async def _ask(self, what: bytes, wanted: dict[str, object]) -> bytes:
        if self._writer is None:
            raise BrokerError("there is no connection to the broker's own port")
        self._asked += 1
        inbox, body = b"%b.%d" % (self._inbox, self._asked), msgspec.json.encode(wanted)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[inbox] = answer
        self._send(b"PUB $SYS.REQ.SERVER.%b.%b %b %d" % (self._server, what, inbox, len(body)), body)
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await answer
        except TimeoutError:
            raise BrokerError(f"the broker did not answer within {ANSWER_WITHIN:g} s") from None
        finally:
            self._answers.pop(inbox, None)

    async def _kick_unheard(self) -> None:
        """Hang up on the clients that the broker asked about while we did not listen: it takes connections
        before we are there. They come again at once; they would wait for our answer for `JUDGED_WITHIN`."""
        with contextlib.suppress(BrokerError, msgspec.DecodeError):  # it is being started anew
            for one in await self._listed({"auth": True, "limit": LISTED}):
                waits = not one.account and (one.mqtt_client or one.authorized_user)
                if waits and one.cid not in self._judging and one.cid not in self._visitors:
                    await self.kick(one.cid)

    # ── visitors ─────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, reply: bytes, body: bytes) -> None:
        question = msgspec.json.decode(_unbase64(body.split(b".")[1]), type=_Question).nats
        self._judging.add(question.client_info.id)
        try:
            async with self._door:
                answer = await self._judged(question)
            self._send(b"PUB %b %d" % (reply, len(answer)), answer)
        finally:
            self._judging.discard(question.client_info.id)

    async def _judged(self, question: _Request) -> bytes:
        client, login = question.client_info, question.connect_opts
        visitor = ConnectingClient(login.user, login.password, client.mqtt_id, client.host)
        if client.type != "mqtt":
            return self.issuer.refuse(question, "only MQTT clients are served")
        try:
            user = await self._judge(visitor)
            answer = self.issuer.admit(question, user)
        except DulyError as problem:
            return self.issuer.refuse(question, str(problem))
        except Exception:
            LOG.exception("judging a visitor of the broker has failed")
            return self.issuer.refuse(question, "internal error")
        self._visitors[client.id] = visitor
        if len(self._visitors) > VISITORS_KEPT:
            self._visitors.popitem(last=False)
        return answer


def _crc16(data: bytes) -> int:
    """CRC-16/XMODEM, which ends the text of a NATS key."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _unbase64(text: bytes) -> bytes:
    return base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))


_JWT_HEAD: Final = _base64(b'{"typ":"JWT","alg":"ed25519-nkey"}')
