"""Firmware behind a broker, on a client that duly did not write: an `ack` stops resends, fields arrive."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.raw import curl, join
from tests.guard import GUARD
from tests.patient_loop import PatientClock


class Firmware:
    """A device on paho: hears its tasks, and says what it is told to. A `mute` one does not say that it is
    online."""

    def __init__(self, url: str, name: str, token: str, *, mute: bool = False) -> None:
        self.name = name
        self.token = token
        self.tasks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=name)
        self._client.username_pw_set(name, token)

        def heard(_: Any, __: Any, message: mqtt.MQTTMessage) -> None:
            loop.call_soon_threadsafe(self.tasks.put_nowait, json.loads(message.payload))

        def ready(*_: Any) -> None:
            self.say(f"nodes/{name}/status", {"time": 0, "online": True}, retain=True)

        self._client.on_message = heard
        letters = [(f"nodes/{name}/{kind}", 1) for kind in ("pending", "ack", "failed")]

        def subscribe(*_: object) -> None:
            self._client.subscribe(letters)

        self._client.on_connect = subscribe
        self._client.on_subscribe = None if mute else ready
        host, _, port = url.removeprefix("mqtt://").partition(":")
        self._client.connect(host, int(port))
        self._client.loop_start()

    def say(self, topic: str, what: dict[str, Any], *, retain: bool = False) -> mqtt.MQTTMessageInfo:
        return self._client.publish(topic, json.dumps(what), qos=1, retain=retain)

    def stop(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[tuple[Hub, str, Firmware]]:
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0, patience=5))
    await hub.start()
    hub.ledger.clock = PatientClock()
    phone = await hub.accounts.add(Role.APP, "phone")
    token = await hub.accounts.add(Role.DEVICE, "lock")
    await hub.accounts.grant("phone", "lock")
    firmware = Firmware(hub.mqtt_url, "lock", token)
    async with asyncio.timeout(GUARD):
        while not hub.gateway.online("lock"):
            await asyncio.sleep(0.01)
    yield hub, phone, firmware
    firmware.stop()
    await hub.stop()


async def test_an_ack_stops_resends_and_means_delivered(hub: tuple[Hub, str, Firmware]) -> None:
    running, token, firmware = hub
    async with join(running.url, token) as phone:
        seq_id = await phone.command("lock", data={"open": True})
        task = await asyncio.wait_for(firmware.tasks.get(), GUARD)
        firmware.say("nodes/hub/ack", {"msg_id": task["msg_id"]})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(firmware.tasks.get(), 4)  # it would be repeated after 3 s
        record = await running.ledger.outcome("phone", seq_id)
        assert record is not None
        assert record.state.word == "delivered"
        firmware.say("nodes/hub/complete", {"msg_id": task["msg_id"], "value": None})
        states = [(await phone.hear_of(seq_id)).get("state") for _ in range(2)]
        assert states == [None, "done"], "a plain ack is no news to the app"


async def test_an_ack_with_progress_is_told_to_the_app(hub: tuple[Hub, str, Firmware]) -> None:
    running, token, firmware = hub
    async with join(running.url, token) as phone:
        seq_id = await phone.command("lock")
        task = await asyncio.wait_for(firmware.tasks.get(), GUARD)
        firmware.say("nodes/hub/ack", {"msg_id": task["msg_id"], "progress": {"percent": 40}})
        assert (await phone.hear_of(seq_id))["code"] == 0
        told = await phone.hear_of(seq_id)
        assert (told["state"], told["progress"]) == ("delivered", {"percent": 40})


async def test_a_commands_own_fields_are_in_the_payload(hub: tuple[Hub, str, Firmware]) -> None:
    running, token, firmware = hub
    async with join(running.url, token) as phone:
        await phone.command("lock", "set_mode", command="unlock", data=1)
        task = await asyncio.wait_for(firmware.tasks.get(), GUARD)
        assert task["action"] == "set_mode"
        assert json.loads(base64.b64decode(task["payload"])) == {"command": "unlock", "data": 1}


async def test_a_push_of_its_own_type_with_its_own_fields(hub: tuple[Hub, str, Firmware]) -> None:
    running, token, firmware = hub
    async with join(running.url, token) as phone:
        told = {"type": "door_report", "door": 2, "nothing": None, "data": [1]}
        firmware.say("nodes/lock/status", {"time": 0, "online": True, "data": told})
        heard = await phone.hear()
        assert (heard["type"], heard["door"], heard["nothing"], heard["data"]) == (
            "door_report",
            2,
            None,
            [1],
        )


@pytest.mark.parametrize("kind", ["No Type", "device_status", "lock_control"])
async def test_a_push_that_is_refused_is_answered_under_its_id(
    hub: tuple[Hub, str, Firmware], kind: str
) -> None:
    """Firmware that waits for an answer would say it again for ever."""
    running, _, firmware = hub
    told = {"type": kind, "data": 1, "seq_id": "1794824606689_2"}
    firmware.say("nodes/lock/status", {"time": 0, "online": True, "data": told})
    answer = await asyncio.wait_for(firmware.tasks.get(), GUARD)
    why = json.loads(base64.b64decode(answer["error"]))
    assert (answer["msg_id"], why["code"], why["error"]) == ("1794824606689_2", 2, "malformed")
    assert kind in why["detail"]
    firmware.say("nodes/lock/status", {"time": 0, "online": True, "data": {**told, "type": "log_report"}})
    assert await asyncio.wait_for(firmware.tasks.get(), GUARD) == {"msg_id": "1794824606689_2"}
    assert [(one.scope, one.word) for one in await running.ledger.refusals()] == [("lock", "malformed")]


async def test_an_answer_and_a_status_are_when_a_device_was_last_heard(
    hub: tuple[Hub, str, Firmware],
) -> None:
    running, token, firmware = hub

    async def last_heard() -> int:
        (lock,) = (await curl(f"{running.url}/v1/devices", token)).json["devices"]
        return int(lock["last_heard"])

    async def heard_after(before: int) -> int:
        async with asyncio.timeout(GUARD):
            while (now := await last_heard()) <= before:
                await asyncio.sleep(0.02)
        return now

    came = await last_heard()
    async with join(running.url, token) as phone:
        await phone.command("lock")
        task = await asyncio.wait_for(firmware.tasks.get(), GUARD)
        firmware.say("nodes/hub/complete", {"msg_id": task["msg_id"]})
        await phone.first(lambda f: f["type"] == "ack")
    answered = await heard_after(came)
    await asyncio.sleep(0.01)
    firmware.say("nodes/lock/status", {"time": 0, "online": True}, retain=True)
    await heard_after(answered)


async def test_a_device_without_will_and_heartbeat_is_offline_once_its_connection_is_gone(
    hub: tuple[Hub, str, Firmware], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said last is that it is online, and nothing else would ever say otherwise."""
    running, _, firmware = hub
    assert running.mqtt is not None
    devices = running.mqtt.devices
    monkeypatch.setattr("duly.apps.gateway.mqtt_presence.GRACE", 0.1)
    await devices.sweep()
    assert running.gateway.online("lock")
    firmware.stop()
    async with asyncio.timeout(GUARD):
        while running.gateway.online("lock"):
            await devices.sweep()
            await asyncio.sleep(0.01)


