"""Pushes that this hub received over a shared broker although another hub stores them.

The law: a push is stored once, by the hub that holds its device. Every hub on the broker receives it; the hub
that takes a device over after its holder has died stores what the holder could not. Pushes that the holder
did store are found in the ledger: by the same id or, without an id, by the same content at about the same
time.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

from msgspec import Raw

from duly.apps.gateway.pushes import stream_of
from duly.core.units import SECOND
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.fields import Fields

OVERHEARD: Final = 500
"""How many pushes of one device are kept in case its holder has died."""
TAKEOVER: Final = 20 * SECOND
"""The longest time until another hub has taken over the devices of a dead hub."""
ABOUT: Final = 3 * SECOND
"""How far the times may differ at which two hubs received the same push."""

OverheardPush: TypeAlias = tuple[str, Raw, str | None, Fields]
"""Type, data, id and own fields of a push."""


class OverheardPushes:
    """The pushes of devices that another hub holds, kept for a while."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heard: dict[str, deque[tuple[int, str, Raw, str | None, Fields]]] = {}

    def keep(self, device: str, kind: str, data: Raw, seq_id: str | None, more: Fields) -> None:
        """Keep a push in case the hub that holds its device has died."""
        now = self._ledger.clock.now()
        heard = self._heard.setdefault(device, deque(maxlen=OVERHEARD))
        if seq_id is not None and any(one[3] == seq_id for one in heard):
            return  # sent again because its holder does not acknowledge it
        while heard and heard[0][3] is None and heard[0][0] < now - TAKEOVER:
            heard.popleft()
        heard.append((now, kind, data, seq_id, more))

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """Remove and return the pushes that no hub has stored, in order of arrival."""
        heard = self._heard.pop(device, None)
        if not heard:
            return []
        stream, since = stream_of(device), self._ledger.clock.now() - TAKEOVER
        last = (await self._ledger.extent(stream)).last
        entries = await self._ledger.entries(stream, max(0, last - 2 * OVERHEARD), 2 * OVERHEARD)
        stored = [(entry.at, frames.decode(entry.body)) for entry in entries]
        unstored: list[OverheardPush] = []
        for at, kind, data, seq_id, more in heard:
            value = frames.load(data)
            for one in stored if seq_id is None else ():  # the ledger recognises an id anyway
                if (one[1].type, frames.load(one[1].data)) == (kind, value) and abs(one[0] - at) < ABOUT:
                    stored.remove(one)
                    break
            else:
                if seq_id is not None or at >= since:
                    unstored.append((kind, data, seq_id, more))
        return unstored
