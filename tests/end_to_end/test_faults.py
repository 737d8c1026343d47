"""What goes wrong without anything dying, under load and before the judge of `pressing`: a hub or a database
that stands still, a full disk, a flush that fails, a network that is cut between a hub and its database.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.pressing import Load, Lock, Remote, judge, pressed
from tests.end_to_end.processes import HubProcess
from tests.end_to_end.raw import curl
from tests.end_to_end.test_black_hole import tell_all
from tests.end_to_end.test_injected_kills import strace
from tests.proof import count
from tests.servers import GUARD, Postgres, unable
from tests.small_disk import small_disk

pytestmark = [pytest.mark.proof, pytest.mark.timeout(4 * GUARD)]

ROUNDS = int(os.environ.get("DULY_FAULTS", "2"))
DEVICES = ("lock", "lamp")
SOME = 5
"""Commands of every app to every device that are done between two faults."""


class Pressed:
    """A hub under load, with what its clients and devices have noted."""

    def __init__(self, hub: HubProcess, load: Load, remotes: list[PatientRemote]) -> None:
        self.hub, self.load, self.remotes = hub, load, remotes

    @property
    def refused(self) -> int:
        """How often an app was told to try again."""
        return sum(remote.refused for remote in self.remotes)

    async def until_unwell(self) -> None:
        """Until the hub says itself that it can store nothing, or an app has been told so."""
        before = self.refused
        async with asyncio.timeout(GUARD):
            while self.refused == before and await self._status() != 503:
                await asyncio.sleep(0.05)

    async def _status(self) -> int:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(2):
                return (await curl(f"{self.hub.url}/v1/health")).status
        return 0


class PatientRemote(Remote):
    """An app that also counts how often it was told to try again."""

    refused = 0

    def _hear(self, frame: dict[str, Any]) -> None:
        self.refused += frame["type"] == "server_ack" and frame.get("code") == 4
        super()._hear(frame)


@contextlib.asynccontextmanager
async def under_load(hub: HubProcess, folder: Path, *, ledger: Path | None = None) -> AsyncIterator[Pressed]:
    """A hub that is started, under load while the block runs, and judged afterwards."""
    tokens = await hub.prepare(["phone", "tablet"], list(DEVICES))
    devices = [Lock(hub, tokens[name], folder / name) for name in DEVICES]
    remotes = [
        PatientRemote(hub, "phone", tokens["phone"], ordered=True),
        PatientRemote(hub, "tablet", tokens["tablet"], ordered=False),
    ]
    await hub.start()
    try:
        async with pressed([*remotes], *devices) as load:
            await load.more(SOME)
            yield Pressed(hub, load, remotes)
            await load.more(SOME)
        await judge(hub, [*devices], [*remotes], ledger=ledger)
    finally:
        await hub.kill()


async def test_a_hub_that_stands_still_for_a_while(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub")
    async with under_load(hub, tmp_path, ledger=tmp_path / "hub" / "ledger.db") as it:
        for _ in range(ROUNDS):
            hub.suspend()
            await asyncio.sleep(2)
            hub.resume()
            await it.load.more(SOME)
            count("faults", 1)


async def test_a_database_that_stands_still_for_a_while(tmp_path: Path, postgres_server: Postgres) -> None:
    ledger = postgres_server.create_database(f"faults_{secrets.token_hex(4)}")
    async with under_load(HubProcess(tmp_path / "hub", ledger=ledger), tmp_path) as it:
        for _ in range(ROUNDS):
            tell_all(postgres_server, signal.SIGSTOP)
            try:
                await it.until_unwell()
            finally:
                tell_all(postgres_server, signal.SIGCONT)
            await it.load.more(SOME)
            count("faults", 1)


async def test_a_disk_that_is_full_and_then_is_not(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "48m") as disk:
        hub = HubProcess(disk / "hub")
        async with under_load(hub, tmp_path, ledger=disk / "hub" / "ledger.db") as it:
            for _ in range(ROUNDS):
                fill(disk / "filler")
                await it.until_unwell()
                (disk / "filler").unlink()
                await it.load.more(SOME)
                count("faults", 1)


def fill(path: Path) -> None:
    """Take all room that a disk has, to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


