"""Stores the pushes of MQTT devices, and answers those that have an id.

The law: the answer is published to the device's own `ack` or `failed` topic after the push is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from duly.apps.gateway.mqtt_device import DeviceLink
from duly.apps.gateway.mqtt_frames import MqttPush, answer_to_push
from duly.apps.gateway.pushes import PushService
from duly.errors import DulyError, RateLimited, SenderError
from duly.wire import fd, outgoing
from duly.wire.frames import ServerCode
from duly.wire.outgoing import ServerAck


class MqttPushes:
    """The pushes of all MQTT devices of a hub; `link` returns the link to answer on."""

    def __init__(self, pushes: PushService, link: Callable[[], DeviceLink | None]) -> None:
        self._pushes = pushes
        self._link = link

    async def store(self, name: str, push: MqttPush, again: bool = False) -> None:
        """Store a push and answer it; `again` if it may have been stored before."""
        try:
            verdict = await self._pushes.store_from_broker(name, *push, again)
        except SenderError as problem:
            refused = outgoing.trouble(push.seq_id, ServerCode.BAD_PARAMETERS, problem.word, str(problem))
            self._answer(name, push.seq_id, refused)
            raise
        except RateLimited as problem:
            later = outgoing.trouble(
                push.seq_id, ServerCode.INTERNAL, problem.word, str(problem), problem.wait
            )
            self._answer(name, push.seq_id, later)
            raise
        if verdict is not None:
            self._answer(name, push.seq_id, outgoing.server_ack(push.seq_id, verdict))

    def _answer(self, name: str, seq_id: str | None, said: ServerAck) -> None:
        link = self._link()
        if seq_id is None or link is None:
            return
        with suppress(DulyError):  # the device sends it again
            kind, text = answer_to_push(seq_id, said)
            link.post(fd.topic_of(fd.PREFIX, name, kind), text)
