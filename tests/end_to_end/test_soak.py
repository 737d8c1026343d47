"""A hub under a mixed load for long: its memory, descriptors, threads, tasks, journal and disk stay as they
are, and so does the memory of its broker.

Commands to devices by WebSocket and by MQTT, chat lines, alerts with a webhook, and tasks between two nodes;
the clients drop, repeat, delay and reorder, and cut their connections (`flood`). The load is paced, so
that the length decides and not the speed of the machine. At the end the judge of the floods reads what
everyone has written down.

`DULY_SOAK_SECONDS` says how long. The first third is a warm-up; then the last third is compared with the
second. The hub is told to keep ids and alerts for minutes, and trusts its clock after one instead of an hour:
by the second third of half an hour as much is forgotten as is added.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from duly.clients.node.node import Node
from duly.clients.node.tasks import Task
from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.end_to_end.flood import (
    FloodApp,
    FloodClient,
    FloodDevice,
    FloodPerson,
    FloodSender,
    FloodSentinel,
    Json,
    NetworkDamage,
)
from tests.end_to_end.flood_judge import judge
from tests.end_to_end.fused import TASKS, TRUST
from tests.end_to_end.processes import DeviceProcess, HubProcess, resident, tracebacks
from tests.end_to_end.test_flood import Hook, make_group, until_told
from tests.guard import LIMIT
from tests.proof import count
from tests.servers import free_port

SECONDS = float(os.environ.get("DULY_SOAK_SECONDS", "20"))
SAMPLES = 60
SLACK = 16 << 20
"""Bytes by which the memory may grow: the rows that are kept in it have a limit, which a short soak does not
reach."""
STEP: Final = 0.5
"""Seconds between two portions of the load."""
APPS, PEOPLE, NODES = ("app0", "app1"), ("person0", "person1", "person2"), ("north", "south")
BY_WEBSOCKET, BY_MQTT, GUARD_NAME = ("dev0", "dev1"), "dev2", "guard0"
KEPT: Final = {
    "max_age": 60, "remember": 420, "alerts_remembered": 0.002, "alerts_kept": 0.002,
    "deliveries_kept": 0.002, "archives_kept": 0, "trail_kept": 0.002, "trail_mb": 4,
}  # fmt: skip
PATIENCE: Final = 600
"""Seconds that a device has to answer: on a busy machine it may be long without the processor."""
FORGETS_AFTER: Final = 420 + 300 + 60
"""Seconds after which a command is forgotten: `remember`, the skew of clocks, and two rounds of pruning."""
A_LINE: Final = 2_048
"""Bytes of the file for one line of chat, which is kept for ever, with its id and its receipts."""


class SoakedApp(FloodApp):
    """An app that says to the lock behind the broker, which is duly's own, what that understands."""

    def make(self, seq_id: str) -> Json:
        frame = super().make(seq_id)
        if frame["to"] == BY_MQTT:
            frame["data"]["open"] = True
        return frame

    def heard(self, frame: Json) -> None:
        if frame["type"] == "ack" and isinstance(frame.get("data"), dict):
            frame["data"].pop("open", None)
        if frame.get("error") == "stale":  # for good: nobody sets the clocks here
            self.note("refused", frame["seq_id"], frame)
            self.end(frame["seq_id"])
        super().heard(frame)


PORTION: Final = {SoakedApp: 6, FloodPerson: 1, FloodSentinel: 1}
"""Messages of one client in each portion."""


class Sample(NamedTuple):
    """What a hub holds at one moment."""

    memory: int
    broker: int
    """the memory of the embedded broker"""
    descriptors: int
    threads: int
    tasks: int
    journal: int
    """rows that are not in the tables"""
    log: int
    """bytes of the write-ahead log"""
    disk: int
    """bytes of the ledger's file"""
    messages: int
    """commands and alerts that are remembered"""
    lines: int
    """chat lines"""


class SoakedHub(HubProcess):
    """A hub that can be asked what it holds."""

    async def sample(self) -> Sample:
        """Ask."""
        process, ledger = Path(f"/proc/{self.pid}"), self.folder / "ledger.db"
        tasks = self.folder / "tasks"
        os.kill(self.pid, signal.SIGUSR2)
        async with asyncio.timeout(LIMIT):
            while not tasks.exists():
                await asyncio.sleep(0.02)
        many = int(tasks.read_text())
        tasks.unlink()
        db = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
        try:
            (journal,) = db.execute("SELECT count(*) FROM journal").fetchone()
            (messages,) = db.execute(
                "SELECT count(*) FROM messages WHERE kind IN ('lock_control', 'alert_event')"
            ).fetchone()
            (lines,) = db.execute("SELECT count(*) FROM entries WHERE stream LIKE 'chat/%'").fetchone()
        finally:
            db.close()
        broker = int((self.folder / "broker" / "nats.pid").read_text())
        return Sample(
            self.memory, resident(broker), len(list((process / "fd").iterdir())),
            len(list((process / "task").iterdir())), many, journal,
            ledger.with_name("ledger.db-wal").stat().st_size, ledger.stat().st_size, messages, lines,
        )  # fmt: skip


