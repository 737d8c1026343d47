"""Remote: what a gateway does because it is not the only hub on its ledger.

The laws. What is for a device remote is booked in the ledger, and its home is rung; what a neighbour has
booked for a device here is found there. An end is committed, then rung for; whoever has told an app that its
command was taken follows it until the end, wherever that comes about. What a dead hub held is taken over:
attempts are fenced, and devices know what they have done.

Rings only make it fast. Everything that they tell is also found by `look`, every second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from duly.cluster.notifier import Notifier
from duly.cluster.registry import RING as HOME
from duly.cluster.registry import HubRegistry
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, Word, key_of, names_in
from duly.core.operations import OpenDelivery
from duly.core.steps import DeliveriesFound, Origin
from duly.core.units import SECOND
from duly.errors import LedgerError, Malformed, Stopped
from duly.runtime.engine import Engine
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger, Record
from duly.wire import frames
from duly.wire.fields import Fields

TO: Final = "to"
"""Something was booked for this device."""
END: Final = "end"
"""This command has ended: scope/id."""
PUSH: Final = "push"
"""This device has told something."""
LOOK_SECONDS: Final = 1.0
SLACK: Final = 2 * SECOND
"""How long after its end a command that waits is left to the hub that knows it."""
OVERHEARD: Final = 500
"""Pushes of one device that are kept in case its home has died."""
TAKEOVER: Final = 20 * SECOND
"""Within so long somebody has taken in what a dead hub had."""
ABOUT: Final = 3 * SECOND
"""So far apart two hubs may say that they heard the same."""
DOUBTS: Final = 200
"""Commands whose end nobody knows that are still looked at."""

T = TypeVar("T")


class LocalGateway(Protocol):
    """What is needed of the gateway."""

    engine: Engine

    @property
    def here(self) -> Collection[str]:
        """The devices whose sessions are here."""
        ...

    def hears(self, scope: str) -> bool:
        """Whether this app has a session here."""
        ...

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None: ...
    async def replaced(self, device: str) -> None:
        """This device has connected to another hub."""
        ...

    async def vanished(self, device: str) -> None:
        """This device was at a hub that died."""
        ...

    def heads(self) -> dict[str, int]:
        """The devices that apps here listen to, and how far the one furthest behind has heard."""
        ...

    async def catch_up_all(self, device: str) -> None: ...


class OverheardPushes:
    """What devices behind a shared broker tell while another hub is their home: that one stores it, and we
    hear it as well. Whoever takes a device in after its home has died stores what its home no longer could.

    What it could is in the ledger: the same id or, of what has none, the same words at about the same
    time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heard: dict[str, deque[tuple[int, str, object, str | None, Fields]]] = {}

    def keep(self, device: str, kind: str, data: object, seq_id: str | None, more: Fields) -> None:
        now = self._ledger.clock.now()
        heard = self._heard.setdefault(device, deque(maxlen=OVERHEARD))
        if seq_id is not None and any(one[3] == seq_id for one in heard):
            return  # sent again, since its home does not acknowledge it
        while heard and heard[0][3] is None and heard[0][0] < now - TAKEOVER:
            heard.popleft()
        heard.append((now, kind, data, seq_id, more))

    async def left(self, device: str) -> list[tuple[str, object, str | None, Fields]]:
        """What nobody has stored, in the order it was told; it is not kept any longer."""
        heard = self._heard.pop(device, None)
        if not heard:
            return []
        stream, since = f"push/{device}", self._ledger.clock.now() - TAKEOVER
        last = (await self._ledger.extent(stream)).last
        entries = await self._ledger.entries(stream, max(0, last - 2 * OVERHEARD), 2 * OVERHEARD)
        stored = [(entry.at, frames.decode(entry.body)) for entry in entries]
        left: list[tuple[str, object, str | None, Fields]] = []
        for at, kind, data, seq_id, more in heard:
            for one in stored if seq_id is None else ():  # the ledger knows an id anyway
                if (one[1].type, frames.load(one[1].data)) == (kind, data) and abs(one[0] - at) < ABOUT:
                    stored.remove(one)
                    break
            else:
                if seq_id is not None or at >= since:
                    left.append((kind, data, seq_id, more))
        return left


class CoalescedTask(Generic[T]):
    """Looks into things as they are asked for, all that have gathered at once, one look at a time."""

    def __init__(self, work: Callable[[list[T]], Awaitable[None]], tasks: Supervisor) -> None:
        self._work = work
        self._tasks = tasks
        self._wanted: dict[T, None] = {}
        self._task: asyncio.Task[None] | None = None

    def want(self, thing: T) -> None:
        self._wanted[thing] = None
        if self._task is None:
            self._task = self._tasks.do("a look at other hubs", self._run())

    async def _run(self) -> None:
        try:
            while self._wanted:
                things, self._wanted = list(self._wanted), {}
                with suppress(LedgerError, Stopped):  # the next look finds it
                    await self._work(things)
        finally:
            self._task = None


