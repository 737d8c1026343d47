"""A node's mailbox at a broker: its topics, its status and will, and the one process that may read it.

The laws. A message is acknowledged by the code that handles it, once it is stored. A posted message is lost
without a connection, as it might be on the way; one that is `kept` goes out again until the broker has
confirmed it. The status is retained and renewed; a will that arrives after the status of a newer session is
corrected.

Only one process reads a mailbox (docs/adr/0007). A broker gives a client id to one connection, and ends the
older one; so a process asks before it connects, over a connection with another client id, whether another
process reads the mailbox, and stands by for as long as that one answers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from duly.core.retry import RetryPolicy
from duly.core.units import seconds
from duly.errors import ConnectionLost, ConnectionRefused, DulyError, SenderError
from duly.runtime.changes import Changes
from duly.runtime.clock import Clock
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink, Will
from duly.wire import fd
from duly.wire.fd import FdKind, FdStatus
from duly.wire.fd_signatures import FdSignatures
from duly.wire.session import Acknowledge

HEARTBEAT: Final = 60.0
"""Seconds between two reports of a node's status; after three missed ones it is stale."""

RETAINED_WITHIN: Final = 0.3
"""Seconds a broker has to show a retained status after the subscription is in force."""
ANSWER_WITHIN: Final = 3.0
"""Seconds that another process has to answer; without an answer it is dead, whatever the broker retains."""
RETURN_WITHIN: Final = 5.0
"""Seconds that another process has to come back after its connection broke."""
ASK_EVERY: Final = 20.0
SETTLE: Final = 0.25
"""Seconds between connecting and the first message, at least, for brokers that send a retained status late.
Two processes that found the mailbox free at the same moment mostly notice each other in this time."""
KEPT: Final = 10_000
STABLE: Final = 0.5
"""Seconds after which a connection counts as a success."""
READY_WITHIN: Final = 30.0


