"""The gateway (seed 000): app → hub → device, with two acknowledgements.

The laws. `server_ack` goes out after the command is committed, the device's `ack` is passed on after the
end is. A repeat gets code 5, the state, and the stored `ack` if there is one. A device that never answers
ends as `unknown`, and a late answer settles it and is passed on. An offline device refuses (code 1, the id
is not burned) unless the command may wait (`queue`). Who sends is who has authenticated, whatever a frame
says.

Everything durable rides on the kernel: `Inbox`, `Engine`, streams. Here is what a frame means, who is
connected, and who may talk to whom. A session is anything that frames can be pushed to: a WebSocket, an
HTTP request that waits, an MQTT node. Where this is not the only hub, `neighbours` says what that means.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from duly.apps.control import ControlPolicy
from duly.apps.neighbours import Neighbours
from duly.apps.presence import Presence
from duly.apps.unaddressed import Unaddressed
from duly.auth import Accounts, Principal, Role
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Mode, Order, Verdict, Word, key_of, names_in, parts_of
from duly.core.outbox import OutboxPolicy
from duly.core.steps import (
    Answered,
    Arrived,
    Effect,
    Event,
    Origin,
    Reachable,
    Received,
    Refused,
    Reply,
    Report,
    Transmit,
    Unreachable,
)
from duly.core.units import DAY, MINUTE, MS
from duly.core.writes import Append
from duly.dialects import frames
from duly.dialects.fields import Fields, timeout_in
from duly.dialects.frames import DEVICE_STATUS, Frame
from duly.doorbell import Doorbell
from duly.engine import Engine
from duly.errors import DulyError, LedgerError, Malformed, NotAllowed, Overloaded
from duly.journal import Journal
from duly.ledger import Ledger, Record
from duly.transport import Session

CHUNK: Final = "media_download_chunk"
CHUNK_HORIZON: Final = Horizon(keep=10 * MINUTE)
"""Chunks are read, not done: a class of their own, remembered briefly and without their data, so that a
download of ten thousand pushes nothing else out of anything."""

PUSHES_KEPT: Final = 10_000
"""Per device: what an app that was away can catch up on."""
TRIM_EVERY: Final = 1_000
TRAILS_KEPT: Final = 5_000
HOPS_KEPT: Final = 50
SHOWN_BYTES: Final = 500
"""What a push says is shown to those who watch, unless it is long."""


class Hop(Struct, frozen=True, gc=False):
    """Something that happened to a command, when (ms), and in which attempt."""

    time: int
    what: str
    attempt: int = 0


class GatewayPolicy(Struct, frozen=True):
    control: ControlPolicy = ControlPolicy()
    commands: frozenset[str] = frames.COMMANDS
    pushes: frozenset[str] = frames.PUSHES


REPLACED: Final = "replaced by a newer connection of the same device"
ONLINE: Final = msgspec.Raw(b'{"online":true}')
OFFLINE: Final = msgspec.Raw(b'{"online":false}')


class Gateway:
    """One gateway on one ledger; with a `bell`, one of several."""

    roles = frozenset({Role.APP, Role.DEVICE, Role.ADMIN})
    open = True
    """other types than the documented ones are taken, too: from an app a command, from a device a push"""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        journal: Journal,
        policy: GatewayPolicy | None = None,
        bell: Doorbell | None = None,
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
            lanes=control.lanes(),
            horizon=self._horizon,
            refuse=self._refuse_offline,
            shared=bell is not None,
            once=lambda message: accounts.is_sent_once(message.recipient),
            patience=lambda message: timeout_in(message.body) * MS,
        )
        self.neighbours = None if bell is None else Neighbours(ledger, bell, self._inbox.channel, self)
        ours = None if self.neighbours is None else self.neighbours.ours
        self.engine = Engine(self._inbox, ledger, self._perform, ours=ours)
        self.devices = Presence(ledger, accounts, self.online)
        self._unaddressed = Unaddressed()
        self._devices: dict[str, Session] = {}
        self._apps: dict[str, list[Session]] = {}
        self._told: dict[Session, dict[str, int]] = {}
        """how far each app's session has been told what each device pushed"""
        self._behind: dict[tuple[Session, str], bool] = {}
        """who is just being told what they missed, and whether there is more since"""
        self._trails: OrderedDict[bytes, list[tuple[int, str, int]]] = OrderedDict()
        """hops as they are noted: there are three to a command, and hardly anybody asks"""

    @property
    def types(self) -> frozenset[str]:
        return self.policy.commands | self.policy.pushes | {"ack"}

    @property
    def prompt(self) -> frozenset[str]:
        return self.policy.commands

    async def start(self) -> None:
        if self.neighbours is not None:
            await self.neighbours.start()
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        if self.neighbours is not None:
            await self.neighbours.stop()

    # ── who is here ──────────────────────────────────────────────────────────────────────────────

    async def connected(
        self, session: Session, who: Principal, cursors: dict[str, int] | None = None
    ) -> None:
        """Somebody has authenticated: greet them, and give them what they missed."""
        if who.role is Role.DEVICE:
            new = self.neighbours is None or await self.neighbours.homes.move_in(who.name)
            before = self._devices.get(who.name)
            self._devices[who.name] = session
            if before is not None:
                new = False
                before.close(REPLACED)
            session.push(frames.encode(self._welcome(who, {})))
            if self.neighbours is not None:
                try:
                    await self.neighbours.welcome(who.name)
                except LedgerError:
                    if self._devices.get(who.name) is session:
                        del self._devices[who.name]  # it was never reachable here
                    raise
                if self._devices.get(who.name) is not session:
                    return  # it has left meanwhile, or come again
            await self.engine.put(Reachable(who.name))
            if new:
                await self._push(who.name, DEVICE_STATUS, ONLINE)
            return
        devices = sorted(self._accounts.granted(who.name))
        heads = {device: (await self._ledger.extent(_stream(device))).last for device in devices}
        session.push(frames.encode(self._welcome(who, heads, self.devices.online_of(who.name))))
        seen = cursors or {}
        self._told[session] = {d: min(max(seen.get(d, head), 0), head) for d, head in heads.items()}
        self._apps.setdefault(who.name, []).append(session)
        for device in devices:
            await self._catch_up(session, device)

    async def disconnected(self, session: Session, who: Principal) -> None:
        self._told.pop(session, None)
        sessions = self._apps.get(who.name, [])
        if session in sessions:
            sessions.remove(session)
            if not sessions:
                del self._apps[who.name]
        if self._devices.get(who.name) is session:
            del self._devices[who.name]
            await self.engine.put(Unreachable(who.name))
            if self.neighbours is None or await self.neighbours.homes.move_out(who.name):
                await self._push(who.name, DEVICE_STATUS, OFFLINE)

    def dismiss(self, name: str) -> None:
        """Hang up on everybody of this name: they are no longer who they were let in as."""
        device = self._devices.get(name)
        for session in [*self._apps.get(name, ()), *([] if device is None else [device])]:
            session.close("your token is no longer valid")

    def online(self, device: str) -> bool:
        """Whether a device is connected, here or, as far as is known, to another hub."""
        if device in self._devices:
            return True
        return self.neighbours is not None and self.neighbours.homes.at_home(device)

    def session(self, device: str) -> Session | None:
        """The session of a device that is connected here."""
        return self._devices.get(device)

    def presence(self) -> list[str]:
        """The devices that are connected, here or to another hub."""
        return sorted(self._devices) if self.neighbours is None else self.neighbours.homes.everybody()

    def _welcome(self, who: Principal, cursors: dict[str, int], online: list[str] | None = None) -> Frame:
        now = self._ledger.clock.now() // MS
        return Frame("welcome", you=who.name, time=now, cursors=cursors, online=online)

    # ── what they say ────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """A frame from somebody who has authenticated. What devices tell gets no `server_ack`."""
        if frame.type in self._commands:
            return self._submit(session, who, frame)
        if who.role is Role.DEVICE:
            self.devices.heard(who.name)
            return self._answered(who, frame) if frame.type == "ack" else self._pushed(who, frame)
        if frame.type in self.types:
            raise Malformed(f"a {who.role.value} cannot send {frame.type!r}")
        return self._submit(session, who, frame)

    def refused(self, who: Principal, seq_id: str) -> None:
        """A frame was refused before it became a command: its number leaves no gap, and its id is free."""
        with suppress(DulyError):
            made, n, _, _ = parts_of(seq_id)
            if n is not None and made and who.role is not Role.DEVICE:
                self.engine.offer(Refused(who.name, n, made))

    def _submit(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """A command. Its `server_ack`, and later its `ack`, are pushed to the session."""
        message = frames.message_of(frame, who.name, self._end_of(frame))
        if who.role is Role.DEVICE or not self._accounts.may(who, message.recipient):
            raise NotAllowed(f"{who.name} may not command {message.recipient}; ask for a grant")
        if frame.queue and not message.expires:
            raise Malformed("a command that may wait needs exp, or an id that tells its age, like a seq_id")
        if message.kind == CHUNK and message.order is not None:
            message = msgspec.structs.replace(message, order=Order("", Mode.ANY, message.order.n))
        event = Arrived(message, session, frame.queue)
        if self.neighbours is not None and not (frame.queue or self.online(message.recipient)):
            return self._ask_around(event)
        return self._hand_over(event, answered=True)

    async def _ask_around(self, event: Arrived) -> bool:
        """Perhaps another hub has its device."""
        assert self.neighbours is not None
        await self.neighbours.homes.ask(event.message.recipient)
        await self.engine.put(event)
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
        self._note_hop(key, "at work")
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

    async def _pushed(self, who: Principal, frame: Frame) -> bool:
        await self._push(who.name, frame.type, frame.data, frames.more_in_push(frame))
        return False

    def _handed_over(self, record: Record) -> bool:
        """Whether its device may have it from another hub."""
        return self.neighbours is not None and record.state is not State.ACCEPTED

    async def push_from(self, device: str, kind: str, data: object, more: Fields | None = None) -> None:
        """A device behind a broker tells something."""
        self.check_push(kind)
        await self._push(device, kind, frames.dump(data), more)

    def check_push(self, kind: str) -> None:
        if kind in self._commands or not frames.is_own_type(kind):
            raise Malformed(f"{kind[:80]!r} cannot be a push type; use a–z, 0–9 and _, at most 64")

    def has(self, key: bytes) -> bool:
        """Whether a command is under way here."""
        return self._inbox.is_live(key)

    async def recipient_of(self, key: bytes) -> str | None:
        """Whom a command was for, as long as anything is known of it."""
        message = self._inbox.message(key)
        if message is None:
            record = await self._ledger.find(key)
            message = None if record is None else record.message
        return None if message is None else message.recipient

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def _horizon(self, kind: str) -> Horizon:
        return CHUNK_HORIZON if kind == CHUNK else self._control_horizon

    def _refuse_offline(self, event: Arrived, now: int) -> Verdict | None:
        control = self.policy.control
        message = event.message
        if message.made and message.made + control.max_age <= now and not event.patient:
            return Verdict(Word.STALE, reason="it is too old to be done now; send it again with a new id")
        if event.patient or message.recipient in self._devices or self.online(message.recipient):
            return None
        return Verdict(
            Word.REFUSED,
            reason=f"{message.recipient} is offline; try later, or send it with queue",
            cause="offline",
        )

    # ── effects ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        if type(effect) is Reply:
            self._say(effect)
        elif type(effect) is Transmit:
            self._pass_on(effect)
        elif type(effect) is Report:
            self._report(effect)

    def _say(self, reply: Reply) -> None:
        message, verdict = reply.message, reply.verdict
        self._note_hop(message.key, verdict.named)
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
        if self.neighbours is not None:
            self.neighbours.told(message, verdict, reply.origin)
        if verdict.state is not None and verdict.state.terminal and verdict.answer is not None:
            ended = frames.ack(message.id, message.recipient, verdict.state, verdict.answer)
            _push_to((reply.origin,), frames.encode(ended))

    def _pass_on(self, transmit: Transmit) -> None:
        message, attempt = transmit.message, transmit.attempt
        device = self._devices.get(message.recipient)
        if device is None:
            return
        self._note_hop(message.key, "sent", attempt)
        device.push(frames.command(message, transmit.after))
        if self._unaddressed:
            self._unaddressed.began(message)
        if self._journal.watchers:
            self._journal.see(
                "sent", scope=message.scope, id=message.id, to=message.recipient, attempt=attempt
            )

    def _report(self, report: Report) -> None:
        origins = report.origins
        if self.neighbours is not None:
            also = self.neighbours.ended(report.key, report.state)
            origins = (*origins, *(origin for origin in also if origin not in origins))
        self._tell_end(report.key, report.state, report.answer, report.recipient, origins)

    def _tell_end(
        self, key: bytes, state: State, answer: Answer, recipient: str, origins: Collection[Origin]
    ) -> None:
        scope, id_ = names_in(key)
        if self._unaddressed:
            self._unaddressed.ended(key, recipient, state)
        self._note_hop(key, state.word)
        if self._journal.watchers:
            self._journal.see("ended", scope=scope, id=id_, state=state.word, code=answer.code, to=recipient)
        frame = frames.encode(frames.ack(id_, recipient, state, answer))
        _push_to(origins, frame)
        # An app that has reconnected meanwhile is not where it asked; it still wants to know.
        for session in self._apps.get(scope, ()):
            if session not in origins:
                session.push(frame)

    def _note_hop(self, key: bytes, what: str, attempt: int = 0) -> None:
        trail = self._trails.get(key)
        if trail is None:
            trail = self._trails[key] = []
            if len(self._trails) > TRAILS_KEPT:
                self._trails.popitem(last=False)
        if len(trail) < HOPS_KEPT:
            trail.append((self._ledger.clock.now(), what, attempt))

    def trail(self, key: bytes) -> list[Hop]:
        """When what happened to a command here, of the newest ones; how it ended the ledger knows anyway."""
        return [Hop(at // MS, what, attempt) for at, what, attempt in self._trails.get(key, ())]

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────

    async def _push(self, device: str, kind: str, data: msgspec.Raw, more: Fields | None = None) -> None:
        """Store, then tell: a push has a number in its device's stream before anybody sees it."""
        now = self._ledger.clock.now() // MS
        stored = frames.push(Frame(kind, from_=device, data=data, time=now), more)
        (n,) = await self._ledger.write(Append(_stream(device), stored, self._ledger.clock.now()))
        assert isinstance(n, int)
        frame = _numbered(stored, n)
        if self._journal.watchers:
            shown = frames.load(data) if len(bytes(data)) < SHOWN_BYTES else None
            self._journal.see("pushed", device=device, kind=kind, cursor=n, data=shown)
        if self.neighbours is not None:
            self.neighbours.pushed(device)
        for app in sorted(self._accounts.apps_of(device)):
            for session in list(self._apps.get(app, ())):
                await self._tell(session, device, n, frame)
        if n % TRIM_EVERY == 0:
            await self._ledger.trim(_stream(device), n - PUSHES_KEPT)

    async def _tell(self, session: Session, device: str, n: int, frame: bytes) -> None:
        """Tell a session the next push, once and in order; if it is behind, it hears it from the ledger."""
        told = self._told.get(session)
        if told is None:
            return
        if n == told.setdefault(device, n - 1) + 1:
            told[device] = n
            session.push(frame)
        elif n > told[device]:
            await self._catch_up(session, device)

    async def _catch_up(self, session: Session, device: str) -> None:
        told = self._told.get(session)
        if told is None:
            return  # they have left meanwhile
        if (session, device) in self._behind:
            self._behind[session, device] = True
            return
        self._behind[session, device] = True
        try:
            extent = await self._ledger.extent(_stream(device))
            if told.setdefault(device, extent.last) + 1 < extent.first:
                gap = {"type": "gap", "from": device, "after": told[device], "first": extent.first}
                session.push(msgspec.json.encode(gap))
                told[device] = extent.first - 1
            while self._behind[session, device]:
                self._behind[session, device] = False
                while entries := await self._ledger.entries(_stream(device), told[device]):
                    for entry in entries:
                        if entry.n > told[device]:  # it may have been told while we read
                            told[device] = entry.n
                            session.push(_numbered(entry.body, entry.n))
        finally:
            self._behind.pop((session, device), None)

    # ── what the neighbours ask for ──────────────────────────────────────────────────────────────

    @property
    def here(self) -> Collection[str]:
        return self._devices.keys()

    def hears(self, scope: str) -> bool:
        return scope in self._apps

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        message, answer = record.message, record.answer or Answer()
        self._tell_end(message.key, record.state, answer, message.recipient, list(origins))

    async def replaced(self, device: str) -> None:
        session = self._devices.pop(device, None)
        if session is not None:
            session.close(REPLACED)
            await self.engine.put(Unreachable(device))

    async def vanished(self, device: str) -> None:
        if device not in self._devices:
            await self._push(device, DEVICE_STATUS, OFFLINE)

    def heads(self) -> dict[str, int]:
        heads: dict[str, int] = {}
        for told in self._told.values():
            for device, n in told.items():
                heads[device] = min(n, heads.get(device, n))
        return heads

    async def catch_up_all(self, device: str) -> None:
        for app in sorted(self._accounts.apps_of(device)):
            for session in list(self._apps.get(app, ())):
                await self._catch_up(session, device)


def _stream(device: str) -> str:
    return f"push/{device}"


def _numbered(stored: bytes, n: int) -> bytes:
    """A stored push with its cursor, without taking it apart."""
    return b'%b,"cursor":%d}' % (stored[:-1], n)


def _push_to(origins: Iterable[Any], frame: bytes) -> None:
    for origin in origins:
        if origin is not None:
            origin.push(frame)
