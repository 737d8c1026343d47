"""Accounts and grants: making, changing and removing them.

A name is one principal with one role, and what is not granted is denied. A token is shown once, when it is
made; only its SHA-256 is kept, so a reader of the ledger can impersonate no account. (A token is 32 random
bytes: there is nothing to guess, so a slow hash would protect nothing and cost every login.)

The ledger is the truth; `AccountDirectory` says when memory may answer for it. A change is judged by what
the ledger held at one version of the accounts, and stored only at this version: if another hub was faster,
it is judged again. After some tries it is stored at any version, so that busy hubs cannot keep another one
from revoking; all of them then read everything.

An account has an epoch. It changes when the account's token or password does, and when all its logins are
ended; what was shown before is void from then on. The name of a removed account is free again, except
where a person has left lines behind (see `LEAVING` and `FORMER`). A name that is given again is another
account: `created_at` bounds what it may read, and ids made before its predecessor was removed are not its own
(`freed_at`).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace as changed

from duly.core.operations import CheckItem, DropItem, PutItem, PutNewItem, Results, Write
from duly.core.signing import Algorithm, read_stored_key
from duly.errors import Conflict, Malformed
from duly.identity.account_changes import (
    ACCOUNTS_VERSION,
    VERSIONS,
    new_version,
    noted,
    unrelated_version,
)
from duly.identity.account_directory import (
    GRANTS,
    NETWORKS,
    PRINCIPALS,
    REMOVED,
    TOKENS,
    AccountDirectory,
    grant_name,
    sessions,
)
from duly.identity.account_names import NAME, check_account_name, check_name
from duly.identity.keyring import new_key
from duly.identity.model import Principal, Role, StoredAccount, digest
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, is_encrypted

__all__ = [
    "FORMER",
    "LEAVING",
    "NETWORKS",
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

SHARED_KEY: Final = "shared"
"""What stands for the key of a device, when a secret of the device and the hub is to be made."""
PREFIX: Final = "duly_"
"""What a token starts with, so that people and secret scanners recognise one."""

LEAVING: Final = "leaving"
"""The bucket of people whose account was removed, with the time: their conversations have to be left."""
FORMER: Final = "former"
"""The bucket of removed people who left something behind: their names are not given away again."""
TRIES: Final = 10
"""How often a change is judged anew because another hub has changed accounts meanwhile."""


class Account(Struct, frozen=True):
    """An account as the operator sees it."""

    name: str
    role: Role
    created: int


class Change(Struct, frozen=True):
    """A change of accounts and grants that has been judged."""

    after: dict[str, bytes | None]
    """the accounts and grants that it changes, as they are afterwards; None for those that are gone"""
    writes: tuple[Write, ...]
    check: Callable[[Results], None] = lambda _: None
    """raises `Conflict` if the writes were refused"""


_encode: Final = msgspec.json.Encoder().encode


class Accounts(AccountDirectory):
    """The accounts and grants of one ledger; a process has one of these."""

    def __init__(self, ledger: Ledger, box: SecretBox | None = None) -> None:
        super().__init__(ledger)
        self._box = box

    # ── changing: in the ledger, then in memory ──────────────────────────────────────────────────

    async def add(
        self, role: Role, name: str, *, replace: bool = False, key: str = "", once: bool = False
    ) -> str:
        """Make an account and return its token, which cannot be shown again. With `replace` an existing
        account of this role gets a new token and its old one is void; its grants stay, and its key unless
        another is given. `key` is the key of a device that signs what it sends over MQTT, as `Key.stored`
        writes it. With `once` a device is sent each command once, since it would carry out a repeat."""
        if once and role is not Role.DEVICE:
            raise Malformed("only a device can be sent its commands without repeats (--no-resend)")
        if key and role is not Role.DEVICE:
            raise Malformed("only a device has a key; nodes keep theirs themselves, see 'duly keys'")
        if key:
            key = self._encrypt_key(name, read_stored_key(key).stored)
        token = PREFIX + secrets.token_urlsafe(32)
        hashed = digest(token).hex()

        async def change() -> Change:
            removed = await self._ledger.item(REMOVED, name) if NAME.fullmatch(name) else None
            old = self._book.stored.get(name)
            if old is None:
                check_account_name(name)
                new = StoredAccount(role, hashed, self._ledger.clock.now(), key=key, once=once)
                # A grant that was made while its account was being removed must not be inherited.
                left = [grant_name(*grant) for grant in self._book.dangling if name in grant]
                drops = (DropItem(GRANTS, grant) for grant in left)
                return _making(name, new, removed, dict.fromkeys(left), (*drops, _token(hashed, name)))
            check_name(name)
            if not replace or old.role is not role:
                raise _taken(name, old.role.value)
            epoch = self._next_epoch(old)
            new = changed(old, token=hashed, key=key or old.key, voided=epoch, once=once)
            return _replacing(name, new, DropItem(TOKENS, old.token), _token(hashed, name))

        await self._change(change, name)
        return token

    async def _change(self, judge: Callable[[], Awaitable[Change]], *names: str) -> Results:
        """Judge a change of these accounts and store it, in the ledger and in memory."""
        async with self._changing:
            tried = 0
            while True:
                if tried or not (self._loaded and self._ledger.sole):
                    await self._read_changes(*names)
                version = self.version
                wanted, now, tried = await judge(), new_version(version), tried + 1
                if tried > TRIES:
                    put = PutItem(*ACCOUNTS_VERSION, unrelated_version())
                    results = await self._ledger.write(*wanted.writes, put)
                    break
                guard = noted(version, now, wanted.after, wanted.writes)
                results = await self._ledger.write(guard)
                if results.of(guard):
                    self.version = now
                    break
            wanted.check(results)
            lapsed = set(self._lapsed)
            self._update(wanted.after)
            self._lapsed = lapsed  # who asked for this closes connections, and knows which
        return results

    def _next_epoch(self, old: StoredAccount) -> int:
        return max(self._ledger.clock.now(), old.epoch + 1)

    async def register(self, name: str, password: str) -> None:
        """Make a user who logs in with a password; `password` is its hash."""
        check_account_name(name)
        async with self._changing:
            encrypted = self._encrypt(name, "password", password)
            new = StoredAccount(Role.USER, "", self._ledger.clock.now(), password=encrypted)
            with suppress(Conflict):  # a stranger does not learn whose name it is
                if name not in self._book.stored:
                    making = _making(name, new, await self._ledger.item(REMOVED, name))
                    making.check(await self._ledger.write(*making.writes))
                    self._update(making.after)
                    return
            raise Conflict(f"the name {name!r} is taken; choose another")

    async def set_password(self, name: str, password: str) -> None:
        """Give a user another password, of which `password` is the hash; all logins of the user become
        void."""
        await self._change_user(name, password=password)

    async def void_logins(self, name: str) -> None:
        """Make all logins of a user void."""
        with suppress(Malformed):  # a user who does not exist has no logins
            await self._change_user(name)

    async def _change_user(self, name: str, **fields: str) -> None:
        if "password" in fields:
            fields["password"] = self._encrypt(name, "password", fields["password"])

        async def change() -> Change:
            old = self._book.stored.get(name)
            if old is None or old.role is not Role.USER:
                raise Malformed(f"there is no user named {name!r}; check the name")
            return _replacing(name, changed(old, voided=self._next_epoch(old), **fields))

        await self._change(change, name)

    def password_of(self, name: str) -> str:
        """Return the hash of a user's password; empty if there is none."""
        one = self._book.stored.get(name)
        return "" if one is None else self._decrypt(name, "password", one.password)

    async def remove(self, name: str) -> bool:
        """Remove an account with all its grants and logins; returns whether there was one. Its name is
        free again, a person's name as soon as the person has left all conversations."""
        drop = DropItem(PRINCIPALS, name)

        async def change() -> Change:
            one = self._book.stored.get(name)
            person = one is not None and one.role is Role.USER
            logins = await self._ledger.bucket(sessions(name)) if person else {}
            gone = [grant_name(*grant) for grant in self._book.grants_of(name)]
            also: list[Write] = [DropItem(GRANTS, grant) for grant in gone]
            now = b"%d" % self._ledger.clock.now()
            if one is not None:
                also += [PutItem(REMOVED, name, now), DropItem(TOKENS, one.token)]
            if person:
                also.append(PutItem(LEAVING, name, now))
                also += [DropItem(sessions(name), key) for key in logins]
                also.append(DropItem(NETWORKS, name))
            return Change(dict.fromkeys([name, *gone]), (drop, *also))

        return (await self._change(change, name)).of(drop)

    async def grant(self, app: str, device: str) -> bool:
        """Let an app command a device and receive what it pushes; returns whether that is new."""
        grant = grant_name(app, device)
        put = PutItem(GRANTS, grant, b"")

        async def change() -> Change:
            for name, role in ((app, Role.APP), (device, Role.DEVICE)):
                one = self._book.stored.get(name)
                if one is None or one.role is not role:
                    raise Malformed(
                        f"there is no {role.value} named {name!r}; check the name, or add it first"
                    )
            return Change({grant: b""}, (put,))

        return (await self._change(change, app, device)).of(put)

    async def revoke(self, app: str, device: str) -> bool:
        """Take a grant back; returns whether there was one."""
        grant = grant_name(app, device)
        drop = DropItem(GRANTS, grant)

        async def change() -> Change:
            return Change({grant: None}, (drop,))

        return (await self._change(change)).of(drop)

    async def update(self) -> None:
        """Read everything again where other processes write the ledger too; those whose connections have to
        be closed are reported by the next `refresh` or `catch_up`."""
        async with self._changing:
            if not (self._loaded and self._ledger.sole):
                await self._load()

    # ── password hashes and shared keys are encrypted: a copy of the ledger is no help to a thief ─

    def _encrypt(self, name: str, field: str, value: str) -> str:
        if self._box is None or not value or is_encrypted(value):
            return value
        return self._box.encrypt(value, f"{PRINCIPALS}/{name}/{field}")

    def _decrypt(self, name: str, field: str, value: str) -> str:
        return value if self._box is None else self._box.decrypt(value, f"{PRINCIPALS}/{name}/{field}")

    def _encrypt_key(self, name: str, stored: str) -> str:
        shared = stored.startswith(Algorithm.HMAC.value)
        return self._encrypt(name, "key", stored) if shared else stored

    def key_of(self, name: str) -> str:
        """Return the key with which a device must sign what it sends over MQTT; empty if it need not sign."""
        return self._decrypt(name, "key", super().key_of(name))

    async def encrypt_passwords(self) -> int:
        """Encrypt the hashes and shared keys that are stored in plain; returns of how many accounts."""
        async with self._changing:
            await self._load()

        async def change() -> Change:
            plain: dict[str, bytes | None] = {}
            for name, old in self._book.stored.items():
                password = self._encrypt(name, "password", old.password)
                new = changed(old, password=password, key=self._encrypt_key(name, old.key))
                if new != old:
                    plain[name] = _encode(new)
            puts = (PutItem(PRINCIPALS, name, body) for name, body in plain.items() if body is not None)
            return Change(plain, tuple(puts))

        count = len((await change()).after)
        if count:
            await self._change(change)
        return count

    def list(self) -> tuple[Account, ...]:
        """Return all accounts, by name."""
        stored = sorted(self._book.stored.items())
        return tuple(Account(name, one.role, one.created) for name, one in stored)


