"""Homes: which hub has a device, and which hubs live.

The laws. A device's home is the hub that holds its session, and lies on a bucket of the ledger: put there
when it connects, taken off when it leaves, if it is still ours. A hub lives as long as its heartbeat on
another bucket goes on: every hub counts up there, and whoever sees a heartbeat stand still for `LAPSE` calls
that hub dead. Only the watcher's own clock measures that, so that no two clocks need agree; and while the
ledger is away nobody's heartbeat can be seen, so nobody is called dead.

What is known here is a copy, a second or two old at most; where it matters the ledger is asked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from typing import Final

from duly.cluster.notifier import HintSender
from duly.core.operations import DropItem, PutItem, PutNewItem
from duly.storage.ledger import Ledger

HUBS: Final = "hubs"
REGISTRY: Final = "registry"
RING: Final = "home"
LAPSE: Final = 7.0
"""Seconds without a heartbeat until a hub counts as dead."""
BLINK: Final = 3.0
"""Seconds without a look after which nothing can be said about how long a heartbeat has stood still."""


class HubRegistry:
    """One hub's view of where everybody is."""

    def __init__(self, ledger: Ledger, bell: HintSender) -> None:
        self._ledger = ledger
        self._bell = bell
        self.me = ledger.worker
        self._heartbeat = 0
        self._heartbeats: dict[str, tuple[bytes, float]] = {}
        """of each hub the last heartbeat, and when it was first seen"""
        self._looked = -BLINK
        self._registry: dict[str, bytes] = {}
        self._mine: dict[str, bytes] = {}
        self._moving: set[str] = set()
        """about to move in"""

    @property
    def living(self) -> frozenset[str]:
        now = asyncio.get_running_loop().time()
        seen = {hub for hub, (_, since) in self._heartbeats.items() if now - since < LAPSE}
        return frozenset(seen | {self.me})

    def at_home(self, device: str) -> bool:
        """Whether some hub that lives has this device, as far as is known."""
        home = self._registry.get(device)
        return home is not None and _hub(home) in self.living

    def moved(self, device: str) -> bool:
        """Whether a device that had its home here seems to have it remote now."""
        return device in self._mine and self._registry.get(device) != self._mine[device]

    def everybody(self) -> list[str]:
        """The devices that are at home anywhere."""
        living = self.living
        return sorted(device for device, home in self._registry.items() if _hub(home) in living)

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def look(self) -> list[str]:
        """Show that we live, and look at the others. Returns the devices that a dead hub had, and that
        nobody has now: each of them is told to one hub only."""
        self._heartbeat += 1
        await self._ledger.write(PutItem(HUBS, self.me, b"%d" % self._heartbeat))
        # In this order: whoever has a home that we see has had a heartbeat before it.
        registry, heartbeats = await self._ledger.bucket(REGISTRY), await self._ledger.bucket(HUBS)
        now = asyncio.get_running_loop().time()
        blinked, self._looked = now - self._looked > BLINK, now
        before, self._heartbeats = self._heartbeats, {}
        for hub, heartbeat in heartbeats.items():
            old = before.get(hub)
            same = old is not None and old[0] == heartbeat and not blinked
            self._heartbeats[hub] = old if same and old is not None else (heartbeat, now)
        self._registry = registry
        living = self.living
        for hub, heartbeat in heartbeats.items():
            if hub not in living:
                await self._ledger.write(DropItem(HUBS, hub, heartbeat))
        lost = [(device, home) for device, home in registry.items() if _hub(home) not in living]
        return [device for device, home in lost if await self._drop(device, home)]

    async def ask(self, device: str) -> bool:
        """Whether some hub that lives has this device, by the ledger."""
        home = await self._ledger.item(REGISTRY, device)
        if home is None:
            self._registry.pop(device, None)
        else:
            self._learn(device, home)
        return self.at_home(device)

    def _learn(self, device: str, home: bytes) -> None:
        """A device has this home. A hub that we do not know has just begun; if it is dead instead, the next
        look sees that."""
        self._registry[device] = home
        self._heartbeats.setdefault(_hub(home), (b"", asyncio.get_running_loop().time()))

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    async def move_in(self, device: str) -> bool:
        """Its session is here, whoever had it before; whether it was nowhere."""
        if device in self._moving:
            self._moving.discard(device)
            return True
        home = self._new_home()
        self._moving.add(device)
        try:
            new = await self._ledger.apply(PutItem(REGISTRY, device, home))
        finally:
            self._moving.discard(device)
        self._settle(device, home)
        return new

    async def stays(self, device: str) -> bool:
        """Whether we are still the home of a device, by the ledger. If nobody is, because we seemed dead
        for a while, we are again."""
        mine = self._mine.get(device)
        if mine is None:
            return True
        ours = await self._ledger.item(REGISTRY, device) == mine
        if not ours:
            ours = await self._ledger.apply(PutNewItem(REGISTRY, device, mine))
        if self._mine.get(device) != mine:
            return True  # it left meanwhile, or came again
        if ours:
            self._registry[device] = mine
        else:
            del self._mine[device]
        return ours

    async def claim(self, device: str) -> bool:
        """Become the home of a device that every hub could serve, unless a hub that lives has it."""
        there = await self._ledger.item(REGISTRY, device)
        if there is not None:
            self._learn(device, there)
            if _hub(there) in self.living:
                return there == self._mine.get(device)
        home = self._new_home()
        old = () if there is None else (DropItem(REGISTRY, device, there),)
        won = False
        self._moving.add(device)
        try:
            put = PutNewItem(REGISTRY, device, home)
            won = (await self._ledger.write(*old, put)).of(put)
        finally:
            if not won:
                self._moving.discard(device)
        if won:
            self._settle(device, home)
        return won

    async def move_out(self, device: str) -> bool:
        """Its session here is over; whether we still were its home."""
        self._moving.discard(device)
        home = self._mine.pop(device, None)
        return home is not None and await self._drop(device, home)

    async def clear(self, here: Collection[str]) -> None:
        """Nobody lives here who is not here: a session may end before its home is known to be ours."""
        for device, home in list(self._registry.items()):
            if _hub(home) == self.me and device not in here and device not in self._moving:
                self._mine.pop(device, None)
                await self._drop(device, home)

    async def leave(self) -> None:
        """This hub stops, and is not waited for."""
        await self._ledger.write(DropItem(HUBS, self.me))
        self._bell.ring(RING)

    def _new_home(self) -> bytes:
        return f"{self.me}/{secrets.token_hex(4)}".encode()

    def _settle(self, device: str, home: bytes) -> None:
        self._registry[device] = self._mine[device] = home
        self._bell.ring(RING, device)

    async def _drop(self, device: str, home: bytes) -> bool:
        gone = await self._ledger.apply(DropItem(REGISTRY, device, home))
        if self._registry.get(device) == home:
            del self._registry[device]
        if gone:
            self._bell.ring(RING, device)
        return gone


def _hub(home: bytes) -> str:
    return home.partition(b"/")[0].decode()
