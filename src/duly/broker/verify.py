"""Checks whether a live broker enforces the rules of `duly.core.acl`, by trying every operation.

Only the delivery of a message proves anything. A broker may acknowledge a forbidden publish and drop it,
or grant a forbidden subscription and deliver nothing: both are fine. So an observer that receives
everything listens while the users publish, and publishes while they listen. The check waits for messages
that should arrive, and a moment longer for messages that should not.

Some brokers let an account connect once only (Mosquitto and EMQX with `use_username_as_clientid`): another
connection ends the one before. There the check has one connection of each account at a time.

It leaves nothing behind: its sessions end with it, and no message is retained. Real nodes at the broker
receive a few texts that are not FD messages, and record them as malformed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from duly.core.acl import EVERY_NAME, HUB, LETTERS, STATUS, AccountClass, Act, Permission, covers, decide
from duly.errors import ConnectionLost, ConnectionRefused, Malformed, NotAllowed
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire.session import Acknowledge

PATIENCE: Final = 5.0
"""Seconds within which a message that should arrive has to arrive."""

GRACE: Final = 0.5
"""Seconds to wait for messages that should not arrive."""

PING: Final = b"\xc0\x00"
DISCONNECT: Final = b"\xe0\x00"

AT_ONCE: Final = 8
"""Connections that are opened at the same time."""

Found = TypeVar("Found")


class BrokerLogin(Struct, frozen=True):
    """A user of the broker as which operations are tried."""

    name: str
    password: str
    of: AccountClass = AccountClass.NODE


class AclFinding(Struct, frozen=True):
    """The result of one operation that was tried, beside what the rules say."""

    user: str
    act: str
    topic: str
    allowed: bool
    happened: bool
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the broker did what the rules say."""
        return self.allowed == self.happened

    @property
    def verdict(self) -> str:
        """A word for the finding: ok, leaks (forbidden and possible) or blocked (allowed and impossible)."""
        return "ok" if self.ok else "leaks" if self.happened else "blocked"


def sample_topics(users: Sequence[str], prefix: str) -> list[str]:
    """Return topics to publish to, allowed and forbidden ones."""
    own = [f"{prefix}/{user}/{kind}" for user in users for kind in (*LETTERS, STATUS, "other")]
    return [*own, *(f"{prefix}/{user}/pending/deeper" for user in users), f"{prefix}-other/x/pending"]


def sample_filters(users: Sequence[str], prefix: str) -> list[str]:
    """Return topic filters to subscribe to, allowed and forbidden ones."""
    of_all = [f"{prefix}/{EVERY_NAME}/{kind}" for kind in (*LETTERS, STATUS)]
    whole = [f"{prefix}/{user}/#" for user in users]
    shared = [f"$share/duly/{prefix}/{user}/pending" for user in users]
    return [*sample_topics(users, prefix), *of_all, *whole, *shared, f"{prefix}/#", "#", "+/#", "$SYS/#"]


async def check(
    observer: BrokerAddress,
    users: Sequence[BrokerLogin],
    prefix: str,
    *,
    patience: float = PATIENCE,
    grace: float = GRACE,
) -> list[AclFinding]:
    """Try every operation as each of these users, with an observer that may do everything."""
    if len(users) < 2:
        raise Malformed("name at least two users: each tries the topics of the other")
    if observer.username in {user.name for user in users}:
        raise Malformed(
            "the observer may do everything, so it cannot be one of the users; log in as another account"
        )
    trial = _Trial(observer, users, prefix, patience, grace)
    async with AsyncExitStack() as closing:
        trial.observer = await trial.enter(observer.username, observer.password, "#", closing=closing)
        await trial.prove_observer()
        await trial.find_out_whether_alone()
        return [
            *await trial.strangers(),
            *await trial.publishing(),
            *await trial.dying(),
            *await trial.subscribing(),
            *await trial.taking_over(),
        ]


