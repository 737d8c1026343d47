"""The router: passes every frame, from WebSocket and HTTP alike, to the application that handles its type.

The laws. A frame goes to the one application that knows its type; a connection belongs to the application of
its owner's role, which greets it. A faulty frame is answered with a `server_ack` and recorded; the error is
never raised, so one client's mistake does not affect other clients. A frame that ends in an error of the hub,
a bug included, is answered with code 4: it may be sent again unchanged, and its connection lives on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from duly.core.messages import Verdict, VerdictKind
from duly.errors import (
    DulyError,
    LedgerError,
    Malformed,
    Overloaded,
    ProgramError,
    RateLimited,
    SenderError,
    Stopped,
)
from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.refusal_tally import RefusalTally
from duly.runtime.tasks import Supervisor
from duly.wire import frames, outgoing
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import BUG, ServerAck
from duly.wire.session import Session

UNABLE: Final = (LedgerError, Overloaded, Stopped)
"""Errors of the hub, not of the sender: the frame may be sent again unchanged."""
FRAME: Final = "frame"
"""The name under which bugs in taking frames are counted."""
TURN_BYTES: Final = 256 * 1024
LEAST_BYTES: Final = TURN_BYTES // 100
"""How much of an array is taken in one turn of the event loop: so many bytes, where each frame counts this
much more; so at most a hundred frames. Other clients wait meanwhile."""
WATCH = "watch"
"""The frame by which an admin asks to see everything as it happens."""


class RoutedApp(Protocol):
    """An application of the hub: the gateway, chat, alerts."""

    @property
    def roles(self) -> frozenset[Role]:
        """The roles whose connections this application greets."""
        ...

    @property
    def types(self) -> frozenset[str]:
        """The frame types that this application handles; it also decides which senders may use them."""
        ...

    @property
    def prompt(self) -> frozenset[str]:
        """The types that `receive` only passes to an engine, so that an array of them needs no task for
        each."""
        ...

    @property
    def open(self) -> bool:
        """Whether types that no application names are accepted as well, from the roles in `roles`."""
        ...

    def refused(self, who: Principal, seq_id: str) -> None:
        """Note that a frame was refused before it reached the application."""
        ...

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        """Send a client that has authenticated a `welcome`, and what it missed."""
        ...

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Take a frame. Return whether a `server_ack` for it is pushed to the session, since not every frame
        gets one; return an awaitable of that if it takes a commit or has to wait. Raise `SenderError` if the
        frame is faulty."""
        ...

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Handle the end of a client's connection."""
        ...

    def dismiss(self, name: str) -> None:
        """Close every connection of this account: its token or role is no longer valid."""
        ...


