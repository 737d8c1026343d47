"""The clients of the embedded broker: which of them are let in, and which are disconnected.

A client is let in if `Users` accept its login, if its client id is its own (`duly.core.mqtt_client_ids`), and
if its account does not connect too often. An account that publishes too fast (`publish_rates`) is
disconnected and stays out for `BANISHED` seconds. Every refusal is reported. The sessions of a user who is
gone are ended before its client ids are free again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from duly.broker.acl_dialects import DEVICES, NODES, BrokerUser
from duly.broker.broker_log import ClientRefused
from duly.broker.broker_streams import BrokerStreams, KeptSession
from duly.broker.callout import Callout, ConnectingClient
from duly.broker.publish_rates import PUBLISHED, PublishRates, backlogged
from duly.core.acl import HUB
from duly.core.identity_conflicts import WORD, IdentityConflicts
from duly.core.mqtt_client_ids import ClientIds
from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import SECOND, seconds
from duly.errors import DulyError, NotAllowed, NotAuthenticated, RateLimited
from duly.runtime.files import write_private
from duly.runtime.tasks import Supervisor

LOG: Final = logging.getLogger("duly.broker.embedded")

CONNECTS: Final = Rate(20, SECOND, burst=500)
"""How often an account may connect."""

BANISHED: Final = 30.0
"""Seconds for which an account that has published too fast stays out."""


class BrokerRefusal(Struct, frozen=True):
    """An attempt that was refused: to connect, to publish or subscribe to a topic, to send a packet that the
    broker cannot read, or to flood."""

    user: str
    act: str
    topic: str
    word: str
    reason: str


class Users(Protocol):
    """The users of a broker."""

    def exists(self, name: str) -> bool:
        """Return whether there is a user of this name."""

    def has_left(self, name: str) -> bool:
        """Return whether a user of this name is gone, also if there is another one by now."""

    def created_at(self, name: str) -> int:
        """Return when a user was made; 0 if that is not known."""

    async def admit(self, username: str, password: str) -> BrokerUser:
        """Return the user with this name and password; raises a `DulyError` if there is none."""


class UserList(Users):
    """A fixed list of users, with passwords in plain text or as bcrypt hashes."""

    def __init__(self, users: Iterable[BrokerUser] = ()) -> None:
        self.users = {user.name: user for user in users}

    def exists(self, name: str) -> bool:
        """Return whether the list names this user."""
        return name in self.users

    def has_left(self, name: str) -> bool:
        """Return whether the list does not name this user: it says nothing of earlier users."""
        return name not in self.users

    def created_at(self, name: str) -> int:
        """Return 0: a list does not say when."""
        return 0

    async def admit(self, username: str, password: str) -> BrokerUser:
        """Return the user of the list with this password; raises if there is none."""
        user = self.users.get(username)
        if user is None or not _matches(password, user.password):
            raise NotAuthenticated(f"wrong username or password for {username!r}")
        return user


class BrokerClients:
    """The clients that are connected or want to connect."""

    def __init__(
        self,
        users: Users,
        on_refused: Callable[[BrokerRefusal], None] | None,
        tasks: Supervisor | None = None,
    ) -> None:
        self.users = users
        self.refused: Counter[str] = Counter()
        """refused attempts, by kind: publish, subscribe, packet, connect, flood"""
        self.callout = Callout(self._judge, tasks)
        self.on_refused = on_refused
        self.kept = BrokerStreams(self.callout.request)
        self.end_session: Callable[[str], Awaitable[None]] | None = None
        """connects under a client id, without a session, and disconnects; None: sessions are not ended"""
        self.not_limited: set[str] = set()
        """accounts of the broker whose stored messages are not limited yet, since it has started"""
        self._leaving: set[str] = set()
        """users that are gone and whose sessions are not ended yet: no client gets their client ids"""
        self._ending = ("", "")
        """the client id and the account of the session that the hub itself ends now"""
        self._one_end_at_a_time, self._clearing = asyncio.Lock(), asyncio.Lock()
        self._client_ids = ClientIds(self._exists)
        self._connects = RateLimits(CONNECTS)
        self.conflicts = IdentityConflicts()
        """clients that use one client id and disconnect each other"""
        self._rates = PublishRates()
        self._banished: dict[str, float] = {}
        """accounts that have published too fast, with the time until which they stay out"""
        self.given: Callable[[], Mapping[str, int]] = dict
        """returns how many tasks each account was given since the last call"""

    def restore(self, path: Path) -> None:
        """Read which account each client id belongs to: the broker has kept the sessions of these ids."""
        try:
            self._client_ids.restore(msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]]))
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as problem:
            LOG.warning(
                "%s cannot be read (%s): each client id will belong to the first account that uses it",
                path,
                problem,
            )

    def keep(self, path: Path) -> None:
        """Write which account each client id belongs to, if that has changed."""
        if self._client_ids.changed:
            self._client_ids.changed = False
            try:
                write_private(path, msgspec.json.encode(self._client_ids.used()))
            except OSError as problem:  # the disk may be full: the next call tries again
                self._client_ids.changed = True
                LOG.warning("%s cannot be written: %s", path, problem)

    def _exists(self, name: str) -> bool:
        return self.users.exists(name) or name in self._leaving  # `replace` may have changed the users

    def replace(self, users: UserList) -> Sequence[str]:
        """Use another list of users; returns the names of earlier users that have to be disconnected."""
        before, self.users = self.users, users
        known = before.users if isinstance(before, UserList) else {}
        return [name for name, user in known.items() if users.users.get(name) != user]

    async def dismiss(self, name: str) -> None:
        """Disconnect a user that was removed or changed. With a user that is gone its sessions end, and what
        waits in them: another user of that name, or of one of its client ids, gets nothing of it."""
        self.note_gone(name)
        await self.callout.kick_user(name)
        await self.clear()

    def note_gone(self, name: str) -> None:
        """Close the client ids of a user that is gone until its sessions are ended."""
        if self.users.has_left(name):
            self._leaving.add(name)
            self._rates.forget(name)

    async def clear(self, former: Iterable[str] = ()) -> None:
        """End the sessions of users that are gone, `former` ones among them. If that fails, their client ids
        stay closed until it is tried again."""
        async with self._clearing:
            self._leaving.update(former)
            names = frozenset(self._leaving)
            if not names:
                return
            if self.end_session is not None:
                await self._end_sessions(names, self.end_session)
            for name in names:
                if not self.users.exists(name):
                    self._client_ids.forget(name)
            self._leaving -= names

    def _is_left_over(self, session: KeptSession, gone: Collection[str]) -> bool:
        """Return whether a session is that of a user who is gone, also if there is another of that name by
        now."""
        owner = self._client_ids.find(session.client_id, gone)
        return owner in gone and (
            not self.users.exists(owner) or session.stored_at < self.users.created_at(owner)
        )

    async def _end_inherited(self, client_id: str, account: str) -> None:
        """End the session that another account began under a client id before it was this account's."""
        if self.end_session is not None:
            await self._end(client_id, account, self.end_session)
        self._client_ids.release(client_id)

    async def _end(self, client_id: str, account: str, end: Callable[[str], Awaitable[None]]) -> None:
        async with self._one_end_at_a_time:
            self._ending = (client_id, account)
            try:
                await end(client_id)
            finally:
                self._ending = ("", "")

    async def _end_sessions(self, gone: Collection[str], end: Callable[[str], Awaitable[None]]) -> None:
        for account in (DEVICES, NODES):
            for session in await self.kept.sessions(account):
                if self._is_left_over(session, gone):
                    await self._end(session.client_id, account, end)

    def violated(self, refused: ClientRefused) -> None:
        """Report what the broker has refused a client: the use of a topic, or a packet."""
        act, topic = refused.act, refused.topic
        client = self.callout.client(refused.cid)
        name = "" if client is None else client.username
        called = name or "a client"
        if act == "packet":
            reason = f"the broker has disconnected {called} for what it sent: {refused.why}"
        else:
            outcome = "dropped the message" if act == "publish" else "refused it"
            because = f" ({refused.why})" if refused.why else ""
            reason = f"{called} may not {act} to {topic}{because}; the broker has {outcome}"
        self._refuse(BrokerRefusal(name, act, topic, refused.word, reason))

    def no_websocket(self, address: str, why: str) -> None:
        """Report that the broker has opened no WebSocket, such as for a page of another origin."""
        reason = f"no WebSocket for {address}: {why}"
        if "origin" in why:
            reason += "; an origin whose pages may connect is named with --origin"
        self._refuse(BrokerRefusal("", "connect", "", NotAllowed.word, reason))

    async def limit_stored(self) -> None:
        """Limit how many messages the broker stores for the clients of each account."""
        for account in sorted(self.not_limited):
            if await self.kept.limit(account):
                self.not_limited.discard(account)

    async def check_rates(self) -> None:
        """Disconnect accounts that have published too fast since the last check, and then the hub, if they
        have left much for it to read: other devices would wait for that. The hub reconnects at once. Messages
        of devices at QoS 1 are not lost by this; the rest is repeated."""
        connections, now = await self.callout.connections(), asyncio.get_running_loop().time()
        flooding = list(self._rates.flooding(connections, self.given(), seconds(now)))
        for one in flooding:
            await self._banish(one.user, one.account, now)
        if flooding:
            for cid in backlogged(await self.callout.connections(HUB)):
                await self.callout.kick(cid)

    async def _banish(self, name: str, account: str, now: float) -> None:
        if self._banished.get(name, 0.0) <= now:
            rate = f"more than {PUBLISHED[account].amount:,} messages a second"
            reason = f"{name} has published {rate}; it stays out for {BANISHED:.0f} s"
            self._refuse(BrokerRefusal(name, "flood", "", RateLimited.word, reason))
        self._banished[name] = now + BANISHED
        await self.callout.kick_user(name)

    async def _judge(self, client: ConnectingClient) -> BrokerUser:
        """Return the user as which a client is let in; raises a `DulyError` that says why it is not."""
        try:
            user = await self.users.admit(client.username, client.password)
            if user.name == HUB and client.client_id and client.client_id == self._ending[0]:
                return BrokerUser(HUB, account=self._ending[1])
            self._check_pace(user.name)
            owner = self._client_ids.owner(client.client_id, user.name)
            if owner != user.name:
                raise NotAllowed(
                    f"the client id {client.client_id!r} belongs to {owner}; use {user.name!r}, or one that "
                    f"begins with '{user.name}-'"
                )
            if owner in self._leaving:
                raise RateLimited(f"the sessions of an earlier {owner} are being ended; try again", SECOND)
            if self._client_ids.is_inherited(client.client_id, user.name):
                await self._end_inherited(client.client_id, user.account)
        except DulyError as problem:
            self._refuse(BrokerRefusal(client.username, "connect", "", problem.word, str(problem)))
            raise
        before = self.callout.holder(client.client_id)
        if before is not None and client.client_id:
            self._take_over(client, before)
        return user

    def _take_over(self, client: ConnectingClient, before: ConnectingClient) -> None:
        """Count that the broker ends a connection for a new one with the same client id."""
        places = " and ".join(sorted({client.address, before.address}))
        reason = (
            f"two clients of {client.username} use the client id {client.client_id!r} (from {places}), and "
            f"each disconnects the other; give each an account of its own"
        )
        if self.conflicts.note(client.client_id, reason, seconds(asyncio.get_running_loop().time())):
            self._refuse(BrokerRefusal(client.username, "connect", "", WORD, reason))

    def _check_pace(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        out = self._banished.get(name, 0.0) - now
        if out > 0:
            raise RateLimited(f"{name} has published too fast and stays out for a while", seconds(out))
        self._banished.pop(name, None)
        wait = self._connects.take(name, seconds(now))
        if wait:
            raise RateLimited(f"{name} connects too often; try again in {wait / SECOND:.1f} s", wait)

    def _refuse(self, refused: BrokerRefusal) -> None:
        self.refused[refused.act] += 1
        if self.on_refused is not None:
            self.on_refused(refused)


def _matches(password: str, wanted: str) -> bool:
    if wanted.startswith("$2"):
        import bcrypt

        return bcrypt.checkpw(password.encode(errors="replace"), wanted.encode())
    return bool(wanted) and secrets.compare_digest(password.encode(errors="replace"), wanted.encode())