class _TestClient:
    """A connection, with the messages that it has received."""

    def __init__(self, address: BrokerAddress, *subscriptions: str, clean: bool = True) -> None:
        self.received: list[tuple[str, str]] = []
        self.arrived = asyncio.Event()
        self.link = MqttLink(address, self._receive, subscriptions=subscriptions, clean=clean)

    def _receive(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        self.received.append((topic, payload.decode(errors="replace")))
        self.arrived.set()
        ack()

    async def receive(self, wanted: set[tuple[str, str]], within: float) -> None:
        """Wait until all of these messages were received, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not wanted <= set(self.received):
                    self.arrived.clear()
                    await self.arrived.wait()


class _Trial:
    """One run of the check."""

    def __init__(
        self, address: BrokerAddress, users: Sequence[BrokerLogin], prefix: str, patience: float, grace: float
    ) -> None:
        self._address = address
        self._users = users
        self._names = [user.name for user in users]
        self._peers: list[str] | None = None
        """the nodes that a node may write to; None for every user, where there are no devices"""
        if any(user.of is AccountClass.DEVICE for user in users):
            self._peers = [user.name for user in users if user.of is AccountClass.NODE]
            self._names.append(HUB)
        self._prefix = prefix
        self._patience = patience
        self._grace = grace
        self._nonce = secrets.token_hex(4)
        self._count = 0
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._turns: dict[str, asyncio.Lock] | None = None
        """by user, if an account can have only one connection at a time"""
        self.observer: _TestClient

    def address(self, name: str, password: str) -> BrokerAddress:
        """Return the address for this user, under a client id of its own: the connection of a real node must
        not be replaced."""
        client_id = f"{name}-{secrets.token_hex(6)}"
        return replace(self._address, username=name, password=password, client_id=client_id)

    async def enter(
        self, name: str, password: str, *subscriptions: str, closing: AsyncExitStack
    ) -> _TestClient:
        """Connect with this name and password, until `closing` ends; the client hears the subscriptions."""
        return await self._open(_TestClient(self.address(name, password), *subscriptions), closing)

    async def _open(self, client: _TestClient, closing: AsyncExitStack) -> _TestClient:
        async with self._slots:
            await client.link.start()
            closing.push_async_callback(client.link.stop)
            await client.link.connected()
        return client

    async def find_out_whether_alone(self) -> None:
        """Connect twice as one user: does the second connection end the first?"""
        user = self._users[0]
        topic = f"{self._prefix}-other/x/pending"
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(self._patience):
                first, second = [await self._connect(user, topic, "") for _ in range(2)]
                try:
                    first[1].write(PING)
                    alone = not await first[0].read(1)
                except OSError:
                    alone = True
                if alone:
                    self._turns = {one.name: asyncio.Lock() for one in self._users}
                for _, writer in (second, first):
                    writer.write(DISCONNECT)
                    writer.close()

    def _turn(self, user: BrokerLogin) -> AbstractAsyncContextManager[object]:
        """Wait until this user has no other connection, if it can have only one."""
        return nullcontext() if self._turns is None else self._turns[user.name]

    def message(self) -> str:
        """Return a payload that no other attempt has."""
        self._count += 1
        return f"duly acl test {self._nonce} {self._count}"

    async def prove_observer(self) -> None:
        """Check that the observer receives everything: else a missing message would prove nothing."""
        sent = await self._publish_everywhere()
        reached = {topic for topic, message in self.observer.received if sent.get(topic) == message}
        missed = sent.keys() - reached
        if missed:
            raise NotAllowed(
                f"the observer {self._address.username} cannot publish to and receive {min(missed)}; it "
                "must be allowed everything"
            )

    async def _publish_everywhere(self) -> dict[str, str]:
        """Publish a message to every topic as the observer, and wait until the observer has received them."""
        sent = {topic: self.message() for topic in sample_topics(self._names, self._prefix)}
        with suppress(ConnectionLost):  # some brokers close the connection after a forbidden publish
            for topic, message in sent.items():
                with suppress(NotAllowed):  # as MQTT 5 says it
                    await self.observer.link.publish(topic, message.encode())
        await self.observer.receive(set(sent.items()), self._patience)
        return sent

    # ── what is tried ────────────────────────────────────────────────────────────────────────────

    async def strangers(self) -> list[AclFinding]:
        """Try to connect with wrong passwords and without a name."""
        found = []
        wrong = [(user.name, user.password + "x", "a wrong password") for user in self._users]
        for name, password, what in [*wrong, ("", "", "no name")]:
            async with AsyncExitStack() as closing:
                happened = True
                try:
                    await self.enter(name, password, closing=closing)
                except (ConnectionRefused, ConnectionLost):
                    happened = False
            found.append(AclFinding(name, "connect", "", False, happened, f"with {what}"))
        return found

    async def publishing(self) -> list[AclFinding]:
        """Let every user publish to every topic, and see what arrives."""
        tried = [
            (user, topic, self.message())
            for user in self._users
            for topic in sample_topics(self._names, self._prefix)
        ]
        await _together(self._publish(user, topic, message) for user, topic, message in tried)
        return await self._arrivals("publish", tried)

    def _decide(self, act: Act, user: BrokerLogin, topic: str) -> Permission:
        return decide(act, user.name, topic, self._prefix, user.of, self._peers)

    async def _arrivals(self, act: str, tried: list[tuple[BrokerLogin, str, str]]) -> list[AclFinding]:
        """Compare the messages that have arrived with those that should have."""
        may = {message: self._decide(Act.PUBLISH, user, topic) for user, topic, message in tried}
        wanted = {(topic, message) for _, topic, message in tried if may[message]}
        await self.observer.receive(wanted, self._patience)
        await asyncio.sleep(self._grace)
        received = set(self.observer.received)
        return [
            AclFinding(
                user.name, act, topic, may[message].allowed, (topic, message) in received, may[message].reason
            )
            for user, topic, message in tried
        ]

    async def _publish(self, user: BrokerLogin, topic: str, message: str) -> None:
        async with self._turn(user), AsyncExitStack() as closing:
            client = await self.enter(user.name, user.password, closing=closing)
            # Some brokers close the connection after a forbidden publish, some refuse it in MQTT 5.
            with suppress(ConnectionLost, NotAllowed, TimeoutError):
                async with asyncio.timeout(self._patience):
                    await client.link.publish(topic, message.encode())

    async def dying(self) -> list[AclFinding]:
        """Try to publish by a will, which rules of brokers easily forget."""
        topics = [f"{self._prefix}/{name}/{STATUS}" for name in self._names]
        topics.append(f"{self._prefix}-other/x/pending")
        tried = [(user, topic, self.message()) for user in self._users for topic in topics]
        await _together(self._die(user, topic, message) for user, topic, message in tried)
        return await self._arrivals("will", tried)

    async def _die(self, user: BrokerLogin, topic: str, message: str) -> None:
        """Connect with a will and break the connection off."""
        with suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError
        ):  # a refused connection is fine, too
            async with self._turn(user), self._slots, asyncio.timeout(self._patience):
                _, writer = await self._connect(user, topic, message)
                writer.transport.abort()

    async def _connect(
        self, user: BrokerLogin, topic: str, message: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect with a will. The packets are made here: no MQTT client offers to break off."""
        address = self.address(user.name, user.password)
        fields = [address.client_id, topic, message, address.username, address.password]
        body = b"\0\4MQTT\4\xce\0\x1e" + b"".join(
            len(text).to_bytes(2, "big") + text for text in (field.encode() for field in fields)
        )
        length = bytes([len(body)]) if len(body) < 128 else bytes([len(body) % 128 | 128, len(body) // 128])
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=address.tls_context() or None
        )
        writer.write(b"\x10" + length + body)
        await reader.readexactly(4)
        return reader, writer

    async def subscribing(self) -> list[AclFinding]:
        """Let every user subscribe to every filter, and see what each hears."""
        filters = sample_filters(self._names, self._prefix)
        groups = [filters] if self._turns is None else [[each] for each in filters]
        return [finding for group in groups for finding in await self._subscribe(group)]

    async def _subscribe(self, filters: Sequence[str]) -> list[AclFinding]:
        """Let every user subscribe to each of these filters, with a connection for each."""
        tried = [(user, each) for user in self._users for each in filters]
        async with AsyncExitStack() as closing:
            listeners = await _together(self._listen(user, each, closing) for user, each in tried)
            sent = await self._publish_everywhere()
            await _together(
                listener.receive(
                    {(topic, message) for topic, message in sent.items() if covers(each, topic)},
                    self._patience,
                )
                for (user, each), listener in zip(tried, listeners, strict=True)
                if self._decide(Act.SUBSCRIBE, user, each)
            )
            await asyncio.sleep(self._grace)
        return [
            self._finding(user, each, listener, sent)
            for (user, each), listener in zip(tried, listeners, strict=True)
        ]

    async def _listen(self, user: BrokerLogin, each: str, closing: AsyncExitStack) -> _TestClient:
        client = await self.enter(user.name, user.password, closing=closing)
        with suppress(ConnectionRefused, ConnectionLost, TimeoutError):
            async with asyncio.timeout(self._patience):
                await client.link.subscribe(each)
        return client

    def _finding(
        self, user: BrokerLogin, each: str, listener: _TestClient, sent: dict[str, str]
    ) -> AclFinding:
        may = self._decide(Act.SUBSCRIBE, user, each)
        if may:
            wanted = {(topic, message) for topic, message in sent.items() if covers(each, topic)}
            return AclFinding(user.name, "subscribe", each, True, wanted <= set(listener.received))
        strange = [topic for topic, _ in listener.received if not self._decide(Act.SUBSCRIBE, user, topic)]
        detail = f"{may.reason}; received {strange[0]}" if strange else may.reason
        return AclFinding(user.name, "subscribe", each, False, bool(strange), detail)

    async def taking_over(self) -> list[AclFinding]:
        """Try to connect with the client id of another user, which must not get the messages that wait for
        it."""
        takers = [*self._users[1:], self._users[0]]
        if self._turns is not None:
            return [await self._take_over(*pair) for pair in zip(self._users, takers, strict=True)]
        return await _together(map(self._take_over, self._users, takers))

    async def _take_over(self, owner: BrokerLogin, taker: BrokerLogin) -> AclFinding:
        topic, message = f"{self._prefix}/{owner.name}/pending", self.message()
        kept = self.address(owner.name, owner.password)
        taken = replace(kept, username=taker.name, password=taker.password)
        async with AsyncExitStack() as closing:
            await self._open(_TestClient(kept, topic, clean=False), closing)
        await self.observer.link.publish(topic, message.encode())
        taking = _TestClient(taken, clean=False)
        async with AsyncExitStack() as closing:
            with suppress(ConnectionRefused, ConnectionLost):
                await self._open(taking, closing)
            await taking.receive({(topic, message)}, self._grace)
        async with AsyncExitStack() as closing:  # end the session, so that the broker keeps nothing
            await self._open(_TestClient(kept), closing)
        got = (topic, message) in taking.received
        detail = f"{taker.name} may not take what waits for {owner.name} under its client id"
        return AclFinding(taker.name, "take over", topic, False, got, detail)


async def _together(work: Iterable[Coroutine[object, None, Found]]) -> list[Found]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return [task.result() for task in tasks]
