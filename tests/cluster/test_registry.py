"""Where everybody is: who moves in, who moves out, and when a hub counts as dead."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.cluster.registry import HUBS, LAPSE, REGISTRY, HubRegistry
from duly.core.operations import DropItem, Group, Results
from duly.storage.memory import Disk, MemoryLedger
from duly.testing.loops import VirtualLoop


def hub(name: str, disk: Disk) -> HubRegistry:
    ledger = MemoryLedger(disk=disk)
    ledger.worker = name
    return HubRegistry(ledger, LocalNotifier(name, LocalBus()))


class SlowLedger(MemoryLedger):
    async def commit(self, groups: Sequence[Group]) -> list[Results]:
        await asyncio.sleep(1)
        return await super().commit(groups)


def play(scene: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(scene)


async def live(seconds: float, *hubs: HubRegistry) -> list[str]:
    """Let time pass in which these hubs look once a second; whom they find to be gone."""
    gone: list[str] = []
    for _ in range(round(seconds)):
        await asyncio.sleep(1)
        for one in hubs:
            gone += await one.look()
    return gone


def test_a_device_is_at_home_where_it_moved_in_until_it_moves_out() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        assert await a.move_in("lock")
        assert await b.ask("lock")
        assert (b.everybody(), b.at_home("lamp")) == (["lock"], False)
        assert await a.move_out("lock")
        assert not await b.ask("lock")

    play(scene())


def test_the_goodbye_of_an_old_connection_does_not_undo_a_new_one() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.move_in("lock")
        assert not await b.move_in("lock"), "it was somewhere"
        await a.look()
        assert a.moved("lock")
        assert not await a.stays("lock")
        assert not await a.move_out("lock")
        assert await a.ask("lock")

    play(scene())


def test_a_hub_whose_heartbeat_stands_still_is_dead_and_one_of_the_others_says_so() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b, c = (hub(name, disk) for name in "abc")
        await live(1, a, b, c)
        await a.move_in("lock")
        assert await live(LAPSE - 1, b, c) == []
        assert b.at_home("lock")
        assert await live(3, b, c) == ["lock"]
        assert b.living == {"b", "c"}
        assert not await c.ask("lock")
        assert set(disk.buckets[HUBS]) == {"b", "c"}

    play(scene())


def test_while_nobody_could_look_nobody_has_died() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.move_in("lock")
        await asyncio.sleep(60)  # the ledger is away
        assert await b.look() == []
        assert b.living == {"a", "b"}
        assert await live(LAPSE + 1, b) == ["lock"]

    play(scene())


def test_a_hub_that_stops_is_not_waited_for() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.leave()
        await b.look()
        assert b.living == {"b"}

    play(scene())


def test_a_hub_that_was_taken_for_dead_is_the_home_again_if_nobody_else_is() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.move_in("lock")
        await live(LAPSE + 2, b)
        await a.look()
        assert a.moved("lock")
        assert await a.stays("lock")
        await b.look()
        assert b.at_home("lock")

    play(scene())


def test_of_several_that_want_a_device_one_gets_it_and_the_next_when_that_is_dead() -> None:
    async def scene() -> None:
        disk = Disk()
        hubs = [hub(name, disk) for name in "abc"]
        await live(1, *hubs)
        won = await asyncio.gather(*(one.claim("lock") for one in hubs))
        assert won == [True, False, False]
        assert await hubs[0].move_in("lock")
        await live(LAPSE + 2, *hubs[1:])
        assert await asyncio.gather(*(one.claim("lock") for one in hubs[1:])) == [True, False]

    play(scene())


def test_what_is_ours_without_a_session_is_cleared() -> None:
    async def scene() -> None:
        disk = Disk()
        a = hub("a", disk)
        await a.look()
        for device in ("lock", "lamp"):
            await a.move_in(device)
        await a.clear({"lamp"})
        assert set(disk.buckets[REGISTRY]) == {"lamp"}

    play(scene())


@pytest.mark.parametrize("dropped", [True, False])
def test_a_home_that_is_gone_from_the_ledger_is_asked_for_there(dropped: bool) -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.move_in("lock")
        await b.look()
        if dropped:
            await b._ledger.write(DropItem(REGISTRY, "lock"))
        assert await b.ask("lock") is not dropped

    play(scene())


@pytest.mark.parametrize("back", [False, True])
def test_a_device_may_leave_or_come_again_while_it_is_asked_whether_it_stays(back: bool) -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.move_in("lock")
        await b.move_in("lock")
        await a.look()
        a._ledger = SlowLedger(disk=disk)
        asking = asyncio.ensure_future(a.stays("lock"))
        await asyncio.sleep(0.5)  # it is asking
        await a.move_out("lock")
        if back:
            await a.move_in("lock")
        assert await asking, "nobody is to be hung up on"
        assert await b.ask("lock")
        assert a.moved("lock") is False

    play(scene())


def test_a_device_is_not_taken_from_a_hub_that_has_just_begun() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await a.look()
        await b.look()  # and a has not looked since
        assert await b.claim("lock")
        assert not await a.claim("lock")
        assert b.at_home("lock")

    play(scene())
