"""Does a live broker really enforce `duly.core.acl`? Every operation is tried, and what arrives is looked at.

The law: only arrival proves anything. A broker may acknowledge a forbidden publish and drop it, or grant a
forbidden subscription and deliver nothing: both are well. So an observer who hears everything listens while
the users write, and writes while they listen. What should arrive is waited for; what should not, gets a
moment longer than that.

It leaves nothing behind: its sessions end with it, and nothing is retained. Real nodes on the broker see a
few letters that are no FD messages, and record them as malformed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from duly.core.acl import ANYBODY, HUB, LETTERS, STATUS, AccountClass, Act, Permission, covers, decide
from duly.errors import ConnectionLost, ConnectionRefused, Malformed, NotAllowed
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire.session import Acknowledge

PATIENCE: Final = 5.0
"""Seconds for what should arrive."""

GRACE: Final = 0.5
"""Seconds more for what should not."""

AT_ONCE: Final = 8
"""Connections being opened at the same time."""

Result = TypeVar("Result")


class BrokerLogin(Struct, frozen=True):
    name: str
    password: str
    of: AccountClass = AccountClass.NODE


class Finding(Struct, frozen=True):
    """What was tried, what the rules say, what happened."""

    user: str
    act: str
    topic: str
    allowed: bool
    happened: bool
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.allowed == self.happened

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "leaks" if self.happened else "blocked"


def places(users: Sequence[str], prefix: str) -> list[str]:
    """Topics on which something could be heard or said, allowed or not."""
    own = [f"{prefix}/{user}/{kind}" for user in users for kind in (*LETTERS, STATUS, "other")]
    return [*own, *(f"{prefix}/{user}/pending/deeper" for user in users), f"{prefix}-remote/x/pending"]


def filters(users: Sequence[str], prefix: str) -> list[str]:
    """What somebody might try to listen to."""
    everybodys = [f"{prefix}/{ANYBODY}/{kind}" for kind in (*LETTERS, STATUS)]
    whole = [f"{prefix}/{user}/#" for user in users]
    shared = [f"$share/duly/{prefix}/{user}/pending" for user in users]
    return [*places(users, prefix), *everybodys, *whole, *shared, f"{prefix}/#", "#", "+/#", "$SYS/#"]


async def check(
    observer: BrokerAddress,
    users: Sequence[BrokerLogin],
    prefix: str,
    *,
    patience: float = PATIENCE,
    grace: float = GRACE,
) -> list[Finding]:
    """Try everything as these users, while the observer watches."""
    if len(users) < 2:
        raise Malformed("two users are needed at least: one must try what is the other's")
    if observer.username in {user.name for user in users}:
        raise Malformed("the observer may do everything, so he cannot be one of the users")
    trial = _Trial(observer, users, prefix, patience, grace)
    async with AsyncExitStack() as closing:
        trial.observer = await trial.enter(observer.username, observer.password, "#", closing=closing)
        await trial.prove_observer()
        return [
            *await trial.strangers(),
            *await trial.publishing(),
            *await trial.dying(),
            *await trial.subscribing(),
            *await trial.taking_over(),
        ]


class _TestClient:
    """A connection, and what it heard."""

    def __init__(self, address: BrokerAddress, *subscriptions: str, clean: bool = True) -> None:
        self.heard: list[tuple[str, str]] = []
        self.arrived = asyncio.Event()
        self.link = MqttLink(address, self._hear, subscriptions=subscriptions, clean=clean)

    def _hear(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        self.heard.append((topic, payload.decode(errors="replace")))
        self.arrived.set()
        ack()

    async def hear(self, wanted: set[tuple[str, str]], within: float) -> None:
        """Until all of these letters were heard, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not wanted <= set(self.heard):
                    self.arrived.clear()
                    await self.arrived.wait()


