"""The gateway's view of the other hubs on its ledger.

The law: everything is stored in the ledger first, and then hinted to the other hubs.
`duly.apps.gateway.shared_deliveries` handles commands under way, `duly.apps.gateway.followed_commands` their
outcomes.

`GatewayRemote` is the interface. `SingleHub` implements it for a hub with a ledger of its own,
`GatewayRemoteHubs` for hubs that share a ledger.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from msgspec import Raw

from duly.apps.gateway.followed_commands import FollowedCommands
from duly.apps.gateway.local_gateway import LocalGateway
from duly.apps.gateway.overheard_pushes import OverheardPush, OverheardPushes
from duly.apps.gateway.presence import ONLINE, DevicePresence
from duly.apps.gateway.pushes import OFFLINE, stream_of
from duly.apps.gateway.shared_deliveries import SharedDeliveries
from duly.apps.gateway.shared_progress import SharedProgress, ShowProgress
from duly.cluster.notifier import Notifier
from duly.cluster.registry import HELD, HubRegistry
from duly.cluster.remote import CoalescedTask, NoRemoteHubs, PolledRemoteHubs, RemoteHubs
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, VerdictKind
from duly.core.operations import OpenDelivery, PutItem
from duly.core.steps import Origin
from duly.errors import LedgerError, Stopped
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger, Record
from duly.wire.fields import Fields
from duly.wire.frames import DEVICE_STATUS

PUSH: Final = "push"
"""The hint that this device has pushed something."""


class GatewayRemote(RemoteHubs, Protocol):
    """The interface of a gateway to the other hubs; also used where there are none."""

    @property
    def hubs(self) -> dict[str, str]:
        """The live hubs on this ledger, including this one, by id: the names that logs and timelines have."""
        ...

    async def start(self) -> None:
        """Read the devices and hubs in the ledger."""
        ...

    async def stop(self) -> None:
        """Stop background work, and leave the ledger to the other hubs."""
        ...

    # devices

    async def register(self, device: str) -> bool:
        """Note that a device's session is here; return whether no hub held it before."""
        ...

    async def fetch_for(self, device: str) -> None:
        """Hand the engine everything that other hubs have stored for a device that is here now."""
        ...

    async def tell_online(self, device: str, *, new: bool) -> None:
        """Tell apps that a device is online; `new` is the result of `register`."""
        ...

    async def unregister(self, device: str, *heard: PutItem) -> None:
        """Note that a device's session here is over and when it was last `heard`, and tell apps unless it is
        at another hub."""
        ...

    def holds(self, device: str) -> bool:
        """Return whether another hub holds a device, as far as this hub knows."""
        ...

    def is_awaited(self, device: str) -> bool:
        """Return whether a device was online when its hub died and may still reconnect; apps have not been
        told that it is gone."""
        ...

    def has_given_up(self, device: str) -> bool:
        """Return whether a device was online when its hub died and did not reconnect in time, so that apps
        were told that it is gone."""
        ...

    def search(self, device: str) -> Awaitable[bool] | None:
        """Ask the ledger whether a hub holds a device; None where there is no other hub."""
        ...

    def is_at_another_hub(self, device: str) -> bool:
        """Return whether another hub holds a device, as far as this hub knows."""
        ...

    async def claim(self, device: str) -> bool:
        """Claim a device behind a shared broker for this hub; return whether that succeeded."""
        ...

    def end_claim(self, device: str) -> None:
        """End a claim, because the device is connected now or will not be."""
        ...

    def online_devices(self) -> list[str]:
        """Return the devices that are connected to any hub, by name."""
        ...

    # what devices tell

    def pushed(self, device: str) -> None:
        """Hint to the other hubs that a device has pushed something here."""
        ...

    def overhear(self, device: str, kind: str, data: Raw, seq_id: str | None, more: Fields) -> bool:
        """Keep a push of a device that is not held here; return False if only this hub can store it."""
        ...

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """Return the pushes of a newly claimed device that its former hub did not store."""
        ...

    # commands

    async def open_deliveries(self) -> list[OpenDelivery]:
        """Return the deliveries that the engine resumes after a start."""
        ...

    async def waiting_commands(self) -> Iterable[Message]:
        """Return the commands that wait for any device."""
        ...

    def handed_over(self, record: Record) -> bool:
        """Return whether another hub may have handed a command to its device."""
        ...

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """Note that an app was told that its command is accepted, so that it gets the outcome."""
        ...

    def hear_progress(self, show: ShowProgress) -> None:
        """Call `show` with the progress of commands whose device is at another hub."""
        ...

    def progressed(self, key: bytes, device: str, progress: Raw, more: Fields) -> None:
        """Pass on the progress of a device here."""
        ...

    def ended(self, key: bytes, state: State) -> Sequence[Origin]:
        """Hint that a command ended here, and return the origins here that followed it."""
        ...


