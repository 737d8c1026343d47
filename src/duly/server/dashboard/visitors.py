"""The visitors of the dashboard and their roles.

A viewer sees, an operator also acts on messages, devices and alerts, an admin also sees the audit chain and
ends the sessions of others. The roles are ordered: what one may do, the next one may, too.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from duly.errors import Malformed, NotAllowed
from duly.identity.model import Principal


class DashboardRole(IntEnum):
    """The roles, each with more rights than the one before."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """Its name in JSON and on the command line."""
        return self.name.lower()

    @classmethod
    def named(cls, word: str) -> DashboardRole:
        """Return the role of this name; raises `Malformed` if there is none."""
        for role in cls:
            if role.word == word:
                return role
        raise Malformed(f"{word[:40]!r} is not a role; use one of {', '.join(role.word for role in cls)}")


class DashboardVisitor(Struct, frozen=True):
    """An authenticated visitor. `session` names the session by its hash; it is empty for a request with an
    admin's token, whose account is `account` (None for the token of the data folder)."""

    name: str
    role: DashboardRole
    session: str = ""
    expires: int = 0
    account: Principal | None = None

    def need(self, role: DashboardRole) -> None:
        """Raise `NotAllowed` if the visitor may do less than this role."""
        if self.role < role:
            raise NotAllowed(f"{self.name} has the role {self.role.word}; this needs {role.word}")
