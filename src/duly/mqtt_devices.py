"""MQTT devices of the gateway: they are FD nodes (seed 001), and so is the hub.

The laws. A command is a `pending` task whose action is the command's type and whose msg_id is
`{app}:{seq_id}`; `ack` means delivered, `complete` is code 0, `failed` its code; `status` is presence. What
a device says is acknowledged to the broker (PUBACK) when it is committed, not before. An answer counts only
for a task that this hub sent, and as the word of the device it was sent to.

A will tells when a device is gone, unless the broker dies with it. So whoever says how often he speaks is
given up after three times that in silence; and who is not heard of again after the broker has forgotten its
sessions, or was started anew by us, after a while. Of the others we know only what the broker says.

To the gateway a device here is a session like any other: frames are pushed to it, and leave as tasks.

Hubs that share a broker all hear everything, as one node. Each device has one of them as its home, whichever
was first; the others leave its answers and its news to that one, and compete again when it is gone. Whoever
then takes it in also stores what it has told meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from duly.apps.gateway import Gateway
from duly.auth import Accounts, Principal, Role
from duly.core.ids import time_of
from duly.core.lifecycle import State
from duly.core.messages import Answer, key_of
from duly.core.steps import Answered, Received
from duly.core.units import MS, SECOND
from duly.dialects import fd, frames
from duly.dialects.fd import Kind
from duly.dialects.fields import Fields
from duly.dialects.frames import DeviceCode, Frame
from duly.errors import DulyError, LedgerError, Malformed, SenderError, Stopped
from duly.journal import Journal

HUB: Final = "hub"
"""The hub's own name among the nodes."""

GRACE: Final = 30.0
"""Seconds that a device has to come back after the broker was started anew."""

MISSED: Final = 3
"""Heartbeats that may be missed."""


class Link(Protocol):
    """What is needed of `duly.transports.mqtt.MqttLink`."""

    def post(self, topic: str, payload: bytes) -> None: ...


class _Presence(Struct):
    """Somebody who is there, by his own word. Times are the loop's."""

    session: str
    """which of his connections this is"""
    silence: float
    """seconds without a word after which he is given up; never, if he did not say how often he speaks"""
    heard: float
    until: float


class MqttDevice:
    """A device behind the broker."""

    def __init__(self, name: str, link: Link, prefix: str, session: str) -> None:
        self.name = name
        self.session = session
        """which of its connections this is, by its own word"""
        self._link = link
        self._prefix = prefix

    def push(self, frame: bytes) -> None:
        command = frames.decode(frame)
        if command.seq_id is None or command.from_ is None:
            return  # a welcome: nodes have no use for it
        task = fd.Pending(
            sender=HUB,
            receiver=self.name,
            msg_id=f"{command.from_}:{command.seq_id}",
            action=command.type,
            time=time_of(command.seq_id) or 0,
            exp=(command.exp or 0) * MS,
            payload=fd.Content(frames.payload_of(command)),
            order=frames.dump_order(command.order),
        )
        topic = fd.topic_of(self._prefix, self.name, Kind.PENDING)
        # Without a connection it is lost here; the outbox repeats it.
        with suppress(DulyError):
            self._link.post(topic, fd.encode(task))

    def close(self, reason: str) -> None:
        pass


