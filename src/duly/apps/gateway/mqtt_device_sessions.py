"""The sessions of MQTT devices at this hub: which devices it serves, and when it claims, connects and ends
them.

The law: hubs that share a broker all receive everything, but each device has its session at one hub, the
first that claimed it. A hub that claims a device first stores what its former hub could not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from duly.apps.gateway.mqtt_device import DeviceLink, MqttDevice
from duly.apps.gateway.mqtt_frames import MqttPush
from duly.apps.gateway.mqtt_presence import MqttPresence
from duly.apps.gateway.mqtt_pushes import MqttPushes
from duly.apps.gateway.service import GatewayService
from duly.errors import LedgerError, Stopped
from duly.identity.accounts import Principal, Role
from duly.runtime.refusal_tally import RefusalTally
from duly.wire.task_ids import TaskIds


class MqttDeviceSessions:
    """The sessions of one hub's MQTT devices. Commands go out over `link`, and pushes are answered on it."""

    def __init__(
        self,
        gateway: GatewayService,
        presence: MqttPresence,
        ids: TaskIds,
        refusals: RefusalTally,
    ) -> None:
        self._gateway = gateway
        self._presence = presence
        self._ids = ids
        self._refusals = refusals
        self.link: DeviceLink | None = None
        self.pushes = MqttPushes(gateway.pushes, lambda: self.link)
        self._given: Counter[str] = Counter()
        self._devices: dict[str, MqttDevice] = {}
        self._claiming = asyncio.Lock()

    def get(self, name: str) -> MqttDevice | None:
        """Return the session of a device that this hub serves, or None."""
        device = self._devices.get(name)
        return device if device is not None and self._gateway.sessions.devices.get(name) is device else None

    async def is_at_another_hub(self, name: str) -> bool:
        """Return whether another hub serves a device; that hub receives its messages as well."""
        if self.get(name) is not None:
            return False
        search = self._gateway.remote.search(name)
        return search is not None and await search

    async def claim(self, name: str) -> None:
        """Serve a device, unless another hub does."""
        remote = self._gateway.remote
        async with self._claiming:  # earlier reports are stored before later ones
            if not await remote.claim(name):
                return
            try:
                for push in await remote.take_unstored(name):
                    await self.pushes.store(name, MqttPush(*push))
                session = self._presence.session_of(name)
                if self.get(name) is None and session is not None:
                    await self.connect(name, session)
            finally:
                remote.end_claim(name)

    async def claim_orphaned(self) -> None:
        """Claim the devices that no hub serves: their hub is gone, or could not store its claim."""
        with suppress(LedgerError, Stopped):
            here, remote = self._gateway.sessions.devices, self._gateway.remote
            for name in self._presence.online:
                if name not in here and not remote.is_at_another_hub(name):
                    await self.claim(name)

    async def connect(self, name: str, session: str) -> None:
        """Begin a session of a device, which replaces its earlier one."""
        assert self.link is not None
        clock = self._gateway.ledger.clock
        device = MqttDevice(name, self.link, session, self._ids, self._refusals, self._give, clock)
        self._devices[name] = device
        await self._gateway.connected(device, Principal(name, Role.DEVICE), heard=False)

    async def reconnect(self) -> None:
        """Send open commands to every device again, because the link was down and they may be lost."""
        for name, device in list(self._devices.items()):
            if self.get(name) is device:
                with suppress(LedgerError):  # then the outbox repeats it in its own time
                    await self.connect(name, device.session)

    def remove(self, name: str) -> MqttDevice | None:
        """Forget the session of a device, and return it if this hub served it."""
        device = self.get(name)
        self._devices.pop(name, None)
        return device

    def given(self) -> dict[str, int]:
        """Return how many tasks each device was given since the last call: it may answer that many."""
        given, self._given = self._given, Counter()
        return given

    def _give(self, name: str) -> None:
        self._given[name] += 1
