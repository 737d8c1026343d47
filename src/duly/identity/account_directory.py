"""The accounts and grants of a ledger: who a caller is, and what it may do, at every hub that writes it.

A hub that is the only writer of its ledger answers every question from memory. Where several hubs write
the ledger, memory alone never lets a caller in: a caller that connects is confirmed by a read (`identify`,
`confirm`), what a live connection sends is admitted only if its account is unchanged (`proof`, checked in
the transaction of the admission), and what memory does not know is read from the ledger before it is
refused (`find_role`, `find_grant`). What changes at one hub, the others read when they see the next version
(`duly.identity.account_changes`): what has not changed costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from duly.core.operations import CheckItem
from duly.core.rate_limits import Rate, RateLimits
from duly.errors import NotAuthenticated
from duly.identity.account_changes import ACCOUNTS_VERSION, changed_between, notes_between
from duly.identity.account_names import NAME
from duly.identity.known_accounts import KnownAccounts
from duly.identity.model import Principal, Role, StoredAccount, digest
from duly.storage.item_loader import ItemLoader
from duly.storage.ledger import Ledger

PRINCIPALS: Final = "principals"
"""The bucket of accounts, by name."""
GRANTS: Final = "grants"
"""The bucket of grants, named by `grant_name`."""
TOKENS: Final = "tokens"
"""The bucket that names the owner of each token's SHA-256, so that any hub finds a token with one read."""
MISSES: Final = Rate(20)
"""Reads of the ledger that may find nothing, per second and asking account."""
WHOLE: Final = 3600.0
"""Seconds after which everything is read again, though nothing says that it has changed."""

decode_account: Final = msgspec.json.Decoder(StoredAccount).decode


