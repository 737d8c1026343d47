"""Accounts and grants in memory, indexed by name and by token."""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256
from typing import Final

from msgspec import Struct


class Role(StrEnum):
    """The kind of an account: it decides what the account may do."""

    APP = "app"
    DEVICE = "device"
    NODE = "node"
    USER = "user"
    SENTINEL = "sentinel"
    ADMIN = "admin"
    MONITOR = "monitor"
    """a program that reads metrics, and nothing else"""

    @property
    def with_article(self) -> str:
        """The role as a sentence names it.

        >>> Role.APP.with_article, Role.DEVICE.with_article
        ('an app', 'a device')
        """
        return f"{'an' if self.value[0] in 'aeio' else 'a'} {self.value}"


class Principal(Struct, frozen=True):
    """An authenticated caller."""

    name: str
    role: Role
    device: str = ""
    """which of a person's logins this is; empty for other roles"""
    epoch: int = 0
    """the epoch of the account at the login; 0 stands for any account of this name"""
    login: str = ""
    """the name of a person's session in its bucket; empty for other roles"""


class StoredAccount(Struct, frozen=True):
    """An account as the ledger keeps it, under its name."""

    role: Role
    token: str
    """the token's SHA-256, in hex"""
    created: int
    once: bool = False
    """whether each command is sent once, since the device has no memory of its own"""
    password: str = ""
    """the argon2id of a person's password; a person has a token for each login instead of one of the
    account"""
    key: str = ""
    """the key with which a device signs what it sends over MQTT, a shared one encrypted; empty if it need not
    sign"""
    voided: int = 0
    """the present epoch; 0 as long as the first one lasts"""
    after: int = 0
    """when the last account of this name was removed; 0 if there was none"""

    @property
    def epoch(self) -> int:
        """The number that changes whenever all earlier logins of the account become void."""
        return self.voided or self.created


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

    def grants_of(self, name: str) -> set[tuple[str, str]]:
        """The grants in which this name occurs."""
        left = {grant for grant in self.dangling if name in grant}
        left |= {(name, device) for device in self.granted.get(name, NO_NAMES)}
        return left | {(app, name) for app in self.apps_of.get(name, NO_NAMES)}


def digest(token: str) -> bytes:
    """The SHA-256 of a token, which is all that is kept of it."""
    # A stranger may send any text, also text that UTF-8 cannot carry.
    return sha256(token.encode(errors="surrogatepass")).digest()