def _token(hashed: str, name: str) -> PutItem:
    """Return the write that names the owner of a token."""
    return PutItem(TOKENS, hashed, name.encode())


def _replacing(name: str, new: StoredAccount, *also: Write) -> Change:
    """Return the change that replaces an account."""
    body = _encode(new)
    return Change({name: body}, (PutItem(PRINCIPALS, name, body), *also))


def _making(
    name: str,
    new: StoredAccount,
    removed: bytes | None,
    dropped: dict[str, bytes | None] | None = None,
    then: tuple[Write, ...] = (),
) -> Change:
    """Return the change that makes an account, if its name is free. `removed` says when the last one of this
    name was removed; `dropped` are the grants that `then` drops."""
    if removed is not None:
        new = changed(new, after=int(removed))
    body = _encode(new)
    put = PutNewItem(PRINCIPALS, name, body, then=then)
    leaving = CheckItem(LEAVING, name, otherwise=(put,))
    former = CheckItem(FORMER, name, otherwise=(leaving,))

    def check(results: Results) -> None:
        if results.of(former):
            raise Conflict(f"{name!r} is the name of a removed person whose lines remain; choose another")
        if results.of(leaving):
            raise Conflict(f"{name!r} was removed just now; try again in a minute, or choose another name")
        if not results.of(put):
            raise _taken(name, "made by another process just now")

    return Change({**(dropped or {}), name: body}, (former,), check)