class Mailbox:
    """A mailbox. `heard(kind, payload, ack)` is called for every message but a status; `up(present)` at every
    connection, with whether the broker had kept the session. `identity` names the ledger behind it: a process
    with the same one is an earlier run of this node, not a rival. Without `serve` it has no status, and any
    number of processes may use it."""

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
        self.standby = ""
        """which other process this one stands by for, in a sentence; empty when it does not"""
        self.about = FdStatus()
        """what the status says besides that the node is online"""
        self._changes = changes
        self._clock, self._signatures, self._identity = clock, signatures, identity
        self._heard, self._up, self._others = heard, up, status
        self._heartbeat, self._serve = heartbeat, serve
        self._began = clock.now()
        self._sessions, self._session, self._present = 0, "", False
        self._sure = False
        """connected, and no other process reads it"""
        self._was_ours = False
        """the last process that read it was this one, or one with the same identity"""
        self._seen = ""
        """the session in the retained status when this process last found the mailbox free"""
        self._question = ""
        """what this process asked on its new connection, until the broker has delivered it"""
        self._rival = False
        """the retained status is another process's, and newer than what was found before connecting"""
        self._told = self._claimed = False
        """this session has published its own status; the broker has confirmed it"""
        self._held: list[tuple[FdKind, bytes, Acknowledge]] | None = []
        """what arrives before this process may read; None when it may"""
        self._closed = False
        self._ours = asyncio.Event()
        self._kept: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
        self.tasks = Supervisor()
        self._beating: SupervisedTask | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._mine = self.topic(self.name, FdKind.STATUS)
        self._topics = {self.topic(self.name, kind): kind for kind in kinds}
        self.link = self._make_link(address, clean=clean)

    def _make_link(self, address: BrokerAddress, *, clean: bool) -> MqttLink:
        """Returns the link to the broker, not started. Without `serve` it has no status, will or claim."""
        serve = self._serve
        return MqttLink(
            address,
            self._arrived,
            subscriptions=self._topics,
            latest=[self._mine] if serve else [],
            will=self._will if serve else None,
            on_connect=self._connected,
            on_disconnect=self._disconnected,
            before=self._claim if serve else None,
            clean=clean,
            stable=STABLE,
            changes=self._changes,
        )

    def topic(self, username: str, kind: FdKind) -> str:
        """Returns a topic of a node."""
        return fd.topic_of(self.prefix, username, kind)

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Begin to connect."""
        await self.link.start()

    async def ready(self, within: float | None = READY_WITHIN) -> None:
        """Wait until this process may read the mailbox. Standing by is no failure; raises `ConnectionLost`
        after `within` seconds without a connection, and `ConnectionRefused` if the broker refuses the
        login."""
        loop = asyncio.get_running_loop()
        until = None if within is None else loop.time() + within
        while not self._ours.is_set():
            if self.link.refused:
                raise ConnectionRefused(self.link.problem)
            waits = self.standby
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
        """Hand nothing over for now. What is not acknowledged comes again."""
        if self._held is None:
            self._held = []
        self._closed = True

    async def stop(self) -> None:
        """Report offline and disconnect: the will is only for connections that break."""
        self._cancel_timers()
        if self.link.up and self._serve:
            with suppress(DulyError, TimeoutError):
                async with asyncio.timeout(1):
                    await self.link.publish(self._mine, self._status(online=False), retain=True)
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
        if topic == self._mine and self._serve:
            with suppress(SenderError):
                status = self._signatures.open_status(payload, self.name)
                if status is not None:
                    self._heard_own(status, old)
        with suppress(SenderError):
            username, kind = fd.parse_topic(self.prefix, topic)
            if kind is FdKind.STATUS:
                self._others(username, payload, old)

    def _heard_own(self, status: FdStatus, old: bool) -> None:
        """Takes in a status of this node: from this session, an older one, or another process."""
        if fd.is_question(status):
            if status.session == self._question:
                self._question = ""
                self._looked_again()
            elif self._told and not old:
                self.report()
        elif self._told:
            if not old and status.online is False and status.session != self._session:
                self.report()  # an older session's will
        elif not self._is_former(status) and (status.session != self._seen or (status.online and not old)):
            self._rival = True

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def post(
        self, username: str, kind: FdKind, payload: bytes, done: Callable[[bool], None] | None = None
    ) -> None:
        """Publish to a node's mailbox, if connected; `done` is called with whether the broker confirmed
        it."""
        self.link.post(self.topic(username, kind), payload, done=done)

    def keep(self, id: bytes, username: str, kind: FdKind, payload: bytes) -> None:
        """Publish, and repeat at every connection until the broker has confirmed it: the peer may not ask
        again."""
        topic = self.topic(username, kind)
        self._kept[id] = (topic, payload)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        self._send_kept(id, topic, payload)

    def _send_kept(self, id: bytes, topic: str, payload: bytes) -> None:
        def done(confirmed: bool) -> None:
            if confirmed:
                self._kept.pop(id, None)

        self.link.post(topic, payload, done=done)

    def report(self) -> None:
        """Report this node's status now."""
        if self._serve:
            self.link.post(self._mine, self._status(online=True), retain=True)

    async def withdraw(self) -> None:
        """Remove the retained status from the broker."""
        await self.link.publish(self._mine, b"", retain=True)

    def _status(self, *, online: bool) -> bytes:
        now = self._clock.now()
        status = msgspec.structs.replace(
            self.about,
            time=now,
            online=online,
            uptime=(now - self._began) if online else 0,
            session=self._session,
            heartbeat=seconds(self._heartbeat) if online else 0,
        )
        return self._signatures.encode(status)

    def _will(self) -> Will:
        self._sessions += 1
        self._session = f"{self._identity}.{secrets.token_hex(4)}"
        return Will(self._mine, self._status(online=False))

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    def _connected(self, present: bool) -> None:
        self.standby = ""
        self._present = present
        loop = asyncio.get_running_loop()
        for id_, (topic, payload) in list(self._kept.items()):
            self._send_kept(id_, topic, payload)
        if not self._serve:
            self._settled()
            return
        self._settling = loop.call_later(0 if self._was_ours else SETTLE, self._waited)
        self._question = question = fd.question(secrets.token_hex(4))
        self.link.post(self._mine, self._signatures.encode(FdStatus(session=question)))
        self._beating = self.tasks.every("heartbeat", self._heartbeat, self._beat)

    def _looked_again(self) -> None:
        """Claim the mailbox, now that the broker has delivered the question and, before it, the retained
        status; or leave it to a process that claimed it since this one asked."""
        if self._rival:
            self.link.reconnect(f"another process is at the mailbox of {self.name}")
            return
        session, self._told = self._session, True

        def confirmed(is_stored: bool) -> None:
            if is_stored and session == self._session:
                self._claimed = True
                self._settle()

        self.link.post(self._mine, self._status(online=True), retain=True, done=confirmed)

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
        self._beating = self._settling = None

    # ── one at a time ────────────────────────────────────────────────────────────────────────────

    async def _claim(self) -> None:
        """Wait until no other process reads this mailbox. Raises `ConnectionLost` if the broker cannot be
        asked."""
        statuses: asyncio.Queue[tuple[FdStatus | None, bool]] = asyncio.Queue()

        def heard(_: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
            ack()
            with suppress(SenderError):
                statuses.put_nowait((self._signatures.open_status(payload, self.name), old))

        there = self.link.address
        address = msgspec.structs.replace(there, client_id=f"{there.client_id}-{secrets.token_hex(4)}")
        observer = MqttLink(address, heard, subscriptions=[self._mine], clean=True, retry=RetryPolicy.never())
        await observer.start()
        try:
            await observer.connected()
            await self._until_free(observer, statuses)
        finally:
            self.standby = ""
            self._changes.tell()
            await observer.stop()

    async def _until_free(
        self, observer: MqttLink, statuses: asyncio.Queue[tuple[FdStatus | None, bool]]
    ) -> None:
        there, self._rival, self._was_ours = self._rival, False, False
        """another process reads it, or its status says so"""
        wait = RETURN_WITHIN if there else RETAINED_WITHIN
        while True:
            try:
                async with asyncio.timeout(wait):
                    status, old = await statuses.get()
            except TimeoutError:
                if not observer.up:
                    raise ConnectionLost("the broker was lost while standing by") from None
                if wait != ASK_EVERY:
                    return  # no process has answered, or come back
                await self._ask(observer)
                wait = ANSWER_WITHIN
                continue
            if status is not None and fd.is_question(status):
                continue
            self._seen = "" if status is None else status.session
            ours = status is not None and self._is_former(status)
            if ours and (status is None or status.online or not self._sessions):
                self._was_ours = True
                return
            if ours and not there:
                # Our own will: the connection broke, or another process took its client id.
                await self._ask(observer)
            elif status is None or status.online is False:
                if not there:
                    return
                wait = RETURN_WITHIN
            elif not ours:
                there = True
                if old:
                    await self._ask(observer)
                    wait = ANSWER_WITHIN
                else:
                    self.standby = f"another process is at the mailbox of {self.name}"
                    self._changes.tell()
                    wait = ASK_EVERY

    async def _ask(self, observer: MqttLink) -> None:
        """Make the process that reads this mailbox report its status now."""
        with suppress(DulyError):
            question = FdStatus(session=fd.question(secrets.token_hex(4)))
            await observer.publish(self._mine, self._signatures.encode(question))

    def _is_former(self, status: FdStatus) -> bool:
        """Whether a status is from this process, or from an earlier one with the same identity."""
        return status.session.partition(".")[0] == self._identity
