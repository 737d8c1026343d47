"""The node in Go, at a real broker with a node in Python: every message comes twice, both are killed, and
what happened is read in the file that the node itself wrote."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.core.retry import RetryPolicy
from duly.core.signing import Algorithm, Key, Keyring
from duly.core.units import MS
from duly.errors import TaskFailed, Unknown
from tests import servers
from tests.clients.node.nodes import own_name
from tests.go_programs import SOURCE
from tests.guard import GUARD

SOON = RetryPolicy.fixed(300 * MS, tries=None)
WITHIN = GUARD


def go(*words: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("go")
    if found is None:
        servers.missing("go")
    return subprocess.run(
        [found, *words], cwd=SOURCE, capture_output=True, text=True, check=False, timeout=GUARD
    )


@pytest.fixture(scope="module")
def lamp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example program, built once."""
    target = tmp_path_factory.mktemp("go") / "lamp"
    done = go("build", "-o", str(target), "./cmd/lamp")
    if "dial tcp" in done.stderr or "no such host" in done.stderr:
        servers.unable("Go's modules cannot be fetched: their registry is out of reach")
    assert done.returncode == 0, done.stderr
    return target


class GoNode:
    """The example program as a process that can be killed and started again."""

    def __init__(self, program: Path, *words: str) -> None:
        self._words = [str(program), *words]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    async def serve(self) -> None:
        await self.start()
        assert self.process is not None
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), WITHIN)
        assert line == b"serving\n", (await self.process.communicate())[1].decode()

    async def kill(self) -> list[dict[str, Any]]:
        """Kill it; what it had said."""
        assert self.process is not None
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)
        out, _ = await self.process.communicate()
        return [json.loads(line) for line in out.splitlines() if line.endswith(b"}")]

    async def ended(self) -> list[dict[str, Any]]:
        assert self.process is not None
        out, err = await asyncio.wait_for(self.process.communicate(), WITHIN)
        assert self.process.returncode == 0, err.decode()
        return [json.loads(line) for line in out.splitlines()]


class Doubler:
    """Carries tasks and answers from one prefix to the other, each twice. Tasks go to `worker` under `west`,
    answers to `sender` under `east`."""

    def __init__(self, port: int, sender: str, worker: str) -> None:
        self.carried = 0
        self._ways = {f"east/{worker}/pending": f"west/{worker}/pending"}
        self._ways |= {
            f"west/{sender}/{kind}": f"east/{sender}/{kind}" for kind in ("ack", "complete", "failed")
        }
        self._client = paho.Client(CallbackAPIVersion.VERSION2, f"doubler-{sender}", clean_session=True)
        self._client.on_message = self._carry
        self._client.on_subscribe = self._subscribed
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._port = port

    async def __aenter__(self) -> Doubler:
        self._client.connect("127.0.0.1", self._port)
        self._client.loop_start()
        self._client.subscribe([(topic, 1) for topic in self._ways])
        await asyncio.wait_for(self._ready.wait(), WITHIN)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)

    def _subscribed(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ready.set)

    def _carry(self, _: paho.Client, __: Any, message: paho.MQTTMessage) -> None:
        self.carried += 1
        for _again in range(2):
            self._client.publish(self._ways[message.topic], message.payload, qos=1)