class Router:
    """Routes the frames and connections of one hub."""

    def __init__(
        self, activity: ActivityLog, applications: Iterable[RoutedApp], tasks: Supervisor | None = None
    ) -> None:
        self._activity = activity
        self._failed = (tasks or Supervisor()).failed
        self._limited = RefusalTally(activity)
        self._applications = list(applications)
        self._by_role = {role: app for app in self._applications for role in app.roles}
        self._by_type = {type_: app for app in self._applications for type_ in app.types}
        # If several applications know a type, the one of the sender's role handles it.
        self._own = {
            role: self._by_type | dict.fromkeys(app.types, app) for role, app in self._by_role.items()
        }
        self.count_refused: Callable[[str, str], None] = _not_counted
        """called with the type and the error word of each frame that is refused"""
        self._prompt = {type_ for app in self._applications for type_ in app.prompt}

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        """Let the application of its role greet a client that has authenticated."""
        await self._by_role[who.role].connected(session, who, cursors)

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Stop showing the activity to this connection, and tell its application that it has ended."""
        if session in self._activity.watchers:
            self._activity.watchers.remove(session)
        await self._by_role[who.role].disconnected(session, who)

    def dismiss(self, name: str) -> None:
        """Close every connection of this account."""
        for application in self._applications:
            application.dismiss(name)

    async def stop(self) -> None:
        """Record the refusals that are not recorded yet."""
        with suppress(DulyError):
            await self._limited.stop()

    async def receive_all(self, sessions: Sequence[Session], who: Principal, raws: Sequence[bytes]) -> None:
        """Take several frames in order, each with its session, to which its `server_ack` is pushed."""
        rest = self.begin_all(sessions, who, raws)
        if rest is not None:
            await rest

    def begin_all(
        self, sessions: Sequence[Session], who: Principal, raws: Sequence[bytes]
    ) -> Coroutine[object, None, None] | None:
        """Take frames like `receive_all` until one has to be awaited; return the coroutine that takes the
        rest, or None. Most frames are only passed to an engine, which needs no coroutine."""
        pairs = zip(sessions, raws, strict=True)
        commits: list[Coroutine[object, None, object]] = []
        room = TURN_BYTES
        for session, raw in pairs:
            said = self._begin(session, who, raw, commits)
            room -= len(raw) + LEAST_BYTES
            if said is not None or room < 0:
                return self._receive_rest(said or _end_turn(commits), pairs, who, commits)
        return _together(commits) if commits else None

    async def _receive_rest(
        self,
        said: Awaitable[object],
        pairs: Iterable[tuple[Session, bytes]],
        who: Principal,
        commits: list[Coroutine[object, None, object]],
    ) -> None:
        """Take the other frames of an array when the last one is taken, with turns of other tasks between."""
        await said
        room = TURN_BYTES
        for session, raw in pairs:
            waiting = self._begin(session, who, raw, commits)
            if waiting is not None:
                await waiting
            room -= len(raw) + LEAST_BYTES
            if room < 0:
                await _end_turn(commits)
                room = TURN_BYTES
        await _together(commits)

    def _begin(
        self, session: Session, who: Principal, raw: bytes, commits: list[Coroutine[object, None, object]]
    ) -> Awaitable[object] | None:
        """Take a frame; return an awaitable if the next frame has to wait for it. Coroutines that may take a
        commit of their own are added to `commits`."""
        seq_id: str | float | None = None
        kind = ""
        try:
            frame = frames.decode(raw)
            seq_id, kind = frame.seq_id, frame.type
            if frame.type in self._prompt:
                said = self._by_type[frame.type].receive(session, who, frame)
            elif who.role is not Role.DEVICE and frame.type not in self._own[who.role]:
                said = self._take(session, who, frame)  # an undocumented type: a command, in order
            else:
                commits.append(self._answered(session, who, frame))
                return None
        except SenderError as problem:
            commits.append(self._refuse(session, who, seq_id or frames.seq_id_in(raw), problem, kind))
            return None
        except Exception as problem:
            self._unable(session, who, seq_id, problem)
            return None
        if said is True or said is False:
            return None
        return self._waited(session, who, frame, said, commits)

    async def _waited(
        self,
        session: Session,
        who: Principal,
        frame: Frame,
        said: Awaitable[bool],
        commits: list[Coroutine[object, None, object]],
    ) -> None:
        """Wait until a frame is taken; a refusal is stored together with those of the other frames."""
        try:
            await said
        except SenderError as problem:
            commits.append(self._refuse(session, who, frame.seq_id, problem, frame.type))
        except Exception as problem:
            self._unable(session, who, frame.seq_id, problem)

    async def _answered(self, session: Session, who: Principal, frame: Frame) -> None:
        try:
            answered = await settled(self._take(session, who, frame))
        except SenderError as problem:
            answered = await self._refuse(session, who, frame.seq_id, problem, frame.type)
        except Exception as problem:
            answered = self._unable(session, who, frame.seq_id, problem)
        if not answered:
            session.push(_TAKEN)

    def receiver(self, session: Session, who: Principal) -> Callable[[bytes | str], bool | Awaitable[bool]]:
        """Return the function that takes the frames of an authenticated client. It returns whether a frame
        gets a `server_ack`, or an awaitable of that. Most frames are only passed to an engine, which needs no
        coroutine."""
        applications = self._own[who.role]

        def receive(raw: bytes | str) -> bool | Awaitable[bool]:
            frame: Frame | None = None
            try:
                frame = frames.decode(raw)
                application = applications.get(frame.type)
                if application is None:
                    return self._take(session, who, frame)
                said = application.receive(session, who, frame)
            except SenderError as problem:
                if frame is None:
                    return self.refuse(session, who, raw, problem)
                return self._refuse(session, who, frame.seq_id, problem, frame.type)
            except Exception as problem:
                return self._unable(session, who, None if frame is None else frame.seq_id, problem)
            return said if said is True or said is False else self._wait(session, who, frame, said)

        return receive

    def _take(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Take a frame; raise an error if it is faulty."""
        application = self._own[who.role].get(frame.type) or self._other(who, frame.type)
        if application is not None:
            said = application.receive(session, who, frame)
            return said if isinstance(said, bool) else self._wait(session, who, frame, said)
        if frame.type != WATCH:
            raise Malformed(f"there is no frame type {frame.type[:80]!r} for {who.role.with_article}")
        if who.role is not Role.ADMIN:
            raise Malformed(f"{who.role.with_article} cannot send {WATCH!r}")
        if session not in self._activity.watchers:
            self._activity.watchers.append(session)
        session.push(_TAKEN)  # from now on the session is sent every event
        return True

    def _other(self, who: Principal, type_: str) -> RoutedApp | None:
        """Return the application for a type that none names: that of the sender's role, if it is `open`."""
        application = self._by_role[who.role]
        return application if application.open and frames.is_own_type(type_) else None

    async def _wait(self, session: Session, who: Principal, frame: Frame, said: Awaitable[bool]) -> bool:
        try:
            return await said
        except SenderError as problem:
            return await self._refuse(session, who, frame.seq_id, problem, frame.type)
        except Exception as problem:
            return self._unable(session, who, frame.seq_id, problem)

    def refuse(
        self, session: Session, who: Principal, raw: bytes | str, problem: SenderError
    ) -> Awaitable[bool]:
        """Count, record and answer what came on a session but is not a frame."""
        return self._refuse(session, who, frames.seq_id_in(raw), problem)

    async def _refuse(
        self,
        session: Session,
        who: Principal,
        seq_id: str | float | None,
        problem: SenderError,
        kind: str = "",
    ) -> bool:
        """Count, record and answer a faulty frame; `kind` is its type, empty if it could not be read."""
        self.count_refused(kind, problem.word)
        verdict = Verdict(VerdictKind.REFUSED, reason=str(problem), cause=problem.word)
        self._leave_no_gap(who, seq_id)
        known = "" if seq_id is None else str(seq_id)
        try:
            await self._activity.refuse(who.name, known, problem.word, str(problem))
        except Exception as unrecorded:
            return self._unable(session, who, seq_id, unrecorded)
        session.push(outgoing.server_ack(seq_id, verdict))
        return True

    def _leave_no_gap(self, who: Principal, seq_id: str | float | None) -> None:
        """Tell the application of the sender's role that this number was refused."""
        application = self._by_role.get(who.role)
        if application is not None and isinstance(seq_id, str):
            application.refused(who, seq_id)

    def _unable(
        self, session: Session, who: Principal, seq_id: str | float | None, problem: Exception
    ) -> bool:
        """Reply that a frame was not taken and may be sent again unchanged; a frame beyond a limit is also
        recorded, since its sender is the cause."""
        word = "internal"
        if not isinstance(problem, UNABLE):
            self._failed(FRAME, problem)
            problem = ProgramError(BUG)
        if isinstance(problem, RateLimited):
            word = problem.word
            self._leave_no_gap(who, seq_id)
            self._limited.note(who.name, "" if seq_id is None else str(seq_id), word, str(problem))
        session.push(outgoing.trouble(seq_id, ServerCode.INTERNAL, word, str(problem), problem.wait))
        return True


def _not_counted(kind: str, word: str) -> None:
    """Count nothing."""


async def _end_turn(commits: list[Coroutine[object, None, object]]) -> None:
    """Let other tasks run, and wait for these coroutines: a thousand that begin in one turn stop the loop."""
    begun, commits[:] = commits[:], []
    await asyncio.sleep(0)
    await _together(begun)


async def _together(commits: Sequence[Coroutine[object, None, object]]) -> None:
    """Wait for coroutines that may take a commit each, so that they share one."""
    if len(commits) == 1:
        await commits[0]
    elif commits:
        await asyncio.gather(*commits)


async def settled(said: bool | Awaitable[bool]) -> bool:
    """Return the answer of `receive`, awaiting it if necessary."""
    return said if isinstance(said, bool) else await said


_TAKEN: Final = ServerAck(code=ServerCode.ACCEPTED)
"""The answer to a push without an id over HTTP, which is stored. On a WebSocket such a push gets none."""
