"""What a hub stores of when it heard from its devices, for the other hubs: little, and only its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from duly.apps.gateway.device_list import HEARD, STORED_AT_ONCE, STORED_EVERY, DeviceList
from duly.core.operations import PutItem
from duly.core.units import MS, SECOND
from duly.storage.memory import MemoryLedger
from duly.testing.clocks import ManualClock

EVERYBODY: Any = SimpleNamespace(created_at=lambda _: 0)


def device_list(ledger: MemoryLedger) -> DeviceList:
    return DeviceList(ledger, EVERYBODY, lambda _: True)


async def heartbeat(devices: DeviceList, ledger: MemoryLedger, here: set[str]) -> list[PutItem]:
    """What is stored with a heartbeat."""
    news = devices.news(here)
    if news:
        await ledger.write(*news)
        devices.told(news)
    return list(news)


async def test_answers_are_stored_at_most_every_ten_seconds_and_the_last_one_is() -> None:
    clock = ManualClock()
    ledger = MemoryLedger(clock)
    here, there = device_list(ledger), device_list(ledger)
    stored = 0
    for _ in range(30):
        here.heard("lock")
        last = clock.now()
        stored += len(await heartbeat(here, ledger, {"lock"}))
        clock.advance(1)
    assert stored == 3
    clock.advance(STORED_EVERY / SECOND)
    assert len(await heartbeat(here, ledger, {"lock"})) == 1
    assert await there.last_heard(["lock", "lamp"]) == {"lock": last // MS}
    assert await heartbeat(here, ledger, {"lock"}) == [], "it has not been heard since"


async def test_many_devices_are_stored_in_turns() -> None:
    clock = ManualClock()
    ledger = MemoryLedger(clock)
    devices, names = device_list(ledger), {f"d{n}" for n in range(STORED_AT_ONCE * 2 + 50)}
    for name in names:
        devices.heard(name)
    counts = [len(await heartbeat(devices, ledger, names)) for _ in range(4)]
    assert counts == [STORED_AT_ONCE, STORED_AT_ONCE, 50, 0]
    assert (await ledger.bucket(HEARD)).keys() == names
    assert await heartbeat(devices, ledger, set()) == []
    assert (await ledger.bucket(HEARD)).keys() == names, "also after they have left"


async def test_what_another_hub_has_stored_since_is_not_dropped() -> None:
    clock = ManualClock()
    ledger = MemoryLedger(clock)
    old, new = device_list(ledger), device_list(ledger)
    old.heard("lock")
    await heartbeat(old, ledger, {"lock"})
    clock.advance(1)
    new.heard("lock")
    await heartbeat(new, ledger, {"lock"})
    await heartbeat(old, ledger, set())
    assert await ledger.bucket(HEARD) == {"lock": b"%d" % clock.now()}
    await ledger.write(*new.left("lock"))
    assert await heartbeat(new, ledger, set()) == []
    assert await ledger.bucket(HEARD) == {"lock": b"%d" % clock.now()}, "also after it has left"