class AccountDirectory(KnownAccounts):
    """The accounts and grants of one ledger, for reading; it knows nothing before `refresh` was called
    once."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self.items = ItemLoader(ledger)
        self._misses = RateLimits(MISSES)
        self._loaded = False
        self.version: bytes | None = None
        """changes with every change of an account or a grant, at whichever hub it is made; memory has all
        changes up to this one"""
        self._whole: float | None = None
        """when everything was read because of its age"""
        self._doubted: set[str] = set()
        """accounts and grants whose latest read may be older than one before: they are read again"""
        self._lapsed: set[str] = set()
        """accounts that were valid and no longer are, until `refresh` or `catch_up` reports them"""
        self._changing = asyncio.Lock()  # a refresh must not bring back what a change has just removed

    # ── checks for a transaction ─────────────────────────────────────────────────────────────────

    def proof(self, principal: Principal, device: str = "") -> tuple[CheckItem, ...]:
        """Return the checks that the ledger has to pass for the principal to be valid and, if it is an app,
        to command the device. There are none where this process alone writes the ledger: memory is enough
        then."""
        if self._ledger.sole:
            return ()
        body = self._book.bodies.get(principal.name)
        if body is None:
            return ()
        needed = [CheckItem(PRINCIPALS, principal.name, body)]
        if device and principal.role is Role.APP:
            needed.append(CheckItem(GRANTS, grant_name(principal.name, device)))
        if principal.login:
            needed.append(CheckItem(sessions(principal.name), principal.login))
        return tuple(needed)

    def unchanged(self, name: str) -> CheckItem:
        """Return the check that an account in the ledger is what it is in memory."""
        return CheckItem(PRINCIPALS, name, self._book.bodies.get(name, b""))

    # ── from the ledger, where other hubs write it too ───────────────────────────────────────────

    async def identify(self, token: str) -> Principal | None:
        """Return the owner of a token, by what the ledger holds now."""
        key = digest(token)
        who = self._book.by_token.get(key)
        if self._ledger.sole:
            return who
        if who is None:
            (owner,) = await self.items.get((TOKENS, key.hex()))
            name = "" if owner is None else owner.decode()
        else:
            name = who.name
        one = await self.confirmed(name) if name else None
        if one is None or one.token != key.hex():
            return None
        return self._book.standing.get(name)

    async def confirmed(self, name: str) -> StoredAccount | None:
        """Return an account as the ledger holds it now; memory is corrected by it."""
        while not self._ledger.sole:
            before = self._book.bodies.get(name)
            (body,) = await self.items.get((PRINCIPALS, name))
            if self._book.bodies.get(name) == before:  # else it was changed here meanwhile: read again
                if body != before:
                    self._learn(name, body)
                    self._doubt(name)
                break
        return self._book.stored.get(name)

    def _doubt(self, name: str) -> None:
        """Note an account or a grant of which a newer read may have ended before this one."""
        self._doubted.add(name)

    def _learn(self, name: str, body: bytes | None) -> None:
        book = self._book
        before, old = book.standing.get(name), book.stored.get(name)
        try:
            one = None if body is None else decode_account(body)
        except msgspec.DecodeError:
            one = None  # a role that only a newer duly knows: it is not let in
        if one is None or body is None:
            book.forget(name)
        else:
            book.put(name, one, body)
        void = old is not None and (one is None or one.token != old.token)
        if before is not None and (void or book.standing.get(name) != before):
            self._lapsed.add(name)

    async def confirm(self, principal: Principal) -> None:
        """Raise `NotAuthenticated` if the principal is no longer valid, by what the ledger holds now."""
        login: bytes | None = b""
        if not self._ledger.sole:
            await self.confirmed(principal.name)
            if principal.login:
                (login,) = await self.items.get((sessions(principal.name), principal.login))
        if login is None or not self.is_current(principal):
            raise NotAuthenticated("your login is no longer valid; log in again")

    async def removed_names(self) -> set[str]:
        """Return the names whose last account, or one before it, was removed."""
        return set(await self._ledger.bucket(REMOVED))

    async def find_role(self, name: str, asker: str = "") -> Role | None:
        """Return the role of an account, also of one that another hub has just made. `asker` is the account
        that asks: only so many of its questions about unknown names are read from the ledger."""
        unknown = self._book.stored.get(name) is None
        if unknown and self._may_read(name, asker) and await self.confirmed(name) is not None:
            self._misses.give_back(asker)
        return self.stored_role(name)

    async def find_grant(self, principal: Principal, device: str) -> bool:
        """Return whether the principal may command the device, also by a grant that another hub has just
        made."""
        app = principal.name
        if not self.may(principal, device) and self._may_read(device, app):
            (grant,) = await self.items.get((GRANTS, grant_name(app, device)))
            if grant is not None:
                await asyncio.gather(self.confirmed(app), self.confirmed(device))
                self._book.link(app, device)
                self._doubt(grant_name(app, device))
                self._misses.give_back(app)
        return self.may(principal, device)

    async def find_permission(self, sender: str, device: str) -> bool:
        """Return whether the sender may command the device, also by an account and a grant that another hub
        has just made."""
        role = await self.find_role(sender, sender)
        if role is Role.APP:
            await self.find_grant(Principal(sender, role, epoch=self.epoch(sender)), device)
        return self.allows(sender, device)

    def _may_read(self, name: str, asker: str) -> bool:
        """Return whether the ledger may know more about a name than memory, and the asker has reads left; one
        is taken."""
        if self._ledger.sole or not NAME.fullmatch(name):
            return False
        return not self._misses.take(asker, self._ledger.clock.now())

    # ── keeping memory up to date ────────────────────────────────────────────────────────────────

    async def refresh(self) -> frozenset[str]:
        """Read everything again. Returns the accounts that were valid before and no longer are (removed,
        given another token): their connections have to be closed."""
        async with self._changing:
            await self._load()
            return self._take_lapsed()

    async def catch_up(self) -> frozenset[str]:
        """Refresh what has changed: one small read if nothing has, cheap enough to be made often."""
        now = asyncio.get_running_loop().time()
        if self._whole is None:
            self._whole = now
        if now - self._whole >= WHOLE:
            self._whole = now
            async with self._changing:
                await self._load()
        else:
            (version,) = await self.items.get(ACCOUNTS_VERSION)
            if version != self.version or self._doubted:
                async with self._changing:
                    await self._read_changes()
        return self._take_lapsed()

    def _take_lapsed(self) -> frozenset[str]:
        lapsed, self._lapsed = frozenset(self._lapsed), set()
        return lapsed

    async def _read_changes(self, *names: str) -> None:
        """Read these accounts and what has changed since the last read, or everything if that cannot be
        told. `_changing` is held."""
        if not self._loaded:
            await self._load()
            return
        doubted, self._doubted = self._doubted, set()
        try:
            wanted = doubted | {name for name in names if NAME.fullmatch(name)}
            version, found = await self._read(wanted)
            if version != self.version:
                notes = await self._ledger.items(notes_between(self.version, version))
                changed = changed_between(self.version, version, notes)
                if changed is None:
                    self._doubted |= doubted
                    await self._load()
                    return
                _, found = await self._read(wanted | changed)
        except BaseException:
            self._doubted |= doubted
            raise
        self._update(found)
        self.version = version

    async def _read(self, names: set[str]) -> tuple[bytes | None, dict[str, bytes | None]]:
        """Return the version of the accounts, and these accounts and grants."""
        asked = sorted(names)
        places = [(GRANTS if "/" in name else PRINCIPALS, name) for name in asked]
        version, *found = await self._ledger.items([ACCOUNTS_VERSION, *places])
        return version, dict(zip(asked, found, strict=True))

    async def _load(self) -> None:
        """Read everything. `_changing` is held."""
        doubted, self._doubted = self._doubted, set()
        try:
            # The version first: what changes while we read is read again.
            version = await self._ledger.item(*ACCOUNTS_VERSION)
            principals = await self._ledger.bucket(PRINCIPALS)
            grants = {name for name in await self._ledger.bucket(GRANTS) if "/" in name}
        except BaseException:
            self._doubted |= doubted
            raise
        bodies, known = self._book.bodies, {grant_name(*grant) for grant in self._book.grants()}
        found: dict[str, bytes | None] = {
            name: body for name, body in principals.items() if bodies.get(name) != body
        }
        found.update({name: principals.get(name) for name in doubted if "/" not in name})
        found.update(dict.fromkeys(bodies.keys() - principals.keys()))
        found.update(dict.fromkeys(known - grants))
        found.update(dict.fromkeys(grants - known, b""))
        self._update(found)
        self.version, self._loaded = version, True

    def _update(self, found: Mapping[str, bytes | None]) -> None:
        """Note what was read of accounts and grants; those that are in no bucket are None."""
        book = self._book
        for name, body in found.items():
            if "/" not in name:
                if body != book.bodies.get(name):
                    self._learn(name, body)
                book.link_again(name)
        for name, body in found.items():
            app, slash, device = name.partition("/")
            if slash and body is None:
                book.unlink(app, device)
            elif slash:
                book.link(app, device)


REMOVED: Final = "removed"
"""The bucket of times, in microseconds, at which the last account of a name was removed."""
NETWORKS: Final = "login_networks"
"""The bucket of the networks that each user has logged in from: they outlive a user's sessions."""


def sessions(name: str) -> str:
    """Return the bucket of a user's logins."""
    return f"sessions/{name}"


def grant_name(app: str, device: str) -> str:
    """Return the name of a grant in its bucket; the name of an account has no slash."""
    return f"{app}/{device}"
