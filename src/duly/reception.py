"""The reception: where frames come in, from WebSocket and HTTP alike, and which application gets them.

The laws. A frame goes to the one application that knows its type; a connection belongs to the application of
its owner's role, which greets it. What is wrong with a frame is answered with a `server_ack` and recorded,
never raised: nobody's mistake is anybody else's trouble.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from duly.auth import Principal, Role
from duly.core.messages import Verdict, Word
from duly.dialects import frames
from duly.dialects.frames import Frame, ServerCode
from duly.errors import LedgerError, Malformed, SenderError
from duly.journal import Journal
from duly.transport import Session

WATCH = "watch"
"""An admin's wish to see everything as it happens."""


class Application(Protocol):
    """What the hub is for: the gateway, chat, alerts."""

    @property
    def roles(self) -> frozenset[Role]:
        """Whose connections are greeted here."""
        ...

    @property
    def types(self) -> frozenset[str]:
        """The frames that are understood here; who may send them is decided here, too."""
        ...

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        """Somebody has authenticated: greet them with a `welcome`, and give them what they missed."""
        ...

    async def receive(self, session: Session, who: Principal, frame: Frame) -> bool:
        """A frame. Whether a `server_ack` for it is pushed to the session: not every frame gets one.
        Raises `SenderError` for what is wrong with it."""
        ...

    async def disconnected(self, session: Session, who: Principal) -> None: ...

    def dismiss(self, name: str) -> None:
        """Hang up on everybody of this name: they are no longer who they were let in as."""
        ...


class Reception:
    """One hub's."""

    def __init__(self, journal: Journal, applications: Iterable[Application]) -> None:
        self._journal = journal
        self._applications = list(applications)
        self._by_role = {role: app for app in self._applications for role in app.roles}
        self._by_type = {type_: app for app in self._applications for type_ in app.types}

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        await self._by_role[who.role].connected(session, who, cursors)

    async def disconnected(self, session: Session, who: Principal) -> None:
        if session in self._journal.watchers:
            self._journal.watchers.remove(session)
        await self._by_role[who.role].disconnected(session, who)

    def dismiss(self, name: str) -> None:
        for application in self._applications:
            application.dismiss(name)

    async def receive(self, session: Session, who: Principal, raw: bytes | str) -> bool:
        """A frame from somebody who has authenticated. Whether it gets a `server_ack`."""
        seq_id: str | None = None
        try:
            frame = frames.decode(raw)
            seq_id = frame.seq_id
            application = self._by_type.get(frame.type)
            if application is not None:
                return await application.receive(session, who, frame)
            if frame.type != WATCH:
                raise Malformed(f"there is no frame type {frame.type!r}")
            if who.role is not Role.ADMIN:
                raise Malformed(f"a {who.role.value} cannot send {WATCH!r}")
            self._journal.watchers.append(session)
            return False
        except SenderError as problem:
            verdict = Verdict(Word.REFUSED, reason=str(problem), cause=problem.word)
            await self._journal.refuse(who.name, seq_id or "", problem.word, str(problem))
            session.push(frames.encode(frames.server_ack(seq_id, verdict)))
        except LedgerError as problem:
            trouble = frames.trouble(seq_id, ServerCode.INTERNAL, "internal", str(problem))
            session.push(frames.encode(trouble))
        return True
