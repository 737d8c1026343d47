"""Ends commands that lost their permission, or whose sender or device is another account by now.

The laws. A command that waits is cancelled. One that was handed over ends as `unknown`: it may have taken
effect, and an answer that its device still gives settles it. A name that was removed and given again is
another account: nothing that was under way for the account before goes on, whatever the new one may do.
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
"""How long the engine is given at most to tell what it has stored before a permission was taken back."""


class RevokedCommands:
    """The commands of one gateway that must not go on."""

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
        """Wait until what was stored before this call is told: only then is it seen as under way."""
        told = asyncio.Event()
        await self._engine.put(CancelMessages((), ""), told.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await told.wait()

    async def end(self) -> None:
        """End what must not go on: what waits at any hub, and what was handed over here."""
        waiting = await self._remote.waiting_commands()
        await self._end([*waiting, *self._under_way("")])

    async def end_predecessors(self, device: str) -> None:
        """End what is left here for an earlier account of a device's name."""
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
        """Why a command is not that of the accounts that have its names now; None if it is."""
        names = [name for name in (message.scope, message.recipient) if self._accounts.freed_at(name)]
        record = await self._ledger.find(message.key) if names else None
        for name in names:
            if record is not None and self._accounts.was_another(name, record.accepted_at):
                return f"{name} was removed, and the name is another account's now"
        return None
