"""People: register, log in, and be logged in on several devices at once.

The laws. A password is kept as argon2id, worked out beside the event loop and a few at a time: it costs 64 MB
and a tenth of a second, and a crowd at the door must not stop those inside. A login is a session with a token
of its own, of which only the SHA-256 is kept; logging out everywhere ends them all. Wrong name and wrong
password are answered alike and take as long; `LoginGuard` slows guessing down, by name and by address.

A session's token names its owner, so that any hub finds it in the ledger by one look.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from msgspec import Struct

from duly.auth import PREFIX, Accounts, LoginGuard, Principal, Role, check_name, digest, sessions
from duly.core.units import SECOND
from duly.core.writes import Drop, Put
from duly.errors import Conflict, Malformed, NotAllowed, NotAuthenticated, Overloaded, TooManyLogins
from duly.ledger import Ledger

PASSWORD_LEAST: Final = 8
PASSWORD_MOST: Final = 1_024
AT_ONCE: Final = 2
WAITING: Final = 64
"""Logins that may wait for their hash; more are told to come back."""
SESSIONS_KEPT: Final = 50
"""Of one person: the oldest login ends when there are more."""

T = TypeVar("T")


class Login(Struct, frozen=True):
    """A session as it lies on its owner's shelf, under the SHA-256 of its token."""

    created: int
    device: str = ""
    """what its owner calls it"""


class People:
    """Those who log in with a password. `open_`: strangers may register themselves."""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        guard: LoginGuard,
        *,
        open_: bool,
        hasher: PasswordHasher | None = None,
    ) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._guard = guard
        self._open = open_
        self._hasher = hasher or PasswordHasher()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="duly-argon2")
        self._waiting = 0
        self._known: dict[bytes, Principal] = {}
        """sessions that were seen here; of a ledger that others write too, `refresh` asks for them again"""
        self._decoy = ""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ── by password ──────────────────────────────────────────────────────────────────────────────

    async def register(self, name: str, password: str, address: str, *, trusted: bool = False) -> None:
        """Make a user. `trusted`: an admin does it, also where strangers may not."""
        if not (self._open or trusted):
            raise NotAllowed("nobody may register here by themselves; ask whoever runs this hub")
        check_name(name)
        _check_password(password)
        if not trusted:
            self._let_through(f"register {address}")
            self._guard.failed(f"register {address}", self._now())  # each one counts: the disk is not endless
        if await self._accounts.look(name) is not None:
            raise Conflict(f"the name {name!r} is taken; choose another")
        await self._accounts.register(name, await self._beside(lambda: self._hasher.hash(password)))

    async def log_in(self, name: str, password: str, address: str, device: str = "") -> str:
        """The token of a new session."""
        for who in (f"account {name}", f"address {address}"):
            self._let_through(who)
        if not await self._is_password(name, password):
            for who in (f"account {name}", f"address {address}"):
                self._guard.failed(who, self._now())
            raise NotAuthenticated("the name or the password is wrong")
        self._guard.succeeded(f"account {name}")
        return await self.let_in(name, device)

    async def let_in(self, name: str, device: str = "") -> str:
        """The token of a new session, for whoever has shown otherwise that they may."""
        token = f"{PREFIX}{name}:{secrets.token_urlsafe(32)}"
        login = msgspec.json.encode(Login(self._now(), device[:100]))
        await self._ledger.write(Put(sessions(name), digest(token).hex(), login), *await self._surplus(name))
        return token

    async def change_password(self, name: str, old: str, new: str, address: str) -> None:
        """Another password. All sessions end: whoever changes it may have a reason."""
        _check_password(new)
        self._let_through(f"account {name}")
        if not await self._is_password(name, old):
            self._guard.failed(f"account {name}", self._now())
            raise NotAuthenticated("the password is wrong")
        await self._accounts.set_password(name, await self._beside(lambda: self._hasher.hash(new)))
        await self.log_out_everywhere(name)

    async def _is_password(self, name: str, password: str) -> bool:
        await self._accounts.look(name)
        stored = self._accounts.password_of(name)
        if not self._decoy:
            self._decoy = await self._beside(lambda: self._hasher.hash(secrets.token_urlsafe(16)))

        def check() -> bool:
            # A name that nobody has costs the same, or the time would tell who is here.
            try:
                self._hasher.verify(stored or self._decoy, password[:PASSWORD_MOST])
                return bool(stored)
            except (VerificationError, InvalidHashError):
                return False

        return await self._beside(check)

    async def _beside(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING:
            raise Overloaded("too many are logging in at this moment; try again in a few seconds")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def _let_through(self, who: str) -> None:
        wait = self._guard.blocked(who, self._now())
        if wait is not None:
            raise TooManyLogins(f"too many tries; try again in {wait / SECOND:.0f} s")

    # ── by token ─────────────────────────────────────────────────────────────────────────────────

    async def recognise(self, token: str) -> Principal | None:
        """Whose session this is."""
        name, colon, _ = token.removeprefix(PREFIX).rpartition(":")
        if not colon:
            return None
        key = digest(token)
        who = self._known.get(key)
        if who is None and await self._ledger.item(sessions(name), key.hex()) is not None:
            who = self._known[key] = Principal(name, Role.USER, key.hex()[:12])
        if who is None or await self._accounts.look(name) is not Role.USER:
            return None
        return who

    async def log_out(self, token: str) -> bool:
        """End one session; whether there was one."""
        name = token.removeprefix(PREFIX).rpartition(":")[0]
        self._known.pop(digest(token), None)
        return bool((await self._ledger.write(Drop(sessions(name), digest(token).hex())))[0])

    async def log_out_everywhere(self, name: str) -> int:
        """End all sessions of somebody; how many there were."""
        ended = await self._ledger.shelf(sessions(name))
        if ended:
            await self._ledger.write(*(Drop(sessions(name), key) for key in ended))
        self._known = {key: who for key, who in self._known.items() if who.name != name}
        return len(ended)

    async def refresh(self) -> frozenset[str]:
        """Ask for the sessions seen here again; whose have ended elsewhere: hang up on them."""
        known = list(self._known.items())
        found = await self._ledger.items([(sessions(who.name), key.hex()) for key, who in known])
        ended = [(key, who) for (key, who), login in zip(known, found, strict=True) if login is None]
        for key, _ in ended:
            self._known.pop(key, None)
        return frozenset(who.name for _, who in ended)

    async def _surplus(self, name: str) -> list[Drop]:
        logins = await self._ledger.shelf(sessions(name))
        oldest = sorted(logins, key=lambda key: msgspec.json.decode(logins[key], type=Login).created)
        return [Drop(sessions(name), key) for key in oldest[: max(0, len(oldest) + 1 - SESSIONS_KEPT)]]

    def _now(self) -> int:
        return self._ledger.clock.now()


def _check_password(password: str) -> None:
    if not PASSWORD_LEAST <= len(password) <= PASSWORD_MOST:
        raise Malformed(f"a password has {PASSWORD_LEAST} to {PASSWORD_MOST} characters; choose another")
