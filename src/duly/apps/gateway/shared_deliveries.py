"""Deliveries on a ledger that several hubs share: which of them this hub continues.

The laws. A command for a device at another hub is stored, and that hub gets a hint; commands that another hub
has stored for a device here are found in the ledger. The deliveries of a dead hub are taken over: attempts
are fenced, and devices recognise commands that they have carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from duly.apps.gateway.local_gateway import LocalGateway
from duly.apps.gateway.shared_traces import SharedTraces
from duly.cluster.notifier import Notifier
from duly.cluster.registry import HubRegistry
from duly.cluster.remote import CoalescedTask
from duly.core.messages import Message
from duly.core.operations import OpenDelivery
from duly.core.steps import DeliveriesFound
from duly.core.units import SECOND
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger

TO: Final = "to"
"""The hint that a command was stored for this device."""
SLACK: Final = 2 * SECOND
"""How long after its expiry a waiting command is left to the hub that has it."""


class SharedDeliveries:
    """The deliveries of one channel as seen by one of its hubs."""

    def __init__(
        self,
        ledger: Ledger,
        notifier: Notifier,
        channel: str,
        registry: HubRegistry,
        local: LocalGateway,
        tasks: Supervisor,
    ) -> None:
        self._ledger = ledger
        self._notifier = notifier
        self._channel = channel
        self._registry = registry
        self._local = local
        self._traces = SharedTraces(notifier, local)
        self._fetching: Counter[str] = Counter()
        """devices that have just connected and whose commands are being read"""
        self._hinted: CoalescedTask[str] = CoalescedTask(self._fetch, tasks)
        notifier.listen(TO, self._heard)

    async def ours(self) -> list[OpenDelivery]:
        """Return the deliveries to devices here, and those that this hub holds."""
        others = self._registry.living - {self._registry.me}
        return await self._strays(list(self._local.sessions.devices), "-", others)

    async def fetch_for(self, device: str) -> None:
        """Find everything that is under way to a device here, and the positions of its lanes."""
        self._fetching[device] += 1
        try:
            marks = await self._ledger.marks(f"[{msgspec.json.encode(device).decode()},")
            found = await self._strays([device], self._registry.me, self._registry.living)
            await self._traces.resume_kept(found)
            await self._hand_over(found, marks)
        finally:
            self._fetching[device] -= 1
            if not self._fetching[device]:
                del self._fetching[device]

    async def take_over(self, devices: Collection[str]) -> None:
        """Find the deliveries that other hubs have left: for these devices, or because those hubs are dead.

        Two kinds are left alone, since their devices would get a command more often than needed. A delivery
        that a live hub has under way is not taken from it if the device has moved there since the registry
        was read. A delivery to a device that has just connected is already being fetched, and is sent when
        the device is reachable.
        """
        living = self._registry.living
        found = await self._strays(devices, self._registry.me, living)
        held = dict.fromkeys(item.message.recipient for item in found if item.delivery.worker in living)
        moved = {device for device in held if not await self.check_holder(device)}
        ready = [
            item for item in found
            if item.message.recipient not in moved
            and not (item.delivery.attempt and item.message.recipient in self._fetching)
        ]  # fmt: skip
        if ready:
            await self._traces.resume_kept(ready)
            await self._hand_over(ready)

    async def check_holder(self, device: str) -> bool:
        """Ask the ledger whether a device is still here, and close its session if it has moved."""
        if device in self._local.sessions.devices and await self._registry.confirm(device):
            return True
        await self._local.replaced(device)
        return False

    def hint(self, message: Message) -> None:
        """Hint to the hub of a device that a command was stored for it, unless the device is here."""
        if message.recipient not in self._local.sessions.devices:
            if self._local.traces.open:
                self._traces.hint(message)
            self._notifier.hint(TO, message.recipient)

    async def _fetch(self, devices: Collection[str]) -> None:
        """Find what was just stored for these devices, and nothing else, since this happens all the time."""
        found = await self._ledger.booked(self._channel, devices)
        if found:
            self._traces.resume(found)
            await self._hand_over(found)

    async def _hand_over(
        self, found: Sequence[OpenDelivery], marks: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """Give deliveries to the engine once their senders are known here: permission is checked again before
        a command is sent, and another hub may have just created the account or the grant."""
        await self._local.learn_senders([item.message for item in found])
        self._local.trail.resume(found)
        await self._local.engine.put(DeliveriesFound(tuple(found), marks or {}))

    async def _strays(self, devices: Collection[str], me: str, living: Collection[str]) -> list[OpenDelivery]:
        """Find deliveries to these devices, and those that dead hubs have left. An unknown hub may have just
        started, so it keeps what it has."""
        over = self._ledger.clock.now() - SLACK
        found = await self._ledger.strays(self._channel, here=devices, worker=me, living=living, now=over)
        strangers = {item.delivery.worker for item in found} - {*living, self._registry.me, ""}
        if not strangers:
            return found
        await self._registry.meet(strangers)
        met = strangers & self._registry.living
        return [
            item for item in found
            if item.message.recipient in devices or item.delivery.worker not in met
        ]  # fmt: skip

    def _heard(self, device: str) -> None:
        if device in self._local.sessions.devices:
            self._hinted.want(device)
