"""What is forgotten, when, and where it then is."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from duly.apps.alerts.alert_queries import STATUSES
from duly.apps.alerts.archive import ALERTS, Archive
from duly.apps.alerts.model import AlertState
from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.profiles import Profiles
from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.operations import Admit, Advance, Deliver, DeliveryRef, Finish
from duly.core.trusted_time import TrustedClock
from duly.core.units import DAY, MINUTE
from duly.errors import LedgerUnavailable
from duly.server import retention
from duly.storage.memory import MemoryLedger
from duly.testing import ManualClock
from tests.guard import GUARD
from tests.local_hub import LocalHub


class Office:
    def __init__(self, folder: Path, keep: int = 365 * DAY) -> None:
        self.clock = ManualClock()
        self.ledger = MemoryLedger(self.clock)
        self.operations = AlertOperations(self.ledger, Profiles(self.ledger))
        self.folder = folder
        self.archive = Archive(folder, keep)

    async def alert(self, n: int, state: State = State.DONE, kept: int = 90 * DAY) -> Message:
        now = self.clock.now()
        body = msgspec.json.encode({"profile_id": "home", "trigger_reason": "smoke"})
        message = Message("gate", f"event-{n}", "alert_event", "home", body, now)
        told = Deliver(DeliveryRef(message.key, "alert", "mail"), now)
        await self.ledger.write(Admit(message, now + kept, now, state, (told,), listed=True))
        return message

    async def ended(self, message: Message) -> None:
        """Its delivery has."""
        ref = DeliveryRef(message.key, "alert", "mail")
        await self.ledger.write(Finish(ref, None, State.FAILED, "no such mailbox"))

    async def prune(self, deliveries: int = 90 * DAY) -> dict[str, object]:
        return await retention.prune(self.ledger, self.operations, self.archive, deliveries)

    async def would_prune(self, deliveries: int = 90 * DAY) -> dict[str, object]:
        return await retention.would_prune(self.ledger, self.archive, deliveries)

    def archived(self, kind: str = "alerts") -> list[dict[str, object]]:
        files = sorted(self.folder.glob(f"{kind}-*.gz"))
        return [json.loads(line) for path in files for line in gzip.open(path, "rt")]


async def test_an_alert_is_archived_whole_and_then_forgotten(tmp_path: Path) -> None:
    office = Office(tmp_path)
    message = await office.alert(1)
    found = await office.operations.get(message.key)
    assert found is not None
    await office.operations.say(found, AlertState.RESOLVED, "ann", "false alarm")
    assert await office.prune() == {"messages": 0, "alerts": 0, "deliveries": 0, "archives": []}
    office.clock.advance(91 * 86_400)
    due = {"messages": 1, "alerts": 1, "deliveries": 0, "archives": []}
    assert await office.would_prune() == due
    assert await office.prune() == due
    (line,) = office.archived()
    assert (line["event"], line["status"], line["note"]) == ("event-1", "resolved", "false alarm")
    assert line["deliveries"]
    assert await office.ledger.find(message.key) is None
    assert await office.ledger.bucket(STATUSES) == {}


async def test_what_has_not_ended_stays_however_old(tmp_path: Path) -> None:
    office = Office(tmp_path)
    await office.alert(1, State.SENT)
    office.clock.advance(1_000 * 86_400)
    assert (await office.prune())["messages"] == 0
    assert office.archived() == []


async def test_many_are_forgotten_in_small_steps(tmp_path: Path) -> None:
    office = Office(tmp_path)
    for n in range(2 * retention.STEP + 7):
        await office.alert(n)
    office.clock.advance(91 * 86_400)
    assert (await office.prune())["alerts"] == 2 * retention.STEP + 7
    assert len({line["event"] for line in office.archived()}) == 2 * retention.STEP + 7


# ── deliveries have a period of their own ────────────────────────────────────────────────────────


async def test_deliveries_may_go_before_their_alert_and_are_archived_first(tmp_path: Path) -> None:
    office = Office(tmp_path)
    message = await office.alert(1)
    await office.ended(message)
    office.clock.advance(29 * 86_400)
    assert (await office.prune(30 * DAY))["deliveries"] == 0
    office.clock.advance(2 * 86_400)
    due = {"messages": 0, "alerts": 0, "deliveries": 1, "archives": []}
    assert await office.would_prune(30 * DAY) == due
    assert await office.prune(30 * DAY) == due
    assert await office.prune(30 * DAY) == due | {"deliveries": 0}
    (line,) = office.archived("deliveries")
    assert (line["event"], line["sentinel"], line["recipient"]) == ("event-1", "gate", "mail")
    assert (line["state"], line["error"]) == ("failed", "no such mailbox")
    found = await office.operations.get(message.key)
    assert found is not None, "the alert is listed as before"
    assert found.deliveries == []


async def test_deliveries_of_an_alert_that_has_not_ended_stay_as_long_as_it_does(tmp_path: Path) -> None:
    office = Office(tmp_path)
    message = await office.alert(1, State.SENT)
    await office.ended(message)
    office.clock.advance(31 * 86_400)
    assert (await office.would_prune(30 * DAY))["deliveries"] == 0
    assert (await office.prune(30 * DAY))["deliveries"] == 0
    await office.ledger.write(Advance(message.key, State.DONE, office.clock.now()))
    office.clock.advance(60 * 86_400)
    assert (await office.prune(30 * DAY))["alerts"] == 1
    (line,) = office.archived()
    assert line["deliveries"], "and go with it"


async def test_many_deliveries_of_one_moment_are_forgotten_in_small_steps(tmp_path: Path) -> None:
    office = Office(tmp_path)
    count = 2 * retention.STEP + 7
    for n in range(count):
        await office.ended(await office.alert(n))
    office.clock.advance(31 * 86_400)
    assert (await office.would_prune(30 * DAY))["deliveries"] == count
    assert (await office.prune(30 * DAY))["deliveries"] == count
    assert len({line["event"] for line in office.archived("deliveries")}) == count


async def test_what_was_passed_over_is_not_looked_at_again(tmp_path: Path) -> None:
    office = Office(tmp_path)
    for n in range(3):
        await office.ended(await office.alert(n))
        office.clock.advance(86_400)
    office.clock.advance(29 * 86_400)
    assert [(await office.prune(30 * DAY))["deliveries"] for _ in range(2)] == [2, 0]
    reached, _ = (await office.ledger.marks(retention.MARK))[retention.MARK]
    assert reached == office.clock.now() - 30 * DAY
    office.clock.advance(86_400)
    assert (await office.prune(30 * DAY))["deliveries"] == 1


# ── the archive ──────────────────────────────────────────────────────────────────────────────────


async def test_archives_have_their_time_too(tmp_path: Path) -> None:
    office = Office(tmp_path, keep=100 * DAY)
    await office.alert(1)
    office.clock.advance(91 * 86_400)
    await office.prune()
    (file,) = tmp_path.iterdir()
    office.clock.advance(90 * 86_400)
    assert (await office.prune())["archives"] == []
    office.clock.advance(60 * 86_400)
    assert (await office.would_prune())["archives"] == [file.name]
    assert (await office.prune())["archives"] == [file.name]
    assert list(tmp_path.iterdir()) == []


async def test_a_disk_that_is_full_leaves_an_archive_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(tmp_path, 365 * DAY)
    await archive.add(ALERTS, [{"event": "first"}], 0)

    def half(fd: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as full:
        full.setattr("duly.apps.alerts.archive.os.write", half)
        with pytest.raises(LedgerUnavailable, match=r"no space left.*nothing was forgotten"):
            await archive.add(ALERTS, [{"event": "lost"}], 0)
    await archive.add(ALERTS, [{"event": "second"}], 0)
    (file,) = tmp_path.iterdir()
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first", "second"]


ARCHIVIST = """
import asyncio, os, signal, sys
from pathlib import Path
from duly.apps.alerts.archive import ALERTS, Archive

