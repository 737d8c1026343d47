"""Worlds of MQTT devices: the production gateway with its MQTT side, `Device` at mqtt:// addresses, and a
broker between them.

The broker is the hub's own: it dies with the hub, remembers sessions, and drops what an account may not
publish. Devices die with it, and some do not come back. Attackers answer and command in the names of others,
publish garbage, and subscribe in the hub's session. Long after the calm every app sends a last command to
every device: whatever the hub has received, it must still work. Later, all connections break and the broker
has forgotten the hub's session, so devices report while the hub subscribes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Final, cast

from msgspec import Struct

from duly.apps.gateway.mqtt_devices import MqttDevices
from duly.apps.gateway.mqtt_presence import GRACE
from duly.broker.users import second_session
from duly.clients.base import HubLink
from duly.clients.device import Device
from duly.clients.mqtt_link import MqttDeviceLink
from duly.core import operations as w
from duly.core.acl import HUB, AccountClass, Act, decide
from duly.core.ids import SeqId
from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.units import SECOND
from duly.runtime.activity_log import ActivityLog
from duly.runtime.tasks import Supervisor
from duly.server.mqtt_service import SWEEP_SECONDS
from duly.storage.memory import Disk
from duly.testing.loops import VirtualLoop
from duly.testing.sim.broker import SimBroker, WiredLoop, version_of
from duly.testing.sim.checkers import Checker, Finding
from duly.testing.sim.gateway import (
    LAMP,
    POLICY,
    GatewayApp,
    GatewayDevice,
    GatewayHub,
    GatewayWorld,
    HubSession,
    SimDevice,
    Wire,
    end_client,
)
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.peers import own_tasks, owned_task
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.push_checkers import GATEWAY_CHECKERS, is_online, is_presence
from duly.testing.sim.world import BUSY, CALM, WorldLog
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire import fd, frames
from duly.wire.fd import FdKind
from duly.wire.frames import DeviceCode, Frame
from duly.wire.task_ids import SECRET_SIZE, TaskIds

STRANGER: Final = "dev9"
"""The attacker's account: a device that no app commands."""
ATTACKS: Final = 8
"""Attacks in a world with conflicts."""
LATE: Final = 160.0
"""When each app sends a last command to each device."""
FORGOTTEN: Final = 200.0
"""When the broker forgets the hub's session."""
SUBSCRIBES_WITHIN: Final = 0.2
"""Seconds that the hub's subscription takes then."""
SEEN_WITHIN: Final = 10.0
"""Seconds after which apps know that a device is back online."""
BLACKOUT: Final = 0.25
"""The chance that the broker and a device die together when the hub has heard that the device is online."""
NOTICED: Final = GRACE + 3 * SWEEP_SECONDS
"""Seconds after which the hub has given up a device that died with the broker; a disk may fail meanwhile."""
RECOVERY: Final = 2.0
"""Seconds after a failure of its disk in which the hub has not handled all that it heard."""
GARBAGE: Final = (
    b"{", b"\xff\xfe", b"[]", b'{"online":"yes"}', b"[" * 5_000, b'{"msg_id":5}', b'{"msg_id":"a:b"}',
)  # fmt: skip
FORGED: Final = fd.content_of("forged", fd.Form.BASE64)