class SingleHub(NoRemoteHubs):
    """The gateway's remote side for a hub with a ledger of its own: every device is here or offline."""

    def __init__(self, ledger: Ledger, channel: str, local: LocalGateway) -> None:
        self._ledger = ledger
        self._channel = channel
        self._local = local
        self._presence = DevicePresence(ledger, local.pushes)
        self.tasks = self._presence.tasks

    @property
    def hubs(self) -> dict[str, str]:
        """This hub alone."""
        return {self._ledger.worker: self._local.trail.hub}

    async def start(self) -> None:
        """Read which devices apps have been told are online."""
        await self._presence.start()

    async def stop(self) -> None:
        """Stop waiting for devices to reconnect."""
        await self._presence.stop()

    async def register(self, device: str) -> bool:
        """Do nothing: the session itself shows that the device is here."""
        return True

    async def fetch_for(self, device: str) -> None:
        """Do nothing: the engine has everything."""

    async def tell_online(self, device: str, *, new: bool) -> None:
        """Tell apps that a device is online, unless they know."""
        await self._presence.came_online(device)

    async def unregister(self, device: str, *heard: PutItem) -> None:
        """Tell apps that a device is offline, and store when it was last `heard`."""
        await self._presence.went_offline(device, *heard)

    def holds(self, device: str) -> bool:
        """Return False: there is no other hub."""
        return False

    def is_awaited(self, device: str) -> bool:
        """Return whether a device was online when this hub last ended and may still reconnect."""
        return self._presence.is_awaited(device)

    def has_given_up(self, device: str) -> bool:
        """Return whether a device was online when this hub last ended and did not reconnect in time."""
        return self._presence.has_given_up(device)

    def search(self, device: str) -> Awaitable[bool] | None:
        """Return None: there is no other hub to ask about."""
        return None

    def is_at_another_hub(self, device: str) -> bool:
        """Return False: there is no other hub."""
        return False

    async def claim(self, device: str) -> bool:
        """Succeed: every device is this hub's."""
        return True

    def end_claim(self, device: str) -> None:
        """Do nothing: no other hub wants it."""

    def online_devices(self) -> list[str]:
        """Return the devices whose sessions are here."""
        return sorted(self._local.sessions.devices)

    def pushed(self, device: str) -> None:
        """Do nothing: the gateway tells its own apps."""

    def overhear(self, device: str, kind: str, data: Raw, seq_id: str | None, more: Fields) -> bool:
        """Return False: only this hub can store a push."""
        return False

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """Return nothing: no other hub left a push unstored."""
        return []

    async def open_deliveries(self) -> list[OpenDelivery]:
        """Return all open deliveries."""
        return await self._ledger.open_deliveries(self._channel)

    async def waiting_commands(self) -> Iterable[Message]:
        """Return the commands that wait here."""
        return self._local.waiting()

    def handed_over(self, record: Record) -> bool:
        """Return False: no other hub hands over commands."""
        return False

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """Do nothing: the outbox knows its origins."""

    def hear_progress(self, show: ShowProgress) -> None:
        """Do nothing: every device is here."""

    def progressed(self, key: bytes, device: str, progress: Raw, more: Fields) -> None:
        """Do nothing: every app is here."""

    def ended(self, key: bytes, state: State) -> Sequence[Origin]:
        """Return nothing: the outbox knows every origin that follows a command."""
        return ()


