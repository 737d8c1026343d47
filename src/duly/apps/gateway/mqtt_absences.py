"""The last statuses of MQTT devices that are offline: a broker keeps them, and they must not bring a device
online again.

The laws. A broker sends retained statuses whenever the hub subscribes, so after every start of the hub. If a
retained status is the one that the device had sent before it went offline, the device stays offline until it
sends something itself. Anything else was sent while the hub was away, and counts: a new session, a later time
or, without either, different content. A status of a removed device says nothing about a new device of the
same name; for that one only messages from the device itself count.

Messages that the hub had not acknowledged when it died are sent again, not always marked as repeats. A status
with its own session and time is never sent twice by a device, so equal bytes are the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.operations import DropItem, PutItem
from duly.errors import LedgerError
from duly.storage.ledger import Ledger
from duly.wire.fd import FdStatus

ABSENT: Final = "mqtt_absent"
"""The bucket of the offline devices with their last statuses."""


class LastOnlineStatuses(Struct, frozen=True, omit_defaults=True):
    """The statuses in which a device last said that it is online."""

    session: str
    time: int
    first: str
    """the digest of the first one since the device connected; the broker retains that one if it does not
    retain later ones"""
    last: str
    at: int = 0
    """when the device was found to be offline"""

    def covers(self, status: FdStatus, digest: str) -> bool:
        """Return whether a retained status is one of these, or one that the device had sent before them."""
        if status.session != self.session:
            return False
        if status.time or self.time:
            return status.time <= self.time
        return digest in (self.first, self.last)

    def is_repeat(self, status: FdStatus, digest: str) -> bool:
        """Return whether a status that looks new was received before."""
        return bool(status.session and status.time) and digest in (self.first, self.last)


class MqttAbsences:
    """The last statuses of one hub's offline MQTT devices. `born` returns when the account of a name was
    created: a device may send the same status as its predecessor."""

    def __init__(self, ledger: Ledger, born: Callable[[str], int]) -> None:
        self._ledger = ledger
        self._born = born
        self._said: dict[str, LastOnlineStatuses] = {}
        self._absent: dict[str, LastOnlineStatuses] = {}

    async def load(self) -> None:
        """Read what was stored before this start."""
        for name, stored in (await self._ledger.bucket(ABSENT)).items():
            with suppress(msgspec.DecodeError):  # then a retained status counts as new
                self._absent[name] = msgspec.json.decode(stored, type=LastOnlineStatuses)

    def was_said_before(self, name: str, status: FdStatus, payload: bytes, *, retained: bool) -> bool:
        """Return whether an offline device had sent this status before; `retained` if it comes from
        the broker's memory."""
        last = self._absent.get(name)
        if last is None:
            return False
        digest = _digest(payload)
        if retained:
            return last.covers(status, digest)
        repeat = last.at >= self._born(name) and last.is_repeat(status, digest)
        if repeat:  # only once: a device whose clock stands still sends the same status again
            self._absent[name] = msgspec.structs.replace(last, first="", last="")
        return repeat

    def note(self, name: str, status: FdStatus, payload: bytes) -> None:
        """Remember the status in which a device says that it is online."""
        before, digest = self._said.get(name), _digest(payload)
        first = before.first if before is not None and before.session == status.session else digest
        self._said[name] = LastOnlineStatuses(status.session, status.time, first, digest)

    async def came_online(self, name: str) -> None:
        """Note that a device is online again."""
        if self._absent.pop(name, None) is not None:
            await self._ledger.write(DropItem(ABSENT, name))

    async def went_offline(self, name: str) -> None:
        """Note that a device is offline. If the ledger fails the device goes offline anyway; at worst the hub
        trusts the retained status after its next start."""
        last = self._said.pop(name, None)
        if last is not None:
            self._absent[name] = last = msgspec.structs.replace(last, at=self._ledger.clock.now())
            with suppress(LedgerError):
                await self._ledger.write(PutItem(ABSENT, name, msgspec.json.encode(last)))


def _digest(payload: bytes) -> str:
    return blake2b(payload, digest_size=8).hexdigest()
