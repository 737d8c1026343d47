"""MQTT devices of the gateway: each is an FD node, and so is the hub (FD is a small task protocol over MQTT).

The laws. A command is a `pending` task whose action is the command's type and whose msg_id is
`{app}:{seq_id}:{tag}`; `ack` means delivered, `complete` is code 0, `failed` its code; `status` is presence.
A message from a device is acknowledged to the broker (PUBACK) only when it is committed.
`duly.apps.gateway.mqtt_answers` decides which answers count, `duly.apps.gateway.mqtt_presence` which devices
are online.

Answers and reports arrive in two sessions: a broker limits the unacknowledged messages of a session, and a
flood of reports would use up that limit. No device makes another one wait (`duly.runtime.fair_reader`), and
messages that come too fast are refused. An invalid message does not stop the reader: it is recorded and
acknowledged. A topic that the hub did not subscribe to was planted in its session by another client, and is
unsubscribed.

To the gateway a device here is a session like any other (`duly.apps.gateway.mqtt_device`). Hubs that share a
broker all receive everything, as one node; each leaves the answers and reports of a device to the hub that
serves it (`duly.apps.gateway.mqtt_device_sessions`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final

from msgspec.structs import replace

from duly.apps.gateway.device_signatures import DeviceSignatures
from duly.apps.gateway.dropped_pushes import DroppedPushes
from duly.apps.gateway.foreign_subscriptions import ForeignSubscriptions
from duly.apps.gateway.mqtt_absences import MqttAbsences
from duly.apps.gateway.mqtt_answers import MqttAnswers
from duly.apps.gateway.mqtt_device import DeviceLink
from duly.apps.gateway.mqtt_device_sessions import MqttDeviceSessions
from duly.apps.gateway.mqtt_frames import HeardMessage, push_in
from duly.apps.gateway.mqtt_presence import MqttPresence
from duly.apps.gateway.reported_statuses import ReportedStatuses
from duly.apps.gateway.service import GatewayService
from duly.core.acl import HUB
from duly.core.rate_limits import Rate, RateLimits
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
"""The rate of status reports and pushes per device. A large one counts as several."""
TOLD_BYTES: Final = 4_096
"""The bytes that count as one message."""

ASK_AGAIN: Final = 0.25
"""Seconds after which the hub asks once more for the retained statuses. The embedded broker may answer with
the previous status, and drop the newest one, if that was published while the hub subscribed."""

RUSH: Final = 200
RUSH_SECONDS: Final = 0.1
"""This many messages within this time start a search for their senders. A large one counts as several."""


class _Rush:
    """Counts arriving messages and reports when there are more than usual."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._arrivals = 0
        self._counted_at = -inf

    def count(self, amount: int) -> None:
        """Count arrived messages."""
        self._arrivals += amount
        if self._arrivals >= RUSH:
            self._arrivals = 0
            before, self._counted_at = self._counted_at, _now()
            if self._counted_at - before < RUSH_SECONDS:
                self._tell()


