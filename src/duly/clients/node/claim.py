"""The claim of one process to a mailbox: only one reads it at a time (docs/adr/0007).

The laws. A broker allows one connection per client id and ends the older one. So before a process connects,
it asks over a connection with another client id whether another process reads the mailbox, and stands by as
long as that one answers. A process that does not answer is dead, whatever status the broker retains.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import Final

import msgspec

from duly.clients.node.own_status import OwnStatus
from duly.core.retry import RetryPolicy
from duly.errors import ConnectionLost, DulyError, SenderError
from duly.runtime.changes import Changes
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire import fd
from duly.wire.fd import FdStatus
from duly.wire.fd_signatures import FdSignatures
from duly.wire.session import Acknowledge

ANSWER_AFTER_ECHO: Final = 0.3
"""Seconds that another process has to answer once the broker has echoed the question, if no retained status
mentions that process."""
ANSWER_WITHIN: Final = 3.0
"""Seconds that another process has to answer; without an answer it is dead, whatever status the broker
retains."""
RETURN_WITHIN: Final = 5.0
"""Seconds that another process has to reconnect after its connection broke."""
ASK_EVERY: Final = 20.0
SHOWN_WITHIN: Final = 5.0
"""Seconds that a broker has to show a status that it has confirmed; after that it retains nothing."""
LOOK_EVERY: Final = 0.1
"""Seconds between two looks whether the broker shows it."""

LOG: Final = logging.getLogger(__name__)


class MailboxClaim:
    """The claim to the mailbox of the node with this name, at this broker."""

    def __init__(
        self,
        address: BrokerAddress,
        name: str,
        signatures: FdSignatures,
        own: OwnStatus,
        changes: Changes,
    ) -> None:
        self._address = address
        self._name = name
        self._signatures = signatures
        self._own = own
        self._changes = changes
        self.standby = ""
        """which other process this one stands by for, in a sentence; empty when it does not"""
        self.was_ours = False
        """whether the last process that read it was this one, or one with the same identity"""
        self.rival = False
        """whether the retained status is another process's, and newer than the one found before connecting"""
        self._seen = ""
        """the session in the retained status when this process last found the mailbox free"""
        self._shown = asyncio.Event()
        """the broker has sent the status of this session to a new subscription"""

    async def wait(self) -> None:
        """Wait until no other process reads this mailbox. Raises `ConnectionLost` if the broker cannot be
        asked."""
        statuses: asyncio.Queue[tuple[FdStatus | None, bool]] = asyncio.Queue()

        def heard(_: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
            ack()
            with suppress(SenderError):
                statuses.put_nowait((self._signatures.open_status(payload, self._name), old))

        there, topic = self._address, self._own.topic
        address = msgspec.structs.replace(there, client_id=f"{there.client_id}-{secrets.token_hex(4)}")
        observer = MqttLink(address, heard, subscriptions=[topic], clean=True, retry=RetryPolicy.never())
        await observer.start()
        try:
            await observer.connected()
            await self._until_free(observer, statuses)
        finally:
            self.standby = ""
            self._changes.tell()
            await observer.stop()

    def doubt(self, status: FdStatus, old: bool) -> None:
        """Note a status that another process published before this one published its own: the other process
        may have claimed the mailbox meanwhile."""
        if not self._own.is_ours(status) and (status.session != self._seen or (status.online and not old)):
            self.rival = True

    async def until_shown(self, link: MqttLink) -> None:
        """Wait until a new subscription is sent the confirmed status of this session. Goes on without it
        after `SHOWN_WITHIN` seconds, since some brokers retain nothing."""
        self._shown.clear()
        for _ in range(round(SHOWN_WITHIN / LOOK_EVERY)):
            await link.subscribe(self._own.topic, latest=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY):
                    await self._shown.wait()
                return
        LOG.warning(
            "%r does not retain the status of %s: a second process under that name could run the same tasks",
            self._address, self._name,
        )  # fmt: skip

    def noted(self, status: FdStatus) -> None:
        """Note a status that the broker has retained and sent to a new subscription."""
        if status.session == self._own.session:
            self._shown.set()

    def lost_to(self) -> str:
        """Return a sentence that says that another process reads the mailbox."""
        return f"another process is at the mailbox of {self._name}"

    async def _until_free(
        self, observer: MqttLink, statuses: asyncio.Queue[tuple[FdStatus | None, bool]]
    ) -> None:
        there, self.rival, self.was_ours = self.rival, False, False
        """another process reads it, or its status says so"""
        # A broker sends a retained status before later messages, but it may be slow or have lost the status.
        # So the question is echoed, and the process that reads the mailbox answers it.
        asked = await self._ask(observer)
        wait = RETURN_WITHIN + self._own.jitter if there else ANSWER_WITHIN
        while True:
            try:
                async with asyncio.timeout(wait):
                    status, old = await statuses.get()
            except TimeoutError:
                if not observer.up:
                    raise ConnectionLost("the broker was lost while standing by") from None
                if wait != ASK_EVERY:
                    return  # no process has answered or reconnected
                await self._ask(observer)
                wait = ANSWER_WITHIN
                continue
            if status is not None and fd.is_question(status):
                if status.session == asked and not there:
                    wait = ANSWER_AFTER_ECHO
                continue
            self._seen = "" if status is None else status.session
            ours = status is not None and self._own.is_ours(status)
            if ours and (status is None or status.online or not self._own.session):
                self.was_ours = True
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
                    self.standby = self.lost_to()
                    self._changes.tell()
                    wait = ASK_EVERY

    async def _ask(self, observer: MqttLink) -> str:
        """Make the process that reads this mailbox report its status now; return the question's session."""
        question = FdStatus(session=fd.question(secrets.token_hex(4)))
        with suppress(DulyError):
            await observer.publish(self._own.topic, self._signatures.encode(question))
        return question.session
