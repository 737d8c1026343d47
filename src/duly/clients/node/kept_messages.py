"""The messages of a node that are repeated at every connection until the broker has confirmed them.

The law: if there are too many, the oldest are dropped; the peer asks again for missing ones.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Final

from duly.errors import DulyError
from duly.transports.mqtt.link import MqttLink

KEPT: Final = 10_000


class KeptMessages:
    """The kept messages of one mailbox."""

    def __init__(self, link: MqttLink) -> None:
        self._link = link
        self._kept: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()

    def add(self, id: bytes, topic: str, payload: bytes) -> None:
        """Publish a message, and keep it until it is confirmed."""
        self._kept[id] = (topic, payload)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        self._send(id, topic, payload)

    def send_again(self) -> None:
        """Publish everything that is not confirmed."""
        for id_, (topic, payload) in list(self._kept.items()):
            self._send(id_, topic, payload)

    def _send(self, id: bytes, topic: str, payload: bytes) -> None:
        self._link.post(topic, payload, done=partial(self._sent, id))

    def _sent(self, id: bytes, problem: DulyError | None) -> None:
        """Drop a message that the broker has confirmed."""
        if problem is None:
            self._kept.pop(id, None)
