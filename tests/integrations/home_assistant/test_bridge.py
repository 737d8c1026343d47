"""The bridge to Home Assistant between a real hub and a real Mosquitto: what is retained at the broker, and
what becomes of commands, also if the bridge is killed before it has acknowledged one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from duly.clients.device import Command, Device
from duly.errors import DeviceError
from duly.identity.accounts import Role
from duly.integrations.home_assistant.bridge import CommandReport, HomeAssistantBridge, HubApp
from duly.integrations.home_assistant.entities import EntityDeclaration, Topics
from duly.transports.mqtt.link import MqttLink
from duly.wire.session import Acknowledge
from tests import servers
from tests.guard import GUARD
from tests.local_hub import LocalHub

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()


class Home:
    """A hub with a lock, and the side of Home Assistant at the broker: what is retained, and commands."""

    def __init__(self, local: LocalHub, broker: servers.Mosquitto) -> None:
        self.local = local
        self.broker = broker
        self.prefix = f"duly{next(_numbers)}"
        self.seen: dict[str, list[str]] = {}
        self.opened: list[bool] = []
        self.reports: list[CommandReport] = []
        self.bridges: list[HomeAssistantBridge] = []

    async def __aenter__(self) -> Home:
        await self.add_device("lock")
        self.assistant = MqttLink(
            self.broker.url(self.prefix + "-ha"),
            self._hear,
            subscriptions=[f"{self.prefix}/#", f"{self.prefix}-discovery/#"],
        )
        await self.assistant.start()
        await self.assistant.connected(GUARD)
        return self

    async def __aexit__(self, *_: object) -> None:
        for bridge in self.bridges:
            await bridge.stop()
        await self.device.stop()
        await self.assistant.stop()

    async def add_device(self, name: str) -> None:
        name = self.lock = f"{name}{self.prefix}"
        await self.local.add(Role.DEVICE, name)
        await self.local.hub.accounts.grant("home", name)
        self.device = Device(self.local.url, self.local.tokens[name])
        state = {"open": False}

        @self.device.on("lock_control", effect="at_most_once")
        async def control(command: Command) -> Any:
            self.opened.append(command.data["open"])
            if len(self.opened) == 3:
                raise DeviceError(3, "the bolt is stuck")
            state.update(command.data)
            return dict(state)

        @self.device.on("query", effect="at_least_once")
        async def query(command: Command) -> Any:
            return dict(state)

        await self.device.start()
        await self.device.ready()

    def _hear(self, topic: str, payload: bytes, old: bool, ack: Acknowledge) -> None:
        self.seen.setdefault(topic.partition("/")[2], []).append(payload.decode())
        ack()

    async def bridge(self, *more: EntityDeclaration) -> HomeAssistantBridge:
        """A bridge at the same broker and hub; two of one session replace each other."""
        lock = EntityDeclaration(device=self.lock, kind="lock", name="Front door")
        battery = EntityDeclaration(device=self.lock, kind="sensor", field="battery", unit="%")
        bridge = HomeAssistantBridge(
            HubApp(self.local.url, self.local.tokens["home"]),
            self.broker.url(self.prefix),
            [lock, battery, *more],
            topics=Topics(self.prefix, f"{self.prefix}-discovery"),
            reported=self.reports.append,
        )
        self.bridges.append(bridge)
        await bridge.start()
        await bridge.link.connected(GUARD)
        return bridge

    async def shows(self, topic: str, *texts: str) -> None:
        """Until the newest texts at a topic are these."""
        await until(lambda: tuple(self.seen.get(topic, [])[-len(texts) :]) == texts)

    def attributes(self, word: str) -> object:
        """An attribute of the lock, as the broker retains it."""
        return json.loads(self.seen[f"{self.lock}_lock/attributes"][-1])[word]

    async def command(
        self, word: str, *, ago: float = 0.0, payload: bytes = b"", kind: str = "lock", **more: object
    ) -> bytes:
        sent = payload or json.dumps({"command": word, "at": time.time() - ago, **more}).encode()
        await self.assistant.publish(f"{self.prefix}/{self.lock}_{kind}/set", sent)
        return sent

    async def outcomes(self, count: int) -> list[str]:
        await until(lambda: len(self.reports) >= count)
        return [report.outcome for report in self.reports]


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(GUARD):
        while not true():
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path_factory.mktemp("ha") / "hub")
    await it.start()
    await it.add(Role.APP, "home")
    yield it
    await it.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def home(local: LocalHub, mosquitto_server: servers.Mosquitto) -> AsyncIterator[Home]:
    async with Home(local, mosquitto_server) as home:
        yield home


async def test_an_entity_appears_with_availability_and_state(home: Home) -> None:
    bridge = await home.bridge()
    await home.shows("availability", "online")
    await home.shows(f"{home.lock}/availability", "online")
    await home.shows(f"{home.lock}_lock/state", "LOCKED")
    described = json.loads(home.seen[f"lock/{home.lock}_lock/config"][-1])
    assert described["device"]["name"] == "Front door"
    await home.device.push("status_report", {"battery": 81, "open": True})
    await home.shows(f"{home.lock}_battery/state", "81")
    await home.shows(f"{home.lock}_lock/state", "UNLOCKED")
    await home.device.stop()
    await home.shows(f"{home.lock}/availability", "offline")
    # Home Assistant has started anew, and is told everything again.
    home.seen.clear()
    await home.assistant.publish(f"{home.prefix}-discovery/status", b"online")
    await home.shows(f"{home.lock}_battery/state", "81")
    await home.shows(f"{home.lock}/availability", "offline")
    await bridge.stop()
    await home.shows("availability", "offline")


async def test_commands_and_what_becomes_of_them(home: Home) -> None:
    await home.bridge()
    state = f"{home.lock}_lock/state"
    await home.shows(state, "LOCKED")
    unlock = await home.command("UNLOCK")
    await home.shows(state, "UNLOCKING", "UNLOCKED")
    await home.command("", payload=unlock)  # the broker delivers it twice
    assert await home.outcomes(2) == ["done", "done"]
    assert home.opened == [True], "the same command is not carried out again"
    await home.command("LOCK")
    await home.shows(state, "LOCKING", "LOCKED")
    await home.command("UNLOCK")  # the bolt is stuck: the third command fails
    assert (await home.outcomes(4))[-1] == "failed"
    await home.shows(state, "UNLOCKING", "LOCKED")
    await until(lambda: home.attributes("outcome") == "failed")
    assert (home.attributes("last_command"), home.attributes("reason")) == ("UNLOCK", "the bolt is stuck")
    await home.command("UNLOCK", ago=60)
    await home.command("", payload=b"UNLOCK")
    assert (await home.outcomes(6))[-2:] == ["expired", "malformed"]
    await home.device.stop()
    await home.shows(f"{home.lock}/availability", "offline")
    await home.command("UNLOCK")
    assert (await home.outcomes(7))[-1] == "offline"
    assert home.opened == [True, False, True]


async def test_a_light_is_dimmed_and_coloured(home: Home) -> None:
    told: list[Any] = []

    @home.device.on("dev_control", effect="at_most_once")
    async def control(command: Command) -> None:
        told.append(command.data)

    light = EntityDeclaration(
        device=home.lock,
        kind="light",
        brightness="level",
        brightness_max=100,
        color="rgb",
        color_temp="kelvin",
    )
    await home.bridge(light)
    state = f"{home.lock}_light/state"

    async def shows(**expected: object) -> None:
        await until(lambda: state in home.seen and json.loads(home.seen[state][-1]) == expected)

    await shows(state="None", brightness=0, color=None, color_temp=None)
    dim = await home.command("ON", kind="light", brightness=128)
    await shows(state="on", brightness=128, color=None, color_temp=None)
    await home.command("ON", kind="light", color=[255, 0, 10])
    await shows(state="on", brightness=128, color=[255, 0, 10], color_temp=None)
    await home.command("ON", kind="light", color_temp=250)
    await shows(state="on", brightness=128, color=None, color_temp=250)
    await home.device.push("status_report", {"level": 20})
    await shows(state="on", brightness=51, color=None, color_temp=250)
    await home.command("", kind="light", payload=dim)  # the broker delivers it twice
    await home.command("ON", kind="light", brightness=999)
    assert await home.outcomes(5) == ["done", "done", "done", "done", "malformed"]
    await shows(state="on", brightness=51, color=None, color_temp=250)
    await home.command("OFF", kind="light")
    await shows(state="off", brightness=51, color=None, color_temp=250)
    assert told == [
        {"on": True, "level": 50},
        {"on": True, "rgb": [255, 0, 10]},
        {"on": True, "kelvin": 4000},
        {"on": False},
    ]


async def test_a_repeated_command_does_not_bring_an_old_state_back(home: Home) -> None:
    await home.bridge()
    state = f"{home.lock}_lock/state"
    await home.shows(state, "LOCKED")
    unlock = await home.command("UNLOCK")
    await home.shows(state, "UNLOCKED")
    await home.command("LOCK")
    await home.shows(state, "LOCKED")
    seen = len(home.seen[state])
    await home.command("", payload=unlock)
    assert await home.outcomes(3) == ["done", "done", "done"]
    await until(lambda: home.attributes("last_command") == "UNLOCK")
    assert set(home.seen[state][seen:]) <= {"LOCKED"}
    assert home.opened == [True, False]


async def test_a_retained_command_is_not_carried_out(home: Home) -> None:
    topic = f"{home.prefix}/{home.lock}_lock/set"
    retained = json.dumps({"command": "UNLOCK", "at": time.time()}).encode()
    await home.assistant.publish(topic, retained, retain=True)
    await home.bridge()
    assert await home.outcomes(1) == ["retained"]
    await until(lambda: f"{home.lock}_lock/attributes" in home.seen)
    assert home.attributes("outcome") == "retained"
    await home.command("LOCK")
    assert await home.outcomes(2) == ["retained", "done"], "one that is sent now is"
    assert home.opened == [False]
    await home.assistant.publish(topic, b"", retain=True)


async def test_a_command_that_the_broker_retains_while_the_bridge_is_connected_is_not_carried_out(
    home: Home,
) -> None:
    topic = f"{home.prefix}/{home.lock}_lock/set"
    await home.bridge()
    await home.shows(f"{home.lock}_lock/state", "LOCKED")
    retained = json.dumps({"command": "UNLOCK", "at": time.time()}).encode()
    await home.assistant.publish(topic, retained, retain=True)
    assert await home.outcomes(1) == ["retained"]
    await home.assistant.publish(topic, b"", retain=True)
    await home.command("LOCK")
    assert await home.outcomes(2) == ["retained", "done"], "clearing it is no command"
    assert home.opened == [False]


async def test_only_declared_devices_are_asked_for_their_state(home: Home) -> None:
    await home.bridge()
    await home.shows(f"{home.lock}_lock/state", "LOCKED")
    first, lock = home.device, home.lock
    await home.add_device("undeclared")
    try:
        await home.device.push("status_report", {"open": True})
        home.lock = lock
        await first.stop()
        await home.shows(f"{lock}/availability", "offline")
        records = (await home.local.hub.ledger.messages(limit=1_000)).records
        asked = [one.message.recipient for one in records if one.message.kind == "query"]
        assert lock in asked
        assert [device for device in asked if device.startswith("undeclared")] == []
    finally:
        await home.device.stop()
        home.device = first


async def test_a_command_is_not_lost_with_the_bridge_and_not_carried_out_twice(home: Home) -> None:
    """The bridge dies when the lock has opened and before the broker has its PUBACK."""
    first = await home.bridge()
    await home.shows(f"{home.lock}_lock/state", "LOCKED")
    carry_out = first._carry_out

    async def without_ack(entity: EntityDeclaration, payload: bytes, ack: Acknowledge) -> None:
        await carry_out(entity, payload, lambda: None)

    first._carry_out = without_ack  # type: ignore[method-assign]  # as if killed before the PUBACK
    await home.command("UNLOCK")
    assert await home.outcomes(1) == ["done"]
    assert home.opened == [True]
    await home.bridge()
    assert await home.outcomes(2) == ["done", "done"]
    assert home.reports[0].id == home.reports[1].id
    assert home.opened == [True], "the second bridge learns how it ended"
    await home.shows(f"{home.lock}_lock/state", "UNLOCKED")


async def test_entities_are_unavailable_while_the_hub_is(home: Home) -> None:
    await home.bridge()
    await home.shows("availability", "online")
    await home.local.stop()
    await home.shows("availability", "offline")
    await home.local.start()
    await home.shows("availability", "online")
    await until(lambda: home.local.hub.gateway.online(home.lock))
    await home.command("UNLOCK")
    assert await home.outcomes(1) == ["done"]
