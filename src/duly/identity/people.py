"""People: accounts that register, log in with a password and have several logins at once.

A password is kept as argon2id, computed in a thread (`passwords`). A login is a session with a token
of its own, of which only the SHA-256 is kept. A session is valid as long as its row exists and its account is
in the epoch in which the session was made; so one write ends all of them: a new password, or logging out
everywhere. A wrong name and a wrong password get the same answer and take the same time; `LoginGuard`
counts every try before its password is checked.

The token of a session names its owner, so that any hub finds the session with one read of the ledger.
Where several hubs write the ledger, a session is read each time its token is shown.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from duly.core.networks import network_of
from duly.core.operations import CheckItem, DropItem, PutItem, Write
from duly.errors import Conflict, DulyError, NotAllowed, NotAuthenticated
from duly.identity.account_names import NAME, check_account_name
from duly.identity.accounts import NETWORKS, PREFIX, VERSIONS, Accounts, Principal, Role, digest, sessions
from duly.identity.login_guard import LoginGuard, pair_of
from duly.identity.passwords import PasswordHashing, check_password
from duly.storage.ledger import Ledger

SESSIONS_KEPT: Final = 50
"""Sessions of one person; the oldest ends when there are more."""
NETWORKS_KEPT: Final = 50
_VERSION: Final = (VERSIONS, "sessions")


class LoginSession(Struct, frozen=True):
    """A session as the ledger stores it, named by the SHA-256 of its token."""

    created: int
    device: str = ""
    """the name its owner gave it"""
    epoch: int = 0
    """the epoch of the account when the session was made; 0 if accounts had no epochs yet"""
    pair: str = ""
    """a digest of the account and the network it was made from"""


class People:
    """The users of one hub and their sessions. `open_` lets strangers register. `ended(name, device)` is
    called when a session ends at this hub; an empty device stands for all sessions of that user."""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        guard: LoginGuard,
        *,
        open_: bool,
        ended: Callable[[str, str], None] = lambda name, device: None,
    ) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._guard = guard
        self._open = open_
        self._hashing = PasswordHashing()
        self._ended = ended
        self._version: bytes | None = None
        self._known: dict[bytes, Principal] = {}
        """sessions that were shown here; where several hubs write the ledger each one is read again"""

    def close(self) -> None:
        """Stop computing password hashes."""
        self._hashing.close()

    # ── by password ──────────────────────────────────────────────────────────────────────────────

    async def register(self, name: str, password: str, address: str, *, trusted: bool = False) -> None:
        """Make a user. `trusted` says that an admin does it, which is allowed even where strangers may not
        register."""
        if not (self._open or trusted):
            raise NotAllowed(
                "this hub does not let users register themselves; ask its operator for an account"
            )
        check_account_name(name)
        check_password(password)
        network = network_of(address)
        if not trusted:
            self._guard.register(network, self._now())
        if await self._accounts.find_role(name, f"register {network}") is not None:
            raise Conflict(f"the name {name!r} is taken; choose another")
        hashed = await self._hashing.hash(password, network, first=trusted)
        await self._accounts.register(name, hashed)

    async def log_in(self, name: str, password: str, address: str, device: str = "") -> str:
        """Check a password and begin a session; returns its token."""
        network = network_of(address)
        known = await self._was_here(name, network)
        row = await self._judge(name, password, network, known=known)
        if row is None:
            raise NotAuthenticated("the name or the password is wrong")
        self._guard.learn(name, network)
        return await self._enter(name, row, device, pair_of(name, network))

    async def let_in(self, name: str, device: str = "") -> str:
        """Begin a session without a password, for a caller that was authenticated otherwise; returns its
        token."""
        await self._accounts.confirmed(name)
        return await self._enter(name, self._accounts.unchanged(name), device)

    async def change_password(self, name: str, old: str, new: str, address: str) -> None:
        """Give a user another password. All sessions end, since the old password may have been stolen."""
        check_password(new)
        network = network_of(address)
        if await self._judge(name, old, network, known=True) is None:
            raise NotAuthenticated("the password is wrong")
        hashed = await self._hashing.hash(new, network, first=True)
        await self._accounts.set_password(name, hashed)
        await self._clear(name)

    async def _was_here(self, name: str, network: str) -> bool:
        """Return whether the account has logged in from this network before."""
        if self._guard.knows(name, network):
            return True
        if not NAME.fullmatch(name):
            return False
        return pair_of(name, network) in await self._networks(name)

    async def _networks(self, name: str) -> list[str]:
        """Return the networks that an account has logged in from, as pairs with its name, the latest last."""
        (kept,) = await self._accounts.items.get((NETWORKS, name))
        if kept is not None:
            return msgspec.json.decode(kept, type=list[str])
        logins = (await self._ledger.bucket(sessions(name))).values()  # as an older duly left them
        return [msgspec.json.decode(body, type=LoginSession).pair for body in logins]

    async def _judge(self, name: str, password: str, network: str, *, known: bool) -> CheckItem | None:
        """Return the check that the account is unchanged, if this is its password; None if it is not. The try
        is counted first."""
        give_back = self._guard.begin(name, network, self._now(), known=known)
        try:
            if NAME.fullmatch(name):
                await self._accounts.confirmed(name)
            row, stored = self._accounts.unchanged(name), self._accounts.password_of(name)
            right = await self._hashing.matches(stored, password, network, first=known)
        except DulyError:
            give_back()  # the password was not checked
            raise
        if right:
            give_back()
        else:
            self._guard.wrong_password(name, network, exists=bool(stored))
        return row if right else None

    async def _enter(self, name: str, row: CheckItem, device: str, pair: str = "") -> str:
        """Begin a session if the account has not changed since it was checked."""
        token = f"{PREFIX}{name}:{secrets.token_urlsafe(32)}"
        login = LoginSession(self._now(), device[:100], self._accounts.epoch(name), pair)
        surplus = await self._surplus(name)
        also: list[Write] = [DropItem(sessions(name), key) for key in surplus]
        if pair:
            others = [each for each in await self._networks(name) if each != pair]
            kept = [*others[1 - NETWORKS_KEPT :], pair]
            also.append(PutItem(NETWORKS, name, msgspec.json.encode(kept)))
        begin = PutItem(sessions(name), digest(token).hex(), msgspec.json.encode(login))
        news = [_new_version()] if surplus else []
        if not await self._ledger.apply(replace(row, then=(begin, *also, *news))):
            raise NotAuthenticated("the account was changed during this login; log in again")
        for key in surplus:
            self._known.pop(bytes.fromhex(key), None)
            self._ended(name, _device(key))
        return token

    async def _surplus(self, name: str) -> list[str]:
        """Return the sessions that end when one more begins, the oldest first."""
        logins = await self._ledger.bucket(sessions(name))
        oldest = sorted(logins, key=lambda key: msgspec.json.decode(logins[key], type=LoginSession).created)
        return oldest[: max(0, len(oldest) + 1 - SESSIONS_KEPT)]

    # ── by token ─────────────────────────────────────────────────────────────────────────────────

    def has_seen(self, token: str) -> bool:
        """Return whether this session's token has been used at this hub before."""
        return digest(token) in self._known

    async def recognise(self, token: str) -> Principal | None:
        """Return the owner of a session, by the session's token."""
        name, colon, _ = token.removeprefix(PREFIX).rpartition(":")
        if not colon or not NAME.fullmatch(name):
            return None
        key = digest(token)
        who = self._known.get(key)
        if who is None or not self._ledger.sole:
            read = self._accounts.items.get((sessions(name), key.hex()))
            (body,), _ = await asyncio.gather(read, self._accounts.confirmed(name))
            who = self._owner(name, key, body)
        if who is None or not self._accounts.is_current(who):
            self._known.pop(key, None)
            return None
        self._known[key] = who
        return who

    def _owner(self, name: str, key: bytes, body: bytes | None) -> Principal | None:
        if body is None:
            return None
        epoch = msgspec.json.decode(body, type=LoginSession).epoch or self._accounts.created_at(name)
        return Principal(name, Role.USER, _device(key.hex()), epoch, key.hex())

    async def log_out(self, token: str) -> bool:
        """End one session; returns whether there was one."""
        name, key = token.removeprefix(PREFIX).rpartition(":")[0], digest(token)
        self._known.pop(key, None)
        gone = await self._ledger.apply(DropItem(sessions(name), key.hex()), _new_version())
        self._ended(name, _device(key.hex()))
        return gone

    async def log_out_everywhere(self, name: str) -> int:
        """End all sessions of a user; returns how many there were."""
        await self._accounts.void_logins(name)
        return await self._clear(name)

    async def _clear(self, name: str) -> int:
        """Remove all sessions of a user, which are void already."""
        void = await self._ledger.bucket(sessions(name))
        if void:
            await self._ledger.write(*(DropItem(sessions(name), key) for key in void), _new_version())
        self._known = {key: who for key, who in self._known.items() if who.name != name}
        self._ended(name, "")
        return len(void)

    async def catch_up(self) -> frozenset[Principal]:
        """Refresh if any session has ended: one small read, cheap enough to be made often."""
        (version,) = await self._accounts.items.get(_VERSION)
        return frozenset() if version == self._version else await self.refresh()

    async def refresh(self) -> frozenset[Principal]:
        """Read the sessions that were shown here again. Returns those that have ended at another hub:
        their connections have to be closed."""
        version = await self._ledger.item(*_VERSION)  # first: what ends while we read is read again
        known = list(self._known.items())
        found = await self._ledger.items([(sessions(who.name), key.hex()) for key, who in known])
        ended = [
            (key, who)
            for (key, who), login in zip(known, found, strict=True)
            if login is None or not self._accounts.is_current(who)
        ]
        for key, _ in ended:
            self._known.pop(key, None)
        self._version = version
        return frozenset(who for _, who in ended)

    def _now(self) -> int:
        return self._ledger.clock.now()


def _device(key: str) -> str:
    """Return a short name of a session among those of its owner, by its name in the bucket."""
    return key[:12]


def _new_version() -> PutItem:
    """Return the write that tells other hubs that sessions have ended."""
    return PutItem(*_VERSION, secrets.token_bytes(8))
