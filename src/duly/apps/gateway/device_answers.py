"""Answers of devices: which command an `ack` belongs to, and what it means for the command.

The laws. An answer counts only if it comes from the device that the command was handed to. An answer to a
command under way goes to the engine at once; a late answer is looked up in the ledger and may settle a
command whose outcome is unknown. An answer is refused, and the refusal recorded, if the device never got the
command or if the command was for an earlier account of the same name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from duly.apps.gateway.admission import CHUNK
from duly.apps.gateway.remote_hubs import GatewayRemote
from duly.apps.gateway.unaddressed_acks import UnaddressedAcks
from duly.core.inbox import Inbox
from duly.core.messages import key_of, names_in
from duly.core.steps import Answered, Event, Received
from duly.errors import Malformed, NotAllowed, Overloaded
from duly.identity.accounts import Principal
from duly.runtime.engine import Engine
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger, Record
from duly.wire import frames
from duly.wire.fields import Fields
from duly.wire.frames import Frame

TellProgress: TypeAlias = Callable[[bytes, str, msgspec.Raw, Fields], None]


async def put_later(engine: Engine, event: Event, answered: bool) -> bool:
    """Hand an event to the engine as soon as it has room; return `answered`."""
    await engine.put(event)
    return answered


class DeviceAnswers:
    """The answers to one gateway's commands."""

    def __init__(
        self,
        inbox: Inbox,
        engine: Engine,
        ledger: Ledger,
        was_another: Callable[[str, int], bool],
        remote: GatewayRemote,
        tell_progress: TellProgress,
        unaddressed: UnaddressedAcks,
        trail: Trail,
    ) -> None:
        self._inbox = inbox
        self._engine = engine
        self._ledger = ledger
        self._was_another = was_another
        self._remote = remote
        self.tell_progress = tell_progress
        """reports the progress of a device to the app"""
        self._unaddressed = unaddressed
        self._trail = trail
        self._under_way = inbox.outbox.transmissions.get

    def take(self, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Process the `ack` of a device, which itself gets no answer."""
        device, seq_id = who.name, frame.seq_id
        if seq_id is None:
            raise Malformed("an ack needs the seq_id of the command it answers")
        app = frame.to or self._sender_of(device, seq_id)
        key = key_of(app, seq_id)
        under_way = self._under_way(key)
        command = None if under_way is None or under_way.message.recipient != device else under_way.message
        if frame.state is not None and frames.is_working(frame):
            if command is None:
                raise Malformed(f"no command {seq_id} of {app} is under way to {device}")
            return self._note_progress(key, device, frame.progress, frames.more_in(frame))
        state, answer = frames.answer_of(frame)
        end = Answered(key, state, answer, None, (), device, command is None or command.kind != CHUNK)
        if command is None:
            return self._take_late(end)
        try:
            self._engine.offer(end)
        except Overloaded:
            return put_later(self._engine, end, False)
        return False

    def _sender_of(self, device: str, seq_id: str) -> str:
        """Return the app that an ack without `to` answers."""
        if not self._unaddressed.knows(device):
            under_way = self._inbox.outbox.transmissions.to(device)
            self._unaddressed.learn(device, (one.message for one in under_way))
        scopes = self._unaddressed.find(device, seq_id)
        if len(scopes) != 1:
            which = "several commands" if scopes else "no command"
            raise Malformed(f"{which} {seq_id} under way to {device}: name the app in 'to'")
        return scopes[0]

    async def _note_progress(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> bool:
        """Record that a device is working on a command: no resends, a new deadline; the app is told once that
        is stored."""
        await self._engine.put(Received(key), lambda: self.tell_progress(key, device, progress, more))
        return False

    async def _take_late(self, end: Answered) -> bool:
        """Process an answer to a command that is not under way here, if the ledger says that this device had
        it."""
        record = (
            None if self._inbox.outbox.transmissions.message(end.key) else await self._ledger.find(end.key)
        )
        if record is not None and not record.state.terminal and not self._remote.handed_over(record):
            record = None
        if record is None or record.message.recipient != end.by or self._is_strangers(record):
            app, id_ = names_in(end.key)
            raise NotAllowed(f"{end.by} answered a command it never got: {id_} of {app}")
        self._trail.know(record.message)
        await self._engine.put(msgspec.structs.replace(end, keep=record.message.kind != CHUNK))
        return False

    def is_under_way(self, key: bytes) -> bool:
        """Return whether a command is under way from this hub."""
        return self._inbox.is_live(key)

    def under_way_to(self, key: bytes) -> str | None:
        """Return the device that a command is under way to from this hub."""
        message = self._inbox.outbox.transmissions.message(key)
        return None if message is None else message.recipient

    async def handed_to(self, key: bytes) -> str | None:
        """Return the device that a command was handed to; None if it was not handed over yet or is not
        known."""
        recipient = self.under_way_to(key)
        if recipient is not None:
            return recipient
        record = None if self._inbox.is_live(key) else await self._ledger.find(key)
        if record is None or not (record.state.terminal or self._remote.handed_over(record)):
            return None
        return None if self._is_strangers(record) else record.message.recipient

    def _is_strangers(self, record: Record) -> bool:
        """Return whether a command was for an earlier account of its device's name."""
        return self._was_another(record.message.recipient, record.accepted_at)
