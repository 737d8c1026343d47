"""The examples run as they are, beside a hub where they need one, and print what they promise."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import duly
from duly.apps.alerts.model import read_event
from duly.identity.accounts import Role
from duly.server.hub import Hub
from duly.settings import Settings
from tests import servers
from tests.guard import GUARD

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = GUARD


class Folder:
    """A folder in which examples are run as processes, beside a hub in this one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._running: list[Process] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        self.env = clean | {"PYTHONWARNINGS": "error"}

    async def hub(self, settings: Settings) -> Hub:
        self._hub = Hub(settings)
        await self._hub.start()
        return self._hub

    async def start(self, name: str, *args: str, **env: str) -> Process:
        """An example that goes on."""
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLES / name), *args,
            cwd=self.path, env=self.env | env, stdout=PIPE, stderr=STDOUT,
        )  # fmt: skip
        self._running.append(program)
        return program

    async def run(self, name: str, **env: str) -> list[str]:
        """What an example prints that comes to its end."""
        program = await self.start(name, **env)
        async with asyncio.timeout(2 * SECONDS):
            said, _ = await program.communicate()
        assert program.returncode == 0, said.decode()
        return said.decode().splitlines()

    async def end(self) -> None:
        for program in self._running:
            if program.returncode is None:
                program.kill()
                await program.communicate()
        if hasattr(self, "_hub"):
            await self._hub.stop()


async def line(program: Process, containing: str) -> str:
    """The next line of a program that contains this."""
    assert program.stdout is not None
    seen = []
    async with asyncio.timeout(SECONDS):
        while raw := await program.stdout.readline():
            seen.append(raw.decode().rstrip("\n"))
            if containing in seen[-1]:
                return seen[-1]
    raise AssertionError(f"it ended without saying {containing!r}: {seen}")


RUN_ELSEWHERE = {
    "idempotent_api.py": "test_guides",
    "lamp_nsq.py": "clients/consumer/test_queues",
    "lamp_rabbitmq.py": "clients/consumer/test_queues",
    "lamp_redis.py": "clients/consumer/test_queues",
}
"""What needs a framework or a queue, and the test that runs it with one."""


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    it = Folder(tmp_path)
    yield it
    await it.end()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=str(tmp_path / "data"), port=0, no_mqtt=True)