def _taken(name: str, by: str) -> Conflict:
    return Conflict(
        f"the name {name!r} is taken ({by}); choose another, or give that one a new token with replace"
    )


# ── as the command line asks for them ──────────────────────────────────────────────────────────────


async def administer(accounts: Accounts, verb: str, wanted: dict[str, str]) -> dict[str, object]:
    """Carry out a verb of the command line on accounts; the same with and without a running hub."""
    match verb:
        case "add":
            return await _add(accounts, _role_named(wanted["role"]), wanted["name"], wanted)
        case "remove":
            return {"changed": await accounts.remove(wanted["name"])}
        case "grant":
            return {"changed": await accounts.grant(wanted["app"], wanted["device"])}
        case "revoke":
            return {"changed": await accounts.revoke(wanted["app"], wanted["device"])}
        case "list":
            await accounts.update()  # a person who registers at another hub changes no version
            listed = accounts.list()
            granted = {one.name: sorted(accounts.granted(one.name)) for one in listed}
            return {
                "accounts": listed,
                "grants": {app: devices for app, devices in granted.items() if devices},
            }
        case _:
            raise Malformed(f"there is no verb {verb!r}")


def _role_named(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        roles = ", ".join(Role)
        raise Malformed(f"{text[:80]!r} is not a role; use one of {roles}") from None


async def _add(accounts: Accounts, role: Role, name: str, wanted: dict[str, str]) -> dict[str, object]:
    shared = new_key(Algorithm.HMAC) if wanted.get("key") == SHARED_KEY else None
    token = await accounts.add(
        role,
        name,
        replace="replace" in wanted,
        key=wanted.get("key", "") if shared is None else shared.stored,
        once="no_resend" in wanted,
    )
    made: dict[str, object] = {"token": token, "name": name, "role": role.value}
    return made if shared is None else {**made, "key": f"{shared.kid}:{shared.stored.partition(':')[2]}"}