async def accounts_of(hub: HubProcess, hook: str) -> dict[str, str]:
    """Accounts for everyone; their tokens."""
    tokens = await hub.prepare([*APPS], [*BY_WEBSOCKET, BY_MQTT], [GUARD_NAME], hook)
    async with await open_ledger(hub.ledger_url) as ledger:
        accounts = Accounts(ledger)
        tokens |= {name: await accounts.add(Role.USER, name) for name in PEOPLE}
        tokens |= {name: await accounts.add(Role.NODE, name) for name in NODES}
    return tokens


def clients_of(
    hub: HubProcess, tokens: dict[str, str], folder: Path, group: str, damage: NetworkDamage
) -> list[FloodClient]:
    """Return the devices, apps, people and the sentinel."""

    def of(name: str) -> tuple[str, str, str, Path, NetworkDamage, str]:
        return hub.url, name, tokens[name], folder, damage, "soak"

    devices = [*BY_WEBSOCKET, BY_MQTT]
    return [
        *(FloodDevice(*of(name)) for name in BY_WEBSOCKET),
        *(SoakedApp(*of(name), devices=devices, ordered=name == APPS[0], window=60, many=0) for name in APPS),
        *(
            FloodPerson(*of(name), others=[group, *({*PEOPLE} - {name})], window=25, many=0)
            for name in PEOPLE
        ),
        FloodSentinel(*of(GUARD_NAME), window=20, many=0),
    ]


class SoakedNodes:
    """Two nodes that send each other a task at a time, and write down what they did."""

    def __init__(self, port: int, tokens: dict[str, str], folder: Path) -> None:
        self._nodes = {name: self._node(name, port, tokens[name], folder) for name in NODES}
        self.did: list[str] = []
        self.ended: list[str] = []

    def _node(self, name: str, port: int, token: str, folder: Path) -> Node:
        node = Node(f"mqtt://{name}:{token}@127.0.0.1:{port}", store=str(folder / f"{name}.db"))

        @node.task("work")
        async def work(task: Task) -> object:
            self.did.append(task.id)
            return task.payload

        return node

    async def run(self, stop: asyncio.Event) -> None:
        """Send until it is time to stop."""
        async with AsyncExitStack() as stack:
            for node in self._nodes.values():
                await stack.enter_async_context(node)
            n = 0
            while not stop.is_set():
                for name, other in (NODES, NODES[::-1]):
                    n += 1
                    task = await self._nodes[name].send(other, "work", n, expires=3600)
                    assert await task.result == n
                    self.ended.append(task.id)
                await asyncio.sleep(STEP)


async def press(senders: list[FloodSender], stop: asyncio.Event) -> None:
    """Give out the load in portions until it is time to stop, and wait until everything has ended."""
    while not stop.is_set():
        for one in senders:
            one.allow(PORTION[type(one)])
        await asyncio.sleep(STEP)
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(one.finished.wait() for one in senders))


def write_history(device: DeviceProcess, name: str, folder: Path) -> None:
    """Write down what a device has done by its own file, as the judge reads it."""
    lines = (json.dumps(["did", app, id_, id_]) for app, id_ in device.did)
    (folder / f"{name}.history").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.proof
