"""A hub under load for long: its memory, descriptors, threads and journal stay as they are.

`DULY_SOAK_SECONDS` says how long. The first third is a warm-up; then the last third is compared with the
second.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import HubProcess
from tests.proof import count
from tests.servers import GUARD

SECONDS = float(os.environ.get("DULY_SOAK_SECONDS", "20"))
SAMPLES = 60
SLACK = 16 << 20
"""Bytes by which the memory may grow: the rows that are kept in it have a limit, which a short soak does not
reach."""
DEVICES = ("lock", "lamp")


class Sample(NamedTuple):
    memory: int
    descriptors: int
    threads: int
    journal: int
    """rows that are not in the tables"""
    log: int
    """bytes of the write-ahead log"""


def sample(hub: HubProcess) -> Sample:
    process = Path(f"/proc/{hub.pid}")
    ledger = hub.folder / "ledger.db"
    db = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    try:
        (journal,) = db.execute("SELECT count(*) FROM journal").fetchone()
    finally:
        db.close()
    return Sample(
        hub.memory, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())), journal,
        ledger.with_name("ledger.db-wal").stat().st_size,
    )  # fmt: skip


@pytest.mark.proof
@pytest.mark.timeout(3 * GUARD + SECONDS)
async def test_a_hub_stays_as_it_is(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub")
    tokens = await hub.prepare(["phone", "tablet"], list(DEVICES))
    devices = [Lock(hub, tokens[name], tmp_path / name) for name in DEVICES]
    remotes = [Remote(hub, name, tokens[name], ordered=name == "phone") for name in ("phone", "tablet")]
    seen: list[Sample] = []
    await hub.start()
    try:
        async with pressed(remotes, *devices):
            for _ in range(SAMPLES):
                await asyncio.sleep(SECONDS / SAMPLES)
                seen.append(sample(hub))
        await judge(hub, [*devices], remotes, ledger=hub.folder / "ledger.db")
    finally:
        await hub.kill()
    middle, last = seen[SAMPLES // 3 : 2 * SAMPLES // 3], seen[2 * SAMPLES // 3 :]
    assert most(last, "memory") <= most(middle, "memory") * 1.1 + SLACK
    assert most(last, "descriptors") <= most(middle, "descriptors") + 2
    assert most(last, "threads") <= most(middle, "threads") + 1
    assert most(last, "journal") <= 2_500, "the tables follow"
    assert most(last, "log") <= 32 << 20, "the log is moved into the database now and then"
    count("soaked seconds", round(SECONDS), f"DULY_SOAK_SECONDS={SECONDS:.0f}")


def most(samples: list[Sample], what: str) -> int:
    return max(int(getattr(one, what)) for one in samples)