class MqttHub(GatewayHub):
    """A hub with the production MQTT side."""

    world: MqttWorld
    serves_broker = False
    """its broker accepts the connections of the hub"""
    admits_all = False
    """its broker accepts all connections"""

    async def begin(self) -> None:
        """Start the gateway with its MQTT devices, and connect it to the simulated broker."""
        self.own: dict[asyncio.Task[object], None] = {}
        own_tasks.set(self.own)
        self.supervisor = tasks = Supervisor()
        await super().begin()
        ids = TaskIds(bytes(SECRET_SIZE))
        self.devices = devices = MqttDevices(
            self.gateway, self.accounts, ActivityLog(self.ledger), ids, tasks
        )
        await devices.start()
        devices.presence.watch_connections()
        self.serves_broker = True

        def reconnected(_: bool) -> None:
            tasks.do("mqtt reconnection", devices.sessions.reconnect())
            self._admit_all()

        def reports_back(session_present: bool) -> None:
            devices.reports_back(session_present)
            self._admit_all()

        version = version_of(self.world.plan, HUB)
        address = BrokerAddress.parse(f"mqtt://{HUB}@{HUB}?client_id={HUB}-1&version={version}")
        devices.sessions.link = MqttLink(
            address, self._heard, subscriptions=devices.answers, on_connect=reconnected, tasks=tasks
        )
        devices.reports_link = MqttLink(
            second_session(address), self._heard, subscriptions=devices.reports,
            on_connect=reports_back, on_disconnect=lambda _: devices.presence.link_lost(),
            before=devices.presence.link_connects, tasks=tasks,
        )  # fmt: skip
        self.links = (devices.sessions.link, devices.reports_link)
        for link in self.links:
            await link.start()
        tasks.every("sweep of silent MQTT devices", SWEEP_SECONDS, devices.sweep)

    def _admit_all(self) -> None:
        """Accept other connections once the hub has subscribed."""
        self.admits_all = self.admits_all or all(link.connections for link in self.links)

    def _heard(self, topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
        self.devices.arrived(topic, payload, old, old, self.world.overheard(topic, payload, old, ack))

    def die(self) -> None:
        """End the hub at once; the embedded broker, its child, starts anew with it."""
        self.serves_broker = self.admits_all = False
        super().die()
        self.supervisor.kill()
        for task in list(self.own):
            task.cancel()
        self.world.broker.restart()


class _SimMqttDevice(SimDevice):
    def __init__(self, node: BrokeredDevice) -> None:
        super().__init__(node)
        version = version_of(node.world.plan, node.name)
        self._url = f"mqtt://{node.name}@{node.name}?version={version}"

    def _open_link(self) -> HubLink:
        return Device._open_link(self)


class BrokeredDevice(GatewayDevice):
    """A device with the production client, behind the broker."""

    world: MqttWorld

    def client(self) -> Device:
        """Return a device that speaks MQTT."""
        self.own: dict[asyncio.Task[object], None] = {}
        own_tasks.set(self.own)
        return _SimMqttDevice(self)

    async def connect(self, device: Device) -> None:
        """Start the device, which connects to the broker by itself."""
        await device.start()

    def die(self) -> None:
        """End the device and its connection to the broker at once."""
        end_client(self.device)
        link = getattr(self.device, "_link", None)
        if isinstance(link, MqttDeviceLink):
            link.tasks.kill()
            link._link._tasks.kill()
        for task in list(self.own):
            task.cancel()
        self.world.broker.hang_up(self.name)


class Blackout(Struct, frozen=True):
    """A moment in which the broker died, and a device with it for good."""

    at: float
    device: str


class MqttLog(WorldLog):
    """The log of a world with MQTT devices; every submission is told to the attackers."""

    def __init__(self, attack: Callable[[Message], None]) -> None:
        super().__init__()
        self._attack = attack
        self.presence: list[tuple[float, str, bool]] = []
        """when apps were told that a device is online, or offline"""
        self.blackouts: list[Blackout] = []
        self.last: set[bytes] = set()
        """the commands that were sent long after the calm"""
        self.subscribed: set[str] = set()
        """the filters in the hub's sessions when the broker forgot them"""
        self.back: list[str] = []
        """the devices that have come back some time after the broker forgot the hub's session"""
        self.heard: dict[str, float] = {}
        """when the hub last heard something on each topic"""

    def submitted(self, sender: SimProcess, message: Message, minted: SeqId) -> None:
        """Note the command, and let the world attack it."""
        super().submitted(sender, message, minted)
        if asyncio.get_running_loop().time() >= LATE:
            self.last.add(message.key)
        self._attack(message)


class MqttWorld(GatewayWorld):
    """A world with one hub, its broker, apps, and devices behind the broker."""

    receiver: type[SimProcess] = BrokeredDevice
    hub: type[SimProcess] = MqttHub

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.log = self.mqtt_log = MqttLog(self._submitted)
        self.malice = Random(f"attacks {plan.seed}")
        self._ready: list[Callable[[Message], None]] = []
        """attacks that wait for the next command"""

    def _open_loop(self) -> VirtualLoop:
        self.broker = SimBroker(self, self._published, _may_publish)
        self.broker.on_connections = self._connections
        loop = WiredLoop(self._accept)
        loop.set_task_factory(owned_task)
        return loop

    @property
    def first_hub(self) -> MqttHub:
        """The only hub."""
        return cast("MqttHub", self.nodes[HUB])

    def _accept(self, protocol: asyncio.Protocol, client: str) -> asyncio.Transport:
        hub = self.first_hub
        if not hub.serves_broker or (client != HUB and not hub.admits_all):
            raise ConnectionRefusedError(111, "the broker is down")
        return self.broker.accept(protocol, client)

    def _connections(self, client: str, connected: bool) -> None:
        """Let the hub's own broker tell it who connects."""
        hub = self.first_hub
        if hub.serves_broker:
            hub.devices.connections(client, connected)

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        """Note when a device's presence was stored, and as what."""
        super().committed(node, disk, write, result)
        if isinstance(write, w.AppendEntry) and write.stream.startswith("push/") and is_presence(write.body):
            device = write.stream.removeprefix("push/")
            self.mqtt_log.presence.append((self.loop.time(), device, is_online(write.body)))

    # ── the broker and devices die ───────────────────────────────────────────────────────────────

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        super()._schedule_faults(senders, receivers, hubs)
        later, draw = self.loop.call_later, self.malice.random
        for _ in range(self.plan.cuts):
            later(draw() * BUSY, self._restart_broker)
        for _ in range(ATTACKS if self.plan.conflicts else 0):
            later(draw() * BUSY, self._ready.append, self.malice.choice(self._attacks()))

    def _restart_broker(self) -> None:
        self.broker.restart()
        hub = self.first_hub
        if hub.ready:
            hub.devices.presence.broker_restarted()

    def _published(self, topic: str, payload: bytes) -> None:
        """Called for every published message. Sometimes the broker dies once more before the hub is connected
        and receives the status of a device, and the device dies as well."""
        waits = any(session.connection is None for session in self.broker.sessions_of(HUB))
        device = self._reporting(topic, payload)
        if waits and device is not None and self.malice.random() <= BLACKOUT:
            self.loop.call_soon(self._black_out, device)

    def overheard(self, topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> Callable[[], None]:
        """Called for every message that the hub receives. Sometimes the broker dies before it learns that the
        hub has the status of a device, and the device dies as well."""
        self.mqtt_log.heard[topic] = self.loop.time()
        device = self._reporting(topic, payload)
        if device is None or old or self.malice.random() > BLACKOUT:
            return ack
        self.loop.call_later(0.2, self._black_out, device)
        return lambda: None

    def _reporting(self, topic: str, payload: bytes) -> SimProcess | None:
        """Return the device that reports by this message that it is online, if it may die now."""
        name, _, kind = topic.removeprefix(f"{fd.PREFIX}/").partition("/")
        device = self.nodes.get(name)
        if kind != FdKind.STATUS or device is None or not device.alive or not self.faulty:
            return None
        if not self.plan.crash or b'"online":true' not in payload or b'"data"' in payload:
            return None
        return device

    def _black_out(self, device: SimProcess) -> None:
        hub = self.nodes[HUB]
        if device.alive and hub.ready and self.faulty:
            self.log.note(device.name, "dies with the broker, for good")
            self.mqtt_log.blackouts.append(Blackout(self.loop.time(), device.name))
            self.gone.add(device.name)
            self._restart_broker()
            device.crash()

    # ── attacks ──────────────────────────────────────────────────────────────────────────────────

    def _attacks(self) -> list[Callable[[Message], None]]:
        return [self._forge_answer, self._forge_ack, self._forge_task, self._plant, self._babble]

    def _submitted(self, message: Message) -> None:
        attacks = list(self._ready)
        self._ready.clear()
        for attack in attacks:
            self.faults += 1
            self.loop.call_later(self.malice.random() * 0.3, attack, message)

    def _task(self, message: Message) -> str:
        """Return a guess at the msg_id of a command, whose tag cannot be known."""
        return f"{message.scope}:{message.id}:{'A' * 24}"

    def _forge_answer(self, message: Message) -> None:
        self.log.note(STRANGER, f"answers for {message.recipient}", message.key)
        text = fd.encode(fd.FdComplete(self._task(message), FORGED))
        self.broker.publish_as(STRANGER, fd.topic_of(fd.PREFIX, HUB, FdKind.COMPLETE), text)

    def _forge_ack(self, message: Message) -> None:
        hub = self.first_hub
        if hub.ready:
            self.log.note(STRANGER, f"sends an ack for {message.recipient}", message.key)
            ack = Frame("ack", message.id, message.scope, code=DeviceCode.DONE, data=frames.dump("forged"))
            hub.hear(HubSession(Wire(self, STRANGER), lambda raw: None), STRANGER, frames.encode(ack))

    def _forge_task(self, message: Message) -> None:
        self.log.note(STRANGER, f"commands {message.recipient}", message.key)
        task = fd.FdPending(HUB, message.recipient, self._task(message), message.kind, payload=FORGED)
        topic = fd.topic_of(fd.PREFIX, message.recipient, FdKind.PENDING)
        self.broker.publish_as(STRANGER, topic, fd.encode(task))

    def _plant(self, message: Message) -> None:
        """Subscribe in the hub's sessions, as a client that once had the hub's client id could."""
        topic = fd.topic_of(fd.PREFIX, message.recipient, FdKind.PENDING)
        self.log.note(STRANGER, f"subscribes the hub to {topic}")
        for session in self.broker.sessions_of(HUB):
            session.filters[topic] = 1

    def _babble(self, message: Message) -> None:
        """Publish garbage: as the answer of some device, and as the status of this one."""
        garbage = self.malice.choice(GARBAGE)
        self.log.note(message.recipient, "publishes garbage")
        self.broker.publish_as(STRANGER, fd.topic_of(fd.PREFIX, HUB, FdKind.COMPLETE), garbage)
        status = fd.topic_of(fd.PREFIX, message.recipient, FdKind.STATUS)
        self.broker.publish_as(message.recipient, status, garbage)

    # ── after the calm ───────────────────────────────────────────────────────────────────────────

    def _calm(self) -> None:
        super()._calm()
        self._ready.clear()
        self.loop.call_at(LATE, self._send_last)
        self.loop.call_at(FORGOTTEN, self._forget_session)
        self.loop.call_at(FORGOTTEN + SEEN_WITHIN, self._note_who_is_back)

    def _forget_session(self) -> None:
        for session in self.broker.sessions_of(HUB):
            self.mqtt_log.subscribed |= session.filters.keys()
        self.broker.subscribes_within = SUBSCRIBES_WITHIN
        self.broker.lose(HUB)

    def _note_who_is_back(self) -> None:
        self.broker.subscribes_within = 0.0
        for name, device in self.nodes.items():
            said = self.broker.retained(fd.topic_of(fd.PREFIX, name, FdKind.STATUS))
            status = fd.decode_status(said) if said else None
            if isinstance(device, BrokeredDevice) and device.alive and status is not None and status.online:
                self.mqtt_log.back.append(name)

    def _send_last(self) -> None:
        self.tunnel.close()
        for app in list(self.nodes.values()):
            for device in self.nodes.values():
                if isinstance(app, GatewayApp) and app.ready and self._may_act(device):
                    app.spawn(app.submit(device.name, LAMP, None, 0))

    def _may_act(self, device: SimProcess) -> bool:
        """Return whether this is a device that can be reached, and for which a new command of the hub has not
        expired already: their clocks may differ by more than a command lasts."""
        ahead = device.clock.now() - self.nodes[HUB].clock.now()
        return (
            isinstance(device, BrokeredDevice)
            and device.name not in self.gone
            and ahead < POLICY.lasts - SECOND
        )


def _may_publish(client: str, topic: str) -> bool:
    of = AccountClass.HUB if client == HUB else AccountClass.DEVICE
    return bool(decide(Act.PUBLISH, client, topic, fd.PREFIX, of))


# ── what must hold ───────────────────────────────────────────────────────────────────────────────


def hub_still_answers(world: MqttWorld) -> Iterator[Finding]:
    """[P5] Whatever the hub has received before, after the calm every command is done."""
    for key in sorted(world.mqtt_log.last):
        told = world.log.outcomes.get(key)
        if told is None or told[-1][0] is not State.DONE:
            yield f"was sent long after the calm, and is {told[-1][0].word if told else 'open'}", key


def foreign_subscriptions_removed(world: MqttWorld) -> Iterator[Finding]:
    """What others have subscribed in the hub's sessions is unsubscribed when something is heard by it. Before
    the calm, that may be lost with the connection."""
    hub = world.first_hub
    ours = {*hub.devices.answers, *hub.devices.reports}
    for topic in sorted(world.mqtt_log.subscribed - ours):
        if world.mqtt_log.heard.get(topic, 0) >= CALM:
            yield f"the hub still hears {topic}", b""


def offline_reported(world: MqttWorld) -> Iterator[Finding]:
    """[P5] Apps are told soon that a device has died with the broker, and not that it is back. This does not
    hold if the hub died since, nor if its disk had failed just before: it may not have known the last
    connection of the device."""
    lines = [(at, what) for at, who, what, _ in world.log.lines if who == HUB]
    for lost in world.mqtt_log.blackouts:
        until, shaken = lost.at + NOTICED, lost.at - RECOVERY
        told = [(at, on) for at, device, on in world.mqtt_log.presence if device == lost.device]
        deaths = [at for at, what in lines if what == "dies" and at >= shaken]
        failed = any(what.startswith("disk fails") and shaken <= at <= lost.at for at, what in lines)
        believed = [on for at, on in told if at <= until]
        if not failed and believed and believed[-1] and not any(at <= until for at in deaths):
            yield f"{lost.device} died with the broker, and apps still believe that it is online", b""
        if any(on and at > until and not any(death <= at for death in deaths) for at, on in told):
            yield f"{lost.device} died with the broker, and apps were told that it is back", b""


def stays_offline(world: MqttWorld) -> Iterator[Finding]:
    """[P5] A device that is gone for good, and that the hub has found to be offline, does not come back by
    what the broker has kept of it, also if the hub is started anew. A hub that has just started may have
    heard nothing from its broker yet."""
    starts = [at for at, who, what, _ in world.log.lines if (who, what) == (HUB, "starts")]
    for lost in world.mqtt_log.blackouts:
        told = [(at, on) for at, device, on in world.mqtt_log.presence if device == lost.device]
        gone = next((at for at, on in told if at > lost.at and not on), None)
        if gone is None or any(gone - NOTICED <= at <= gone for at in starts):
            continue
        if any(on and at > gone for at, on in told):
            yield f"{lost.device} is gone for good, and apps were told that it is back", b""


def online_reported(world: MqttWorld) -> Iterator[Finding]:
    """[P5] Apps are told soon that a device is online, also if it reported while the hub subscribed."""
    until = FORGOTTEN + SEEN_WITHIN
    for name in world.mqtt_log.back:
        told = [online for at, device, online in world.mqtt_log.presence if device == name and at <= until]
        if not told or not told[-1]:
            yield f"{name} came back while the hub subscribed, and apps believe that it is offline", b""


MQTT_CHECKERS: Final[tuple[Checker[MqttWorld], ...]] = (
    *GATEWAY_CHECKERS,
    hub_still_answers,
    foreign_subscriptions_removed,
    offline_reported,
    stays_offline,
    online_reported,
)
