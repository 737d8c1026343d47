"""Replies: the tower's answers to a sentinel about its alerts.

An alert that its profile only lists ends as soon as it is stored, so its sentinel gets both answers at once.
"""

from __future__ import annotations

from typing import Final, cast

from msgspec import structs

from duly.apps.alerts.model import is_undated
from duly.core.lifecycle import State
from duly.core.messages import Answer, VerdictKind, names_in
from duly.core.monitor.signals import EVENT
from duly.core.steps import Reply
from duly.core.units import MS
from duly.runtime.activity_log import ActivityLog
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger
from duly.wire import outgoing
from duly.wire.session import Session

UNDATED: Final = (
    "its time cannot be right, so it has the time of its arrival; a timestamp is in milliseconds since 1970: "
    "set the clock of the sentinel"
)
_FRESH: Final = VerdictKind.FRESH  # reading a member from its class takes nine times as long
_NOTHING: Final = Answer()


class AlertReplies:
    """Answers the sentinels of one tower, and records the answers."""

    def __init__(self, trail: Trail, activity: ActivityLog, ledger: Ledger) -> None:
        self._trail = trail
        self._activity = activity
        self._ledger = ledger

    def reply(self, reply: Reply) -> None:
        """Answer a sentinel about its alert; also with the outcome, if the alert has ended."""
        message, verdict, state = reply.message, reply.verdict, reply.verdict.state
        origin = cast("Session | None", reply.origin)
        fresh = verdict.kind is _FRESH
        told = origin is not None and origin.listening
        if fresh and state is not None:
            self._trail.stored(message, verdict, state, told=told)
        else:
            self._trail.said(message, verdict, told=told)
        if self._activity.watchers:
            self._activity.see(
                "said", scope=message.scope, id=message.id, word=verdict.named, kind=message.kind
            )
            if fresh and state is not None:
                self.see_end(message.key, state, _NOTHING)
        if origin is None:
            return
        ack = outgoing.server_ack(message.id, verdict)
        if fresh and message.kind == EVENT and is_undated(message):
            ack = structs.replace(ack, detail=UNDATED, time=self._ledger.clock.now() // MS)
        origin.push(ack)
        if state is not None and state.terminal:
            origin.push(outgoing.ack(message.id, "tower", state, verdict.answer or _NOTHING))

    def see_end(self, key: bytes, state: State, answer: Answer) -> None:
        """Show the end of an alert to watchers."""
        if self._activity.watchers:
            scope, id_ = names_in(key)
            self._activity.see("ended", scope=scope, id=id_, state=state.word, code=answer.code)
