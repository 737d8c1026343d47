"""Access to the dashboard: one-time links, passwords and sessions.

A link holds a random token, is valid for a short time and opens one session. A session is a random token in a
cookie. Only their SHA-256 is stored, as items of the ledger: a session that one hub has opened is valid at
every hub on the ledger, and ends at all of them when its item is dropped. A session ends after
`SESSION_LASTS` without use. A password is checked like those of chat users: with argon2id in a thread, after
the login guard has counted the try.

The token of the page against requests of other sites (CSRF) is derived from the session's token, so that it
needs no storage and is void with the session.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from duly.core.networks import network_of
from duly.core.operations import CheckItem, DropItem, PutItem, PutNewItem
from duly.core.units import HOUR, MINUTE
from duly.errors import DulyError, NotAuthenticated
from duly.identity.account_names import NAME, check_name
from duly.identity.login_guard import LoginGuard
from duly.identity.passwords import PasswordHashing, check_password
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox

LINKS: Final = "dashboard-links"
SESSIONS: Final = "dashboard-sessions"
USERS: Final = "dashboard-users"
"""Buckets: links and sessions by the SHA-256 of their tokens, users by name."""

LINK_LASTS: Final = 15 * MINUTE
SESSION_LASTS: Final = 12 * HOUR
RENEW: Final = HOUR
"""A session is prolonged when it is used and this much of its time has passed."""
SESSIONS_MOST: Final = 1_000
"""The most valid sessions; beyond that the one that ends first is dropped."""
LOCAL: Final = "local"
"""The name of the user who may read the data folder."""


class LoginLink(Struct, frozen=True):
    """A link as the ledger stores it."""

    name: str
    role: DashboardRole
    expires: int


class DashboardSession(Struct, frozen=True):
    """A session as the ledger stores it."""

    name: str
    role: DashboardRole
    created: int
    expires: int
    how: str = "link"


class DashboardUser(Struct, frozen=True):
    """A user with a password, of which the encrypted argon2 hash is stored."""

    role: DashboardRole
    password: str


class OpenedSession(Struct, frozen=True):
    """A session that was just opened, with the token for its cookie."""

    token: str
    visitor: DashboardVisitor


_encode: Final = msgspec.json.Encoder().encode


class DashboardAccess:
    """The links, users and sessions of one ledger. `box` encrypts the hashes of passwords."""

    def __init__(self, ledger: Ledger, box: SecretBox | None, guard: LoginGuard | None = None) -> None:
        self._ledger = ledger
        self._box = box
        self._guard = guard or LoginGuard()
        self._hashing = PasswordHashing()

    def close(self) -> None:
        """Stop computing password hashes."""
        self._hashing.close()

    # ── links ────────────────────────────────────────────────────────────────────────────────────

    async def make_link(self, name: str = LOCAL, role: DashboardRole = DashboardRole.ADMIN) -> str:
        """Create a one-time link; returns its token, which cannot be shown again."""
        if name != LOCAL:
            check_name(name)
        now = self._ledger.clock.now()
        token = secrets.token_urlsafe(24)
        old = await self._ledger.bucket(LINKS)
        over = [DropItem(LINKS, key) for key, body in old.items() if _link(body).expires <= now]
        await self._ledger.write(
            PutItem(LINKS, _digest(token), _encode(LoginLink(name, role, now + LINK_LASTS))), *over
        )
        return token

    async def follow_link(self, token: str, address: str) -> OpenedSession:
        """Open a session by a link, which is void from then on; raises `NotAuthenticated`."""
        now = self._ledger.clock.now()
        network = network_of(address)
        give_back = self._guard.begin(f"$link/{network}", network, now)
        key = _digest(token)
        body = await self._ledger.item(LINKS, key)
        if body is not None:
            give_back()
            # Of two requests with one link, the one that drops it opens the session.
            if await self._ledger.apply(DropItem(LINKS, key, body)) and now < (link := _link(body)).expires:
                return await self._open(link.name, link.role, "link")
        raise NotAuthenticated(
            "this link was used already, or is too old; 'duly dashboard link' prints a new one"
        )

    # ── passwords ────────────────────────────────────────────────────────────────────────────────

    async def set_password(self, name: str, password: str, role: DashboardRole) -> None:
        """Create a user of the dashboard, or change the password and role of one; all sessions of that name
        end."""
        check_name(name)
        check_password(password)
        hashed = await self._hashing.hash(password, "", first=True)
        encrypted = hashed if self._box is None else self._box.encrypt(hashed, f"{USERS}/{name}")
        await self._ledger.write(PutItem(USERS, name, _encode(DashboardUser(role, encrypted))))
        await self.end_sessions(name)

    async def remove_user(self, name: str) -> bool:
        """Remove a user with all sessions; returns whether there was one."""
        gone = await self._ledger.apply(DropItem(USERS, name))
        await self.end_sessions(name)
        return gone

    async def users(self) -> dict[str, str]:
        """Return the names of all users with passwords, and their roles."""
        found = await self._ledger.bucket(USERS)
        return {name: _user(body).role.word for name, body in found.items()}

    async def log_in(self, name: str, password: str, address: str) -> OpenedSession:
        """Check a password and open a session; raises `NotAuthenticated` or `TooManyLogins`."""
        network = network_of(address)
        account = f"$dashboard/{name}"
        known = self._guard.knows(account, network)
        give_back = self._guard.begin(account, network, self._ledger.clock.now(), known=known)
        try:
            body = await self._ledger.item(USERS, name) if NAME.fullmatch(name) else None
            user = None if body is None else _user(body)
            stored = "" if user is None else self._decrypted(name, user.password)
            right = await self._hashing.matches(stored, password, network, first=known)
        except DulyError:
            give_back()  # the password was not checked
            raise
        if user is None or body is None or not right:
            self._guard.wrong_password(account, network, exists=user is not None)
            raise NotAuthenticated("the name or the password is wrong")
        give_back()
        self._guard.learn(account, network)
        return await self._open(name, user.role, "password", CheckItem(USERS, name, body))

    def _decrypted(self, name: str, encrypted: str) -> str:
        return encrypted if self._box is None else self._box.decrypt(encrypted, f"{USERS}/{name}")

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def _open(
        self, name: str, role: DashboardRole, how: str, unless: CheckItem | None = None
    ) -> OpenedSession:
        now = self._ledger.clock.now()
        token = secrets.token_urlsafe(32)
        session = DashboardSession(name, role, now, now + SESSION_LASTS, how)
        put = PutNewItem(SESSIONS, _digest(token), _encode(session))
        step = put if unless is None else replace(unless, then=(put,))
        if not await self._ledger.apply(step):
            raise NotAuthenticated("the password was changed just now; log in with the new one")
        await self._drop_old(now)
        return OpenedSession(token, _visitor(_digest(token), session))

    async def _drop_old(self, now: int) -> None:
        stored = {key: _session(body) for key, body in (await self._ledger.bucket(SESSIONS)).items()}
        by_end = sorted(stored, key=lambda key: stored[key].expires)
        over = [key for key in by_end if stored[key].expires <= now]
        over += by_end[len(over) : max(len(over), len(by_end) - SESSIONS_MOST)]
        if over:
            await self._ledger.write(*(DropItem(SESSIONS, key) for key in over))

    async def visitor(self, token: str) -> DashboardVisitor | None:
        """Return the visitor of this session, or None if it is not valid."""
        if not token or len(token) > 100:
            return None
        key = _digest(token)
        return await self.session(key)

    async def session(self, key: str) -> DashboardVisitor | None:
        """Return the visitor of the session with this hash; a valid session is prolonged."""
        body = await self._ledger.item(SESSIONS, key)
        if body is None:
            return None
        session, now = _session(body), self._ledger.clock.now()
        if session.expires <= now:
            await self._ledger.write(DropItem(SESSIONS, key, body))
            return None
        if session.expires - now < SESSION_LASTS - RENEW:
            longer = replace(session, expires=now + SESSION_LASTS)
            put = PutItem(SESSIONS, key, _encode(longer))
            await self._ledger.write(CheckItem(SESSIONS, key, body, then=(put,)))
            session = longer
        return _visitor(key, session)

    async def sessions(self) -> list[tuple[str, DashboardSession]]:
        """Return all sessions with their hashes, the newest first."""
        now = self._ledger.clock.now()
        found = [(key, _session(body)) for key, body in (await self._ledger.bucket(SESSIONS)).items()]
        return sorted((one for one in found if one[1].expires > now), key=lambda one: -one[1].created)

    async def end_session(self, key: str) -> bool:
        """End the session with this hash; returns whether there was one."""
        return await self._ledger.apply(DropItem(SESSIONS, key))

    async def end_sessions(self, name: str = "") -> int:
        """End all sessions of this name, or of all names; returns how many."""
        mine = [key for key, one in await self.sessions() if not name or one.name == name]
        if mine:
            await self._ledger.write(*(DropItem(SESSIONS, key) for key in mine))
        return len(mine)


def csrf_token(token: str) -> str:
    """Return the token that every writing request of a session must carry in its headers."""
    return hmac.new(token.encode(errors="surrogatepass"), b"duly dashboard csrf", sha256).hexdigest()


def _digest(token: str) -> str:
    return sha256(token.encode(errors="surrogatepass")).hexdigest()


def _visitor(key: str, session: DashboardSession) -> DashboardVisitor:
    return DashboardVisitor(session.name, session.role, key, session.expires)


_link: Final = msgspec.json.Decoder(LoginLink).decode
_session: Final = msgspec.json.Decoder(DashboardSession).decode
_user: Final = msgspec.json.Decoder(DashboardUser).decode
