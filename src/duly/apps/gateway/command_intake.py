"""Takes commands from apps: limits, grants and the backlog are looked at before the engine gets a command.

The laws. A command beyond its sender's limit is looked up: a repeat only gets its answer. A grant that is
unknown here is looked up in the ledger before the command is refused, and a device that is unknown here at
the other hubs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from contextlib import suppress
from typing import Final

from duly.apps.gateway.admission import CommandAdmission, not_granted
from duly.apps.gateway.device_answers import put_later
from duly.apps.gateway.remote_hubs import GatewayRemote
from duly.core.account_limits import AccountLimit, CountedBytes
from duly.core.inbox import Inbox
from duly.core.messages import Message
from duly.core.steps import Arrived
from duly.errors import Overloaded, RateLimited, SenderError
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.engine import Engine
from duly.runtime.limited_repeats import LimitedRepeats
from duly.runtime.tracing import CommandTraces
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.frames import Frame
from duly.wire.session import Session

SLOW_SECONDS: Final = 1.0
"""The longest time, in seconds, that a sender waits for an answer while the backlog is full."""
_DEVICE: Final = Role.DEVICE  # reading a member from its class takes nine times as long


class CommandIntake:
    """The way of a command from its sender to the engine of one gateway; `here` are the devices connected to
    this hub."""

    def __init__(
        self,
        inbox: Inbox,
        engine: Engine,
        ledger: Ledger,
        accounts: Accounts,
        admission: CommandAdmission,
        limit: AccountLimit,
        counted: CountedBytes,
        remote: GatewayRemote,
        traces: CommandTraces,
        trail: Trail,
        here: Collection[str],
    ) -> None:
        self._inbox = inbox
        self._engine = engine
        self._ledger = ledger
        self._accounts = accounts
        self._admission = admission
        self._limit = limit
        self._counted = counted
        self._repeats = LimitedRepeats(ledger)
        self._remote = remote
        self._traces = traces
        self._trail = trail
        self._here = here

    def submit(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Take a command. Its `server_ack`, and later its `ack`, are pushed to the session."""
        now = self._ledger.clock.now()
        message = frames.message_of(frame, who.name, self._admission.expiry_of(frame, now))
        if who.role is _DEVICE:
            raise not_granted(who.name, message.recipient)
        if not self._inbox.is_live(message.key):
            refusal = self._limit.excess(who.name, len(message.body), now)
            if refusal is not None:
                return self._take_repeat(session, who, frame, message, refusal)
            self._counted.begin(message.key, len(message.body))
        if not self._accounts.may(who, message.recipient):
            return self._find_grant(session, who, frame, message)
        return self._admit(session, who, frame, message)

    async def _take_repeat(
        self, session: Session, who: Principal, frame: Frame, message: Message, refusal: RateLimited
    ) -> bool:
        """Take a command beyond its sender's limit if it is a repeat, which only gets an answer; otherwise
        raise the refusal."""
        if not await self._repeats.is_repeat(who.name, message.id):
            raise self._limit.refuse(who.name, refusal)
        return await self._find_grant(session, who, frame, message)

    async def _find_grant(self, session: Session, who: Principal, frame: Frame, message: Message) -> bool:
        """Look up a grant that another hub may have made a moment ago, and take the command if there is
        one."""
        if not await self._accounts.find_grant(who, message.recipient):
            self._counted.end(message.key, who.name, stored=False)
            raise not_granted(who.name, message.recipient)
        said = self._admit(session, who, frame, message)
        return said if isinstance(said, bool) else await said

    def _admit(
        self, session: Session, who: Principal, frame: Frame, message: Message
    ) -> bool | Awaitable[bool]:
        try:
            message = self._admission.check(who, frame, message)
        except SenderError:
            self._counted.end(message.key, who.name, stored=False)
            raise
        recipient, patient = message.recipient, frame.queue
        if frame.traceparent is not None and self._traces.arrived(
            message.key, frame.traceparent, message.scope, message.id, message.kind, recipient
        ):
            self._trail.note(message.key, "trace", detail=frame.traceparent)
        event = Arrived(message, session, patient, self._accounts.proof(who, recipient))
        if recipient not in self._here and not (patient or self._remote.holds(recipient)):
            search = self._remote.search(recipient)
            if search is not None:
                return self._take_after(search, event)
        if self._inbox.backlog.waiting and self._admission.excess(event) is not None:
            return self._take_slowly(event)
        try:
            self._engine.offer(event)
        except Overloaded:
            return put_later(self._engine, event, True)
        return True

    async def _take_after(self, search: Awaitable[bool], event: Arrived) -> bool:
        """Take a command once it is known whether its device is at another hub."""
        await search
        await self._engine.put(event)
        return True

    async def _take_slowly(self, event: Arrived) -> bool:
        """Take a command while the backlog is full; return only when the refusal is stored, or after
        `SLOW_SECONDS`, so that its sender is slowed down."""
        stored = asyncio.Event()
        await self._engine.put(event, stored.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_SECONDS):
                await stored.wait()
        return True
