"""Shows devices of a hub in Home Assistant, and passes its commands on to them.

The laws. The bridge is an app of the hub and a client of Home Assistant's MQTT broker, and keeps nothing: a
command is acknowledged to the broker (PUBACK) when the hub has stored or refused it, not before, so after a
crash it comes again, with the same id, and the hub answers it with what it knows. A state is published when
the device has reported it, or has confirmed a command. A command that failed changes no state; one whose end
is not known makes the state unknown, until a late answer settles it. The end of a repeated command changes no
state that was learned after the command was given. A command that the broker has retained is not carried out:
it would come again at every start. How the last command of an entity ended, and why, are attributes of the
entity. Only devices that are declared are asked for their state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from duly.clients.app import Ack, App, Push, SentCommand
from duly.clients.websocket_link import Access
from duly.core.lifecycle import State
from duly.core.units import MS
from duly.errors import DulyError, Refused, SenderError, Stopped
from duly.integrations.home_assistant.entities import (
    EXPIRES,
    OFFLINE,
    ONLINE,
    EntityDeclaration,
    HomeAssistantCommand,
    Topics,
    check_entities,
    device_names,
    discovery,
    read_command,
)
from duly.integrations.home_assistant.lights import LightWish
from duly.runtime.clock import SystemClock
from duly.runtime.tasks import Supervisor
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink, Will
from duly.wire import frames
from duly.wire.frames import Frame
from duly.wire.session import Acknowledge

QUERY: Final = "query"
"""The command that asks a device for its state; it changes nothing."""

CLIENT_ID: Final = "duly-home-assistant"
"""The client id at brokers where the bridge has no name of its own."""


class CommandReport(Struct, frozen=True):
    """How a command of Home Assistant ended."""

    entity: EntityDeclaration
    command: str
    id: str
    outcome: str
    reason: str = ""


class HubApp(App):
    """An app that says when it is connected to its hub, and when it is not."""

    def __init__(self, url: str, token: str, *, access: Access | None = None) -> None:
        super().__init__(url, token, access=access)
        self.on_connection: Callable[[bool], None] = lambda _: None

    def _up(self, welcome: Frame) -> None:
        super()._up(welcome)
        self.on_connection(True)

    def _down(self) -> None:
        super()._down()
        self.on_connection(False)


class HomeAssistantBridge:
    """The entities of one hub at one broker, from `start` until `stop`. `reported` is called with the outcome
    of each command, `online` at every connection to the broker."""

    def __init__(
        self,
        app: HubApp,
        broker: str,
        entities: Sequence[EntityDeclaration],
        *,
        topics: Topics | None = None,
        expires: float = EXPIRES,
        reported: Callable[[CommandReport], None] = lambda _: None,
        online: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._entities = check_entities(entities)
        self._topics = topics or Topics()
        self._expires = expires
        self._reported = reported
        self._online = online
        self._clock = SystemClock()
        self._commanded = {
            self._topics.commands(entity): entity for entity in entities if entity.kind != "sensor"
        }
        self._values: dict[str, object] = {}
        """the value of each entity's field, by its object id; absent: not known"""
        self._lights: dict[str, LightWish] = {}
        """brightness and colours of each light, as far as they are known"""
        self._learned: dict[str, int] = {}
        """when the value of each entity, or that it is not known, was learned"""
        self._devices = frozenset(entity.device for entity in entities)
        self._shown: dict[str, str] = {}
        """what was published at each topic, and is retained"""
        self._tasks = Supervisor()
        self.link = self._link_to(broker)
        """the connection to the broker"""

    def _link_to(self, broker: str) -> MqttLink:
        address = BrokerAddress.parse(broker)
        if not address.client_id:
            address = msgspec.structs.replace(address, client_id=CLIENT_ID)
        return MqttLink(
            address,
            self._arrived,
            subscriptions=[*self._commanded, self._topics.birth],
            on_retained=self._retained,
            will=lambda: Will(self._topics.availability, OFFLINE.encode()),
            on_connect=lambda _: self._broker_connected(),
            tasks=self._tasks,
        )

    async def start(self) -> None:
        """Connect to the hub, and then to the broker; raises if the hub refuses the token."""
        await self._app.start()
        await self._app.ready()
        self._app.on_connection = self._hub_connected
        self._hub_connected(self._app.connected)
        await self.link.start()
        self._tasks.spawn("pushes for Home Assistant", self._read_pushes)

    async def stop(self) -> None:
        """Say that the entities are unavailable, and disconnect."""
        if self.link.up:
            with suppress(DulyError, TimeoutError):
                async with asyncio.timeout(1):
                    await self.link.publish(self._topics.availability, OFFLINE.encode(), retain=True)
        await self.link.stop()
        await self._app.stop()
        await self._tasks.stop()

    # ── what Home Assistant sees ─────────────────────────────────────────────────────────────────

    def _broker_connected(self) -> None:
        self._show_all()
        self._online()

    def _show_all(self) -> None:
        """Publish everything: the broker or Home Assistant has just started, or may have missed something."""
        self._shown.clear()
        names = device_names(self._entities)
        for entity in self._entities:
            described = discovery(entity, self._topics, names[entity.device])
            self._show(self._topics.config(entity), msgspec.json.encode(described).decode())
            self._show_state(entity)
        self._show_availability()

    def _show_availability(self) -> None:
        for device in {entity.device: None for entity in self._entities}:
            self._show(self._topics.online(device), ONLINE if device in self._app.online else OFFLINE)
        self._show(self._topics.availability, ONLINE if self._app.connected else OFFLINE)

    def _show_state(self, entity: EntityDeclaration) -> None:
        value, light = self._values.get(entity.object_id), self._lights.get(entity.object_id)
        self._show(self._topics.state(entity), entity.state_of(value, light))

    def _show(self, topic: str, text: str) -> None:
        """Publish a text that the broker retains, unless it has it already."""
        if self._shown.get(topic) == text:
            return
        self._shown[topic] = text
        self.link.post(
            topic, text.encode(), retain=True, done=lambda problem: self._confirmed(topic, problem)
        )

    def _confirmed(self, topic: str, problem: DulyError | None) -> None:
        if problem is not None:
            self._shown.pop(topic, None)  # the next connection publishes it again

    # ── the hub ──────────────────────────────────────────────────────────────────────────────────

    def _hub_connected(self, connected: bool) -> None:
        self._show(self._topics.availability, ONLINE if connected else OFFLINE)
        if connected:
            self._show_availability()
            for device in {entity.device: None for entity in self._entities}:
                self._ask(device)

    def _ask(self, device: str) -> None:
        """Ask a device for its state. One that knows no such command is known by its reports alone."""
        if device in self._devices and device in self._app.online:
            self._tasks.do("state of a device", self._query(device), expected=(SenderError, Stopped))

    async def _query(self, device: str) -> None:
        ack = await self._app.send(device, QUERY, expires=self._expires)
        if ack.done:
            self._learn(device, ack.data)

    async def _read_pushes(self) -> None:
        async for news in self._app.pushes():
            if isinstance(news, Push):
                if news.type == frames.DEVICE_STATUS:
                    self._show_availability()
                    self._ask(news.device)
                else:
                    self._learn(news.device, news.data)

    def _learn(self, device: str, data: object) -> None:
        """Take what a device says of itself as its state."""
        if isinstance(data, Mapping):
            for entity in self._entities:
                if entity.device == device and self._set(entity, data):
                    self._show_state(entity)

    def _set(self, entity: EntityDeclaration, data: Mapping[str, object]) -> bool:
        """Take what data says of an entity; returns whether it says something."""
        if not data.keys() & {entity.read_from, *entity.light.names}:
            return False
        known = self._lights.get(entity.object_id, LightWish())
        self._lights[entity.object_id] = entity.light.learned(known, data)
        if entity.read_from in data:
            self._values[entity.object_id] = data[entity.read_from]
        self._learned[entity.object_id] = self._clock.now()
        return True

    def _forget(self, entity: EntityDeclaration, data: Mapping[str, object]) -> None:
        """Forget the state that a command would have set."""
        self._values.pop(entity.object_id, None)
        known = self._lights.get(entity.object_id, LightWish())
        self._lights[entity.object_id] = entity.light.forgotten(known, data)
        self._learned[entity.object_id] = self._clock.now()

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        entity = self._commanded.get(topic)
        if entity is not None:
            self._tasks.do("command of Home Assistant", self._carry_out(entity, payload, ack))
            return
        if topic == self._topics.birth and payload == ONLINE.encode():
            self._show_all()
        ack()

    def _retained(self, topic: str) -> None:
        """Refuse a command that the broker keeps; at the other topic Home Assistant says that it starts."""
        entity = self._commanded.get(topic)
        if entity is None:
            self._show_all()
        else:
            why = f"the broker has retained a command at {topic}; send commands without retain, and clear it"
            self._report(CommandReport(entity, "", "", "retained", why))

    async def _carry_out(self, entity: EntityDeclaration, payload: bytes, ack: Acknowledge) -> None:
        if not payload:  # a retained message was cleared
            ack()
            return
        try:
            command = read_command(entity, payload, self._clock.now(), self._expires)
        except SenderError as problem:
            self._report(CommandReport(entity, "", "", problem.word, str(problem)))
            self._show_state(entity)
            ack()
            return
        try:
            sent = await self._app.post(
                entity.device,
                entity.command_type,
                command.data,
                id=command.id,
                expires_at=command.expires_at,
            )
            await self._follow(entity, command, sent, ack)
        except Refused as problem:
            self._report(CommandReport(entity, command.word, command.id, problem.error, str(problem)))
            self._show_state(entity)
            ack()
        except Stopped:
            return  # it is not acknowledged, so it comes again

    async def _follow(
        self, entity: EntityDeclaration, command: HomeAssistantCommand, sent: SentCommand, ack: Acknowledge
    ) -> None:
        """Show what becomes of a command until its end is certain."""
        await sent.accepted()
        working = entity.working(command.word)
        if working is not None and not sent.is_repeat:
            self._show(self._topics.state(entity), working)
        ack()
        ended = await sent.ended()
        old = sent.is_repeat and self._learned.get(entity.object_id, 0) >= command.given_at
        self._ended(entity, command, ended, old)
        if ended.state == State.UNKNOWN.word:
            self._ended(entity, command, await sent.settled())

    def _ended(
        self, entity: EntityDeclaration, command: HomeAssistantCommand, ended: Ack, old: bool = False
    ) -> None:
        """Show how a command ended; one that is `old` says nothing of the present state."""
        if ended.done and not old:
            self._set(entity, command.data)
            self._learn(entity.device, ended.data)
        elif ended.state == State.UNKNOWN.word and not old:
            self._forget(entity, command.data)
        self._show_state(entity)
        self._report(CommandReport(entity, command.word, command.id, ended.state, ended.detail))

    def _report(self, report: CommandReport) -> None:
        at = self._clock.now() // MS
        attributes: dict[str, object] = {
            "last_command": report.command,
            "outcome": report.outcome,
            "reason": report.reason,
            "command_id": report.id,
            "ended_at_ms": at,
        }
        self._show(self._topics.attributes(report.entity), msgspec.json.encode(attributes).decode())
        self._reported(report)
