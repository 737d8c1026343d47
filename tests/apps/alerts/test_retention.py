"""What is forgotten, when, and where it then is."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from duly.apps import retention
from duly.apps.alert_events import Standing
from duly.apps.desk import STATUSES, Desk
from duly.apps.profiles import Profiles
from duly.archive import Archive
from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.units import DAY
from duly.core.writes import Admit, Deliver, Ref
from duly.ledgers.memory import MemoryLedger
from duly.testing import ManualClock


class Office:
    def __init__(self, folder: Path, keep: int = 365 * DAY) -> None:
        self.clock = ManualClock()
        self.ledger = MemoryLedger(self.clock)
        self.desk = Desk(self.ledger, Profiles(self.ledger))
        self.folder = folder
        self.archive = Archive(folder, keep)

    async def alert(self, n: int, state: State = State.DONE, kept: int = 90 * DAY) -> Message:
        now = self.clock.now()
        body = msgspec.json.encode({"profile_id": "home", "trigger_reason": "smoke"})
        message = Message("gate", f"event-{n}", "alert_event", "home", body, now)
        told = Deliver(Ref(message.key, "alert", "mail"), now)
        await self.ledger.write(Admit(message, now + kept, now, state, (told,)))
        return message

    async def prune(self) -> dict[str, object]:
        return await retention.prune(self.ledger, self.desk, self.archive)

    def archived(self) -> list[dict[str, object]]:
        files = sorted(self.folder.glob("*.gz"))
        return [json.loads(line) for path in files for line in gzip.open(path, "rt")]


async def test_an_alert_is_archived_whole_and_then_forgotten(tmp_path: Path) -> None:
    office = Office(tmp_path)
    message = await office.alert(1)
    found = await office.desk.get(message.key)
    assert found is not None
    await office.desk.say(found, Standing.RESOLVED, "ann", "false alarm")
    assert await office.prune() == {"messages": 0, "alerts": 0, "archives": []}
    office.clock.advance(91 * 86_400)
    assert await retention.would_prune(office.ledger, office.archive) == {
        "messages": 1, "alerts": 1, "archives": [],
    }  # fmt: skip
    assert await office.prune() == {"messages": 1, "alerts": 1, "archives": []}
    (line,) = office.archived()
    assert (line["event"], line["status"], line["note"]) == ("event-1", "resolved", "false alarm")
    assert line["deliveries"]
    assert await office.ledger.find(message.key) is None
    assert await office.ledger.shelf(STATUSES) == {}


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


async def test_archives_have_their_time_too(tmp_path: Path) -> None:
    office = Office(tmp_path, keep=100 * DAY)
    await office.alert(1)
    office.clock.advance(91 * 86_400)
    await office.prune()
    (file,) = tmp_path.iterdir()
    office.clock.advance(90 * 86_400)
    assert (await office.prune())["archives"] == []
    office.clock.advance(60 * 86_400)
    assert (await retention.would_prune(office.ledger, office.archive))["archives"] == [file.name]
    assert (await office.prune())["archives"] == [file.name]
    assert list(tmp_path.iterdir()) == []


async def test_a_disk_that_is_full_leaves_an_archive_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(tmp_path, 365 * DAY)
    await archive.add([{"event": "first"}], 0)

    def half(fd: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as full:
        full.setattr("duly.archive.os.write", half)
        with pytest.raises(OSError, match="no space"):
            await archive.add([{"event": "lost"}], 0)
    await archive.add([{"event": "second"}], 0)
    (file,) = tmp_path.iterdir()
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first", "second"]


async def test_whoever_wants_no_archive_has_none(tmp_path: Path) -> None:
    office = Office(tmp_path, keep=0)
    await office.alert(1)
    office.clock.advance(91 * 86_400)
    assert (await office.prune())["alerts"] == 1
    assert list(tmp_path.iterdir()) == []
