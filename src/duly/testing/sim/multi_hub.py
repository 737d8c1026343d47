"""Worlds of several hubs: gateway worlds with two or three hubs on one disk, and a notifier that loses hints.

Clients move from hub to hub as their connections break; each hub dies around its own commits. Hubs also
hang, and go on when the others have taken them for dead; they notice late that a client has left; and a
device may leave for good. Some commands are also asked about by a request that waits for the outcome at
any hub, as `POST /v1/messages?wait=` does; and a guest loses its grant at one hub. Seen from outside it is
one hub: the same checkers judge it, and every write counts as that hub's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Final

from msgspec import Struct

from duly.clients.device import Command
from duly.cluster.notifier import Notifier
from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.cluster.registry import LAPSE, REGISTRY
from duly.cluster.remote import POLL_SECONDS
from duly.core import operations as w
from duly.core.messages import Message, Verdict, key_of
from duly.core.outbox import SILENT
from duly.errors import DulyError
from duly.storage.memory import Disk
from duly.testing.sim.checkers import CHECKERS, Checker, Finding
from duly.testing.sim.gateway import GatewayDevice, GatewayHub, GatewayWorld, OpenAccounts
from duly.testing.sim.guests import GuestAccounts, GuestVisit, admit_guest, revoked_is_refused
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.push_checkers import pushes_kept
from duly.testing.sim.world import BUSY, WorldLog
from duly.transports.http.frame_batches import FrameBatch, WaitingRequest
from duly.wire import frames
from duly.wire.frames import ServerCode
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
KNOWN: Final = 4.0
"""Seconds after which every hub has read where a device is, though all hints were lost."""
ASKED: Final = 0.15
"""The share of commands whose outcome a request also waits for."""


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
        """Pass a notification on only while its hub lives."""
        if self._node.alive and self._node.ledger.worker == self._me:
            super().receive(note)


class DeviceStay(Struct):
    """A period in which a device was connected to a hub."""

    device: str
    hub: MultiHub
    incarnation: int
    since: float
    until: float = float("inf")

    def lasts(self) -> bool:
        """Return whether the period goes on: the device has not left, and its hub has not died."""
        hub, there = self.hub, self.hub.incarnation == self.incarnation
        return there and hub.ready and self.since < self.until == float("inf")


class OutcomeRequest(Struct, frozen=True):
    """A request at one hub that repeats a command and waits for its outcome."""

    key: bytes
    hub: MultiHub
    incarnation: int
    session: WaitingRequest


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
        """when the hub of a device was removed from the registry"""
        self.registrations: list[tuple[float, str, str]] = []
        """when a device was registered, and at which hub"""
        self.misjudged: list[str] = []
        """what hubs that were well did not know of devices seconds after it had been stored"""
        self.seized: list[bytes] = []
        """messages that a hub without their device took from a living one"""
        self.requests: list[OutcomeRequest] = []

    def replied(self, node: SimProcess, message: Message, verdict: Verdict) -> None:
        """Note a refusal as "offline" with its time, to compare it with where the device was."""
        super().replied(node, message, verdict)
        if verdict.cause == "offline" and isinstance(node, MultiHub):
            self.offline.append((asyncio.get_running_loop().time(), node, message))


class MultiHub(GatewayHub):
    """One of several hubs on one disk."""

    world: MultiHubWorld

    def __init__(self, world: MultiHubWorld, name: str, skew: int) -> None:
        super().__init__(world, name, skew)
        self._hung: list[tuple[float, float]] = []
        self._began = 0.0

    async def begin(self) -> None:
        """Start a hub that shares its ledger, and polls it."""
        self.ledger.sole = False
        await super().begin()
        self._began = asyncio.get_running_loop().time()
        self.spawn(self._poll())

    async def open_accounts(self, devices: list[str], apps: list[str]) -> OpenAccounts:
        """Return accounts with one guest, whose grant other hubs may revoke."""
        admit_guest(self.disk)
        self.guests = GuestAccounts(devices, apps, self.ledger)
        await self.guests.shared.refresh()
        return self.guests

    def notifier(self) -> Notifier:
        """Return a notifier that loses some notifications."""
        notifier = LossyNotifier(self, self.world.bus)
        self.world.bus.notifiers.append(notifier)
        return notifier

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.gateway.remote.refresh()
            before = self.guests.shared.version
            with suppress(DulyError):
                await self.guests.shared.catch_up()
                if self.guests.shared.version != before:
                    await self.gateway.review()

    async def welcome(self, session: Session, name: str, cursors: dict[str, int] | None) -> None:
        """Greet a client, and note since when a device is at this hub."""
        stays = self.world.hubs_log.stays
        if name.startswith("dev"):
            stays[session] = stay = DeviceStay(name, self, self.incarnation, float("inf"))
        await super().welcome(session, name, cursors)
        if name.startswith("dev"):
            stay.since = asyncio.get_running_loop().time()
            stay.until = max(stay.since, stay.until)

    def lost(self, session: Session, name: str) -> None:
        """Note when a device's connection ended; now and then the hub notices it later."""
        loop, world = asyncio.get_running_loop(), self.world
        if session in world.hubs_log.stays:
            world.hubs_log.stays[session].until = loop.time()
        late = world.faulty and world.rng.random() < world.plan.drop
        loop.call_later(world.rng.random() ** 2 * NOTICED if late else 0, super().lost, session, name)

    def record(self, name: str, frame: bytes) -> None:
        """Record the frame; some commands are repeated at a random hub by a request that waits."""
        super().record(name, frame)
        self.world.ask(name, frame)

    def has(self, device: str) -> bool:
        """Return whether a device is connected here, as far as this hub can know: if it left while it was
        being greeted, the hub notices that afterwards."""
        now = asyncio.get_running_loop().time()
        return any(
            stay.device == device and stay.hub is self
            and (session in self.greeting or now < stay.until + NOTICED)
            for session, stay in self.world.hubs_log.stays.items()
        )  # fmt: skip

    def hang(self, seconds: float) -> None:
        """Hang: store nothing for a while, as if the machine stood still, and then go on. Some clients notice
        that and leave."""
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
        """Return whether the hub did not hang in this time, nor shortly before."""
        return not any(begun < until and since < ended + RECOVERY for begun, ended in self._hung)

    def served(self, since: float) -> bool:
        """Return whether the hub has served since then."""
        return self._began < since


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
        self.curious = Random(f"requests {plan.seed}")
        """draws which commands are asked about, where and when"""
        self._guest = GuestVisit(self)

    def _hubs(self) -> list[SimProcess]:
        hubs: list[SimProcess] = [self.hub(self, name, 0) for name in HUBS[: self.rng.choice([2, 3])]]
        for hub in hubs:
            hub.disk = hubs[0].disk
        return hubs

    def hubs(self) -> list[MultiHub]:
        """Return all hubs, also those that are dead."""
        return [node for node in self.nodes.values() if isinstance(node, MultiHub)]

    def hub_for(self, client: str, tries: int) -> GatewayHub:
        """Return the next hub in turn for each try."""
        hubs = self.hubs()
        return hubs[(int(client[3:]) + client.startswith("dev") + tries) % len(hubs)]

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        """Note which hub holds a delivery, and which hub a device is registered at."""
        log = self.hubs_log
        if isinstance(write, w.Take) and result is True and self._is_seizure(node, write):
            log.seized.append(write.ref.key)
        match write, result:
            case ((w.Deliver(ref=ref, worker=worker) | w.Take(ref=ref, worker=worker)), True):
                log.holders[ref] = worker
            case w.Finish(ref=ref, error=SILENT.reason), True if log.holders[ref] != node.ledger.worker:
                log.usurped.append(ref.key)
            case w.PutNewItem(bucket="registry", name=device), True:
                log.registrations.append((self.loop.time(), device, node.name))
                self.loop.call_later(KNOWN, self._compare_holders, device, self.loop.time())
            case w.DropItem(bucket="registry", name=device), True:
                log.unregistered.append((self.loop.time(), device))
                self.loop.call_later(KNOWN, self._compare_holders, device, self.loop.time())
            case w.DropItem(bucket="grants"), True:
                self._guest.revoked()
        super().committed(self.nodes["hub"] if isinstance(node, MultiHub) else node, disk, write, result)

    def _compare_holders(self, device: str, since: float) -> None:
        """Note what hubs that were well since do not know of a device, unless it changed again meanwhile."""
        log, now = self.hubs_log, self.loop.time()
        changes = [*((at, who) for at, who, _ in log.registrations), *log.unregistered]
        if any(at > since and who == device for at, who in changes):
            return
        well = [
            hub for hub in self.hubs() if hub.ready and hub.served(since) and hub.well(since - LAPSE, now)
        ]
        holder = well[0].disk.buckets.get(REGISTRY, {}).get(device, b"") if well else b""
        where = [hub for hub in well if holder.startswith(hub.ledger.worker.encode() + b"/")]
        if holder and not where:
            return  # its hub may be dead
        for hub in well:
            said = hub.gateway.remote.holds(device), hub.gateway.remote.is_at_another_hub(device)
            if said != (bool(where), bool(where) and hub not in where):
                log.misjudged.append(f"{hub.name} does not know where {device} is, {now - since:.0f} s later")

    def _is_seizure(self, node: SimProcess, take: w.Take) -> bool:
        """Return whether a hub begins an attempt that belongs to another, living hub, though it does not have
        the device."""
        now = self.loop.time()
        if not isinstance(node, MultiHub) or node.has(take.ref.recipient):
            return False
        holder = self.hubs_log.holders.get(take.ref)
        return holder != take.worker and any(
            hub.ready and hub.ledger.worker == holder and hub.well(now - LAPSE, now) for hub in self.hubs()
        )

    def ask(self, name: str, frame: bytes) -> None:
        """Repeat some commands a moment later in a request that waits for the outcome."""
        sent = frames.decode(frame)
        if sent.type in self.kinds and sent.seq_id is not None and self.curious.random() < ASKED:
            key = key_of(name, sent.seq_id)
            self.loop.call_later(self.curious.random() / 2, self._ask, name, key, frame)

    def _ask(self, name: str, key: bytes, frame: bytes) -> None:
        hub = self.curious.choice(self.hubs())
        if hub.ready:
            (session,) = FrameBatch(1).waiters
            self.hubs_log.requests.append(OutcomeRequest(key, hub, hub.incarnation, session))
            hub.hear(session, name, frame)

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        super()._schedule_faults(senders, receivers, hubs)
        rng, later = self.rng, self.loop.call_later
        for _ in range(self.plan.cuts):
            hub = rng.choice(hubs)
            assert isinstance(hub, MultiHub)
            later(rng.random() * BUSY, hub.hang, 2 + rng.random() * (HANGS - 2))
        if not self.plan.faultless:
            self._guest.schedule()
        if self.plan.crash and rng.random() < 0.3:
            later(rng.random() * BUSY, self._leave_for_good, rng.choice(receivers))

    def _leave_for_good(self, device: SimProcess) -> None:
        self.log.note(device.name, "leaves for good")
        self.gone.add(device.name)
        device.crash()


