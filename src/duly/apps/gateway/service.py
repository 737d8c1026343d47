"""The gateway passes commands from apps to devices, with two acknowledgements.

The laws. `server_ack` goes out after the command is committed, the device's `ack` is passed on after the
end is. A repeat gets code 5, the state, and the stored `ack` if there is one. A device that never answers
ends as `unknown`, and a late answer settles it and is passed on. An offline device refuses (code 1, the id
is not burned) unless the command may wait (`queue`). Who sends is who has authenticated, whatever a frame
says.

Everything durable is done by the core: `Inbox`, `Engine`, streams. Here is what a frame means and which
sessions are open. Whether a command is taken is `admission`; what a device answers, `device_answers`; what
other hubs have to do with it, `remote_hubs`. A session is anything that frames can be pushed to: a WebSocket,
an HTTP request that waits, an MQTT node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from duly.apps.gateway.admission import CommandAdmission, not_granted
from duly.apps.gateway.device_answers import DeviceAnswers, hand_over
from duly.apps.gateway.device_list import DeviceList
from duly.apps.gateway.policy import GatewayPolicy
from duly.apps.gateway.pushes import PushService, stream_of
from duly.apps.gateway.remote_hubs import GatewayRemote, GatewayRemoteHubs, SingleHub
from duly.apps.gateway.trace import Hop, TraceLog
from duly.cluster.notifier import Notifier
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, names_in, parts_of
from duly.core.outbox import OutboxPolicy
from duly.core.steps import (
    Arrived,
    CancelMessages,
    Effect,
    NumberRefused,
    Origin,
    Reachable,
    Reply,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.takeovers import WORD, Takeovers
from duly.core.units import MS, seconds
from duly.errors import DulyError, LedgerError, Malformed
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.audit import AuditLog
from duly.runtime.engine import Engine
from duly.runtime.refusal_tally import RefusalTally
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger, Record
from duly.wire import frames, outgoing
from duly.wire.fields import Fields, timeout_in
from duly.wire.frames import Frame
from duly.wire.outgoing import OutgoingFrame, WelcomeFrame
from duly.wire.session import Session

SLOW_SECONDS: Final = 1.0
"""How long a sender that is over its quota is kept waiting for an answer at most."""
REPLACED: Final = "replaced by a newer connection of the same device"


class GatewayService:
    """One gateway on one ledger; with a `notifier`, one of several hubs on it."""

    name: Final = "gateway"

    roles = frozenset({Role.APP, Role.DEVICE, Role.ADMIN})
    open = True
    """other types than the documented ones are taken, too: from an app a command, from a device a push"""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        journal: AuditLog,
        policy: GatewayPolicy | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self.policy = policy or GatewayPolicy()
        self._commands = self.policy.commands
        self._journal = journal
        self._ledger = ledger
        self._accounts = accounts
        control = self.policy.control
        self._devices: dict[str, Session] = {}
        self._apps: dict[str, list[Session]] = {}
        self._admission = CommandAdmission(
            self.policy,
            accounts,
            ledger,
            here=self._devices.keys(),
            online=self.online,
            has_room=self._has_room,
        )
        self._inbox = Inbox(
            OutboxPolicy("device", control.resend, patience=control.patience, quiet=True),
            ledger.worker,
            lanes=msgspec.structs.replace(control.lanes(), ahead=self.policy.ahead),
            horizon=self._admission.horizon,
            refuse=self._admission.refuse,
            permit=self._admission.forbidden,
            backlog=self._admission.backlog,
            shared=notifier is not None,
            once=lambda message: accounts.is_sent_once(message.recipient),
            patience=lambda message: timeout_in(message.body) * MS,
        )
        self.devices = DeviceList(ledger, accounts, self.online)
        self.pushes = PushService(ledger, journal, self._listeners, self._stored, accounts.born)
        channel = self._inbox.channel
        self.remote: GatewayRemote = (
            SingleHub(ledger, channel, self)
            if notifier is None
            else GatewayRemoteHubs(ledger, notifier, channel, self)
        )
        self.engine = Engine(self._inbox, ledger, self._perform, fair=True, ours=self.remote.open_deliveries)
        self.answers = DeviceAnswers(
            self._inbox, self.engine, ledger, journal, self.remote, self.tell_progress
        )
        self._unaddressed = self.answers.unaddressed
        self._traces = TraceLog(ledger.clock)
        self.tasks = Supervisor()
        self._takeovers = Takeovers()
        self._refusals = RefusalTally(journal, self.tasks)
        self.tasks.adopt(self.pushes.tasks)
        self.tasks.adopt(self.remote.tasks)

    @property
    def types(self) -> frozenset[str]:
        """The documented types of frames."""
        return self.policy.commands | self.policy.pushes | {"ack"}

    @property
    def prompt(self) -> frozenset[str]:
        """The types whose frames are not made to wait behind others."""
        return self.policy.commands

    async def start(self) -> None:
        """Go on with what the ledger has under way, and cancel what is no longer allowed."""
        await self.remote.start()
        await self.engine.start()
        await self.review()

    async def stop(self) -> None:
        """Stop the engine, then what tells others of its work."""
        await self.engine.stop()
        await self.remote.stop()
        await self.pushes.stop()
        with suppress(DulyError):  # a ledger that is away
            await self._refusals.stop()

    # ── sessions ────────────────────────────────────────────────────────────────────────────────

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        """Welcome an app or a device that has authenticated, and tell it what it missed."""
        if who.role is Role.DEVICE:
            new = await self.remote.register(who.name)
            before = self._devices.get(who.name)
            self._devices[who.name] = session
            if before is not None:
                new = False
                before.close(REPLACED)
                self._took_over(who.name)
            session.push(self._welcome(who, {}))
            try:
                await self.remote.fetch_for(who.name)
            except LedgerError:
                if self._devices.get(who.name) is session:
                    del self._devices[who.name]  # it was never reachable here
                raise
            if self._devices.get(who.name) is not session:
                return  # it has left meanwhile, or come again
            await self.engine.put(Reachable(who.name))
            if self._devices.get(who.name) is not session:
                return
            await self.remote.tell_online(who.name, new=new)
            return
        devices = sorted(self._accounts.granted(who.name))
        heads = {device: (await self._ledger.extent(stream_of(device))).last for device in devices}
        session.push(self._welcome(who, heads, self.devices.online_of(who.name)))
        seen = cursors or {}
        self._apps.setdefault(who.name, []).append(session)
        self.pushes.enter(session, {d: min(max(seen.get(d, head), 0), head) for d, head in heads.items()})

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Forget a session that has ended."""
        self.pushes.leave(session)
        sessions = self._apps.get(who.name, [])
        if session in sessions:
            sessions.remove(session)
            if not sessions:
                del self._apps[who.name]
        if self._devices.get(who.name) is session:
            del self._devices[who.name]
            await self.engine.put(Unreachable(who.name))
            await self.remote.unregister(who.name)

    def dismiss(self, name: str) -> None:
        """Close the sessions of this name: its token is no longer valid."""
        device = self._devices.get(name)
        for session in [*self._apps.get(name, ()), *([] if device is None else [device])]:
            session.close("your token is no longer valid")

    def online(self, device: str) -> bool:
        """Whether a device is connected, here or, as far as is known, to another hub."""
        return device in self._devices or self.remote.holds(device)

    def _has_room(self, device: str) -> bool:
        return self._inbox.lanes.has_room(device)

    def session(self, device: str) -> Session | None:
        """The session of a device that is connected here."""
        return self._devices.get(device)

    def presence(self) -> list[str]:
        """The devices that are connected, here or to another hub."""
        return self.remote.online_devices()

    def _welcome(
        self, who: Principal, cursors: dict[str, int], online: list[str] | None = None
    ) -> WelcomeFrame:
        return WelcomeFrame(who.name, self._ledger.clock.now() // MS, cursors, online)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Take a frame of an authenticated app or device. Of what devices tell, only a push with a `seq_id`
        gets a `server_ack`."""
        if frame.type in self._commands:
            return self._submit(session, who, frame)
        if who.role is Role.DEVICE:
            self.devices.heard(who.name)
            return self.answers.take(who, frame) if frame.type == "ack" else self._pushed(session, who, frame)
        if frame.type in self.types:
            raise Malformed(f"a {who.role.value} cannot send {frame.type!r}")
        return self._submit(session, who, frame)

    def refused(self, who: Principal, seq_id: str) -> None:
        """Note that a frame was refused before it became a command: its number leaves no gap."""
        with suppress(DulyError):
            made, n, _, _ = parts_of(seq_id)
            if n is not None and made and who.role is not Role.DEVICE:
                self.engine.offer(NumberRefused(who.name, n, made))

    def _submit(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Take a command. Its `server_ack`, and later its `ack`, are pushed to the session."""
        message = frames.message_of(frame, who.name, self._admission.expiry_of(frame))
        if who.role is Role.DEVICE:
            raise not_granted(who.name, message.recipient)
        if not self._accounts.may(who, message.recipient):
            return self._find_grant(session, who, frame, message)
        return self._admit(session, who, frame, message)

    async def _find_grant(self, session: Session, who: Principal, frame: Frame, message: Message) -> bool:
        """Look for a grant that another hub may have made a moment ago."""
        if not await self._accounts.find_grant(who, message.recipient):
            raise not_granted(who.name, message.recipient)
        said = self._admit(session, who, frame, message)
        return said if isinstance(said, bool) else await said

    def _admit(
        self, session: Session, who: Principal, frame: Frame, message: Message
    ) -> bool | Awaitable[bool]:
        message = self._admission.check(who, frame, message)
        event = Arrived(message, session, frame.queue, self._accounts.proof(who, message.recipient))
        if not (frame.queue or self.online(message.recipient)):
            search = self.remote.search(message.recipient)
            if search is not None:
                return self._take_after(search, event)
        if self._inbox.backlog.waiting and self._admission.excess(event) is not None:
            return self._take_slowly(event)
        return hand_over(self.engine, event, answered=True)

    async def _take_after(self, search: Awaitable[bool], event: Arrived) -> bool:
        """Take a command in once it is known whether another hub holds its device."""
        await search
        await self.engine.put(event)
        return True

    async def _take_slowly(self, event: Arrived) -> bool:
        """Take a command of which too much waits: its sender hears no faster than the refusal is stored."""
        stored = asyncio.Event()
        await self.engine.put(event, stored.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_SECONDS):
                await stored.wait()
        return True

    def tell_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Tell an app how far a device is; those that wait over HTTP wait for the end."""
        scope, id_ = names_in(key)
        self._traces.note(key, "at work")
        frame = outgoing.working(id_, device, progress, more)
        for session in self._apps.get(scope, ()):
            session.push(frame)

    async def _pushed(self, session: Session, who: Principal, frame: Frame) -> bool:
        if frame.seq_id is None:
            await self.pushes.store(who.name, frame.type, frame.data, frames.more_in_push(frame))
            return False
        verdict = await self.pushes.receive(session, who.name, frame)
        session.push(outgoing.server_ack(frame.seq_id, verdict))
        return True

    async def push_from(
        self, device: str, kind: str, data: object, id_: str | None, more: Fields, said: bytes, old: bool
    ) -> Verdict | None:
        """Store a push of a device behind a broker; the verdict to answer it with, if it has an id."""
        self.check_push(kind)
        if id_ is not None:
            return await self.pushes.store_once(device, id_, kind, frames.dump(data), more)
        await self.pushes.store(device, kind, frames.dump(data), more, said, old)
        return None

    def check_push(self, kind: str) -> None:
        """Raise `Malformed` if this cannot be the type of a push."""
        if kind in self._commands or not frames.is_own_type(kind):
            raise Malformed(f"{kind[:80]!r} cannot be a push type; use a–z, 0–9 and _, at most 64")

    async def review(self) -> None:
        """Cancel commands that wait and are no longer allowed: a grant was revoked, an account removed."""
        for message in await self.remote.waiting_commands():
            reason = self._admission.forbidden(message)
            if reason is not None:
                await self.engine.put(CancelMessages((message,), reason))

    # ── effects ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        if type(effect) is Reply:
            self._say(effect)
        elif type(effect) is Transmit:
            self._pass_on(effect)
        elif type(effect) is ReportOutcome:
            self._report(effect)

    def _say(self, reply: Reply) -> None:
        message, verdict = reply.message, reply.verdict
        self._traces.note(message.key, verdict.named)
        if self._journal.watchers:
            self._journal.see(
                "said",
                scope=message.scope,
                id=message.id,
                word=verdict.named,
                to=message.recipient,
                kind=message.kind,
            )
        _push_to((reply.origin,), outgoing.server_ack(message.id, verdict))
        self.remote.follow(message, verdict, reply.origin)
        if verdict.state is not None and verdict.state.terminal and verdict.answer is not None:
            ended = outgoing.ack(message.id, message.recipient, verdict.state, verdict.answer)
            _push_to((reply.origin,), ended)

    def _pass_on(self, transmit: Transmit) -> None:
        message, attempt = transmit.message, transmit.attempt
        device = self._devices.get(message.recipient)
        if device is None:
            return
        if transmit.again and ((attempt > 1 and device.congested) or not self._admission.may_repeat(message)):
            return  # it still waits in the socket's queue; or it may not be sent again
        self._traces.note(message.key, "sent", attempt)
        device.push(outgoing.command(message, transmit.after))
        if self._unaddressed.scopes:
            self._unaddressed.began(message)
        if self._journal.watchers:
            self._journal.see(
                "sent", scope=message.scope, id=message.id, to=message.recipient, attempt=attempt
            )

    def _report(self, report: ReportOutcome) -> None:
        origins = report.origins
        if self._inbox.backlog.waiting:
            self._inbox.backlog.remove(report.key)
        also = self.remote.ended(report.key, report.state)
        if also:
            origins = (*origins, *(origin for origin in also if origin not in origins))
        self._tell_end(report.key, report.state, report.answer, report.recipient, origins)

    def _tell_end(
        self, key: bytes, state: State, answer: Answer, recipient: str, origins: Collection[Origin]
    ) -> None:
        scope, id_ = names_in(key)
        if self._unaddressed.scopes:
            self._unaddressed.ended(key, recipient, state)
        self._traces.note(key, state.word)
        if self._journal.watchers:
            self._journal.see("ended", scope=scope, id=id_, state=state.word, code=answer.code, to=recipient)
        frame = outgoing.ack(id_, recipient, state, answer)
        _push_to(origins, frame)
        # An app that has reconnected meanwhile is not where it asked; it still wants to know.
        others = [session for session in self._apps.get(scope, ()) if session not in origins]
        if others:
            before = self._accounts.predecessor(scope)
            if before and int.from_bytes(key[:6], "big") * MS <= before:
                return  # another app of that name asked for it
            for session in others:
                session.push(frame)

    def trail(self, key: bytes) -> list[Hop]:
        """When what happened to a command here, of the newest ones; its outcome is in the ledger anyway."""
        return self._traces.of(key)

    def _listeners(self, device: str) -> list[Session]:
        """The connections of the apps that may hear a device."""
        apps = self._accounts.apps_of(device)
        return [session for app in sorted(apps) for session in self._apps.get(app, ())]

    def _stored(self, device: str) -> None:
        self.remote.pushed(device)

    # ── what other hubs ask for (`LocalGateway`) ─────────────────────────────────────────────────

    @property
    def here(self) -> Collection[str]:
        """The devices whose sessions are here."""
        return self._devices.keys()

    def waiting(self) -> Iterable[Message]:
        """The commands that wait here for their devices."""
        return self._inbox.waiting()

    def hears(self, scope: str) -> bool:
        """Whether this app has a session here."""
        return scope in self._apps

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        """Tell apps here how a command has ended at another hub."""
        message, answer = record.message, record.answer or Answer()
        self._inbox.backlog.remove(message.key)
        self._tell_end(message.key, record.state, answer, message.recipient, list(origins))

    async def replaced(self, device: str) -> None:
        """Close the session of a device that has connected to another hub."""
        session = self._devices.pop(device, None)
        if session is not None:
            session.close(REPLACED)
            await self.engine.put(Unreachable(device))
            self._took_over(device)

    def _took_over(self, device: str) -> None:
        """Count that a connection of a device was closed for a newer one; several in a row are recorded."""
        reason = (
            f"two clients use the token of {device}, and each disconnects the other; "
            f"give each an account of its own"
        )
        if self._takeovers.note(device, reason, seconds(asyncio.get_running_loop().time())):
            self._refusals.note(device, "websocket connect", WORD, reason)

    def conflicts(self) -> list[str]:
        """A sentence about each device whose token two clients use at the same time."""
        return self._takeovers.conflicts(seconds(asyncio.get_running_loop().time()))


def _push_to(origins: Iterable[Any], frame: OutgoingFrame) -> None:
    for origin in origins:
        if origin is not None:
            origin.push(frame)
