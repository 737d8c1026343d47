"""The accounts of the hub as users of its embedded broker.

The accounts of the ledger are the only users, checked at every connect. A device or node logs in with its
token as the password; devices and nodes are in two accounts of the broker that share nothing. The hub logs
in with a password that is made anew at every start, and under a client id that only the hub knows.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from duly.broker import acl_dialects
from duly.broker.acl_dialects import BrokerUser
from duly.broker.clients import BrokerRefusal, Users
from duly.core.acl import HUB
from duly.errors import DulyError, NotAllowed, NotAuthenticated
from duly.identity.accounts import Accounts, Role
from duly.runtime.files import write_private
from duly.runtime.refusal_tally import RefusalTally
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire.fd import PREFIX

NAMED_DEVICES: Final = 1_000
"""The devices whose topics a node is refused by name, so that the refusal is recorded; what it publishes to
others' is dropped all the same. They are those that there are when it connects."""
_CLIENT_ID: Final = re.compile(r".+-[0-9a-f]{12}")


class HubUsers(Users):
    """The devices and nodes among the accounts of a hub, and the hub itself."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.hub_password = secrets.token_urlsafe(32)

    def exists(self, name: str) -> bool:
        """Return whether the name is the hub's own or that of a stored device or node."""
        return name == HUB or self._accounts.stored_role(name) in (Role.DEVICE, Role.NODE)

    def has_left(self, name: str) -> bool:
        """Return whether the account was removed, or the name now belongs to a newer account."""
        return self._accounts.stored_role(name) is None or self._accounts.freed_at(name) > 0

    def created_at(self, name: str) -> int:
        """Return when the account was made, in microseconds; 0 if that is not known."""
        return self._accounts.created_at(name)

    async def admit(self, username: str, password: str) -> BrokerUser:
        """Return the user with this name and token, by what the ledger holds now."""
        if username == HUB:
            if secrets.compare_digest(password.encode(errors="replace"), self.hub_password.encode()):
                return acl_dialects.hub(HUB)
            raise NotAuthenticated("only the hub itself logs in as 'hub'")
        who = await self._accounts.identify(password)
        if who is None or who.name != username:
            raise NotAuthenticated(f"the password is not the token of {username!r}; 'duly add' makes one")
        if who.role is Role.DEVICE:
            return acl_dialects.device(username)
        if who.role is Role.NODE:
            # No one reads this in the account of the nodes. A refusal is recorded; silence would not be.
            devices = (f"{PREFIX}/{name}/pending" for name in self._accounts.devices(NAMED_DEVICES))
            return replace(acl_dialects.node(username), denied=(f"{PREFIX}/{HUB}/+", *devices))
        raise NotAllowed(
            f"{username} is neither a device nor a node; {who.role.with_article} uses the hub's HTTP port"
        )


async def own_session(folder: Path, address: BrokerAddress, *, embedded: bool) -> BrokerAddress:
    """Return the address with the client id of this hub's session: its own, secret, and stored in the data
    folder.

    It is secret since a client that knows it could take the session over at a broker that does not bind
    client ids to users. It is stored since a broker keeps messages for a session that comes back, and
    would keep them for ever for one that does not. For the same reason the session under the client id of
    an older duly is ended."""
    path, username = folder / "client_id", address.username or HUB
    kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if _CLIENT_ID.fullmatch(kept) and kept.startswith(f"{username}-"):
        return replace(address, client_id=kept)
    before = kept or (HUB if embedded else "")
    if before:
        with suppress(DulyError):  # a broker that cannot be reached keeps the session
            await end_session(replace(address, client_id=before))
    fresh = f"{username}-{secrets.token_hex(6)}"
    write_private(path, fresh.encode())
    return replace(address, client_id=fresh)


def second_session(address: BrokerAddress) -> BrokerAddress:
    """Return the address with the client id of this hub's second session, as secret as the first."""
    digest = blake2b(address.client_id.encode(), digest_size=4).hexdigest()
    return replace(address, client_id=f"{address.client_id}-{digest}")


async def end_session(address: BrokerAddress) -> None:
    """Connect once under this client id, with a session that ends with the connection. Raises if the broker
    does not let us."""
    link = MqttLink(address, lambda topic, payload, old, ack: ack(), clean=True)
    await link.start()
    try:
        await link.connected()
    finally:
        await link.stop()


def record(refusals: RefusalTally, refused: BrokerRefusal) -> None:
    """Record an attempt that the broker has refused, under the name of the account."""
    known = refused.word not in (NotAuthenticated.word, "")
    scope = refused.user if known and refused.user else HUB
    refusals.note(scope, refused.topic or f"mqtt {refused.act}", refused.word, refused.reason)
