"""An upgrade of several hubs: hubs of the version before, and hubs of this one, on one PostgreSQL under load.

The version before is the last commit with the schema before this one, from the history of this repository.
Its hubs go on while the first new hub changes the schema, and are replaced one after the other; a hub of the
version before that is started again is refused. The judge is that of `pressing`.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import ROOT, HubProcess, end
from tests.guard import GUARD, LIMIT
from tests.servers import Postgres, free_port
from tests.storage.old_ledgers import make

BEFORE: Final = list(make.POSTGRES.values())[-1]
SOME: Final = 40
"""Commands of every app to every device that are done between two steps of the upgrade."""
pytestmark = [pytest.mark.proof, pytest.mark.timeout(6 * LIMIT)]


def _git(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, check=False)


@pytest.fixture(scope="module")
def old_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the version before."""
    packed = _git("archive", BEFORE, "src")
    if packed.returncode and _git("rev-parse", "--is-shallow-repository").stdout.strip() != b"false":
        pytest.skip(f"this is no whole clone: it does not have {BEFORE}, the version before")
    assert packed.returncode == 0, packed.stderr.decode()
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


class OldHub:
    """A hub of the version before."""

    def __init__(self, source: Path, folder: Path, ledger: str) -> None:
        self.folder = folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        self._env = clean | {"PYTHONPATH": str(source)}
        self._args = ["--data", str(folder), "--ledger", ledger]
        self._up = ["--port", str(port), "--no-mqtt", "--log-level", "warning"]
        self._process: asyncio.subprocess.Process | None = None

    async def do(self, *args: str) -> str:
        """Run a command of the version before; what it prints."""
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "duly", *args, *self._args,
            env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        said, errors = await program.communicate()
        assert program.returncode == 0, errors.decode()
        return said.decode()

    async def start(self) -> str:
        """Start it; the first line that it prints, which is empty if it refuses."""
        with (self.folder / "errors").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "duly", "up", *self._args, *self._up,
                env=self._env, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(GUARD):
            return (await self._process.stdout.readline()).decode()

    async def kill(self) -> None:
        if self._process is not None:
            await end(self._process)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def errors(self) -> str:
        """What it has complained about."""
        return (self.folder / "errors").read_text()


class _Turns:
    """The hubs of an upgrade: each asking names another of those that are there."""

    def __init__(self, hubs: list[OldHub | HubProcess], first: int = 0) -> None:
        self._hubs, self._n = hubs, first

    @property
    def url(self) -> str:
        self._n += 1
        return self._hubs[self._n % len(self._hubs)].url

    @property
    def errors(self) -> str:
        return "".join(hub.errors for hub in self._hubs)


async def _accounts(hub: OldHub) -> dict[str, str]:
    hub.folder.mkdir(mode=0o700)
    tokens = {}
    for kind, name in (("app", "phone"), ("app", "tablet"), ("device", "lock"), ("device", "lamp")):
        tokens[name] = str(json.loads(await hub.do("add", kind, name, "--json"))["token"])
    for app in ("phone", "tablet"):
        for device in ("lock", "lamp"):
            await hub.do("grant", app, device)
    return tokens


async def test_hubs_of_the_version_before_and_of_this_one_work_beside_each_other(
    tmp_path: Path, postgres_server: Postgres, old_source: Path
) -> None:
    ledger = postgres_server.create_database()
    old = [OldHub(old_source, tmp_path / f"old{n}", ledger) for n in range(2)]
    new = [HubProcess(tmp_path / f"new{n}", ledger=ledger) for n in range(2)]
    tokens = await _accounts(old[0])
    there: list[OldHub | HubProcess] = [*old]
    devices = [
        Lock(_Turns(there, n), tokens[name], tmp_path / name) for n, name in enumerate(("lock", "lamp"))
    ]
    remotes = [
        Remote(_Turns(there, n), name, tokens[name], ordered=n == 0)
        for n, name in enumerate(("phone", "tablet"))
    ]
    try:
        for hub in old:
            assert (await hub.start()).startswith("ready"), hub.errors
            if hub is old[0]:
                _share_key(hub.folder, old[1].folder, *(each.folder for each in new))
        async with pressed(remotes, *devices) as load:
            await load.more(SOME)
            await new[0].start()  # it changes the schema beneath the others
            there.append(new[0])
            await load.more(SOME)
            for hub in old:
                assert hub.alive, hub.errors
            await _replace(there, old[0], new[1])
            await load.more(SOME)
            await _replace(there, old[1], None)
            await load.more(SOME)
        await judge(_Turns(there), [*devices], remotes, ledger=ledger)
        assert all("Traceback" not in hub.errors for hub in old), [hub.errors for hub in old]
        assert not (await old[0].start()).startswith("ready"), "a hub of the version before was started again"
        assert "newer" in old[0].errors, old[0].errors
    finally:
        for hub in old:
            await hub.kill()
        for started in new:
            await started.kill()


def _share_key(folder: Path, *others: Path) -> None:
    """What is secret in the ledger is encrypted with one key."""
    for other in others:
        other.mkdir(mode=0o700)
        shutil.copy(folder / "secret.key", other)


async def _replace(there: list[OldHub | HubProcess], before: OldHub, after: HubProcess | None) -> None:
    """Kill a hub of the version before, and start one of this version in its place."""
    there.remove(before)
    await before.kill()
    if after is not None:
        await after.start()
        there.append(after)
