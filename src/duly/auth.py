"""Who somebody is, and what they may do.

The laws. A name is one principal with one role, and what is not granted is denied. A token is shown once,
when it is made; only its SHA-256 is kept, so whoever reads the ledger can impersonate nobody. (A token is
32 random bytes: there is nothing to guess, so a slow hash would protect nothing and cost every login.)

A name is free again when its account was removed; but of a person something may be left: see LEAVING.

The ledger is the truth, and every question is answered from memory: who connects is checked without I/O.
What other processes have changed is seen at the next `refresh`.

Guessing is slowed down by `LoginGuard`: each claimed account and each address for itself.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from contextlib import suppress
from enum import StrEnum
from hashlib import blake2b, sha256
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace as changed

from duly.core.retry import RetryPolicy
from duly.core.units import MINUTE, SECOND
from duly.core.writes import Drop, Given, Put, PutNew, Write
from duly.errors import Conflict, Malformed
from duly.ledger import Ledger

PREFIX: Final = "duly_"
"""What a token starts with, so that people and secret scanners know one when they see it."""

RESERVED: Final = frozenset({"hub", "local"})
"""The hub among the MQTT nodes, and whoever may read its data folder."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_PRINCIPALS: Final = "principals"
_GRANTS: Final = "grants"
LEAVING: Final = "leaving"
"""people whose account was removed, and when: what they were in has to be ended"""
FORMER: Final = "former"
"""people who are gone and have left something behind: their names are not given away"""


class Role(StrEnum):
    """What kind of principal it is."""

    APP = "app"
    DEVICE = "device"
    USER = "user"
    SENTINEL = "sentinel"
    ADMIN = "admin"


class Principal(Struct, frozen=True):
    """Somebody who has shown who they are."""

    name: str
    role: Role
    device: str = ""
    """which of their logins, for people who have several"""


class Account(Struct, frozen=True):
    """A principal as the operator sees it."""

    name: str
    role: Role
    created: int
    disabled: bool


class _Stored(Struct, frozen=True):
    """A principal as it lies on its shelf, under its name."""

    role: Role
    token: str
    """the token's SHA-256, in hex"""
    created: int
    disabled: bool = False
    broker: str = ""
    """the token's bcrypt, for a broker that checks it itself (devices)"""
    once: bool = False
    """a device without a memory of its own: it is sent each command once"""
    password: str = ""
    """the argon2id of a person's password; they have no token of their own, but one for each login"""


_decode: Final = msgspec.json.Decoder(_Stored).decode
_encode: Final = msgspec.json.Encoder().encode


def sessions(name: str) -> str:
    """The shelf of somebody's logins."""
    return f"sessions/{name}"


def check_name(name: str) -> str:
    """The name if it can be one: it also has to serve as an MQTT username and as a level of a topic.

    >>> check_name("lock-1")
    'lock-1'
    """
    if name in RESERVED:
        raise Malformed(f"{name!r} is the hub's own name; choose another")
    if not _NAME.fullmatch(name):
        raise Malformed(
            f"{name[:80]!r} cannot be a name; use 1 to 64 letters a–z, digits and . _ -, "
            "not starting with a dot or a dash"
        )
    return name


