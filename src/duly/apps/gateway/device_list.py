"""The devices as apps see them: which are online, and when each was last heard.

A device is heard when it comes, goes, tells something or answers a command. What a hub heard itself it
remembers; what others heard, or a hub before a restart, is the time of the newest entry in the device's
stream.
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
    """The devices of one gateway, as the apps see them that may command them."""

    def __init__(self, ledger: Ledger, accounts: Accounts, online: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._online = online
        self._heard: dict[str, int] = {}

    def heard(self, device: str) -> None:
        """A device has said something here."""
        self._heard[device] = self._ledger.clock.now()

    def heard_here(self, device: str) -> int | None:
        """When a device was last heard at this hub since it started (ms); None if it was not."""
        at = self._heard.get(device)
        return None if at is None else at // MS

    def online_of(self, app: str, awaited: Callable[[str], bool]) -> list[str]:
        """The devices of an app that are online, or are `awaited`: the app hears of those that do not come
        back, and hears nothing of those that do."""
        granted = sorted(self._accounts.granted(app))
        return [device for device in granted if self._online(device) or awaited(device)]

    async def page(self, who: Principal, after: str, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """The devices that a principal may see, by name, and after which name the next page begins."""
        names = self._seen_by(who)
        start = bisect_right(names, after)
        page = names[start : start + limit]
        heard = await self.last_heard(page)
        devices = [
            {"name": name, "online": self._online(name), "last_heard": heard.get(name)} for name in page
        ]
        return devices, page[-1] if start + limit < len(names) else None

    async def last_heard(self, devices: Iterable[str]) -> dict[str, int]:
        """When each device was last heard (ms); without those never heard of."""
        names = list(devices)
        heard = await last_heard(self._ledger, names)
        for name in names:
            if name in self._heard:
                heard[name] = max(heard.get(name, 0), self._heard[name] // MS)
        return {name: at for name, at in heard.items() if at >= self._accounts.created_at(name) // MS}

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
