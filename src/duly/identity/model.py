"""What an account is: its role, its row in the ledger, and the caller that it authenticates."""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256

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


def digest(token: str) -> bytes:
    """Return the SHA-256 of a token, which is all that is kept of it."""
    # A stranger may send any text, also text that UTF-8 cannot carry.
    return sha256(token.encode(errors="surrogatepass")).digest()
