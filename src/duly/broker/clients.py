"""The clients of the embedded broker: who is let in, and who has to go.

The laws. A client gets in if `Users` know its login, if its client id is its own (`duly.core.client_ids`),
and if its account does not connect too often. An account that publishes faster than `PUBLISHED` is hung up on
and stays out for `BANISHED` seconds: nats-server knows no rates, and one client alone can keep it and the hub
busy. What a device answers to tasks that it was given is allowed besides. Every refusal is told.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from duly.broker.callout import Callout, ConnectingClient
from duly.broker.rules import DEVICES, NODES, BrokerUser
from duly.core.acl import HUB
from duly.core.client_ids import ClientIds
from duly.core.quota import Quota, Rate
from duly.core.units import SECOND, seconds
from duly.errors import DulyError, NotAllowed, NotAuthenticated, RateLimited
from duly.runtime.files import write_private
from duly.runtime.tasks import Supervisor

LOG: Final = logging.getLogger("duly.broker.embedded")

PUBLISHED: Final = {
    DEVICES: Rate(1_000, SECOND, burst=2_000),
    NODES: Rate(20_000, SECOND, burst=40_000),
}
"""What a user may publish, by the account of the broker it is in; a large message counts as several. What
devices publish the hub reads in one session, so what one of them publishes all of them wait for."""

ANSWERED: Final = 64
"""What a device may publish besides for each task it is given: acks, and a result with a piece of a file."""
ANSWERED_LATER: Final = 2_000
"""How much of that it may leave for later."""

CONNECTS: Final = Rate(20, SECOND, burst=500)
"""How often an account may connect."""

BANISHED: Final = 30.0
"""Seconds an account stays out that has published too fast."""


BACKLOG: Final = 256 * 1024
"""Bytes of a flood that the hub need not read to its end."""


class BrokerRefusal(Struct, frozen=True):
    """An attempt that was stopped: to connect, to publish or subscribe to a topic, or to flood."""

    user: str
    act: str
    topic: str
    word: str
    reason: str


class Users(Protocol):
    """Who may use the broker."""

    def exists(self, name: str) -> bool:
        """Whether there is a user of this name."""

    async def admit(self, username: str, password: str) -> BrokerUser:
        """The user who logs in like this; raises a `DulyError` if there is none."""


class UserList:
    """Users with passwords: plain text, or bcrypt hashes."""

    def __init__(self, users: Iterable[BrokerUser] = ()) -> None:
        self.users = {user.name: user for user in users}

    def exists(self, name: str) -> bool:
        return name in self.users

    async def admit(self, username: str, password: str) -> BrokerUser:
        user = self.users.get(username)
        if user is None or not _fits(password, user.password):
            raise NotAuthenticated(f"wrong username or password for {username!r}")
        return user


class BrokerClients:
    """Everybody who is connected, or wants to be."""

    def __init__(
        self,
        users: Users,
        on_refused: Callable[[BrokerRefusal], None] | None,
        tasks: Supervisor | None = None,
    ) -> None:
        self.users = users
        self.refused: Counter[str] = Counter()
        """attempts that were stopped, by kind: publish, subscribe, connect, flood"""
        self.callout = Callout(self._judge, tasks)
        self.on_refused = on_refused
        self._client_ids = ClientIds(self._exists)
        self._connects = Quota(CONNECTS)
        self._published = {account: Quota(rate) for account, rate in PUBLISHED.items()}
        self._banished: dict[str, float] = {}
        """accounts that have published too fast, and until when they stay out"""
        self.given: Callable[[], Mapping[str, int]] = dict
        """how many tasks each account was given since this was last asked"""
        self._answers: Counter[str] = Counter()
        """what each account may publish besides, as answers"""
        self._before: dict[int, int] = {}
        """how much each connection had published when we last looked"""

    def restore(self, path: Path) -> None:
        """Whose the client ids were when this file was written: the broker has kept the sessions."""
        try:
            self._client_ids.restore(msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]]))
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as problem:
            LOG.warning("%s cannot be read (%s): client ids belong to whoever uses them first", path, problem)

    def keep(self, path: Path) -> None:
        """Write down whose the client ids are, if that has changed."""
        if self._client_ids.changed:
            self._client_ids.changed = False
            try:
                write_private(path, msgspec.json.encode(self._client_ids.used()))
            except OSError as problem:  # a disk that is full: it is tried again
                self._client_ids.changed = True
                LOG.warning("%s cannot be written: %s", path, problem)

    def _exists(self, name: str) -> bool:
        return self.users.exists(name)  # whichever they are by then

    def replace(self, users: UserList) -> Sequence[str]:
        """From now on these users. Returns who of the users before has to be dismissed."""
        before, self.users = self.users, users
        known = before.users if isinstance(before, UserList) else {}
        return [name for name, user in known.items() if users.users.get(name) != user]

    async def dismiss(self, name: str) -> None:
        """Hang up on a user whose place is gone, or is another one now."""
        if not self.users.exists(name):
            self._client_ids.forget(name)
            self._answers.pop(name, None)
        await self.callout.kick_user(name)

    def violated(self, cid: int, act: str, topic: str) -> None:
        """The broker has stopped a client from using a topic."""
        visitor = self.callout.visitor(cid)
        name = "" if visitor is None else visitor.username
        reason = f"{name or 'a client'} may not {act} to {topic}; the broker dropped it"
        self._refuse(BrokerRefusal(name, act, topic, NotAllowed.word, reason))

    async def look(self) -> None:
        """Hang up on accounts that have published too fast since the last look."""
        connections, before = await self.callout.connections(), self._before
        self._before = {one.cid: one.published for one in connections}
        for name, tasks in self.given().items():
            self._answers[name] += ANSWERED * tasks
        flooded = False
        for one in connections:
            fresh = one.published - before.get(one.cid, 0)
            if fresh > 0 and one.account in self._published and one.user != HUB:
                flooded |= await self._count(one.user, one.account, fresh)
        for name, left in self._answers.items():
            self._answers[name] = min(left, ANSWERED_LATER)
        if flooded:
            await self._skip_backlog()

    async def _count(self, name: str, account: str, fresh: int) -> bool:
        """Whether an account that has published so much had to go."""
        now = asyncio.get_running_loop().time()
        answers = min(fresh, self._answers[name])
        if answers:
            self._answers[name] -= answers
        if not self._published[account].spend(name, seconds(now), fresh - answers):
            return False
        if self._banished.get(name, 0.0) <= now:
            rate = f"more than {PUBLISHED[account].amount:,} messages a second"
            reason = f"{name} has published {rate}; it stays out for {BANISHED:.0f} s"
            self._refuse(BrokerRefusal(name, "flood", "", RateLimited.word, reason))
        self._banished[name] = now + BANISHED
        await self.callout.kick_user(name)
        return True

    async def _skip_backlog(self) -> None:
        """What a flood has left for the hub, others would wait for: the hub connects anew instead of reading
        it. Of what devices say at QoS 1 nothing is lost by that; the rest is said or asked for again."""
        for one in await self.callout.connections(HUB):
            if one.waiting > BACKLOG:
                await self.callout.kick(one.cid)

    async def _judge(self, visitor: ConnectingClient) -> BrokerUser:
        """As whom a client is let in; a `DulyError` says why it is not."""
        try:
            user = await self.users.admit(visitor.username, visitor.password)
            self._check_pace(user.name)
            owner = self._client_ids.owner(visitor.client_id, user.name)
            if owner != user.name:
                raise NotAllowed(
                    f"the client id {visitor.client_id!r} belongs to {owner}; use {user.name!r}, or one that "
                    f"begins with '{user.name}-'"
                )
        except DulyError as problem:
            self._refuse(BrokerRefusal(visitor.username, "connect", "", problem.word, str(problem)))
            raise
        return user

    def _check_pace(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        out = self._banished.get(name, 0.0) - now
        if out > 0:
            raise RateLimited(f"{name} has published too fast, and stays out for a while", seconds(out))
        self._banished.pop(name, None)
        wait = self._connects.take(name, seconds(now))
        if wait:
            raise RateLimited(f"{name} connects too often; come back in {wait / SECOND:.1f} s", wait)

    def _refuse(self, refused: BrokerRefusal) -> None:
        self.refused[refused.act] += 1
        if self.on_refused is not None:
            self.on_refused(refused)


def _fits(password: str, wanted: str) -> bool:
    if wanted.startswith("$2"):
        import bcrypt

        return bcrypt.checkpw(password.encode(errors="replace"), wanted.encode())
    return bool(wanted) and secrets.compare_digest(password.encode(errors="replace"), wanted.encode())
