"""The JavaScript package in Node, against a real hub: sentinels and apps that are killed; a black hole."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duly.apps.alerts.profiles import ProfileDraft
from duly.clients.device import Command, Device
from duly.core.monitor.signals import read_event
from duly.identity.accounts import Role
from tests import servers
from tests.end_to_end.test_black_hole import Hole
from tests.guard import GUARD
from tests.local_hub import LocalHub

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "js"
PACKAGE = Path(str(files("duly"))) / "clients" / "js"
POINTS = [
    "before commit",
    "after commit",
    "before sending",
    "after sending",
    "before the answer",
    "after the answer",
]


def node(*words: str) -> list[str]:
    """The command line of Node; version 20 has its WebSocket only when told."""
    found = shutil.which("node")
    if found is None:
        servers.missing("node")
    return [found, "--no-warnings", "--experimental-websocket", *words]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path_factory.mktemp("js") / "hub")
    await it.start()
    await it.hub.alerts.profiles.set("home", ProfileDraft(nobody=True))
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


class Program:
    """A script in Node that can be started, killed and started again."""

    def __init__(self, script: str, **job: Any) -> None:
        self._script = script
        self._job = job

    async def run(self, **more: Any) -> tuple[int, list[dict[str, Any]]]:
        """Run it until it ends; its exit code, and what it told."""
        process = await self.start(**more)
        out, err = await asyncio.wait_for(process.communicate(), GUARD)
        assert process.returncode is not None
        assert process.returncode in (0, -signal.SIGKILL), err.decode()
        return process.returncode, [json.loads(line) for line in out.splitlines() if line.endswith(b"}")]

    async def start(self, **more: Any) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *node(str(HERE / self._script), json.dumps(self._job | more)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


async def sentinel(local: LocalHub, folder: Path, name: str, **job: Any) -> Program:
    if name not in local.tokens:
        await local.add(Role.SENTINEL, name)
    job = {"url": local.url, "signals": 5, "point": "", "count": 0} | job
    return Program("sentinel_process.mjs", token=local.tokens[name], file=str(folder / name), **job)


async def listed(local: LocalHub, name: str) -> Counter[str]:
    """How often the tower lists an event of which device of a sentinel."""
    records = await local.hub.ledger.of_kind("alert_event", limit=10_000)
    return Counter(
        read_event(one.message.body).device_address for one in records if one.message.scope == name
    )


@pytest.mark.parametrize(
    ("points", "count"),
    [
        (["after commit", "after sending", "before the answer"], 1),
        pytest.param(POINTS, 1, marks=pytest.mark.proof),
        pytest.param(POINTS, 2, marks=pytest.mark.proof),
        pytest.param(POINTS, 4, marks=pytest.mark.proof),
    ],
)
async def test_sentinels_killed_at_every_point_lose_nothing_and_repeat_nothing(
    local: LocalHub, tmp_path: Path, points: list[str], count: int
) -> None:
    async def live(point: str) -> None:
        name = f"watch-{len(points)}-{POINTS.index(point)}-{count}"
        program = await sentinel(local, tmp_path, name)
        assert (await program.run(point=point, count=count))[0] == -signal.SIGKILL
        assert (await program.run())[0] == 0
        assert await listed(local, name) == Counter({f"device-{n}": 1 for n in range(5)})

    await asyncio.gather(*map(live, points))


async def test_a_sentinel_works_without_its_tower_and_reports_when_it_is_there(
    local: LocalHub, tmp_path: Path
) -> None:
    program = await sentinel(
        local, tmp_path, "offline", url=f"http://127.0.0.1:{servers.free_port()}", signals=3
    )
    process = await program.start()
    assert process.stdout is not None
    while b"device-2" not in await process.stdout.readline():
        pass
    os.kill(process.pid, signal.SIGKILL)
    await process.communicate()
    assert (await program.run(url=local.url))[0] == 0
    assert await listed(local, "offline") == Counter({f"device-{n}": 1 for n in range(3)})


@pytest.mark.proof
async def test_a_sentinel_in_a_black_hole_connects_anew_and_reports_once(
    local: LocalHub, tmp_path: Path
) -> None:
    """The connection stays open and swallows everything; after six seconds of silence it is given up."""
    hole = Hole(local.port)
    await hole.start()
    program = await sentinel(local, tmp_path, "swallowed", url=f"http://127.0.0.1:{hole.port}", signals=1)
    await program.run()
    process = await program.start(signals=40)
    assert process.stdout is not None
    while b"online" not in await process.stdout.readline():
        pass
    hole.swallow()
    news = b""
    while b"offline" not in news:
        news = await asyncio.wait_for(process.stdout.readline(), GUARD)
    hole.heal(late=3)
    await asyncio.wait_for(process.communicate(), GUARD)
    assert process.returncode == 0
    assert await listed(local, "swallowed") == Counter({f"device-{n}": 1 for n in range(40)})
    await hole.close()


async def test_an_app_killed_in_the_middle_learns_every_end_and_nothing_is_done_twice(
    local: LocalHub, tmp_path: Path
) -> None:
    effects: list[str] = []
    device = Device(local.url, local.tokens["lock"])
    working, free = asyncio.Event(), asyncio.Event()

    @device.on("lock_control")
    async def lock_control(command: Command) -> None:
        effects.append(command.id)
        if command.data["n"] == 2:
            working.set()
            await free.wait()

    program = Program(
        "app_process.mjs",
        url=local.url,
        token=local.tokens["phone"],
        file=str(tmp_path / "phone"),
        commands=0,
    )
    async with device:
        process = await program.start(commands=6)
        assert process.stdout is not None
        before = set()
        async with asyncio.timeout(GUARD):
            while (line := await process.stdout.readline()) != b"accepted\n":
                before.add(json.loads(line)["id"])
            await working.wait()
        os.kill(process.pid, signal.SIGKILL)
        out, _ = await process.communicate()
        before |= {json.loads(line)["id"] for line in out.splitlines() if line.endswith(b"}")}
        free.set()
        code, ends = await program.run()
    assert code == 0
    assert {end["ack"]["state"] for end in ends} == {"done"}
    assert before | {end["id"] for end in ends} >= set(effects)
    assert len(effects) == len(set(effects)) == 6


async def test_over_http_a_sentinel_reaches_its_tower_too(local: LocalHub, tmp_path: Path) -> None:
    program = await sentinel(local, tmp_path, "plain", transport="http")
    code, news = await program.run(point="after commit", count=4)
    assert code == -signal.SIGKILL
    code, news = await program.run()
    assert code == 0
    assert "online" in {one["what"] for one in news}
    assert await listed(local, "plain") == Counter({f"device-{n}": 1 for n in range(5)})


async def test_over_http_a_token_that_is_not_known_is_told(local: LocalHub) -> None:
    script = f"""
        import {{ Sentinel }} from {json.dumps((PACKAGE / "src/sentinel.js").as_uri())};
        const url = {json.dumps(local.url)};
        const sentinel = new Sentinel(url, "duly_wrong", {{ store: null, transport: "http" }});
        sentinel.on("news", ({{ what, detail }}) => {{
          console.log(JSON.stringify({{ what, detail }}));
          sentinel.close();
        }});
        try {{
          new Sentinel(url, "x", {{ store: null, transport: "pigeon" }});
        }} catch ({{ message }}) {{
          console.log(JSON.stringify({{ what: message }}));
        }}
    """
    process = await asyncio.create_subprocess_exec(
        *node("--input-type=module", "-e", script), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(GUARD):
        out, err = await process.communicate()
    said = [json.loads(line) for line in out.splitlines()]
    assert [one["what"] for one in said] == ["transport is 'websocket' or 'http'", "denied"], err.decode()
    assert "token" in said[1]["detail"]


async def test_a_file_of_a_device_arrives_whole(local: LocalHub, tmp_path: Path) -> None:
    picture = os.urandom(700_000)
    (tmp_path / "cam.jpg").write_bytes(picture)
    device = Device(local.url, local.tokens["lock"])
    device.serve("cam.jpg", tmp_path / "cam.jpg")
    script = f"""
        import {{ App }} from {json.dumps((PACKAGE / "src/app.js").as_uri())};
        import {{ writeFileSync }} from "node:fs";
        const [url, token] = {json.dumps([local.url, local.tokens["phone"]])};
        const app = new App(url, token, {{ storage: null }});
        const told = [];
        const progress = (done, all) => told.push([done, all]);
        writeFileSync("got", await app.download("lock", "cam.jpg", {{ progress }}));
        const missing = await app.download("lock", "none").catch(({{ message }}) => message);
        console.log(JSON.stringify({{ told, missing }}));
        app.close();
    """
    async with device:
        process = await asyncio.create_subprocess_exec(
            *node("--input-type=module", "-e", script), cwd=tmp_path, stdout=subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), GUARD)
    found = json.loads(out)
    assert (tmp_path / "got").read_bytes() == picture
    assert found["told"][-1] == [8, 8]
    assert "lock: there is no media 'none'" in found["missing"]


@pytest.mark.parametrize("guide", ["docs/js.md", "docs/zh/js.md"])
async def test_the_examples_of_the_guide_run_as_printed(local: LocalHub, tmp_path: Path, guide: str) -> None:
    """Each with the package installed as npm would."""
    examples = re.findall(r"```js\n(.*?)```", (ROOT / guide).read_text(), re.DOTALL)
    assert len(examples) == 2
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "duly").symlink_to(PACKAGE)
    if "guide" not in local.tokens:
        await local.add(Role.SENTINEL, "guide")
        await local.add(Role.DEVICE, "lock-1")
        await local.hub.accounts.grant("phone", "lock-1")
    device = Device(local.url, local.tokens["lock-1"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> Any:
        return command.data

    async with device:
        for account, example in zip(("guide", "phone"), examples, strict=True):
            program = tmp_path / f"{account}.mjs"
            given = json.dumps([local.url, local.tokens[account]])
            program.write_text(
                f"const [url, token] = {given};\n{example}\nconsole.log(`state: ${{state}}`);\n"
            )
            process = await asyncio.create_subprocess_exec(
                *node(str(program)), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, err = await asyncio.wait_for(process.communicate(), GUARD)
            assert (process.returncode, out.splitlines()[-1]) == (0, b"state: done"), err.decode()
