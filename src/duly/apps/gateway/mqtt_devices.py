"""MQTT devices of the gateway: each is an FD node, and so is the hub (FD is a small task protocol over MQTT).

The laws. A command is a `pending` task whose action is the command's type and whose msg_id is
`{app}:{seq_id}:{tag}`; `ack` means delivered, `complete` is code 0, `failed` its code; `status` is presence.
What a device says is acknowledged to the broker (PUBACK) when it is committed, not before. Which answers
count is the matter of `duly.apps.gateway.mqtt_answers`, who is online that of
`duly.apps.gateway.mqtt_presence`.

Answers and reports come in two sessions: a broker hands over only so much at a time that is not acknowledged,
and a flood of reports would take all of it. What one device says makes no other wait
(`duly.runtime.fair_reader`), and what it says too fast is refused. No message ends the reading: whatever is
wrong with one is recorded, and it is acknowledged. What we did not subscribe to was planted in our session:
it is unsubscribed.

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
from math import inf
from typing import Final

from msgspec.structs import replace

from duly.apps.gateway.device_signatures import DeviceSignatures
from duly.apps.gateway.foreign_subscriptions import ForeignSubscriptions
from duly.apps.gateway.mqtt_absences import MqttAbsences
from duly.apps.gateway.mqtt_answers import MqttAnswers
from duly.apps.gateway.mqtt_device import DeviceLink, MqttDevice
from duly.apps.gateway.mqtt_frames import HeardMessage, MqttPush, push_in
from duly.apps.gateway.mqtt_presence import MqttPresence
from duly.apps.gateway.mqtt_pushes import MqttPushes
from duly.apps.gateway.reported_statuses import ReportedStatuses
from duly.apps.gateway.service import GatewayService
from duly.core.acl import HUB
from duly.core.quota import Quota, Rate
from duly.core.units import SECOND, seconds
from duly.errors import (
    DulyError,
    Forged,
    LedgerError,
    Malformed,
    NotAllowed,
    RateLimited,
    SenderError,
    Stopped,
)
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import RECOVERY
from duly.runtime.fair_reader import FairReader
from duly.runtime.refusal_tally import RefusalTally
from duly.runtime.tasks import Supervisor
from duly.wire import fd
from duly.wire.fd import FdKind
from duly.wire.task_ids import TaskIds, answered_id, read_task_id

LOG: Final = logging.getLogger("duly.mqtt")

TOLD: Final = Rate(200, SECOND, burst=500)
"""What a device may tell: reports of its status, and pushes. A large one counts as several."""
TOLD_BYTES: Final = 4_096
"""What counts as one."""

ASK_AGAIN: Final = 0.25
"""Seconds after which the hub asks once more for the retained statuses: the embedded broker may answer with
the status before, and not pass the newest on, if that was published while the hub subscribed."""

RUSH: Final = 200
RUSH_SECONDS: Final = 0.1
"""So many messages within so long are a reason to look who sends them. A large one counts as several."""


class _Rush:
    """Counts what arrives, and tells when that is more than usual."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._arrivals = 0
        self._counted_at = -inf

    def count(self, amount: int) -> None:
        """So much has arrived."""
        self._arrivals += amount
        if self._arrivals >= RUSH:
            self._arrivals = 0
            before, self._counted_at = self._counted_at, _now()
            if self._counted_at - before < RUSH_SECONDS:
                self._tell()


