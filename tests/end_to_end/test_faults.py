"""What goes wrong without anything dying, under load and before the judge of `pressing`: a hub or a database
that stands still, a disk that is full or slow, a flush that fails, a clock that is set, a network that drops,
repeats and reorders frames, and one that is cut between a hub and its database.

`DULY_FAULTS` says how often each of them happens, `DULY_FAULT_COMMANDS` how many commands of every app to
every device are done after each, and `DULY_FAULT_SEED` makes what is drawn by chance another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from duly.cli import bad_network
from duly.cli.bad_network import BadConnection, Damage
from tests.end_to_end.fused import CLOCK
from tests.end_to_end.pressing import ENDS, Address, Load, Lock, Remote, judge, pressed
from tests.end_to_end.processes import HubProcess
from tests.end_to_end.raw import curl
from tests.end_to_end.test_injected_kills import strace
from tests.guard import GUARD, LIMIT
from tests.proof import count
from tests.servers import Postgres, unable
from tests.small_disk import small_disk

ROUNDS = int(os.environ.get("DULY_FAULTS", "2"))
SEED = os.environ.get("DULY_FAULT_SEED", "40")
DEVICES = ("lock", "lamp")
SOME = int(os.environ.get("DULY_FAULT_COMMANDS", "5"))
"""Commands of every app to every device that are done between two faults."""
AT_ONCE = 15
"""Of them under way at once."""
pytestmark = [pytest.mark.proof, pytest.mark.timeout(4 * LIMIT + ROUNDS * (10 + SOME / 20))]


class Pressed:
    """A hub under load, with what its clients and devices have noted."""

    def __init__(self, hub: HubProcess, load: Load, remotes: list[PatientRemote]) -> None:
        self.hub, self.load, self.remotes = hub, load, remotes
        self.unknown = 0
        """commands of which it may not be known how they ended"""

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
    """An app that also counts how often it was told to try again. It also tries again what a hub with a
    wrong clock takes for too old or too new: a refusal does not burn an id."""

    refused = 0
    untimely: tuple[str, ...] = ("stale", "future")
    """The refusals of a hub whose clock is wrong."""
    repeating = False
    """Whether its network repeats frames: that a command is accepted may then be heard twice."""

    def _hear(self, frame: dict[str, Any]) -> None:
        if frame["type"] == "server_ack" and frame.get("error") in self.untimely:
            frame = frame | {"code": 4}
        if self.repeating and (frame["type"], frame.get("code")) == ("server_ack", 0):
            frame = frame | {"code": 5}
        self.refused += frame["type"] == "server_ack" and frame.get("code") == 4
        super()._hear(frame)


@contextlib.asynccontextmanager
async def under_load(
    hub: HubProcess, folder: Path, *, ledger: Path | str, ways: Mapping[str, Address] | None = None
) -> AsyncIterator[Pressed]:
    """A hub that is started, under load while the block runs, and judged afterwards. `ways`: by which each
    client comes to it, if not directly."""
    ways = ways or {}
    tokens = await hub.prepare(["phone", "tablet"], list(DEVICES))
    devices = [Lock(ways.get(name, hub), tokens[name], folder / name) for name in DEVICES]
    remotes = [
        PatientRemote(ways.get(name, hub), name, tokens[name], ordered=name == "phone")
        for name in ("phone", "tablet")
    ]
    for remote in remotes:
        remote.repeating = bool(ways)
    await hub.start()
    try:
        async with pressed([*remotes], *devices, at_once=AT_ONCE) as load:
            await load.more(SOME)
            it = Pressed(hub, load, remotes)
            yield it
            await load.more(SOME)
        ends = (*ENDS, "expired") if it.unknown else ENDS
        await judge(hub, [*devices], [*remotes], ledger=ledger, unknown=it.unknown, ends=ends)
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
    ledger = postgres_server.create_database()
    hub = HubProcess(tmp_path / "hub", ledger=ledger)
    async with under_load(hub, tmp_path, ledger=ledger) as it:
        for _ in range(ROUNDS):
            postgres_server.tell_all(signal.SIGSTOP)
            try:
                await it.until_unwell()
            finally:
                postgres_server.tell_all(signal.SIGCONT)
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


async def test_a_slow_disk(tmp_path: Path) -> None:
    """Each flush takes a fifth of a second: the hub is slow then, and says nothing else."""
    if shutil.which("strace") is None:
        unable("there is no strace: make servers installs it")
    hub = HubProcess(tmp_path / "hub")
    async with under_load(hub, tmp_path, ledger=tmp_path / "hub" / "ledger.db") as it:
        for round_ in range(ROUNDS):
            await hub.kill()
            first = 10 + 5 * round_
            hub.under = strace("fdatasync,fsync", f"delay_enter=200000:when={first}..{first + 20}")
            await hub.start()
            await it.load.more(min(SOME, 40))
            await hub.kill()
            hub.under = []
            await hub.start()
            await it.load.more(SOME)
            count("faults", 1)


async def test_a_clock_that_is_set(tmp_path: Path) -> None:
    """By a minute or an hour, ahead or behind, and then right again; sometimes while the hub is not there.

    With an hour's difference it refuses what is of another time by its sender's clock, and takes it later.
    What is under way has an expiry on the wall clock: set ahead, it is over, and whether it was done in time
    is not known. What came before the clock was set and is to be stored afterwards is refused as expired."""
    rng, wrong = Random(SEED), tmp_path / "clock"
    wrong.write_text("0")
    hub = HubProcess(tmp_path / "hub")
    hub.preload = {CLOCK: str(wrong)}
    async with under_load(hub, tmp_path, ledger=tmp_path / "hub" / "ledger.db") as it:
        for remote in it.remotes:
            remote.untimely = (*remote.untimely, "expired")
        for _ in range(ROUNDS):
            for by in (rng.choice((-3600, -60, 60, 3600)), 0):
                it.unknown += (by > int(wrong.read_text())) * AT_ONCE * 4
                wrong.write_text(str(by))
                if rng.random() < 0.3:
                    await hub.kill()
                    await hub.start()
                else:
                    os.kill(hub.pid, signal.SIGUSR1)
                if abs(by) == 3600:
                    await it.until_unwell()
                else:
                    await it.load.more(max(1, SOME // 2))
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
    ledger = postgres_server.create_database()
    far = ledger.replace(f"127.0.0.1:{postgres_server.port}", f"{here}:{port}")
    hub = HubProcess(tmp_path / "hub", ledger=far, listen=inside, insecure="true")
    hub.url = hub.url.replace("127.0.0.1", inside)
    hub.under = ["ip", "netns", "exec", network.name]
    try:
        async with under_load(hub, tmp_path, ledger=ledger) as it:
            for _ in range(ROUNDS):
                network.cut(whole=False)
                await it.until_unwell()
                network.cut(whole=True)
                await it.load.more(SOME)
                count("faults", 1)
    finally:
        network.cut(whole=True)
        server.close()


async def test_a_network_that_drops_repeats_and_reorders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every app has a bad connection of its own. What was dropped is sent again when that is cut. The devices
    of this test keep no order themselves, as duly's do, so theirs is good."""
    monkeypatch.setattr(bad_network, "CUT_AFTER", (50, 500))
    monkeypatch.setattr(bad_network, "DROP", 0.005)
    hub, damage = HubProcess(tmp_path / "hub"), Damage()
    ways = {name: BadConnection(hub.url, damage, Random(f"{SEED} {name}")) for name in ("phone", "tablet")}
    for way in ways.values():
        await way.start()
    try:
        async with under_load(hub, tmp_path, ledger=tmp_path / "hub" / "ledger.db", ways=ways) as it:
            for _ in range(ROUNDS):
                await it.load.more(SOME)
            # Faults come by chance, and a few frames may see none of a kind: then the load goes on.
            while not min(damage.dropped, damage.repeated, damage.overtaken, damage.cuts):
                await it.load.more(SOME)
            count("faults", damage.cuts)
            for way in ways.values():
                way.calm = True
    finally:
        for way in ways.values():
            await way.stop()
