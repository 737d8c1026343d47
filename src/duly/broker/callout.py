"""Answers the embedded broker's question whether a client may connect.

nats-server sends its "auth callout" (docs/adr/0015) over a NATS connection that the hub makes to it. For
every MQTT client that connects it sends the username, password and client id. The answer is a signed token
that names the account and the permissions, or a refusal. Over the same connection the hub asks the broker
who is connected and how much each client has sent, and closes connections of clients.

A client gets in only by an answer of the hub. Without one, because the hub has stopped or is too slow, the
broker refuses the client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct

from duly.broker.acl_dialects import BrokerUser, subjects
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import BrokerError, DulyError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import SupervisedTask, Supervisor

LOG: Final = logging.getLogger("duly.broker.embedded")

USER: Final = "$duly"
"""The user as which the hub logs in to the broker's system account."""

ANSWER_WITHIN: Final = 5.0
"""Seconds within which the broker has to answer a question of the hub."""

CLIENTS_KEPT: Final = 20_000
"""Connections whose clients are remembered; the broker's log names only their numbers."""

GONE_KEPT: Final = 1_000
"""Ended connections whose clients are remembered."""

LARGE: Final = 4_096
"""Bytes that count as one more message."""

LISTED: Final = 100_000
"""Connections in a list that is meant to have all of them."""

AT_ONCE: Final = 256
"""Clients that are being authenticated at the same time."""

_RECONNECT: Final = RetryPolicy.exponential(20 * MS, SECOND, jitter=0.0)
_QUESTION: Final = b"$SYS.REQ.USER.AUTH"
_GONE: Final = b"$SYS.ACCOUNT.*.DISCONNECT"
_ACCOUNT_KEY: Final = 0
"""The first byte of an account's public key, which base32 shows as an A."""


class ConnectingClient(Struct, frozen=True):
    """A client that wants to connect."""

    username: str
    password: str
    client_id: str
    address: str


Judge = Callable[[ConnectingClient], Awaitable[BrokerUser]]
"""Returns the user as which a client is let in; raises a `DulyError` that says why it is not."""


class BrokerConnection(Struct, frozen=True):
    """A connected client and what it has published so far, in messages; a large message counts as several."""

    cid: int
    user: str
    account: str
    published: int
    waiting: int = 0
    """bytes that the broker has for the client and that the client has not read yet"""


class _ClientInfo(Struct):
    host: str = ""
    id: int = 0
    type: str = ""
    mqtt_id: str = ""


class _ConnectOptions(Struct):
    user: str = ""
    password: str = msgspec.field(default="", name="pass")


class _ServerInfo(Struct):
    server_id: str


class _ServerId(Struct):
    id: str


class _AuthRequest(Struct):
    server_id: _ServerId
    user_nkey: str
    client_info: _ClientInfo
    connect_opts: _ConnectOptions


class _AuthQuestion(Struct):
    nats: _AuthRequest


class _GoneClient(Struct):
    id: int = 0


class _Gone(Struct):
    client: _GoneClient


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


_decode_info: Final = msgspec.json.Decoder(_ServerInfo).decode


