"""Pushes that this hub heard over a shared broker although another hub stores them.

The law: a push is stored once, by the hub that holds its device. Every hub on the broker hears it; the hub
that takes a device over after its holder has died stores what the holder no longer could. What the holder
did store is in the ledger: the same id or, of pushes without one, the same words at about the same time.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

from duly.apps.gateway.pushes import stream_of
from duly.core.units import SECOND
from duly.storage.ledger import Ledger
from duly.wire import frames
from duly.wire.fields import Fields

OVERHEARD: Final = 500
"""Pushes of one device that are kept in case its holder has died."""
TAKEOVER: Final = 20 * SECOND
"""Within so long another hub has taken over what a dead hub held."""
ABOUT: Final = 3 * SECOND
"""So far apart two hubs may say that they heard the same."""

OverheardPush: TypeAlias = tuple[str, object, str | None, Fields]
"""Type, data, id and own fields of a push."""


class OverheardPushes:
    """The pushes of devices that another hub holds, kept for a while."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heard: dict[str, deque[tuple[int, str, object, str | None, Fields]]] = {}

    def keep(self, device: str, kind: str, data: object, seq_id: str | None, more: Fields) -> None:
        """Keep a push in case the hub that holds its device has died."""
        now = self._ledger.clock.now()
        heard = self._heard.setdefault(device, deque(maxlen=OVERHEARD))
        if seq_id is not None and any(one[3] == seq_id for one in heard):
            return  # sent again, since its holder does not acknowledge it
        while heard and heard[0][3] is None and heard[0][0] < now - TAKEOVER:
            heard.popleft()
        heard.append((now, kind, data, seq_id, more))

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """What no hub has stored, in the order it was told; it is not kept any longer."""
        heard = self._heard.pop(device, None)
        if not heard:
            return []
        stream, since = stream_of(device), self._ledger.clock.now() - TAKEOVER
        last = (await self._ledger.extent(stream)).last
        entries = await self._ledger.entries(stream, max(0, last - 2 * OVERHEARD), 2 * OVERHEARD)
        stored = [(entry.at, frames.decode(entry.body)) for entry in entries]
        unstored: list[OverheardPush] = []
        for at, kind, data, seq_id, more in heard:
            for one in stored if seq_id is None else ():  # the ledger knows an id anyway
                if (one[1].type, frames.load(one[1].data)) == (kind, data) and abs(one[0] - at) < ABOUT:
                    stored.remove(one)
                    break
            else:
                if seq_id is not None or at >= since:
                    unstored.append((kind, data, seq_id, more))
        return unstored