@pytest.mark.timeout(4 * LIMIT + 1.5 * SECONDS)
async def test_a_hub_stays_as_it_is(tmp_path: Path) -> None:
    folder, damage, port = tmp_path / "histories", NetworkDamage(), free_port()
    folder.mkdir()
    hook = Hook(folder)
    kept = KEPT | {"patience": PATIENCE, "mqtt_port": port, "allow_private_webhooks": "true"}
    hub = SoakedHub(tmp_path / "hub", **kept)
    hub.preload = {TASKS: str(hub.folder / "tasks"), TRUST: "60"}
    tokens = await accounts_of(hub, await hook.start())
    await hub.start()
    lamp = DeviceProcess(tmp_path / BY_MQTT, BY_MQTT, f"mqtt://127.0.0.1:{port}", tokens[BY_MQTT])
    await lamp.start()
    nodes = SoakedNodes(port, tokens, tmp_path)
    clients = clients_of(hub, tokens, folder, await make_group(hub, tokens[PEOPLE[0]], PEOPLE[1:]), damage)
    senders = [one for one in clients if isinstance(one, FloodSender)]
    stop = asyncio.Event()
    living = [asyncio.create_task(one.run()) for one in clients]
    living += [asyncio.create_task(one.repeat()) for one in senders]
    work = [asyncio.create_task(press(senders, stop)), asyncio.create_task(nodes.run(stop))]
    seen: list[Sample] = []
    try:
        for _ in range(SAMPLES):
            await asyncio.wait([*living, *work], timeout=SECONDS / SAMPLES, return_when="FIRST_COMPLETED")
            ended = [task for task in (*living, *work) if task.done()]
            assert not ended, f"a client of the test has ended: {ended}"
            seen.append(await hub.sample())
        damage.calm = True
        stop.set()
        await asyncio.gather(*work)
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(one.ask_again() for one in senders if isinstance(one, FloodApp)))
        alerts = next(one.sent for one in senders if isinstance(one, FloodSentinel))
        await until_told([one for one in clients if isinstance(one, FloodPerson)], hook, alerts)
    finally:
        for task in (*living, *work):
            task.cancel()
        await asyncio.gather(*living, *work, return_exceptions=True)
        for client in clients:
            client.close()
        await lamp.kill()
        with suppress(ProcessLookupError):
            os.kill(hub.pid, signal.SIGTERM)  # it brings its tables up to date, which are read then
        await hub.ended()
        await hook.stop()
        sys.stderr.write("".join(f"{sample}\n" for sample in seen[:: SAMPLES // 12]))
    assert "Traceback" not in hub.errors, tracebacks(hub.errors)
    write_history(lamp, BY_MQTT, folder)
    shutil.copy(hub.folder / "ledger.db", folder / "ledger.db")
    found = judge(folder, forgets=True)
    assert not found.wrong, f"{found}\nthe histories are in {folder}"
    assert sorted(nodes.did) == sorted(nodes.ended), "a task was lost, or done twice"
    assert_flat(seen)
    count("soaked seconds", round(SECONDS), f"DULY_SOAK_SECONDS={SECONDS:.0f}")
    count("messages under faults", found.messages.total() + len(nodes.ended))


def assert_flat(seen: list[Sample], seconds: float = SECONDS) -> None:
    """Compare the last third with the second."""
    middle, last = seen[SAMPLES // 3 : 2 * SAMPLES // 3], seen[2 * SAMPLES // 3 :]
    assert most(last, "memory") <= most(middle, "memory") * 1.1 + SLACK
    assert most(last, "broker") <= most(middle, "broker") * 1.1 + SLACK
    assert most(last, "descriptors") <= most(middle, "descriptors") + 2
    assert most(last, "threads") <= most(middle, "threads") + 1
    assert most(last, "tasks") <= most(middle, "tasks") + 10
    assert most(last, "journal") <= 2_500, "the tables follow"
    assert most(last, "log") <= 32 << 20, "the log is moved into the database now and then"
    if seconds * 0.6 > FORGETS_AFTER:
        lines = most(last, "lines") - most(middle, "lines")
        assert most(last, "messages") <= most(middle, "messages") * 1.05, "as much is forgotten as is added"
        assert most(last, "disk") <= most(middle, "disk") * 1.05 + lines * A_LINE


def most(samples: list[Sample], what: str) -> int:
    return max(int(getattr(one, what)) for one in samples)


@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("memory", 2 << 20), ("broker", 2 << 20), ("descriptors", 1), ("threads", 1), ("tasks", 1),
        ("journal", 100), ("log", 1 << 20), ("disk", 1 << 20), ("messages", 100),
    ],
)  # fmt: skip
def test_what_grows_all_the_time_is_noticed(what: str, by: int) -> None:
    flat = Sample(100 << 20, 20 << 20, 38, 8, 57, 10, 4 << 20, 20 << 20, 20_000, 1_000)
    seen = [flat._replace(lines=n) for n in range(SAMPLES)]
    assert_flat(seen, 1_800)
    with pytest.raises(AssertionError):
        assert_flat(
            [one._replace(**{what: getattr(one, what) + n * by}) for n, one in enumerate(seen)], 1_800
        )
