"""MQTT devices of the gateway: each is an FD node, and so is the hub (FD is a small task protocol over MQTT).

The laws. A command is a `pending` task whose action is the command's type and whose msg_id is
`{app}:{seq_id}:{tag}`; `ack` means delivered, `complete` is code 0, `failed` its code; `status` is presence.
What a device says is acknowledged to the broker (PUBACK) when it is committed, not before. An answer counts
only with the tag under which its device was given the task (`duly.wire.task_ids`), and only if the task
was handed over; from a device with a key, only with its signature.

Answers and reports come in two sessions: a broker hands over only so much at a time that is not acknowledged,
and a flood of reports would take all of it. What one device says makes no other wait
(`duly.runtime.fair_reader`), and what it says too fast is refused. No message ends the reading: whatever is
wrong with one is recorded, and it is acknowledged. What we did not subscribe to was planted in our session:
it is unsubscribed.

A will tells when a device is gone, unless the broker dies with it. So a device that says how often it reports
is given up after three times that in silence; and one that is not heard of again after the broker has
forgotten its sessions, or was started anew by the hub, after a while. Of the others the hub knows only what
the broker says.

To the gateway a device here is a session like any other (`duly.apps.gateway.mqtt_device`).

Hubs that share a broker all receive everything, as one node. Each device belongs to one of them, the first
that claimed it; the others leave its answers and reports to that hub, and compete again when it is gone. The
hub that then claims the device also stores what the device has reported meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from math import inf
from typing import Final

from msgspec import Struct

from duly.apps.gateway.mqtt_device import DeviceLink, MqttDevice
from duly.apps.gateway.mqtt_frames import MqttPush, answer_to_push, data_of, failure_of, push_in
from duly.apps.gateway.service import GatewayService
from duly.core.acl import HUB
from duly.core.lifecycle import State
from duly.core.messages import Answer, key_of
from duly.core.quota import Quota, Rate
from duly.core.signing import Keyring, read_key
from duly.core.steps import Answered, Received
from duly.core.units import SECOND, seconds
from duly.errors import (
    DulyError,
    Forged,
    LedgerError,
    Malformed,
    NotAllowed,
    Overloaded,
    RateLimited,
    SenderError,
    Stopped,
)
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.audit import AuditLog
from duly.runtime.engine import RECOVERY
from duly.runtime.fair_reader import FairReader
from duly.runtime.refusal_tally import RefusalTally
from duly.runtime.tasks import Supervisor
from duly.wire import fd, frames, outgoing
from duly.wire.fd import FdKind
from duly.wire.fd_signatures import FdSignatures
from duly.wire.frames import DeviceCode, ServerCode
from duly.wire.outgoing import ServerAck
from duly.wire.task_ids import TaskId, TaskIds, answered_id, read_task_id

LOG: Final = logging.getLogger("duly.mqtt")

GRACE: Final = 30.0
"""Seconds that a device has to come back after the broker was started anew."""

MISSED: Final = 3
"""Heartbeats that may be missed."""

TOLD: Final = Rate(200, SECOND, burst=500)
"""What a device may tell: reports of its status, and pushes. A large one counts as several."""
TOLD_BYTES: Final = 4_096
"""What counts as one."""

LATE: Final = Rate(1, SECOND, burst=10)
"""How often a command may be answered that is no longer under way: each costs a look into the ledger."""

RUSH: Final = 200
RUSH_SECONDS: Final = 0.1
"""So many messages within so long are a reason to look who sends them. A large one counts as several."""

STRAYS: Final = 100
"""Topics that were planted in our session and are unsubscribed at the same time, at most."""


class _HeardMessage(Struct, frozen=True):
    """A message from the broker; `old` if it may have been said before the broker started, `again` if the
    broker had kept it or may have sent it before."""

    topic: str
    kind: FdKind
    payload: bytes
    old: bool
    again: bool
    ack: Callable[[], None]


class _Answer(Struct, frozen=True):
    """An answer with a tag of ours, and the key of its command."""

    said: fd.FdAck | fd.FdComplete | fd.FdFailed
    task: TaskId
    key: bytes


class _Presence(Struct):
    """A device that is online, by its own word. Times are the loop's."""

    session: str
    """which of its connections this is"""
    silence: float
    """seconds of silence after which it is given up; infinite, if it does not say how often it reports"""
    heard: float
    until: float
    doubted: bool = False
    """its broker died: only a new connection of the device is news of it"""


