"""Which account an MQTT client id belongs to.

The laws. A client id that is an account's name, or begins with that name and a dash, belongs to that account
for good: the longest such name decides. Any other id belongs to the account that used it first, for as long
as it is remembered: longer than a session, which the broker keeps through restarts. So an account can neither
end nor take over the session of another one. Memory is bounded per account: an account that uses many ids
loses its own oldest ones, never those of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

REMEMBERED: Final = 64
"""Client ids remembered per account, besides those that begin with its name."""


class ClientIds:
    """The owners of MQTT client ids; `exists` returns whether an account exists.

    >>> ids = ClientIds({"lock", "lamp"}.__contains__)
    >>> [ids.owner(client_id, "lamp") for client_id in ("lamp", "lock", "lock-1f", "esp32")]
    ['lamp', 'lock', 'lock', 'lamp']
    >>> ids.owner("esp32", "lock")
    'lamp'
    """

    def __init__(self, exists: Callable[[str], bool], remembered: int = REMEMBERED) -> None:
        self._exists = exists
        self._remembered = remembered
        self._owners: dict[str, str] = {}
        self._used: dict[str, OrderedDict[str, None]] = {}
        """by account: the ids it owns because it used them first, oldest use first"""
        self.changed = False
        """an id has changed its owner since this was set to False"""

    def restore(self, used: Mapping[str, Iterable[str]]) -> None:
        """Restore what `used` returned."""
        for user, client_ids in used.items():
            for client_id in client_ids:
                if self._owners.get(client_id, user) == user:
                    self._keep(client_id, user)
        self.changed = False

    def used(self) -> dict[str, list[str]]:
        """Return by account the ids that do not begin with its name, oldest use first."""
        return {user: list(client_ids) for user, client_ids in self._used.items()}

    def owner(self, client_id: str, user: str) -> str:
        """Return the account that owns a client id. An id without an owner becomes this user's."""
        named = self._named(client_id, user)
        if named:
            return named
        owner = self._owners.get(client_id)
        if owner is None or not self._exists(owner):
            owner = user
        if owner == user:
            self._keep(client_id, user)
        return owner

    def find(self, client_id: str, former: Collection[str] = ()) -> str:
        """Return the account that owns, or owned, a client id; `former` are names of removed accounts.
        Returns an empty string if there is none."""
        name = client_id
        while name:
            if self._exists(name) or name in former:
                return name
            name, _, _ = name.rpartition("-")
        return self._owners.get(client_id, "")

    def is_inherited(self, client_id: str, user: str) -> bool:
        """Return whether another account has used an id that is this user's by name, because it did so before
        this account existed."""
        return self._owners.get(client_id, user) != user

    def release(self, client_id: str) -> None:
        """Forget which account used an id."""
        owner = self._owners.pop(client_id, None)
        if owner is not None:
            self._used[owner].pop(client_id, None)
            self.changed = True

    def forget(self, user: str) -> None:
        """Free the ids of a removed account."""
        self.changed |= user in self._used
        for client_id in self._used.pop(user, ()):
            if self._owners.get(client_id) == user:
                del self._owners[client_id]

    def _named(self, client_id: str, user: str) -> str:
        name = client_id
        while name:
            if name == user or self._exists(name):
                return name
            name, _, _ = name.rpartition("-")
        return ""

    def _keep(self, client_id: str, user: str) -> None:
        used = self._used.setdefault(user, OrderedDict())
        self.changed |= self._owners.get(client_id) != user
        used[client_id] = None
        used.move_to_end(client_id)
        self._owners[client_id] = user
        if len(used) > self._remembered:
            oldest, _ = used.popitem(last=False)
            if self._owners.get(oldest) == user:
                del self._owners[oldest]
