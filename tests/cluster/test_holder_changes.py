"""Hubs that read only what has changed know as much as hubs that read everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from duly.cluster import holder_changes
from duly.cluster.holder_changes import LOOKS, MOST, OwnChanges, ReadChanges
from duly.cluster.known_holders import KnownHolders
from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.cluster.registry import CHANGES, HUBS, LAPSE, REGISTRY, WHOLE, HubRegistry
from duly.core.operations import DropItem, Group, PutItem, Results
from duly.errors import LedgerUnavailable
from duly.storage.memory import Disk, MemoryLedger
from duly.storage.postgres.ledger import PostgresLedger
from duly.testing.loops import VirtualLoop
from tests import servers

Patch = pytest.MonkeyPatch
DEVICES = [f"device-{n}" for n in range(12)]


class UnsteadyLedger(MemoryLedger):
    """A ledger whose reads and writes take a while, and which counts what is read from the registry."""

    def __init__(self, disk: Disk, name: str, random: Random | None = None) -> None:
        super().__init__(disk=disk)
        self.worker = name
        self.whole = self.single = 0
        self.away = False
        self._random = random

    def quick(self) -> None:
        self.away, self._random = False, None

    def fail(self) -> None:
        self.away = self._random is not None

    async def _wait(self) -> None:
        if self.away:
            raise LedgerUnavailable("it is away")
        if self._random is not None:
            await asyncio.sleep(self._random.random() ** 3)

    async def bucket(self, bucket: str) -> dict[str, bytes]:
        self.whole += bucket == REGISTRY
        await self._wait()
        found = await super().bucket(bucket)
        await self._wait()
        return found

    async def items(self, places: Any) -> list[bytes | None]:
        self.single += len(places)
        await self._wait()
        found = await super().items(places)
        await self._wait()
        return found

    async def item(self, bucket: str, name: str) -> bytes | None:
        found = await super().item(bucket, name)
        await self._wait()
        return found

    async def commit(self, groups: Any) -> Any:
        await self._wait()
        done = await super().commit(groups)
        await self._wait()
        return done


class OneHub:
    """A hub whose registry looks once a second, and whose hints are lost."""

    def __init__(self, name: str, disk: Disk, random: Random | None = None) -> None:
        self.ledger = UnsteadyLedger(disk, name, random)
        self.registry = HubRegistry(self.ledger, LocalNotifier(name, LocalBus()))
        self.disk = disk

    async def look(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            await asyncio.sleep(1)
            await self.registry.refresh()

    def misjudged(self, living: set[str]) -> list[str]:
        """The devices of which this hub does not know what the ledger says."""
        stored = self.disk.buckets.get(REGISTRY, {})
        there = {device: body.partition(b"/")[0].decode() for device, body in stored.items()}
        return [
            device for device in DEVICES
            if self.registry.is_held(device) != (there.get(device) in living)
            or self.registry.is_at_another(device)
            != (there.get(device) in living - {self.registry.me})
        ]  # fmt: skip


def play(scene: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(scene)


# ── the checker: hubs that do anything at random, and the bugs that it has to notice ─────────────


def wrong_after(seed: int) -> list[str]:
    """Let three hubs change holders at random, now and then without the ledger, and one of them die. Returns
    what the others do not know at the end."""
    wrong: list[str] = []

    async def scene() -> None:
        random, disk, loop = Random(seed), Disk(), asyncio.get_running_loop()
        hubs = [OneHub(name, disk, random) for name in "abc"]

        async def look(one: OneHub) -> None:
            while True:
                await asyncio.sleep(1)
                if one.registry.me in living:
                    try:
                        await one.registry.refresh()
                    except LedgerUnavailable:
                        continue

        async def act(one: OneHub) -> None:
            for _ in range(random.choice([5, 40])):
                await asyncio.sleep(random.random() * random.choice([0.1, 3]))
                device = random.choice(DEVICES)
                one.ledger.away = False
                if random.random() < 0.2:  # perhaps between a commit and its answer
                    loop.call_later(random.random() / 2, one.ledger.fail)
                try:
                    match random.randrange(4):
                        case 0 | 1:
                            await one.registry.register(device)
                        case 2:
                            await one.registry.unregister(device)
                        case _:
                            await one.registry.look_up(device)
                except LedgerUnavailable:
                    if random.random() < 0.1:
                        await asyncio.sleep(random.random() * 15)

        living = set("abc")
        looking = [asyncio.ensure_future(look(one)) for one in hubs]
        await asyncio.gather(*(act(one) for one in hubs))
        if random.random() < 0.3:
            living.discard("c")
        for one in hubs:
            one.ledger.quick()  # else a hub that looks too rarely calls no other dead
        await asyncio.sleep(3 if len(living) == 3 else 2 * LAPSE)
        wrong.extend(each for one in hubs if one.registry.me in living for each in one.misjudged(living))
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    play(scene())
    return wrong


class LateLedger(MemoryLedger):
    """A ledger that commits holders when it is told to, and everything else at once."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk=disk)
        self.late = asyncio.Event()

    async def commit(self, groups: Sequence[Group]) -> list[Results]:
        if any(getattr(each, "bucket", "") == REGISTRY for group in groups for each in group):
            await self.late.wait()
        return await super().commit(groups)