def reachable(world: MultiHubWorld) -> Iterator[Finding]:
    """[P5] No command is refused as offline while its device is connected to a hub that is well."""
    for at, by, message in world.hubs_log.offline:
        for stay in world.hubs_log.stays.values():
            here = stay.device == message.recipient and stay.since + SURE < at < stay.until
            if here and stay.hub.well(stay.since, at) and by.well(at - RECOVERY, at):
                yield f"was refused since {stay.device} is offline, which it was not", message.key


def registered(world: MultiHubWorld) -> Iterator[Finding]:
    """A device that is connected to a hub that is well stays registered there, until it moves to another. In
    the end each that is connected is registered."""
    log = world.hubs_log
    for at, device in log.unregistered:
        for stay in log.stays.values():
            here = stay.device == device and stay.since + SURE < at < stay.until
            moved = any(
                stay.since < when <= at and who == device and hub != stay.hub.name
                for when, who, hub in log.registrations
            )
            if here and not moved and stay.hub.well(stay.since, at):
                yield f"{device} was removed from the registry while it was connected", b""
    end = world.loop.time()
    for stay in log.stays.values():
        sure = stay.lasts() and stay.since + RECOVERY < end and stay.hub.well(end - LAPSE, end)
        if sure and stay.device not in stay.hub.disk.buckets.get(REGISTRY, {}):
            yield f"{stay.device} is connected to {stay.hub.name}, and registered at no hub", b""


