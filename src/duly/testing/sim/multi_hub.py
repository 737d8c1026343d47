"""Worlds of several hubs: gateway worlds with two or three hubs on one disk, and a notifier that loses hints.

Clients move from hub to hub as their connections break; each hub dies around its own commits. Hubs also
hang, and go on when the others have taken them for dead; they notice late that a client has left; and a
device may leave for good. Seen from outside it is one hub: the same checkers judge it, and every write
counts as that hub's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from duly.clients.device import Command
from duly.cluster.notifier import Notifier
from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.cluster.remote import POLL_SECONDS
from duly.core import operations as w
from duly.core.messages import Message, Verdict
from duly.core.outbox import SILENT
from duly.storage.memory import Disk
from duly.testing.sim.checkers import CHECKERS, Finding
from duly.testing.sim.gateway import GatewayDevice, GatewayHub, GatewayWorld
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.push_checkers import kept
from duly.testing.sim.world import BUSY, World, WorldLog
from duly.wire.session import Session

HUBS: Final = ("hub", "hub2", "hub3")
NOTICED: Final = 8.0
"""The most seconds until a hub notices that a client has left."""
HANGS: Final = 20.0
"""The longest hang, in seconds."""
SLOW: Final = 0.1
"""The share of handlers that take long."""
SURE: Final = 0.25
"""Seconds after which every hub has to know where a device is connected."""
RECOVERY: Final = 3.0
"""Seconds after a hang for which a hub is not judged."""


class LossyNotifier(LocalNotifier):
    """A notifier that loses hints as often as the network loses packets, and is as slow."""

    def __init__(self, node: MultiHub, bus: LocalBus) -> None:
        super().__init__(node.ledger.worker, bus)
        self._node = node

    async def _send(self, note: bytes) -> None:
        world, loop = self._node.world, asyncio.get_running_loop()
        for notifier in self._bus.notifiers:
            if not (world.faulty and world.rng.random() < world.plan.drop):
                loop.call_later(world.rng.random() * min(world.network.slow, 0.5), notifier.receive, note)

    def receive(self, note: bytes | str) -> None:
        if self._node.alive and self._node.ledger.worker == self._me:
            super().receive(note)


class DeviceStay(Struct):
    """A time in which a device was connected to a hub."""

    device: str
    hub: MultiHub
    since: float
    until: float = float("inf")


class MultiHubLog(WorldLog):
    """The log of a world with several hubs."""

    def __init__(self) -> None:
        super().__init__()
        self.stays: dict[Session, DeviceStay] = {}
        self.offline: list[tuple[float, MultiHub, Message]] = []
        """messages that were refused since their device seemed to be offline"""
        self.holders: dict[w.DeliveryRef, str] = {}
        """the hub that began the newest attempt of each delivery"""
        self.usurped: list[bytes] = []
        """messages that were given up by a hub that had not made the newest attempt"""
        self.unregistered: list[tuple[float, str]] = []
        """devices whose hub was removed from the registry"""

    def replied(self, node: SimProcess, message: Message, verdict: Verdict) -> None:
        super().replied(node, message, verdict)
        if verdict.cause == "offline" and isinstance(node, MultiHub):
            self.offline.append((asyncio.get_running_loop().time(), node, message))


class MultiHub(GatewayHub):
    """One of several hubs on one disk."""

    world: MultiHubWorld

    def __init__(self, world: MultiHubWorld, name: str, skew: int) -> None:
        super().__init__(world, name, skew)
        self._hung: list[tuple[float, float]] = []

    async def begin(self) -> None:
        self.ledger.sole = False
        await super().begin()
        self.spawn(self._poll())

    def notifier(self) -> Notifier:
        notifier = LossyNotifier(self, self.world.bus)
        self.world.bus.notifiers.append(notifier)
        return notifier

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.gateway.remote.refresh()

    async def welcome(self, session: Session, name: str, cursors: dict[str, int] | None) -> None:
        stays = self.world.hubs_log.stays
        if name.startswith("dev"):
            stays[session] = stay = DeviceStay(name, self, float("inf"))
        await super().welcome(session, name, cursors)
        if name.startswith("dev"):
            stay.since = asyncio.get_running_loop().time()

    def lost(self, session: Session, name: str) -> None:
        loop, world = asyncio.get_running_loop(), self.world
        if session in world.hubs_log.stays:
            world.hubs_log.stays[session].until = loop.time()
        late = world.faulty and world.rng.random() < world.plan.drop
        loop.call_later(world.rng.random() ** 2 * NOTICED if late else 0, super().lost, session, name)

    def hang(self, seconds: float) -> None:
        """Store nothing for a while, as if the machine stood still, and then go on. Some of the clients
        notice that and leave."""
        if not self.ready:
            return
        loop, world = asyncio.get_running_loop(), self.world
        world.faults += 1
        world.log.note(self.name, f"hangs for {seconds:.1f} s")
        self.ledger.hangs_until = loop.time() + seconds
        self._hung.append((loop.time(), self.ledger.hangs_until))
        for wire in self.wires:
            if not wire.broken and world.rng.random() < 0.5:
                loop.call_later(world.rng.random() * seconds, wire.break_)

    def well(self, since: float, until: float) -> bool:
        """Whether the hub did not hang in this time, nor shortly before."""
        return not any(begun < until and since < ended + RECOVERY for begun, ended in self._hung)


class RoamingDevice(GatewayDevice):
    """A device whose handlers are sometimes so slow that it changes hubs meanwhile."""

    async def _handle(self, command: Command) -> object:
        world = self.world
        if world.faulty and world.plan.failing and world.rng.random() < SLOW:
            # Long enough for the device to change hubs, and for a hub to give the command up.
            await asyncio.sleep(15 + world.rng.random() * 25)
        return await super()._handle(command)


class MultiHubWorld(GatewayWorld):
    """A world with several hubs on one disk."""

    hub: type[SimProcess] = MultiHub
    receiver: type[SimProcess] = RoamingDevice

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.bus = LocalBus()
        self.log = self.hubs_log = MultiHubLog()

    def _hubs(self) -> list[SimProcess]:
        hubs: list[SimProcess] = [self.hub(self, name, 0) for name in HUBS[: self.rng.choice([2, 3])]]
        for hub in hubs:
            hub.disk = hubs[0].disk
        return hubs

    def hub_for(self, client: str, tries: int) -> GatewayHub:
        hubs = [node for node in self.nodes.values() if isinstance(node, MultiHub)]
        return hubs[(int(client[3:]) + client.startswith("dev") + tries) % len(hubs)]

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        log = self.hubs_log
        match write, result:
            case ((w.Deliver(ref=ref, worker=worker) | w.Take(ref=ref, worker=worker)), True):
                log.holders[ref] = worker
            case w.Finish(ref=ref, error=SILENT.reason), True if log.holders[ref] != node.ledger.worker:
                log.usurped.append(ref.key)
            case w.DropItem(bucket="registry", name=device), True:
                log.unregistered.append((self.loop.time(), device))
        super().committed(self.nodes["hub"] if isinstance(node, MultiHub) else node, disk, write, result)

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        super()._schedule_faults(senders, receivers, hubs)
        rng, later = self.rng, self.loop.call_later
        for _ in range(self.plan.cuts):
            hub = rng.choice(hubs)
            assert isinstance(hub, MultiHub)
            later(rng.random() * BUSY, hub.hang, 2 + rng.random() * (HANGS - 2))
        if self.plan.crash and rng.random() < 0.3:
            later(rng.random() * BUSY, self._leave_for_good, rng.choice(receivers))

    def _leave_for_good(self, device: SimProcess) -> None:
        self.log.note(device.name, "leaves for good")
        self.gone.add(device.name)
        device.crash()


def reachable(world: World) -> Iterator[Finding]:
    """[P5] No command is refused as offline while its device is connected to a hub that is well."""
    assert isinstance(world, MultiHubWorld)
    for at, by, message in world.hubs_log.offline:
        for stay in world.hubs_log.stays.values():
            here = stay.device == message.recipient and stay.since + SURE < at < stay.until
            if here and stay.hub.well(stay.since, at) and by.well(at - RECOVERY, at):
                yield f"was refused since {stay.device} is offline, which it was not", message.key


def registered(world: World) -> Iterator[Finding]:
    """A device that is connected to a hub that is well stays registered there."""
    assert isinstance(world, MultiHubWorld)
    for at, device in world.hubs_log.unregistered:
        for stay in world.hubs_log.stays.values():
            here = stay.device == device and stay.since + SURE < at < stay.until
            if here and stay.hub.well(stay.since, at):
                yield f"{device} was removed from the registry while it was connected", b""


def by_whom_it_was(world: World) -> Iterator[Finding]:
    """[P5] Only the hub that made the newest attempt may give it up as unanswered."""
    assert isinstance(world, MultiHubWorld)
    for key in world.hubs_log.usurped:
        yield "was given up by a hub that no longer had it", key


MULTI_HUB_CHECKERS: Final[tuple[Callable[[World], Iterator[Finding]], ...]] = (
    *CHECKERS, kept, reachable, registered, by_whom_it_was,
)  # fmt: skip