class Accounts:
    """The principals and grants of one ledger; one of these per process. `refresh` it once before use: until
    then it knows nobody."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._book = _Book()
        self._loaded = False
        self._changing = asyncio.Lock()  # a refresh must not bring back what a change has just removed

    # ── asking: from memory ──────────────────────────────────────────────────────────────────────

    def authenticate(self, token: str) -> Principal | None:
        """Whose token this is. It is found by its hash, so the time that takes says nothing about tokens."""
        return self._book.by_token.get(digest(token))

    def may(self, principal: Principal, device: str) -> bool:
        """Whether they may command the device. A connection can outlive its account: whoever was removed or
        disabled since may nothing."""
        book = self._book
        standing = book.standing.get(principal.name)
        if standing is None or standing.role is not principal.role:
            return False
        return principal.role is Role.ADMIN or device in book.granted.get(principal.name, _NOBODY)

    def granted(self, app: str) -> frozenset[str]:
        """The devices this app may command."""
        return self._book.granted.get(app, _NOBODY)

    def apps_of(self, device: str) -> frozenset[str]:
        """The apps that may command this device, and so hear what it says."""
        return self._book.apps_of.get(device, _NOBODY)

    def is_sent_once(self, device: str) -> bool:
        """Whether a device has no memory of its own, so that it is sent each command once."""
        return device in self._book.once

    # ── changing: in the ledger, then in memory ──────────────────────────────────────────────────

    async def add(self, role: Role, name: str, *, replace: bool = False, once: bool = False) -> str:
        """Make a principal; its token, which cannot be had again. With `replace` an existing one of this role
        gets a new token, and its old one is void; its grants stay. With `once` a device is sent each command
        once, since it would do a repeat again."""
        check_name(name)
        if once and role is not Role.DEVICE:
            raise Malformed("only a device can be sent its commands without repeats (--no-resend)")
        token = PREFIX + secrets.token_urlsafe(32)
        async with self._changing:
            book = await self._current()
            old = book.stored.get(name)
            new = _Stored(
                role,
                digest(token).hex(),
                self._ledger.clock.now(),
                broker=_for_the_broker(role, token),
                once=once,
            )
            if old is not None:
                if not replace or old.role is not role:
                    raise _taken(name, old.role.value)
                new = changed(old, token=new.token, broker=new.broker, once=once)
                await self._ledger.write(Put(_PRINCIPALS, name, _encode(new)))
            else:
                # A grant that was being made while its principal was removed must not be inherited.
                left = [grant for grant in book.dangling if name in grant]
                drops = tuple(Drop(_GRANTS, _grant(*grant)) for grant in left)
                await self._put_new(name, new, drops)
                book.dangling.difference_update(left)
            book.seat(name, new)
        return token

    async def register(self, name: str, password: str) -> None:
        """Make a user who logs in with a password, of which this is the hash."""
        check_name(name)
        async with self._changing:
            book = await self._current()
            new = _Stored(Role.USER, "", self._ledger.clock.now(), password=password)
            with suppress(Conflict):  # strangers are not told by whom
                if name not in book.stored:
                    await self._put_new(name, new)
                    book.seat(name, new)
                    return
            raise Conflict(f"the name {name!r} is taken; choose another")

    async def _put_new(self, name: str, new: _Stored, then: tuple[Write, ...] = ()) -> None:
        """Lay a principal on its shelf; raises `Conflict` if the name is not free."""
        put = PutNew(_PRINCIPALS, name, _encode(new), then=then)
        leaving = Given(LEAVING, name, otherwise=(put,))
        match await self._ledger.write(Given(FORMER, name, otherwise=(leaving,))):
            case [True, *_]:
                raise Conflict(f"somebody who is gone has talked as {name!r}; choose another name")
            case [_, True, *_]:
                raise Conflict(
                    f"{name!r} was removed just now; try again in a minute, or choose another name"
                )
            case [_, _, False, *_]:
                raise _taken(name, "made by another process just now")

    async def set_password(self, name: str, password: str) -> None:
        """Give a user another password; this is its hash."""
        async with self._changing:
            old = (await self._current()).stored.get(name)
            if old is None or old.role is not Role.USER:
                raise Malformed(f"there is no user named {name!r}; check the name")
            new = changed(old, password=password)
            await self._ledger.write(Put(_PRINCIPALS, name, _encode(new)))
            self._book.seat(name, new)

    def password_of(self, name: str) -> str:
        """The hash of a user's password; empty if they have none, or may not log in."""
        one = self._book.stored.get(name)
        return "" if one is None or one.disabled else one.password

    async def look(self, name: str) -> Role | None:
        """What kind of principal this is; also of one that another process has made just now."""
        if self._book.stored.get(name) is None and not self._ledger.sole and _NAME.fullmatch(name):
            async with self._changing:
                body = await self._ledger.item(_PRINCIPALS, name)
                with suppress(msgspec.DecodeError):
                    if body is not None:
                        self._book.seat(name, _decode(body))
        return self.role_of(name)

    async def remove(self, name: str) -> bool:
        """Forget a principal with all its grants and logins; whether there was one. Its name is free again,
        a person's once they have been seen off."""
        async with self._changing:
            book = await self._current()
            grants = book.grants_of(name)
            also: list[Write] = [Drop(_GRANTS, _grant(*grant)) for grant in grants]
            if name in book.stored and book.stored[name].role is Role.USER:
                also.append(Put(LEAVING, name, b"%d" % self._ledger.clock.now()))
                also += [Drop(sessions(name), key) for key in await self._ledger.shelf(sessions(name))]
            gone, *_ = await self._ledger.write(Drop(_PRINCIPALS, name), *also)
            for grant in grants:
                book.unlink(*grant)
            book.unseat(name)
        return bool(gone)

    async def disable(self, name: str) -> None:
        """Let nobody in under this name for now; its token and grants are kept."""
        await self._set_disabled(name, True)

    async def enable(self, name: str) -> None:
        """Let them in again."""
        await self._set_disabled(name, False)

    async def _set_disabled(self, name: str, disabled: bool) -> None:
        async with self._changing:
            book = await self._current()
            old = book.stored.get(name)
            if old is None:
                raise Malformed(f"there is nobody named {name!r}; check the name")
            new = changed(old, disabled=disabled)
            await self._ledger.write(Put(_PRINCIPALS, name, _encode(new)))
            book.seat(name, new)

    async def grant(self, app: str, device: str) -> bool:
        """Let an app command a device, and hear it; whether that is new."""
        async with self._changing:
            book = await self._current()
            for name, role in ((app, Role.APP), (device, Role.DEVICE)):
                if name not in book.stored or book.stored[name].role is not role:
                    raise Malformed(
                        f"there is no {role.value} named {name!r}; check the name, or add it first"
                    )
            (new,) = await self._ledger.write(Put(_GRANTS, _grant(app, device), b""))
            book.link(app, device)
        return bool(new)

    async def revoke(self, app: str, device: str) -> bool:
        """Take a grant back; whether there was one."""
        async with self._changing:
            book = await self._current()
            (gone,) = await self._ledger.write(Drop(_GRANTS, _grant(app, device)))
            book.unlink(app, device)
        return bool(gone)

    async def refresh(self) -> frozenset[str]:
        """Read everything again. Returns who was known before and has lost their standing (removed, disabled,
        another token): hang up on them."""
        async with self._changing:
            before, standing = self._book.by_token, self._book.standing
            await self._load()
            after = self._book
            gone = {name for name, who in standing.items() if after.standing.get(name) != who}
            return frozenset(
                gone | {who.name for token, who in before.items() if after.by_token.get(token) != who}
            )

    async def _current(self) -> _Book:
        """What stands now. Of a ledger that nobody else writes we know it."""
        if not (self._loaded and self._ledger.sole):
            await self._load()
        return self._book

    async def _load(self) -> None:
        book = _Book()
        principals, grants = await self._ledger.shelf(_PRINCIPALS), await self._ledger.shelf(_GRANTS)
        for name, body in principals.items():
            try:
                book.seat(name, _decode(body))
            except msgspec.DecodeError:
                continue  # a role that only a newer duly knows: whom we cannot judge we do not let in
        for grant in grants:
            app, _, device = grant.partition("/")
            book.link(app, device)
        self._book, self._loaded = book, True

    def role_of(self, name: str) -> Role | None:
        """What kind of principal this is; None for nobody, or somebody disabled."""
        one = self._book.stored.get(name)
        return None if one is None or one.disabled else one.role

    def broker_logins(self) -> dict[str, str]:
        """Who may log in at the broker, with the bcrypt of their tokens."""
        stored = sorted(self._book.stored.items())
        return {name: one.broker for name, one in stored if one.broker and not one.disabled}

    def list(self) -> tuple[Account, ...]:
        """All accounts, by name."""
        stored = sorted(self._book.stored.items())
        return tuple(Account(name, one.role, one.created, one.disabled) for name, one in stored)


