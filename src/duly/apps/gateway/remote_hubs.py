"""What a gateway says to the other hubs on its ledger, and asks of them.

The laws. A command for a device at another hub is stored in the ledger, and that hub gets a hint; what
another hub has stored for a device here is found there. An outcome is committed, then hinted; the hub that
told an app that its command was taken follows the command until its outcome, at whichever hub that happens.
What a dead hub held is taken over: attempts are fenced, and devices know what they have done.

`GatewayRemote` names the verbs. `SingleHub` answers them where this hub has its ledger alone,
`GatewayRemoteHubs` where it shares it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from duly.apps.gateway.overheard_pushes import OverheardPush, OverheardPushes
from duly.apps.gateway.presence import OFFLINE, ONLINE, DevicePresence
from duly.apps.gateway.pushes import PushService, stream_of
from duly.apps.gateway.sessions import GatewaySessions
from duly.cluster.notifier import Notifier
from duly.cluster.registry import HELD, HubRegistry
from duly.cluster.remote import CoalescedTask, NoRemoteHubs, PolledRemoteHubs, RemoteHubs
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, Word, key_of, names_in
from duly.core.operations import OpenDelivery
from duly.core.steps import DeliveriesFound, Origin
from duly.core.units import SECOND
from duly.errors import LedgerError, Malformed, Stopped
from duly.runtime.engine import Engine
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger, Record
from duly.wire.fields import Fields
from duly.wire.frames import DEVICE_STATUS

TO: Final = "to"
"""The hint that a command was stored for this device."""
END: Final = "end"
"""The hint that this command has ended: scope/id."""
PUSH: Final = "push"
"""The hint that this device has told something."""
SLACK: Final = 2 * SECOND
"""How long after its expiry a command that waits is left to the hub that knows it."""
DOUBTS: Final = 200
"""Commands of unknown outcome whose late answer is still looked for."""


class LocalGateway(Protocol):
    """What the remote side needs of the gateway that it belongs to."""

    engine: Engine
    pushes: PushService
    sessions: GatewaySessions

    def waiting(self) -> Iterable[Message]:
        """The commands that wait here for their devices."""
        ...

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        """Tell apps here how a command has ended at another hub."""
        ...

    async def replaced(self, device: str) -> None:
        """Close the session of a device that has connected to another hub."""
        ...


class GatewayRemote(RemoteHubs, Protocol):
    """What a gateway says to the other hubs, and asks of them; also where there are none."""

    @property
    def hubs(self) -> frozenset[str]:
        """The hubs that are alive on this ledger, this one among them."""
        ...

    async def start(self) -> None:
        """Read what the ledger knows of devices and hubs."""
        ...

    async def stop(self) -> None:
        """End what runs in the background, and leave the ledger to the other hubs."""
        ...

    # devices

    async def register(self, device: str) -> bool:
        """Note that a device's session is here; whether no hub held it before."""
        ...

    async def fetch_for(self, device: str) -> None:
        """Hand everything to the engine that other hubs have stored for a device that is here now."""
        ...

    async def tell_online(self, device: str, *, new: bool) -> None:
        """Tell apps that a device is online; `new` is what `register` said."""
        ...

    async def unregister(self, device: str) -> None:
        """Note that a device's session here is over, and tell apps unless it is at another hub."""
        ...

    def holds(self, device: str) -> bool:
        """Whether another hub holds a device, as far as is known here."""
        ...

    def search(self, device: str) -> Awaitable[bool] | None:
        """Ask the ledger whether a hub holds a device; None where no other hub can."""
        ...

    async def claim(self, device: str) -> bool:
        """Become the hub that serves a device behind a shared broker; whether this hub is it."""
        ...

    def online_devices(self) -> list[str]:
        """The devices that are connected to any hub, by name."""
        ...

    # what devices tell

    def pushed(self, device: str) -> None:
        """Hint to the other hubs that a device has told something here."""
        ...

    def overhear(self, device: str, kind: str, data: object, seq_id: str | None, more: Fields) -> bool:
        """Keep a push of a device that is not held here; False if only this hub can store it."""
        ...

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """The pushes of a device just claimed that its former hub did not store."""
        ...

    # commands

    async def open_deliveries(self) -> list[OpenDelivery]:
        """What the engine goes on with after a start."""
        ...

    async def waiting_commands(self) -> Iterable[Message]:
        """The commands that wait for any device."""
        ...

    def handed_over(self, record: Record) -> bool:
        """Whether another hub may have handed a command to its device."""
        ...

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """Note that an app was told that its command was taken: it is owed the outcome."""
        ...

    def ended(self, key: bytes, state: State) -> Sequence[Origin]:
        """Hint that a command ended here; the origins here that followed it."""
        ...


