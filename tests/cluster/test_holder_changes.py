"""Hubs that read only what has changed know as much as hubs that read everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from duly.cluster import holder_changes
from duly.cluster.holder_changes import OwnChanges, ReadChanges
from duly.cluster.known_holders import KnownHolders
from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.cluster.registry import CHANGES, LAPSE, REGISTRY, WHOLE, HubRegistry
from duly.core.operations import DropItem, PutItem
from duly.errors import LedgerUnavailable
from duly.storage.ledger import Ledger
from duly.storage.memory import Disk, MemoryLedger
from duly.testing.loops import VirtualLoop

Patch = pytest.MonkeyPatch
DEVICES = [f"device-{n}" for n in range(12)]


class CountedLedger(MemoryLedger):
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
        self.ledger = CountedLedger(disk, name, random)
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


def is_noticed(seeds: int = 60) -> bool:
    return any(wrong_after(seed) for seed in range(seeds))


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


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_in_reading_changes_is_noticed(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert is_noticed()
