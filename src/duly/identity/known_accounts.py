"""Accounts and grants as this process knows them: questions that memory answers.

Whether memory may answer for the ledger, `duly.identity.account_directory` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from duly.identity.model import Principal, Role, StoredAccount, digest

NO_NAMES: Final[frozenset[str]] = frozenset()


class AccountBook:
    """The accounts and grants that a process knows, with the indexes that questions need."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredAccount] = {}
        self.bodies: dict[str, bytes] = {}
        """accounts by name, as the ledger stores them"""
        self.after: dict[str, int] = {}
        """for names that had an account before: when that one was removed"""
        self.standing: dict[str, Principal] = {}
        self.by_token: dict[bytes, Principal] = {}
        self.granted: dict[str, frozenset[str]] = {}
        self.apps_of: dict[str, frozenset[str]] = {}
        self.once: set[str] = set()
        self.dangling: set[tuple[str, str]] = set()
        """grants without effect, since the app or the device does not exist"""

    def put(self, name: str, one: StoredAccount, body: bytes) -> None:
        """Add an account, or replace the one of this name."""
        self.forget(name)
        self.stored[name], self.bodies[name] = one, body
        if one.after:
            self.after[name] = one.after
        if one.once:
            self.once.add(name)
        self.standing[name] = who = Principal(name, one.role, epoch=one.epoch)
        if one.token:
            self.by_token[bytes.fromhex(one.token)] = who

    def forget(self, name: str) -> None:
        """Remove an account; its grants stay."""
        old = self.stored.pop(name, None)
        self.once.discard(name)
        if old is not None:
            self.by_token.pop(bytes.fromhex(old.token), None)
            self.standing.pop(name, None)
            self.bodies.pop(name, None)
            self.after.pop(name, None)

    def link(self, app: str, device: str) -> None:
        """Add a grant."""
        one, other = self.stored.get(app), self.stored.get(device)
        if one is None or other is None or one.role is not Role.APP or other.role is not Role.DEVICE:
            self.dangling.add((app, device))
            return
        self.dangling.discard((app, device))
        self.granted[app] = self.granted.get(app, NO_NAMES) | {device}
        self.apps_of[device] = self.apps_of.get(device, NO_NAMES) | {app}

    def unlink(self, app: str, device: str) -> None:
        """Remove a grant."""
        self.dangling.discard((app, device))
        for names, of, name in ((self.granted, app, device), (self.apps_of, device, app)):
            left = names.get(of, NO_NAMES) - {name}
            if left:
                names[of] = left
            else:
                names.pop(of, None)

    def link_again(self, name: str) -> None:
        """Judge anew whether the grants of an account that has come, gone or changed have an effect."""
        if not (self.dangling or name in self.granted or name in self.apps_of):
            return
        for grant in self.grants_of(name):
            self.unlink(*grant)
            self.link(*grant)

    def grants(self) -> set[tuple[str, str]]:
        """Return all grants, also those without effect."""
        return self.dangling | {(app, device) for app, each in self.granted.items() for device in each}

    def grants_of(self, name: str) -> set[tuple[str, str]]:
        """Return the grants in which this name occurs."""
        left = {grant for grant in self.dangling if name in grant}
        left |= {(name, device) for device in self.granted.get(name, NO_NAMES)}
        return left | {(app, name) for app in self.apps_of.get(name, NO_NAMES)}


class KnownAccounts:
    """Answers questions about the accounts and grants in an `AccountBook`."""

    def __init__(self) -> None:
        self._book = AccountBook()

    def authenticate(self, token: str) -> Principal | None:
        """Return the owner of a token. It is found by its hash, so the time this takes reveals nothing about
        tokens."""
        return self._book.by_token.get(digest(token))

    def may(self, principal: Principal, device: str) -> bool:
        """Return whether the principal may command the device. A connection can outlive its account: a
        principal whose account was removed since may do nothing."""
        book, name = self._book, principal.name
        if device not in book.granted.get(name, NO_NAMES) and principal.role is not Role.ADMIN:
            return False
        return book.standing.get(name) is principal or self.is_current(principal)

    def is_current(self, principal: Principal) -> bool:
        """Return whether the principal's account still is the one it logged in to."""
        standing = self._book.standing.get(principal.name)
        if standing is None or standing.role is not principal.role:
            return False
        return principal.epoch in (0, standing.epoch)

    def epoch(self, name: str) -> int:
        """Return the epoch of an account; 0 if there is no such account."""
        one = self._book.stored.get(name)
        return 0 if one is None else one.epoch

    def created_at(self, name: str) -> int:
        """Return the time at which an account was made; 0 if there is no such account."""
        one = self._book.stored.get(name)
        return 0 if one is None else one.created

    def freed_at(self, name: str) -> int:
        """Return the time at which an earlier account of this name was removed; 0 if there was none."""
        return self._book.after.get(name, 0)

    def was_another(self, name: str, at: int) -> bool:
        """Return whether what this name did at this time was done by an earlier account of the name."""
        return self.freed_at(name) > 0 and at < self.created_at(name)

    def allows(self, sender: str, device: str) -> bool:
        """Return whether the device exists and the sender of a command may still command it."""
        book = self._book
        standing = book.standing.get(sender)
        if standing is None or device not in book.stored:
            return False
        return standing.role is Role.ADMIN or device in book.granted.get(sender, NO_NAMES)

    def granted(self, app: str) -> frozenset[str]:
        """Return the devices that this app may command."""
        return self._book.granted.get(app, NO_NAMES)

    def apps_of(self, device: str) -> frozenset[str]:
        """Return the apps that may command this device, and so receive what it pushes."""
        return self._book.apps_of.get(device, NO_NAMES)

    def is_sent_once(self, device: str) -> bool:
        """Return whether a device has no memory of its own, so that each command is sent to it once."""
        return device in self._book.once

    def stored_role(self, name: str) -> Role | None:
        """Return the role of an account; None if there is no such account."""
        one = self._book.stored.get(name)
        return None if one is None else one.role

    def devices(self, most: int) -> Iterator[str]:
        """Yield the names of devices, so many at most, those that were added first."""
        stored = self._book.stored.items()
        return islice((name for name, one in stored if one.role is Role.DEVICE), most)

    def key_of(self, name: str) -> str:
        """Return the key of a device as the ledger keeps it; empty if the device need not sign."""
        one = self._book.stored.get(name)
        return "" if one is None else one.key