class MqttDevices:
    """All MQTT devices of a hub, over one pair of links."""

    def __init__(
        self,
        gateway: GatewayService,
        accounts: Accounts,
        audit: AuditLog,
        ids: TaskIds,
        tasks: Supervisor | None = None,
        *,
        prefix: str = fd.PREFIX,
        on_rush: Callable[[], None] | None = None,
    ) -> None:
        self._gateway = gateway
        self._accounts = accounts
        self._ids = ids
        self._prefix = prefix
        self._on_rush = on_rush
        """hears that more arrives than usual"""
        self._tasks = tasks or Supervisor()
        self.refusals = RefusalTally(audit, self._tasks)
        self._reader: FairReader[_HeardMessage] = FairReader(
            self._handle, self._failed, RECOVERY, self._tasks
        )
        self._told = Quota(TOLD)
        self._late = Quota(LATE)
        self._signatures: dict[tuple[str, str], FdSignatures] = {}
        """what checks the signatures of a device with this key"""
        self._arrivals = 0
        self._counted_at = -inf
        self._strays: set[str] = set()
        self._given: Counter[str] = Counter()
        self._devices: dict[str, MqttDevice] = {}
        self._new = False
        """the broker is a new one: what it keeps was said since it started"""
        self._lost = -inf
        """when the broker was lost"""
        self._online: dict[str, _Presence] = {}
        self._unconnected: set[str] = set()
        """accounts that had a connection to the embedded broker and have none now"""
        self._given_up: dict[str, str] = {}
        """the session of each device that was silent for too long"""
        self._claiming = asyncio.Lock()
        self.link: DeviceLink | None = None
        self.reports_link: DeviceLink | None = None

    @property
    def answers(self) -> list[str]:
        """What is subscribed to in the session in which tasks are sent."""
        return [fd.topic_of(self._prefix, HUB, kind) for kind in (FdKind.ACK, FdKind.COMPLETE, FdKind.FAILED)]

    @property
    def reports(self) -> list[str]:
        """What is subscribed to in the other session."""
        return [f"{self._prefix}/+/{FdKind.STATUS.value}"]

    async def stop(self) -> None:
        """Stops reading from the broker, and stores the refusals that are not stored yet."""
        await self._reader.stop()
        with suppress(DulyError):
            await self.refusals.stop()

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def arrived(self, topic: str, payload: bytes, old: bool, again: bool, ack: Callable[[], None]) -> None:
        """A message from the broker. It is acknowledged when it is committed, or refused and recorded."""
        self._count(1 + len(payload) // TOLD_BYTES)
        try:
            self._sort(topic, payload, old, again, ack)
        except (SenderError, RateLimited) as problem:
            self.refusals.note(HUB, topic, problem.word, str(problem))
            ack()
        except Stopped:
            return  # not acknowledged: it comes again
        except Exception as problem:
            self._broken(HUB, topic, problem)
            ack()

    def given(self) -> dict[str, int]:
        """How many tasks each device was given since this was last asked: that many it may answer."""
        given, self._given = self._given, Counter()
        return given

    def _count(self, amount: int) -> None:
        self._arrivals += amount
        if self._arrivals >= RUSH:
            self._arrivals = 0
            before, self._counted_at = self._counted_at, _now()
            if self._on_rush is not None and self._counted_at - before < RUSH_SECONDS:
                self._on_rush()

    def _sort(self, topic: str, payload: bytes, old: bool, again: bool, ack: Callable[[], None]) -> None:
        """Finds out the sender, cheaply: any client can send anything, and as much as a broker can carry."""
        try:
            username, kind = fd.parse_topic(self._prefix, topic)
        except SenderError:
            self._stray(topic)
            raise
        heard = _HeardMessage(topic, kind, payload, old, again, ack)
        if kind is FdKind.STATUS:
            if self._reports(username, len(payload)):
                self._reader.put(username, heard)
            else:
                ack()
        elif username == HUB and kind is not FdKind.PENDING:
            self._sort_answer(heard)
        else:
            self._stray(topic)
            raise NotAllowed(f"the hub did not subscribe to {topic}; unsubscribed")

    def _reports(self, name: str, size: int) -> bool:
        """Whether a report of this account's status is of interest; raises if it must not come."""
        role = self._accounts.role_of(name)
        if name == HUB or role is Role.NODE:
            return False
        if role not in (
            Role.DEVICE,
            None,
        ):  # one that is not known may have been made at another hub just now
            raise Malformed(f"{name} reports its status, but there is no such device")
        wait = self._told.take(name, seconds(_now()), 1 + size // TOLD_BYTES)
        if wait:
            self.refusals.note(
                name, FdKind.STATUS.value, RateLimited.word, f"{name} reports too often; dropped"
            )
        return not wait

    def _sort_answer(self, heard: _HeardMessage) -> None:
        """An answer to a command that is under way needs no look into the ledger, and no waiting."""
        task = self._task(heard)
        device = self._gateway.answers.under_way_to(key_of(task.app, task.seq_id))
        if device is None:
            late = f"{task.app}:{task.seq_id}"
            if self._late.take(late, seconds(_now())):
                raise RateLimited(f"{late} is answered again and again; dropped", LATE.interval)
            self._reader.put(late, heard)
        elif self._reader.busy(device):
            self._reader.put(device, heard)
        else:
            try:
                self._gateway.engine.offer(self._end(heard, self._read(heard), device), heard.ack)
            except (Overloaded, LedgerError):
                self._reader.put(device, heard)

    def _task(self, heard: _HeardMessage) -> TaskId:
        """The task that an answer names, if a hub has given it: all that is read of a forged one."""
        msg_id = answered_id(heard.payload)
        task = read_task_id(msg_id)
        if not self._ids.known(task):
            raise Forged(f"{msg_id[:80]!r} is the msg_id of no task that this hub has given a device")
        return task

    def _read(self, heard: _HeardMessage) -> _Answer:
        task = self._task(heard)
        said = fd.decode(heard.kind, heard.payload)
        assert isinstance(said, fd.FdAck | fd.FdComplete | fd.FdFailed)
        return _Answer(said, task, key_of(task.app, task.seq_id))

    def _stray(self, topic: str) -> None:
        """Another client has planted a subscription in our session: it is removed."""
        if topic not in self._strays and len(self._strays) < STRAYS:
            self._strays.add(topic)
            self._tasks.do("mqtt unsubscription", self._unsubscribe(topic))

    async def _unsubscribe(self, topic: str) -> None:
        """Ends the subscription in both sessions; if the connection breaks meanwhile, the next message on
        that topic has it ended."""
        ours = {*self.answers, *self.reports}
        filters = [each for each in _filters(topic) if each not in ours]
        try:
            for link in (self.link, self.reports_link):
                if link is not None:
                    with suppress(DulyError):
                        await link.unsubscribe(*filters)
        finally:
            self._strays.discard(topic)

    async def _handle(self, heard: _HeardMessage) -> None:
        if heard.kind is FdKind.STATUS:
            username, _ = fd.parse_topic(self._prefix, heard.topic)
            await self._status(username, heard.payload, heard.old, heard.again)
            heard.ack()
        else:
            await self._answer(heard)

    def _failed(self, sender: str, heard: _HeardMessage, problem: Exception) -> None:
        """What was wrong with a message is recorded, never raised."""
        if isinstance(problem, Stopped):
            return  # not acknowledged: it comes again
        if isinstance(problem, SenderError):
            scope = sender if self._accounts.role_of(sender) is Role.DEVICE else HUB
            self.refusals.note(scope, heard.topic, problem.word, str(problem))
        else:
            self._broken(sender, heard.topic, problem)
        heard.ack()

    def _broken(self, sender: str, topic: str, problem: Exception) -> None:
        LOG.error("a message on %s could not be handled", topic, exc_info=problem)
        self.refusals.note(
            HUB, topic, "internal", f"what {sender} said could not be handled: {problem!r}"[:500]
        )

    def _check_signature(self, message: fd.Fd, device: str) -> None:
        """Refuses what a device with a key has not signed."""
        key = self._accounts.key_of(device)
        if not key:
            return
        signatures = self._signatures.get((device, key))
        if signatures is None:
            ring = Keyring(HUB).trust(device, read_key(key))
            signatures = self._signatures[device, key] = FdSignatures(
                ring, prefix=self._prefix, required=True
            )
        signatures.check(message, by=device)

    # ── presence ─────────────────────────────────────────────────────────────────────────────────

    async def _status(self, name: str, payload: bytes, old: bool, again: bool) -> None:
        if (
            self._accounts.role_of(name) is None
            and await self._accounts.find_role(name, HUB) is not Role.DEVICE
        ):
            raise Malformed(f"{name} reports its status, but there is no such device")
        status = fd.decode_status(payload)
        if status is not None:
            self._check_signature(status, name)
        elif self._accounts.key_of(name):
            raise Forged(f"the status of {name} was removed; a removal cannot be signed")
        if status is not None and fd.is_question(status):
            return
        if not old:
            self._heard(name)
            old = status is not None and self._is_repeat(name, status)
        elif status is not None and status.session and status.session == self._given_up.get(name):
            return  # the broker kept it; it is no news of a device that was given up since
        known = self._ours(name)
        push = None if status is None else push_in(status, payload)
        if push is not None and known is not None:
            await self._take_push(name, push, old or again)
            return
        kept = push is not None and self._gateway.remote.overhear(name, *push[:4])
        online = status is not None and status.online is not False
        session = status.session if status is not None else ""
        if status is not None and online:
            self._online[name] = self._presence(name, status, old)
            if known is None:
                await self._claim(name)
                if push is not None and not kept:
                    await self._take_push(name, push, old or again)  # it was the first we heard of it
            elif known.session != session:
                await self._connect(name, session)
        elif name not in self._online or session in ("", self._online[name].session):
            # An older connection's will that lands after the news of a newer one is not the newer one's.
            await self._gone(name)

    async def _take_push(self, name: str, push: MqttPush, again: bool = False) -> None:
        """Stores a push; one with an id is answered, on the device's own `ack` or `failed`."""
        try:
            verdict = await self._gateway.pushes.store_from_broker(name, *push, again)
        except SenderError as problem:
            self._answer_push(
                name,
                push.seq_id,
                outgoing.trouble(push.seq_id, ServerCode.BAD_PARAMETERS, problem.word, str(problem)),
            )
            raise
        if verdict is not None:
            self._answer_push(name, push.seq_id, outgoing.server_ack(push.seq_id, verdict))

    def _answer_push(self, name: str, seq_id: str | None, said: ServerAck) -> None:
        if seq_id is None or self.link is None:
            return
        with suppress(DulyError):  # the device sends it again
            kind, text = answer_to_push(seq_id, said)
            self.link.post(fd.topic_of(self._prefix, name, kind), text)

    def _presence(self, name: str, status: fd.FdStatus, old: bool) -> _Presence:
        now, before = _now(), self._online.get(name)
        silence = MISSED * status.heartbeat / SECOND or inf
        if not old or self._new:
            until = self._silent_at(name, silence)
        elif before is None:  # it may be from before the broker died, and the device with it
            until = now + GRACE
        else:
            until = before.until
        return _Presence(
            status.session, silence, now, until, doubted=old and before is not None and before.doubted
        )

    def _is_repeat(self, name: str, status: fd.FdStatus) -> bool:
        """Whether a status is from before the broker died. What the hub had not acknowledged by then comes
        again, and the embedded broker does not always mark it as a repeat."""
        before = self._online.get(name)
        return before is not None and before.doubted and status.session == before.session != ""

    def _heard(self, name: str) -> None:
        """A device has said something, whatever it was."""
        self._gateway.devices.heard(name)
        presence = self._online.get(name)
        if presence is not None and not presence.doubted:
            presence.heard = _now()
            presence.until = self._silent_at(name, presence.silence)

    async def _gone(self, name: str) -> None:
        self._online.pop(name, None)
        if self._ours(name) is not None:
            await self._disconnect(name)

    def _ours(self, name: str) -> MqttDevice | None:
        """The device, if it belongs to this hub."""
        device = self._devices.get(name)
        return device if device is not None and self._gateway.sessions.devices.get(name) is device else None

    async def _claim(self, name: str) -> None:
        remote = self._gateway.remote
        async with self._claiming:  # what it reported before is stored before what it reports next
            if await remote.claim(name):
                for push in await remote.take_unstored(name):
                    await self._take_push(name, MqttPush(*push))
                if self._ours(name) is None and name in self._online:
                    await self._connect(name, self._online[name].session)

    async def claim_orphaned(self) -> None:
        """Claims the devices whose hub is gone."""
        with suppress(LedgerError, Stopped):
            for name in list(self._online):
                if not self._gateway.online(name):
                    await self._claim(name)

    async def _connect(self, name: str, session: str) -> None:
        assert self.link is not None
        device = MqttDevice(name, self.link, self._prefix, session, self._ids, self.refusals, self._give)
        self._devices[name] = device
        await self._gateway.connected(device, Principal(name, Role.DEVICE), heard=False)

    def _give(self, name: str) -> None:
        self._given[name] += 1

    async def _disconnect(self, name: str) -> None:
        await self._gateway.disconnected(self._devices.pop(name), Principal(name, Role.DEVICE))

    def broker_restarted(self) -> None:
        """Every connection to the broker is gone, with the wills. A device that lives comes back and says so;
        until then all count as online."""
        self._new = False
        self._doubt(lambda _: True)
        for presence in self._online.values():
            presence.doubted = True

    def _doubt(self, whom: Callable[[_Presence], bool]) -> None:
        until = _now() + GRACE
        for presence in filter(whom, self._online.values()):
            presence.until = min(presence.until, until)

    def connections(self, name: str, connected: bool) -> None:
        """The broker says that an account has a connection, or none any more. A device that promises no
        heartbeat is then given up, unless it comes back: it may have no will either. One that does may
        sleep."""
        if connected:
            self._unconnected.discard(name)
        else:
            self._unconnected.add(name)
        presence = self._online.get(name)
        if presence is not None and presence.silence == inf and not presence.doubted:
            presence.until = self._silent_at(name, inf)

    def waited_for(self, name: str) -> bool:
        """Whether a device counts as online and is given up soon unless it is heard."""
        return name in self._online and self._online[name].until < inf

    def _silent_at(self, name: str, silence: float) -> float:
        """When a device that has just been heard is given up, if it says nothing more."""
        return _now() + (GRACE if silence == inf and name in self._unconnected else silence)

    async def sweep(self) -> None:
        """Gives up the devices that are silent for too long."""
        now = _now()
        silent = {name: each.session for name, each in self._online.items() if each.until <= now}
        for name, session in silent.items():
            with suppress(LedgerError, Stopped):
                self._given_up[name] = session
                await self._gone(name)

    def lost(self) -> None:
        """The link for reports has broken."""
        self._lost = _now()

    def reports_back(self, session_present: bool) -> None:
        """The link for reports is up again."""
        if not session_present:  # a device that was here before us is known only by what was kept of it
            self._new = True
            for presence in self._online.values():
                presence.until = presence.heard + presence.silence
            self._doubt(lambda presence: presence.heard < self._lost)

    async def answers_back(self) -> None:
        """The link for tasks is up again: what was on its way may be lost, so every device gets it again."""
        for name, device in list(self._devices.items()):
            if self._ours(name) is device:
                with suppress(LedgerError):  # then the outbox repeats it in its own time
                    await self._connect(name, device.session)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, heard: _HeardMessage) -> None:
        answer = self._read(heard)
        device = await self._gateway.answers.handed_to(answer.key)
        if device is None:
            name = f"{answer.task.app}:{answer.task.seq_id}"
            raise Malformed(f"{name} is no task that was handed to a device (any more)")
        event = self._end(heard, answer, device)
        if await self._hears_it_too(answer.key, device):
            heard.ack()
        else:
            await self._gateway.engine.put(event, heard.ack)

    def _end(self, heard: _HeardMessage, answer: _Answer, device: str) -> Received | Answered:
        """What an answer means, if it is this device's."""
        if not self._ids.fits(answer.task, device):
            raise Forged(
                f"{answer.task.app}:{answer.task.seq_id} was given to {device}, under another msg_id"
            )
        self._check_signature(answer.said, device)
        if not heard.old:
            self._heard(device)
        match answer.said:
            case fd.FdAck(progress=progress):
                if progress.data:
                    self._gateway.answers.tell_progress(answer.key, device, frames.raw(data_of(progress)), {})
                return Received(answer.key)
            case fd.FdComplete(value=value):
                done = Answer(DeviceCode.DONE, data_of(value))
                return Answered(answer.key, State.DONE, done, by=device)
            case fd.FdFailed(error=error):
                state, failed = frames.answer_of(failure_of(error))
                return Answered(answer.key, state, failed, by=device)

    async def _hears_it_too(self, key: bytes, device: str) -> bool:
        """Whether an answer is for another hub, which has received it as well."""
        if self._gateway.answers.is_under_way(key) or self._ours(device) is not None:
            return False
        search = self._gateway.remote.search(device)
        return search is not None and await search


def _now() -> float:
    return asyncio.get_running_loop().time()


def _filters(topic: str) -> list[str]:
    """The filters by which a topic may have been subscribed to.

    >>> _filters("a/b")
    ['a/b', 'a/+', '+/b', '+/+', '#', 'a/#', '+/#', 'a/b/#', 'a/+/#', '+/b/#', '+/+/#']
    """
    levels = topic.split("/")
    if len(levels) > 4:
        return [topic, "#"]
    whole = ["/".join(each) for each in product(*((level, "+") for level in levels))]
    below = [
        "/".join([*each, "#"])
        for n in range(len(levels) + 1)
        for each in product(*((level, "+") for level in levels[:n]))
    ]
    return [*whole, *below]