_NOBODY: Final[frozenset[str]] = frozenset()


class _Book:
    """Principals and grants, arranged for asking."""

    def __init__(self) -> None:
        self.stored: dict[str, _Stored] = {}
        self.standing: dict[str, Principal] = {}
        self.by_token: dict[bytes, Principal] = {}
        self.granted: dict[str, frozenset[str]] = {}
        self.apps_of: dict[str, frozenset[str]] = {}
        self.once: set[str] = set()
        self.dangling: set[tuple[str, str]] = set()
        """grants of which one side is not there: of no effect"""

    def seat(self, name: str, one: _Stored) -> None:
        self.unseat(name)
        self.stored[name] = one
        if one.once:
            self.once.add(name)
        if not one.disabled:
            self.standing[name] = who = Principal(name, one.role)
            if one.token:
                self.by_token[bytes.fromhex(one.token)] = who

    def unseat(self, name: str) -> None:
        old = self.stored.pop(name, None)
        self.once.discard(name)
        if old is not None:
            self.by_token.pop(bytes.fromhex(old.token), None)
            self.standing.pop(name, None)

    def link(self, app: str, device: str) -> None:
        one, other = self.stored.get(app), self.stored.get(device)
        if one is None or other is None or one.role is not Role.APP or other.role is not Role.DEVICE:
            self.dangling.add((app, device))
            return
        self.granted[app] = self.granted.get(app, _NOBODY) | {device}
        self.apps_of[device] = self.apps_of.get(device, _NOBODY) | {app}

    def unlink(self, app: str, device: str) -> None:
        self.dangling.discard((app, device))
        for names, of, name in ((self.granted, app, device), (self.apps_of, device, app)):
            left = names.get(of, _NOBODY) - {name}
            if left:
                names[of] = left
            else:
                names.pop(of, None)

    def grants_of(self, name: str) -> set[tuple[str, str]]:
        """The grants in which this name occurs."""
        left = {grant for grant in self.dangling if name in grant}
        left |= {(name, device) for device in self.granted.get(name, _NOBODY)}
        return left | {(app, name) for app in self.apps_of.get(name, _NOBODY)}


