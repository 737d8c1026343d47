"""Admission of commands: checks the form and age of a command, its device, its sender's permission, and the
backlog.

The law: a refused command may be sent again under the same id. A command for a device that is offline is
refused (code 1) unless it may wait (`queue`). Commands are refused while the backlog of their sender or their
device is full. Permission is checked twice: at admission, and again when the command is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import msgspec

from duly.apps.gateway.policy import GatewayPolicy
from duly.core.backlog import Backlog
from duly.core.horizon import Horizon
from duly.core.messages import Message, Mode, Order, Verdict, VerdictKind, parts_of
from duly.core.steps import Arrived
from duly.core.units import DAY, MINUTE, SECOND, show
from duly.errors import Malformed, NotAllowed, RateLimited, Stale
from duly.identity.accounts import Accounts, Principal
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame

CHUNK: Final = "media_download_chunk"
CHUNK_HORIZON: Final = Horizon(keep=10 * MINUTE)
"""How long requests for chunks are remembered. They only read, so they are remembered briefly and without
their data: a download of ten thousand chunks does not displace other messages."""
TRY_AGAIN: Final = 5 * SECOND
"""When a sender whose backlog is full may try again."""


class CommandAdmission:
    """Decides which commands one gateway accepts.

    `here` contains the devices connected to this hub; `online` also knows those at other hubs; `has_room`
    returns whether a device at this hub can take another command at once.
    """

    def __init__(
        self,
        policy: GatewayPolicy,
        accounts: Accounts,
        ledger: Ledger,
        *,
        here: Collection[str],
        online: Callable[[str], bool],
        has_room: Callable[[str], bool],
    ) -> None:
        timing = policy.timing
        self.refused_waiting = 0
        """commands refused because of a full backlog"""
        self.backlog = Backlog(policy.backlog)
        self._accounts = accounts
        self._ledger = ledger
        self._here = here
        self._online = online
        self._has_room = has_room
        self._horizon = timing.horizon()
        self._lasts = timing.lasts
        self._max_age = timing.max_age
        self._max_exp = policy.max_exp

    def horizon(self, kind: str) -> Horizon:
        """Return how long the ids of a kind are remembered."""
        return CHUNK_HORIZON if kind == CHUNK else self._horizon

    def expiry_of(self, frame: Frame, now: int) -> int:
        """Return the expiry of a command without `exp`: a day if it may wait, else half a minute.

        This expiry must not make an old command fresh again. So the day of a command that may wait starts at
        the time in its id; if the id has no time, no expiry is set, and the ledger remembers the id for ever.
        """
        if frame.seq_id is None or frame.exp is not None:
            return 0
        made, _, _, _ = parts_of(frame.seq_id)
        if not made:
            return 0
        return made + DAY if frame.queue else now + self._lasts

    def check(self, who: Principal, frame: Frame, message: Message) -> Message:
        """Return the message to admit. Raises an error if a command of this form cannot be accepted."""
        if message.made and message.made <= self._accounts.freed_at(who.name):
            raise Stale(
                f"this id is older than the account {who.name}, whose name was another's before; "
                "send it again with a new id, and check the clock"
            )
        if frame.exp is not None and message.expires > self._ledger.clock.now() + self._max_exp:
            raise Malformed(
                f"exp is more than {show(self._max_exp)} away; a command waits at most that long here "
                "(max_exp)"
            )
        if frame.queue and not message.expires:
            raise Malformed("a command that may wait needs exp, or an id that tells its age, like a seq_id")
        if message.kind == CHUNK and message.order is not None:
            return msgspec.structs.replace(message, order=Order("", Mode.ANY, message.order.n))
        return message

    def refuse(self, event: Arrived, now: int) -> Verdict | None:
        """Return why a new command is refused at the moment, or None."""
        message, recipient = event.message, event.message.recipient
        if message.made and message.made + self._max_age <= now and not event.patient:
            return Verdict(
                VerdictKind.STALE, reason="it is too old to be done now; send it again with a new id"
            )
        if event.patient or recipient in self._here or self._online(recipient):
            excess = self.excess(event) if self.backlog.waiting else None
            if excess is None:
                return None
            self.refused_waiting += 1
            return _too_much(excess)
        offline = f"{recipient} is offline; try later, or send it with queue"
        return Verdict(VerdictKind.REFUSED, reason=offline, cause="offline")

    def excess(self, event: Arrived) -> str | None:
        """Return why one more command may not wait here; None if it may, or need not wait."""
        recipient = event.message.recipient
        here = recipient in self._here
        if here and self._has_room(recipient):
            return None
        # A command for a device at another hub leaves at once, even if other commands of its sender wait.
        at_other_hub = not here and self._online(recipient)
        return self.backlog.excess(event.message.scope, recipient, of_sender=not at_other_hub)

    def forbidden(self, message: Message) -> str | None:
        """Return why an accepted command may no longer be handed over, or None."""
        sender, device, accounts = message.scope, message.recipient, self._accounts
        if accounts.allows(sender, device):
            return None
        for name in (device, sender):
            if accounts.stored_role(name) is None:
                return f"{name} was removed"
        return f"{sender} may no longer command {device}"

    def may_repeat(self, message: Message) -> bool:
        """Return whether a command may be handed over again: it is allowed, and sender and device are still
        the same accounts."""
        removed = max(map(self._accounts.freed_at, (message.scope, message.recipient)))
        return self.forbidden(message) is None and (not removed or message.made > removed)


def not_granted(app: str, device: str) -> NotAllowed:
    """Return the refusal of a command to a device that its sender may not control."""
    return NotAllowed(f"{app} may not command {device}; ask for a grant")


def _too_much(excess: str) -> Verdict:
    reason = f"{excess}; try again when some of them have ended"
    return Verdict(VerdictKind.REFUSED, reason=reason, cause=RateLimited.word, wait=TRY_AGAIN)
