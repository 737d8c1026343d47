"""The command line as its users have it: real processes, real ports, one folder each."""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from duly.core.lifecycle import State
from tests.guard import GUARD

SECONDS = GUARD
ENDED = {state.word for state in State if state.terminal}

typer.main.get_command = functools.cache(typer.main.get_command)
"""Building the command line takes a tenth of a second, in each test that calls it in this process."""


class Running:
    """A verb that goes on until it is stopped; its output can be waited for, line by line."""

    def __init__(self, args: list[str], folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            args, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, containing: str = "") -> str:
        """The next line that contains this."""
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            if containing in line:
                return line
        assert self.process.stderr is not None
        raise AssertionError(f"it ended without saying {containing!r}: {self.process.stderr.read()}")

    def note(self, containing: str) -> str:
        """The next line for people (on stderr) that contains this."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if containing in line:
                return line
        raise AssertionError(f"it ended without noting {containing!r}")

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(SECONDS)
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return code


class CommandLine:
    """A folder to work in, and the processes that were started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self._running: list[Running] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        self.env = clean | {"NO_COLOR": "1"}

    def duly(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "duly", *args],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS + 10,
        )

    def ask(self, *args: str) -> Any:
        """What a verb prints with --json."""
        done = self.duly(*args, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def told_alert(self, event: str) -> None:
        """Until the first recipients of an alert were told, or cannot be: a tower that has taken an alert
        does that a moment later."""
        began = time.monotonic()
        while True:
            deliveries = self.ask("alert", "show", event)["deliveries"]
            if ENDED.issuperset(one["state"] for one in deliveries if not one["round"]):
                return
            assert time.monotonic() - began < SECONDS, deliveries

    def start(self, *args: str, **env: str) -> Running:
        running = Running([sys.executable, "-m", "duly", *args], self.folder, self.env | env)
        self._running.append(running)
        return running

    def up(self, *args: str) -> Running:
        """A hub; after a first one, on the same port."""
        hub = self.start("up", "--no-mqtt", "--port", str(self.port), *args)
        self.port = int(hub.line("ready").rsplit(":", 1)[1])
        return hub

    def device(self, name: str, *args: str) -> Running:
        device = self.start("device", name, "--effects", f"{name}.effects", *args)
        device.line("is online")
        return device

    def effects(self, name: str) -> list[str]:
        """The ids of what a device really did, by its own file."""
        cli = self.folder / f"{name}.effects"
        return [line.split(" ")[1] for line in cli.read_text().splitlines()] if cli.exists() else []

    def end(self) -> None:
        for running in self._running:
            running.stop(signal.SIGKILL)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[CommandLine]:
    it = CommandLine(tmp_path)
    yield it
    it.end()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A hub with an app, and a lock it may command, which is online; for tests that leave it as it is."""
    it = CommandLine(tmp_path_factory.mktemp("home"))
    try:
        it.up()
        for args in (
            "add app phone",
            "add device lock",
            "add device shed",
            "grant phone lock",
            "grant phone shed",
        ):
            assert it.duly(*args.split()).returncode == 0
        it.device("lock")
        yield it
    finally:
        it.end()