class MqttDevices:
    """All MQTT devices of a hub, over one pair of links. `on_rush` is called when more arrives than usual."""

    def __init__(
        self,
        gateway: GatewayService,
        accounts: Accounts,
        activity: ActivityLog,
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
        self._rush = _Rush(on_rush or (lambda: None))
        self._tasks = tasks or Supervisor()
        self.refusals = RefusalTally(activity, self._tasks)
        self._reader: FairReader[HeardMessage] = FairReader(self._handle, self._failed, RECOVERY, self._tasks)
        self.presence = MqttPresence()
        self._absences = MqttAbsences(gateway.ledger, accounts.created_at)
        self.reported = ReportedStatuses(gateway.clock)
        self._signatures = DeviceSignatures(accounts, prefix)
        self._task_answers = MqttAnswers(
            gateway, ids, self._signatures, self._reader, self._heard, self._is_at_another_hub
        )
        self._pushes = MqttPushes(gateway.pushes, prefix, lambda: self.link)
        self._foreign = ForeignSubscriptions(
            lambda: [link for link in (self.link, self.reports_link) if link is not None],
            (*self.answers, *self.reports),
            self._tasks,
        )
        self._told = Quota(TOLD)
        self._given: Counter[str] = Counter()
        self._devices: dict[str, MqttDevice] = {}
        self._kept: dict[str, HeardMessage] = {}
        """the retained status of each device that has not connected since the broker was started"""
        self._claiming = asyncio.Lock()
        self.link: DeviceLink | None = None
        self.reports_link: DeviceLink | None = None

    @property
    def answers(self) -> list[str]:
        """The topics of answers: the session that sends tasks subscribes to them."""
        return [fd.topic_of(self._prefix, HUB, kind) for kind in (FdKind.ACK, FdKind.COMPLETE, FdKind.FAILED)]

    @property
    def reports(self) -> list[str]:
        """The topics of statuses: the other session subscribes to them."""
        return [f"{self._prefix}/+/{FdKind.STATUS.value}"]

    @property
    def tasks(self) -> str:
        """The topics on which tasks are sent."""
        return f"{self._prefix}/+/{FdKind.PENDING.value}"

    async def start(self) -> None:
        """Reads which devices were offline when the hub last stopped, before anything arrives."""
        await self._absences.load()

    async def stop(self) -> None:
        """Stops reading from the broker, and stores the refusals that are not stored yet."""
        await self._reader.stop()
        with suppress(DulyError):
            await self.refusals.stop()

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def arrived(self, topic: str, payload: bytes, old: bool, again: bool, ack: Callable[[], None]) -> None:
        """A message from the broker. It is acknowledged when it is committed, or refused and recorded."""
        self._rush.count(1 + len(payload) // TOLD_BYTES)
        try:
            self._sort(topic, payload, old, again, ack)
        except (SenderError, RateLimited) as problem:
            scope, id_ = self._task_answers.named_in(payload) or (HUB, topic)
            self.refusals.note(scope, id_, problem.word, str(problem))
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

    def _sort(self, topic: str, payload: bytes, old: bool, again: bool, ack: Callable[[], None]) -> None:
        """Finds out the sender, cheaply: any client can send anything, and as much as a broker can carry."""
        try:
            username, kind = fd.parse_topic(self._prefix, topic)
        except SenderError:
            self._foreign.end(topic)
            raise
        heard = HeardMessage(topic, kind, payload, old, again, self.presence.connection, ack)
        if kind is FdKind.STATUS:
            if self._reports(username, len(payload)):
                self._reader.put(username, heard)
            else:
                if self._accounts.role_of(username) is Role.NODE:
                    self.reported.note(username, payload, again)
                ack()
        elif username == HUB and kind is not FdKind.PENDING:
            self._task_answers.sort(heard)
        else:
            self._foreign.end(topic)
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

    async def _handle(self, heard: HeardMessage) -> None:
        if heard.kind is FdKind.STATUS:
            username, _ = fd.parse_topic(self._prefix, heard.topic)
            await self._status(username, heard)
            heard.ack()
        else:
            await self._task_answers.handle(heard)

    def _failed(self, sender: str, heard: HeardMessage, problem: Exception) -> None:
        """Record what was wrong with a message, and acknowledge it: it would only come again."""
        if isinstance(problem, Stopped):
            return  # not acknowledged: it comes again
        if isinstance(problem, (SenderError, RateLimited)):
            scope, id_ = sender, heard.topic
            if self._accounts.role_of(sender) is not Role.DEVICE:
                scope, id_ = self._task_answers.named_in(heard.payload) or (HUB, heard.topic)
            self.refusals.note(scope, id_, problem.word, str(problem))
        else:
            self._broken(sender, heard.topic, problem)
        heard.ack()

    def _broken(self, sender: str, topic: str, problem: Exception) -> None:
        LOG.error("a message on %s could not be handled", topic, exc_info=problem)
        self.refusals.note(
            HUB, topic, "internal", f"what {sender} said could not be handled: {problem!r}"[:500]
        )

    def may_have(self, topic: str, payload: bytes, sent_at: int) -> bool:
        """Whether a task that a broker has kept since this time may still be given to its device."""
        try:
            device, _ = fd.parse_topic(self._prefix, topic)
            app = read_task_id(answered_id(payload)).app
        except SenderError:
            return True  # it is no task of ours
        strangers = (self._accounts.was_another(name, sent_at) for name in (app, device))
        return self._accounts.allows(app, device) and not any(strangers)

    async def dismiss(self, name: str) -> None:
        """Forgets a device whose account is gone: another of that name is offline until it connects."""
        if self._accounts.stored_role(name) is not Role.DEVICE:
            self._kept.pop(name, None)
            with suppress(LedgerError, Stopped):
                await self._gone(name)

    # ── presence ─────────────────────────────────────────────────────────────────────────────────

    async def _status(self, name: str, heard: HeardMessage) -> None:
        payload, old, again = heard.payload, heard.old, heard.again
        unconnected = not self.presence.has_returned(name)  # then it was said before the broker's start
        waited = again or unconnected
        status = await self._decode_status(name, payload)
        if status is not None and fd.is_question(status):
            return
        self.reported.note(name, payload, waited)
        session = status.session if status is not None else ""
        former = self.presence.is_former(name, session)
        online = status is not None and status.online is not False
        push = None if status is None else push_in(status, payload)
        known_before = unconnected or (
            status is not None and online and self._is_no_news(name, status, payload, kept=again)
        )
        if not online:
            self._kept.pop(name, None)
        if online and known_before:
            if unconnected and again:
                self._kept[name] = replace(heard, ack=_nothing)
            if push is None or (again and push.seq_id is None):
                return
            former = True  # the hub may not have stored the push; but the device is not back
        if status is not None and status.online is None and waited and push is None:
            return  # alone it is a sign of life, but not out of the broker's memory
        if not waited:
            self._heard(name)
        old = old or self.presence.is_repeat(name, session)
        self.presence.note_session(name, session)
        known = self._ours(name)
        if status is not None and push is not None and known is not None:
            self._absences.note(name, status, payload)
            await self._pushes.store(name, push, old or again)
            return
        if push is None and not old and not waited:
            self.presence.reported(name, heard.connection)
        kept = push is not None and self._gateway.remote.overhear(name, *push[:4])
        if former or (old and self.presence.is_overtaken(name, heard.connection)):
            if push is not None and not kept:
                await self._pushes.store(name, push, again=True)
            return
        if status is not None and online:
            self.presence.came(name, status, old)
            self._absences.note(name, status, payload)
            await self._absences.came(name)
            if known is None:
                await self._claim(name)
                if push is not None and not kept:
                    await self._pushes.store(name, push, old or again)  # it was the first we heard of it
            elif known.session != session:
                await self._connect(name, session)
        elif self.presence.ends(name, session):
            await self._gone(name)

    def _is_no_news(self, name: str, status: fd.FdStatus, payload: bytes, *, kept: bool) -> bool:
        """Whether a device had said this before it was found to be offline, or may have: one that did not
        come back after the hub's start, and says how often it reports, is back when it reports. What a broker
        that was late has kept of it may be from before."""
        if kept and status.heartbeat and self._gateway.remote.has_given_up(name):
            return True
        return self._absences.is_no_news(name, status, payload, kept=kept)

    async def _decode_status(self, name: str, payload: bytes) -> fd.FdStatus | None:
        """The status that an account has signed, if it must; None: it was removed."""
        if (
            self._accounts.role_of(name) is None
            and await self._accounts.find_role(name, HUB) is not Role.DEVICE
        ):
            raise Malformed(f"{name} reports its status, but there is no such device")
        status = fd.decode_status(payload)
        if status is not None:
            self._signatures.check(status, name)
        elif self._signatures.required(name):
            raise Forged(f"the status of {name} was removed; a removal cannot be signed")
        if status == fd.FdStatus():
            raise Malformed(f"the status of {name} says nothing; it says whether {name} is online")
        return status

    def connections(self, name: str, connected: bool) -> None:
        """The broker says that an account has a connection, or none any more. What it retains of a device
        counts once the device is connected: firmware may say only at its start that it is online."""
        self.presence.connections(name, connected)
        kept = self._kept.pop(name, None) if connected else None
        if kept is not None:
            self._reader.put(name, kept)

    def _heard(self, name: str) -> None:
        """A device has said something, whatever it was."""
        if self.presence.has_returned(name):
            self._gateway.devices.heard(name)
            self.presence.heard(name)

    async def _gone(self, name: str) -> None:
        self.presence.went(name)
        device = self._ours(name)
        self._devices.pop(name, None)  # it may come again while this is stored
        await self._absences.went(name)
        if device is not None:
            await self._gateway.disconnected(device, Principal(name, Role.DEVICE))

    def _ours(self, name: str) -> MqttDevice | None:
        """The device, if it belongs to this hub."""
        device = self._devices.get(name)
        return device if device is not None and self._gateway.sessions.devices.get(name) is device else None

    async def _is_at_another_hub(self, name: str) -> bool:
        """Whether another hub serves a device; that hub hears what it says, as well."""
        if self._ours(name) is not None:
            return False
        search = self._gateway.remote.search(name)
        return search is not None and await search

    async def _claim(self, name: str) -> None:
        remote = self._gateway.remote
        async with self._claiming:  # what it reported before is stored before what it reports next
            if not await remote.claim(name):
                return
            try:
                for push in await remote.take_unstored(name):
                    await self._pushes.store(name, MqttPush(*push))
                session = self.presence.session_of(name)
                if self._ours(name) is None and session is not None:
                    await self._connect(name, session)
            finally:
                remote.end_claim(name)

    async def claim_orphaned(self) -> None:
        """Claims the devices that no hub serves: theirs is gone, or could not store that it serves them."""
        with suppress(LedgerError, Stopped):
            here, remote = self._gateway.sessions.devices, self._gateway.remote
            for name in self.presence.online:
                if name not in here and not remote.is_at_another_hub(name):
                    await self._claim(name)

    async def _connect(self, name: str, session: str) -> None:
        assert self.link is not None
        device = MqttDevice(
            name, self.link, self._prefix, session, self._ids, self.refusals, self._give, self._gateway.clock
        )
        self._devices[name] = device
        await self._gateway.connected(device, Principal(name, Role.DEVICE), heard=False)

    def _give(self, name: str) -> None:
        self._given[name] += 1

    async def sweep(self) -> None:
        """Gives up the devices that are silent for too long."""
        for name in self.presence.silent():
            with suppress(LedgerError, Stopped):
                await self._gone(name)

    def reports_back(self, session_present: bool) -> None:
        """The link for reports is up again."""
        if not session_present:
            self.presence.session_began()
            self._tasks.after("question for retained statuses", ASK_AGAIN, self._ask_again)

    async def _ask_again(self) -> None:
        assert self.reports_link is not None
        with suppress(DulyError):  # the next connection subscribes anew
            await self.reports_link.subscribe(*self.reports)

    async def answers_back(self) -> None:
        """The link for tasks is up again: what was on its way may be lost, so every device gets it again."""
        for name, device in list(self._devices.items()):
            if self._ours(name) is device:
                with suppress(LedgerError):  # then the outbox repeats it in its own time
                    await self._connect(name, device.session)


def _nothing() -> None:
    """The acknowledgement of what is acknowledged already."""


def _now() -> float:
    return asyncio.get_running_loop().time()
