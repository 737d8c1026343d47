"""A node's mailbox at a broker: its topics, its status and will, and the one process that may read it.

The laws. A message is acknowledged by the code that handles it, once it is stored. A posted message is lost
without a connection; one that is `kept` is sent again until the broker has confirmed it. The status is
retained and renewed; a will that arrives after the status of a newer session is corrected.

Only one process reads a mailbox (`duly.clients.node.claim`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from duly.clients.node.claim import MailboxClaim
from duly.clients.node.kept_messages import KeptMessages
from duly.clients.node.own_status import OwnStatus
from duly.errors import ConnectionRefused, DulyError, SenderError
from duly.runtime.changes import Changes
from duly.runtime.clock import Clock
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.transports.mqtt.outgoing_publishes import Done
from duly.wire import fd
from duly.wire.fd import FdKind, FdStatus
from duly.wire.fd_signatures import FdSignatures
from duly.wire.publish_properties import PublishProperties
from duly.wire.session import Acknowledge

HEARTBEAT: Final = 60.0
"""Seconds between two reports of a node's status; after three missed ones it is stale."""

SETTLE: Final = 0.25
"""The least seconds between connecting and the first message, for brokers that send a retained status late.
Two processes that found the mailbox free at the same moment usually notice each other in this time."""
STABLE: Final = 0.5
"""Seconds after which a connection counts as a success."""
READY_WITHIN: Final = 30.0


