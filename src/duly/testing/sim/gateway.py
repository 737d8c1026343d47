"""Worlds of the gateway: the production `GatewayService`, `App` and `Device`, with simulated sockets
between them.

A socket keeps order and repeats nothing, but it breaks, with whatever is under way, and is made again. The
same must hold as in any other world, and the same checkers judge it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, Literal, cast

import msgspec

from duly.apps.gateway.command_timing import CommandTiming
from duly.apps.gateway.policy import GatewayPolicy
from duly.apps.gateway.service import GatewayService
from duly.clients.app import App
from duly.clients.chat import Chat
from duly.clients.device import Command, Device
from duly.clients.sentinel import Sentinel
from duly.clients.websocket_link import RECONNECT
from duly.cluster.notifier import Notifier
from duly.core.flow_control import FlowWindow
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, key_of
from duly.core.operations import CheckItem
from duly.core.retry import RetryPolicy
from duly.core.steps import Effect, Reply
from duly.core.units import MINUTE, SECOND
from duly.errors import DeviceError, DulyError
from duly.identity.accounts import Accounts, Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import Performers
from duly.server.router import Router, settled
from duly.storage.ledger import Ledger
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.tunnel import Tunnel
from duly.testing.sim.world import World
from duly.wire import frames
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import OutgoingFrame, encode
from duly.wire.session import Session, UncongestedSession

if TYPE_CHECKING:
    from duly.clients.base import HubLink

LOCK, LAMP = "lock_control", "dev_control"
"""Kinds of commands: opening a lock must happen at most once, lighting a lamp may be repeated."""

POLICY: Final = CommandTiming(
    max_age=2 * MINUTE, remember=5 * MINUTE, skew=MINUTE, patience=30 * SECOND, lasts=30 * SECOND,
    resend=RetryPolicy.fixed(3 * SECOND, tries=6),
)  # fmt: skip
AHEAD: Final = FlowWindow(frames=2, bytes=1_000)
"""A window so small that in most worlds some frames wait for it."""
PUSHED: Final = 40.0
"""The time until which devices push."""
WANTED: Final = b'"wanted"'


class Wire:
    """A connection: one queue in each direction that keeps order, until it breaks.

    What arrives at the client is handled in `context`: the tasks that it starts belong to the client, and do
    not die with the process that sent it.
    """

    def __init__(self, world: World, client: str, context: Context | None = None) -> None:
        self.world = world
        self.client = client
        self.context = context or copy_context()
        self.broken = False
        self.on_break: list[Callable[[], None]] = []
        self._free = [0.0, 0.0]

    def carry(self, way: int, deliver: Callable[[bytes], None], frame: bytes) -> None:
        """Deliver a frame after a while, unless the connection breaks."""
        world = self.world
        if self.broken or world.is_cut_off(self.client):
            self.break_()
            return
        if world.faulty and world.rng.random() < world.plan.drop / 8:
            world.faults += 1
            self.break_()
            return
        loop = asyncio.get_running_loop()
        at = max(
            self._free[way] + 1e-6, loop.time() + 0.001 + world.rng.random() * min(world.network.slow, 0.5)
        )
        self._free[way] = at
        loop.call_at(at, self._arrive, deliver, frame, context=None if way else self.context)

    def _arrive(self, deliver: Callable[[bytes], None], frame: bytes) -> None:
        if not self.broken:
            deliver(frame)

    def break_(self) -> None:
        """Break the connection."""
        if not self.broken:
            self.broken = True
            for callback in self.on_break:
                asyncio.get_running_loop().call_soon(callback)


class HubSession(UncongestedSession):
    """The hub's end of a wire."""

    def __init__(self, wire: Wire, deliver: Callable[[bytes], None]) -> None:
        self._wire = wire
        self._deliver = deliver

    def push(self, frame: OutgoingFrame) -> None:
        """Send a frame to the client."""
        text = encode(frame)
        if not self._wire.broken:
            self._wire.world.pushed(self._wire.client, self, text)
        self._wire.carry(0, self._deliver, text)

    def close(self, reason: str) -> None:
        """Break the connection."""
        self._wire.break_()


