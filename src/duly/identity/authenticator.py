"""Finds the account that belongs to a token.

A token is 32 random bytes and cannot be guessed. So only callers with unknown tokens are slowed down, and
not everything behind their address: one device with an old token must not lock out its neighbours. A token
that memory does not know is looked up in the ledger before it is refused. A hub that cannot read the
ledger lets no caller in.
"""

from __future__ import annotations

import secrets
from typing import Final

from duly.core.networks import network_of
from duly.core.units import SECOND
from duly.errors import NotAllowed, NotAuthenticated, TooManyLogins
from duly.identity.account_names import NAME
from duly.identity.accounts import Accounts, Principal, Role
from duly.identity.login_guard import LoginGuard
from duly.identity.people import People
from duly.identity.temporary_tokens import TemporaryTokens
from duly.storage.ledger import Ledger

LOCAL: Final = "local"
"""The name of the user who may read the data folder."""
_OTHER_ENTRANCES: Final = (Role.NODE, Role.MONITOR)
"""Roles whose accounts do not log in here."""


class Authenticator:
    """Authenticates the callers of one hub. `token` is the one in its run file: it makes the owner of the
    data folder an admin."""

    def __init__(
        self, ledger: Ledger, accounts: Accounts, people: People, guard: LoginGuard, token: str
    ) -> None:
        self._ledger, self._accounts, self._people, self._guard = ledger, accounts, people, guard
        self._token = token.encode()
        self._temporary = TemporaryTokens()

    async def login(self, token: str | None, address: str) -> Principal:
        """Return the account that this token belongs to; raises `NotAuthenticated` or `TooManyLogins`. What
        cannot be a token, such as text with control characters, counts as a wrong one."""
        who = await self.authenticate(token, address)
        if who.role is Role.NODE:
            raise NotAllowed(
                f"{who.name} is a node: nodes connect over MQTT; 'duly add device' makes a device"
            )
        if who.role is Role.MONITOR:
            raise NotAllowed(f"{who.name} is a monitor: it reads /metrics and /v1/metrics, and nothing else")
        return who

    def recognise(self, token: str | None) -> Principal | None:
        """Return the account that this token belongs to, if memory is sure of it and it may log in; None if
        `login` has to be asked."""
        if token is None or not self._ledger.sole:
            return None
        who = self._accounts.authenticate(token)
        return None if who is None or who.role in _OTHER_ENTRANCES else who

    async def authenticate(self, token: str | None, address: str) -> Principal:
        """Return the account that this token belongs to, whatever its role may do here."""
        if token is None:
            raise NotAuthenticated("no token; send Authorization: Bearer …, or an auth frame")
        return await self._who(token if token.isascii() and token.isprintable() else "", address)

    async def _who(self, token: str, address: str) -> Principal:
        if self._ledger.sole:
            who = self._accounts.authenticate(token)
            if who is not None:
                return who
        if secrets.compare_digest(token.encode(), self._token):
            return Principal(LOCAL, Role.ADMIN)
        now = self._ledger.clock.now()
        temporary = self._temporary.owner(token, now)
        if temporary is not None:
            await self._accounts.confirm(temporary)
            return temporary
        return await self._look_up(token, network_of(address), now)

    async def _look_up(self, token: str, network: str, now: int) -> Principal:
        known = self._accounts.authenticate(token) is not None or self._people.has_seen(token)
        give_back = None if known else self._guard.begin_lookup(network, now)
        if known or give_back is not None:
            who = await self._accounts.identify(token) or await self._people.recognise(token)
            if who is not None:
                if give_back is not None:
                    give_back()
                return who
        wait = self._guard.wrong_token(network, now)
        if wait:
            seconds = -(-wait // SECOND)
            raise TooManyLogins(f"too many wrong tokens from {network}; try again in {seconds} s", wait)
        raise NotAuthenticated("this token is not known; 'duly add' makes one")

    async def temporary_token(self, name: str) -> str:
        """Issue a token that stands for an account for a short time."""
        role = await self._accounts.find_role(name) if NAME.fullmatch(name) else None
        if role is None:
            raise NotAllowed(f"there is no account named {name}; 'duly add' makes one")
        await self._accounts.confirmed(name)
        who = Principal(name, role, epoch=self._accounts.epoch(name))
        return self._temporary.issue(who, self._ledger.clock.now())
