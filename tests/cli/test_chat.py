"""`duly chat` as its users have it: two terminals and a hub that goes away."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from duly.clients.chat import Chat
from tests.certificates import Authority
from tests.cli.conftest import SECONDS, CommandLine
from tests.servers import free_port


class Window:
    """A terminal with somebody in it."""

    def __init__(self, cli: CommandLine, *args: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "duly", "chat", *args],
            cwd=cli.folder, env=cli.env | {"TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"},
            stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, line: str) -> None:
        os.write(self._master, line.encode() + b"\r")

    def until(self, text: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            if time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not shown: {self.shown[-2000:]}")
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._master, 65_536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended without showing {text!r}: {self.shown}") from None
        self.shown = self.shown.partition(text)[2]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._master)


@pytest.fixture
def windows(cli: CommandLine) -> Iterator[list[Window]]:
    opened: list[Window] = []
    yield opened
    for window in opened:
        window.end()


def test_two_people_chat_also_when_the_hub_is_killed(cli: CommandLine, windows: list[Window]) -> None:
    hub = cli.up()
    ann, bob = Window(cli, "--as", "ann"), Window(cli, "--as", "bob")
    windows += [ann, bob]
    for window in windows:
        window.until("/to NAME to begin")
    ann.type("/to bob")
    bob.type("/to ann")
    ann.until("bob>")
    bob.until("ann>")
    ann.type("hello bob")
    bob.until("ann: hello bob")
    ann.until("bob has read 1")
    hub.stop(signal.SIGKILL)
    ann.type("are you still there?")
    ann.until("no connection")
    cli.up()
    bob.until("ann: are you still there?")
    bob.type("yes")
    ann.until("bob: yes")
    ann.type("/group club bob")
    ann.until("club is #")
    bob.until("ann has made the group club")
    ann.type("in the club")
    bob.until("[club] ann: in the club")
    ann.type("/edit 2 in our club")
    bob.until("edited line 2: in our club")
    bob.type("/to club")
    bob.type("/history")
    bob.until("ann: in our club (edited)")
    ann.until("bob has read 3")
    ann.type("/receipts 2")
    ann.until("1 of 1 have it (bob), 1 of 1 have read it (bob)")  # who turns to it, and sees it, reads it
    ann.type("/role bob admin")
    bob.until("ann has made bob an admin")
    ann.type("/to bob")
    ann.type("just to you")
    bob.until("[to you] ann: just to you")
    ann.type("/friend bob")
    ann.until("done")
    bob.until("ann would like to be your friend")
    bob.type("/accept ann")
    ann.until("bob is your friend now")
    ann.type("/to club")
    ann.until("club>")
    bob.type("/leave")
    bob.until("you have left club")
    ann.until("bob has left")
    ann.type("/nonsense")
    ann.until("there is no /nonsense")
    ann.type("/quit")
    assert ann.process.wait(SECONDS) == 0


def test_a_script_chats_through_pipes_and_is_watched(cli: CommandLine) -> None:
    cli.up()
    watching = cli.start("watch")
    for i in range(2):
        sent = subprocess.run(
            [sys.executable, "-m", "duly", "chat", "--as", "ann", "--to", "bob", "--json"],
            cwd=cli.folder, env=cli.env, input=f"one {i}\ntwo {i}\n", capture_output=True, text=True,
            check=False, timeout=SECONDS,
        )  # fmt: skip
        if i == 0:
            assert "no such conversation or person" in sent.stderr  # nobody is named bob yet
            assert sent.returncode == 6
            assert cli.duly("add", "user", "bob").returncode == 0
        else:
            assert [json.loads(line)["sent"]["n"] for line in sent.stdout.splitlines()] == [1, 2]
    assert "ann → bob" in watching.line("one_chat accepted, number 2")


def test_with_a_password_from_elsewhere(cli: CommandLine, tmp_path: Path) -> None:
    hub = cli.up()
    url = f"http://127.0.0.1:{cli.port}"
    env = cli.env | {"DULY_PASSWORD": "correct horse"}
    urls = f"http://127.0.0.1:{free_port()},{url}"
    command = [sys.executable, "-m", "duly", "chat", "--as", "zoe", "--url", urls, "--json"]
    for more, code in (("--register", 0), ("", 0), ("--register", 6)):
        done = subprocess.run(
            [*command, *more.split()], cwd=tmp_path, env=env, input="", capture_output=True, text=True,
            check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    wrong = subprocess.run(
        command, cwd=tmp_path, env=env | {"DULY_PASSWORD": "wrong horse"}, input="", capture_output=True,
        text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert wrong.returncode == 4
    hub.stop()
    away = subprocess.run(
        command, cwd=tmp_path, env=env, input="", capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert away.returncode == 3


def test_what_others_say_does_not_steer_the_terminal(cli: CommandLine, windows: list[Window]) -> None:
    cli.up()
    bob = Window(cli, "--as", "bob")
    windows.append(bob)
    bob.until("/to NAME to begin")
    nasty = "\x1b]0;owned\x07 \x01\x1b[2J\x02 \u202egnirts"
    said = subprocess.run(
        [sys.executable, "-m", "duly", "chat", "--as", "ann", "--to", "bob"],
        cwd=cli.folder, env=cli.env, input=f"{nasty}\n", capture_output=True, text=True, check=False,
        timeout=SECONDS,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    bob.until("ann: �]0;owned� ��[2J� �gnirts")


def test_through_tls_on_the_hubs_own_machine(cli: CommandLine, tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("hub.example")
    hub = cli.up("--tls-cert", str(cert), "--tls-key", str(key))
    for name in ("bob", "ann"):
        said = subprocess.run(
            [sys.executable, "-m", "duly", "chat", "--as", name, "--to", "bob", "--json"],
            cwd=cli.folder, env=cli.env, input="hello\n", capture_output=True, text=True, check=False,
            timeout=SECONDS,
        )  # fmt: skip
        assert said.returncode == 0, said.stderr
    hub.stop()


def test_who_was_logged_out_everywhere_is_told_and_need_not_wait(
    cli: CommandLine, windows: list[Window]
) -> None:
    cli.up()
    url = f"http://127.0.0.1:{cli.port}"

    async def register() -> str:
        await Chat.register(url, "ann", "correct horse")
        return await Chat.log_in(url, "ann", "correct horse")

    async def log_out(token: str) -> None:
        async with Chat(url, token) as client:
            await client.log_out(everywhere=True)

    token = asyncio.run(register())
    ann = Window(cli, "--as", "ann", "--to", "ann")
    windows.append(ann)
    ann.until("ann>")
    asyncio.run(log_out(token))
    for n in range(100):
        ann.type(f"line {n}")
        try:
            ann.until("you were logged out", 0.3)
            break
        except AssertionError:
            continue  # it takes a moment until its next try
    ann.type("/quit")
    ann.until("not sent:")
    ann.process.wait(SECONDS)
