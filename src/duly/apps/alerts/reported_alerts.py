"""Alerts that sentinels report: checks and dates each one, counts it against its sentinel's limit, and hands
it to the engine.

An alert is never refused for its time: one without a plausible time is dated by its arrival. A critical alert
is refused for its rate only after people were notified of that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from duly.apps.alerts.configuration import AlertConfiguration
from duly.apps.alerts.limited_alerts import LimitedAlerts
from duly.apps.alerts.model import read_event, set_age, time_of_arrival
from duly.apps.alerts.planner import AlertPlanner
from duly.apps.alerts.replies import AlertReplies
from duly.core.fanout.plan import FanoutCounts
from duly.core.messages import Message
from duly.core.monitor.event_times import is_believable
from duly.core.monitor.signals import EVENT, Severity
from duly.core.steps import Arrived, Reply
from duly.core.units import MS
from duly.errors import NotAllowed, Overloaded, RateLimited, SenderError
from duly.identity.accounts import Principal
from duly.runtime.engine import Engine
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame
from duly.wire.session import Session


class ReportedAlerts:
    """Accepts the alerts of sentinels at one tower. `taken` is called with each that was accepted."""

    def __init__(
        self,
        ledger: Ledger,
        configuration: AlertConfiguration,
        planner: AlertPlanner,
        limited: LimitedAlerts,
        replies: AlertReplies,
        trail: Trail,
        engine: Engine,
        counts: FanoutCounts,
        taken: Callable[[Message], None],
    ) -> None:
        self._ledger = ledger
        self._configuration = configuration
        self._planner = planner
        self._limited = limited
        self._replies = replies
        self._trail = trail
        self._engine = engine
        self._counts = counts
        self._taken = taken

    def take(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Accept an alert; return whether it is answered. It is handled at once if its profile is known and
        the engine has room for it."""
        now = self._ledger.clock.now()
        message = self._message(who, frame, now)
        if not self._repeated(message, session, now):
            event = Arrived(message, session)
            refusal = self._limited.excess(who.name, len(message.body), now)
            if refusal is not None:
                return self._take_excess(event, refusal)
            if not self._configuration.is_sure_of_profile(message.recipient):
                return self._take_counted(event)
            try:
                self._engine.offer(event)
            except Overloaded:
                return self._take_later(event)
        self._taken(message)
        return True

    async def _take_excess(self, event: Arrived, refusal: RateLimited) -> bool:
        """Accept an alert beyond the limit if it is a repeat or critical; before a critical one is refused,
        people are notified."""
        message = event.message
        if not await self._limited.is_refused(message.scope, message.id, refusal):
            return await self._take_later(event)
        if read_event(message.body).severity is not Severity.CRITICAL:
            raise refusal
        await self._configuration.check_profile(message)
        now = self._ledger.clock.now()
        try:
            self._limited.take_reserve(message.scope, len(message.body), now, refusal)
        except RateLimited:
            await self._limited.tell(message.scope, message.recipient, str(refusal), now)
            raise
        return await self._take_later(event)

    async def _take_counted(self, event: Arrived) -> bool:
        """Accept an alert that was counted; if it is refused, its bytes are given back."""
        try:
            return await self._take_later(event)
        except SenderError:
            self._limited.give_back(event.message.scope, len(event.message.body))
            raise

    async def _take_later(self, event: Arrived) -> bool:
        """Accept an alert after the ledger was asked for its profile and the engine has room for it."""
        await self._configuration.check_profile(event.message)
        await self._engine.put(event)
        self._taken(event.message)
        return True

    def _repeated(self, message: Message, session: Session, now: int) -> bool:
        """Answer a repeat of an ended alert from memory, if it is known there, without the engine."""
        known = self._ledger.recall(message, now)
        if known is None or known.state is None or not known.state.terminal:
            return False
        self._counts.duplicates += 1
        self._replies.reply(Reply(session, message, known))
        return True

    def _message(self, who: Principal, frame: Frame, now: int) -> Message:
        body = bytes(frame.data)
        event = read_event(body)
        if event.sentinel_id not in (None, who.name):
            raise NotAllowed(f"{who.name} may not report for another sentinel")
        offset = event.offset_ms or 0
        at = ((event.timestamp or frame.time or 0) + offset) * MS
        expires = (frame.exp and max(1, frame.exp + offset) * MS) or 0
        if event.offset_ms is not None:
            self._trail.skewed(offset / 1000)
        if event.undated or not is_believable(at, now):
            at, expires = time_of_arrival(now), 0
        message = Message(who.name, str(frame.seq_id), EVENT, event.profile_id, body, at, expires)
        self._planner.expect(set_age(message, at), event)
        return message