class MqttDevices:
    """All of them, over one link."""

    def __init__(
        self, gateway: Gateway, accounts: Accounts, journal: Journal, *, prefix: str = fd.PREFIX
    ) -> None:
        self._gateway = gateway
        self._journal = journal
        self._accounts = accounts
        self._prefix = prefix
        self._devices: dict[str, MqttDevice] = {}
        self._new = False
        """the broker is a new one: what it keeps was said since it started"""
        self._lost = -inf
        """when the broker was lost"""
        self._online: dict[str, _Presence] = {}
        self._claiming = asyncio.Lock()
        self.link: Link | None = None

    @property
    def subscriptions(self) -> list[str]:
        mine = [fd.topic_of(self._prefix, HUB, kind) for kind in (Kind.ACK, Kind.COMPLETE, Kind.FAILED)]
        return [*mine, f"{self._prefix}/+/{Kind.STATUS.value}"]

    async def receive(
        self, topic: str, payload: bytes, ack: Callable[[], None], *, old: bool = False
    ) -> None:
        """Something from the broker; `old` if it may have been said before the broker started. What is wrong
        with it is recorded, never raised."""
        try:
            username, kind = fd.parse_topic(self._prefix, topic)
            if kind is Kind.STATUS:
                await self._status(username, payload, old)
                ack()
            else:
                await self._answer(kind, payload, old, ack)
        except SenderError as problem:
            await self._journal.refuse("mqtt", topic, problem.word, str(problem))
            ack()

    # ── presence ─────────────────────────────────────────────────────────────────────────────────

    async def _status(self, name: str, payload: bytes, old: bool) -> None:
        if name == HUB:
            return
        if self._accounts.role_of(name) is not Role.DEVICE:
            raise Malformed(f"{name} reports its status, but there is no such device")
        status = fd.decode_status(payload)
        if not old:
            self._heard(name)
        known = self._ours(name)
        if status is not None and (push := _push_in(status)) is not None:
            if known is not None:
                await self._gateway.push_from(name, *push)
                return
            self._gateway.check_push(push[0])
            if self._gateway.neighbours is not None:
                self._gateway.neighbours.overheard.keep(name, *push)
        online = status is not None and status.online is not False
        session = status.session if status is not None else ""
        if status is not None and online:
            self._online[name] = self._presence(name, status, old)
            if known is None:
                await self._claim(name)
            elif known.session != session:
                await self._connect(name, session)
        elif name not in self._online or session in ("", self._online[name].session):
            # An older connection's will that lands after the news of a newer one is not the newer one's.
            await self._gone(name)

    def _presence(self, name: str, status: fd.Status, old: bool) -> _Presence:
        now, before = _now(), self._online.get(name)
        silence = MISSED * status.heartbeat / SECOND or inf
        if not old or self._new:
            until = now + silence
        elif before is None:  # it may have been said before the broker died, and he with it
            until = now + GRACE
        else:
            until = before.until
        return _Presence(status.session, silence, now, until)

    def _heard(self, name: str) -> None:
        """He has said something, whatever it was."""
        presence = self._online.get(name)
        if presence is not None:
            presence.heard = _now()
            presence.until = presence.heard + presence.silence

    async def _gone(self, name: str) -> None:
        self._online.pop(name, None)
        if self._ours(name) is not None:
            await self._disconnect(name)

    def _ours(self, name: str) -> MqttDevice | None:
        """The device, if this hub is its home."""
        device = self._devices.get(name)
        return device if device is not None and self._gateway.session(name) is device else None

    async def _claim(self, name: str) -> None:
        neighbours = self._gateway.neighbours
        async with self._claiming:  # what it told before goes before what it tells next
            if neighbours is None:
                await self._connect(name, self._online[name].session)
            elif await neighbours.homes.claim(name):
                for push in await neighbours.overheard.left(name):
                    await self._gateway.push_from(name, *push)
                if self._ours(name) is None and name in self._online:
                    await self._connect(name, self._online[name].session)

    async def look(self) -> None:
        """Whoever has lost his home gets another."""
        with suppress(LedgerError, Stopped):
            for name in list(self._online):
                if not self._gateway.online(name):
                    await self._claim(name)

    async def _connect(self, name: str, session: str) -> None:
        assert self.link is not None
        device = self._devices[name] = MqttDevice(name, self.link, self._prefix, session)
        await self._gateway.connected(device, Principal(name, Role.DEVICE))

    async def _disconnect(self, name: str) -> None:
        await self._gateway.disconnected(self._devices.pop(name), Principal(name, Role.DEVICE))

    def broker_restarted(self) -> None:
        """Every connection to it is gone, with the wills. Who lives comes back and says so; until then we
        go on as if they all did."""
        self._new = False
        self._doubt(lambda _: True)

    def _doubt(self, whom: Callable[[_Presence], bool]) -> None:
        until = _now() + GRACE
        for presence in filter(whom, self._online.values()):
            presence.until = min(presence.until, until)

    async def sweep(self) -> None:
        """Give up those who are silent for too long."""
        now = _now()
        for name in [name for name, presence in self._online.items() if presence.until <= now]:
            with suppress(LedgerError, Stopped):
                await self._gone(name)

    def lost(self) -> None:
        """The link has broken."""
        self._lost = _now()

    async def reconnected(self, session_present: bool) -> None:
        """The link is back: what was on its way may be lost, so everybody gets it again."""
        if not session_present:  # a device that was here before us is known only by what was kept of it
            self._new = True
            for presence in self._online.values():
                presence.until = presence.heard + presence.silence
            self._doubt(lambda presence: presence.heard < self._lost)
        for name, device in list(self._devices.items()):
            if self._ours(name) is device:
                with suppress(LedgerError):  # then the outbox repeats it in its own time
                    await self._connect(name, device.session)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, kind: Kind, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
        answer = fd.decode(kind, payload)
        assert isinstance(answer, fd.Ack | fd.Complete | fd.Failed)
        app, colon, seq_id = answer.msg_id.partition(":")
        if not colon:
            raise Malformed(f"{answer.msg_id!r} is no task of this hub; answer with the msg_id of the task")
        key = key_of(app, seq_id)
        device = await self._gateway.recipient_of(key)
        if device is None:
            raise Malformed(f"{answer.msg_id!r} is no task of this hub (any more)")
        if not old:
            self._heard(device)
        if await self._hears_it_too(key, device):
            ack()
            return
        match answer:
            case fd.Ack(progress=progress):
                await self._gateway.engine.put(Received(key), ack)
                if progress.data:
                    self._gateway.tell_progress(key, device, frames.raw(_json(progress)), {})
            case fd.Complete(value=value):
                done = Answer(DeviceCode.DONE, _json(value))
                await self._gateway.engine.put(Answered(key, State.DONE, done, by=device), ack)
            case fd.Failed(error=error):
                state, failed = frames.answer_of(_failure(error))
                await self._gateway.engine.put(Answered(key, state, failed, by=device), ack)

    async def _hears_it_too(self, key: bytes, device: str) -> bool:
        """Whether an answer is another hub's business, which has heard it as well."""
        neighbours = self._gateway.neighbours
        if neighbours is None or self._gateway.has(key) or self._ours(device) is not None:
            return False
        return await neighbours.homes.ask(device)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _push_in(status: fd.Status) -> tuple[str, object, Fields] | None:
    """What a device tells besides its status: it has no other topic of its own to say it on."""
    match status.data.value if status.data.data else None:
        case {"type": str(kind), **rest}:
            return (
                kind,
                rest.pop("data", None),
                {str(name): msgspec.Raw(msgspec.json.encode(value)) for name, value in rest.items()},
            )
        case _:
            return None


def _json(content: fd.Content) -> bytes:
    """A node's bytes as the JSON data of an ack."""
    return b"" if content.value is None else msgspec.json.encode(content.value)


def _failure(content: fd.Content) -> Frame:
    """A failure as the ack it stands for: with its code, if it says one, and its words."""
    match content.value:
        case {"code": int(code), **rest} if 1 <= code <= 0xFFFF:
            said = rest.get("state")
            return Frame(
                "ack",
                code=code,
                detail=str(rest.get("detail", rest.get("error", "")))[:500],
                state=said if isinstance(said, str) else None,
            )
        case None:
            return Frame("ack", code=DeviceCode.HARDWARE_FAULT)
        case value:
            return Frame("ack", code=DeviceCode.HARDWARE_FAULT, detail=str(value)[:500])
