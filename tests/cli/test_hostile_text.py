"""Text of strangers on a real terminal: every verb that shows it, and the hub itself, in a pty.

What is sent comes from clients that share no code with duly. The terminal must get no control character but
line breaks, however the text got there: in bodies, reasons, names, errors, ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests import servers
from tests.cli.conftest import CommandLine
from tests.cli.test_node import Terminals
from tests.clients.node.nodes import own_name
from tests.end_to_end.raw import join
from tests.guard import GUARD

SECONDS = GUARD
HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x1b[35m\x9b2J\x7f\x08\u202egnp\u2066\nforged\rline\x00\u2028"
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Screen:
    """A verb whose output, both of it, is a terminal."""

    def __init__(self, cli: CommandLine, *args: str) -> None:
        here, there = pty.openpty()
        modes = termios.tcgetattr(there)
        modes[1] &= ~termios.OPOST  # a line break is one character, as it was printed
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(there, termios.TCSANOW, modes)
        self._here = here
        self.process = subprocess.Popen(
            [sys.executable, "-m", "duly", *args],
            cwd=cli.folder, env=cli.env, stdin=subprocess.PIPE, stdout=there, stderr=there,
        )  # fmt: skip
        os.close(there)
        self._said = b""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._here, 65_536)
            except OSError:  # nobody is at the other end any more
                part = b""
            with self._news:
                self._said += part
                self._news.notify_all()
            if not part:
                return

    @property
    def text(self) -> str:
        return self._said.decode()

    def until(self, words: str) -> str:
        """What it has printed once these words are there."""
        with self._news:
            assert self._news.wait_for(lambda: words in self.text, SECONDS), self.text
        return self.text

    def end(self) -> str:
        """Everything it printed, once it has ended by itself."""
        self.process.wait(SECONDS)
        return self._close()

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def _close(self) -> str:
        self._reader.join(SECONDS)
        os.close(self._here)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.text


def harmless(text: str, *, told: bool = True) -> None:
    """Nothing in it steers a terminal; and what was sent is in it all the same."""
    found = STEERING.search(text)
    assert found is None, (ascii(found), text[-2000:])
    if told:
        assert "pwned" in text, text[-2000:]
    assert "\nforged" not in text, "a stranger's line break makes no line"


def show(cli: CommandLine, *args: str) -> str:
    """What a verb prints on a terminal."""
    return Screen(cli, *args).end()


class House(CommandLine):
    url: str
    tokens: dict[str, str]
    hub: Screen
    sent: str
    screens: list[Screen]

    def screen(self, *args: str) -> Screen:
        """A verb on a terminal, which is ended with the house."""
        self.screens.append(Screen(self, *args))
        return self.screens[-1]

    def post(self, who: str, *frames: dict[str, object]) -> list[dict[str, Any]]:
        async def run() -> list[dict[str, Any]]:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.tokens[who]}"}) as http:
                said = []
                for frame in frames:
                    async with http.post(f"{self.url}/v1/messages", json=frame) as answer:
                        said.append(await answer.json())
                return said

        return asyncio.run(run())


def now(n: int = 0) -> str:
    return f"{time.time_ns() // 1_000_000}_{n}"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A hub on a terminal, whose people, devices and sentinels are all hostile."""
    it = House(tmp_path_factory.mktemp("house"))
    it.screens = []
    it.hub = it.screen("up", "--no-mqtt", "--port", "0")
    try:
        it.hub.until("ready")
        found = re.search(r"ready (\S+)", it.hub.text)
        assert found is not None
        it.url = found[1]
        it.tokens = {
            name: it.duly("add", kind, name).stdout.strip()
            for kind, name in (("app", "phone"), ("device", "lock"), ("sentinel", "guard"), ("user", "ann"),
                               ("user", "bob"))
        }  # fmt: skip
        it.duly("grant", "phone", "lock")
        it.duly("profile", "set", "home", "--send", "console:")
        asyncio.run(_misbehave(it))
        yield it
    finally:
        for screen in it.screens:
            if screen.process.poll() is None:
                screen.stop()
        it.end()


async def _misbehave(it: House) -> None:
    async with join(it.url, it.tokens["phone"]) as phone, join(it.url, it.tokens["lock"]) as lock:
        it.sent = await phone.command("lock", data={"text": HOSTILE})
        await lock.obey(3, data={"why": HOSTILE}, error=HOSTILE, detail=HOSTILE)
        await lock.say("event_report", data={"text": HOSTILE})
        await phone.hear_of(it.sent)
        await phone.say("lock_control", seq_id=HOSTILE, to="lock")
        await phone.say("lock_control", seq_id=now(7), to=HOSTILE)
        await phone.say(HOSTILE, seq_id=now(8), to="lock")
        for _ in range(3):
            await phone.hear()
    async with join(it.url, it.tokens["guard"]) as guard:
        for n, severity in enumerate(("warning", "critical")):
            data = {
                "profile_id": "home", "trigger_reason": HOSTILE, "device_address": HOSTILE,
                "timestamp": time.time_ns() // 1_000_000, "severity": severity,
                "device_meta": {"name": HOSTILE}, "location": {"place": HOSTILE},
            }  # fmt: skip
            await guard.say("alert_event", seq_id=f"event-{n}", data=data)
            await guard.hear()


