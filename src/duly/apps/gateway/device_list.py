"""The devices as apps see them: which are online, and when each was last heard from.

A device is heard from when it connects, disconnects, pushes or answers a command. A hub remembers what it has
heard itself; for other hubs, and for the time before a restart, the time of the newest entry in the device's
stream is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

from duly.apps.gateway.pushes import last_heard
from duly.core.units import MS
from duly.errors import NotAllowed
from duly.identity.accounts import Accounts, Principal, Role
from duly.storage.ledger import Ledger


class DeviceList:
    """The devices of one gateway as shown to the apps that may control them."""

    def __init__(self, ledger: Ledger, accounts: Accounts, online: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._online = online
        self._heard: dict[str, int] = {}

    def heard(self, device: str) -> None:
        """Note that a device was heard from here."""
        self._heard[device] = self._ledger.clock.now()

    def heard_here(self, device: str) -> int | None:
        """Return when a device was last heard from at this hub since its start (ms), or None."""
        at = self._heard.get(device)
        return None if at is None else at // MS

    def online_of(self, app: str, awaited: Callable[[str], bool]) -> list[str]:
        """Return the devices of an app that are online or `awaited`. An app hears about an awaited device
        only if it does not come back."""
        granted = sorted(self._accounts.granted(app))
        return [device for device in granted if self._online(device) or awaited(device)]

    async def page(self, who: Principal, after: str, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """Return the devices that a principal may see, by name, and the name after which the next page
        begins."""
        names = self._seen_by(who)
        start = bisect_right(names, after)
        page = names[start : start + limit]
        heard = await self.last_heard(page)
        devices = [
            {"name": name, "online": self._online(name), "last_heard": heard.get(name)} for name in page
        ]
        return devices, page[-1] if start + limit < len(names) else None

    async def last_heard(self, devices: Iterable[str]) -> dict[str, int]:
        """Return when each device was last heard from (ms), without those that never were."""
        names = list(devices)
        heard = await last_heard(self._ledger, names)
        for name in names:
            if name in self._heard:
                heard[name] = max(heard.get(name, 0), self._heard[name])
        # In microseconds: a predecessor may have left in the millisecond in which its successor was added.
        return {name: at // MS for name, at in heard.items() if at > self._accounts.created_at(name)}

    def _seen_by(self, who: Principal) -> list[str]:
        match who.role:
            case Role.ADMIN:
                return [one.name for one in self._accounts.list() if one.role is Role.DEVICE]
            case Role.APP:
                return sorted(self._accounts.granted(who.name))
            case Role.DEVICE:
                return [who.name]
            case _:
                raise NotAllowed(f"{who.role.with_article} has no devices; ask as an app")
