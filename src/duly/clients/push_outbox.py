"""A device's pushes: kept until the hub has stored them.

The laws. A push has an id, and is kept in the device's own ledger (a file, if it has one) until the hub has
stored or refused it. Without a connection it waits; after a reconnect, and when no answer arrives, every
unacknowledged push is sent again, in order, and the hub stores it once. At most 64 pushes are unacknowledged
at a time, and a full backlog refuses further ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Final

from duly.clients.base import fail, offer, settle
from duly.clients.local_ledger import MINTED, minted_ids
from duly.core.backlog import Backlog, BacklogPolicy
from duly.core.flow_control import FlowWindow
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, VerdictKind, key_of
from duly.core.ordering import LanePolicy
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    Effect,
    Event,
    Reachable,
    Reply,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.units import DAY, FOREVER, SECOND
from duly.errors import DulyError, LedgerUnavailable, RateLimited, Refused, Stopped
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.frames import Frame, ServerCode

LOG: Final = logging.getLogger("duly.device")

CHANNEL: Final = "push"
HUB: Final = "hub"
OURS: Final = "push"
"""The scope of the device's own ids, in its own ledger."""
RESEND: Final = RetryPolicy.exponential(3 * SECOND, 60 * SECOND)
AHEAD: Final = FlowWindow(frames=64, bytes=512 * 1024)
KEPT: Final = BacklogPolicy()
HORIZON: Final = Horizon(keep=DAY, skew=36_500 * DAY)
"""The device's clock may be set while a push waits, so its own pushes are never too old or too new."""


class PushUnderWay:
    """A push under way. Await it to wait until the hub has stored it; it is sent in any case."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def stored(self) -> bool:
        """Whether the hub has stored it."""
        return self._stored.done() and not self._stored.cancelled() and self._stored.exception() is None

    def __await__(self) -> Generator[object, None, None]:
        return asyncio.shield(self._stored).__await__()

    def end(self, problem: DulyError | None = None) -> None:
        """Note that the hub has stored it, or the error that prevented it."""
        if problem is None:
            settle(self._stored, None)
        else:
            fail(self._stored, problem)


class PushOutbox:
    """The pushes of one device, in its ledger; `send` hands a frame to the connection."""

    def __init__(self, ledger: Ledger, send: Callable[[bytes], None]) -> None:
        self._ledger = ledger
        self._send = send
        self._backlog = Backlog(KEPT)
        self._inbox = Inbox(
            OutboxPolicy(CHANNEL, RESEND, patience=FOREVER),
            ledger.worker,
            lanes=LanePolicy(gated=True, ahead=AHEAD),
            horizon=lambda _: HORIZON,
            minted=MINTED,
            backlog=self._backlog,
        )
        self.engine = Engine(self._inbox, ledger, self._perform)
        self._under_way: dict[bytes, PushUnderWay] = {}

    @property
    def waiting(self) -> int:
        """How many pushes the hub has not acknowledged."""
        return self._inbox.live

    async def start(self) -> None:
        """Continue with what an earlier run left."""
        self._ids = await minted_ids(self._ledger)
        await self.engine.start()

    async def stop(self) -> None:
        """Store what was accepted; every caller that still waits gets `Stopped`."""
        await self.engine.stop()
        for push in self._under_way.values():
            push.end(Stopped("the device was closed before the hub had stored it"))

    def push(self, kind: str, data: object) -> PushUnderWay:
        """Store a push and send it. Raises `RateLimited` if too many are waiting."""
        now = self._ledger.clock.now()
        excess = self._backlog.excess(OURS, HUB)
        if excess is not None:
            raise RateLimited(f"{excess}: the hub is slow, or was not reached for long", SECOND)
        seq_id = self._ids.next(now)
        body = frames.encode(Frame(kind, str(seq_id), data=frames.dump(data)))
        frames.check(body)
        message = Message(OURS, str(seq_id), kind, HUB, body, order=Order("", Mode.REPLAY, seq_id.n))
        self.engine.offer(Arrived(message))
        push = self._under_way[message.key] = PushUnderWay(message.id)
        return push

    def up(self) -> None:
        """Note that a connection is up."""
        self._offer(Reachable(HUB))

    def down(self) -> None:
        """Note that the connection broke."""
        self._offer(Unreachable(HUB))

    def answered(self, frame: Frame) -> None:
        """Handle the hub's `server_ack`."""
        key = key_of(OURS, frame.seq_id or "")
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                self._offer(Answered(key, State.DONE, Answer(), burn=False))
            case ServerCode.INTERNAL | None:
                pass  # the resend tries again
            case code:
                why = Refused(code, frame.error or "", frame.detail or "")
                if self._inbox.is_live(key):
                    LOG.error("the hub refuses a push, and it is lost: %s", why)
                push = self._under_way.get(key)
                if push is not None:
                    push.end(why)
                self._offer(Answered(key, State.FAILED, Answer(code, b"", str(why)), burn=False))

    def _offer(self, event: Event) -> None:
        offer(self.engine, event)

    def _repeat(self, message: Message) -> None:
        """Send unacknowledged pushes again, in order. Only the timer of the first one counts: a push that is
        repeated alone would overtake earlier ones that were lost."""
        waiting = [one.message for one in self._inbox.outbox.transmissions.to(HUB)]
        if waiting and waiting[0].key == message.key:
            for each in waiting:
                self._send(each.body)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message, again=True):
                self._repeat(message)
            case Transmit(message=message):
                self._send(message.body)
            case ReportOutcome(key=key):
                push = self._under_way.pop(key, None)
                if push is not None:
                    push.end()
            case Reply(message=message, verdict=verdict) if verdict.kind not in (
                VerdictKind.FRESH,
                VerdictKind.DUPLICATE,
            ):
                LOG.error("a push could not be stored, and is lost: %s", verdict.reason)
                push = self._under_way.pop(message.key, None)
                if push is not None:
                    push.end(LedgerUnavailable(verdict.reason))