archive, first, fuse = Archive(Path(sys.argv[1]), 1), int(sys.argv[2]), int(sys.argv[3])
write = os.write

def half(fd, data):
    write(fd, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

for n in range(first, first + 1_000_000):
    if n - first == fuse:
        os.write = half
    asyncio.run(archive.add(ALERTS, [{"event": n, "filling": os.urandom(2_000).hex()}], 0))
    print(n, flush=True)
"""


def archivist(folder: Path, first: int, fuse: int = -1) -> subprocess.Popen[str]:
    """Archives one after the other, and says so; in the middle of the `fuse`th it kills itself."""
    command = [sys.executable, "-c", ARCHIVIST, str(folder), str(first), str(fuse)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_who_is_killed_in_the_middle_of_a_line_leaves_an_archive_that_goes_on(tmp_path: Path) -> None:
    for first in (0, 3):
        with archivist(tmp_path, first, fuse=2) as child:
            out, _ = child.communicate(timeout=GUARD)
        assert out.split() == [str(first), str(first + 1)]
        assert child.returncode == -signal.SIGKILL
    file, note = sorted(tmp_path.iterdir())
    assert note.name == file.name + ".sound"
    with pytest.raises(EOFError):
        gzip.decompress(file.read_bytes())
    asyncio.run(Archive(tmp_path, 365 * DAY).sweep(0))
    assert not note.exists()
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [json.loads(line)["event"] for line in lines] == [0, 1, 3, 4]


def test_an_archive_whose_writer_is_killed_at_random_has_all_that_was_confirmed(tmp_path: Path) -> None:
    rng = random.Random(6)
    confirmed: list[int] = []
    for _ in range(6):
        with archivist(tmp_path, confirmed[-1] + 1 if confirmed else 0) as child:
            assert child.stdout is not None
            confirmed += [int(child.stdout.readline()) for _ in range(rng.randrange(1, 40))]
            child.kill()
            confirmed += map(int, child.stdout.read().split())
    asyncio.run(Archive(tmp_path, 365 * DAY).sweep(0))
    (file,) = tmp_path.iterdir()
    found = [json.loads(line)["event"] for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert {*confirmed} <= {*found}


async def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 365 * DAY)
    await archive.add(ALERTS, [{"event": "first"}], 0)
    (file,) = tmp_path.iterdir()
    note = file.with_name(file.name + ".sound")
    note.write_bytes(b"0")
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        await archive.sweep(0)
        assert note.exists()
        assert b"first" in gzip.decompress(file.read_bytes())


async def test_a_hub_that_cannot_archive_forgets_nothing_and_says_so(tmp_path: Path) -> None:
    tower = LocalHub(tmp_path / "hub")
    await tower.start()
    try:
        ledger, clock = tower.hub.ledger, ManualClock()
        ledger.clock = clock
        ledger._witness = TrustedClock(clock.now(), clock.steady())
        now = clock.now()
        body = msgspec.json.encode({"profile_id": "home", "trigger_reason": "smoke"})
        message = Message("gate", "event-1", "alert_event", "home", body, now)
        await ledger.write(Admit(message, now + DAY, now, State.DONE))
        clock.advance(2 * 86_400)
        folder = tmp_path / "hub" / "archive"
        folder.write_text("somebody's file")
        await tower.hub.maintenance.run()
        assert "nothing was forgotten" in str(tower.hub.health.state()["unforgotten"])
        assert await ledger.find(message.key) is not None
        folder.unlink()
        await tower.hub.maintenance.run()
        assert tower.hub.health.state()["unforgotten"] is None
        assert await ledger.find(message.key) is None
    finally:
        await tower.stop()


async def test_without_an_archive_nothing_is_archived(tmp_path: Path) -> None:
    office = Office(tmp_path, keep=0)
    await office.alert(1)
    office.clock.advance(91 * 86_400)
    assert (await office.prune())["alerts"] == 1
    assert list(tmp_path.iterdir()) == []


async def test_an_alert_of_a_running_hub_is_forgotten_when_the_settings_say_so(tmp_path: Path) -> None:
    """Ids were kept for ten years, for sentinels whose clocks are ahead; such alerts have the time of their
    arrival now."""
    hub = LocalHub(tmp_path / "hub")
    await hub.start()
    try:
        alerts, now = hub.hub.alerts, hub.hub.ledger.clock.now()
        fields = {"profile_id": "home", "trigger_reason": "smoke", "timestamp": (now + 2 * MINUTE) // 1_000}
        message = Message("gate", "event-1", "alert_event", "home", msgspec.json.encode(fields), now)
        assert alerts._fanout._until(message, now) == now + round(hub.hub.settings.alerts_kept * DAY)
    finally:
        await hub.stop()
