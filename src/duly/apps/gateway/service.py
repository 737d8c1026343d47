"""The gateway (seed 000): app → hub → device, with two acknowledgements.

The laws. `server_ack` goes out after the command is committed, the device's `ack` is passed on after the
end is. A repeat gets code 5, the state, and the stored `ack` if there is one. A device that never answers
ends as `unknown`, and a late answer settles it and is passed on. An offline device refuses (code 1, the id
is not burned) unless the command may wait (`queue`). Who sends is who has authenticated, whatever a frame
says.

Everything durable rides on the kernel: `Inbox`, `Engine`, streams. Here is what a frame means, who is
connected, and who may talk to whom. A session is anything that frames can be pushed to: a WebSocket, an
HTTP request that waits, an MQTT node. Where this is not the only hub, `remote` says what that means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from duly.apps.gateway.device_list import DeviceList
from duly.apps.gateway.policy import GatewayPolicy
from duly.apps.gateway.presence import OFFLINE, ONLINE, DevicePresence
from duly.apps.gateway.pushes import PushService, stream_of
from duly.apps.gateway.remote_hubs import GatewayRemoteHubs
from duly.apps.gateway.trace import Hop, TraceLog
from duly.apps.gateway.unaddressed_acks import UnaddressedAcks
from duly.cluster.notifier import Notifier
from duly.core.backlog import Backlog
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Verdict, Word, key_of, names_in, parts_of
from duly.core.outbox import OutboxPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    CancelMessages,
    Effect,
    Event,
    NumberRefused,
    Origin,
    Reachable,
    Received,
    Reply,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.units import DAY, MINUTE, MS, SECOND, show
from duly.errors import DulyError, LedgerError, Malformed, NotAllowed, Overloaded, RateLimited, Stale
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.audit import AuditLog
from duly.runtime.engine import Engine
from duly.storage.ledger import Ledger, Record
from duly.wire import frames
from duly.wire.fields import Fields, timeout_in
from duly.wire.frames import DEVICE_STATUS, Frame
from duly.wire.session import Session

CHUNK: Final = "media_download_chunk"
CHUNK_HORIZON: Final = Horizon(keep=10 * MINUTE)
"""Chunks are read, not done: a class of their own, remembered briefly and without their data, so that a
download of ten thousand pushes nothing else out of anything."""

SLOW_SECONDS: Final = 1.0
"""How long a sender that is over its quota is kept waiting for an answer at most."""
TRY_AGAIN: Final = 5 * SECOND
"""When a sender of whom too much waits may try again."""


REPLACED: Final = "replaced by a newer connection of the same device"


class GatewayService:
    """One gateway on one ledger; with a `bell`, one of several."""

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
        bell: Notifier | None = None,
    ) -> None:
        self.policy = policy or GatewayPolicy()
        self._commands = self.policy.commands
        self._journal = journal
        self._ledger = ledger
        self._accounts = accounts
        control = self.policy.control
        self._control_horizon = control.horizon()
        self._lasts = control.lasts
        self._inbox = Inbox(
            OutboxPolicy("device", control.resend, patience=control.patience, quiet=True),
            ledger.worker,
            lanes=msgspec.structs.replace(control.lanes(), ahead=self.policy.ahead),
            horizon=self._horizon,
            refuse=self._refuse_now,
            permit=self._forbidden,
            backlog=Backlog(self.policy.backlog),
            shared=bell is not None,
            once=lambda message: accounts.is_sent_once(message.recipient),
            patience=lambda message: timeout_in(message.body) * MS,
        )
        self.remote = None if bell is None else GatewayRemoteHubs(ledger, bell, self._inbox.channel, self)
        ours = None if self.remote is None else self.remote.ours
        self.engine = Engine(self._inbox, ledger, self._perform, fair=True, ours=ours)
        self.devices = DeviceList(ledger, accounts, self.online)
        self._unaddressed = UnaddressedAcks()
        self._devices: dict[str, Session] = {}
        self._apps: dict[str, list[Session]] = {}
        self.pushes = PushService(ledger, journal, self._listeners, self._stored, accounts.born)
        self._presence = None if bell is not None else DevicePresence(ledger, self.pushes)
        self._trails = TraceLog(ledger.clock)

    @property
    def types(self) -> frozenset[str]:
        return self.policy.commands | self.policy.pushes | {"ack"}

    @property
    def prompt(self) -> frozenset[str]:
        return self.policy.commands

    async def start(self) -> None:
        if self.remote is not None:
            await self.remote.start()
        await self.engine.start()
        if self._presence is not None:
            await self._presence.start()
        await self.review()

    async def stop(self) -> None:
        await self.pushes.stop()
        if self._presence is not None:
            await self._presence.stop()
        await self.engine.stop()
        if self.remote is not None:
            await self.remote.stop()

    # ── who is here ──────────────────────────────────────────────────────────────────────────────

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        """Somebody has authenticated: greet them, and give them what they missed."""
        if who.role is Role.DEVICE:
            new = self.remote is None or await self.remote.registry.move_in(who.name)
            before = self._devices.get(who.name)
            self._devices[who.name] = session
            if before is not None:
                new = False
                before.close(REPLACED)
            session.push(frames.encode(self._welcome(who, {})))
            if self.remote is not None:
                try:
                    await self.remote.welcome(who.name)
                except LedgerError:
                    if self._devices.get(who.name) is session:
                        del self._devices[who.name]  # it was never reachable here
                    raise
                if self._devices.get(who.name) is not session:
                    return  # it has left meanwhile, or come again
            await self.engine.put(Reachable(who.name))
            if self._devices.get(who.name) is not session:
                return
            if self._presence is not None:
                await self._presence.came(who.name)
            elif new:
                await self.pushes.store(who.name, DEVICE_STATUS, ONLINE)
            return
        devices = sorted(self._accounts.granted(who.name))
        heads = {device: (await self._ledger.extent(stream_of(device))).last for device in devices}
        session.push(frames.encode(self._welcome(who, heads, self.devices.online_of(who.name))))
        seen = cursors or {}
        self._apps.setdefault(who.name, []).append(session)
        self.pushes.enter(session, {d: min(max(seen.get(d, head), 0), head) for d, head in heads.items()})

    async def disconnected(self, session: Session, who: Principal) -> None:
        self.pushes.leave(session)
        sessions = self._apps.get(who.name, [])
        if session in sessions:
            sessions.remove(session)
            if not sessions:
                del self._apps[who.name]
        if self._devices.get(who.name) is session:
            del self._devices[who.name]
            await self.engine.put(Unreachable(who.name))
            if self._presence is not None:
                await self._presence.went(who.name)
            elif self.remote is not None and await self.remote.registry.move_out(who.name):
                await self.pushes.store(who.name, DEVICE_STATUS, OFFLINE)

    def dismiss(self, name: str) -> None:
        """Hang up on everybody of this name: they are no longer who they were let in as."""
        device = self._devices.get(name)
        for session in [*self._apps.get(name, ()), *([] if device is None else [device])]:
            session.close("your token is no longer valid")

    def online(self, device: str) -> bool:
        """Whether a device is connected, here or, as far as is known, to another hub."""
        if device in self._devices:
            return True
        return self.remote is not None and self.remote.registry.at_home(device)

    def session(self, device: str) -> Session | None:
        """The session of a device that is connected here."""
        return self._devices.get(device)

    def presence(self) -> list[str]:
        """The devices that are connected, here or to another hub."""
        return sorted(self._devices) if self.remote is None else self.remote.registry.everybody()

    def _welcome(self, who: Principal, cursors: dict[str, int], online: list[str] | None = None) -> Frame:
        now = self._ledger.clock.now() // MS
        return Frame("welcome", you=who.name, time=now, cursors=cursors, online=online)

    # ── what they say ────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """A frame from somebody who has authenticated. What devices tell gets a `server_ack` only if it is a
        push with a `seq_id`."""
        if frame.type in self._commands:
            return self._submit(session, who, frame)
        if who.role is Role.DEVICE:
            self.devices.heard(who.name)
            return self._answered(who, frame) if frame.type == "ack" else self._pushed(session, who, frame)
        if frame.type in self.types:
            raise Malformed(f"a {who.role.value} cannot send {frame.type!r}")
        return self._submit(session, who, frame)

    def refused(self, who: Principal, seq_id: str) -> None:
        """A frame was refused before it became a command: its number leaves no gap, and its id is free."""
        with suppress(DulyError):
            made, n, _, _ = parts_of(seq_id)
            if n is not None and made and who.role is not Role.DEVICE:
                self.engine.offer(NumberRefused(who.name, n, made))

    def _submit(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """A command. Its `server_ack`, and later its `ack`, are pushed to the session."""
        message = frames.message_of(frame, who.name, self._end_of(frame))
        if who.role is Role.DEVICE:
            raise _not_granted(who.name, message.recipient)
        if not self._accounts.may(who, message.recipient):
            return self._look_for_grant(session, who, frame, message)
        return self._admit(session, who, frame, message)

    async def _look_for_grant(self, session: Session, who: Principal, frame: Frame, message: Message) -> bool:
        """Another hub may have made it a moment ago."""
        if not await self._accounts.find_grant(who, message.recipient):
            raise _not_granted(who.name, message.recipient)
        said = self._admit(session, who, frame, message)
        return said if isinstance(said, bool) else await said

    def _admit(
        self, session: Session, who: Principal, frame: Frame, message: Message
    ) -> bool | Awaitable[bool]:
        if message.made and message.made <= self._accounts.predecessor(who.name):
            raise Stale(
                f"this id is older than the account {who.name}, whose name was another's before; "
                "send it again with a new id, and check the clock"
            )
        if frame.exp is not None and message.expires > self._ledger.clock.now() + self.policy.max_exp:
            raise Malformed(
                f"exp is more than {show(self.policy.max_exp)} away; a command waits at most that long here "
                "(max_exp)"
            )
        if frame.queue and not message.expires:
            raise Malformed("a command that may wait needs exp, or an id that tells its age, like a seq_id")
        if message.kind == CHUNK and message.order is not None:
            message = msgspec.structs.replace(message, order=Order("", Mode.ANY, message.order.n))
        event = Arrived(message, session, frame.queue, self._accounts.proof(who, message.recipient))
        if self.remote is not None and not (frame.queue or self.online(message.recipient)):
            return self._ask_around(event)
        if self._inbox.backlog.waiting and self._excess(event) is not None:
            return self._take_slowly(event)
        return self._hand_over(event, answered=True)

    async def _ask_around(self, event: Arrived) -> bool:
        """Perhaps another hub has its device."""
        assert self.remote is not None
        await self.remote.registry.ask(event.message.recipient)
        await self.engine.put(event)
        return True

    async def _take_slowly(self, event: Arrived) -> bool:
        """Too much of its sender waits: it is heard no faster than we store that it was refused."""
        stored = asyncio.Event()
        await self.engine.put(event, stored.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_SECONDS):
                await stored.wait()
        return True

    def _hand_over(self, event: Event, *, answered: bool) -> bool | Awaitable[bool]:
        """To the engine: at once, or as soon as it has room."""
        try:
            self.engine.offer(event)
        except Overloaded:
            return self._wait_for_room(event, answered=answered)
        return answered

    async def _wait_for_room(self, event: Event, *, answered: bool) -> bool:
        await self.engine.put(event)
        return answered

    def _end_of(self, frame: Frame) -> int:
        """Every command has an end: without `exp`, a day for one that may wait, else half a minute.

        An end that we set must not make an old command young again. So what may wait has its day from the
        time in its id; and where the id has none, no end is set, and the ledger remembers it for ever.
        """
        if frame.seq_id is None or frame.exp is not None:
            return 0
        made, _, _, _ = parts_of(frame.seq_id)
        if not made:
            return 0
        return made + DAY if frame.queue else self._ledger.clock.now() + self._lasts

    def _answered(self, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        if frame.seq_id is None:
            raise Malformed("an ack needs seq_id: the command it answers")
        app = frame.to or self._whose(who.name, frame.seq_id)
        key = key_of(app, frame.seq_id)
        command = self._inbox.under_way(key)
        if frames.is_working(frame):
            if command is None or command.recipient != who.name:
                raise Malformed(f"no command {frame.seq_id} of {app} is under way to {who.name}")
            return self._work(key, who.name, frame.progress, frames.more_in(frame))
        state, answer = frames.answer_of(frame)
        if command is None or command.recipient != who.name:
            return self._look_up(Answered(key, state, answer, by=who.name))
        end = Answered(key, state, answer, by=who.name, keep=command.kind != CHUNK)
        return self._hand_over(end, answered=False)

    def _whose(self, device: str, seq_id: str) -> str:
        """The app that an ack without `to` is for."""
        if not self._unaddressed.knows(device):
            self._unaddressed.learn(device, self._inbox.all_under_way(device))
        scopes = self._unaddressed.find(device, seq_id)
        if len(scopes) != 1:
            which = "several commands" if scopes else "no command"
            raise Malformed(f"{which} {seq_id} under way to {device}: say in 'to' which app's it answers")
        return scopes[0]

    async def _work(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> bool:
        """A device is at work: no resends, its deadline anew, and its app is told once that is stored."""
        await self.engine.put(Received(key), lambda: self.tell_progress(key, device, progress, more))
        return False

    def tell_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Tell an app how far a device is; those that wait over HTTP wait for the end."""
        scope, id_ = names_in(key)
        self._trails.note(key, "at work")
        frame = frames.working(id_, device, progress, more)
        for session in self._apps.get(scope, ()):
            session.push(frame)

    async def _look_up(self, end: Answered) -> bool:
        """On its way to nobody: a late word, or a stranger's. The ledger knows whose command that was."""
        record = None if self._inbox.under_way(end.key) else await self._ledger.find(end.key)
        if record is not None and not record.state.terminal and not self._handed_over(record):
            record = None
        if record is None or record.message.recipient != end.by:
            _, id_ = names_in(end.key)
            await self._journal.refuse(end.by, id_, "not_yours", f"{end.by} answered a command it never got")
            return False
        await self.engine.put(msgspec.structs.replace(end, keep=record.message.kind != CHUNK))
        return False

    async def _pushed(self, session: Session, who: Principal, frame: Frame) -> bool:
        if frame.seq_id is None:
            await self.pushes.store(who.name, frame.type, frame.data, frames.more_in_push(frame))
            return False
        verdict = await self.pushes.receive(session, who.name, frame)
        session.push(frames.encode(frames.server_ack(frame.seq_id, verdict)))
        return True

    def _handed_over(self, record: Record) -> bool:
        """Whether its device may have it from another hub."""
        return self.remote is not None and record.state is not State.ACCEPTED

    async def push_from(
        self, device: str, kind: str, data: object, id_: str | None, more: Fields, said: bytes, old: bool
    ) -> Verdict | None:
        """A device behind a broker tells something; with an id, what to answer it."""
        self.check_push(kind)
        if id_ is not None:
            return await self.pushes.store_once(device, id_, kind, frames.dump(data), more)
        await self.pushes.store(device, kind, frames.dump(data), more, said, old)
        return None

    def check_push(self, kind: str) -> None:
        if kind in self._commands or not frames.is_own_type(kind):
            raise Malformed(f"{kind[:80]!r} cannot be a push type; use a–z, 0–9 and _, at most 64")

    def has(self, key: bytes) -> bool:
        """Whether a command is under way here."""
        return self._inbox.is_live(key)

    def under_way_to(self, key: bytes) -> str | None:
        """To whom a command is under way from here."""
        message = self._inbox.under_way(key)
        return None if message is None else message.recipient

    async def handed_to(self, key: bytes) -> str | None:
        """To whom a command was handed over; None if to nobody yet, or if nothing is known of it."""
        recipient = self.under_way_to(key)
        if recipient is not None:
            return recipient
        record = None if self._inbox.is_live(key) else await self._ledger.find(key)
        if record is None or not (record.state.terminal or self._handed_over(record)):
            return None
        return record.message.recipient

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def _horizon(self, kind: str) -> Horizon:
        return CHUNK_HORIZON if kind == CHUNK else self._control_horizon

    def _refuse_now(self, event: Arrived, now: int) -> Verdict | None:
        control = self.policy.control
        message, recipient = event.message, event.message.recipient
        if message.made and message.made + control.max_age <= now and not event.patient:
            return Verdict(Word.STALE, reason="it is too old to be done now; send it again with a new id")
        if event.patient or recipient in self._devices or self.online(recipient):
            excess = self._excess(event) if self._inbox.backlog.waiting else None
            return None if excess is None else _too_much(excess)
        offline = f"{recipient} is offline; try later, or send it with queue"
        return Verdict(Word.REFUSED, reason=offline, cause="offline")

    def _excess(self, event: Arrived) -> str | None:
        """Why a command may not wait here, too; None if it may, or need not."""
        recipient = event.message.recipient
        here = recipient in self._devices
        if here and self._inbox.lanes.has_room(recipient):
            return None
        # One for a device remote is on its way at once: what else waits of its sender is no reason.
        remote = not here and self.online(recipient)
        return self._inbox.backlog.excess("" if remote else event.message.scope, recipient)

    def _forbidden(self, message: Message) -> str | None:
        """Why a command that was taken may not be handed over any more: permission is judged again then."""
        if self._accounts.allows(message.scope, message.recipient):
            return None
        return f"{message.scope} may no longer command {message.recipient}"

    def _may_repeat(self, message: Message) -> bool:
        """Whether a command may be handed over again: it is allowed, and neither name is another's by now."""
        removed = max(map(self._accounts.predecessor, (message.scope, message.recipient)))
        return self._forbidden(message) is None and (not removed or message.made > removed)

    async def review(self) -> None:
        """Cancel what waits and is no longer allowed: a grant was revoked, an app or a device removed."""
        if self.remote is None:
            waiting = self._inbox.waiting()
        else:
            open_ = await self._ledger.open_deliveries(self._inbox.channel)
            waiting = [item.message for item in open_ if not item.delivery.attempt]
        for message in waiting:
            reason = self._forbidden(message)
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
        self._trails.note(message.key, verdict.named)
        if self._journal.watchers:
            self._journal.see(
                "said",
                scope=message.scope,
                id=message.id,
                word=verdict.named,
                to=message.recipient,
                kind=message.kind,
            )
        _push_to((reply.origin,), frames.encode(frames.server_ack(message.id, verdict)))
        if self.remote is not None:
            self.remote.told(message, verdict, reply.origin)
        if verdict.state is not None and verdict.state.terminal and verdict.answer is not None:
            ended = frames.ack(message.id, message.recipient, verdict.state, verdict.answer)
            _push_to((reply.origin,), frames.encode(ended))

    def _pass_on(self, transmit: Transmit) -> None:
        message, attempt = transmit.message, transmit.attempt
        device = self._devices.get(message.recipient)
        if device is None:
            return
        if transmit.again and ((attempt > 1 and device.congested) or not self._may_repeat(message)):
            return  # it still waits in the socket's queue; or it may not be sent again
        self._trails.note(message.key, "sent", attempt)
        device.push(frames.command(message, transmit.after))
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
        if self.remote is not None:
            also = self.remote.ended(report.key, report.state)
            origins = (*origins, *(origin for origin in also if origin not in origins))
        self._tell_end(report.key, report.state, report.answer, report.recipient, origins)

    def _tell_end(
        self, key: bytes, state: State, answer: Answer, recipient: str, origins: Collection[Origin]
    ) -> None:
        scope, id_ = names_in(key)
        if self._unaddressed.scopes:
            self._unaddressed.ended(key, recipient, state)
        self._trails.note(key, state.word)
        if self._journal.watchers:
            self._journal.see("ended", scope=scope, id=id_, state=state.word, code=answer.code, to=recipient)
        frame = frames.encode(frames.ack(id_, recipient, state, answer))
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
        """When what happened to a command here, of the newest ones; how it ended the ledger knows anyway."""
        return self._trails.of(key)

    def _listeners(self, device: str) -> list[Session]:
        """The connections of the apps that may hear a device."""
        apps = self._accounts.apps_of(device)
        return [session for app in sorted(apps) for session in self._apps.get(app, ())]

    def _stored(self, device: str) -> None:
        if self.remote is not None:
            self.remote.pushed(device)

    # ── what the remote ask for ──────────────────────────────────────────────────────────────

    @property
    def here(self) -> Collection[str]:
        return self._devices.keys()

    def hears(self, scope: str) -> bool:
        return scope in self._apps

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        message, answer = record.message, record.answer or Answer()
        self._inbox.backlog.remove(message.key)
        self._tell_end(message.key, record.state, answer, message.recipient, list(origins))

    async def replaced(self, device: str) -> None:
        session = self._devices.pop(device, None)
        if session is not None:
            session.close(REPLACED)
            await self.engine.put(Unreachable(device))

    async def vanished(self, device: str) -> None:
        if device not in self._devices:
            await self.pushes.store(device, DEVICE_STATUS, OFFLINE)

    def heads(self) -> dict[str, int]:
        return self.pushes.heads()

    async def catch_up_all(self, device: str) -> None:
        self.pushes.look(device)


def _too_much(excess: str) -> Verdict:
    reason = f"{excess}; try again when some of them have ended"
    return Verdict(Word.REFUSED, reason=reason, cause=RateLimited.word, wait=TRY_AGAIN)


def _not_granted(app: str, device: str) -> NotAllowed:
    return NotAllowed(f"{app} may not command {device}; ask for a grant")


def _push_to(origins: Iterable[Any], frame: bytes) -> None:
    for origin in origins:
        if origin is not None:
            origin.push(frame)
