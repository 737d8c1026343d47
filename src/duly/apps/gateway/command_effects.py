"""Command effects: what follows from a command's progress for those who are connected.

The laws. An effect is performed after what it tells of is committed. An app is told how its command ended
where it asked, and at every other session of that app; a device that is not connected is sent nothing, and
gets the command when it comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from duly.apps.gateway.admission import CommandAdmission
from duly.apps.gateway.remote_hubs import GatewayRemote
from duly.apps.gateway.sessions import GatewaySessions
from duly.apps.gateway.unaddressed_acks import UnaddressedAcks
from duly.core.backlog import Backlog
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind, names_in
from duly.core.steps import Origin, Reply, ReportOutcome, Transmit
from duly.core.units import MS
from duly.errors import NotFound
from duly.identity.accounts import Accounts
from duly.runtime.activity_log import ActivityLog
from duly.runtime.tracing import CommandTraces
from duly.runtime.trail import Trail
from duly.storage.ledger import Record
from duly.wire import outgoing
from duly.wire.fields import Fields
from duly.wire.frames import ServerCode
from duly.wire.session import Session

ELSEWHERE: Final = "heard from another hub"
"""How a hub knows of an end that it has not stored itself."""


class CommandEffects:
    """Tells apps and devices what the inbox has decided."""

    def __init__(
        self,
        sessions: GatewaySessions,
        accounts: Accounts,
        admission: CommandAdmission,
        backlog: Backlog,
        remote: GatewayRemote,
        activity: ActivityLog,
        trail: Trail,
        traces: CommandTraces,
        unaddressed: UnaddressedAcks,
    ) -> None:
        self._sessions = sessions
        self._accounts = accounts
        self._admission = admission
        self._backlog = backlog
        self._remote = remote
        self._activity = activity
        self._trail = trail
        self._traces = traces
        self._unaddressed = unaddressed
        remote.hear_progress(self.show_progress)

    def reply(self, reply: Reply) -> None:
        """Tell a sender what was said of its command."""
        message, verdict = reply.message, reply.verdict
        self._trail.said(message, verdict)
        if self._traces.open:
            taken = verdict.fresh or (verdict.state is not None and not verdict.state.terminal)
            self._traces.said(message.key, verdict.named, taken=taken)
        if self._activity.watchers:
            self._activity.see(
                "said",
                scope=message.scope,
                id=message.id,
                word=verdict.named,
                to=message.recipient,
                kind=message.kind,
            )
        session: Session | None = reply.origin  # type: ignore[assignment]  # the core gives back what it got
        self._answer(session, message, verdict)

    def tell_outcome(self, session: Session, scope: str, seq_id: str, record: Record | None) -> None:
        """Answer the question of an app how its command ended as a repeat of the command is answered."""
        if record is None or not self._asked(scope, record.message.key):
            reason = "the hub has not taken it, or has forgotten it; this question does not run it"
            session.push(outgoing.trouble(seq_id, ServerCode.BAD_PARAMETERS, NotFound.word, reason))
            return
        known = Verdict(VerdictKind.DUPLICATE, state=record.state, answer=record.answer or Answer())
        self._answer(session, record.message, known)

    def _answer(self, session: Session | None, message: Message, verdict: Verdict) -> None:
        if session is not None:
            session.push(outgoing.server_ack(message.id, verdict))
            if verdict.answer is not None and verdict.state is not None and verdict.state.terminal:
                session.push(outgoing.ack(message.id, message.recipient, verdict.state, verdict.answer))
        self._remote.follow(message, verdict, session)

    def transmit(self, transmit: Transmit) -> None:
        """Send a command to its device, if it is connected here."""
        message, attempt = transmit.message, transmit.attempt
        device = self._sessions.devices.get(message.recipient)
        if device is None:
            return
        if transmit.again and ((attempt > 1 and device.congested) or not self._admission.may_repeat(message)):
            return  # it still waits in the socket's queue; or it may not be sent again
        self._trail.sent(message, attempt)
        trace = self._traces.sent(message.key, attempt) if self._traces.open else ""
        device.push(outgoing.command(message, transmit.after, trace))
        if self._unaddressed.scopes:
            self._unaddressed.began(message)
        if self._activity.watchers:
            self._activity.see(
                "sent", scope=message.scope, id=message.id, to=message.recipient, attempt=attempt
            )

    def report(self, report: ReportOutcome) -> None:
        """Tell apps here how a command has ended."""
        origins = report.origins
        if self._backlog.waiting:
            self._backlog.remove(report.key)
        also = self._remote.ended(report.key, report.state)
        if also:
            origins = (*origins, *(origin for origin in also if origin not in origins))
        told = self._tell_end(report.key, report.state, report.answer, report.recipient, origins)
        self._trail.ended(report.key, report.state, report.answer.reason, told=told)

    def tell_end(self, record: Record, origins: Iterable[Origin], how: str = ELSEWHERE) -> None:
        """Tell apps here how a command has ended, and by what `how`: at another hub, or by hand."""
        message, answer = record.message, record.answer or Answer()
        self._backlog.remove(message.key)
        told = self._tell_end(message.key, record.state, answer, message.recipient, list(origins))
        self._trail.note(message.key, record.state.word, detail=how, told=told)

    def _tell_end(
        self, key: bytes, state: State, answer: Answer, recipient: str, origins: Collection[Origin]
    ) -> bool:
        """Tell the sessions of a command's app how it ended; returns whether one is there to hear it."""
        scope, id_ = names_in(key)
        if self._traces.open:
            self._traces.ended(key, state.word)
        if self._unaddressed.scopes or self._unaddressed.unknown or state is State.UNKNOWN:
            self._unaddressed.ended(key, recipient, state)
        if self._activity.watchers:
            self._activity.see("ended", scope=scope, id=id_, state=state.word, code=answer.code, to=recipient)
        frame = outgoing.ack(id_, recipient, state, answer)
        told = False
        session: Session
        for session in origins:  # type: ignore[assignment]  # the core gives back what it got
            if session is not None:
                told = told or session.listening
                session.push(frame)
        # An app that has reconnected meanwhile is not where it asked; it still wants to know.
        for session in self._sessions.apps.get(scope, ()):
            if session not in origins and self._asked(scope, key):
                told = told or session.listening
                session.push(frame)
        return told

    def _asked(self, scope: str, key: bytes) -> bool:
        """Whether the app that has this name now asked for a command, not an earlier one of the name."""
        before = self._accounts.freed_at(scope)
        return not before or int.from_bytes(key[:6], "big") * MS > before

    def tell_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Tell an app how far a device here is, wherever the app is; those that wait over HTTP wait for the
        end."""
        self._trail.note(key, "at work")
        self.show_progress(key, device, progress, more)
        self._remote.progressed(key, device, progress, more)

    def show_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Tell the sessions of an app here how far a device is."""
        scope, id_ = names_in(key)
        sessions = self._sessions.apps.get(scope, ())
        if sessions and self._asked(scope, key):
            frame = outgoing.working(id_, device, progress, more)
            for session in sessions:
                session.push(frame)
