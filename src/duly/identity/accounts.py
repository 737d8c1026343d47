"""Who somebody is, and what they may do.

The laws. A name is one principal with one role, and what is not granted is denied. A token is shown once,
when it is made; only its SHA-256 is kept, so whoever reads the ledger can impersonate nobody. (A token is
32 random bytes: there is nothing to guess, so a slow hash would protect nothing and cost every login.)

A name is free again when its account was removed; but of a person something may be left: see LEAVING.

The ledger is the truth. Where this process alone writes it, every question is answered from memory. Where
other hubs write it too, memory is never enough to let anybody in: who connects is confirmed by a read
(`identify`, `confirm`), what a live connection sends is admitted only if its account still stands (`proof`,
judged in the same transaction), and what memory does not know is looked up before it is refused (`look`,
`look_for_grant`).

An account has an epoch: it changes when its token or password does, and when all its logins are ended; what
was shown before is void then. A name that is given again is another account: `born`
bounds what it may read, and ids made before its predecessor was removed are not its own (`predecessor`).
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace as changed

from duly.core.operations import CheckItem, DropItem, PutItem, PutNewItem, Write
from duly.core.quota import Quota, Rate
from duly.errors import Conflict, Malformed, NotAuthenticated
from duly.identity.account_book import NO_NAMES, AccountBook, Principal, Role, StoredAccount
from duly.identity.account_names import NAME, check_account_name, check_name
from duly.storage.item_loader import ItemLoader
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, is_sealed

__all__ = [
    "FORMER",
    "LEAVING",
    "PREFIX",
    "VERSIONS",
    "Account",
    "Accounts",
    "Principal",
    "Role",
    "administer",
    "digest",
    "sessions",
]

PREFIX: Final = "duly_"
"""What a token starts with, so that people and secret scanners know one when they see it."""

_PRINCIPALS: Final = "principals"
_GRANTS: Final = "grants"
_TOKENS: Final = "tokens"
"""whose token has this SHA-256: so that any hub finds a token by one look"""
_REMOVED: Final = "removed"
"""when the last account of a name was removed, in microseconds"""
VERSIONS: Final = "versions"
"""items that change whenever what they are named after does: one look tells whether to read it again"""
_VERSION: Final = (VERSIONS, "accounts")
MISSES: Final = Rate(20)
"""Names that one account may have looked up in the ledger for nothing."""
LEAVING: Final = "leaving"
"""people whose account was removed, and when: what they were in has to be ended"""
FORMER: Final = "former"
"""people who are gone and have left something behind: their names are not given away"""


class Account(Struct, frozen=True):
    """A principal as the operator sees it."""

    name: str
    role: Role
    created: int
    disabled: bool


_decode: Final = msgspec.json.Decoder(StoredAccount).decode
_encode: Final = msgspec.json.Encoder().encode


def sessions(name: str) -> str:
    """The bucket of somebody's logins."""
    return f"sessions/{name}"