def holders_known(world: MultiHubWorld) -> Iterator[Finding]:
    """[P5] Every hub that is well knows within seconds which hub a device is at, though hints are lost."""
    for finding in world.hubs_log.misjudged:
        yield finding, b""


def given_up_by_its_hub(world: MultiHubWorld) -> Iterator[Finding]:
    """[P5] Only the hub that made the newest attempt may give it up as unanswered."""
    for key in world.hubs_log.usurped:
        yield "was given up by a hub that no longer had it", key


def attempts_not_seized(world: MultiHubWorld) -> Iterator[Finding]:
    """[P3] A hub that lives keeps its attempts until the device is at another hub."""
    for key in world.hubs_log.seized:
        yield "was taken from a living hub by one that does not have its device", key


def requests_answered(world: MultiHubWorld) -> Iterator[Finding]:
    """[P5] A request that waits for the outcome of a command is told it, at whichever hub that happens."""
    for request in world.hubs_log.requests:
        said = request.session.said
        taken = said is not None and said.code in (ServerCode.ACCEPTED, ServerCode.DUPLICATE)
        lives = request.hub.alive and request.hub.incarnation == request.incarnation
        if taken and lives and request.session.ended is None:
            yield f"a request at {request.hub.name} waits for its outcome in vain", request.key


MULTI_HUB_CHECKERS: Final[tuple[Checker[MultiHubWorld], ...]] = (
    *CHECKERS,
    pushes_kept,
    reachable,
    registered,
    holders_known,
    given_up_by_its_hub,
    attempts_not_seized,
    requests_answered,
    revoked_is_refused,
)
