"""`duly ha`, as a process between a hub and Mosquitto: it is declared in duly.toml, and says how a command of
Home Assistant ended."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from duly.cli.group import app
from duly.cli.home_assistant import HomeAssistantOptions
from duly.clients.device import Command, Device
from duly.identity.accounts import Role
from duly.integrations.home_assistant.entities import EntityDeclaration
from duly.transports.mqtt.link import MqttLink
from tests import servers
from tests.cli.conftest import CommandLine
from tests.guard import GUARD
from tests.local_hub import LocalHub

DECLARED = """
[home_assistant]
mqtt = "{mqtt}"
prefix = "cli"

[[home_assistant.entities]]
device = "lock"
kind = "lock"
name = "Front door"
"""


async def test_a_command_through_the_verb(
    cli: CommandLine, tmp_path: Path, mosquitto_server: servers.Mosquitto
) -> None:
    local = LocalHub(tmp_path / "hub")
    await local.start()
    await local.add(Role.APP, "phone")
    await local.add(Role.DEVICE, "lock")
    await local.hub.accounts.grant("phone", "lock")
    (tmp_path / "duly.toml").write_text(DECLARED.format(mqtt=mosquitto_server.url("cli-bridge")))
    lock = Device(local.url, local.tokens["lock"])

    @lock.on("lock_control", effect="at_most_once")
    async def control(command: Command) -> Any:
        return command.data

    assistant = MqttLink(mosquitto_server.url("cli-ha"), lambda topic, payload, old, ack: ack())
    await assistant.start()
    async with lock, asyncio.timeout(GUARD):
        bridge = cli.start("ha", "--url", local.url, "--token", local.tokens["phone"], "--json")
        assert json.loads(await asyncio.to_thread(bridge.line))["what"] == "online"
        await assistant.connected(GUARD)
        given = json.dumps({"command": "UNLOCK", "at": time.time()})
        await assistant.publish("cli/lock_lock/set", given.encode())
        told = json.loads(await asyncio.to_thread(bridge.line))
        assert (told["device"], told["command"], told["outcome"]) == ("lock", "UNLOCK", "done")
        assert await asyncio.to_thread(bridge.stop) == 0
    await assistant.stop()
    await local.stop()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lock", "lock"], "the broker of Home Assistant is missing"),
        (["--mqtt", "mqtt://127.0.0.1"], "name one with --lock"),
        (["--mqtt", "mqtt://127.0.0.1", "--lock", "a", "--lock", "a"], "declared twice"),
        (["--mqtt", "mqtt://127.0.0.1", "--lock", "a", "--prefix", "a/#"], "cannot begin topics"),
    ],
)
def test_mistakes_are_named(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["ha", *words])
    assert done.exit_code != 0
    assert problem in f"{done.exception} {done.output}"


def test_the_environment_says_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DULY_HOME_ASSISTANT_APP", "phone")
    monkeypatch.setenv("DULY_HOME_ASSISTANT_EXPIRES", "5")
    found = HomeAssistantOptions(switches=["plug"], prefix="house").settings()
    assert (found.app, found.expires, found.prefix) == ("phone", 5.0, "house")
    assert found.entities == [EntityDeclaration(device="plug", kind="switch")]
