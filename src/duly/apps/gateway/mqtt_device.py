"""The session of one MQTT device: commands leave it as FD tasks.

The law: a task is made from the command's value, under a msg_id that only this device can answer. A task that
cannot be encoded is refused and recorded; the outbox repeats a task that is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from duly.core.acl import HUB
from duly.core.ids import time_of
from duly.core.units import MS
from duly.errors import ConnectionLost, DulyError
from duly.runtime.clock import Clock
from duly.runtime.refusal_tally import RefusalTally
from duly.wire import fd, frames, outgoing
from duly.wire.fd import FdKind
from duly.wire.fields import Fields
from duly.wire.outgoing import CommandFrame, FrameWithFields, OutgoingFrame
from duly.wire.publish_properties import PublishProperties, seconds_left
from duly.wire.session import UncongestedSession
from duly.wire.task_ids import TaskIds


class DeviceLink(Protocol):
    """The part of `duly.transports.mqtt.link.MqttLink` that is used here."""

    def post(
        self,
        topic: str,
        payload: bytes,
        *,
        done: Callable[[DulyError | None], None] | None = None,
        properties: PublishProperties | None = None,
    ) -> None:
        """Publish without waiting for the broker; `done` is called when it has confirmed, or with the
        error."""
        ...

    async def subscribe(self, *filters: str) -> None:
        """Subscribe; the broker answers with the retained messages."""
        ...

    async def unsubscribe(self, *filters: str) -> None:
        """End subscriptions."""
        ...


class MqttDevice(UncongestedSession):
    """The session of one MQTT device. `given` is called with the device's name for every task sent to it."""

    def __init__(
        self,
        name: str,
        link: DeviceLink,
        session: str,
        ids: TaskIds,
        refusals: RefusalTally,
        given: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.name = name
        self._ids = ids
        self._refusals = refusals
        self._given = given
        self.session = session
        """the id of this connection, as given by the device"""
        self._link = link
        self._answers = fd.topic_of(fd.PREFIX, HUB, FdKind.COMPLETE)
        self._clock = clock

    def push(self, frame: OutgoingFrame) -> None:
        """Send a command as an FD task; other frames mean nothing to a node and are dropped."""
        command, fields = _command_in(frame)
        if command is None:
            return
        task = fd.FdPending(
            sender=HUB,
            receiver=self.name,
            msg_id=self._ids.mint(self.name, command.from_, command.seq_id),
            action=command.type,
            time=time_of(command.seq_id) or 0,
            exp=(command.exp or 0) * MS,
            payload=fd.Content(outgoing.payload_of(command, fields)),
            order=frames.dump_order(command.order),
            traceparent=command.traceparent or "",
        )
        topic = fd.topic_of(fd.PREFIX, self.name, FdKind.PENDING)
        try:
            # Without a connection it is lost here; the outbox repeats it.
            self._link.post(
                topic,
                fd.encode(task),
                done=lambda problem: self._confirmed(command, problem),
                properties=PublishProperties(
                    seconds_left(task.exp, self._clock.now()),
                    self._answers,
                    task.msg_id.encode(),
                    _trace_in(command, fields),
                ),
            )
            self._given(self.name)
        except DulyError as problem:
            self._confirmed(command, problem)

    def _confirmed(self, command: CommandFrame, problem: DulyError | None) -> None:
        """Record why the broker refused a command, unless the connection was lost."""
        if problem is not None and not isinstance(problem, ConnectionLost):
            self._refusals.note(
                command.from_, command.seq_id, problem.word, f"not sent to {self.name}: {problem}"
            )

    def close(self, reason: str) -> None:
        """Do nothing: the device's connection is with the broker."""


def _command_in(frame: OutgoingFrame) -> tuple[CommandFrame | None, Fields]:
    """Return the command in a frame with its own fields, or None for another kind of frame."""
    if type(frame) is CommandFrame:
        return frame, {}
    if isinstance(frame, FrameWithFields) and isinstance(frame.frame, CommandFrame):
        return frame.frame, frame.fields
    return None, {}


def _trace_in(command: CommandFrame, fields: Fields) -> tuple[tuple[str, str], ...]:
    """Return the trace of a command as MQTT 5 properties: its `traceparent`, and the `tracestate` that its
    app has added."""
    if not command.traceparent:
        return ()
    trace = ("traceparent", command.traceparent)
    state = frames.load(fields["tracestate"]) if "tracestate" in fields else None
    return (trace, ("tracestate", state)) if isinstance(state, str) and 0 < len(state) <= 512 else (trace,)
