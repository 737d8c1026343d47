"""The devices as apps see them: which are online, and when each was last heard from.

A device is heard from when it connects, pushes or answers a command; that a hub reports it offline does not
count. A hub remembers what it has heard itself, and stores it when the device leaves. Where hubs share a
ledger, each stores it with its heartbeats, too, at most every `STORED_EVERY` for each device: so no answer
costs a write, and the other hubs are only a little behind. After a crash, the newest entry in the device's
stream that it sent itself is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from typing import Final

from duly.apps.gateway.pushes import last_heard
from duly.core.operations import PutItem
from duly.core.units import MS, SECOND
from duly.errors import NotAllowed
from duly.identity.accounts import Accounts, Principal, Role
from duly.storage.ledger import Ledger

HEARD: Final = "heard"
"""The bucket of when the hub that holds a device last heard from it (µs), by device, for other hubs and for
the time after a restart."""
STORED_EVERY: Final = 10 * SECOND
"""How often that is stored for one device at most."""
STORED_AT_ONCE: Final = 100
"""For how many devices it is stored with one heartbeat, so that no flush becomes long."""


class DeviceList:
    """The devices of one gateway as shown to the apps that may control them."""

    def __init__(self, ledger: Ledger, accounts: Accounts, online: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._online = online
        self._heard: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        """what of that this hub has stored for the others"""

    def heard(self, device: str) -> None:
        """Note that a device was heard from here."""
        self._heard[device] = self._ledger.clock.now()

    def left(self, device: str) -> tuple[PutItem, ...]:
        """Return the write that keeps when a device that has left was last heard from."""
        at = self._heard.get(device)
        return () if at is None else (PutItem(HEARD, device, b"%d" % at),)

    def news(self, here: Collection[str]) -> tuple[PutItem, ...]:
        """Return the writes that tell the other hubs when the devices `here` were heard from."""
        for name in [name for name in self._stored if name not in here]:
            del self._stored[name]
        until = self._ledger.clock.now() - STORED_EVERY
        known = ((self._stored.get(name, 0), name) for name in here)
        due = sorted(one for one in known if one[0] < min(until, self._heard.get(one[1], 0)))
        return tuple(PutItem(HEARD, name, b"%d" % self._heard[name]) for _, name in due[:STORED_AT_ONCE])

    def told(self, news: Iterable[PutItem]) -> None:
        """Note that news were stored."""
        for one in news:
            self._stored[one.name] = int(one.body)

    def online_of(self, app: str, awaited: Callable[[str], bool]) -> list[str]:
        """Return the devices of an app that are online or `awaited`. An app hears about an awaited device
        only if it does not come back."""
        granted = sorted(self._accounts.granted(app))
        return [device for device in granted if self._online(device) or awaited(device)]

    async def page(
        self, who: Principal, after: str, limit: int
    ) -> tuple[list[dict[str, object]], str | None]:
        """Return the devices that a principal may see, by name, and the name after which the next page
        begins."""
        names = self._seen_by(who)
        start = bisect_right(names, after)
        page = names[start : start + limit]
        heard = await self.last_heard(page)
        devices: list[dict[str, object]] = [
            {"name": name, "online": self._online(name), "last_heard": heard.get(name)} for name in page
        ]
        return devices, page[-1] if start + limit < len(names) else None

    async def last_heard(self, devices: Iterable[str]) -> dict[str, int]:
        """Return when each device was last heard from (ms), without those that never were."""
        names = list(devices)
        heard = await last_heard(self._ledger, names)
        told = await self._ledger.items([(HEARD, name) for name in names])
        for name, at_others in zip(names, told, strict=True):
            heard[name] = max(heard.get(name, 0), int(at_others or 0), self._heard.get(name, 0))
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
