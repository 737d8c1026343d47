"""Ends commands whose permission was revoked, or whose sender or device was removed and replaced.

The laws. A waiting command is cancelled. A command that was handed over ends as `unknown`: it may have taken
effect, and a late answer of its device settles it. An account that was removed and created again is a
different account: nothing that was under way for the old one continues, whatever the new one is allowed to
do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from duly.apps.gateway.admission import CommandAdmission
from duly.apps.gateway.remote_hubs import GatewayRemote
from duly.core.inbox import Inbox
from duly.core.messages import Message
from duly.core.steps import CancelMessages
from duly.identity.accounts import Accounts
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger

SETTLE_SECONDS: Final = 2.0
"""The longest time that the engine gets to report what it stored before a permission was revoked."""


class RevokedCommands:
    """Ends the commands of one gateway that must not continue."""

    def __init__(
        self,
        inbox: Inbox,
        engine: Engine,
        ledger: Ledger,
        accounts: Accounts,
        admission: CommandAdmission,
        remote: GatewayRemote,
    ) -> None:
        self._inbox = inbox
        self._engine = engine
        self._ledger = ledger
        self._accounts = accounts
        self._admission = admission
        self._remote = remote

    async def settle(self) -> None:
        """Wait until everything stored before this call is reported; only then is it seen as under way."""
        told = asyncio.Event()
        await self._engine.put(CancelMessages((), ""), told.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await told.wait()

    async def end(self) -> None:
        """End the commands that must not continue: those waiting at any hub, and those handed over here."""
        waiting = await self._remote.waiting_commands()
        await self._end([*waiting, *self._under_way("")])

    async def end_predecessors(self, device: str) -> None:
        """End commands that are left here for an earlier account of a device's name."""
        if self._accounts.freed_at(device):
            waiting = [one for one in self._inbox.waiting() if one.recipient == device]
            await self._end([*waiting, *self._under_way(device)])

    def _under_way(self, device: str) -> list[Message]:
        return [one.message for one in self._inbox.outbox.transmissions.to(device)]

    async def _end(self, messages: Iterable[Message]) -> None:
        for message in messages:
            reason = self._admission.forbidden(message) or await self._stranger(message)
            if reason is not None:
                await self._engine.put(CancelMessages((message,), reason, started=True))

    async def _stranger(self, message: Message) -> str | None:
        """Return why a command does not belong to the present accounts of its names, or None."""
        names = [name for name in (message.scope, message.recipient) if self._accounts.freed_at(name)]
        record = await self._ledger.find(message.key) if names else None
        for name in names:
            if record is not None and self._accounts.was_another(name, record.accepted_at):
                return f"{name} was removed, and the name is another account's now"
        return None