class SingleHub(NoRemoteHubs):
    """The gateway's remote side where this hub has its ledger alone: every device is here, or offline."""

    def __init__(self, ledger: Ledger, channel: str, local: LocalGateway) -> None:
        self._ledger = ledger
        self._channel = channel
        self._local = local
        self._presence = DevicePresence(ledger, local.pushes)
        self.tasks = self._presence.tasks

    @property
    def hubs(self) -> frozenset[str]:
        """This hub."""
        return frozenset({self._ledger.worker})

    async def start(self) -> None:
        """Read which devices apps believe to be online."""
        await self._presence.start()

    async def stop(self) -> None:
        """Stop waiting for devices that have not come back."""
        await self._presence.stop()

    async def register(self, device: str) -> bool:
        """Do nothing: the session itself says that the device is here."""
        return True

    async def fetch_for(self, device: str) -> None:
        """Do nothing: the engine has everything."""

    async def tell_online(self, device: str, *, new: bool) -> None:
        """Tell apps that a device is online, unless they believe so already."""
        await self._presence.came(device)

    async def unregister(self, device: str) -> None:
        """Tell apps that a device is offline."""
        await self._presence.went(device)

    def holds(self, device: str) -> bool:
        """No other hub holds a device."""
        return False

    def search(self, device: str) -> Awaitable[bool] | None:
        """There is no other hub to find a device at."""
        return None

    async def claim(self, device: str) -> bool:
        """Every device is this hub's."""
        return True

    def online_devices(self) -> list[str]:
        """The devices whose sessions are here."""
        return sorted(self._local.sessions.devices)

    def pushed(self, device: str) -> None:
        """Do nothing: the gateway tells its own apps."""

    def overhear(self, device: str, kind: str, data: object, seq_id: str | None, more: Fields) -> bool:
        """Only this hub can store a push."""
        return False

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """No other hub left a push unstored."""
        return []

    async def open_deliveries(self) -> list[OpenDelivery]:
        """Everything that is open."""
        return await self._ledger.open_deliveries(self._channel)

    async def waiting_commands(self) -> Iterable[Message]:
        """The commands that wait here."""
        return self._local.waiting()

    def handed_over(self, record: Record) -> bool:
        """No other hub hands over commands."""
        return False

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """Do nothing: the outbox knows its origins."""

    def ended(self, key: bytes, state: State) -> Sequence[Origin]:
        """No origin followed a command besides those that the outbox knows."""
        return ()