class _Trial:
    def __init__(
        self, address: BrokerAddress, users: Sequence[BrokerLogin], prefix: str, patience: float, grace: float
    ) -> None:
        self._address = address
        self._users = users
        self._names = [user.name for user in users]
        self._peers: list[str] | None = None
        """the nodes, where there are devices too"""
        if any(user.of is AccountClass.DEVICE for user in users):
            self._peers = [user.name for user in users if user.of is AccountClass.NODE]
            self._names.append(HUB)
        self._prefix = prefix
        self._patience = patience
        self._grace = grace
        self._nonce = secrets.token_hex(4)
        self._count = 0
        self._door = asyncio.Semaphore(AT_ONCE)
        self.observer: _TestClient

    def address(self, name: str, password: str) -> BrokerAddress:
        """As this user, under an id that is no node's: a node's own connection must not be thrown out."""
        client_id = f"{name}-{secrets.token_hex(6)}"
        return replace(self._address, username=name, password=password, client_id=client_id)

    async def enter(
        self, name: str, password: str, *subscriptions: str, closing: AsyncExitStack
    ) -> _TestClient:
        return await self._open(_TestClient(self.address(name, password), *subscriptions), closing)

    async def _open(self, visitor: _TestClient, closing: AsyncExitStack) -> _TestClient:
        async with self._door:
            await visitor.link.start()
            closing.push_async_callback(visitor.link.stop)
            await visitor.link.connected()
        return visitor

    def letter(self) -> str:
        self._count += 1
        return f"duly acl test {self._nonce} {self._count}"

    async def prove_observer(self) -> None:
        """Who watches must see everything, else silence would prove nothing."""
        sent = await self._write_everywhere()
        hears = {topic for topic, letter in self.observer.heard if sent.get(topic) == letter}
        deaf = sent.keys() - hears
        if deaf:
            raise NotAllowed(
                f"the observer {self._address.username} cannot write and hear {min(deaf)}; to prove "
                "anything he must be allowed everything"
            )

    async def _write_everywhere(self) -> dict[str, str]:
        """A letter from the observer to every place, heard by himself."""
        sent = {topic: self.letter() for topic in places(self._names, self._prefix)}
        with suppress(ConnectionLost):  # some brokers hang up on what they forbid
            for topic, letter in sent.items():
                await self.observer.link.publish(topic, letter.encode())
        await self.observer.hear(set(sent.items()), self._patience)
        return sent

    # ── what is tried ────────────────────────────────────────────────────────────────────────────

    async def strangers(self) -> list[Finding]:
        found = []
        wrong = [(user.name, user.password + "x", "a wrong password") for user in self._users]
        for name, password, what in [*wrong, ("", "", "no name at all")]:
            async with AsyncExitStack() as closing:
                happened = True
                try:
                    await self.enter(name, password, closing=closing)
                except (ConnectionRefused, ConnectionLost):
                    happened = False
            found.append(Finding(name, "connect", "", False, happened, f"with {what}"))
        return found

    async def publishing(self) -> list[Finding]:
        tried = [
            (user, topic, self.letter())
            for user in self._users
            for topic in places(self._names, self._prefix)
        ]
        await _together(self._publish(user, topic, letter) for user, topic, letter in tried)
        return await self._arrivals("publish", tried)

    def _decide(self, act: Act, user: BrokerLogin, topic: str) -> Permission:
        return decide(act, user.name, topic, self._prefix, user.of, self._peers)

    async def _arrivals(self, act: str, tried: list[tuple[BrokerLogin, str, str]]) -> list[Finding]:
        """Which of these letters have arrived, and which should have."""
        may = {letter: self._decide(Act.PUBLISH, user, topic) for user, topic, letter in tried}
        wanted = {(topic, letter) for _, topic, letter in tried if may[letter]}
        await self.observer.hear(wanted, self._patience)
        await asyncio.sleep(self._grace)
        heard = set(self.observer.heard)
        return [
            Finding(user.name, act, topic, may[letter].allowed, (topic, letter) in heard, may[letter].reason)
            for user, topic, letter in tried
        ]

    async def _publish(self, user: BrokerLogin, topic: str, letter: str) -> None:
        async with AsyncExitStack() as closing:
            visitor = await self.enter(user.name, user.password, closing=closing)
            with suppress(ConnectionLost, TimeoutError):  # some brokers hang up on what they forbid
                async with asyncio.timeout(self._patience):
                    await visitor.link.publish(topic, letter.encode())

    async def dying(self) -> list[Finding]:
        """A will is a way to publish, too, and easily forgotten."""
        topics = [f"{self._prefix}/{name}/{STATUS}" for name in self._names]
        topics.append(f"{self._prefix}-remote/x/pending")
        tried = [(user, topic, self.letter()) for user in self._users for topic in topics]
        await _together(self._die(user, topic, letter) for user, topic, letter in tried)
        return await self._arrivals("will", tried)

    async def _die(self, user: BrokerLogin, topic: str, letter: str) -> None:
        """Connect with a will, and go without a goodbye. By hand: no client does that when asked."""
        address = self.address(user.name, user.password)
        fields = [address.client_id, topic, letter, address.username, address.password]
        body = b"\0\4MQTT\4\xce\0\x1e" + b"".join(
            len(text).to_bytes(2, "big") + text for text in (field.encode() for field in fields)
        )
        length = bytes([len(body)]) if len(body) < 128 else bytes([len(body) % 128 | 128, len(body) // 128])
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):  # not even let in is well
            async with self._door, asyncio.timeout(self._patience):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=address.tls_context() or None
                )
                writer.write(b"\x10" + length + body)
                await reader.readexactly(4)
                writer.transport.abort()

    async def subscribing(self) -> list[Finding]:
        tried = [(user, each) for user in self._users for each in filters(self._names, self._prefix)]
        async with AsyncExitStack() as closing:
            ears = await _together(self._listen(user, each, closing) for user, each in tried)
            sent = await self._write_everywhere()
            await _together(
                ear.hear(
                    {(topic, letter) for topic, letter in sent.items() if covers(each, topic)}, self._patience
                )
                for (user, each), ear in zip(tried, ears, strict=True)
                if self._decide(Act.SUBSCRIBE, user, each)
            )
            await asyncio.sleep(self._grace)
        return [self._heard(user, each, ear, sent) for (user, each), ear in zip(tried, ears, strict=True)]

    async def _listen(self, user: BrokerLogin, each: str, closing: AsyncExitStack) -> _TestClient:
        visitor = await self.enter(user.name, user.password, closing=closing)
        with suppress(ConnectionRefused, ConnectionLost, TimeoutError):
            async with asyncio.timeout(self._patience):
                await visitor.link.subscribe(each)
        return visitor

    def _heard(self, user: BrokerLogin, each: str, ear: _TestClient, sent: dict[str, str]) -> Finding:
        may = self._decide(Act.SUBSCRIBE, user, each)
        if may:
            wanted = {(topic, letter) for topic, letter in sent.items() if covers(each, topic)}
            return Finding(user.name, "subscribe", each, True, wanted <= set(ear.heard))
        strange = [topic for topic, _ in ear.heard if not self._decide(Act.SUBSCRIBE, user, topic)]
        detail = f"{may.reason}; heard {strange[0]}" if strange else may.reason
        return Finding(user.name, "subscribe", each, False, bool(strange), detail)

    async def taking_over(self) -> list[Finding]:
        """Whoever comes with somebody else's client id must not get what waits for him."""
        found = []
        for victim, thief in zip(self._users, [*self._users[1:], self._users[0]], strict=True):
            topic, letter = f"{self._prefix}/{victim.name}/pending", self.letter()
            kept = self.address(victim.name, victim.password)
            stolen = replace(kept, username=thief.name, password=thief.password)
            async with AsyncExitStack() as closing:
                await self._open(_TestClient(kept, topic, clean=False), closing)
            await self.observer.link.publish(topic, letter.encode())
            thieving = _TestClient(stolen, clean=False)
            async with AsyncExitStack() as closing:
                with suppress(ConnectionRefused, ConnectionLost):
                    await self._open(thieving, closing)
                await thieving.hear({(topic, letter)}, self._grace)
            async with AsyncExitStack() as closing:  # and nothing of it is kept
                await self._open(_TestClient(kept), closing)
            got = (topic, letter) in thieving.heard
            detail = f"{thief.name} may not take what waits for {victim.name} under its client id"
            found.append(Finding(thief.name, "take over", topic, False, got, detail))
        return found


async def _together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return [task.result() for task in tasks]
