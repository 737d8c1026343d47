"""The accounts and grants of a ledger: who a caller is, and what it may do, at every hub that writes it.

A hub that is the only writer of its ledger answers every question from memory. Where several hubs write
the ledger, memory alone never lets a caller in: a caller that connects is confirmed by a read (`identify`,
`confirm`), what a live connection sends is admitted only if its account is unchanged (`proof`, checked in
the transaction of the admission), and what memory does not know is read from the ledger before it is
refused (`find_role`, `find_grant`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from duly.core.operations import CheckItem
from duly.core.rate_limits import Rate, RateLimits
from duly.errors import NotAuthenticated
from duly.identity.account_names import NAME
from duly.identity.known_accounts import AccountBook, KnownAccounts
from duly.identity.model import Principal, Role, StoredAccount, digest
from duly.storage.item_loader import ItemLoader
from duly.storage.ledger import Ledger

PRINCIPALS: Final = "principals"
"""The bucket of accounts, by name."""
GRANTS: Final = "grants"
"""The bucket of grants, named by `grant_name`."""
TOKENS: Final = "tokens"
"""The bucket that names the owner of each token's SHA-256, so that any hub finds a token with one read."""
VERSIONS: Final = "versions"
"""A bucket whose items change together with what they are named after: one read shows whether to read it
again."""
ACCOUNTS_VERSION: Final = (VERSIONS, "accounts")
MISSES: Final = Rate(20)
"""Reads of the ledger that may find nothing, per second and asking account."""

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
        """changes with every change of an account or a grant, at whichever hub it is made"""
        self._lapsed: set[str] = set()
        """accounts that were valid and no longer are, until `refresh` or `catch_up` reports them"""
        self._changing = asyncio.Lock()  # a refresh must not bring back what a change has just removed

    # ── checks for a transaction ─────────────────────────────────────────────────────────────────

    def proof(self, principal: Principal, device: str = "") -> tuple[CheckItem, ...]:
        """The checks that the ledger has to pass for the principal to be valid and, if it is an app, to
        command the device. There are none where this process alone writes the ledger: memory is enough
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
        """The check that an account in the ledger is what it is in memory."""
        return CheckItem(PRINCIPALS, name, self._book.bodies.get(name, b""))

    # ── from the ledger, where other hubs write it too ───────────────────────────────────────────

    async def identify(self, token: str) -> Principal | None:
        """The owner of a token, by what the ledger holds now."""
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
        """An account as the ledger holds it now; memory is corrected by it."""
        while not self._ledger.sole:
            before = self._book.bodies.get(name)
            (body,) = await self.items.get((PRINCIPALS, name))
            if self._book.bodies.get(name) == before:  # else it was changed here meanwhile: read again
                if body != before:
                    self._learn(name, body)
                break
        return self._book.stored.get(name)

    def _learn(self, name: str, body: bytes | None) -> None:
        book = self._book
        before = book.standing.get(name)
        one: StoredAccount | None = None
        with suppress(msgspec.DecodeError):  # a role that only a newer duly knows
            one = None if body is None else decode_account(body)
        if one is None or body is None:
            book.forget(name)
        else:
            book.put(name, one, body)
        if before is not None and book.standing.get(name) != before:
            self._lapsed.add(name)

    async def confirm(self, principal: Principal) -> None:
        """Raises `NotAuthenticated` if the principal is no longer valid, by what the ledger holds now."""
        login: bytes | None = b""
        if not self._ledger.sole:
            await self.confirmed(principal.name)
            if principal.login:
                (login,) = await self.items.get((sessions(principal.name), principal.login))
        if login is None or not self.is_current(principal):
            raise NotAuthenticated("your login is no longer valid; log in again")

    async def removed_names(self) -> set[str]:
        """The names whose last account, or one before it, was removed."""
        return set(await self._ledger.bucket(REMOVED))

    async def find_role(self, name: str, asker: str = "") -> Role | None:
        """The role of an account, also of one that another hub has just made. `asker` is the account that
        asks: only so many of its questions about unknown names are read from the ledger."""
        unknown = self._book.stored.get(name) is None
        if unknown and self._may_read(name, asker) and await self.confirmed(name) is not None:
            self._misses.give_back(asker)
        return self.stored_role(name)

    async def find_grant(self, principal: Principal, device: str) -> bool:
        """`may`, which also counts a grant that another hub has just made."""
        app = principal.name
        if not self.may(principal, device) and self._may_read(device, app):
            (grant,) = await self.items.get((GRANTS, grant_name(app, device)))
            if grant is not None:
                await asyncio.gather(self.confirmed(app), self.confirmed(device))
                self._book.link(app, device)
                self._misses.give_back(app)
        return self.may(principal, device)

    async def find_permission(self, sender: str, device: str) -> bool:
        """`allows`, which also counts an account and a grant that another hub has just made."""
        role = await self.find_role(sender, sender)
        if role is Role.APP:
            await self.find_grant(Principal(sender, role, epoch=self.epoch(sender)), device)
        return self.allows(sender, device)

    def _may_read(self, name: str, asker: str) -> bool:
        """Whether the ledger may know more about a name than memory, and the asker has reads left; one is
        taken."""
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
        """`refresh` if anything has changed: one small read, cheap enough to be made often."""
        (version,) = await self.items.get(ACCOUNTS_VERSION)
        if version != self.version:
            return await self.refresh()
        return self._take_lapsed()

    def _take_lapsed(self) -> frozenset[str]:
        lapsed, self._lapsed = frozenset(self._lapsed), set()
        return lapsed

    async def _load(self) -> None:
        book = AccountBook()
        version = await self._ledger.item(
            *ACCOUNTS_VERSION
        )  # first: what changes while we read is read again
        principals, grants = await self._ledger.bucket(PRINCIPALS), await self._ledger.bucket(GRANTS)
        for name, body in principals.items():
            try:
                book.put(name, decode_account(body), body)
            except msgspec.DecodeError:
                continue  # a role that only a newer duly knows: such an account is not let in
        for grant in grants:
            app, _, device = grant.partition("/")
            book.link(app, device)
        before = self._book
        self._book, self._loaded, self.version = book, True, version
        self._lapsed |= {name for name, who in before.standing.items() if book.standing.get(name) != who}
        self._lapsed |= {who.name for key, who in before.by_token.items() if book.by_token.get(key) != who}


REMOVED: Final = "removed"
"""The bucket of times, in microseconds, at which the last account of a name was removed."""
NETWORKS: Final = "login_networks"
"""The bucket of the networks that each user has logged in from: they outlive a user's sessions."""


def sessions(name: str) -> str:
    """The bucket of a user's logins."""
    return f"sessions/{name}"


def grant_name(app: str, device: str) -> str:
    """The name of a grant in its bucket; the name of an account has no slash."""
    return f"{app}/{device}"