class GatewayRemoteHubs(PolledRemoteHubs):
    """The gateway's remote side where several hubs share a ledger."""

    def __init__(self, ledger: Ledger, notifier: Notifier, channel: str, local: LocalGateway) -> None:
        super().__init__()
        self._ledger = ledger
        self._notifier = notifier
        self._channel = channel
        self._local = local
        self.registry = HubRegistry(ledger, notifier)
        self._overheard = OverheardPushes(ledger)
        self._followed: dict[bytes, list[Origin]] = {}
        """the origins here that wait for the outcome of each command"""
        self._before: set[bytes] = set()
        """the commands that were followed at the last refresh"""
        self._doubts: OrderedDict[bytes, None] = OrderedDict()
        self._fetching: Counter[str] = Counter()
        """devices that have just connected, and whose commands are being read"""
        self.tasks = Supervisor()
        self._deliveries: CoalescedTask[str] = CoalescedTask(self._fetch, self.tasks)
        self._ends: CoalescedTask[bytes] = CoalescedTask(self._learn_ends, self.tasks)
        self._pushes: CoalescedTask[str] = CoalescedTask(self._learn_pushes, self.tasks)
        self._moves: CoalescedTask[str] = CoalescedTask(self._learn_moves, self.tasks)
        notifier.listen(TO, self._heard_to)
        notifier.listen(END, self._heard_end)
        notifier.listen(PUSH, self._pushes.want)
        notifier.listen(HELD, self._moves.want)

    @property
    def hubs(self) -> frozenset[str]:
        """The hubs whose heartbeat goes on."""
        return self.registry.living

    async def start(self) -> None:
        """Show that this hub lives, and see which others do."""
        await self.registry.refresh()

    async def stop(self) -> None:
        """End what runs in the background, and say that this hub is gone."""
        await self.tasks.stop()
        with suppress(LedgerError, Stopped):
            await self.registry.leave()

    async def _refresh(self) -> None:
        local, here = self._local, self._local.sessions.devices
        for device in await self.registry.refresh():
            if device not in here:
                await local.pushes.store(device, DEVICE_STATUS, OFFLINE)
        await self.registry.drop_absent(here.keys())
        for device in list(here):
            if self.registry.may_be_lost(device):
                await self._check_holder(device)
        await self.take_over(list(here))
        still = [key for key in self._followed if key in self._before]
        self._before = set(self._followed)
        await self._learn_ends(
            [*still, *(key for key in self._doubts if names_in(key)[0] in local.sessions.apps)]
        )
        heads = local.pushes.heads()
        lasts = await self._ledger.lasts([stream_of(device) for device in heads])
        await self._learn_pushes([d for d, head in heads.items() if lasts.get(stream_of(d), 0) > head])

    # ── devices ──────────────────────────────────────────────────────────────────────────────────

    async def register(self, device: str) -> bool:
        """Note in the ledger that a device's session is here; whether no hub held it before."""
        return await self.registry.register(device)

    async def tell_online(self, device: str, *, new: bool) -> None:
        """Tell apps that a device is online, unless it came from another hub."""
        if new:
            await self._local.pushes.store(device, DEVICE_STATUS, ONLINE)

    async def unregister(self, device: str) -> None:
        """Note that a device's session here is over, and tell apps unless it is at another hub."""
        if await self.registry.unregister(device):
            await self._local.pushes.store(device, DEVICE_STATUS, OFFLINE)

    def holds(self, device: str) -> bool:
        """Whether a hub that lives holds a device, as far as is known here."""
        return self.registry.is_held(device)

    def search(self, device: str) -> Awaitable[bool] | None:
        """Ask the ledger whether a hub that lives holds a device."""
        return self.registry.look_up(device)

    async def claim(self, device: str) -> bool:
        """Become the hub that serves a device behind a shared broker, unless a living hub is it."""
        return await self.registry.claim(device)

    def online_devices(self) -> list[str]:
        """The devices that hubs that live hold, by name."""
        return self.registry.held_devices()

    async def _learn_moves(self, devices: Collection[str]) -> None:
        for device in devices:
            if device:
                await self.registry.look_up(device)
                if self.registry.may_be_lost(device):
                    await self._check_holder(device)

    async def _check_holder(self, device: str) -> bool:
        """Ask the ledger whether a device is still here; the session of one that has moved is closed."""
        if device in self._local.sessions.devices and await self.registry.confirm(device):
            return True
        await self._local.replaced(device)
        return False

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    async def open_deliveries(self) -> list[OpenDelivery]:
        """What is for devices here, and what this hub holds."""
        others = self.registry.living - {self.registry.me}
        return await self._strays(list(self._local.sessions.devices), "-", others)

    async def waiting_commands(self) -> Iterable[Message]:
        """The commands that wait at any hub."""
        open_ = await self._ledger.open_deliveries(self._channel)
        return [item.message for item in open_ if not item.delivery.attempt]

    def handed_over(self, record: Record) -> bool:
        """Whether a command's device may have it from another hub."""
        return record.state is not State.ACCEPTED

    async def take_over(self, devices: Collection[str]) -> None:
        """Find what other hubs have left: for these devices, or because they are dead.

        Two things are left alone, since their devices would be sent a command once more than needed. What a
        living hub has under way is not taken back from it if the device has moved there since the registry
        was read. What is under way to a device that has just connected is fetched for it already, and sent
        when it is reachable.
        """
        living = self.registry.living
        found = await self._strays(devices, self.registry.me, living)
        held = dict.fromkeys(item.message.recipient for item in found if item.delivery.worker in living)
        moved = {device for device in held if not await self._check_holder(device)}
        ready = [
            item for item in found
            if item.message.recipient not in moved
            and not (item.delivery.attempt and item.message.recipient in self._fetching)
        ]  # fmt: skip
        if ready:
            await self._local.engine.put(DeliveriesFound(tuple(ready)))

    async def _fetch(self, devices: Collection[str]) -> None:
        """Find what was just stored for these devices: only that, since it happens all the time."""
        found = await self._ledger.booked(self._channel, devices)
        if found:
            await self._local.engine.put(DeliveriesFound(tuple(found)))

    async def fetch_for(self, device: str) -> None:
        """Find everything that is on its way to a device here, and how far its lanes have come."""
        self._fetching[device] += 1
        try:
            marks = await self._ledger.marks(f"[{msgspec.json.encode(device).decode()},")
            found = await self._strays([device], self.registry.me, self.registry.living)
            await self._local.engine.put(DeliveriesFound(tuple(found), marks))
        finally:
            self._fetching[device] -= 1
            if not self._fetching[device]:
                del self._fetching[device]

    async def _strays(self, devices: Collection[str], me: str, living: Collection[str]) -> list[OpenDelivery]:
        over = self._ledger.clock.now() - SLACK
        return await self._ledger.strays(self._channel, here=devices, worker=me, living=living, now=over)

    def _heard_to(self, device: str) -> None:
        if device in self._local.sessions.devices:
            self._deliveries.want(device)

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────

    def follow(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """Note that an app was told that its command was taken, or is under way: it is owed the outcome."""
        if verdict.word not in (Word.FRESH, Word.DUPLICATE):
            return
        if verdict.state is not None and verdict.state.terminal:
            return
        origins = self._followed.setdefault(message.key, [])
        if origin is not None and origin not in origins:
            origins.append(origin)
        if verdict.word is Word.FRESH and message.recipient not in self._local.sessions.devices:
            self._notifier.hint(TO, message.recipient)

    def ended(self, key: bytes, state: State) -> Sequence[Origin]:
        """Hint to the other hubs that a command ended here; the origins here that followed it."""
        scope, id_ = names_in(key)
        self._notifier.hint(END, f"{scope}/{id_}")
        return self._close(key, state)

    def _close(self, key: bytes, state: State) -> list[Origin]:
        origins = self._followed.pop(key, [])
        if state is State.UNKNOWN:
            self._doubts[key] = None
            if len(self._doubts) > DOUBTS:
                self._doubts.popitem(last=False)
        else:
            self._doubts.pop(key, None)
        return origins

    def _heard_end(self, name: str) -> None:
        scope, _, id_ = name.partition("/")
        with suppress(Malformed):
            key = key_of(scope, id_)
            if key in self._followed or scope in self._local.sessions.apps:
                self._ends.want(key)

    async def _learn_ends(self, keys: Collection[bytes]) -> None:
        for record in await self._ledger.find_all(keys):
            key, state = record.message.key, record.state
            if state.terminal and not (state is State.UNKNOWN and key in self._doubts):
                self._local.tell_end(record, self._close(key, state))

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────

    def pushed(self, device: str) -> None:
        """Hint that a device has told something here: other hubs have apps that listen to it."""
        self._notifier.hint(PUSH, device)

    async def _learn_pushes(self, devices: Collection[str]) -> None:
        for device in devices:
            self._local.pushes.refresh(device)

    def overhear(self, device: str, kind: str, data: object, seq_id: str | None, more: Fields) -> bool:
        """Keep a push of a device that another hub holds, in case that hub has died."""
        self._local.pushes.check_type(kind)
        self._overheard.keep(device, kind, data, seq_id, more)
        return True

    async def take_unstored(self, device: str) -> list[OverheardPush]:
        """The pushes of a device just claimed that its former hub did not store."""
        return await self._overheard.take_unstored(device)
