"""The ids of pushes that were dropped at the hub's door because their MQTT device reports too often.

The law: a push that arrives after a dropped one is not stored before it. The device sends the dropped one
again, since it is not answered; until then the hub has to know that it is missing.
"""

from __future__ import annotations

from typing import Final

from duly.apps.gateway.device_signatures import DeviceSignatures
from duly.apps.gateway.mqtt_frames import push_in
from duly.core.messages import key_of
from duly.errors import SenderError
from duly.wire import fd

REMEMBERED: Final = 128
"""How many dropped pushes of one device are remembered, the earliest ones: twice as many as a device sends
without an answer."""


class DroppedPushes:
    """The pushes of each device that were dropped since its last message that was not."""

    def __init__(self, signatures: DeviceSignatures) -> None:
        self._signatures = signatures
        self._ids: dict[str, dict[str, None]] = {}

    def note(self, device: str, payload: bytes) -> None:
        """Remember the push in a status that is dropped, if it has an id and is signed as it should be."""
        ids = self._ids.get(device, {})
        if len(ids) >= REMEMBERED:
            return
        try:
            status = fd.decode_status(payload)
            push = None if status is None else push_in(status)
            if status is None or push is None or push.seq_id is None or push.seq_id in ids:
                return
            key_of(device, push.seq_id)  # it can be stored under its id
            self._signatures.check(status, device)
        except SenderError:
            return  # it would have been refused
        self._ids.setdefault(device, ids)[push.seq_id] = None

    def take(self, device: str) -> tuple[str, ...]:
        """Remove and return the ids of a device's dropped pushes, in order of arrival."""
        return tuple(self._ids.pop(device, ()))
