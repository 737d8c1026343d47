"""Presence stores which devices apps have been told are online, for a hub that does not share its ledger.

The law: apps are told of every change once, in the commit that stores it. So after a crash the ledger still
knows which devices were online; after the next start each of them has `GRACE` seconds to reconnect, and is
reported offline if it does not.

(Where hubs share a ledger, `cluster.registry` knows which hub holds each device, including those of a dead
hub.)
"""

from __future__ import annotations

from typing import Final

from duly.apps.gateway.pushes import OFFLINE, PushService
from duly.core.operations import AppendEntry, CheckItem, DropItem, Group, PutItem, PutNewItem
from duly.core.retry import RetryPolicy
from duly.core.units import SECOND
from duly.errors import LedgerError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger
from duly.wire.frames import DEVICE_STATUS, dump

PRESENT: Final = "present"
"""The bucket of the devices that apps have been told are online."""
GRACE: Final = 30.0
"""Seconds that a device has to reconnect after its hub has started."""
RETRY_SECONDS: Final = 5.0
"""Seconds until a failed ledger is tried again."""
RETRY: Final = RetryPolicy.fixed(round(RETRY_SECONDS * SECOND), tries=None)
ONLINE: Final = dump({"online": True})


class DevicePresence:
    """The presence of one hub's devices, stored with each change that apps are told of."""

    def __init__(self, ledger: Ledger, pushes: PushService) -> None:
        self._ledger = ledger
        self._pushes = pushes
        self._missing: set[str] = set()
        """devices that are gone although apps have not been told: they were online when the hub died, or the
        ledger failed when they disconnected"""
        self._given_up: set[str] = set()
        """devices that were online when the hub died and did not reconnect in time"""
        self.tasks = Supervisor()
        self._reporting = False

    async def start(self) -> None:
        """Read which devices were online when the hub last stopped."""
        self._missing = set(await self._ledger.bucket(PRESENT))
        if self._missing:
            self._report_after(GRACE)

    async def stop(self) -> None:
        """Stop waiting for devices to reconnect."""
        await self.tasks.stop()

    def is_awaited(self, device: str) -> bool:
        """Return whether a device is not connected although apps have been told that it is online."""
        return device in self._missing

    def has_given_up(self, device: str) -> bool:
        """Return whether a device did not reconnect after the hub's start, and apps were told so."""
        return device in self._given_up

    async def came_online(self, device: str) -> None:
        """Tell apps that a device is online, unless they know."""
        self._missing.discard(device)
        self._given_up.discard(device)
        entry = self._pushes.entry(device, DEVICE_STATUS, ONLINE)
        await self._note(device, PutNewItem(PRESENT, device, b"", then=(entry,)), entry)

    async def went_offline(self, device: str, *heard: PutItem) -> None:
        """Tell apps that a device is gone, unless they know; if the ledger cannot store that now, tell them
        later. When it was last `heard` is stored with that."""
        try:
            await self._tell_gone(device, *heard)
        except LedgerError:
            self._missing.add(device)
            self._report_after(RETRY_SECONDS)

    async def _tell_gone(self, device: str, *heard: PutItem) -> None:
        entry = self._pushes.entry(device, DEVICE_STATUS, OFFLINE)
        then: Group = (DropItem(PRESENT, device), entry, *heard)
        await self._note(device, CheckItem(PRESENT, device, then=then), entry)

    async def _note(self, device: str, change: PutNewItem | CheckItem, entry: AppendEntry) -> None:
        n = (await self._ledger.write(change)).find(entry)
        if n is not None:
            await self._pushes.tell(device, n, entry.body)

    def _report_after(self, seconds: float) -> None:
        if not self._reporting:
            self._reporting = True
            self.tasks.after("report of devices that are gone", seconds, self._report_missing)

    async def _report_missing(self) -> None:
        """Report the devices that are gone and have not reconnected."""
        backoff = Backoff(RETRY)
        while self._missing:
            device = next(iter(self._missing))
            try:
                await self._tell_gone(device)
            except LedgerError:
                await backoff.wait()
            else:
                self._missing.discard(device)
                self._given_up.add(device)
        self._reporting = False