def wrong_after_a_late_commit() -> list[str]:
    """Let a hub announce twice while a registration is under way, which is stored afterwards."""
    wrong: list[str] = []

    async def scene() -> None:
        disk = Disk()
        one, two = OneHub("a", disk), OneHub("b", disk)
        one.registry._ledger = ledger = LateLedger(disk)
        for _ in range(2):
            await one.look()
            await two.look()
        registering = asyncio.ensure_future(one.registry.register(DEVICES[0]))
        for _ in range(2):
            await one.look()
            await two.look()
        ledger.late.set()
        await registering
        await one.look()
        await two.look()
        wrong.extend(two.misjudged({"a", "b"}))

    play(scene())
    return wrong


def is_noticed(seeds: int = 60) -> bool:
    return bool(wrong_after_a_late_commit()) or any(wrong_after(seed) for seed in range(seeds))


def no_change_is_announced(patch: Patch) -> None:
    patch.setattr(OwnChanges, "note", lambda self, device: None)


def a_change_is_announced_before_it_is_stored(patch: Patch) -> None:
    async def change(self: HubRegistry, device: str, *writes: Any) -> Any:
        self._own.note(device)
        self._known.doubt(device)
        return await self._ledger.write(*writes)

    patch.setattr(HubRegistry, "_change", change)


def a_failed_write_is_no_change(patch: Patch) -> None:
    async def change(self: HubRegistry, device: str, *writes: Any) -> Any:
        results = await self._ledger.write(*writes)
        self._own.note(device)
        self._known.doubt(device)
        return results

    patch.setattr(HubRegistry, "_change", change)


def what_is_no_longer_announced_is_passed_over(patch: Patch) -> None:
    compare = ReadChanges.compare

    def bold(self: ReadChanges, *args: Any) -> set[str]:
        return compare(self, *args) or set()

    patch.setattr(ReadChanges, "compare", bold)
    patch.setattr(holder_changes, "LOOKS", 1)


def removals_are_not_read(patch: Patch) -> None:
    update = KnownHolders.update

    def keep(self: KnownHolders, found: Any) -> None:
        read = len(found) > 1 or not any(found.values())
        update(self, {each: body for each, body in found.items() if body is not None or not read})

    patch.setattr(KnownHolders, "update", keep)


def a_failed_read_counts(patch: Patch) -> None:
    read = HubRegistry._read_holders

    async def careless(self: HubRegistry) -> None:
        before = self._read_with
        try:
            await read(self)
        except LedgerUnavailable:
            self._read_with = before
            raise

    patch.setattr(HubRegistry, "_read_holders", careless)


def an_earlier_read_may_win(patch: Patch) -> None:
    patch.setattr(KnownHolders, "doubt", lambda self, device: None)


BUGS: list[Callable[[Patch], None]] = [
    no_change_is_announced,
    a_change_is_announced_before_it_is_stored,
    a_failed_write_is_no_change,
    what_is_no_longer_announced_is_passed_over,
    removals_are_not_read,
    a_failed_read_counts,
    an_earlier_read_may_win,
]


