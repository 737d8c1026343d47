"""Devices and nodes on the dashboard: their presence, their state, and the commands that wait for them.

Presence and the time a device was last heard from come from the gateway. Version, battery and signal are what
a device or node reported itself: over MQTT in its status, over WebSocket in a push (`status_report` or any
other with such fields). Nodes talk to each other over the broker; the hub knows only what they report there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from duly.apps.gateway.pushes import stream_of
from duly.core.units import MS
from duly.errors import Malformed, NotFound
from duly.identity.accounts import Account, Role
from duly.server.dashboard.commands import PageCommands
from duly.server.dashboard.requests import text_of
from duly.server.dashboard.visitors import DashboardVisitor
from duly.storage.records import StreamEntry
from duly.transports.http.query_options import number
from duly.wire import any_json
from duly.wire.frames import COMMANDS

if TYPE_CHECKING:
    from duly.server.hub import Hub

PAGE_LIMIT: Final = 100
PUSHES_READ: Final = 5
"""The newest pushes of a device that are searched for its version, battery and signal."""
PUSHES_SHOWN: Final = 20
COUNT_SECONDS: Final = 1.0
"""How long the count of what waits is used again."""
STALE_BEATS: Final = 3
"""Heartbeats after which a report is called stale."""
DATA_LIMIT: Final = 100_000

_NAMES: Final = {
    "version": ("version", "firmware", "fw", "app_version"),
    "battery": ("battery", "battery_level", "bat"),
    "signal": ("signal", "rssi", "wifi_rssi"),
}


class DeviceViews:
    """The devices and nodes of one hub, as the dashboard shows them."""

    def __init__(self, hub: Hub, commands: PageCommands) -> None:
        self._hub = hub
        self._commands = commands
        self._counted: tuple[float, Counter[str]] = (0.0, Counter())

    async def page(self, _: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return a page of devices and nodes, by name, and the counts of all of them."""
        limit, after = number(query.get("limit"), 50, PAGE_LIMIT), text_of(query, "after")
        part, only = text_of(query, "name").lower(), text_of(query, "only")
        if only not in ("", "online", "offline", "device", "node"):
            raise Malformed("only must be online, offline, device or node")
        everything = [one for one in self._hub.accounts.list() if one.role in (Role.DEVICE, Role.NODE)]
        found = [one for one in everything if self._fits(one, part, only)]
        names = [one.name for one in found]
        start = bisect_right(names, after) if after else 0
        chosen = found[start : start + limit]
        more = start + limit < len(found)
        return {
            "devices": await self._shown(chosen),
            "next": chosen[-1].name if more else None,
            "found": len(found),
            "total": len(everything),
            "online": sum(self.online(one) for one in everything),
            "types": sorted(COMMANDS),
        }

    def _fits(self, one: Account, part: str, only: str) -> bool:
        if part and part not in one.name.lower():
            return False
        match only:
            case "online" | "offline":
                return self.online(one) is (only == "online")
            case "device" | "node":
                return one.role.value == only
            case _:
                return True

    def online(self, one: Account) -> bool:
        """Return whether a device is online, or a node reports to be."""
        if one.role is Role.DEVICE:
            return self._hub.gateway.online(one.name)
        return bool(self._reported(one.name).get("online"))

    def _reported(self, name: str) -> dict[str, object]:
        mqtt = self._hub.mqtt
        return {} if mqtt is None else mqtt.devices.reported.of(name)

    async def _shown(self, accounts: list[Account]) -> list[dict[str, object]]:
        """Show accounts: three queries, however many they are."""
        devices = [one.name for one in accounts if one.role is Role.DEVICE]
        newest = await self._hub.ledger.newest_entries([stream_of(name) for name in devices], PUSHES_READ)
        heard = await self._hub.gateway.devices.last_heard(devices)
        waiting = self._waiting()
        return [
            self._show(one, newest.get(stream_of(one.name), ()), heard.get(one.name), waiting[one.name])
            for one in accounts
        ]

    def _show(
        self, one: Account, newest: Iterable[StreamEntry], heard: int | None, queue: int
    ) -> dict[str, object]:
        reported = self._reported(one.name)
        if one.role is Role.DEVICE:
            pushed = self._pushed(one.name, newest)
            reported = pushed | {k: v for k, v in reported.items() if v not in (None, "")}
        times = (reported.get("at"), heard)
        heard = max((at for at in times if isinstance(at, int)), default=None)
        return {
            "name": one.name,
            "role": one.role.value,
            "online": self.online(one),
            "stale": self.online(one) and self._is_stale(reported, heard),
            "last_heard": heard,
            "version": reported.get("version") or "",
            "battery": reported.get("battery"),
            "signal": reported.get("signal"),
            "queue": queue,
            "apps": sorted(self._hub.accounts.apps_of(one.name))[:20],
        }

    def _is_stale(self, reported: Mapping[str, object], heard: int | None) -> bool:
        """Return whether something that reports to be online has not been heard from for too long."""
        beat = reported.get("heartbeat")
        if not isinstance(beat, int) or not beat or heard is None:
            return False
        return self._hub.ledger.clock.now() // MS - heard > STALE_BEATS * beat

    def _pushed(self, device: str, newest: Iterable[StreamEntry]) -> dict[str, object]:
        """Return version, battery and signal as the newest pushes of a device name them."""
        found: dict[str, object] = {}
        born = self._hub.accounts.created_at(device)
        for entry in newest:
            if entry.at < born:
                continue  # an earlier device of this name
            try:
                data = any_json.read_object(entry.body).get("data")
            except msgspec.DecodeError:
                continue
            if isinstance(data, dict):
                found |= {
                    field: data[name]
                    for field, names in _NAMES.items()
                    for name in names
                    if isinstance(data.get(name), str | int | float)
                }
        return found

    def _waiting(self) -> Counter[str]:
        """Return how many commands wait for each device, at this hub and for devices that no hub holds."""
        counted_at, counts = self._counted
        if monotonic() - counted_at > COUNT_SECONDS:
            gateway = self._hub.gateway
            counts = Counter(message.recipient for message in gateway.waiting())
            counts.update(gateway.unheld.by_device)
            self._counted = (monotonic(), counts)
        return counts

    # ── one of them ──────────────────────────────────────────────────────────────────────────────

    async def one(self, _: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return one device or node, with its newest pushes."""
        name = text_of(query, "name")
        if not name:
            raise Malformed("say which device: /device.json?name=NAME")
        account = next((one for one in self._hub.accounts.list() if one.name == name), None)
        if account is None or account.role not in (Role.DEVICE, Role.NODE):
            raise NotFound(f"there is no device or node {name!r}; 'duly add device {name}' makes one")
        (shown,) = await self._shown([account])
        return shown | {"pushes": await self._pushes(name), "types": sorted(COMMANDS)}

    async def _pushes(self, device: str) -> list[dict[str, object]]:
        stream, born = stream_of(device), self._hub.accounts.created_at(device)
        entries = (await self._hub.ledger.newest_entries([stream], PUSHES_SHOWN)).get(stream, [])
        shown: list[dict[str, object]] = []
        for entry in entries[::-1]:
            try:
                frame = msgspec.json.decode(entry.body, type=dict[str, Raw])
            except msgspec.DecodeError:
                continue
            if entry.at >= born:
                type_, data = (frame.get(name, Raw(b"null")) for name in ("type", "data"))
                text = msgspec.json.format(bytes(data), indent=-1).decode()
                shown.append({"n": entry.n, "at": entry.at // MS, "type": type_, "data": text[:1000]})
        return shown

    async def send(self, visitor: DashboardVisitor, wanted: dict[str, str]) -> dict[str, object]:
        """Send a command to a device."""
        text = text_of(wanted, "data", DATA_LIMIT).strip() or "{}"
        try:
            any_json.read(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as problem:
            raise Malformed(f"the data is not JSON: {problem}") from None
        return await self._commands.send(
            visitor, text_of(wanted, "id"), text_of(wanted, "device"), text_of(wanted, "type"),
            Raw(text.encode()), queue=wanted.get("queue") == "yes",
        )  # fmt: skip