def effects(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


@pytest.mark.parametrize("guide", ["docs/go.md", "docs/zh/go.md"])
def test_the_example_of_the_guide_runs_as_printed(
    mosquitto_server: servers.Mosquitto, lamp: Path, tmp_path: Path, guide: str
) -> None:
    name = own_name("B")
    (example,) = re.findall(r"```go\n(.*?)```", (SOURCE.parents[3] / guide).read_text(), re.DOTALL)
    there = example.replace("mqtt://B:secret@localhost:1883", mosquitto_server.url(name))
    (tmp_path / "main.go").write_text(there.replace('"B"', f'"{name}"'))
    shown = {"Replace": {str(SOURCE / "cmd" / "guide" / "main.go"): str(tmp_path / "main.go")}}
    (tmp_path / "overlay.json").write_text(json.dumps(shown))
    built = go(
        "build", "-overlay", str(tmp_path / "overlay.json"), "-o", str(tmp_path / "guide"), "./cmd/guide"
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [tmp_path / "guide"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=GUARD
    )
    assert done.stdout == '{"on":true} <nil>\n'


@pytest.fixture
def names() -> tuple[str, str]:
    return own_name("A"), own_name("B")


def test_the_modules_own_tests_pass(lamp: Path) -> None:
    vetted, tested = go("vet", "./..."), go("test", "./...")
    assert vetted.returncode == 0, vetted.stderr
    assert tested.returncode == 0, tested.stdout
    assert not go("mod", "verify").returncode
    assert "://" not in (SOURCE / "go.sum").read_text() + (SOURCE / "go.mod").read_text()


@pytest.mark.parametrize(("count", "kills"), [(40, 2), pytest.param(600, 12, marks=pytest.mark.proof)])
async def test_a_task_sent_twice_to_a_node_that_is_killed_takes_effect_once(
    mosquitto_server: servers.Mosquitto,
    lamp: Path,
    tmp_path: Path,
    names: tuple[str, str],
    count: int,
    kills: int,
) -> None:
    sender, worker = names
    url, book = mosquitto_server.url, tmp_path / "effects"
    program = GoNode(
        lamp, "-url", url(worker), "-prefix", "west", "-store", str(tmp_path / "b"), "-effects", str(book),
        "-work", "5ms", "-at-once", "4", "serve",
    )  # fmt: skip
    await program.serve()
    async with (
        Doubler(mosquitto_server.port, sender, worker) as doubler,
        Node(url(sender), name=sender, prefix="east", resend=SOON) as python,
    ):
        tasks = [await python.send(worker, "turn_on", {"lamp": n}, expires=WITHIN) for n in range(count)]
        for kill in range(kills):
            while len(effects(book)) < (kill + 1) * count // (kills + 2):
                await asyncio.sleep(0.005)
            await program.kill()
            await program.serve()
        ends: Counter[str] = Counter()
        for n, task in enumerate(tasks):
            try:
                assert await asyncio.wait_for(task.result, WITHIN) == {"on": True, "lamp": n}
                ends["done"] += 1
                assert effects(book)[task.id] == 1
            except Unknown:
                ends["unknown"] += 1
    await program.kill()
    done = effects(book)
    assert max(done.values()) == 1
    assert sum(ends.values()) == count
    assert ends["done"] <= len(done) <= count
    assert ends["unknown"] <= 4 * kills
    assert doubler.carried > 2 * count


async def test_at_least_once_runs_again_after_a_crash_and_ends_as_done(
    mosquitto_server: servers.Mosquitto, lamp: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    sender, worker = names
    url, book = mosquitto_server.url, tmp_path / "effects"
    words = ["-url", url(worker), "-store", str(tmp_path / "b"), "-effects", str(book), "-again"]
    slow, quick = GoNode(lamp, *words, "-work", "1m", "serve"), GoNode(lamp, *words, "serve")
    await slow.serve()
    async with Node(url(sender), name=sender, resend=SOON) as python:
        task = await python.send(worker, "turn_on", {"lamp": 1}, expires=WITHIN)
        while not effects(book):
            await asyncio.sleep(0.005)
        await slow.kill()
        await quick.serve()
        assert await asyncio.wait_for(task.result, WITHIN) == {"on": True, "lamp": 1}
        with pytest.raises(TaskFailed, match="there is no lamp -1"):
            await python.call(worker, "turn_on", {"lamp": -1}, expires=WITHIN)
        with pytest.raises(TaskFailed, match="does not know dance"):
            await python.call(worker, "dance", expires=WITHIN)
    await quick.kill()
    assert effects(book)[task.id] == 2


@pytest.mark.parametrize(("count", "kills"), [(30, 1), pytest.param(300, 8, marks=pytest.mark.proof)])
async def test_a_sender_in_go_that_is_killed_learns_every_end_and_nothing_runs_twice(
    mosquitto_server: servers.Mosquitto,
    lamp: Path,
    tmp_path: Path,
    names: tuple[str, str],
    count: int,
    kills: int,
) -> None:
    sender, worker = names
    url = mosquitto_server.url
    done: Counter[str] = Counter()
    program = GoNode(
        lamp, "-url", url(sender), "-prefix", "east", "-store", str(tmp_path / "a"), "-to", worker,
        "-count", str(count), "-resend", "300ms", "call",
    )  # fmt: skip
    python = Node(url(worker), name=worker, prefix="west", store=str(tmp_path / "b.db"))

    @python.task("turn_on")
    async def turn_on(task: Task) -> dict[str, Any]:
        done[task.id] += 1
        await asyncio.sleep(0.02)
        return {"lamp": task.payload["lamp"]}

    async with python, Doubler(mosquitto_server.port, sender, worker):
        for kill in range(kills):
            await program.start()
            while len(done) < (kill + 1) * count // (kills + 2):
                await asyncio.sleep(0.005)
            await program.kill()
        await program.start()
        said = await program.ended()
    assert {(one["id"], one["state"]) for one in said} == {(f"{sender}-{n}", "done") for n in range(count)}
    assert {one["value"] for one in said} == {
        json.dumps({"lamp": n}, separators=(",", ":")) for n in range(count)
    }
    assert set(done.values()) == {1}
    assert len(done) == count


async def test_signed_tasks_and_answers_are_believed_and_others_are_not(
    mosquitto_server: servers.Mosquitto, lamp: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    sender, worker = names
    url, book = mosquitto_server.url, tmp_path / "effects"
    ours, theirs, strangers = (Key(Algorithm.ED25519, secret=bytes([n]) * 32) for n in (1, 2, 3))
    program = GoNode(
        lamp, "-url", url(worker), "-effects", str(book), "-key", theirs.secret.hex(),
        "-trust", f"{sender}={ours.shown}", "serve",
    )  # fmt: skip
    await program.serve()
    ring = Keyring(sender, own=ours).trust(worker, theirs)
    async with Node(url(sender), name=sender, keys=ring, require_signed=True) as python:
        assert await python.call(worker, "turn_on", {"lamp": 1}, expires=WITHIN) == {"on": True, "lamp": 1}
    forged = Keyring(sender, own=strangers)
    async with Node(url(sender), name=sender, keys=forged, resend=SOON) as python:
        task = await python.send(worker, "turn_on", {"lamp": 2}, expires=1)
        with pytest.raises(Unknown):
            await asyncio.wait_for(task.result, WITHIN)
    await program.kill()
    assert sum(effects(book).values()) == 1


async def test_a_second_process_in_the_same_name_is_refused(
    mosquitto_server: servers.Mosquitto, lamp: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    name = names[1]
    words = ["-url", mosquitto_server.url(name), "-effects", str(tmp_path / "effects"), "serve"]
    first, second = GoNode(lamp, *words), GoNode(lamp, *words)
    await first.serve()
    await second.start()
    assert second.process is not None
    _, err = await asyncio.wait_for(second.process.communicate(), WITHIN)
    assert second.process.returncode == 1
    assert b"another process is at the mailbox" in err
    await first.kill()