VERBS = {
    "outcome": ("outcome", "{sent}"),
    "trace": ("trace", "{sent}"),
    "why": ("why",),
    "alert list": ("alert", "list"),
    "alert show": ("alert", "show", "event-0"),
    "deliveries show": ("deliveries", "show", "event-0"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_verb_that_shows_what_strangers_said(house: House, verb: str, form: str) -> None:
    args = [word.format(sent=house.sent) for word in VERBS[verb]]
    more = ["--json"] if form == "json" else []
    harmless(show(house, *args, *more), told=verb != "deliveries show")


@pytest.mark.parametrize("verb", ["list", "profile list", "profile show home", "deliveries list", "doctor"])
def test_a_verb_that_shows_names_and_reasons(house: House, verb: str) -> None:
    harmless(show(house, *verb.split()), told=False)


def test_with_colours_only_ours_are_left(house: House) -> None:
    house.env.pop("NO_COLOR")
    try:
        shown = show(house, "trace", house.sent)
    finally:
        house.env["NO_COLOR"] = "1"
    assert "\x1b[31m" in shown, "failed is red"
    harmless(re.sub("\x1b\\[(0|2|31|32|33)m", "", shown))


def test_the_hub_itself_and_its_console_channel(house: House) -> None:
    harmless(house.hub.until("pwned"))


def test_what_is_watched(house: House) -> None:
    watching = house.screen("watch")
    watching.until("watching")
    house.post("phone", {"type": "lock_control", "seq_id": HOSTILE, "to": "lock"})
    watching.until("pwned")
    harmless(watching.stop())


def test_what_is_said_in_a_chat(house: House) -> None:
    (made,) = house.post(
        "ann", {"type": "group_create", "seq_id": now(1), "data": {"name": HOSTILE, "members": ["bob"]}}
    )
    group = made["data"]["group"]
    house.post(
        "ann",
        {"type": "one_chat", "seq_id": now(2), "to": "bob", "data": {"text": HOSTILE}},
        {"type": "group_chat", "seq_id": now(3), "to": group, "data": {"text": HOSTILE}},
    )
    bob = house.screen("chat", "--as", "bob", "--to", "ann")
    assert bob.process.stdin is not None
    bob.process.stdin.write(b"/list\n/to %s\n/history\n/members\n/nonsense\n" % str(group).encode())
    bob.process.stdin.flush()
    bob.until("there is no /nonsense")
    bob.process.stdin.close()
    harmless(bob.end())


def test_what_a_device_is_told(house: House) -> None:
    device = house.screen("device", "lock")
    device.until("is online")
    house.post(
        "phone",
        {"type": "lock_control", "seq_id": now(9), "to": "lock", "data": {"open": True, "note": HOSTILE}},
    )
    device.until("pwned")
    harmless(device.stop())


def test_what_one_sends_and_hears(house: House) -> None:
    here = threading.Event()

    async def answer() -> None:
        async with join(house.url, house.tokens["lock"]) as lock:
            here.set()
            while "text" not in (command := await lock.hear(SECONDS))["data"]:
                await lock.ack(command)  # what the device of another test has left
            await lock.ack(command, 2, data={"why": HOSTILE}, error=HOSTILE)

    lock = threading.Thread(target=lambda: asyncio.run(answer()))
    lock.start()
    assert here.wait(SECONDS)
    harmless(show(house, "send", "lock", "lock_control", json.dumps({"text": HOSTILE})))
    lock.join()


def test_a_hub_that_answers_nonsense(house: House) -> None:
    """An error's words are as foreign as any: here they are a status line's and a body's."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Liar(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error": "x", "detail": HOSTILE}).encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    liar = HTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=liar.serve_forever).start()
    try:
        where = ["--url", f"http://127.0.0.1:{liar.server_port}", "--token", "x"]
        harmless(show(house, "why", *where))
        harmless(show(house, "why", *where, "--json"))
    finally:
        liar.shutdown()
        liar.server_close()


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def terminals(tmp_path: Path, mosquitto_server: servers.Mosquitto) -> Iterator[Terminals]:
    it = Terminals(tmp_path)
    it.port, it.b = mosquitto_server.port, own_name("B")
    yield it
    it.end()


def test_what_a_node_is_asked_and_what_it_shows_of_it(terminals: Terminals) -> None:
    it, a = terminals, own_name("A")
    node = Screen(it, "node", it.b, *it.at(it.b), "--data", "b.db", "--run", "echo=cat")
    node.until("online")
    task = {"sender": a, "receiver": it.b, "action": "echo", "exp": time.time_ns() // 1000 + 60_000_000}
    id_ = "m \x1b[2Jpwned"
    it.pub(a, it.b, "pending", task | {"msg_id": id_, "payload": {"text": HOSTILE}})
    it.pub(a, it.b, "pending", task | {"msg_id": "m2", "action": HOSTILE})
    node.until("pwned")
    it.pub(a, a, "status", {"online": True, "time": time.time_ns() // 1000, "version": HOSTILE})
    harmless(node.stop())
    harmless(show(it, "why", "--data", "b.db"), told=False)
    harmless(show(it, "task", "list", "--data", "b.db"))
    harmless(show(it, "task", "show", id_, "--data", "b.db"))
