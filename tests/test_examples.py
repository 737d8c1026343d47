"""The examples run as they are, beside a hub where they need one, and print what they promise."""

from __future__ import annotations

import asyncio
import base64
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import duly

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = 20.0


class Program:
    """A program that goes on until it is stopped; its output can be waited for, line by line."""

    def __init__(self, args: list[str], folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            args, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, containing: str) -> str:
        """The next line that contains this."""
        seen = []
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            seen.append(line)
            if containing in line:
                return line
        raise AssertionError(f"it ended without saying {containing!r}: {seen}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Folder:
    """A folder in which examples and a hub are run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = self.mqtt = ""
        self._running: list[Program] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        self.env = clean | {"NO_COLOR": "1", "PYTHONWARNINGS": "error"}

    def hub(self, *args: str) -> None:
        hub = self._start([sys.executable, "-m", "duly", "up", "--port", "0", *args], {})
        _, self.url, *mqtt = hub.line("ready").split()
        self.mqtt = "".join(mqtt)

    def duly(self, *args: str) -> str:
        """What a verb prints."""
        return self._finish([sys.executable, "-m", "duly", *args], {})

    def run(self, name: str, **env: str) -> list[str]:
        """What an example prints that comes to its end."""
        return self._finish([sys.executable, str(EXAMPLES / name)], env).splitlines()

    def start(self, name: str, *args: str, **env: str) -> Program:
        """An example that goes on."""
        return self._start([sys.executable, str(EXAMPLES / name), *args], env)

    def end(self) -> None:
        for program in self._running:
            program.end()

    def _start(self, args: list[str], env: dict[str, str]) -> Program:
        program = Program(args, self.path, self.env | env)
        self._running.append(program)
        return program

    def _finish(self, args: list[str], env: dict[str, str]) -> str:
        done = subprocess.run(
            args,
            cwd=self.path,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS * 2,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    it = Folder(tmp_path)
    yield it
    it.end()


def test_every_example_is_listed_and_run_here() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    run = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert programs == listed == run


def test_a_function_runs_once(folder: Folder) -> None:
    first, again = folder.run("once.py"), folder.run("once.py")
    assert first[0] == "charging 12"
    assert first[1:] == again
    assert again[0] == "['receipt for order-7', 'receipt for order-7']"
    assert again[1].startswith("refused: ")


def test_sql_runs_exactly_once(folder: Folder) -> None:
    assert folder.run("exactly_once.py") == folder.run("exactly_once.py") == ["bookings: 1", "bookings: 1"]


def test_time_is_virtual(folder: Folder) -> None:
    assert folder.run("virtual_time.py") == [
        "polls: 24",
        "first time: fresh",
        "a repeat: duplicate",
        "a day late: stale",
    ]


async def test_a_phone_opens_a_lock(folder: Folder) -> None:
    folder.hub("--no-mqtt")
    phone, lock = folder.duly("add", "app", "phone").strip(), folder.duly("add", "device", "lock-1").strip()
    folder.duly("grant", "phone", "lock-1")
    (refused,) = folder.run("phone.py", DULY_URL=folder.url, DULY_TOKEN=phone)
    assert refused.startswith("nothing was done: ")
    device = folder.start("lock.py", DULY_URL=folder.url, DULY_TOKEN=lock)
    async with duly.App(folder.url, phone) as app, asyncio.timeout(SECONDS):
        while "lock-1" not in app.online:
            await asyncio.sleep(0.05)
    said = folder.run("phone.py", DULY_URL=folder.url, DULY_TOKEN=phone)
    assert "done {'open': True}" in said
    assert said[-1].startswith("Push(")
    device.line("the lock is open")


def test_a_node_does_a_task(folder: Folder) -> None:
    folder.hub("--mqtt-port", "0")
    broker = folder.mqtt.removeprefix("mqtt://")
    urls = {
        f"{name}_URL": f"mqtt://{name}:{folder.duly('add', 'node', name).strip()}@{broker}" for name in "AB"
    }
    assert folder.run("two_nodes.py", **urls) == [
        "{'lamp': 1, 'on': True}",
        "failed: there is no such lamp",
    ]


async def test_a_bot_answers(folder: Folder) -> None:
    folder.hub("--no-mqtt")
    password = "a long password"
    bot = folder.start("chat_bot.py", DULY_URL=folder.url, DULY_PASSWORD=password)
    bot.line("the bot is here")
    await duly.Chat.register(folder.url, "ann", password)
    token = await duly.Chat.log_in(folder.url, "ann", password)
    async with duly.Chat(folder.url, token) as chat:
        await chat.send("bot", "hello")
        async for line in chat.lines():
            if line.sender == "bot":
                assert line.text == "you said: hello"
                break


def test_a_sentinel_reports_and_a_webhook_hears(folder: Folder) -> None:
    folder.hub("--no-mqtt", "--allow-private-webhooks")
    secret = "whsec_" + base64.b64encode(os.urandom(32)).decode()
    receiver = folder.start("webhook.py", "0", WEBHOOK_SECRET=secret)
    port = receiver.line("listening on").rsplit(" ", 1)[1]
    folder.duly("profile", "set", "home", "--send", f"http://127.0.0.1:{port}/", "--secret", secret)
    token = folder.duly("add", "sentinel", "watch").strip()
    said = folder.run("sentinel.py", DULY_URL=folder.url, DULY_TOKEN=token)
    assert said == ["fall: done", "disconnect: cancelled"]
    assert receiver.line("alert.") == "alert.event fall"
