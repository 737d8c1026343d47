"""The registry: which hub holds which device, and which hubs are alive.

The laws. A device's holder is the hub that has its session. The holder is an item in a bucket of the ledger,
put there when the device connects and dropped when it leaves, if it is still this hub's. A hub is alive while
its heartbeat, a counter in another bucket, increases; a hub whose heartbeat has not changed for `LAPSE`
seconds is dead. That is measured only by the watcher's own clock, so that no two clocks need to agree. While
the ledger is unreachable no heartbeat can be seen, so no hub counts as dead.

The registry in memory is a copy, at most a second or two old; where it matters the ledger is asked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection
from typing import Final

from duly.cluster.notifier import HintSender
from duly.core.operations import DropItem, Group, PutItem, PutNewItem
from duly.errors import LedgerUnavailable
from duly.storage.ledger import Ledger

HUBS: Final = "hubs"
"""The bucket of heartbeats, by hub."""
REGISTRY: Final = "registry"
"""The bucket of holders, by device."""
HELD: Final = "held"
"""The hint that this device has another holder, or none."""
LAPSE: Final = 7.0
"""Seconds without a heartbeat until a hub counts as dead."""
BLIND: Final = 3.0
"""Seconds without a refresh after which the age of a heartbeat is not known."""
PROMPT: Final = 2.0
"""Seconds within which a registration is stored, unless the ledger is slow."""


class HubRegistry:
    """One hub's view of the hubs and of the devices that they hold.

    A holder is written as the hub's name and a token, so that two sessions at the same hub differ. `area` is
    a prefix for the buckets and hints of other programs than hubs that share work on one ledger in the same
    way. `name` is for people, and is sent with each heartbeat.
    """

    def __init__(self, ledger: Ledger, notifier: HintSender, area: str = "", *, name: str = "") -> None:
        self._ledger = ledger
        self._notifier = notifier
        self._hubs, self._registry, self.held = area + HUBS, area + REGISTRY, area + HELD
        self.me = ledger.worker
        self._name = name
        self._heartbeat = 0
        self._heartbeats: dict[str, tuple[bytes, float]] = {}
        """by hub: the last heartbeat, and when it was first seen"""
        self._refreshed = -BLIND
        self._holders: dict[str, bytes] = {}
        self._mine: dict[str, bytes] = {}
        self._registering: Counter[str] = Counter()
        """devices that are being registered here, and how many registrations of each are under way"""
        self._claimed: set[str] = set()
        """devices that were claimed and are about to connect"""

    @property
    def living(self) -> frozenset[str]:
        """The live hubs, including this one. While the registry cannot be read no time passes: a heartbeat
        that was not checked does not count as missing."""
        until = min(asyncio.get_running_loop().time(), self._refreshed + BLIND)
        seen = {hub for hub, (_, since) in self._heartbeats.items() if until - since < LAPSE}
        return frozenset(seen | {self.me})

    def name_of(self, hub: str) -> str:
        """Return the name of a hub for people, or its id until it has sent one."""
        heartbeat, _ = self._heartbeats.get(hub, (b"", 0.0))
        return heartbeat.partition(b" ")[2].decode() or hub

    def is_held(self, device: str) -> bool:
        """Return whether a live hub holds a device, as far as is known."""
        holder = self._holders.get(device)
        return holder is not None and _hub_of(holder) in self.living

    def is_at_another(self, device: str) -> bool:
        """Return whether another live hub holds a device, as far as is known."""
        holder = self._holders.get(device)
        return holder is not None and _hub_of(holder) in self.living - {self.me}

    def is_registered(self, device: str) -> bool:
        """Return whether this hub has registered a device, or is about to."""
        return device in self._mine or device in self._registering or device in self._claimed

    def may_be_lost(self, device: str) -> bool:
        """Return whether a device that was held here seems to be held by another hub now."""
        return device in self._mine and self._holders.get(device) != self._mine[device]

    def held_devices(self) -> list[str]:
        """Return the devices that live hubs hold, by name."""
        living = self.living
        return sorted(device for device, holder in self._holders.items() if _hub_of(holder) in living)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def refresh(self, also: Group = ()) -> list[str]:
        """Send a heartbeat, with what `also` is to be stored, and read the registry. Returns the devices that
        a dead hub held and no hub holds now; each is returned to one hub only."""
        self._heartbeat += 1
        beat = PutItem(self._hubs, self.me, f"{self._heartbeat} {self._name}".encode())
        await self._ledger.write(beat, *also)
        # In this order, so that a hub whose device is seen has already had a heartbeat.
        holders, heartbeats = await self._ledger.bucket(self._registry), await self._ledger.bucket(self._hubs)
        now = asyncio.get_running_loop().time()
        was_blind, self._refreshed = now - self._refreshed > BLIND, now
        before, self._heartbeats = self._heartbeats, {}
        for hub, heartbeat in heartbeats.items():
            old = before.get(hub)
            same = old is not None and old[0] == heartbeat and not was_blind
            self._heartbeats[hub] = old if same and old is not None else (heartbeat, now)
        self._holders = holders
        living = self.living
        for hub, heartbeat in heartbeats.items():
            if hub not in living:
                await self._ledger.write(DropItem(self._hubs, hub, heartbeat))
        lost = [(device, holder) for device, holder in holders.items() if _hub_of(holder) not in living]
        return [device for device, holder in lost if await self._drop(device, holder)]

    async def look_up(self, device: str) -> bool:
        """Ask the ledger whether a live hub holds a device."""
        holder = await self._ledger.item(self._registry, device)
        if holder is None:
            self._holders.pop(device, None)
        else:
            self._learn(device, holder)
        return self.is_held(device)

    def _learn(self, device: str, holder: bytes) -> None:
        """Note a device's holder. An unknown hub has just started; if it is dead instead, the next refresh
        shows that."""
        self._holders[device] = holder
        self._heartbeats.setdefault(_hub_of(holder), (b"", asyncio.get_running_loop().time()))

    async def meet(self, hubs: Collection[str]) -> None:
        """Read which hubs have started since the last refresh; a hub that has just started is alive."""
        for hub in hubs:
            if hub not in self._heartbeats:
                beat = await self._ledger.item(self._hubs, hub)
                if beat is not None:
                    self._heartbeats.setdefault(hub, (beat, asyncio.get_running_loop().time()))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    async def register(self, device: str) -> bool:
        """Hold a device, whichever hub held it before; return whether none did.

        A registration that was stored late does not take the device from a hub that has registered it
        meanwhile: its session is the older one, and may be over.
        """
        if device in self._claimed:
            self._claimed.discard(device)
            return True
        holder = self._new_holder()
        self._registering[device] += 1
        try:
            before = await self._replace(device, holder)
        finally:
            self._registering[device] -= 1
            self._registering += Counter()  # drops those that no longer exist
        self._settle(device, holder)
        return before is None

    async def _replace(self, device: str, holder: bytes) -> bytes | None:
        """Replace the present holder by a new one, and return the old one."""
        loop = asyncio.get_running_loop()
        began, before = loop.time(), self._holders.get(device)
        put = PutNewItem(self._registry, device, holder)
        while True:
            old = () if before is None else (DropItem(self._registry, device, before),)
            if (await self._ledger.write(*old, put)).of(put):
                return before
            before = await self._ledger.item(self._registry, device)
            if before is not None and loop.time() - began > PROMPT:
                self._learn(device, before)
                if self.is_at_another(device):
                    raise LedgerUnavailable(f"{device} has connected to another hub meanwhile; come back")

    async def confirm(self, device: str) -> bool:
        """Ask the ledger whether this hub still holds a device that is here. If no hub does, because this one
        seemed dead for a while, it registers the device again."""
        if not self.is_registered(device):
            return await self._register_again(device)
        mine = self._mine.get(device)
        if mine is None:
            return True  # in a moment
        ours = await self._ledger.item(self._registry, device) == mine
        if not ours:
            ours = await self._ledger.apply(PutNewItem(self._registry, device, mine))
        if self._mine.get(device) != mine:
            return True  # it left meanwhile, or came again
        if ours:
            self._holders[device] = mine
        else:
            del self._mine[device]
        return ours

    async def _register_again(self, device: str) -> bool:
        """Register a device that is here but not registered, because an earlier session's end removed the
        registration. Returns whether no other hub has it."""
        holder = self._new_holder()
        new = await self._ledger.apply(PutNewItem(self._registry, device, holder))
        if new:
            self._settle(device, holder)
        return new or self.is_registered(device)

    async def claim(self, device: str) -> bool:
        """Hold a device that every hub could serve, unless another live hub holds it; return whether this hub
        does. It stays claimed until it is registered or `end_claim` is called."""
        there = await self._ledger.item(self._registry, device)
        if there is not None:
            self._learn(device, there)
            if _hub_of(there) == self.me:  # claimed before and not served, or not known to be stored
                self._claimed.add(device)
                self._settle(device, there)
                return True
            if _hub_of(there) in self.living:
                return False
        holder = self._new_holder()
        old = () if there is None else (DropItem(self._registry, device, there),)
        won = False
        self._claimed.add(device)
        try:
            put = PutNewItem(self._registry, device, holder)
            won = (await self._ledger.write(*old, put)).of(put)
        finally:
            if not won:
                self._claimed.discard(device)
        if won:
            self._settle(device, holder)
        return won

    def end_claim(self, device: str) -> None:
        """Hold a claimed device only as long as it is here."""
        self._claimed.discard(device)

    async def unregister(self, device: str) -> bool:
        """Stop holding a device; return whether this hub was still its holder."""
        self._claimed.discard(device)
        holder = self._mine.pop(device, None)
        return holder is not None and await self._drop(device, holder)

    async def drop_absent(self, here: Collection[str]) -> None:
        """Drop the devices that this hub holds in the ledger and that are not here: a session may end before
        its registration is known to be stored."""
        for device, holder in list(self._holders.items()):
            coming = device in self._registering or device in self._claimed
            if _hub_of(holder) == self.me and device not in here and not coming:
                self._mine.pop(device, None)
                await self._drop(device, holder)

    async def leave(self) -> None:
        """Announce that this hub stops, so that the others need not wait for its heartbeat."""
        await self._ledger.write(DropItem(self._hubs, self.me))
        self._notifier.hint(self.held)

    def _new_holder(self) -> bytes:
        return f"{self.me}/{secrets.token_hex(4)}".encode()

    def _settle(self, device: str, holder: bytes) -> None:
        self._holders[device] = self._mine[device] = holder
        self._notifier.hint(self.held, device)

    async def _drop(self, device: str, holder: bytes) -> bool:
        gone = await self._ledger.apply(DropItem(self._registry, device, holder))
        if self._holders.get(device) == holder:
            del self._holders[device]
        if gone:
            self._notifier.hint(self.held, device)
        return gone


def _hub_of(holder: bytes) -> str:
    return holder.partition(b"/")[0].decode()
