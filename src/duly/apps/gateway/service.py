"""The gateway passes commands from apps to devices, with two acknowledgements.

The laws. The hub sends `server_ack` after the command is committed, and passes on the device's `ack` after
the end is committed. A repeat gets code 5, the state, and the stored `ack` if there is one. A command that
the device never answers ends as `unknown`; a late answer settles it and is passed on. A command to an offline
device is refused (code 1, its id stays free) unless the command may wait (`queue`). The sender of a frame is
the authenticated account, whatever the frame says.

The core (`Inbox`, `Engine`, streams) does everything durable; the gateway interprets frames. `sessions` holds
the open sessions and `connections` greets them, `command_intake` takes commands, `admission` decides whether
one is accepted, `command_effects` sends to apps and devices, `device_answers` handles the devices' answers,
and `remote_hubs` works with the other hubs. A session is anything that frames can be pushed to: a WebSocket,
an HTTP request that waits, an MQTT node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from duly.apps.gateway.admission import CommandAdmission
from duly.apps.gateway.command_effects import CommandEffects
from duly.apps.gateway.command_intake import CommandIntake
from duly.apps.gateway.connections import GatewayConnections
from duly.apps.gateway.device_answers import DeviceAnswers
from duly.apps.gateway.device_list import DeviceList
from duly.apps.gateway.policy import GatewayPolicy
from duly.apps.gateway.pushes import PushService
from duly.apps.gateway.remote_hubs import GatewayRemote, GatewayRemoteHubs, SingleHub
from duly.apps.gateway.revoked_commands import RevokedCommands
from duly.apps.gateway.sessions import GatewaySessions
from duly.apps.gateway.shared_tokens import SharedTokens
from duly.apps.gateway.unaddressed_acks import UnaddressedAcks
from duly.apps.gateway.unheld_commands import UnheldCommands
from duly.cluster.notifier import Notifier
from duly.core.account_limits import AccountLimits, CountedBytes
from duly.core.inbox import Inbox
from duly.core.messages import Message, key_of, parts_of
from duly.core.outbox import OutboxPolicy
from duly.core.steps import (
    CancelMessages,
    NumberRefused,
    Origin,
    Reply,
    ReportOutcome,
    Transmit,
)
from duly.core.units import MS
from duly.errors import DulyError, Malformed
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import Engine, Performers, no_effect
from duly.runtime.kept_traces import KeptTraces
from duly.runtime.tasks import Supervisor
from duly.runtime.tracing import CommandTraces
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger, Record
from duly.wire import outgoing
from duly.wire.fields import MORE, timeout_in
from duly.wire.frames import OUTCOME, Frame
from duly.wire.session import Session

_DEVICE: Final = Role.DEVICE  # reading a member from its class takes nine times as long


class GatewayService:
    """One gateway on one ledger; with a `notifier`, one of several hubs on it."""

    name: Final = "gateway"

    roles = frozenset({Role.APP, Role.DEVICE, Role.ADMIN})
    open = True
    """frames of undocumented types are accepted as well: from an app as a command, from a device as a push"""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        activity: ActivityLog,
        policy: GatewayPolicy | None = None,
        notifier: Notifier | None = None,
        trail: Trail | None = None,
        limits: AccountLimits | None = None,
    ) -> None:
        self.policy = policy or GatewayPolicy()
        limits = limits or AccountLimits()
        self._limit = limits.commands
        self._commands = self.policy.commands
        self._ledger = ledger
        self._accounts = accounts
        self.sessions = GatewaySessions(accounts)
        self._admission = CommandAdmission(
            self.policy, accounts, ledger,
            here=self.sessions.devices.keys(), online=self.online, has_room=self._has_room,
        )  # fmt: skip
        self._inbox = _inbox_of(self.policy, ledger, accounts, self._admission, shared=notifier is not None)
        self.devices = DeviceList(ledger, accounts, self.online)
        self.pushes = PushService(
            ledger, activity, self.sessions.listeners, self._pushed_here, accounts.created_at,
            reserved=self.policy.commands, limit=limits.pushes,
        )  # fmt: skip
        channel = self._inbox.channel
        self.unheld = UnheldCommands(ledger, channel)
        self.trail = Trail(ledger) if trail is None else trail
        self.remote: GatewayRemote = SingleHub(ledger, channel, self)
        if notifier is not None:
            self.remote = GatewayRemoteHubs(ledger, notifier, channel, self)
        self.traces = CommandTraces()
        self.kept_traces = KeptTraces(ledger, self.traces, self.trail.hub)
        unaddressed, counted = UnaddressedAcks(), CountedBytes(self._limit)
        self.effects = CommandEffects(
            self.sessions, accounts, self._admission, self._inbox.backlog, self.remote, activity,
            self.trail, self.traces, unaddressed, counted,
        )  # fmt: skip
        self.engine = self._new_engine()
        self.answers = DeviceAnswers(
            self._inbox, self.engine, ledger, accounts.was_another, self.remote, self.effects.tell_progress,
            unaddressed, self.trail,
        )  # fmt: skip
        self._revoked = RevokedCommands(
            self._inbox, self.engine, ledger, accounts, self._admission, self.remote
        )
        self.tasks = Supervisor()
        self._shared_tokens = SharedTokens(activity, self.tasks)
        self.connections = GatewayConnections(
            ledger, accounts, self.engine, self.sessions, self.devices, self.pushes, self.remote,
            self._revoked, self._shared_tokens,
        )  # fmt: skip
        self._take_command = CommandIntake(
            self._inbox, self.engine, ledger, accounts, self._admission, self._limit, counted,
            self.remote, self.traces, self.trail, self.sessions.devices,
        ).submit  # fmt: skip
        self.tasks.adopt(self.pushes.tasks)
        self.tasks.adopt(self.remote.tasks)

    @property
    def types(self) -> frozenset[str]:
        """The documented types of frames."""
        return self.policy.commands | self.policy.pushes | {"ack", OUTCOME}

    @property
    def prompt(self) -> frozenset[str]:
        """The types whose frames do not wait behind others."""
        return self.policy.commands

    async def start(self) -> None:
        """Continue the commands under way in the ledger, and cancel those that are no longer allowed."""
        await self.remote.start()
        await self.engine.start()
        await self._revoked.end()

    async def stop(self) -> None:
        """Stop the engine, then the parts that report its work."""
        await self.engine.stop()
        await self.remote.stop()
        await self.pushes.stop()
        await self._shared_tokens.stop()

    # ── sessions ────────────────────────────────────────────────────────────────────────────────

    async def connected(
        self,
        session: Session,
        who: Principal,
        cursors: dict[str, int] | None = None,
        *,
        heard: bool = True,
    ) -> None:
        """Welcome an app or a device that has authenticated, and send what it missed. With `heard` off, only
        a retained message at the broker says that the device is online."""
        await self.connections.connect(session, who, cursors, heard=heard)

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Remove a session that has ended."""
        await self.connections.disconnect(session, who)

    def dismiss(self, name: str) -> None:
        """Close the sessions of this account: its token is no longer valid."""
        for session in self.sessions.of(name):
            session.close("your token is no longer valid")

    def online(self, device: str) -> bool:
        """Return whether a device is connected to this hub or, as far as this hub knows, to another."""
        return device in self.sessions.devices or self.remote.holds(device)

    def _has_room(self, device: str) -> bool:
        return self._inbox.lanes.has_room(device)

    def _pushed_here(self, device: str) -> None:
        self.remote.pushed(device)

    @property
    def refused_waiting(self) -> int:
        """The number of commands that were refused because too many waited."""
        return self._admission.refused_waiting

    def presence(self) -> list[str]:
        """Return the devices that are connected to this hub or to another."""
        return self.remote.online_devices()

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Take a frame of an authenticated app or device. Of a device's frames, only a push with a `seq_id`
        gets a `server_ack`."""
        kind = frame.type
        if who.role is _DEVICE:
            self.devices.heard(who.name)
            if kind == "ack":
                return self.answers.take(who, frame)
            if kind not in self._commands and kind != OUTCOME:
                return self._pushed(session, who, frame)
        elif kind == OUTCOME:
            return self._asked(session, who, frame)
        if kind not in self._commands and kind in self.types:
            raise Malformed(f"{who.role.with_article} cannot send {kind!r}")
        return self._take_command(session, who, frame)

    def refused(self, who: Principal, seq_id: str) -> None:
        """Record that a frame was refused before it became a command, so that its number leaves no gap."""
        with suppress(DulyError):
            made, n, _, _ = parts_of(seq_id)
            if n is not None and made and who.role is not Role.DEVICE:
                self.engine.offer(NumberRefused(who.name, n, made))

    async def _asked(self, session: Session, who: Principal, frame: Frame) -> bool:
        """Answer an app that asks for the outcome of one of its commands."""
        if frame.seq_id is None:
            raise Malformed("the seq_id is missing; name the command whose outcome you ask for")
        key = key_of(who.name, frame.seq_id)
        if refusal := self._limit.excess(who.name, 0, self._ledger.clock.now()):
            raise self._limit.refuse(who.name, refusal)
        self.effects.tell_outcome(session, who.name, frame.seq_id, await self._ledger.find(key))
        return True

    async def _pushed(self, session: Session, who: Principal, frame: Frame) -> bool:
        if frame.seq_id is None:
            await self.pushes.receive_without_id(who.name, frame)
            return False
        verdict = await self.pushes.receive(session, who.name, frame)
        session.push(outgoing.server_ack(frame.seq_id, verdict))
        return True

    async def learn_senders(self, messages: Sequence[Message]) -> None:
        """Look up the senders and grants of other hubs' commands that this hub does not know yet."""
        allows = self._accounts.allows
        places = {(one.scope, one.recipient) for one in messages if not allows(one.scope, one.recipient)}
        for sender, device in places:
            await self._accounts.find_permission(sender, device)

    async def review(self) -> None:
        """Apply changed accounts and grants: end commands that are no longer allowed, and inform connected
        apps of devices that they lost or were granted."""
        await self._revoked.settle()
        await self._revoked.end()
        await self.connections.tell_grants()

    def _new_engine(self) -> Engine:
        ours, performers = self.trail.resuming(self.remote.open_deliveries), self.performers()
        return Engine(self._inbox, self._ledger, no_effect, performers=performers, fair=True, ours=ours)

    def performers(self) -> Performers:
        """Return the functions that perform the engine's effects, by type."""
        effects = self.effects
        return {Reply: effects.reply, Transmit: effects.transmit, ReportOutcome: effects.report}

    async def cancel(self, message: Message, reason: str) -> bool:
        """Cancel a command that waits at any hub; return whether it was cancelled. A command that was handed
        over goes on."""
        if all(waiting.key != message.key for waiting in await self.remote.waiting_commands()):
            return False
        await self.engine.put(CancelMessages((message,), reason))
        return True

    @property
    def ledger(self) -> Ledger:
        """The ledger of this gateway."""
        return self._ledger

    @property
    def pending(self) -> int:
        """The number of commands under way here."""
        return self._inbox.live

    @property
    def held(self) -> int:
        """The number of commands that wait for their turn, or for a number before them."""
        return self._inbox.lanes.waiting

    # ── what other hubs ask for (`LocalGateway`) ─────────────────────────────────────────────────

    def waiting(self) -> Iterable[Message]:
        """Return the commands that wait here for their devices."""
        return self._inbox.waiting()

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        """Send the outcome of a command that ended at another hub to the apps here."""
        self.effects.tell_end(record, origins)

    async def replaced(self, device: str) -> None:
        """Close the session of a device that has connected to another hub."""
        await self.connections.replace(device)


def _own_patience(message: Message) -> int:
    """Return the time limit that a command sets for its device; 0 if it sets none."""
    body = message.body
    return timeout_in(body) * MS if body[:1] == MORE else 0


def _inbox_of(
    policy: GatewayPolicy, ledger: Ledger, accounts: Accounts, admission: CommandAdmission, *, shared: bool
) -> Inbox:
    """Return the inbox of the commands, which orders them, hands them to devices and repeats them."""
    timing = policy.timing
    return Inbox(
        OutboxPolicy("device", timing.resend, patience=timing.patience, quiet=True),
        ledger.worker,
        lanes=msgspec.structs.replace(timing.lanes(), ahead=policy.ahead),
        horizon=admission.horizon,
        refuse=admission.refuse,
        permit=admission.forbidden,
        backlog=admission.backlog,
        shared=shared,
        adopt=shared,
        once=lambda message: accounts.is_sent_once(message.recipient),
        patience=_own_patience,
    )