class MqttDevices:
    """All MQTT devices of a hub, over one pair of links. `on_rush` is called when more messages arrive than
    usual."""

    def __init__(
        self,
        gateway: GatewayService,
        accounts: Accounts,
        activity: ActivityLog,
        ids: TaskIds,
        tasks: Supervisor | None = None,
        *,
        on_rush: Callable[[], None] | None = None,
    ) -> None:
        self._gateway = gateway
        self._accounts = accounts
        self._rush = _Rush(on_rush or (lambda: None))
        self._tasks = tasks or Supervisor()
        self.refusals = RefusalTally(activity, self._tasks)
        self._reader: FairReader[HeardMessage] = FairReader(self._handle, self._failed, RECOVERY, self._tasks)
        self.presence = MqttPresence()
        self.sessions = MqttDeviceSessions(gateway, self.presence, ids, self.refusals)
        self._absences = MqttAbsences(gateway.ledger, accounts.created_at)
        self.reported = ReportedStatuses(gateway.ledger.clock)
        self._signatures = DeviceSignatures(accounts)
        self._task_answers = MqttAnswers(
            gateway, ids, self._signatures, self._reader, self._heard, self.sessions.is_at_another_hub
        )
        self._foreign = ForeignSubscriptions(
            lambda: [link for link in (self.sessions.link, self.reports_link) if link is not None],
            (*self.answers, *self.reports),
            self._tasks,
        )
        self._told = RateLimits(TOLD)
        self._dropped = DroppedPushes(self._signatures)
        self._kept: dict[str, HeardMessage] = {}
        """the retained statuses of devices that have not connected since the broker started"""
        self.reports_link: DeviceLink | None = None

    @property
    def answers(self) -> list[str]:
        """The topics of answers, which the session that sends tasks subscribes to."""
        return [fd.topic_of(fd.PREFIX, HUB, kind) for kind in (FdKind.ACK, FdKind.COMPLETE, FdKind.FAILED)]

    @property
    def reports(self) -> list[str]:
        """The topics of statuses, which the other session subscribes to."""
        return [f"{fd.PREFIX}/+/{FdKind.STATUS.value}"]

    @property
    def tasks(self) -> str:
        """The topics that tasks are sent to."""
        return f"{fd.PREFIX}/+/{FdKind.PENDING.value}"

    async def start(self) -> None:
        """Read which devices were offline when the hub last stopped, before any message arrives."""
        await self._absences.load()

    async def stop(self) -> None:
        """Stop reading from the broker, and store the refusals that are not stored yet."""
        await self._reader.stop()
        with suppress(DulyError):
            await self.refusals.stop()

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def arrived(self, topic: str, payload: bytes, old: bool, again: bool, ack: Callable[[], None]) -> None:
        """Process a message from the broker. It is acknowledged when it is committed, or refused and
        recorded."""
        self._rush.count(1 + len(payload) // TOLD_BYTES)
        try:
            self._sort(topic, payload, old, again, ack)
        except (SenderError, RateLimited) as problem:
            scope, id_ = self._task_answers.named_in(payload) or (HUB, topic)
            self.refusals.note(scope, id_, problem.word, str(problem))
            ack()
        except Stopped:
            return  # not acknowledged, so that it is sent again
        except Exception as problem:
            self._broken(HUB, topic, problem)
            ack()

    def _sort(self, topic: str, payload: bytes, old: bool, again: bool, ack: Callable[[], None]) -> None:
        """Find the sender cheaply: any client can send anything, at the full rate of the broker."""
        try:
            username, kind = fd.parse_topic(fd.PREFIX, topic)
        except SenderError:
            self._foreign.end(topic)
            raise
        heard = HeardMessage(topic, kind, payload, old, again, self.presence.connection, ack)
        if kind is FdKind.STATUS:
            role = self._accounts.stored_role(username)
            if not self._reports(username, role):
                if role is Role.NODE:
                    self.reported.note(username, payload, again)
                ack()
            elif self._is_too_often(username, len(payload)):
                if role is Role.DEVICE:
                    self._dropped.note(username, payload)
                ack()
            else:
                dropped = self._dropped.take(username)
                self._reader.put(username, replace(heard, dropped=dropped) if dropped else heard)
        elif username == HUB and kind is not FdKind.PENDING:
            self._task_answers.sort(heard)
        else:
            self._foreign.end(topic)
            raise NotAllowed(f"the hub did not subscribe to {topic}; unsubscribed")

    def node_reported(self, topic: str, payload: bytes, at: int) -> None:
        """Remember the status of a node that the embedded broker stored at this time. That broker delivers
        no message of a node to the hub."""
        username, _ = fd.parse_topic(fd.PREFIX, topic)
        accounts = self._accounts
        if accounts.stored_role(username) is Role.NODE and at >= accounts.created_at(username):
            self.reported.note_stored(username, payload, at)

    def _reports(self, name: str, role: Role | None) -> bool:
        """Return whether this account's status report matters; raises an error if it is not allowed."""
        if name == HUB or role is Role.NODE:
            return False
        if role not in (
            Role.DEVICE,
            None,
        ):  # an unknown account may have just been created at another hub
            raise Malformed(f"{name} reports its status, but there is no such device")
        return True

    def _is_too_often(self, name: str, size: int) -> bool:
        """Count a status report; return whether it exceeds the rate of its device and is dropped."""
        wait = self._told.take(name, seconds(_now()), 1 + size // TOLD_BYTES)
        if wait:
            self.refusals.note(
                name, FdKind.STATUS.value, RateLimited.word, f"{name} reports too often; dropped"
            )
        return bool(wait)

    async def _handle(self, heard: HeardMessage) -> None:
        if heard.kind is FdKind.STATUS:
            username, _ = fd.parse_topic(fd.PREFIX, heard.topic)
            if heard.dropped and not self._gateway.remote.is_at_another_hub(username):
                await self._gateway.pushes.note_dropped(username, heard.dropped)
            await self._status(username, heard)
            heard.ack()
        else:
            await self._task_answers.handle(heard)

    def _failed(self, sender: str, heard: HeardMessage, problem: Exception) -> None:
        """Record what was wrong with a message, and acknowledge it, or it would be sent again."""
        if isinstance(problem, Stopped):
            return  # not acknowledged, so that it is sent again
        if isinstance(problem, (SenderError, RateLimited)):
            scope, id_ = sender, heard.topic
            if self._accounts.stored_role(sender) is not Role.DEVICE:
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
        """Return whether a task that the broker has kept since this time may still be given to its device."""
        try:
            device, _ = fd.parse_topic(fd.PREFIX, topic)
            app = read_task_id(answered_id(payload)).app
        except SenderError:
            return True  # not a task of ours
        strangers = (self._accounts.was_another(name, sent_at) for name in (app, device))
        return self._accounts.allows(app, device) and not any(strangers)

    async def dismiss(self, name: str) -> None:
        """Forget a device whose account was removed; a new one of that name is offline until it connects."""
        if self._accounts.stored_role(name) is None:
            self.reported.forget(name)
        if self._accounts.stored_role(name) is not Role.DEVICE:
            self._kept.pop(name, None)
            self._dropped.take(name)
            with suppress(LedgerError, Stopped):
                await self._gone(name)

    # ── presence ─────────────────────────────────────────────────────────────────────────────────

    async def _status(self, name: str, heard: HeardMessage) -> None:
        payload, old, again = heard.payload, heard.old, heard.again
        unconnected = not self.presence.has_returned(name)  # then it was sent before the broker started
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
            status is not None and online and self._was_said_before(name, status, payload, retained=again)
        )
        if not online:
            self._kept.pop(name, None)
        if online and known_before:
            if unconnected and again:
                self._kept[name] = replace(heard, ack=_nothing, dropped=())
            if push is None or (again and push.seq_id is None):
                return
            former = True  # the hub may not have stored the push, but the device is not back
        if status is not None and status.online is None and waited and push is None:
            return  # on its own it is a sign of life, unless it comes from the broker's memory
        if not waited:
            self._heard(name)
        old = old or self.presence.is_repeat(name, session)
        self.presence.note_session(name, session)
        known = self.sessions.get(name)
        if status is not None and push is not None and known is not None:
            self._absences.note(name, status, payload)
            await self.sessions.pushes.store(name, push, old or again)
            return
        if push is None and not old and not waited:
            self.presence.reported(name, heard.connection)
        kept = push is not None and self._gateway.remote.overhear(name, *push[:4])
        if former or (old and self.presence.is_overtaken(name, heard.connection)):
            if push is not None and not kept:
                await self.sessions.pushes.store(name, push, again=True)
            return
        if status is not None and online:
            self.presence.came_online(name, status, old)
            self._absences.note(name, status, payload)
            await self._absences.came_online(name)
            if known is None:
                await self.sessions.claim(name)
                if push is not None and not kept:
                    # it was the first message from the device
                    await self.sessions.pushes.store(name, push, old or again)
            elif known.session != session:
                await self.sessions.connect(name, session)
        elif self.presence.ends(name, session):
            await self._gone(name)

    def _was_said_before(self, name: str, status: fd.FdStatus, payload: bytes, *, retained: bool) -> bool:
        """Return whether a device had sent this before it went offline, or may have. A device that did not
        come back after the hub's start, and promises regular reports, is back when it reports; a status that
        a broker retains may be older."""
        if retained and status.heartbeat and self._gateway.remote.has_given_up(name):
            return True
        return self._absences.was_said_before(name, status, payload, retained=retained)

    async def _decode_status(self, name: str, payload: bytes) -> fd.FdStatus | None:
        """Return the status, checking its signature if the account must sign; None if the status was
        removed."""
        if (
            self._accounts.stored_role(name) is None
            and await self._accounts.find_role(name, HUB) is not Role.DEVICE
        ):
            raise Malformed(f"{name} reports its status, but there is no such device")
        status = fd.decode_status(payload)
        if status is not None:
            self._signatures.check(status, name)
        elif self._signatures.required(name):
            raise Forged(f"the status of {name} was removed; a removal cannot be signed")
        if status == fd.FdStatus():
            raise Malformed(f"the status of {name} is empty; it must say whether {name} is online")
        return status

    def connections(self, name: str, connected: bool) -> None:
        """Note that an account has connected to the broker or has no connection left. A retained status
        counts once the device is connected, since firmware may report that it is online only at its start."""
        self.presence.connections(name, connected)
        kept = self._kept.pop(name, None) if connected else None
        if kept is not None:
            self._reader.put(name, kept)

    def _heard(self, name: str) -> None:
        """Note that a device has sent something, whatever it was."""
        if self.presence.has_returned(name):
            self._gateway.devices.heard(name)
            self.presence.heard(name)

    async def _gone(self, name: str) -> None:
        self.presence.went_offline(name)
        device = self.sessions.remove(name)  # it may arrive again while this is stored
        await self._absences.went_offline(name)
        if device is not None:
            await self._gateway.disconnected(device, Principal(name, Role.DEVICE))

    async def sweep(self) -> None:
        """Give up the devices that have been silent for too long."""
        for name in self.presence.silent():
            with suppress(LedgerError, Stopped):
                await self._gone(name)

    def reports_back(self, session_present: bool) -> None:
        """Ask for retained statuses, because the link for reports is up again."""
        if not session_present:
            self.presence.session_began()
            self._tasks.after("question for retained statuses", ASK_AGAIN, self._ask_again)

    async def _ask_again(self) -> None:
        assert self.reports_link is not None
        with suppress(DulyError):  # the next connection subscribes again
            await self.reports_link.subscribe(*self.reports)


def _nothing() -> None:
    """Do nothing: the message is acknowledged already."""


def _now() -> float:
    return asyncio.get_running_loop().time()