class Issuer:
    """Signs the answers that the broker trusts."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        raw = bytes([_ACCOUNT_KEY]) + self._key.public_key().public_bytes_raw()
        self.name = base64.b32encode(raw + _crc16(raw).to_bytes(2, "little")).decode().rstrip("=")
        """the public key, as NATS writes it"""

    def admit(self, question: _AuthRequest, user: BrokerUser) -> bytes:
        """Return the answer that lets a client in as this user."""
        permissions = {
            "type": "user",
            "version": 2,
            "pub": {"allow": subjects(user.publish), "deny": subjects(user.denied)},
            "sub": {"allow": subjects(user.subscribe)},
            "subs": -1,
            "data": -1,
            "payload": -1,
            "allowed_connection_types": ["MQTT", "MQTT_WS"],
        }
        who: dict[str, object] = {
            "sub": question.user_nkey,
            "aud": user.account,
            "name": user.name,
            "nats": permissions,
        }
        return self._answer(question, {"jwt": self._signed(who).decode()})

    def refuse(self, question: _AuthRequest, reason: str) -> bytes:
        """Return the answer that refuses a client."""
        return self._answer(question, {"error": reason})

    def _answer(self, question: _AuthRequest, result: dict[str, object]) -> bytes:
        response: dict[str, object] = {"type": "authorization_response", "version": 2} | result
        return self._signed({"sub": question.user_nkey, "aud": question.server_id.id, "nats": response})

    def _signed(self, claims: dict[str, object]) -> bytes:
        claims = claims | {"iss": self.name, "iat": int(time.time())}
        digest = hashlib.sha256(msgspec.json.encode(claims)).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        text = _JWT_HEAD + b"." + _base64(msgspec.json.encode(claims))
        return text + b"." + _base64(self._key.sign(text))


class Callout:
    """The hub's connection to the broker's NATS port, from `start` until `stop`; made again when it
    breaks."""

    def __init__(self, judge: Judge, tasks: Supervisor | None = None) -> None:
        self.issuer = Issuer()
        self.password = secrets.token_urlsafe(32)
        self._judge = judge
        self._writer: asyncio.StreamWriter | None = None
        self._server = b""
        self._judging: set[int] = set()
        """clients that the broker has asked about and that have no answer yet"""
        self._clients: OrderedDict[int, ConnectingClient] = OrderedDict()
        self._gone: OrderedDict[int, ConnectingClient] = OrderedDict()
        self._holders: dict[str, ConnectingClient] = {}
        """the connected client of each client id"""
        self._answers: dict[bytes, asyncio.Future[bytes]] = {}
        self._inbox = f"_INBOX.{secrets.token_hex(8)}".encode()
        self._connected: Counter[str] = Counter()
        """connections of each account"""
        self.on_connections: Callable[[str, bool], None] = lambda _name, _connected: None
        """hears of every account that has connected, and of one whose last connection has ended"""
        self._before: list[int] = []
        """the connections of clients when the hub's own was lost"""
        self._asked = 0
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._first = ""
        """the account that is let in before all others"""
        self._open = asyncio.Event()
        self._open.set()
        self._tasks = tasks or Supervisor()
        self._answering: SupervisedTask | None = None

    async def start(self, port: int) -> None:
        """Connect, and answer questions from now on."""
        await self.stop()
        self._reader: asyncio.StreamReader | None = await self._connect(port)
        self._answering = self._tasks.spawn("broker callout", lambda: self._run(port))

    async def stop(self) -> None:
        """Disconnect; the broker refuses clients from now on."""
        if self._answering is not None:
            await self._answering.stop()
            self._answering = None
        self._close()
        self._judging.clear()
        self._before.clear()
        self._clients.clear()
        self._gone.clear()
        self._holders.clear()
        self._connected.clear()

    def admit_first(self, name: str) -> None:
        """Let only this account in until `admit_all`; others wait. What they publish before it has subscribed
        would be lost to it."""
        self._first = name
        self._open.clear()

    def admit_all(self) -> None:
        """Let all accounts in."""
        self._open.set()

    def client(self, cid: int) -> ConnectingClient | None:
        """Return the client of a connection, by the connection's number in the broker's log."""
        return self._clients.get(cid) or self._gone.get(cid)

    def holder(self, client_id: str) -> ConnectingClient | None:
        """Return the connected client with this client id; the next one that connects with it takes its
        place."""
        return self._holders.get(client_id)

    async def connections(self, user: str = "") -> list[BrokerConnection]:
        """Return the connected clients of one user, or the first thousand of all users; those that have
        published most come first."""
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
        """Close a connection."""
        await self._ask(b"KICK", {"cid": cid})

    async def kick_user(self, user: str) -> None:
        """Close all connections of a user."""
        for connection in await self.connections(user):
            await self.kick(connection.cid)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    async def _connect(self, port: int) -> asyncio.StreamReader:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
                info = _decode_info((await reader.readline()).removeprefix(b"INFO "))
                self._server = info.server_id.encode()
                hello = {"verbose": False, "user": USER, "pass": self.password, "protocol": 1}
                self._send(b"CONNECT %b" % msgspec.json.encode(hello))
                for number, subject in enumerate((_QUESTION, _GONE, self._inbox + b".*"), 1):
                    self._send(b"SUB %b %d" % (subject, number))
                self._send(b"PING")
                while not (line := await reader.readline()).startswith(b"PONG"):
                    if not line or line.startswith(b"-ERR"):
                        raise BrokerError(f"the broker refuses the hub's own connection: {line.decode()}")
                return reader
        except (OSError, TimeoutError, msgspec.DecodeError) as problem:
            self._close()
            raise BrokerError(f"the broker's NATS port {port} does not answer: {problem}") from None

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BrokerError("the connection to the broker is lost"))
        self._answers.clear()

    async def _run(self, port: int) -> None:
        backoff = Backoff(_RECONNECT)
        while True:
            if self._reader is None:
                await backoff.wait()
                try:
                    self._reader = await self._connect(port)
                except BrokerError:  # the broker is restarting, or stopping: then `stop` ends this task
                    continue
            self._tasks.do("broker clients without an answer", self._compare_clients())
            try:
                await self._read(self._reader)
            except (OSError, ValueError, asyncio.IncompleteReadError) as problem:
                LOG.warning("the connection to the broker's NATS port is lost: %s", problem)
            finally:  # also when a bug ends this task: the supervisor starts it again with a new connection
                self._reader = None
                self._before = list(self._clients)
                self._close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line.startswith(b"MSG "):
                words = line.split()
                body = (await reader.readexactly(int(words[-1]) + 2))[:-2]
                self._received(words, body)
            elif line.startswith(b"PING"):
                self._send(b"PONG")

    def _received(self, words: list[bytes], body: bytes) -> None:
        subject, number = words[1], words[2]
        if number == b"1":
            self._tasks.do("broker callout answer", self._answer(words[3], body))
        elif number == b"2":
            self._left(msgspec.json.decode(body, type=_Gone).client.id)
        elif (answer := self._answers.pop(subject, None)) is not None and not answer.done():
            answer.set_result(body)

    def _left(self, cid: int) -> None:
        """Remember a client that has left a little longer: lines about it may still be in the log."""
        client = self._clients.pop(cid, None)
        if client is not None:
            self._no_holder(client)
            self._gone[cid] = client
            if len(self._gone) > GONE_KEPT:
                self._gone.popitem(last=False)
            self._connected[client.username] -= 1
            if not self._connected[client.username]:
                del self._connected[client.username]
                self.on_connections(client.username, False)

    def _send(self, line: bytes, body: bytes | None = None) -> None:
        if self._writer is not None:
            self._writer.write(line + b"\r\n" if body is None else b"%b\r\n%b\r\n" % (line, body))

    async def _ask(self, what: bytes, wanted: dict[str, object]) -> bytes:
        return await self.request(f"$SYS.REQ.SERVER.{self._server.decode()}.{what.decode()}", wanted)

    async def request(self, subject: str, wanted: dict[str, object]) -> bytes:
        """Ask the broker something, and return its answer."""
        if self._writer is None:
            raise BrokerError("there is no connection to the broker's NATS port")
        self._asked += 1
        inbox, body = b"%b.%d" % (self._inbox, self._asked), msgspec.json.encode(wanted)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[inbox] = answer
        self._send(b"PUB %b %b %d" % (subject.encode(), inbox, len(body)), body)
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await answer
        except TimeoutError:
            raise BrokerError(f"the broker did not answer within {ANSWER_WITHIN:g} s") from None
        finally:
            self._answers.pop(inbox, None)

    async def _compare_clients(self) -> None:
        """Note which clients have left while the hub was not connected, and close the connections of those
        that the broker asked about meanwhile: it accepts connections earlier. Such clients reconnect at once;
        else they would wait for `JUDGED_WITHIN` seconds."""
        known, self._before = self._before, []
        with contextlib.suppress(BrokerError, msgspec.DecodeError):  # the broker is restarting
            listed = await self._listed({"auth": True, "limit": LISTED})
            present = {one.cid for one in listed}
            for cid in known if len(listed) < LISTED else []:
                if cid not in present:
                    self._left(cid)
            for one in listed:
                waits = not one.account and (one.mqtt_client or one.authorized_user)
                if waits and one.cid not in self._judging and one.cid not in self._clients:
                    await self.kick(one.cid)

    def _no_holder(self, client: ConnectingClient) -> None:
        if self._holders.get(client.client_id) is client:
            del self._holders[client.client_id]

    # ── clients ──────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, reply: bytes, body: bytes) -> None:
        question = msgspec.json.decode(_unbase64(body.split(b".")[1]), type=_AuthQuestion).nats
        self._judging.add(question.client_info.id)
        try:
            if question.connect_opts.user != self._first:
                await self._open.wait()
            async with self._slots:
                answer = await self._judged(question)
            self._send(b"PUB %b %d" % (reply, len(answer)), answer)
        finally:
            self._judging.discard(question.client_info.id)

    async def _judged(self, question: _AuthRequest) -> bytes:
        client, login = question.client_info, question.connect_opts
        connecting = ConnectingClient(login.user, login.password, client.mqtt_id, client.host)
        if client.type != "mqtt":
            return self.issuer.refuse(question, "only MQTT clients are served")
        try:
            user = await self._judge(connecting)
            answer = self.issuer.admit(question, user)
        except DulyError as problem:
            return self.issuer.refuse(question, str(problem))
        except Exception:
            LOG.exception("authenticating a client of the broker has failed")
            return self.issuer.refuse(question, "internal error")
        self._clients[client.id] = self._holders[connecting.client_id] = connecting
        self._connected[connecting.username] += 1
        self.on_connections(connecting.username, True)
        if len(self._clients) > CLIENTS_KEPT:
            # Its end is not noticed, so its account counts as connected.
            self._no_holder(self._clients.popitem(last=False)[1])
        return answer


def _crc16(data: bytes) -> int:
    """Return the CRC-16/XMODEM, which ends the text of a NATS key."""
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
