"""Work that takes its time, fields of one's own, and who is online: duly's own clients on a real hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from duly.clients.app import App, Push
from duly.clients.device import Command, Device
from duly.errors import Malformed
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.patient_loop import PatientClock


def slow(url: str, token: str = "", *, steps: int = 4, pause: float = 0.3, **more: Any) -> Device:
    device = Device(url, token, **more)

    @device.on("lock_control", "set_temperature")
    async def work(command: Command) -> dict[str, Any]:
        for step in range(steps):
            command.working({"step": step})
            await asyncio.sleep(pause)
        return {"fields": command.fields, "data": command.data}

    return device


@asynccontextmanager
async def hub_of(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Hub, str, str]]:
    """A hub that waits 0.6 s for a device, with the tokens of an app and of a device."""
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, patience=0.6, **settings))
    await hub.start()
    hub.ledger.clock = PatientClock()
    try:
        phone = await hub.accounts.add(Role.APP, "phone")
        lock = await hub.accounts.add(Role.DEVICE, "lock")
        await hub.accounts.grant("phone", "lock")
        yield hub, phone, lock
    finally:
        await hub.stop()


async def test_a_handler_that_says_it_is_working_is_not_given_up_and_its_app_hears_how_far(
    tmp_path: Path,
) -> None:
    heard: list[Any] = []
    async with hub_of(tmp_path, no_mqtt=True) as (hub, phone, lock):
        device = slow(hub.url, lock)
        async with device, App(hub.url, phone) as app:
            ack = await app.send(
                "lock", "lock_control", 1, progress=heard.append, fields={"command": "unlock"}
            )
    assert (ack.state, ack.data) == ("done", {"fields": {"command": "unlock"}, "data": 1})
    assert heard == [{"step": step} for step in range(4)]


async def test_a_command_with_a_timeout_of_its_own_gives_a_silent_handler_that_long(tmp_path: Path) -> None:
    async with hub_of(tmp_path, no_mqtt=True) as (hub, phone, lock):
        device = Device(hub.url, lock)

        @device.on("lock_control")
        async def work(command: Command) -> str:
            await asyncio.sleep(1)
            return "turned"

        async with device, App(hub.url, phone) as app:
            assert (await app.send("lock", "lock_control")).state == "unknown"
            ack = await app.send("lock", "lock_control", timeout=5)
            assert (ack.state, ack.data) == ("done", "turned")


async def test_the_same_through_a_broker(tmp_path: Path) -> None:
    heard: list[Any] = []
    async with hub_of(tmp_path, mqtt_port=0) as (hub, phone, lock):
        url = hub.mqtt_url.replace("mqtt://", f"mqtt://lock:{lock}@")
        async with slow(url, name="lock"), App(hub.url, phone) as app:
            async with asyncio.timeout(GUARD):
                while "lock" not in app.online:
                    await asyncio.sleep(0.01)
            ack = await app.send("lock", "set_temperature", 21, progress=heard.append)
            assert (ack.state, ack.data) == ("done", {"fields": {}, "data": 21})
            # It has one field for everything: fields of one's own come in its payload.
            ack = await app.send("lock", "set_temperature", 21, fields={"unit": "C"})
            assert ack.data["data"] == {"unit": "C", "data": 21}
    assert heard == [{"step": step} for step in range(4)]


async def test_an_app_knows_which_of_its_devices_are_online(local: LocalHub) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        assert app.online == set()
        async with slow(local.url, local.tokens["lock"]):
            assert (await anext(app.pushes())).device == "lock"
            assert app.online == {"lock"}
            async with App(local.url, local.tokens["phone"]) as other:
                assert other.online == {"lock"}
        assert (await anext(app.pushes())).device == "lock"
        assert app.online == set()


async def test_a_pushs_own_fields_are_told(local: LocalHub) -> None:
    """By a device that is not ours."""
    async with (
        App(local.url, local.tokens["phone"]) as app,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{local.url}/v1/ws") as lock,
    ):
        await lock.send_json({"type": "auth", "token": local.tokens["lock"]})
        await lock.send_json({"type": "door_report", "door": 2, "code": "x", "data": "open"})
        async with asyncio.timeout(GUARD):
            while not isinstance(news := await anext(app.pushes()), Push) or news.type != "door_report":
                pass
        assert (news.data, news.fields) == ("open", {"door": 2, "code": "x"})


async def test_a_field_with_a_name_of_the_protocols_is_refused_at_once(local: LocalHub) -> None:
    async with App(local.url, local.tokens["phone"]) as app:
        with pytest.raises(Malformed, match="queue"):
            await app.post("lock", "lock_control", fields={"queue": 1})


def test_a_command_as_a_handler_gets_it_can_be_made_by_hand() -> None:
    command = Command("lock_control", None, "phone", "1_1", 1)
    command.working(50)  # to nobody
    assert msgspec.structs.replace(command, fields={"a": 1}).fields == {"a": 1}


async def test_a_handler_without_types_gets_what_no_other_handles(local: LocalHub) -> None:
    device = slow(local.url, local.tokens["lock"], steps=0)

    @device.on()
    async def anything(command: Command) -> str:
        return command.type

    async with device, App(local.url, local.tokens["phone"]) as app:
        assert (await app.send("lock", "paint_it_black")).data == "paint_it_black"
        assert (await app.send("lock", "set_temperature", 1)).data == {"fields": {}, "data": 1}