async def test_one_that_comes_back_in_time_stays_online_without_a_word(
    hub: tuple[Hub, str, Firmware],
) -> None:
    running, _, firmware = hub
    assert running.mqtt is not None
    devices = running.mqtt.devices
    firmware.stop()
    async with asyncio.timeout(GUARD):
        while not devices.presence.waited_for("lock"):
            await asyncio.sleep(0.01)
        again = Firmware(running.mqtt_url, "lock", firmware.token, mute=True)
        while devices.presence.waited_for("lock"):
            await asyncio.sleep(0.01)
    again.stop()
    assert running.gateway.online("lock")


async def test_a_forged_answer_is_recorded_at_once_under_the_command_it_was_meant_for(
    hub: tuple[Hub, str, Firmware],
) -> None:
    running, token, firmware = hub
    async with join(running.url, token) as phone:
        seq_id = await phone.command("lock")
        await asyncio.wait_for(firmware.tasks.get(), GUARD)
        for n in range(3):  # only the first is recorded at once
            firmware.say("nodes/hub/complete", {"msg_id": f"phone:{seq_id}:{'A' * 23}{n}"})
        async with asyncio.timeout(GUARD):
            refused: list[dict[str, Any]] = []
            while len(refused) < 2:
                refused = (await curl(f"{running.url}/v1/refusals", token)).json["refusals"]
                await asyncio.sleep(0.02)
    assert {(one["scope"], one["id"], one["word"]) for one in refused} == {("phone", seq_id, "forged")}