class GatewayRemoteHubs(PolledRemoteHubs):
    """The gateway's remote side where several hubs share a ledger."""

    def __init__(self, ledger: Ledger, notifier: Notifier, channel: str, local: LocalGateway) -> None:
        super().__init__()
        self._ledger = ledger
        self._notifier = notifier
        self._channel = channel
        self._local = local
        self.registry = HubRegistry(ledger, notifier, name=local.trail.hub)
        self._overheard = OverheardPushes(ledger)
        self.tasks = Supervisor()
        self._deliveries = SharedDeliveries(ledger, notifier, channel, self.registry, local, self.tasks)
        self._followed = FollowedCommands(ledger, notifier, local, self.tasks)
        self._given_up: set[str] = set()
        self._progress = SharedProgress(notifier, local.sessions)
        self._pushes: CoalescedTask[str] = CoalescedTask(local.pushes.refresh_all, self.tasks)
        self._moves: CoalescedTask[str] = CoalescedTask(self._learn_moves, self.tasks)
        notifier.listen(PUSH, self._pushes.want)
        notifier.listen(HELD, self._moves.want)

    @property
    def hubs(self) -> dict[str, str]:
        """The hubs with a recent heartbeat."""
        return {hub: self.registry.name_of(hub) for hub in self.registry.living}

    async def start(self) -> None:
        """Announce this hub in the ledger, and read which others are alive."""
        await self.registry.refresh()

    async def stop(self) -> None:
        """Stop background work, and announce that this hub is gone."""
        await self.tasks.stop()
        with suppress(LedgerError, Stopped):
            await self.registry.leave()

    async def _refresh(self) -> None:
        local, here = self._local, self._local.sessions.devices
        news = local.devices.news(here) if len(self.registry.living) > 1 else ()
        lost = await self.registry.refresh(news)
        local.devices.told(news)
        for device in lost:
            if device not in here:
                await local.pushes.store(device, DEVICE_STATUS, OFFLINE)
                self._given_up.add(device)
        if self._given_up:
            self._given_up.difference_update(self.registry.held_devices())
        await self.registry.drop_absent(here.keys())
        for device in list(here):
            if self.registry.may_be_lost(device) or not self.registry.is_registered(device):
                await self._deliveries.check_holder(device)
        await self._deliveries.take_over(list(here))
        await self._followed.refresh()
        heads = local.pushes.heads()
        lasts = await self._ledger.lasts([stream_of(device) for device in heads])
        await local.pushes.refresh_all([d for d, head in heads.items() if lasts.get(stream_of(d), 0) > head])

    # ── devices ──────────────────────────────────────────────────────────────────────────────────

    async def register(self, device: str) -> bool:
        """Store that a device's session is here; return whether no hub held it before."""
        return await self.registry.register(device)

    async def tell_online(self, device: str, *, new: bool) -> None:
        """Tell apps that a device is online, unless it came from another hub."""
        if new:
            await self._local.pushes.store(device, DEVICE_STATUS, ONLINE)

    async def unregister(self, device: str, *heard: PutItem) -> None:
        """Note that a device's session here is over and when it was last `heard`, and tell apps unless it is
        at another hub."""
        if await self.registry.unregister(device):
            if heard:
                await self._ledger.write(*heard)
            await self._local.pushes.store(device, DEVICE_STATUS, OFFLINE)

    def holds(self, device: str) -> bool:
        """Return whether a live hub holds a device, as far as this hub knows."""
        return self.registry.is_held(device)

    def is_awaited(self, device: str) -> bool:
        """Return False: the registry lists a dead hub's devices as held until they are given up."""
        return False

    def has_given_up(self, device: str) -> bool:
        """Return whether this hub has told apps that a dead hub's device is gone."""
        return device in self._given_up

    def search(self, device: str) -> Awaitable[bool] | None:
        """Ask the ledger whether a live hub holds a device."""
        return self.registry.look_up(device)

    def is_at_another_hub(self, device: str) -> bool:
        """Return whether another live hub holds a device."""
        return self.registry.is_at_another(device)

    async def claim(self, device: str) -> bool:
        """Claim a device behind a shared broker, unless a live hub has it."""
        return await self.registry.claim(device)

    def end_claim(self, device: str) -> None:
        """Hold the device only as long as its session is here."""
        self.registry.end_claim(device)

    def online_devices(self) -> list[str]:
        """Return the devices held by live hubs, by name."""
        return self.registry.held_devices()

    async def _learn_moves(self, devices: Collection[str]) -> None:
        for device in devices:
            if device:
                await self.registry.look_up(device)
                if self.registry.may_be_lost(device):
                    await self._deliveries.check_holder(device)

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    async def open_deliveries(self) -> list[OpenDelivery]:
        """Return the deliveries to devices here, and those that this hub holds."""
        return await self._deliveries.ours()

    async def waiting_commands(self) -> Iterable[Message]:
        """Return the commands that wait at any hub."""
        open_ = await self._ledger.open_deliveries(self._channel)
        return [item.message for item in open_ if not item.delivery.attempt]

    def handed_over(self, record: Record) -> bool:
        """Return whether another hub may have handed a command to its device."""
        return record.state is not State.ACCEPTED

    async def fetch_for(self, device: str) -> None:
        """Find everything that is under way to a device here, and the positions of its lanes."""
        await self._deliveries.fetch_for(device)

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """Note that an app was told that its command is accepted or under way, so that it gets the
        outcome."""
        if self._followed.follow(message, verdict, origin) and verdict.kind is VerdictKind.FRESH:
            self._deliveries.hint(message)

    def hear_progress(self, show: ShowProgress) -> None:
        """Call `show` with the progress that arrives in hints."""
        self._progress.show = show

    def progressed(self, key: bytes, device: str, progress: Raw, more: Fields) -> None:
        """Pass on the progress of a device here within a hint, if there is another hub."""
        if len(self.registry.living) > 1:
            self._progress.hint(key, device, progress, more)

    def ended(self, key: bytes, state: State) -> Sequence[Origin]:
        """Hint to the other hubs that a command ended here, and return the origins here that followed it."""
        return self._followed.ended(key, state)

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────

    def pushed(self, device: str) -> None:
        """Hint that a device has pushed something here: other hubs have apps that listen to it."""
        self._notifier.hint(PUSH, device)

    def overhear(self, device: str, kind: str, data: Raw, seq_id: str | None, more: Fields) -> bool:
        """Keep a push of a device that another hub holds, in case that hub has died."""
        self._local.pushes.check_type(kind)
        self._overheard.keep(device, kind, data, seq_id, more)
        return True

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """Return the pushes of a newly claimed device that its former hub did not store."""
        return await self._overheard.take_unstored(device)
