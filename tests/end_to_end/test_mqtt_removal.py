"""An MQTT device is removed, or a grant taken back: nothing that a broker has kept reaches its successor, and
no successor answers for it. The devices are made with paho."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from duly.broker.acl_dialects import DEVICES
from duly.identity.accounts import Accounts, Principal, Role
from duly.storage import open_ledger
from tests.end_to_end.raw import Peer, curl, join
from tests.end_to_end.test_mqtt_strangers import HubWithBroker, done, tell
from tests.guard import GUARD
from tests.servers import Mosquitto

ROOT = Principal("root", Role.ADMIN)


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[HubWithBroker]:
    it = HubWithBroker(tmp_path / "hub")
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock", "lamp")
    yield it
    await it.stop()


async def fall_asleep(local: HubWithBroker, client_id: str = "lock") -> None:
    """The lock connects, subscribes, and is gone without a word: it counts as online for a while."""
    asleep = await local.client("lock", client_id)
    subscribed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def granted(*_: object) -> None:
        loop.call_soon_threadsafe(subscribed.set)

    asleep.on_subscribe = granted
    asleep.subscribe("nodes/lock/pending", 1)
    await subscribed.wait()
    tell(asleep, "nodes/lock/status", {"time": 1, "online": True})
    await local.until(lambda: local.hub.gateway.online("lock"))
    asleep.disconnect()
    await asyncio.to_thread(asleep.loop_stop)


async def kept_tasks(local: HubWithBroker) -> list[bytes]:
    """What the embedded broker keeps for devices that are away."""
    broker = local.mqtt.broker
    assert broker is not None
    return [task.payload async for task in broker.clients.kept.tasks(DEVICES, "nodes/+/pending")]


async def command_of(local: HubWithBroker, phone: Peer) -> str:
    """A command of the phone that has been handed to the broker."""
    seq_id = await phone.command("lock", queue=True)
    assert (await phone.hear_of(seq_id))["code"] == 0
    if local.mqtt.broker is not None:
        async with asyncio.timeout(GUARD):
            while not any(seq_id.encode() in payload for payload in await kept_tasks(local)):
                await asyncio.sleep(0.01)
    return seq_id


async def run(local: HubWithBroker, verb: str, **wanted: str) -> Any:
    return await local.hub.admin.run(ROOT, verb, wanted)


async def remake(local: HubWithBroker) -> None:
    """Remove the lock, and give its name to another one."""
    await run(local, "remove", name="lock")
    await local.add(Role.DEVICE, "lock")


async def wake_up(
    local: HubWithBroker, name: str, client_id: str
) -> tuple[bool, asyncio.Queue[dict[str, Any]]]:
    """Connect; whether the broker had a session for it, and what it is sent from now on."""
    loop = asyncio.get_running_loop()
    tasks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    known: asyncio.Future[bool] = loop.create_future()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=False)
    client.username_pw_set(name, local.tokens[name])

    def heard(client: paho.Client, _: object, message: paho.MQTTMessage) -> None:
        task = json.loads(message.payload)
        loop.call_soon_threadsafe(tasks.put_nowait, task)
        done(client, task)

    def connected(_: paho.Client, __: object, flags: paho.ConnectFlags, *___: object) -> None:
        loop.call_soon_threadsafe(known.set_result, flags.session_present)

    client.on_connect, client.on_message = connected, heard
    client.connect("127.0.0.1", local.port)
    client.loop_start()
    local.clients.append(client)
    async with asyncio.timeout(GUARD):
        session = await known
    client.subscribe(f"nodes/{name}/pending", 1)
    tell(client, f"nodes/{name}/status", {"time": 2, "online": True})
    await local.until(lambda: local.hub.gateway.online(name))
    return session, tasks


async def state(local: HubWithBroker, seq_id: str) -> tuple[str, str]:
    record = await local.hub.ledger.outcome("phone", seq_id)
    assert record is not None
    return record.state.word, "" if record.answer is None else record.answer.reason


@pytest.mark.parametrize("client_id", ["lock", "lock-12ab34cd", "esp32"])
async def test_a_removed_devices_command_ends_and_its_session_with_it(
    local: HubWithBroker, client_id: str
) -> None:
    await fall_asleep(local, client_id)
    async with join(local.hub.url, local.tokens["phone"]) as phone:
        old = await command_of(local, phone)
        await run(local, "remove", name="lock")
        end = await phone.hear_of(old)
        assert (end["state"], end["code"]) == ("unknown", 4)
        assert "lock was removed" in (await state(local, old))[1]
        assert await kept_tasks(local) == []
        assert not local.hub.gateway.online("lock")
        session, _ = await wake_up(local, "lamp", client_id)
        assert not session, "the client id of a removed account is free, and its session is gone"
        local.clients[-1].disconnect()
        await local.add(Role.DEVICE, "lock")
        session, tasks = await wake_up(local, "lock", "lock")
        assert not session
        new = await phone.command("lock")
        assert new in (await tasks.get())["msg_id"], "the first that the new lock is sent"
        assert (await phone.hear_of(new))["code"] == 0
    assert (await state(local, old))[0] == "unknown"


async def test_a_command_that_a_broker_keeps_is_taken_back_with_its_grant(local: HubWithBroker) -> None:
    await local.add(Role.APP, "tablet")
    await local.hub.accounts.grant("tablet", "lock")
    await fall_asleep(local)
    async with (
        join(local.hub.url, local.tokens["phone"]) as phone,
        join(local.hub.url, local.tokens["tablet"]) as tablet,
    ):
        old = await command_of(local, phone)
        beside = await tablet.command("lock", queue=True)
        assert (await tablet.hear_of(beside))["code"] == 0
        await run(local, "revoke", app="phone", device="lock")
        assert (await phone.hear_of(old))["state"] == "unknown"
        session, tasks = await wake_up(local, "lock", "lock")
        assert session, "the device is the same"
        assert beside in (await tasks.get())["msg_id"], "what others sent is still delivered"
        assert (await tablet.hear_of(beside))["state"] == "done"
    assert (await state(local, old))[0] == "unknown"


async def test_what_was_removed_while_the_hub_did_not_run_is_not_inherited_either(
    local: HubWithBroker,
) -> None:
    await fall_asleep(local)
    async with join(local.hub.url, local.tokens["phone"]) as phone:
        old = await command_of(local, phone)
    await local.hub.stop()
    ledger = await open_ledger(local.hub.settings.ledger_url)
    accounts = Accounts(ledger)
    await accounts.refresh()
    await accounts.remove("lock")
    local.tokens["lock"] = await accounts.add(Role.DEVICE, "lock")
    await accounts.grant("phone", "lock")
    await ledger.close()
    await local.start()
    session, tasks = await wake_up(local, "lock", "lock")
    assert not session
    async with join(local.hub.url, local.tokens["phone"]) as phone:
        new = await phone.command("lock")
        assert new in (await tasks.get())["msg_id"]
        assert (await phone.hear_of(new))["code"] == 0
    word, reason = await state(local, old)
    assert (word, "another account's now" in reason) == ("unknown", True)


async def test_at_an_outside_broker_a_successor_does_not_settle_its_predecessors_command(
    tmp_path: Path, mosquitto_server: Mosquitto
) -> None:
    local = HubWithBroker(tmp_path / "hub", f"mqtt://hub:x@127.0.0.1:{mosquitto_server.port}")
    await local.start()
    try:
        await local.add(Role.APP, "phone")
        await local.add(Role.DEVICE, "lock")
        await fall_asleep(local)
        async with join(local.hub.url, local.tokens["phone"]) as phone:
            old = await command_of(local, phone)
            await remake(local)
            assert (await phone.hear_of(old))["state"] == "unknown"
        _, tasks = await wake_up(local, "lock", "lock")
        assert old in (await tasks.get())["msg_id"], "this broker does not take it back"
        await local.why(old, "not a task that was handed to a device")
        assert (await state(local, old))[0] == "unknown"
    finally:
        await local.stop()


async def test_a_websocket_device_does_not_settle_its_predecessors_command(local: HubWithBroker) -> None:
    async with (
        join(local.hub.url, local.tokens["phone"]) as phone,
        join(local.hub.url, local.tokens["lock"]) as lock,
    ):
        old = await phone.command("lock")
        assert (await phone.hear_of(old))["code"] == 0
        command = await lock.hear()
        await remake(local)
        assert (await phone.hear_of(old))["state"] == "unknown"
        async with join(local.hub.url, local.tokens["lock"]) as successor:
            await successor.ack(command)
            await local.why("not_allowed", "lock answered a command it never got")
        shown = await curl(f"{local.hub.url}/v1/messages/phone/{old}", local.tokens["phone"])
        assert shown.json["state"] == "unknown"
