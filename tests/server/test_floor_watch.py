"""A floor and lanes that a wrong clock has led into the future are mended for every hub on the ledger."""

from __future__ import annotations

from duly.core.operations import RaiseMark
from duly.core.units import DAY, MS
from duly.server.floor_watch import FloorWatch
from duly.storage.memory import Disk, MemoryLedger


async def test_a_hub_follows_when_another_one_mends_the_floor() -> None:
    disk = Disk()
    here, there = MemoryLedger(disk=disk), MemoryLedger(disk=disk)
    lowered: list[int] = []

    async def follow(limit: int) -> None:
        lowered.append(limit)

    watch = FloorWatch(there)
    watch.on_lowered = follow
    await watch.refresh()
    now = here.clock.now() // MS
    await here.write(RaiseMark("lane", 5, now + 2 * DAY // MS))
    await watch.refresh()
    assert lowered == []
    mended = await FloorWatch(here).administer({"mend": ""})
    assert mended["lanes"] == 1
    await watch.refresh()
    assert [now <= limit <= here.clock.now() // MS for limit in lowered] == [True]
    await watch.refresh()
    assert len(lowered) == 1, "once for each mend"
