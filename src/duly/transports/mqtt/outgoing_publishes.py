"""The messages that one MQTT connection publishes: those that wait for their PUBACK, and those queued behind.

The law: no more messages are unconfirmed than the broker allows; the others are sent in order of arrival.
Each caller is told once whether the broker has its message, also when the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container
from typing import Final, TypeAlias

from duly.errors import DulyError, TooLarge
from duly.transports.mqtt import packets, properties, reason_codes
from duly.transports.mqtt.address import BrokerAddress
from duly.wire.publish_properties import PublishProperties

LOG: Final = logging.getLogger("duly.mqtt")

Done: TypeAlias = Callable[[DulyError | None], None]
"""Called with None when the broker has confirmed a message, otherwise with the reason: the connection was
lost, or the broker refuses it (MQTT 5)."""


class OutgoingPublishes:
    """The publishes of one connection. `reserved` are packet numbers that other packets use."""

    def __init__(
        self,
        address: BrokerAddress,
        write: Callable[[bytes], None],
        reserved: Container[int],
        *,
        version: int,
        window: int,
    ) -> None:
        self._address = address
        self._write = write
        self._reserved = reserved
        self._five = version == 5
        self._no_properties = properties.NONE if self._five else b""
        self._loop = asyncio.get_running_loop()
        self._window = window
        """how many publishes may wait for their PUBACK; more are queued here"""
        self._largest = 0
        """bytes of the largest packet that the broker accepts; 0 if not given"""
        self._waiting: dict[int, tuple[Done | None, float, bytes]] = {}
        """unconfirmed messages: their callback, when they were sent, and their topic"""
        self._queued: deque[tuple[bytes, bytes, bool, Done | None, bytes]] = deque()
        self._number = 0
        self._logged: set[int] = set()
        """the reason codes of refusals that were logged"""
        self._all_confirmed = asyncio.Event()

    def __len__(self) -> int:
        """Return how many messages are unconfirmed or wait to be published."""
        return len(self._waiting) + len(self._queued)

    @property
    def oldest(self) -> float | None:
        """When the oldest unconfirmed message was published; None if there is none."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else first[1]

    def limit(self, limits: properties.Numbers) -> None:
        """Apply the limits of the broker."""
        self._window = min(self._window, limits.get(properties.RECEIVE_MAXIMUM, self._window)) or 1
        self._largest = limits.get(properties.MAXIMUM_PACKET_SIZE, 0)

    def publish(
        self,
        topic: bytes,
        payload: bytes,
        retain: bool,
        done: Done | None,
        about: PublishProperties | None = None,
    ) -> None:
        """Publish when there is room, in order of arrival. `topic` is a `text` of `packets`."""
        encoded = properties.encode(about) if about is not None and self._five else self._no_properties
        if len(self._waiting) < self._window:
            self._send(topic, payload, retain, done, encoded)
        else:
            self._queued.append((topic, payload, retain, done, encoded))

    def _send(self, topic: bytes, payload: bytes, retain: bool, done: Done | None, about: bytes) -> None:
        number = self.next_number()
        packet = packets.publish(topic, number, payload, retain=retain, properties=about)
        if self._largest and len(packet) > self._largest:
            self._refuse_large(len(packet), done)
            return
        self._waiting[number] = (done, self._loop.time(), topic)
        self._write(packet)

    def _refuse_large(self, size: int, done: Done | None) -> None:
        """Refuse a message that is too large: the broker would end the connection."""
        why = f"a message of {size} bytes is not sent: {self._address!r} takes {self._largest} at most"
        LOG.warning("%s", why)
        if done is not None:
            # Not before the caller has its handle.
            self._loop.call_soon(done, TooLarge(why))

    def next_number(self) -> int:
        """Return a packet number that is not in use."""
        number = self._number
        while True:
            number = number % packets.LAST_NUMBER + 1
            if number not in self._waiting and number not in self._reserved:
                self._number = number
                return number

    async def drained(self) -> None:
        """Wait until everything is confirmed, or `stop_waiting` is called."""
        if self._waiting:
            self._all_confirmed.clear()
            await self._all_confirmed.wait()

    def stop_waiting(self) -> None:
        """End every `drained`: the connection is over."""
        self._all_confirmed.set()

    def abandon(self, problem: DulyError) -> None:
        """Tell every caller that its message was not confirmed."""
        unconfirmed = [done for done, *_ in self._waiting.values()] + [done for *_, done, _ in self._queued]
        self._waiting.clear()
        self._queued.clear()
        for done in unconfirmed:
            if done is not None:
                done(problem)

    def acknowledged(self, data: bytes, start: int, end: int) -> None:
        """Take in a PUBACK: a number, and in MQTT 5 perhaps a code and properties. Without a failure it
        confirms."""
        if not self._five or end - start <= 2:
            self._confirmed(packets.number(data, start, end), None)
            return
        number, code = packets.number(data, start, start + 2), data[start + 2]
        said = properties.read(data, start + 3, end)[1] if end - start > 3 else ""
        published = self._waiting.get(number)
        problem = None
        if code >= reason_codes.FAILURES and published is not None:
            problem = self._refusal(published[2][2:].decode(errors="replace"), code, said)
        self._confirmed(number, problem)

    def _refusal(self, topic: str, code: int, said: str) -> DulyError:
        """Return the error of a message that the broker refuses; each code is logged once in a connection."""
        why = f"{self._address!r} refuses a message to {topic}: {reason_codes.words(code, said)}"
        if code not in self._logged:
            self._logged.add(code)
            LOG.warning("%s", why)
        return reason_codes.publish_error(code, why)

    def _confirmed(self, number: int, problem: DulyError | None) -> None:
        published = self._waiting.pop(number, None)
        if published is None:
            return
        if (done := published[0]) is not None:
            done(problem)
        while self._queued and len(self._waiting) < self._window:
            self._send(*self._queued.popleft())
        if not self._waiting:
            self._all_confirmed.set()