class SimLink:
    """The client's end of a wire, in place of `duly.clients.websocket_link.WebSocketLink`."""

    denial = None

    def __init__(
        self, node: SimProcess, up: Callable[[Frame], None], heard: Callable[[Frame], None],
        cursors: Callable[[], dict[str, int] | None] = lambda: None, down: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._node = node
        self._up = up
        self._heard = heard
        self._cursors = cursors
        self._down = down
        self._wire: Wire | None = None
        self._session: HubSession | None = None
        self._first: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._attempt = 0
        self._welcomed = False
        self._tries = 0
        self._hub: GatewayHub | None = None
        """the hub that it is connected to"""
        self._life = node.incarnation
        self._context = copy_context()

    async def start(self) -> None:
        """Begin to connect."""
        self._connect()

    @property
    def _alive(self) -> bool:
        """Whether the process that made this link is still running."""
        return self._node.alive and self._node.incarnation == self._life

    async def ready(self) -> Frame:
        """Wait for the first welcome."""
        return await self._first

    @property
    def connected(self) -> bool:
        """Whether the hub has welcomed this connection."""
        return self._wire is not None and self._welcomed

    async def stop(self) -> None:
        """Break the connection."""
        self.break_()

    def break_(self) -> None:
        """Break the connection, if there is one."""
        if self._wire is not None:
            self._wire.break_()

    def _connect(self) -> None:
        node, world = self._node, self._node.world
        hub = world.hub_for(node.name, self._tries)
        assert isinstance(hub, GatewayHub)
        self._hub = hub
        if not self._alive or self._wire is not None:
            return
        if not hub.ready or world.is_cut_off(node.name):
            self._again()
            return
        self._wire = wire = Wire(world, node.name, self._context)
        self._session = HubSession(wire, self._receive)
        self._welcomed = False
        wire.on_break = [lambda: self._broke(wire), lambda: hub.lost(session, node.name)]
        session = self._session
        hub.wires.append(wire)
        hub.spawn(hub.welcome(session, node.name, self._cursors()))

    def _again(self) -> None:
        self._attempt += 1
        self._tries += 1
        delay = RECONNECT.delay(min(self._attempt, 5), self._node.name.encode()) or 0
        asyncio.get_running_loop().call_later(delay / SECOND, self._connect)

    def _broke(self, wire: Wire) -> None:
        if self._wire is wire:
            self._wire = None
            if self._alive:
                if self._welcomed:
                    self._down()
                self._again()

    def _receive(self, raw: bytes) -> None:
        if not self._alive:
            return
        frame = frames.decode(raw)
        if not self._welcomed:
            self._welcomed = True
            self._attempt = 0
            self._up(frame)
            if not self._first.done():
                self._first.set_result(frame)
            return
        self._heard(frame)

    def send(self, frame: bytes) -> None:
        """Send a frame, if connected."""
        wire, session, hub = self._wire, self._session, self._hub
        if wire is None or session is None or hub is None or not self._welcomed or not self._alive:
            return
        name = self._node.name
        hub.record(name, frame)
        wire.carry(1, lambda raw: hub.hear(session, name, raw), frame)


class OpenAccounts(Accounts):
    """Accounts that may command everything: these worlds are not about permissions."""

    def __init__(self, devices: list[str], apps: list[str]) -> None:
        self._devices = frozenset(devices)
        self._people = frozenset(apps)

    def may(self, principal: Principal, device: str) -> bool:
        """Return True: permissions are tested in the world with guests."""
        return True

    def allows(self, sender: str, device: str) -> bool:
        """Return True: permissions are tested in the world with guests."""
        return True

    def granted(self, app: str) -> frozenset[str]:
        """Return all devices of the world."""
        return self._devices

    def proof(self, principal: Principal, device: str = "") -> tuple[CheckItem, ...]:
        """Return no checks for the commit, since every permission holds for ever."""
        return ()

    def epoch(self, name: str) -> int:
        """Return 0: no login of the world becomes void."""
        return 0

    def created_at(self, name: str) -> int:
        """Return 0: no account is ever created again."""
        return 0

    def freed_at(self, name: str) -> int:
        """Return 0: no account takes over the name of another one."""
        return 0

    def apps_of(self, device: str) -> frozenset[str]:
        """Return all apps of the world."""
        return self._people

    def is_sent_once(self, device: str) -> bool:
        """Return False: every device of the world recognises repeats."""
        return False

    def stored_role(self, name: str) -> Role | None:
        """Return device or app, by the list that contains the name; none for an unknown name."""
        return Role.DEVICE if name in self._devices else Role.APP if name in self._people else None

    async def find_role(self, name: str, asker: str = "") -> Role | None:
        """Return the same as `stored_role`: no other hub could know more."""
        return self.stored_role(name)

    def key_of(self, name: str) -> str:
        """Return no key: no device of the world signs."""
        return ""


class SeenGateway(GatewayService):
    """The production gateway, with its replies noted in the log."""

    node: SimProcess

    def performers(self) -> Performers:
        """Return the gateway's own performers, each of which notes its effect for the checkers first."""
        return {kind: partial(self._note, perform) for kind, perform in super().performers().items()}

    def _note(self, perform: Callable[..., None], effect: Effect) -> None:
        if not self.node.alive:
            return
        if isinstance(effect, Reply):
            world = self.node.world
            if effect.verdict.fresh:
                world.accepting(effect.message.scope)
            world.log.replied(self.node, effect.message, effect.verdict)
        perform(effect)


class GatewayHub(SimProcess):
    """A hub with the production gateway."""

    wires: list[Wire]
    recorded: list[tuple[str, bytes]]

    async def begin(self) -> None:
        """Start the gateway on this process's ledger, and route frames to it."""
        self.wires = []
        self.recorded = getattr(self, "recorded", [])
        self.greeting: dict[Session, asyncio.Event] = {}
        """the connections that are being greeted, each with an event that is set when it was"""
        names = list(self.world.nodes)
        self.accounts = await self.open_accounts(
            [name for name in names if name.startswith("dev")], [n for n in names if n.startswith("app")]
        )
        activity = ActivityLog(self.ledger)
        self.gateway = SeenGateway(
            self.ledger, self.accounts, activity, GatewayPolicy(timing=POLICY, ahead=AHEAD), self.notifier()
        )
        self.router = Router(activity, [self.gateway])
        self.gateway.node = self
        self.engine = self.gateway.engine
        await self.gateway.start()

    async def open_accounts(self, devices: list[str], apps: list[str]) -> OpenAccounts:
        """Return the accounts of the devices and apps."""
        return OpenAccounts(devices, apps)

    def notifier(self) -> Notifier | None:
        """Return the notifier, if there are several hubs."""
        return None

    def die(self) -> None:
        """End the gateway at once, and break every connection."""
        super().die()
        if hasattr(self, "gateway"):
            self.gateway.tasks.kill()
        for wire in self.wires:
            wire.break_()

    def principal(self, name: str) -> Principal:
        """Return the account of a client."""
        return Principal(name, Role.DEVICE if name.startswith("dev") else Role.APP)

    async def welcome(self, session: Session, name: str, cursors: dict[str, int] | None) -> None:
        """Greet a client that has connected."""
        self.greeting[session] = greeted = asyncio.Event()
        try:
            await self._quietly(session, self.router.connected(session, self.principal(name), cursors))
        finally:
            del self.greeting[session]
            greeted.set()

    def hear(self, session: Session, name: str, raw: bytes) -> None:
        """Receive a frame of a client."""
        if self.alive:
            self.spawn(self._quietly(session, self._hear(session, name, raw)))

    async def _hear(self, session: Session, name: str, raw: bytes) -> None:
        await settled(self.router.receiver(session, self.principal(name))(raw))

    def record(self, name: str, frame: bytes) -> None:
        """Keep a frame that a client has sent, for replays."""
        self.recorded.append((name, frame))

    def replay(self, count: int, prefix: str = "") -> None:
        """Receive again the recorded frames of senders whose names begin so, with their credentials."""
        if not self.ready:
            return
        world, recorded = self.world, self.recorded
        chosen = list(recorded) if count >= len(recorded) else world.rng.sample(recorded, count)
        for name, frame in chosen:
            if name.startswith(prefix):
                world.faults += 1
                self.hear(HubSession(Wire(world, "thief"), lambda raw: None), name, frame)

    def lost(self, session: Session, name: str) -> None:
        """Forget a connection that broke: after it was greeted, as the WebSocket server does."""
        if self.alive:
            self.spawn(self._forget(session, name))

    async def _forget(self, session: Session, name: str) -> None:
        if (greeting := self.greeting.get(session)) is not None:
            await greeting.wait()
        await self._quietly(session, self.router.disconnected(session, self.principal(name)))

    async def _quietly(self, session: Session, call: Awaitable[object]) -> None:
        try:
            await call
        except DulyError as problem:
            session.close(str(problem))  # as a transport does


def break_link(client: object) -> None:
    """Break the simulated socket of a client, if it has one."""
    link = getattr(client, "_link", None)
    if isinstance(link, SimLink):
        link.break_()


def end_client(client: App | Device | Chat | Sentinel) -> None:
    """End a client as the death of its process does: its engine stops and its socket breaks."""
    client.tasks.kill()
    if hasattr(client, "_engine"):
        client._engine.kill()
    if hasattr(client, "_pushes") and isinstance(client, Device):
        client._pushes.engine.kill()
    if isinstance(client, Chat):
        client._at.cancel()
    break_link(client)


class _SimApp(App):
    def __init__(self, node: GatewayApp) -> None:
        super().__init__("", "", store="kept")
        self.node = node

    async def _open_ledger(self) -> Ledger:
        return self.node.ledger

    def _open_link(self) -> HubLink:
        return SimLink(self.node, self._up, self._heard, self._positions)

    def _perform(self, effect: Effect) -> None:
        if self.node.alive:
            super()._perform(effect)

    def _server_ack(self, key: bytes, frame: Frame) -> None:
        if frame.code in (ServerCode.OFFLINE, ServerCode.BAD_PARAMETERS):
            self.node.world.log.freed.add(key)
        super()._server_ack(key, frame)

    def _end(self, key: bytes, state: State, answer: Answer) -> None:
        self.node.world.log.outcome(self.node.name, key, state, answer)
        super()._end(key, state, answer)


class GatewayApp(SimProcess):
    """An app with the production client."""

    async def begin(self) -> None:
        """Connect the app."""
        self.app = app = _SimApp(self)
        await app.__aenter__()
        if self.app is app:
            self.engine = app._engine

    def die(self) -> None:
        """End the app without closing its connection."""
        end_client(self.app)

    async def submit(self, recipient: str, kind: str, order: Order | None, lasts: int) -> None:
        """Post a command, and note it for the checkers."""
        minted = self.app._ids.next(self.clock.now())
        lane: str | Literal[False] = False if order is None else order.key
        latest = order is not None and order.mode is Mode.LATEST
        if order is not None:
            order = Order(order.key, order.mode, minted.n)
        expires = self.clock.now() + lasts if lasts else 0
        message = Message(self.name, str(minted), kind, recipient, WANTED, expires=expires, order=order)
        self.world.log.submitted(self, message, minted)
        try:
            await self.app.post(
                recipient, kind, "wanted", id=str(minted), order=lane, latest=latest,
                expires=lasts / SECOND if lasts else None, queue=bool(lasts),
            )  # fmt: skip
        except DulyError:
            return


class SimDevice(Device):
    """A device whose link is a simulated socket."""

    def __init__(self, node: GatewayDevice) -> None:
        super().__init__("", "")
        self.node = node

    async def _open_ledger(self) -> Ledger:
        return self.node.ledger

    def _open_link(self) -> HubLink:
        return SimLink(self.node, self._up, self._heard, down=self._down)

    def _send(self, frame: bytes) -> None:
        if self.node.alive:
            super()._send(frame)

    def _perform(self, effect: Effect) -> None:
        if self.node.alive:
            super()._perform(effect)


class GatewayDevice(SimProcess):
    """A device with the production client."""

    def client(self) -> Device:
        """Return a new client for the next life of the process."""
        return SimDevice(self)

    async def connect(self, device: Device) -> None:
        """Start the client and wait until it is connected."""
        await device.__aenter__()

    async def begin(self) -> None:
        """Connect the device with one handler for each kind of effect."""
        self.device = device = self.client()
        device.on(LOCK, effect="at_most_once")(self._handle)
        device.on(LAMP, effect="at_least_once")(self._handle)
        await self.connect(device)
        if self.device is device:
            self.engine = device._engine
            self.spawn(self._push(device))

    async def _push(self, device: Device) -> None:
        """Push something now and then, connected or not."""
        draw = Random(f"pushes {self.world.plan.seed} {self.name} {self.incarnation}").random
        loop = asyncio.get_running_loop()
        while loop.time() < PUSHED:
            await asyncio.sleep(draw() * 4)
            for _ in range(1 + int(draw() * 4)):
                with suppress(DulyError):
                    device.push("event_report", "told")

    def die(self) -> None:
        """End the device without closing its connection."""
        end_client(self.device)

    async def _handle(self, command: Command) -> object:
        world, draw = self.world, self.world.rng.random
        await asyncio.sleep(draw() * 0.1)
        if world.faulty and draw() < world.plan.failing:
            raise DeviceError(1, "busy")
        key = key_of(command.sender, command.id)
        want = world.log.wanted[key].message
        forged = command.data != "wanted"
        message = msgspec.structs.replace(want, body=b"forged") if forged else want
        world.log.effect(self, message, command.attempt)
        await asyncio.sleep(draw() * 0.1)
        return "wanted"


class GatewayWorld(World):
    """A world with one hub, apps and devices."""

    sender: type[SimProcess] = GatewayApp
    receiver: type[SimProcess] = GatewayDevice
    hub: type[SimProcess] = GatewayHub
    kinds = (LOCK, LAMP)
    at_most_once = frozenset({LOCK})

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.tunnel = Tunnel(self)

    def accepting(self, app: str) -> None:
        """Called before an app is told that a hub has stored its command."""
        self.tunnel.accepting(app)

    def is_cut_off(self, client: str) -> bool:
        """Return whether the link between a client and the hub is cut."""
        return client in self.tunnel or super().is_cut_off(client)

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        super()._schedule_faults(senders, receivers, hubs)
        self.tunnel.choose([sender.name for sender in senders])

    @property
    def first_hub(self) -> GatewayHub:
        """The hub of a world with one, or the first of several."""
        return cast("GatewayHub", self.nodes["hub"])

    def _replay(self, count: int) -> None:
        """Send recorded frames of apps again, with their credentials."""
        self.first_hub.replay(count, "app")

    def _lie(self) -> None:
        hub = self.first_hub
        known = list(self.log.promised.get("hub", {}).values())
        if known and hub.ready:
            self.faults += 1
            message = self.rng.choice(known)
            frame = Frame(message.kind, message.id, message.recipient, data=frames.dump("forged"))
            self.log.note("liar", "sends other content under a known id", message.key)
            hub.hear(HubSession(Wire(self, "liar"), lambda raw: None), message.scope, frames.encode(frame))
