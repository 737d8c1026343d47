"""Accounts and grants in memory, arranged for asking."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class Role(StrEnum):
    """What kind of principal it is."""

    APP = "app"
    DEVICE = "device"
    NODE = "node"
    USER = "user"
    SENTINEL = "sentinel"
    ADMIN = "admin"


class Principal(Struct, frozen=True):
    """Somebody who has shown who they are."""

    name: str
    role: Role
    device: str = ""
    """which of their logins, for people who have several"""
    epoch: int = 0
    """the account's when they showed it; 0 stands for whoever has the name"""
    login: str = ""
    """the name of their session on its bucket, for people who logged in"""


class StoredAccount(Struct, frozen=True):
    """An account as the ledger keeps it, under its name."""

    role: Role
    token: str
    """the token's SHA-256, in hex"""
    created: int
    disabled: bool = False
    once: bool = False
    """a device without a memory of its own: it is sent each command once"""
    password: str = ""
    """the argon2id of a person's password; they have no token of their own, but one for each login"""
    key: str = ""
    """the public key with which a device signs what it says over MQTT; empty: it need not"""
    voided: int = 0
    """the epoch, once what was shown at first has become void"""
    after: int = 0
    """when the last account of this name was removed; 0 if there was none"""

    @property
    def epoch(self) -> int:
        return self.voided or self.created


NO_NAMES: Final[frozenset[str]] = frozenset()


class AccountBook:
    """Principals and grants, arranged for asking."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredAccount] = {}
        self.bodies: dict[str, bytes] = {}
        """as they lie on the bucket"""
        self.after: dict[str, int] = {}
        """when the predecessors of those accounts were removed whose names were somebody else's before"""
        self.standing: dict[str, Principal] = {}
        self.by_token: dict[bytes, Principal] = {}
        self.granted: dict[str, frozenset[str]] = {}
        self.apps_of: dict[str, frozenset[str]] = {}
        self.once: set[str] = set()
        self.dangling: set[tuple[str, str]] = set()
        """grants of which one side is not there: of no effect"""

    def subscriber(self, name: str, one: StoredAccount, body: bytes) -> None:
        self.unsubscribe(name)
        self.stored[name], self.bodies[name] = one, body
        if one.after:
            self.after[name] = one.after
        if one.once:
            self.once.add(name)
        if not one.disabled:
            self.standing[name] = who = Principal(name, one.role, epoch=one.epoch)
            if one.token:
                self.by_token[bytes.fromhex(one.token)] = who

    def unsubscribe(self, name: str) -> None:
        old = self.stored.pop(name, None)
        self.once.discard(name)
        if old is not None:
            self.by_token.pop(bytes.fromhex(old.token), None)
            self.standing.pop(name, None)
            self.bodies.pop(name, None)
            self.after.pop(name, None)

    def link(self, app: str, device: str) -> None:
        one, other = self.stored.get(app), self.stored.get(device)
        if one is None or other is None or one.role is not Role.APP or other.role is not Role.DEVICE:
            self.dangling.add((app, device))
            return
        self.granted[app] = self.granted.get(app, NO_NAMES) | {device}
        self.apps_of[device] = self.apps_of.get(device, NO_NAMES) | {app}

    def unlink(self, app: str, device: str) -> None:
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