class Mailbox:
    """A mailbox. `heard(kind, payload, ack)` is called for every message except a status; `up(present)` at
    every connection, with whether the broker had kept the session. `identity` names the ledger behind it: a
    process with the same one is an earlier run of this node, not a rival. Without `serve` it has no status,
    and any number of processes may use it."""

    def __init__(
        self,
        address: BrokerAddress,
        name: str,
        *,
        clock: Clock,
        signatures: FdSignatures,
        identity: str,
        heard: Callable[[FdKind, bytes, Acknowledge], None],
        up: Callable[[bool], None],
        status: Callable[[str, bytes, bool], None],
        kinds: tuple[FdKind, ...] = (FdKind.PENDING, FdKind.ACK, FdKind.COMPLETE, FdKind.FAILED),
        prefix: str = fd.PREFIX,
        heartbeat: float = HEARTBEAT,
        serve: bool = True,
        clean: bool = False,
        changes: Changes,
    ) -> None:
        self.name = fd.check_username(name)
        self.prefix = fd.check_prefix(prefix)
        self._changes = changes
        self._signatures = signatures
        self._heard, self._up, self._others = heard, up, status
        self._heartbeat, self._serve = heartbeat, serve
        self._present = False
        self._sure = False
        """connected, and no other process reads it"""
        self._question = ""
        """the question of this process on its new connection, until the broker has delivered it"""
        self._told = self._claimed = False
        """this session has published its own status, and the broker shows it to new subscriptions"""
        self._held: list[tuple[FdKind, bytes, Acknowledge]] | None = []
        """messages that arrive before this process may read; None when it may"""
        self._closed = False
        self._ours = asyncio.Event()
        self.tasks = Supervisor()
        self._beating: SupervisedTask | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._showing: asyncio.Task[None] | None = None
        self._topics = {self.topic(self.name, kind): kind for kind in kinds}
        mine = self.topic(self.name, FdKind.STATUS)
        self.own_status = OwnStatus(mine, clock, signatures, identity, heartbeat)
        self.claim = MailboxClaim(address, self.name, signatures, self.own_status, changes)
        self.link = self._make_link(address, clean=clean)
        self._kept = KeptMessages(self.link)

    def _make_link(self, address: BrokerAddress, *, clean: bool) -> MqttLink:
        """Return the link to the broker, not started. Without `serve` it has no status, will or claim."""
        serve = self._serve
        return MqttLink(
            address,
            self._arrived,
            subscriptions=self._topics,
            latest=[self.own_status.topic] if serve else [],
            will=self.own_status.new_will if serve else None,
            on_connect=self._connected,
            on_disconnect=self._disconnected,
            before=self._before_connecting,
            clean=clean,
            stable=STABLE,
            changes=self._changes,
        )

    def topic(self, username: str, kind: FdKind) -> str:
        """Return a topic of a node."""
        return fd.topic_of(self.prefix, username, kind)

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Begin to connect."""
        await self.link.start()

    async def ready(self, within: float | None = READY_WITHIN) -> None:
        """Wait until this process may read the mailbox. Standing by is not a failure; raises `ConnectionLost`
        after `within` seconds without a connection, and `ConnectionRefused` if the broker refuses the
        login."""
        loop = asyncio.get_running_loop()
        until = None if within is None else loop.time() + within
        while not self._ours.is_set():
            if self.link.refused:
                raise ConnectionRefused(self.link.problem)
            waits = self.claim.standby
            try:
                async with asyncio.timeout_at(None if waits else until):
                    await self._changes.wait()
            except TimeoutError:
                raise self.link.lost() from None
            if waits and within is not None:
                until = loop.time() + within

    @property
    def is_ours(self) -> bool:
        """Whether it is connected, and no other process reads it."""
        return self.link.up and self._sure

    def open(self) -> None:
        """Hand messages over from now on."""
        self._closed = False
        self._open()

    def hold(self) -> None:
        """Hand nothing over for now. Unacknowledged messages are sent again."""
        if self._held is None:
            self._held = []
        self._closed = True

    async def stop(self) -> None:
        """Report offline and disconnect: the will is only for connections that break."""
        self._cancel_timers()
        own = self.own_status
        if self.link.up and self._serve:
            with suppress(DulyError, TimeoutError):
                async with asyncio.timeout(1):
                    await self.link.publish(own.topic, own.encode(online=False), retain=True)
        await self.link.stop()

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        kind = self._topics.get(topic)
        if kind is None:
            self._heard_status(topic, payload, old)
            ack()
        elif self._held is not None:
            self._held.append((kind, payload, ack))
        else:
            self._heard(kind, payload, ack)

    def _heard_status(self, topic: str, payload: bytes, old: bool) -> None:
        if topic == self.own_status.topic and self._serve:
            with suppress(SenderError):
                status = self._signatures.open_status(payload, self.name)
                if status is not None:
                    self._heard_own(status, old)
        with suppress(SenderError):
            username, kind = fd.parse_topic(self.prefix, topic)
            if kind is FdKind.STATUS:
                self._others(username, payload, old)

    def _heard_own(self, status: FdStatus, old: bool) -> None:
        """Handle a status of this node: from this session, an older one, or another process."""
        if fd.is_question(status):
            if status.session == self._question:
                self._question = ""
                self._looked_again()
            elif self._told and not old:
                self.report()
        elif self._told:
            if old:
                self.claim.noted(status)
            if not self._sure:
                # Also the will of a process that has just lost its connection: it may have begun before.
                self.claim.doubt(status, old)
                if self._step_back():
                    return
            if not old and status.online is False and status.session != self.own_status.session:
                self.report()  # an older session's will
        else:
            self.claim.doubt(status, old)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def post(
        self,
        username: str,
        kind: FdKind,
        payload: bytes,
        done: Done | None = None,
        properties: PublishProperties | None = None,
    ) -> None:
        """Publish to a node's mailbox, if connected; `done` is called when the broker has confirmed it, or
        with the reason why it has not."""
        self.link.post(self.topic(username, kind), payload, done=done, properties=properties)

    def keep(self, id: bytes, username: str, kind: FdKind, payload: bytes) -> None:
        """Publish, and repeat at every connection until the broker has confirmed it, since the peer may not
        ask again."""
        self._kept.add(id, self.topic(username, kind), payload)

    def report(self) -> None:
        """Report this node's status now."""
        if self._serve:
            self.link.post(self.own_status.topic, self.own_status.encode(online=True), retain=True)

    async def withdraw(self) -> None:
        """Remove the retained status from the broker."""
        await self.link.publish(self.own_status.topic, b"", retain=True)

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    async def _before_connecting(self) -> None:
        """Wait until no other process reads the mailbox. A connection may have ended between the broker's
        first messages and our subscription: they come again, perhaps to another process."""
        self._held = []
        if self._serve:
            await self.claim.wait()

    def _connected(self, present: bool) -> None:
        self._present = present
        loop = asyncio.get_running_loop()
        self._kept.send_again()
        if not self._serve:
            self._settled()
            return
        self._settling = loop.call_later(0 if self.claim.was_ours else SETTLE, self._waited)
        self._question = question = fd.question(secrets.token_hex(4))
        self.link.post(self.own_status.topic, self._signatures.encode(FdStatus(session=question)))
        self._beating = self.tasks.every("heartbeat", self._heartbeat, self._beat)

    def _looked_again(self) -> None:
        """Claim the mailbox, now that the broker has delivered the question and, before it, the retained
        status; or leave it to a process that has claimed it since."""
        if self._step_back():
            return
        own, self._told = self.own_status, True
        session = own.session

        def confirmed(problem: DulyError | None) -> None:
            if problem is None and session == own.session:
                self._showing = self.tasks.do(
                    "waiting until the broker shows the status", self._shown(), expected=(DulyError,)
                )

        self.link.post(
            self.own_status.topic, self.own_status.encode(online=True), retain=True, done=confirmed
        )

    def _step_back(self) -> bool:
        """Leave the mailbox to another process, if one has claimed it; return whether one has."""
        if self.claim.rival:
            self.link.reconnect(self.claim.lost_to())
        return self.claim.rival

    async def _shown(self) -> None:
        await self.claim.until_shown(self.link)
        self._claimed = True
        self._settle()

    def _waited(self) -> None:
        self._settling = None
        self._settle()

    def _settle(self) -> None:
        if self._claimed and self._settling is None and not self._sure:
            self._settled()

    def _settled(self) -> None:
        self._sure = True
        self._ours.set()
        self._changes.tell()
        self._up(self._present)
        self._open()

    def _open(self) -> None:
        if self._held is None or self._closed or not self._sure or not self.link.up:
            return
        held, self._held = self._held, None
        for each in held:
            self._heard(*each)

    def _disconnected(self, reason: str) -> None:
        self._cancel_timers()
        self._held = []  # they come again
        self._sure = self._told = self._claimed = False

    async def _beat(self) -> None:
        self.report()

    def _cancel_timers(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if self._beating is not None:
            self._beating.kill()
        if self._showing is not None:
            self._showing.cancel()
        self._beating = self._settling = self._showing = None
