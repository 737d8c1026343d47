"""MQTT devices that misbehave, met with clients that share no code with duly: nobody answers or commands in
another's name, takes another's session, or makes the hub deaf."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import paho.mqtt.client as paho
import pytest
from msgspec.structs import replace
from paho.mqtt.enums import CallbackAPIVersion

from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.core.signing import Keyring
from duly.identity.accounts import Principal, Role
from duly.identity.keyring import new_key
from duly.server.hub import Hub
from duly.server.mqtt_service import MqttService
from duly.settings import Settings
from tests.guard import GUARD, LIMIT
from tests.servers import Mosquitto
from tests.stopwatch import MachineStopwatch


class HubWithBroker:
    """A hub with its own broker, an app, and MQTT devices made with paho."""

    def __init__(self, folder: Path, outside: str = "", **settings: Any) -> None:
        self.folder = folder
        self.outside = outside
        self.settings = settings
        self.tokens: dict[str, str] = {}
        self.clients: list[paho.Client] = []
        self.port = 0

    async def start(self) -> None:
        settings = Settings(data=str(self.folder), port=0, mqtt=self.outside, **self.settings)
        self.hub = Hub(settings if self.outside else replace(settings, mqtt_port=self.port))
        await self.hub.start()
        self.port = int(self.hub.mqtt_url.rsplit(":", 1)[1].partition("?")[0])

    async def add(self, role: Role, *names: str, **more: Any) -> None:
        for name in names:
            self.tokens[name] = await self.hub.accounts.add(role, name, **more)
            if role is Role.DEVICE:
                await self.hub.accounts.grant("phone", name)

    @property
    def mqtt(self) -> MqttService:
        """The part of the hub that speaks MQTT."""
        assert self.hub.mqtt is not None
        return self.hub.mqtt

    async def client(self, name: str, client_id: str = "", **more: Any) -> paho.Client:
        """Connected, or refused: `is_connected` says which."""
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=client_id or name, clean_session=False, **more
        )
        client.username_pw_set(name, self.tokens[name])
        client.reconnect_delay_set(1, 1)  # else it waits twice as long each time, and 16 s are soon reached

        def connected(*_: object) -> None:
            loop.call_soon_threadsafe(answered.set)

        client.on_connect = connected
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        self.clients.append(client)
        async with asyncio.timeout(GUARD):
            await answered.wait()
        return client

    async def device(self, name: str, answer: Callable[[paho.Client, dict[str, Any]], None]) -> paho.Client:
        """A device as firmware would write it."""
        client = await self.client(name)
        client.on_message = lambda c, _, m: answer(c, json.loads(m.payload))

        def begin(*_: object) -> None:
            client.subscribe(f"nodes/{name}/pending", 1)
            tell(client, f"nodes/{name}/status", {"time": int(time.time()), "online": True}, retain=True)

        begin()
        client.on_connect = begin  # at every connection, as the rules of a device ask
        await self.until(lambda: self.hub.gateway.online(name))
        return client

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD):
            while not true():
                await asyncio.sleep(0.01)

    async def why(self, *words: str) -> str:
        """Until a refusal with these words is recorded; its scope."""
        async with asyncio.timeout(GUARD):
            while True:
                await self.hub.activity.settle()
                for refusal in await self.hub.ledger.refusals():
                    said = f"{refusal.scope} {refusal.id} {refusal.word} {refusal.reason}"
                    if all(word in said for word in words):
                        return refusal.scope
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for client in self.clients:
            client.disconnect()
            await asyncio.to_thread(client.loop_stop)
        await self.hub.stop()


def tell(client: paho.Client, topic: str, value: object, *, retain: bool = False) -> None:
    client.publish(topic, value if isinstance(value, bytes) else json.dumps(value), 1, retain)


def done(client: paho.Client, task: dict[str, Any]) -> None:
    tell(client, "nodes/hub/ack", {"msg_id": task["msg_id"]})
    tell(client, "nodes/hub/complete", {"msg_id": task["msg_id"], "value": {"by": "the device itself"}})


class Open(Protocol):
    """Start a hub with these settings, an app and three devices."""

    async def __call__(self, **settings: Any) -> HubWithBroker: ...


@pytest.fixture
async def open_local(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as closing:

        async def make(**settings: Any) -> HubWithBroker:
            it = HubWithBroker(tmp_path / "hub", **settings)
            await it.start()
            closing.push_async_callback(it.stop)
            await it.add(Role.APP, "phone")
            await it.add(Role.DEVICE, "lock", "lamp", "thief")
            return it

        yield make


@pytest.fixture
async def local(open_local: Open) -> HubWithBroker:
    return await open_local()


@pytest.mark.parametrize("kind", ["ack", "complete", "failed"])
async def test_a_device_cannot_end_the_command_of_another(local: HubWithBroker, kind: str) -> None:
    """Not by its seq_id, which can be guessed, and not with a tag of its own."""
    own: list[dict[str, Any]] = []
    thief = await local.device("thief", lambda _, task: own.append(task))
    got: list[dict[str, Any]] = []
    lock = await local.device("lock", lambda _, task: got.append(task))
    async with App(local.hub.url, local.tokens["phone"]) as app:
        mine = asyncio.create_task(app.send("thief", "lock_control", {}))
        theirs = asyncio.create_task(app.send("lock", "lock_control", {}))
        await local.until(lambda: bool(own) and bool(got))
        seq_id, tag = got[0]["msg_id"].split(":")[1], own[0]["msg_id"].split(":")[2]
        for msg_id in (f"phone:{seq_id}", f"phone:{seq_id}:{tag}", f"phone:{seq_id}:{'A' * 24}"):
            tell(thief, f"nodes/hub/{kind}", {"msg_id": msg_id, "value": {"by": "the thief"}})
        assert await local.why("forged", seq_id) == "phone"
        done(lock, got[0])
        ack = await theirs
        assert (ack.state, ack.data) == ("done", {"by": "the device itself"})
        done(thief, own[0])
        assert (await mine).state == "done"


async def test_a_device_cannot_end_the_command_of_a_websocket_device_nor_one_that_waits(
    local: HubWithBroker,
) -> None:
    """The tag of a command that was never sent over MQTT is known to nobody."""
    thief = await local.client("thief")
    work = asyncio.Event()
    lock = Device(local.hub.url, local.tokens["lock"])

    @lock.on("lock_control")
    async def lock_control(command: Command) -> str:
        await work.wait()
        return "the device itself"

    seq_id = f"{int(time.time() * 1000)}_0"
    async with App(local.hub.url, local.tokens["phone"]) as app:
        waiting = asyncio.create_task(app.send("lock", "lock_control", {}, queue=True, id=seq_id))
        await local.until(lambda: local.hub.gateway.answers.is_under_way(key("phone", seq_id)))
        for tag in ("", ":" + "A" * 24):
            tell(thief, "nodes/hub/complete", {"msg_id": f"phone:{seq_id}{tag}", "value": "the thief"})
        await local.why("forged", seq_id)
        async with lock:
            tell(thief, "nodes/hub/failed", {"msg_id": f"phone:{seq_id}", "error": "the thief"})
            tell(thief, "nodes/hub/failed", {"msg_id": "phone:1_1", "error": "heard last"})
            await local.why("forged", "1_1")
            work.set()
            ack = await waiting
            assert (ack.state, ack.data) == ("done", "the device itself")


def key(app: str, seq_id: str) -> bytes:
    from duly.core.messages import key_of

    return key_of(app, seq_id)


async def test_the_same_command_has_the_same_msg_id_after_a_restart(local: HubWithBroker) -> None:
    """A device that remembers what it did recognises the repeat."""
    got: list[str] = []
    await local.device("lock", lambda _, task: got.append(task["msg_id"]))
    async with App(local.hub.url, local.tokens["phone"]) as app:
        sending = asyncio.create_task(app.send("lock", "lock_control", {}, queue=True))
        await local.until(lambda: bool(got))
        await local.hub.stop()
        await local.start()
        await local.until(lambda: len(got) >= 2)
        sending.cancel()
    assert len(set(got)) == 1


async def test_a_device_cannot_command_another_and_the_refused_publish_is_known(local: HubWithBroker) -> None:
    got: list[dict[str, Any]] = []
    await local.device("lock", lambda _, task: got.append(task))
    thief = await local.client("thief")
    task = {
        "sender": "hub",
        "receiver": "lock",
        "msg_id": "phone:1_1",
        "action": "lock_control",
        "payload": {},
    }
    tell(thief, "nodes/lock/pending", task)
    assert await local.why("nodes/lock/pending", "not_allowed", "thief may not publish") == "thief"
    tell(thief, "nodes/lock/status", {"time": 1, "online": False}, retain=True)
    assert await local.why("nodes/lock/status", "not_allowed") == "thief"
    assert got == []
    assert local.hub.gateway.online("lock")


@pytest.mark.parametrize("kind", ["pending", "ack", "complete", "failed"])
async def test_a_node_cannot_write_to_the_hub_and_the_refused_publish_is_known(
    local: HubWithBroker, kind: str
) -> None:
    """The broker acknowledges it and drops it; without the record nobody would know why nothing happened."""
    await local.add(Role.NODE, "far")
    far = await local.client("far")
    tell(far, f"nodes/hub/{kind}", {"msg_id": "m-1"})
    assert await local.why(f"nodes/hub/{kind}", "not_allowed", "far may not publish") == "far"


async def test_what_a_node_publishes_for_a_device_is_refused_and_known(
    local: HubWithBroker,
) -> None:
    """Only the hub commands devices; the sender of a task that never arrives finds out why."""
    await local.add(Role.NODE, "far")
    far = await local.client("far")
    tell(far, "nodes/lock/pending", {"msg_id": "m-1", "sender": "far", "action": "open", "time": 1})
    assert await local.why("nodes/lock/pending", "not_allowed", "far may not publish") == "far"


async def test_a_refused_subscription_is_known(local: HubWithBroker) -> None:
    thief = await local.client("thief")
    thief.subscribe("nodes/lock/pending", 1)
    assert await local.why("nodes/lock/pending", "not_allowed", "thief may not subscribe") == "thief"
    found = await local.hub.ledger.refusals()
    (reason,) = [one.reason for one in found if one.id == "nodes/lock/pending"]
    assert reason == "thief may not subscribe to nodes/lock/pending; the broker has refused it"


async def test_a_login_with_a_wrong_token_is_known_and_counted(local: HubWithBroker) -> None:
    local.tokens["thief"] = "wrong"
    assert not (await local.client("thief")).is_connected()
    assert await local.why("mqtt connect", "not_authenticated", "is not the token of 'thief'")
    await local.hub.metrics.measure()
    assert local.hub.telemetry.auth_failures.value == 1


async def test_no_client_gets_into_the_hubs_session_nor_into_anothers(local: HubWithBroker) -> None:
    """With its client id a stranger could throw its owner out, or plant a subscription."""
    lock = await local.device("lock", done)
    thief = await local.client("thief")
    for stolen in ("hub", local.mqtt.links["answers"].address.client_id, "lock", "lock-12345678"):
        client = await local.client("thief", stolen)
        assert not client.is_connected()
        client.disconnect()
    assert await local.why("mqtt connect", "not_allowed", "belongs to lock") == "thief"
    async with App(local.hub.url, local.tokens["phone"]) as app:
        for _ in range(5):
            assert (await app.send("lock", "lock_control", {})).done
    assert lock.is_connected()
    assert thief.is_connected()


async def test_a_client_id_that_is_no_name_stays_with_its_account_after_a_restart(
    local: HubWithBroker,
) -> None:
    """The broker keeps sessions through restarts, so whose they are is kept as well."""
    lock = await local.client("lock", "esp32-0042")
    assert lock.is_connected()
    lock.disconnect()
    await local.hub.stop()
    await local.start()
    thief = await local.client("thief", "esp32-0042")
    assert not thief.is_connected()
    assert await local.why("mqtt connect", "not_allowed", "belongs to lock") == "thief"
    thief.disconnect()
    assert (await local.client("lock", "esp32-0042")).is_connected()


async def test_what_was_planted_in_the_hubs_session_is_taken_out_and_the_hub_hears_on(
    tmp_path: Path, mosquitto_server: Mosquitto
) -> None:
    """At a broker that does not bind client ids to users, under an id that a stranger knows."""
    local = HubWithBroker(tmp_path / "hub", f"mqtt://hub:x@127.0.0.1:{mosquitto_server.port}?client_id=known")
    await local.start()
    try:
        await local.add(Role.APP, "phone")
        await local.add(Role.DEVICE, "lock", "thief")
        await local.hub.stop()
        planting = await local.client("thief", "known")
        planting.subscribe([("nodes/+/pending", 1), ("other/#", 1)])
        await asyncio.sleep(0.2)
        planting.disconnect()
        await local.start()
        await local.device("lock", done)
        thief = await local.client("thief")
        task = {"sender": "x", "receiver": "hub", "msg_id": "1", "action": "x", "time": 1, "exp": 9999999999}
        for topic in ("nodes/hub/pending", "nodes/thief/pending", "other/x"):
            tell(thief, topic, task)
        await local.why("hub", "nodes/hub/pending", "did not subscribe")
        await local.why("hub", "other/x", "not a topic")
        async with App(local.hub.url, local.tokens["phone"]) as app:
            assert (await app.send("lock", "lock_control", {})).done
            before = local.mqtt.devices.refusals.total
            for topic in ("nodes/hub/pending", "nodes/thief/pending", "other/x"):
                tell(thief, topic, task)
            assert (await app.send("lock", "lock_control", {})).done
            assert local.mqtt.devices.refusals.total == before, "they are no longer subscribed to"
    finally:
        await local.stop()


MEANINGLESS = (
    b"", b"x", b"[]", b'{"msg_id":5}', b'{"msg_id":"a:b"}', b'{"msg_id":"\\ud800:1:x"}', b"\xff" * 99,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["ack", "complete", "failed", "status"])
async def test_no_message_ends_the_reading(local: HubWithBroker, kind: str) -> None:
    await local.device("lock", done)
    thief = await local.client("thief")
    async with App(local.hub.url, local.tokens["phone"]) as app:
        for payload in MEANINGLESS:
            for _ in range(3):
                tell(thief, f"nodes/{'thief' if kind == 'status' else 'hub'}/{kind}", payload)
            assert (await app.send("lock", "lock_control", {})).done, payload


async def test_a_bug_in_handling_one_message_does_not_end_the_reading(
    local: HubWithBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.device("lock", done)
    thief = await local.client("thief")

    async def broken(*_: object) -> None:
        raise AssertionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr("duly.apps.gateway.pushes.PushService.store_from_broker", broken)
        await local.device("lamp", done)
        lamp = local.clients[-1]
        tell(
            lamp,
            "nodes/lamp/status",
            {"time": 1, "online": True, "data": {"type": "event_report", "data": 1}},
        )
        await local.why("nodes/lamp/status", "internal", "a bug")
    async with App(local.hub.url, local.tokens["phone"]) as app:
        assert (await app.send("lock", "lock_control", {})).done
        assert (await app.send("lamp", "lock_control", {})).done
    assert thief.is_connected()


async def test_from_a_device_with_a_key_only_what_it_signed_counts(local: HubWithBroker) -> None:
    secret = new_key()
    await local.add(Role.DEVICE, "safe", key=secret.shown)
    naked = await local.client("safe")
    tell(naked, "nodes/safe/status", {"time": 1, "online": True})
    assert await local.why("nodes/safe/status", "unsigned") == "safe"
    assert not local.hub.gateway.online("safe")
    naked.disconnect()
    url = local.hub.mqtt_url.replace("://", f"://safe:{local.tokens['safe']}@")
    safe = Device(url, keys=Keyring("safe", own=secret))

    @safe.on("lock_control")
    async def lock_control(command: Command) -> dict[str, bool]:
        return {"open": True}

    async with safe, App(local.hub.url, local.tokens["phone"]) as app:
        await local.until(lambda: local.hub.gateway.online("safe"))
        ack = await app.send("safe", "lock_control", {})
        assert (ack.done, ack.data) == (True, {"open": True})


async def test_a_device_that_tells_too_much_makes_no_other_wait(local: HubWithBroker) -> None:
    await local.device("lock", done)
    thief = await local.client("thief")
    report = {"time": 1, "online": True, "data": {"type": "event_report", "data": 1}}
    for _ in range(3_000):
        tell(thief, "nodes/thief/status", report)
        tell(thief, "nodes/hub/complete", {"msg_id": "phone:1_1:" + "A" * 24})
    async with App(local.hub.url, local.tokens["phone"]) as app:
        took = MachineStopwatch()
        assert (await app.send("lock", "lock_control", {})).done
        assert took.seconds < 5, "not after 6,000 commits"
    await local.why("thief", "rate_limited", "too often", "times")
    await local.why("hub", "nodes/hub/complete", "forged", "times")
    assert len(await local.hub.ledger.refusals()) < 600, "counted, not recorded one by one"


async def test_a_retained_push_without_an_id_is_stored_once_whatever_restarts(local: HubWithBroker) -> None:
    lock = await local.client("lock")
    report = {"time": 1, "online": True, "data": {"type": "event_report", "data": 1}}
    tell(lock, "nodes/lock/status", report, retain=True)
    await local.until(lambda: local.hub.gateway.online("lock"))

    async def stored() -> int:
        entries = await local.hub.ledger.entries("push/lock", 0, 100)
        return sum(b"event_report" in entry.body for entry in entries)

    for _ in range(2):
        await local.hub.stop()
        await local.start()
        await local.until(lambda: local.hub.gateway.online("lock"))
        await asyncio.sleep(0.2)
        assert await stored() == 1
    lock = await local.client("lock")
    for n in (2, 3):  # what is said again by the device itself is news
        tell(lock, "nodes/lock/status", report)
        async with asyncio.timeout(GUARD):
            while await stored() < n:
                await asyncio.sleep(0.02)


async def test_a_push_that_an_outside_broker_retains_is_stored_once_whatever_restarts(
    tmp_path: Path, mosquitto_server: Mosquitto
) -> None:
    local = HubWithBroker(tmp_path / "hub", f"mqtt://hub:x@127.0.0.1:{mosquitto_server.port}")
    await local.start()
    await local.add(Role.APP, "phone")
    await local.add(Role.DEVICE, "bell")
    bell = await local.client("bell")

    def report(data: int) -> None:
        status = {"time": 1, "online": True, "data": {"type": "event_report", "data": data}}
        tell(bell, "nodes/bell/status", status, retain=True)

    async def stored() -> list[object]:
        entries = await local.hub.ledger.entries("push/bell", 0, 100)
        pushes = [json.loads(entry.body) for entry in entries]
        return [push["data"] for push in pushes if push["type"] == "event_report"]

    try:
        report(1)
        await local.until(lambda: local.hub.gateway.online("bell"))
        for n in (2, 3):
            await local.hub.stop()
            await local.start()
            await local.until(lambda: local.hub.gateway.online("bell"))
            report(n)  # it comes after what the broker had retained
            async with asyncio.timeout(GUARD):
                while n not in (said := await stored()):
                    await asyncio.sleep(0.02)
            assert said == list(range(1, n + 1))
    finally:
        tell(bell, "nodes/bell/status", b"", retain=True)
        await local.stop()


async def test_a_device_that_floods_with_large_answers_goes_and_makes_no_other_wait(
    local: HubWithBroker,
) -> None:
    """About 5 MB a second, for as long as it may."""
    await local.device("lock", done)
    thief = await local.client("thief")
    sent = 0
    async with App(local.hub.url, local.tokens["phone"]) as app:
        assert (await app.send("lock", "lock_control", {})).done
        slowest, floods = 0.0, MachineStopwatch()
        while thief.is_connected() and floods.seconds < 15:
            for _ in range(500):
                sent += 1
                answer = {"msg_id": f"phone:1794831242336_{sent}:{'A' * 24}", "value": "x" * 5_000}
                tell(thief, "nodes/hub/complete", answer)
            took = MachineStopwatch()
            assert (await app.send("lock", "lock_control", {})).done
            slowest = max(slowest, took.seconds)
            await asyncio.sleep(0.1)
    assert not thief.is_connected(), "it was hung up on"
    assert slowest < 3
    await local.why("thief", "flood", "rate_limited")


async def test_many_commands_to_one_device_are_no_flood(open_local: Open) -> None:
    """Two answers to each of 4,000 commands, faster than a device may publish that was given none. The hub
    waits for an answer as long as the test does: 500 at once take a slow machine longer than usual."""
    local = await open_local(patience=LIMIT)
    await local.device("lock", done)
    async with App(local.hub.url, local.tokens["phone"]) as app:
        for _ in range(8):
            sent = (app.send("lock", "lock_control", {}, order=False) for _ in range(500))
            acks = await asyncio.gather(*sent)
            assert all(ack.done for ack in acks)
    broker = local.mqtt.broker
    assert broker is not None
    assert broker.refused["flood"] == 0


async def test_a_node_is_no_device_and_logs_in_over_mqtt_alone(local: HubWithBroker) -> None:
    from duly.errors import DulyError

    await local.add(Role.NODE, "A", "B")
    heard: list[bytes] = []
    b = await local.client("B")
    b.on_message = lambda _, __, message: heard.append(bytes(message.payload))
    b.subscribe("nodes/B/pending", 1)
    a = await local.client("A")
    await asyncio.sleep(0.1)
    tell(a, "nodes/B/pending", b"hello")
    await local.until(lambda: heard == [b"hello"])
    with pytest.raises(DulyError, match="nodes connect over MQTT"):
        async with App(local.hub.url, local.tokens["A"]):
            pass


async def test_who_is_removed_is_hung_up_on(local: HubWithBroker) -> None:
    lock = await local.device("lock", done)
    assert await local.hub.admin.run(Principal("root", Role.ADMIN), "remove", {"name": "lock"}) == {
        "changed": True
    }
    await local.until(lambda: not lock.is_connected())


async def test_two_clients_of_one_account_that_disconnect_each_other_are_told_of(
    local: HubWithBroker,
) -> None:
    """Both have the right to the client id, so neither is refused; and neither is served for long."""
    for _ in range(2):
        await local.client("lock")
    assert await local.why("taken_over", "use the client id 'lock' (from 127.0.0.1)") == "lock"
    state: dict[str, Any] = local.hub.health.state()
    (said,) = state["conflicts"]
    assert "give each an account of its own" in said


async def test_a_client_that_comes_back_before_its_old_connection_has_ended_is_none_of_two(
    local: HubWithBroker,
) -> None:
    for _ in range(2):
        client = await local.client("lamp")
        client.loop_stop()
    assert local.hub.health.state()["conflicts"] == []
