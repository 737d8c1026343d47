"""A guest in worlds of several hubs: an app that loses its grant at one hub while it commands through all.

Its account and its grant are production accounts, in the ledger that the hubs share; each hub has its own
memory of them. Everything else in these worlds may command everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from duly.core import operations as w
from duly.core.messages import Message, Verdict
from duly.core.units import MS
from duly.errors import DulyError
from duly.identity.account_directory import GRANTS, PRINCIPALS, grant_name
from duly.identity.accounts import Accounts, Principal, Role
from duly.identity.model import StoredAccount
from duly.testing.sim.checkers import Finding
from duly.testing.sim.gateway import LAMP, WANTED, OpenAccounts
from duly.testing.sim.world import BUSY, WantedMessage, World
from duly.transports.http.frame_batches import FrameBatch
from duly.wire import frames
from duly.wire.frames import Frame

if TYPE_CHECKING:
    from duly.storage.ledger import Ledger
    from duly.storage.memory import Disk
    from duly.testing.sim.multi_hub import MultiHub, MultiHubWorld

GUEST: Final = "guest"
DEVICE: Final = "dev0"
COMMANDS: Final = 10
"""The number of commands of the guest while it has its grant, and again when it has not."""


class GuestAccounts(OpenAccounts):
    """Accounts in which only the guest needs a grant."""

    def __init__(self, devices: list[str], apps: list[str], ledger: Ledger) -> None:
        super().__init__(devices, apps)
        self.shared = Accounts(ledger)

    def may(self, principal: Principal, device: str) -> bool:
        """Return whether the guest's stored grant allows it; other accounts always may."""
        return principal.name != GUEST or self.shared.may(principal, device)

    def allows(self, sender: str, device: str) -> bool:
        """Return whether the guest's stored grant allows it; other senders are always allowed."""
        return sender != GUEST or self.shared.allows(sender, device)

    def stored_role(self, name: str) -> Role | None:
        """Return the guest's role as stored in the ledger; the roles of the others are fixed."""
        return self.shared.stored_role(name) if name == GUEST else super().stored_role(name)

    def proof(self, principal: Principal, device: str = "") -> tuple[w.CheckItem, ...]:
        """Return the checks of the guest's grant at a commit; none for other accounts."""
        return self.shared.proof(principal, device) if principal.name == GUEST else ()

    async def find_grant(self, principal: Principal, device: str) -> bool:
        """Look the guest's grant up in the ledger; other accounts always have one."""
        return principal.name != GUEST or await self.shared.find_grant(principal, device)


def admit_guest(disk: Disk) -> None:
    """Write the guest's account and grant, once."""
    if PRINCIPALS not in disk.buckets:
        accounts = {GUEST: StoredAccount(Role.APP, "", 0), DEVICE: StoredAccount(Role.DEVICE, "", 0)}
        disk.buckets[PRINCIPALS] = {name: msgspec.json.encode(one) for name, one in accounts.items()}
        disk.buckets[GRANTS] = {grant_name(GUEST, DEVICE): b""}


class GuestVisit:
    """The guest of one world: it commands, loses its grant, and goes on commanding."""

    def __init__(self, world: MultiHubWorld) -> None:
        self._world = world
        self._rng = Random(f"guest {world.plan.seed}")
        self._n = 0

    def schedule(self) -> None:
        """Schedule the guest's commands, and when its grant is revoked."""
        later, draw = self._world.loop.call_later, self._rng.random
        for _ in range(COMMANDS):
            later(draw() * BUSY, self._command)
        later(5 + draw() * (BUSY - 10), self._revoke)

    def revoked(self) -> None:
        """Called when the revocation is committed, a moment before other hubs learn of it."""
        for _ in range(COMMANDS):
            self._world.loop.call_later(self._rng.random() ** 2, self._command)

    def _hub(self) -> MultiHub | None:
        ready = [hub for hub in self._world.hubs() if hub.ready]
        return self._rng.choice(ready) if ready else None

    def _command(self) -> None:
        hub = self._hub()
        if hub is None:
            return
        self._n += 1
        id_ = f"{hub.clock.now() // MS}_{self._n}"
        message = Message(GUEST, id_, LAMP, DEVICE, WANTED)
        self._world.log.wanted[message.key] = WantedMessage(message, 0, self._n)
        self._world.log.note(GUEST, f"commands through {hub.name}", message.key)
        (session,) = FrameBatch(1).waiters
        hub.hear(session, GUEST, frames.encode(Frame(LAMP, id_, DEVICE, data=frames.raw(WANTED))))

    def _revoke(self) -> None:
        hub = self._hub()
        if hub is not None:
            self._world.log.note(hub.name, "revokes the guest's grant")
            hub.spawn(_revoke(hub.guests))


async def _revoke(accounts: GuestAccounts) -> None:
    with suppress(DulyError):
        await accounts.shared.revoke(GUEST, DEVICE)


def revoked_is_refused(world: World) -> Iterator[Finding]:
    """After a grant was revoked at one hub, no hub admits a command that needs it. A device may still get
    what was handed over before."""
    revoked = False
    for name, write, result in world.log.commits:
        match write, result:
            case w.DropItem(bucket=bucket), True if bucket == GRANTS:
                revoked = True
            case w.Admit(message=message), Verdict() as verdict if message.scope == GUEST:
                if revoked and verdict.fresh and name == "hub":
                    yield f"{name} admitted it after its grant had been revoked", message.key