def test_hubs_know_what_the_others_have_changed() -> None:
    assert [(seed, wrong) for seed in range(60) if (wrong := wrong_after(seed))] == []
    assert wrong_after_a_late_commit() == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_in_reading_changes_is_noticed(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert is_noticed()


# ── what is read ─────────────────────────────────────────────────────────────────────────────────


def test_devices_that_stay_where_they_are_are_not_read() -> None:
    async def scene() -> None:
        disk = Disk()
        one, two = OneHub("a", disk), OneHub("b", disk)
        for device in DEVICES:
            await one.registry.register(device)
        for _ in range(3):
            await one.look()
            await two.look()
        before = one.ledger.whole, one.ledger.single, two.ledger.whole, two.ledger.single
        for _ in range(20):
            await one.look()
            await two.look()
        assert (one.ledger.whole, one.ledger.single, two.ledger.whole, two.ledger.single) == before
        await one.registry.unregister(DEVICES[0])
        await one.look()
        await two.look()
        assert (two.ledger.whole, two.ledger.single - before[3]) == (before[2], 1)
        assert two.misjudged({"a", "b"}) == []

    play(scene())


def test_a_change_that_nothing_announces_is_found_within_a_minute() -> None:
    async def scene() -> None:
        disk = Disk()
        one, two = OneHub("a", disk), OneHub("b", disk)
        await one.registry.register(DEVICES[0])
        for _ in range(3):
            await one.look()
            await two.look()
        await one.ledger.write(DropItem(REGISTRY, DEVICES[0]))
        await two.look()
        assert two.registry.is_held(DEVICES[0])
        for _ in range(round(WHOLE)):
            await one.look()
            await two.look()
        assert not two.registry.is_held(DEVICES[0])

    play(scene())


def test_an_older_hub_that_announces_nothing_is_read_in_full() -> None:
    async def scene() -> None:
        disk = Disk()
        one, older = OneHub("a", disk), MemoryLedger(disk=disk)
        for n in range(5):
            await older.write(PutItem(HUBS, "old", b"%d" % n))
            await one.look()
        await older.write(PutItem(HUBS, "old", b"5"), PutItem(REGISTRY, DEVICES[0], b"old/1"))
        await one.look()
        assert one.registry.is_at_another(DEVICES[0])

    play(scene())


def test_a_hub_announces_anew_what_another_has_removed_and_leaves_nothing() -> None:
    async def scene() -> None:
        disk = Disk()
        one = OneHub("a", disk)
        await one.look(2)
        await one.ledger.write(DropItem(CHANGES, "a"))
        await one.look(2)
        assert set(disk.buckets[CHANGES]) == {"a"}
        await one.registry.leave()
        assert not disk.buckets.get(CHANGES)

    play(scene())


def test_more_changes_than_are_announced_are_read_in_full() -> None:
    own, read = OwnChanges(), ReadChanges()
    assert read.compare({"a": own.announcement()}, {"a"}) is None, "nothing of it was read before"
    own.note("lock")
    assert read.compare({"a": own.announcement()}, {"a"}) == {"lock"}
    for _ in range(MOST + 1):
        own.note("lamp")
    assert read.compare({"a": own.announcement()}, {"a"}) is None
    own.note("lock")
    assert read.compare({"a": own.announcement()}, {"a"}) == {"lock"}
    for _ in range(LOOKS):
        said = own.announcement()
    assert b"lock" not in said


async def test_on_postgresql_a_change_is_announced_after_it_is_committed(
    postgres_server: servers.Postgres,
) -> None:
    """The row of the device is locked by a third transaction while its new hub registers it."""
    url = postgres_server.create_database()
    async with await PostgresLedger.open(url) as first, await PostgresLedger.open(url) as second:
        one = HubRegistry(first, LocalNotifier("a", LocalBus()))
        two = HubRegistry(second, LocalNotifier("b", LocalBus()))
        for _ in range(3):
            await one.refresh()
            await two.refresh()
        await two.register("lock")
        await one.refresh()
        async with second.transaction() as other:
            await other.fetch("SELECT * FROM duly_items WHERE name = 'lock' FOR UPDATE")
            registering = asyncio.ensure_future(one.register("lock"))
            announcing = asyncio.ensure_future(one.refresh())
            await second.item(REGISTRY, "lock")
            assert not registering.done()
        assert not await registering
        await announcing
        await one.refresh()
        await two.refresh()
        assert two.is_at_another("lock")
        assert two.may_be_lost("lock")