def _grant(app: str, device: str) -> str:
    """The name of a grant on its shelf; no name of a principal has a slash."""
    return f"{app}/{device}"


def _for_the_broker(role: Role, token: str) -> str:
    if role is not Role.DEVICE:
        return ""
    import bcrypt

    # The cheapest cost: a token has 256 random bits, there is nothing to guess.
    return bcrypt.hashpw(token.encode(), bcrypt.gensalt(4)).decode()


def digest(token: str) -> bytes:
    """What is kept of a token."""
    # Strangers send anything, also text that UTF-8 cannot carry.
    return sha256(token.encode(errors="surrogatepass")).digest()


def _taken(name: str, by: str) -> Conflict:
    return Conflict(
        f"the name {name!r} is taken ({by}); choose another, or give that one a new token with replace"
    )


# ── as the command line asks for them ──────────────────────────────────────────────────────────────


async def administer(accounts: Accounts, verb: str, wanted: dict[str, str]) -> dict[str, Any]:
    """The verbs on accounts: the same through a running hub and without one."""
    match verb:
        case "add":
            role, name = Role(wanted["role"]), wanted["name"]
            token = await accounts.add(role, name, replace="replace" in wanted, once="no_resend" in wanted)
            return {"token": token, "name": name, "role": role.value}
        case "remove":
            return {"changed": await accounts.remove(wanted["name"])}
        case "grant":
            return {"changed": await accounts.grant(wanted["app"], wanted["device"])}
        case "revoke":
            return {"changed": await accounts.revoke(wanted["app"], wanted["device"])}
        case "list":
            everybody = accounts.list()
            granted = {one.name: sorted(accounts.granted(one.name)) for one in everybody}
            return {
                "accounts": everybody,
                "grants": {app: devices for app, devices in granted.items() if devices},
            }
        case _:
            raise Malformed(f"there is no verb {verb!r}")


# ── guessing ─────────────────────────────────────────────────────────────────────────────────────

LOGIN: Final = RetryPolicy.exponential(SECOND, 5 * MINUTE, jitter=0)
"""How long one has to wait after a failed login too many: 1 s, 2 s, 4 s … 5 min."""


class LoginGuard:
    """Slows guessing down. Ask `blocked` first, for the claimed account and for the address; if either says
    how long to wait, say so and look at nothing, and count nothing. Then tell it how the login went.

    Failures below the limit cost nothing: people mistype. Memory is bounded: whoever failed longest ago is
    forgotten. If the clock is set back, what lies in its future is void: better a few guesses too many than
    a person locked out for as long as the clock was wrong.

    >>> guard = LoginGuard()
    >>> for _ in range(6):
    ...     guard.failed("account eve", now=0)
    >>> guard.blocked("account eve", now=250_000), guard.blocked("account eve", now=SECOND)
    (750000, None)
    """

    def __init__(self, policy: RetryPolicy = LOGIN, *, free: int = 5, remembered: int = 10_000) -> None:
        if free < 0 or remembered < 1:
            raise Malformed("a login guard needs free >= 0 and remembered >= 1")
        self._policy = policy
        self._free = free
        self._remembered = remembered
        self._failures: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def blocked(self, who: str, now: int) -> int | None:
        """How long they have to wait before the next try, in microseconds; None if they need not."""
        count, at = self._failures.get(_short(who), (0, 0))
        left = at + self._wait(count) - now
        return left if left > 0 and at <= now else None

    def failed(self, who: str, now: int) -> None:
        """They were not who they said."""
        key = _short(who)
        count, _ = self._failures.pop(key, (0, 0))
        self._failures[key] = (count + 1, now)
        if len(self._failures) > self._remembered:
            self._failures.popitem(last=False)

    def succeeded(self, who: str) -> None:
        """They were: what they got wrong before is forgotten."""
        if self._failures:
            self._failures.pop(_short(who), None)

    def __len__(self) -> int:
        return len(self._failures)

    def _wait(self, count: int) -> int:
        over = count - self._free
        return (self._policy.delay(over, b"") or self._policy.cap) if over > 0 else 0


def _short(who: str) -> bytes:
    """Of fixed length, whatever strangers call themselves."""
    return blake2b(who.encode(errors="surrogatepass"), digest_size=16).digest()
