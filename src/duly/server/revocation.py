"""Revocation: closes the connections of accounts and logins that are no longer valid, at every hub.

The law: when an account is removed or a person logs out at one hub, every hub closes its own connections of
them: at once if a notification arrives, and within a second if it is lost. Commands that are no longer
allowed end as well: waiting ones are cancelled, those that were handed over are `unknown`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from duly.errors import LedgerError
from duly.identity.accounts import Principal

if TYPE_CHECKING:
    from duly.cluster.notifier import Notifier
    from duly.server.hub import Hub

ACCOUNTS: Final = "accounts"
"""The topic of notifications that accounts, grants or logins have changed."""
CHECK_SECONDS: Final = 1.0
"""How long a connection may outlive an account removed at another hub, if the notification is lost."""
NAME: Final = "disconnecting the revoked"


class Revocation:
    """The revocations of one hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._reviewed: bytes | None = None
        """the version of the accounts by which commands were last checked; other code reads accounts as
        well"""

    def listen(self, notifier: Notifier) -> None:
        """Check whenever another hub reports that accounts have changed."""
        tasks = self._hub.tasks

        def changed(_: str) -> None:
            tasks.do(NAME, self.check())

        notifier.listen(ACCOUNTS, changed)

    def start(self) -> None:
        """Check regularly, where other hubs may use the same ledger."""
        if not self._hub.ledger.sole:
            self._hub.tasks.every(NAME, CHECK_SECONDS, self.check)

    async def check(self) -> None:
        """Close the connections of accounts and logins that have ended at another hub, and cancel commands
        that are no longer allowed."""
        hub = self._hub
        with suppress(LedgerError):
            await self.disconnect(await hub.accounts.catch_up())
            await self.disconnect(frozenset(), await hub.people.catch_up())
            version = hub.accounts.version
            if version != self._reviewed:
                await self.review()
                self._reviewed = version

    async def review(self) -> None:
        """End commands that are no longer allowed, also those that the embedded broker keeps."""
        await self._hub.gateway.review()
        if self._hub.mqtt is not None:
            await self._hub.mqtt.take_back()

    async def disconnect(self, accounts: frozenset[str], logins: frozenset[Principal] = frozenset()) -> None:
        """Close the connections of these accounts, and those of these logins of people."""
        hub = self._hub
        for name in accounts:
            hub.router.dismiss(name)
            if hub.mqtt is not None:
                await hub.mqtt.dismiss(name)
        for who in logins:
            hub.chat.dismiss(who.name, who.device)

    def end_login(self, name: str, device: str) -> None:
        """Close the connections of a person's login that has ended at this hub, or of all of them."""
        self._hub.chat.dismiss(name, device)
        self.announce()

    def announce(self) -> None:
        """Tell other hubs that accounts, grants or logins have changed."""
        if self._hub.notifier is not None:
            self._hub.notifier.hint(ACCOUNTS)
