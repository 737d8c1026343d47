"""Answers of MQTT devices to their commands: `ack` means delivered, `complete` is code 0, `failed` its code.

The laws. An answer counts only if it carries the tag of the task given to its device (`duly.wire.task_ids`),
if the task was handed over and, for a device with a key, if it is signed. An answer to a command under way
needs no lookup in the ledger; the others are looked up, at a limited rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from msgspec import Struct

from duly.apps.gateway.device_signatures import DeviceSignatures
from duly.apps.gateway.mqtt_frames import HeardMessage, data_of, failure_of
from duly.apps.gateway.service import GatewayService
from duly.core.lifecycle import State
from duly.core.messages import Answer, key_of
from duly.core.rate_limits import Rate, RateLimits
from duly.core.steps import Answered, Received
from duly.core.units import SECOND, seconds
from duly.errors import DulyError, Forged, LedgerError, Malformed, Overloaded, RateLimited
from duly.runtime.fair_reader import FairReader
from duly.wire import fd, frames
from duly.wire.frames import DeviceCode
from duly.wire.task_ids import TaskId, TaskIds, answered_id, read_task_id

LATE: Final = Rate(1, SECOND, burst=10)
"""The rate of answers to commands that are no longer under way: each costs a lookup in the ledger."""


class _TaggedAnswer(Struct, frozen=True):
    """An answer with a tag of this hub, and the key of its command."""

    said: fd.FdAck | fd.FdComplete | fd.FdFailed
    task: TaskId
    key: bytes


class MqttAnswers:
    """The answers to the tasks of one hub. `heard` is called with the device of each new answer;
    `is_at_another_hub` returns whether a device belongs to another hub, which receives its answers as
    well."""

    def __init__(
        self,
        gateway: GatewayService,
        ids: TaskIds,
        signatures: DeviceSignatures,
        reader: FairReader[HeardMessage],
        heard: Callable[[str], None],
        is_at_another_hub: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._gateway = gateway
        self._ids = ids
        self._signatures = signatures
        self._reader = reader
        self._heard = heard
        self._is_at_another_hub = is_at_another_hub
        self._late = RateLimits(LATE)

    def sort(self, heard: HeardMessage) -> None:
        """Hand an answer to a command under way to the engine; other answers wait for their turn."""
        task = self._task(heard)
        device = self._gateway.answers.under_way_to(key_of(task.app, task.seq_id))
        if device is None:
            late = f"{task.app}:{task.seq_id}"
            if self._late.take(late, seconds(asyncio.get_running_loop().time())):
                raise RateLimited(f"{late} is answered too often; the answer was dropped", LATE.interval)
            self._reader.put(late, heard)
        elif self._reader.busy(device):
            self._reader.put(device, heard)
        else:
            try:
                self._gateway.engine.offer(self._end(heard, self._read(heard), device), heard.ack)
            except (Overloaded, LedgerError):
                self._reader.put(device, heard)

    async def handle(self, heard: HeardMessage) -> None:
        """Find the command of an answer in the ledger, and hand the answer to the engine."""
        answer = self._read(heard)
        device = await self._gateway.answers.handed_to(answer.key)
        if device is None:
            name = f"{answer.task.app}:{answer.task.seq_id}"
            raise Malformed(f"{name} is not a task that was handed to a device, or it was forgotten")
        event = self._end(heard, answer, device)
        if not self._gateway.answers.is_under_way(answer.key) and await self._is_at_another_hub(device):
            heard.ack()
        else:
            await self._gateway.engine.put(event, heard.ack)

    def named_in(self, payload: bytes) -> tuple[str, str] | None:
        """Return the app and the id of the command that a refused answer names, if that command is under way:
        the forger is not known, but the command it was meant for is."""
        with suppress(DulyError):
            task = read_task_id(answered_id(payload))
            if self._gateway.answers.under_way_to(key_of(task.app, task.seq_id)) is not None:
                return task.app, task.seq_id
        return None

    def _task(self, heard: HeardMessage) -> TaskId:
        """Return the task that an answer names, if a hub has assigned it. Nothing else of a forged answer is
        read."""
        msg_id = answered_id(heard.payload)
        task = read_task_id(msg_id)
        if not self._ids.known(task):
            raise Forged(f"{msg_id[:80]!r} is not the msg_id of a task that this hub has given to a device")
        return task

    def _read(self, heard: HeardMessage) -> _TaggedAnswer:
        task = self._task(heard)
        said = fd.decode(heard.kind, heard.payload)
        assert isinstance(said, fd.FdAck | fd.FdComplete | fd.FdFailed)
        return _TaggedAnswer(said, task, key_of(task.app, task.seq_id))

    def _end(self, heard: HeardMessage, answer: _TaggedAnswer, device: str) -> Received | Answered:
        """Return what an answer means, if it comes from this device."""
        if not self._ids.fits(answer.task, device):
            raise Forged(
                f"{answer.task.app}:{answer.task.seq_id} was given to {device}, under another msg_id"
            )
        self._signatures.check(answer.said, device)
        if not heard.old:
            self._heard(device)
        match answer.said:
            case fd.FdAck(progress=progress):
                self._gateway.trail.note(answer.key, "delivered")
                if progress.data:
                    self._gateway.answers.tell_progress(answer.key, device, frames.raw(data_of(progress)), {})
                return Received(answer.key)
            case fd.FdComplete(value=value):
                done = Answer(DeviceCode.DONE, data_of(value))
                return Answered(answer.key, State.DONE, done, by=device)
            case fd.FdFailed(error=error):
                state, failed = frames.answer_of(failure_of(error))
                return Answered(answer.key, state, failed, by=device)
