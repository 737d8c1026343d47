"""Command effects: sends commands to connected devices, and progress and outcomes to connected apps.

The laws. An effect is performed only after the change that it reports is committed. The outcome of a command
goes to the session that sent it and to every other session of that app. A device that is not connected gets
its commands when it reconnects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from duly.apps.gateway.admission import CommandAdmission
from duly.apps.gateway.remote_hubs import GatewayRemote
from duly.apps.gateway.sessions import GatewaySessions
from duly.apps.gateway.unaddressed_acks import UnaddressedAcks
from duly.core.account_limits import CountedBytes
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

AT_ANOTHER_HUB: Final = "heard from another hub"
"""The detail shown when another hub has stored the outcome."""


class CommandEffects:
    """Performs the effects of the inbox: sends commands to devices, and verdicts and outcomes to apps."""

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
        counted: CountedBytes,
    ) -> None:
        self._counted = counted
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
        """Send the verdict on a command to its sender."""
        message, verdict = reply.message, reply.verdict
        self._counted.end(message.key, message.scope, stored=verdict.fresh)
        session: Session | None = reply.origin  # type: ignore[assignment]  # the core gives back what it got
        self._trail.said(message, verdict, told=session is not None and session.listening)
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
        self._answer(session, message, verdict)

    def tell_outcome(self, session: Session, scope: str, seq_id: str, record: Record | None) -> None:
        """Answer an app that asks for the outcome of its command, in the same way as a repeat of the
        command."""
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
        """Send a command to its device if it is connected to this hub."""
        message, attempt = transmit.message, transmit.attempt
        device = self._sessions.devices.get(message.recipient)
        if device is None:
            return
        if transmit.again and ((attempt > 1 and device.congested) or not self._admission.may_repeat(message)):
            return  # the command is still in the socket's queue, or may not be sent again
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
        """Send the outcome of a command to the apps at this hub."""
        origins = report.origins
        if self._backlog.waiting:
            self._backlog.remove(report.key)
        also = self._remote.ended(report.key, report.state)
        if also:
            origins = (*origins, *(origin for origin in also if origin not in origins))
        told = self._tell_end(report.key, report.state, report.answer, report.recipient, origins)
        self._trail.ended(report.key, report.state, report.answer.reason, told=told)

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        """Send the outcome of a command that ended at another hub to the apps at this hub."""
        message, answer = record.message, record.answer or Answer()
        self._backlog.remove(message.key)
        told = self._tell_end(message.key, record.state, answer, message.recipient, list(origins))
        self._trail.note(message.key, record.state.word, detail=AT_ANOTHER_HUB, told=told)

    def tell_settled(self, record: Record) -> None:
        """Send the outcome of a message that was settled by hand to the apps, and count it."""
        message = record.message
        self._trail.know(message)
        answer = record.answer or Answer()
        self.report(ReportOutcome(message.key, record.state, answer, recipient=message.recipient))

    def _tell_end(
        self, key: bytes, state: State, answer: Answer, recipient: str, origins: Collection[Origin]
    ) -> bool:
        """Send the outcome of a command to its app's sessions; return whether there was one."""
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
        # An app that has reconnected has a different session, and still needs the outcome.
        for session in self._sessions.apps.get(scope, ()):
            if session not in origins and self._asked(scope, key):
                told = told or session.listening
                session.push(frame)
        return told

    def _asked(self, scope: str, key: bytes) -> bool:
        """Return whether the account that has this name now sent the command, not an earlier account of that
        name."""
        before = self._accounts.freed_at(scope)
        return not before or int.from_bytes(key[:6], "big") * MS > before

    def tell_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Report the progress of a device at this hub to the app, wherever it is. Callers that wait over HTTP
        only get the outcome."""
        self._trail.note(key, "at work")
        self.show_progress(key, device, progress, more)
        self._remote.progressed(key, device, progress, more)

    def show_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Report the progress of a device to the app's sessions at this hub."""
        scope, id_ = names_in(key)
        sessions = self._sessions.apps.get(scope, ())
        if sessions and self._asked(scope, key):
            frame = outgoing.working(id_, device, progress, more)
            for session in sessions:
                session.push(frame)
