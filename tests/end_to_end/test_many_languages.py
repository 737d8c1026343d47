"""A lock in C, a phone in JavaScript and an app in Python on one hub, over a bad network; each is killed.

The law: nothing is done twice by the lock's own file, every sender learns how each of its commands ended, and
that is what the file says.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path

import pytest

from duly.cli.bad_network import BadConnection, Damage
from tests import servers
from tests.end_to_end.processes import HubProcess, end
from tests.end_to_end.test_chaos import SlowProxy
from tests.proof import count

ROOT = Path(__file__).parents[2]
SOURCES = Path(str(files("duly"))) / "clients" / "c"
PRESSES = int(os.environ.get("DULY_PRESSES", "40"))
"""of each sender; each program is killed once for every twenty"""


class RestartedProgram:
    """A program that can be killed and started again with the same words."""

    def __init__(self, name: str, folder: Path, *words: object) -> None:
        self.name = name
        self.deaths = 0
        self._words = [str(word) for word in words]
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdout=log, stderr=log, cwd=ROOT
            )

    async def kill(self) -> None:
        if self._process is not None:
            await end(self._process)

    async def die(self) -> None:
        """Be killed, and come back."""
        await self.kill()
        self.deaths += 1
        count("kills", 1)
        await self.start()

    async def finish(self) -> None:
        """Wait until it has ended by itself."""
        assert self._process is not None
        assert await self._process.wait() == 0, f"{self.name}: {self._log.read_text()[-2000:]}"


def lock_program(folder: Path) -> Path:
    if shutil.which("gcc") is None:
        servers.missing("gcc")
    target = folder / "lock"
    done = subprocess.run(
        ["make", "-C", SOURCES, "CC=gcc", f"OUT={target}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def effects(file: Path) -> list[tuple[str, str]]:
    """What the lock did, by its own file: (app, id)."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(line.split(" ")[0], line.split(" ")[1]) for line in lines]


def outcomes(file: Path) -> dict[str, str]:
    """How each press ended, as its sender knows it."""
    found = (json.loads(line) for line in file.read_text().splitlines())
    return {one["id"]: one["state"] for one in found}


async def kill_them_all(
    file: Path, presses: int, rounds: int, victims: list[Callable[[], Awaitable[None]]]
) -> None:
    """Kill one after the other, each when the lock has done some more."""
    kills = rounds * len(victims)
    for n in range(kills):
        due = (n + 1) * presses // (kills + 2)
        while len(effects(file)) < due:
            await asyncio.sleep(0.02)
        await victims[n % len(victims)]()


@pytest.mark.proof
@pytest.mark.timeout(900)
async def test_each_is_killed_and_all_agree(tmp_path: Path) -> None:
    node = shutil.which("node") or servers.missing("node")
    presses, rounds = PRESSES, PRESSES // 20
    port = servers.free_port()
    hub = HubProcess(tmp_path / "hub", mqtt_port=port, patience=2)
    tokens = await hub.prepare(["phone", "desk"], ["lock"])
    done = tmp_path / "effects"
    damage, chance = Damage(), random.Random(11)
    async with AsyncExitStack() as stack:
        await hub.start()
        stack.push_async_callback(hub.kill)
        wire = await stack.enter_async_context(SlowProxy(port))
        trouble = asyncio.create_task(wire.misbehave(random.Random(12)))
        stack.callback(trouble.cancel)
        ways: dict[str, BadConnection] = {}
        for name in ("phone", "desk"):
            ways[name] = BadConnection(hub.url, damage, chance)
            await ways[name].start()
            stack.push_async_callback(ways[name].stop)
        jobs = {
            name: json.dumps({
                "url": ways[name].url, "token": tokens[name], "file": str(tmp_path / f"{name}.ends"),
                "first": int(time.time() * 1000), "presses": presses,
            })
            for name in ways
        }  # fmt: skip
        script = ROOT / "tests/clients/js/press_process.mjs"
        lock = RestartedProgram(
            "lock", tmp_path, lock_program(tmp_path), "127.0.0.1", wire.port, "lock", tokens["lock"],
            tmp_path / "flash", done,
        )  # fmt: skip
        phone = RestartedProgram(
            "phone", tmp_path, node, "--no-warnings", "--experimental-websocket", script, jobs["phone"]
        )
        desk = RestartedProgram(
            "desk", tmp_path, sys.executable, "-m", "tests.end_to_end.press_process", jobs["desk"]
        )
        for program in (lock, phone, desk):
            await program.start()
            stack.push_async_callback(program.kill)

        async def kill_hub() -> None:
            await hub.kill()
            await hub.start()

        await kill_them_all(done, 2 * presses, rounds, [lock.die, phone.die, kill_hub, desk.die])
        for way in ways.values():
            way.calm = True
        await phone.finish()
        await desk.finish()
    count("messages under faults", 2 * presses)
    judge(effects(done), {name: outcomes(tmp_path / f"{name}.ends") for name in ways}, presses)
    assert (lock.deaths, phone.deaths, desk.deaths) == (rounds, rounds, rounds)
    assert damage.cuts > 0


def judge(did: list[tuple[str, str]], told: dict[str, dict[str, str]], presses: int) -> None:
    twice = [key for key, times in Counter(did).items() if times > 1]
    assert not twice, f"done twice: {twice}"
    for name, ends in told.items():
        assert len(ends) == presses, f"{name} does not know how some ended"
        mine = {id_ for app, id_ in did if app == name}
        by_state: dict[str, set[str]] = {}
        for id_, state in ends.items():
            by_state.setdefault(state, set()).add(id_)
        assert by_state.keys() <= {"done", "unknown", "superseded"}, Counter(ends.values())
        assert by_state.get("done", set()) <= mine, f"{name} believes in what was not done"
        assert not by_state.get("superseded", set()) & mine, f"{name} was told that what was done was not"
        assert len(by_state.get("done", set())) > presses // 2, Counter(ends.values())


def test_the_judge_finds_what_is_wrong() -> None:
    sound = {"phone": {"1_0": "done", "1_1": "superseded", "1_2": "done"}}
    did = [("phone", "1_0"), ("phone", "1_2")]
    judge(did, sound, 3)
    for wrong, said, why in (
        ([*did, did[0]], sound, "done twice"),
        (did[:1], sound, "was not done"),
        ([*did, ("phone", "1_1")], sound, "was told"),
        (did, {"phone": {"1_0": "done", "1_2": "done"}}, "does not know"),
    ):
        with pytest.raises(AssertionError, match=why):
            judge(wrong, said, 3)
