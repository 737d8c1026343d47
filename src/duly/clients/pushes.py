"""What a device tells the apps: kept until the hub has stored it.

The laws. A push has an id, and is kept in the device's own ledger (a file, if it has one) until the hub says
that it is stored, or will never be. While there is no connection it waits; after a reconnect what was not
acknowledged is sent again, in order, and the hub stores it once. Only so much goes ahead of the hub's
acknowledgements, and only so much is kept: who pushes more is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Any, Final

from duly.clients.local_ledger import MINTED, minted_ids
from duly.core.backlog import Backlog, BacklogPolicy
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Word, key_of
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
from duly.core.window import Window
from duly.errors import DulyError, LedgerUnavailable, RateLimited, Refused, Stopped
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.frames import Frame, ServerCode

LOG: Final = logging.getLogger("duly.device")

CHANNEL: Final = "push"
HUB: Final = "hub"
OURS: Final = "push"
"""The scope of our own ids, in our own ledger."""
RESEND: Final = RetryPolicy.exponential(3 * SECOND, 60 * SECOND)
AHEAD: Final = Window(frames=64, bytes=512 * 1024)
KEPT: Final = BacklogPolicy()
HORIZON: Final = Horizon(keep=DAY, skew=36_500 * DAY)
"""Our own clock may be set while a push waits; what is ours is never too old or too new."""


class PushUnderWay:
    """A push that was handed over. Await it to wait until the hub has stored it; it is sent all the same."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def stored(self) -> bool:
        """Whether the hub has it."""
        return self._stored.done() and not self._stored.cancelled() and self._stored.exception() is None

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._stored).__await__()

    def _end(self, problem: DulyError | None = None) -> None:
        if self._stored.done():
            return
        if problem is None:
            self._stored.set_result(None)
        else:
            self._stored.set_exception(problem)
            self._stored.exception()  # who awaits it hears it; nobody has to


class PushOutbox:
    """Those of one device, on its ledger; `send` hands a frame to the connection."""

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
        """How many the hub has not acknowledged."""
        return self._inbox.live

    async def start(self) -> None:
        self._ids = await minted_ids(self._ledger)
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        for push in self._under_way.values():
            push._end(Stopped("the device was closed before the hub had stored it"))

    def push(self, kind: str, data: object) -> PushUnderWay:
        """Keep a push and send it; raises if it cannot be kept."""
        now = self._ledger.clock.now()
        excess = self._backlog.excess(OURS, HUB)
        if excess is not None:
            raise RateLimited(f"{excess}: the hub has not been reached for long, or is slow", SECOND)
        seq_id = self._ids.next(now)
        body = frames.encode(Frame(kind, str(seq_id), data=frames.dump(data)))
        frames.check(body)
        message = Message(OURS, str(seq_id), kind, HUB, body, order=Order("", Mode.REPLAY, seq_id.n))
        self.engine.offer(Arrived(message))
        push = self._under_way[message.key] = PushUnderWay(message.id)
        return push

    def up(self) -> None:
        """There is a connection."""
        self._offer(Reachable(HUB))

    def down(self) -> None:
        """There is none any more."""
        self._offer(Unreachable(HUB))

    def answered(self, frame: Frame) -> None:
        """The hub's `server_ack`."""
        assert frame.seq_id is not None
        key = key_of(OURS, frame.seq_id)
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                self._offer(Answered(key, State.DONE, Answer(), burn=False))
            case ServerCode.INTERNAL | None:
                pass  # try again: the resend does
            case code:
                why = Refused(code, frame.error or "", frame.detail or "")
                if self._inbox.is_live(key):
                    LOG.error("the hub does not take a push, and it is lost: %s", why)
                push = self._under_way.get(key)
                if push is not None:
                    push._end(why)
                self._offer(Answered(key, State.FAILED, Answer(code, b"", str(why)), burn=False))

    def _offer(self, event: Event) -> None:
        try:
            self.engine.offer(event)
        except DulyError:
            return  # we are stopping, or full: the hub is asked again

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                self._send(message.body)
            case ReportOutcome(key=key):
                push = self._under_way.pop(key, None)
                if push is not None:
                    push._end()
            case Reply(message=message, verdict=verdict) if verdict.word not in (Word.FRESH, Word.DUPLICATE):
                LOG.error("a push could not be kept, and is lost: %s", verdict.reason)
                push = self._under_way.pop(message.key, None)
                if push is not None:
                    push._end(LedgerUnavailable(verdict.reason))