async def test_a_flush_that_fails(tmp_path: Path) -> None:
    """What a failed flush has lost is not known to any program: the hub takes nothing as stored that was in
    it, and what it has said before is there after a restart."""
    if shutil.which("strace") is None:
        unable("there is no strace: make servers installs it")
    hub = HubProcess(tmp_path / "hub")
    async with under_load(hub, tmp_path, ledger=tmp_path / "hub" / "ledger.db") as it:
        for round_ in range(ROUNDS):
            await hub.kill()
            hub.under = strace("fdatasync,fsync", f"error=EIO:when={40 + 20 * round_}..{44 + 20 * round_}")
            await hub.start()
            await it.until_unwell()
            await hub.kill()
            hub.under = []
            await hub.start()
            await it.load.more(SOME)
            count("faults", 1)


# ── a network of its own ─────────────────────────────────────────────────────────────────────────


class OwnNetwork:
    """A network namespace with two cables: one for clients, one for the database, which can be cut."""

    def __init__(self) -> None:
        self.name = f"duly-{secrets.token_hex(3)}"
        n = secrets.randbelow(60) * 4
        self.clients, self.database = (f"10.213.{part}.{n}" for part in (1, 2))
        self._cables = {f"dc{self.name[5:]}": self.clients, f"dd{self.name[5:]}": self.database}

    def address(self, net: str, end: int) -> str:
        """One end of a cable: 1 is here, 2 in the namespace."""
        head, _, last = net.rpartition(".")
        return f"{head}.{int(last) + end}"

    def make(self) -> None:
        run("netns", "add", self.name)
        inside = ("-n", self.name)
        run(*inside, "link", "set", "lo", "up")
        for cable, net in self._cables.items():
            run("link", "add", cable, "type", "veth", "peer", "name", f"{cable}i", "netns", self.name)
            run("addr", "add", f"{self.address(net, 1)}/30", "dev", cable)
            run(*inside, "addr", "add", f"{self.address(net, 2)}/30", "dev", f"{cable}i")
            run("link", "set", cable, "up")
            run(*inside, "link", "set", f"{cable}i", "up")

    def cut(self, *, whole: bool) -> None:
        """Cut the cable to the database, or mend it: packets are lost, and no one is told."""
        run("link", "set", list(self._cables)[1], "up" if whole else "down")

    def remove(self) -> None:
        run("netns", "del", self.name)


def run(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[OwnNetwork]:
    it = OwnNetwork()
    try:
        it.make()
    except (OSError, subprocess.CalledProcessError) as problem:
        unable(f"a network of its own needs root, ip and virtual cables: {problem}")
    yield it
    it.remove()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_network_cut_between_a_hub_and_its_database(
    tmp_path: Path, postgres_server: Postgres, network: OwnNetwork
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", postgres_server.port)
        await asyncio.gather(forward(reader, back), forward(there, writer))

    here, inside = network.address(network.database, 1), network.address(network.clients, 2)
    server = await asyncio.start_server(serve, here, 0)
    port = server.sockets[0].getsockname()[1]
    ledger = postgres_server.create_database(f"cut_{secrets.token_hex(4)}")
    far = ledger.replace(f"127.0.0.1:{postgres_server.port}", f"{here}:{port}")
    hub = HubProcess(tmp_path / "hub", ledger=far, listen=inside, insecure="true")
    hub.url = hub.url.replace("127.0.0.1", inside)
    hub.under = ["ip", "netns", "exec", network.name]
    try:
        async with under_load(hub, tmp_path) as it:
            for _ in range(ROUNDS):
                network.cut(whole=False)
                await it.until_unwell()
                network.cut(whole=True)
                await it.load.more(SOME)
                count("faults", 1)
    finally:
        network.cut(whole=True)
        server.close()