def test_every_example_is_listed_and_run_here() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.*") if path.suffix in (".py", ".sh")}
    listed = set(re.findall(r"\]\((\w+\.(?:py|sh))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    run = set(re.findall(r'"(\w+\.(?:py|sh))"', Path(__file__).read_text(encoding="utf-8")))
    for program, test in RUN_ELSEWHERE.items():
        text = (Path(__file__).parent / f"{test}.py").read_text(encoding="utf-8")
        assert program.removesuffix(".py") in text
    assert programs == listed == run


async def test_a_device_in_a_shell_script_runs_a_command_once(folder: Folder, tmp_path: Path) -> None:
    for tool in ("mosquitto_sub", "mosquitto_pub", "jq"):
        if shutil.which(tool) is None:
            servers.missing(tool)
    hub = await folder.hub(Settings(data=str(tmp_path / "data"), port=0, mqtt_port=0))
    phone, lock = await hub.accounts.add(Role.APP, "phone"), await hub.accounts.add(Role.DEVICE, "lock")
    await hub.accounts.grant("phone", "lock")
    port = hub.mqtt_url.rsplit(":", 1)[1]
    program = subprocess.Popen(
        [EXAMPLES / "shell_device.sh", "127.0.0.1", port, "lock", lock, tmp_path / "store"],
        start_new_session=True,
    )
    try:
        async with duly.App(hub.url, phone) as app:
            async with asyncio.timeout(SECONDS):
                while "lock" not in app.online:
                    await asyncio.sleep(0.02)
            first = await app.post("lock", "count")
            assert (await first.ended()).data == {"count": 1}
            assert (await app.send("lock", "dance")).code == 7
            assert (await app.send("lock", "count")).data == {"count": 2}
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


async def test_a_function_runs_once(folder: Folder) -> None:
    first, again = await folder.run("once.py"), await folder.run("once.py")
    assert first[0] == "charging 12"
    assert first[1:] == again
    assert again[0] == "['receipt for order-7', 'receipt for order-7']"
    assert again[1].startswith("refused: ")


async def test_sql_runs_exactly_once(folder: Folder) -> None:
    for _ in range(2):
        assert await folder.run("exactly_once.py") == ["bookings: 1", "bookings: 1"]


async def test_time_is_virtual(folder: Folder) -> None:
    assert await folder.run("virtual_time.py") == [
        "polls: 24",
        "first time: fresh",
        "a repeat: duplicate",
        "a day late: stale",
    ]


async def test_a_phone_opens_a_lock(folder: Folder, settings: Settings) -> None:
    hub = await folder.hub(settings)
    phone = await hub.accounts.add(Role.APP, "phone")
    lock = await hub.accounts.add(Role.DEVICE, "lock-1")
    await hub.accounts.grant("phone", "lock-1")
    (refused,) = await folder.run("phone.py", DULY_URL=hub.url, DULY_TOKEN=phone)
    assert refused.startswith("nothing was done: ")
    device = await folder.start("lock.py", DULY_URL=hub.url, DULY_TOKEN=lock)
    async with duly.App(hub.url, phone) as app, asyncio.timeout(SECONDS):
        while "lock-1" not in app.online:
            await asyncio.sleep(0.02)
    said = await folder.run("phone.py", DULY_URL=hub.url, DULY_TOKEN=phone)
    assert "done {'open': True}" in said
    assert said[-1].startswith("Push(")
    await line(device, "the lock is open")


async def test_a_node_does_a_task(folder: Folder, tmp_path: Path) -> None:
    hub = await folder.hub(Settings(data=str(tmp_path / "data"), port=0, mqtt_port=0))
    broker = hub.mqtt_url.removeprefix("mqtt://")
    tokens = {name: await hub.accounts.add(Role.NODE, name) for name in "AB"}
    urls = {f"{name}_URL": f"mqtt://{name}:{token}@{broker}" for name, token in tokens.items()}
    assert await folder.run("two_nodes.py", **urls) == [
        "{'lamp': 1, 'on': True}",
        "failed: there is no such lamp",
    ]


async def test_a_bot_answers(folder: Folder, settings: Settings) -> None:
    hub = await folder.hub(settings)
    password = "a long password"
    bot = await folder.start("chat_bot.py", DULY_URL=hub.url, DULY_PASSWORD=password)
    await line(bot, "the bot is here")
    await duly.Chat.register(hub.url, "ann", password)
    token = await duly.Chat.log_in(hub.url, "ann", password)
    async with duly.Chat(hub.url, token) as chat, asyncio.timeout(SECONDS):
        await chat.send("bot", "hello")
        async for said in chat.lines():
            if said.sender == "bot":
                assert said.text == "you said: hello"
                break


async def test_a_sentinel_reports_and_a_webhook_hears(folder: Folder, tmp_path: Path) -> None:
    secret = "whsec_" + base64.b64encode(os.urandom(32)).decode()
    receiver = await folder.start("webhook.py", "0", WEBHOOK_SECRET=secret)
    port = (await line(receiver, "listening on")).rsplit(" ", 1)[1]
    home: dict[str, object] = {"send": [f"http://127.0.0.1:{port}/"], "secret": secret}
    hub = await folder.hub(
        Settings(
            data=str(tmp_path / "data"),
            port=0,
            no_mqtt=True,
            allow_private_webhooks=True,
            profiles={"home": home},
        )
    )
    token = await hub.accounts.add(Role.SENTINEL, "watch")
    said = await folder.run("sentinel.py", DULY_URL=hub.url, DULY_TOKEN=token)
    assert said == ["fall: done", "disconnect: cancelled"]
    assert await line(receiver, "alert.") == "alert.event fall"


async def test_a_sentinel_in_a_shell_script_reports_each_signal_once(folder: Folder, tmp_path: Path) -> None:
    for tool in ("curl", "jq"):
        if shutil.which(tool) is None:
            servers.missing(tool)
    home: dict[str, object] = {"send": ["console:"]}
    hub = await folder.hub(
        Settings(data=str(tmp_path / "data"), port=0, no_mqtt=True, profiles={"home": home})
    )
    token = await hub.accounts.add(Role.SENTINEL, "watch")
    signals = b"smoke kitchen\nsmoke kitchen\nleak cellar\nsmoke kitchen critical\n"
    program = await asyncio.create_subprocess_exec(
        EXAMPLES / "shell_sentinel.sh", hub.url, token, str(tmp_path / "store"), "home",
        stdin=PIPE, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(SECONDS):
        said, _ = await program.communicate(signals)
    assert (program.returncode, said) == (0, b"")
    alerts = await hub.alerts.operations.alerts()
    events = [(read_event(alert.record.message.body), alert.severity) for alert in alerts]
    assert sorted((event.trigger_reason, event.device_address, how.name) for event, how in events) == [
        ("leak", "cellar", "WARNING"),
        ("smoke", "kitchen", "CRITICAL"),
        ("smoke", "kitchen", "WARNING"),
    ]
