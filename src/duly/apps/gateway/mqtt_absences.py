"""What each MQTT device had said when it was found to be offline: a broker keeps it, and it is no news.

The laws. A broker hands out what it has kept whenever the hub subscribes, so after every start of the hub. If
that is what the device had said before it was found to be offline, it stays offline, until it says something
itself. Anything else was said while the hub was away, and counts: a new session; a later time; without
either, other content. What a removed device had said is no news of another device of its name, either: a
broker keeps it all the same, and only what comes from the device itself can be the new one's word.

What the hub had not acknowledged when it died comes again, and not always marked: a status with a session and
a time of its own is never said twice, so the same bytes are the same message.
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
"""The bucket of the devices that are offline, with what each had said before."""


class LastWords(Struct, frozen=True, omit_defaults=True):
    """The statuses by which a device last said that it is online."""

    session: str
    time: int
    first: str
    """the digest of the first one since it came: that one is kept by the broker, if later ones are not"""
    last: str
    at: int = 0
    """when the device was found to be offline"""

    def is_kept(self, status: FdStatus, digest: str) -> bool:
        """Whether a status that the broker has kept is what the device had said before."""
        if status.session != self.session:
            return False
        if status.time or self.time:
            return status.time <= self.time
        return digest in (self.first, self.last)

    def is_repeat(self, status: FdStatus, digest: str) -> bool:
        """Whether a status that seems new has come before."""
        return bool(status.session and status.time) and digest in (self.first, self.last)


class MqttAbsences:
    """What the MQTT devices of one hub had said when they were found to be offline. `born` tells when the
    account of that name was made: a device may say itself what its predecessor had said."""

    def __init__(self, ledger: Ledger, born: Callable[[str], int]) -> None:
        self._ledger = ledger
        self._born = born
        self._said: dict[str, LastWords] = {}
        self._absent: dict[str, LastWords] = {}

    async def load(self) -> None:
        """Read what was stored before this start."""
        for name, stored in (await self._ledger.bucket(ABSENT)).items():
            with suppress(msgspec.DecodeError):  # then what the broker has kept counts as news
                self._absent[name] = msgspec.json.decode(stored, type=LastWords)

    def is_no_news(self, name: str, status: FdStatus, payload: bytes, *, kept: bool) -> bool:
        """Whether a device that is offline had said this before; `kept` if it comes from the broker's
        memory."""
        words = self._absent.get(name)
        if words is None:
            return False
        digest = _digest(payload)
        if kept:
            return words.is_kept(status, digest)
        repeat = words.at >= self._born(name) and words.is_repeat(status, digest)
        if repeat:  # once: a device whose clock stands still says the same again
            self._absent[name] = msgspec.structs.replace(words, first="", last="")
        return repeat

    def note(self, name: str, status: FdStatus, payload: bytes) -> None:
        """Remember by which status a device says that it is online."""
        before, digest = self._said.get(name), _digest(payload)
        first = before.first if before is not None and before.session == status.session else digest
        self._said[name] = LastWords(status.session, status.time, first, digest)

    async def came(self, name: str) -> None:
        """A device is online again."""
        if self._absent.pop(name, None) is not None:
            await self._ledger.write(DropItem(ABSENT, name))

    async def went(self, name: str) -> None:
        """A device is found to be offline. A ledger that fails does not keep it online: at worst the hub
        believes the broker after its next start."""
        words = self._said.pop(name, None)
        if words is not None:
            self._absent[name] = words = msgspec.structs.replace(words, at=self._ledger.clock.now())
            with suppress(LedgerError):
                await self._ledger.write(PutItem(ABSENT, name, msgspec.json.encode(words)))


def _digest(payload: bytes) -> str:
    return blake2b(payload, digest_size=8).hexdigest()