class Accounts:
    """The principals and grants of one ledger; one of these per process. `refresh` it once before use: until
    then it knows nobody."""

    def __init__(self, ledger: Ledger, box: SecretBox | None = None) -> None:
        self._ledger = ledger
        self._box = box
        self.items = ItemLoader(ledger)
        self._misses = Quota(MISSES)
        self._book = AccountBook()
        self._loaded = False
        self.version: bytes | None = None
        """changes with every change of an account or a grant, wherever it was made"""
        self._lapsed: set[str] = set()
        """who was known and turned out to have lost their standing, until `refresh` or `catch_up` tells"""
        self._changing = asyncio.Lock()  # a refresh must not bring back what a change has just removed

    # ── asking: from memory ──────────────────────────────────────────────────────────────────────

    def authenticate(self, token: str) -> Principal | None:
        """Whose token this is. It is found by its hash, so the time that takes says nothing about tokens."""
        return self._book.by_token.get(digest(token))

    def may(self, principal: Principal, device: str) -> bool:
        """Whether they may command the device. A connection can outlive its account: whoever was removed or
        disabled since may nothing."""
        if not self.stands(principal):
            return False
        return principal.role is Role.ADMIN or device in self._book.granted.get(principal.name, NO_NAMES)

    def stands(self, principal: Principal) -> bool:
        """Whether their account is still the one they were let in as."""
        standing = self._book.standing.get(principal.name)
        if standing is None or standing.role is not principal.role:
            return False
        return principal.epoch in (0, standing.epoch)

    def proof(self, principal: Principal, device: str = "") -> tuple[CheckItem, ...]:
        """What has to be so in the ledger for them to stand, and, if they are an app, to command the device.
        Empty where memory knows it: where nobody else writes the ledger."""
        body = self._book.bodies.get(principal.name)
        if self._ledger.sole or body is None:
            return ()
        needed = [CheckItem(_PRINCIPALS, principal.name, body)]
        if device and principal.role is Role.APP:
            needed.append(CheckItem(_GRANTS, _grant(principal.name, device)))
        if principal.login:
            needed.append(CheckItem(sessions(principal.name), principal.login))
        return tuple(needed)

    def row(self, name: str) -> CheckItem:
        """That a user's account still is what it is in memory."""
        return CheckItem(_PRINCIPALS, name, self._book.bodies.get(name, b""))

    def epoch(self, name: str) -> int:
        """Which epoch an account is in; 0 if there is none."""
        one = self._book.stored.get(name)
        return 0 if one is None else one.epoch

    def born(self, name: str) -> int:
        """When an account was made; 0 if there is none."""
        one = self._book.stored.get(name)
        return 0 if one is None else one.created

    def predecessor(self, name: str) -> int:
        """When another account of this name was removed; 0 if there was none."""
        return self._book.after.get(name, 0)

    def allows(self, sender: str, device: str) -> bool:
        """Whether the sender of a command may still command the device, and that is still there."""
        book = self._book
        standing = book.standing.get(sender)
        if standing is None or device not in book.stored:
            return False
        return standing.role is Role.ADMIN or device in book.granted.get(sender, NO_NAMES)

    def granted(self, app: str) -> frozenset[str]:
        """The devices this app may command."""
        return self._book.granted.get(app, NO_NAMES)

    def apps_of(self, device: str) -> frozenset[str]:
        """The apps that may command this device, and so hear what it says."""
        return self._book.apps_of.get(device, NO_NAMES)

    def is_sent_once(self, device: str) -> bool:
        """Whether a device has no memory of its own, so that it is sent each command once."""
        return device in self._book.once

    # ── asking the ledger, where other hubs write it too ─────────────────────────────────────────

    async def identify(self, token: str) -> Principal | None:
        """Whose token this is, by what the ledger holds now."""
        key = digest(token)
        who = self._book.by_token.get(key)
        if self._ledger.sole:
            return who
        if who is None:
            (owner,) = await self.items.get((_TOKENS, key.hex()))
            name = "" if owner is None else owner.decode()
        else:
            name = who.name
        one = await self.confirmed(name) if name else None
        if one is None or one.disabled or one.token != key.hex():
            return None
        return self._book.standing.get(name)

    async def confirmed(self, name: str) -> StoredAccount | None:
        """An account as it is in the ledger now; memory learns it."""
        while not self._ledger.sole:
            before = self._book.bodies.get(name)
            (body,) = await self.items.get((_PRINCIPALS, name))
            if self._book.bodies.get(name) == before:  # else it was changed here meanwhile: look again
                if body != before:
                    self._learn(name, body)
                break
        return self._book.stored.get(name)

    def _learn(self, name: str, body: bytes | None) -> None:
        book = self._book
        before = book.standing.get(name)
        one: StoredAccount | None = None
        with suppress(msgspec.DecodeError):  # a role that only a newer duly knows
            one = None if body is None else _decode(body)
        if one is None or body is None:
            book.unsubscribe(name)
        else:
            book.subscriber(name, one, body)
        if before is not None and book.standing.get(name) != before:
            self._lapsed.add(name)

    async def confirm(self, principal: Principal) -> None:
        """Raises `NotAuthenticated` if they no longer stand, by what the ledger holds now."""
        login: bytes | None = b""
        if not self._ledger.sole:
            await self.confirmed(principal.name)
            if principal.login:
                (login,) = await self.items.get((sessions(principal.name), principal.login))
        if login is None or not self.stands(principal):
            raise NotAuthenticated("your login is no longer valid; log in again")

    async def look(self, name: str, asker: str = "") -> Role | None:
        """What kind of principal this is; also of one that another hub has made just now. `asker` is the
        account on whose behalf it is asked: it may ask for so many that there are not."""
        looks = self._is_worth_a_look(self._book.stored.get(name) is None, name, asker)
        if looks and await self.confirmed(name) is not None:
            self._misses.give_back(asker)
        return self.role_of(name)

    async def look_for_grant(self, principal: Principal, device: str) -> bool:
        """`may`, also by a grant that another hub has made just now."""
        app = principal.name
        if self._is_worth_a_look(not self.may(principal, device), device, app):
            (grant,) = await self.items.get((_GRANTS, _grant(app, device)))
            if grant is not None:
                await asyncio.gather(self.confirmed(app), self.confirmed(device))
                self._book.link(app, device)
                self._misses.give_back(app)
        return self.may(principal, device)

    def _is_worth_a_look(self, unknown: bool, name: str, asker: str) -> bool:
        if not unknown or self._ledger.sole or not NAME.fullmatch(name):
            return False
        return not self._misses.take(asker, self._ledger.clock.now())

    # ── changing: in the ledger, then in memory ──────────────────────────────────────────────────

    async def add(
        self, role: Role, name: str, *, replace: bool = False, key: str = "", once: bool = False
    ) -> str:
        """Make a principal; its token, which cannot be had again. With `replace` an existing one of this role
        gets a new token, and its old one is void; its grants stay, and its key unless another is given. `key`
        is the public key of a device that signs what it says over MQTT. With `once` a device is sent each
        command once, since it would do a repeat again."""
        if once and role is not Role.DEVICE:
            raise Malformed("only a device can be sent its commands without repeats (--no-resend)")
        if key and role is not Role.DEVICE:
            raise Malformed("only a device has a key; nodes keep theirs themselves, see 'duly keys'")
        if key:
            from duly.core.signing import read_key

            key = read_key(key).shown
        token = PREFIX + secrets.token_urlsafe(32)
        hashed = digest(token).hex()
        async with self._changing:
            book = await self._current()
            old = book.stored.get(name)
            if old is not None:
                check_name(name)
                if not replace or old.role is not role:
                    raise _taken(name, old.role.value)
                epoch = self._next_epoch(old)
                new = changed(old, token=hashed, key=key or old.key, voided=epoch, once=once)
                await self._replace(
                    name, new, DropItem(_TOKENS, old.token), PutItem(_TOKENS, hashed, name.encode())
                )
            else:
                check_account_name(name)
                new = StoredAccount(role, hashed, self._ledger.clock.now(), key=key, once=once)
                # A grant that was being made while its principal was removed must not be inherited.
                left = [grant for grant in book.dangling if name in grant]
                drops = tuple(DropItem(_GRANTS, _grant(*grant)) for grant in left)
                await self._put_new(name, new, (*drops, PutItem(_TOKENS, hashed, name.encode()), _news()))
                book.dangling.difference_update(left)
        return token

    def _next_epoch(self, old: StoredAccount) -> int:
        return max(self._ledger.clock.now(), old.epoch + 1)

    async def _replace(self, name: str, new: StoredAccount, *also: Write) -> None:
        body = _encode(new)
        await self._ledger.write(PutItem(_PRINCIPALS, name, body), *also, _news())
        self._book.subscriber(name, new, body)

    async def register(self, name: str, password: str) -> None:
        """Make a user who logs in with a password, of which this is the hash."""
        check_account_name(name)
        async with self._changing:
            sealed = self._seal(name, "password", password)
            new = StoredAccount(Role.USER, "", self._ledger.clock.now(), password=sealed)
            with suppress(Conflict):  # strangers are not told by whom
                if name not in self._book.stored:
                    await self._put_new(name, new)
                    return
            raise Conflict(f"the name {name!r} is taken; choose another")

    async def _put_new(self, name: str, new: StoredAccount, then: tuple[Write, ...] = ()) -> None:
        """Lay a principal on its bucket; raises `Conflict` if the name is not free."""
        removed = await self._ledger.item(_REMOVED, name)
        if removed is not None:
            new = changed(new, after=int(removed))
        body = _encode(new)
        put = PutNewItem(_PRINCIPALS, name, body, then=then)
        leaving = CheckItem(LEAVING, name, otherwise=(put,))
        former = CheckItem(FORMER, name, otherwise=(leaving,))
        results = await self._ledger.write(former)
        if results.of(former):
            raise Conflict(f"somebody who is gone has talked as {name!r}; choose another name")
        if results.of(leaving):
            raise Conflict(f"{name!r} was removed just now; try again in a minute, or choose another name")
        if not results.of(put):
            raise _taken(name, "made by another process just now")
        self._book.subscriber(name, new, body)

    async def set_password(self, name: str, password: str) -> None:
        """Give a user another password; this is its hash. All their logins are void."""
        await self._change_user(name, password=password)

    async def void_logins(self, name: str) -> None:
        """Make all logins of a user void."""
        with suppress(Malformed):  # there is no such user (any more), and so no login of theirs
            await self._change_user(name)

    async def _change_user(self, name: str, **fields: str) -> None:
        async with self._changing:
            old = (await self._current()).stored.get(name)
            if old is None or old.role is not Role.USER:
                raise Malformed(f"there is no user named {name!r}; check the name")
            if "password" in fields:
                fields["password"] = self._seal(name, "password", fields["password"])
            await self._replace(name, changed(old, voided=self._next_epoch(old), **fields))

    def password_of(self, name: str) -> str:
        """The hash of a user's password; empty if they have none, or may not log in."""
        one = self._book.stored.get(name)
        return "" if one is None or one.disabled else self._unseal(name, "password", one.password)

    async def remove(self, name: str) -> bool:
        """Forget a principal with all its grants and logins; whether there was one. Its name is free again,
        a person's once they have been seen off."""
        async with self._changing:
            book = await self._current()
            grants = book.grants_of(name)
            also: list[Write] = [DropItem(_GRANTS, _grant(*grant)) for grant in grants]
            if name in book.stored:
                also.append(PutItem(_REMOVED, name, b"%d" % self._ledger.clock.now()))
                also.append(DropItem(_TOKENS, book.stored[name].token))
            if name in book.stored and book.stored[name].role is Role.USER:
                also.append(PutItem(LEAVING, name, b"%d" % self._ledger.clock.now()))
                also += [DropItem(sessions(name), key) for key in await self._ledger.bucket(sessions(name))]
            gone = await self._ledger.apply(DropItem(_PRINCIPALS, name), *also, _news())
            for grant in grants:
                book.unlink(*grant)
            book.unsubscribe(name)
        return gone

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
            await self._replace(name, changed(old, disabled=disabled))

    async def grant(self, app: str, device: str) -> bool:
        """Let an app command a device, and hear it; whether that is new."""
        async with self._changing:
            book = await self._current()
            for name, role in ((app, Role.APP), (device, Role.DEVICE)):
                if name not in book.stored or book.stored[name].role is not role:
                    raise Malformed(
                        f"there is no {role.value} named {name!r}; check the name, or add it first"
                    )
            new = await self._ledger.apply(PutItem(_GRANTS, _grant(app, device), b""), _news())
            book.link(app, device)
        return new

    async def revoke(self, app: str, device: str) -> bool:
        """Take a grant back; whether there was one."""
        async with self._changing:
            book = await self._current()
            gone = await self._ledger.apply(DropItem(_GRANTS, _grant(app, device)), _news())
            book.unlink(app, device)
        return gone

    async def refresh(self) -> frozenset[str]:
        """Read everything again. Returns who was known before and has lost their standing (removed, disabled,
        another token): hang up on them."""
        async with self._changing:
            await self._load()
            return self._drain()

    def _drain(self) -> frozenset[str]:
        lapsed, self._lapsed = frozenset(self._lapsed), set()
        return lapsed

    async def catch_up(self) -> frozenset[str]:
        """`refresh`, if anything was changed since: one small read, to be asked often. Returns the same."""
        (version,) = await self.items.get(_VERSION)
        if version != self.version:
            return await self.refresh()
        return self._drain()

    async def _current(self) -> AccountBook:
        """What stands now. Of a ledger that nobody else writes we know it."""
        if not (self._loaded and self._ledger.sole):
            await self._load()
        return self._book

    async def _load(self) -> None:
        book = AccountBook()
        version = await self._ledger.item(*_VERSION)  # first: what changes while we read is read again
        principals, grants = await self._ledger.bucket(_PRINCIPALS), await self._ledger.bucket(_GRANTS)
        for name, body in principals.items():
            try:
                book.subscriber(name, _decode(body), body)
            except msgspec.DecodeError:
                continue  # a role that only a newer duly knows: whom we cannot judge we do not let in
        for grant in grants:
            app, _, device = grant.partition("/")
            book.link(app, device)
        before = self._book
        self._book, self._loaded, self.version = book, True, version
        self._lapsed |= {name for name, who in before.standing.items() if book.standing.get(name) != who}
        self._lapsed |= {who.name for key, who in before.by_token.items() if book.by_token.get(key) != who}

    def role_of(self, name: str) -> Role | None:
        """What kind of principal this is; None for nobody, or somebody disabled."""
        one = self._book.stored.get(name)
        return None if one is None or one.disabled else one.role

    def key_of(self, name: str) -> str:
        """The public key with which a device must sign what it says over MQTT; empty if it need not."""
        one = self._book.stored.get(name)
        return "" if one is None else one.key

    # ── hashes are sealed: a copy of the ledger gives nothing to try passwords on ────────────────

    def _seal(self, name: str, field: str, value: str) -> str:
        if self._box is None or not value or is_sealed(value):
            return value
        return self._box.seal(value, f"{_PRINCIPALS}/{name}/{field}")

    def _unseal(self, name: str, field: str, value: str) -> str:
        return value if self._box is None else self._box.open(value, f"{_PRINCIPALS}/{name}/{field}")

    async def seal(self) -> int:
        """Seal what an older version has stored in plain; of how many accounts."""
        async with self._changing:
            await self._load()
            plain: list[Write] = []
            for name, old in self._book.stored.items():
                new = changed(old, password=self._seal(name, "password", old.password))
                if new != old:
                    plain.append(PutItem(_PRINCIPALS, name, _encode(new)))
            if plain:
                await self._ledger.write(*plain, _news())
                await self._load()
        return len(plain)

    def list(self) -> tuple[Account, ...]:
        """All accounts, by name."""
        stored = sorted(self._book.stored.items())
        return tuple(Account(name, one.role, one.created, one.disabled) for name, one in stored)


def _grant(app: str, device: str) -> str:
    """The name of a grant on its bucket; no name of a principal has a slash."""
    return f"{app}/{device}"


def _news() -> PutItem:
    """That accounts have changed."""
    return PutItem(*_VERSION, secrets.token_bytes(8))


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
            token = await accounts.add(
                role,
                name,
                replace="replace" in wanted,
                key=wanted.get("key", ""),
                once="no_resend" in wanted,
            )
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