class GatewayRemoteHubs:
    """Of one gateway."""

    def __init__(self, ledger: Ledger, bell: Notifier, channel: str, local: LocalGateway) -> None:
        self._ledger = ledger
        self._bell = bell
        self._channel = channel
        self._local = local
        self.registry = HubRegistry(ledger, bell)
        self.overheard = OverheardPushes(ledger)
        self._followed: dict[bytes, list[Origin]] = {}
        """who waits here for the end of what"""
        self._before: set[bytes] = set()
        """what was followed at the last look"""
        self._doubts: OrderedDict[bytes, None] = OrderedDict()
        self._looking = False
        self.trouble: LedgerError | None = None
        """why the last look saw nothing"""
        self.tasks = Supervisor()
        self._deliveries: CoalescedTask[str] = CoalescedTask(self._fetch, self.tasks)
        self._ends: CoalescedTask[bytes] = CoalescedTask(self._learn_ends, self.tasks)
        self._pushes: CoalescedTask[str] = CoalescedTask(self._learn_pushes, self.tasks)
        self._moves: CoalescedTask[str] = CoalescedTask(self._learn_moves, self.tasks)
        bell.listen(TO, self._heard_to)
        bell.listen(END, self._heard_end)
        bell.listen(PUSH, self._pushes.want)
        bell.listen(HOME, self._moves.want)

    async def start(self) -> None:
        await self.registry.look()

    async def stop(self) -> None:
        await self.tasks.stop()
        with suppress(LedgerError, Stopped):
            await self.registry.leave()

    async def look(self) -> None:
        """What rings would have told, found without them. The next look does not join one that takes long."""
        if self._looking:
            return
        self._looking = True
        try:
            await self._look()
            self.trouble = None
        except LedgerError as problem:
            self.trouble = problem
        except Stopped:
            pass
        finally:
            self._looking = False

    async def _look(self) -> None:
        local = self._local
        for device in await self.registry.look():
            await local.vanished(device)
        await self.registry.clear(local.here)
        for device in list(local.here):
            if self.registry.moved(device) and not await self.registry.stays(device):
                await local.replaced(device)
        await self.see_to(list(local.here))
        still = [key for key in self._followed if key in self._before]
        self._before = set(self._followed)
        await self._learn_ends([*still, *(key for key in self._doubts if local.hears(names_in(key)[0]))])
        heads = local.heads()
        lasts = await self._ledger.lasts([f"push/{device}" for device in heads])
        await self._learn_pushes([d for d, head in heads.items() if lasts.get(f"push/{d}", 0) > head])

    # ── deliveries ───────────────────────────────────────────────────────────────────────────────

    async def ours(self) -> list[OpenDelivery]:
        """What a restart of the engine goes on with: what is for devices here, and what we hold."""
        others = self.registry.living - {self.registry.me}
        return await self._strays(list(self._local.here), "-", others)

    async def see_to(self, devices: Collection[str]) -> None:
        """Find what others have left: for these devices, or because they are dead."""
        found = await self._strays(devices, self.registry.me, self.registry.living)
        if found:
            await self._local.engine.put(DeliveriesFound(tuple(found)))

    async def _fetch(self, devices: Collection[str]) -> None:
        """Find what was just booked for these devices: only that, since it happens all the time."""
        found = await self._ledger.booked(self._channel, devices)
        if found:
            await self._local.engine.put(DeliveriesFound(tuple(found)))

    async def welcome(self, device: str) -> None:
        """A device is here: find everything that is on its way to it, and how far its lanes have come."""
        marks = await self._ledger.marks(f"[{msgspec.json.encode(device).decode()},")
        found = await self._strays([device], self.registry.me, self.registry.living)
        await self._local.engine.put(DeliveriesFound(tuple(found), marks))

    async def _strays(self, devices: Collection[str], me: str, living: Collection[str]) -> list[OpenDelivery]:
        over = self._ledger.clock.now() - SLACK
        return await self._ledger.strays(self._channel, here=devices, worker=me, living=living, now=over)

    def _heard_to(self, device: str) -> None:
        if device in self._local.here:
            self._deliveries.want(device)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def told(self, message: Message, verdict: Verdict, origin: Origin) -> None:
        """An app was told that its command was taken, or is under way: it is owed the end."""
        if verdict.word not in (Word.FRESH, Word.DUPLICATE):
            return
        if verdict.state is not None and verdict.state.terminal:
            return
        origins = self._followed.setdefault(message.key, [])
        if origin is not None and origin not in origins:
            origins.append(origin)
        if verdict.word is Word.FRESH and message.recipient not in self._local.here:
            self._bell.ring(TO, message.recipient)

    def ended(self, key: bytes, state: State) -> list[Origin]:
        """It ended here: who has asked for it here. The others are told."""
        scope, id_ = names_in(key)
        self._bell.ring(END, f"{scope}/{id_}")
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
            if key in self._followed or self._local.hears(scope):
                self._ends.want(key)

    async def _learn_ends(self, keys: Collection[bytes]) -> None:
        for record in await self._ledger.find_all(keys):
            key, state = record.message.key, record.state
            if state.terminal and not (state is State.UNKNOWN and key in self._doubts):
                self._local.tell_end(record, self._close(key, state))

    # ── pushes and moves ─────────────────────────────────────────────────────────────────────────

    def pushed(self, device: str) -> None:
        """A device has told something here: the others have apps that want to hear it."""
        self._bell.ring(PUSH, device)

    async def _learn_pushes(self, devices: Collection[str]) -> None:
        for device in devices:
            await self._local.catch_up_all(device)

    async def _learn_moves(self, devices: Collection[str]) -> None:
        for device in devices:
            if device:
                await self.registry.ask(device)
                if self.registry.moved(device) and not await self.registry.stays(device):
                    await self._local.replaced(device)
