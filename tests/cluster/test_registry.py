"""Which hub holds a device: registered, unregistered, taken over; and when a hub counts as dead."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from duly.cluster.notifiers.local import LocalBus, LocalNotifier
from duly.cluster.registry import HUBS, LAPSE, REGISTRY, HubRegistry
from duly.core.operations import DropItem, Group, Results
from duly.errors import LedgerUnavailable
from duly.storage.memory import Disk, MemoryLedger
from duly.testing.loops import VirtualLoop


def hub(name: str, disk: Disk) -> HubRegistry:
    ledger = MemoryLedger(disk=disk)
    ledger.worker = name
    return HubRegistry(ledger, LocalNotifier(name, LocalBus()))


class SlowLedger(MemoryLedger):
    def __init__(self, *, disk: Disk, seconds: float = 1) -> None:
        super().__init__(disk=disk)
        self._seconds = seconds

    async def commit(self, groups: Sequence[Group]) -> list[Results]:
        await asyncio.sleep(self._seconds)
        return await super().commit(groups)


def play(scene: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(scene)


async def live(seconds: float, *hubs: HubRegistry) -> list[str]:
    """Let time pass in which these hubs look once a second; whom they find to be gone."""
    gone: list[str] = []
    for _ in range(round(seconds)):
        await asyncio.sleep(1)
        for one in hubs:
            gone += await one.refresh()
    return gone


def test_a_device_is_held_where_it_registered_until_it_unregisters() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        assert await a.register("lock")
        assert await b.look_up("lock")
        assert (b.held_devices(), b.is_held("lamp")) == (["lock"], False)
        assert await a.unregister("lock")
        assert not await b.look_up("lock")

    play(scene())


def test_a_hub_that_could_not_look_calls_no_other_dead() -> None:
    """A hub that stood still, or whose ledger did, has not seen the heartbeats of the others: that they went
    on is not known to it before it has looked again."""

    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(2, a, b)
        await live(2 * LAPSE, b)  # and a does not look
        assert a.living == {"a", "b"}
        await live(1, a, b)
        assert a.living == {"a", "b"}
        await live(LAPSE + 1, a)  # and b is dead
        assert a.living == {"a"}

    play(scene())


def test_the_goodbye_of_an_old_connection_does_not_undo_a_new_one() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.register("lock")
        assert not await b.register("lock"), "it was somewhere"
        await a.refresh()
        assert a.may_be_lost("lock")
        assert not await a.confirm("lock")
        assert not await a.unregister("lock")
        assert await a.look_up("lock")

    play(scene())


def test_a_registration_that_is_stored_late_does_not_take_a_device_from_where_it_is_now() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        slow = a._ledger = SlowLedger(disk=disk, seconds=10)
        slow.worker = "a"
        await live(1, b)
        late = asyncio.create_task(a.register("lock"))
        await asyncio.sleep(5)
        assert await b.register("lock"), "its session at a is over, but a does not know that yet"
        with pytest.raises(LedgerUnavailable, match="another hub"):
            await late
        await b.refresh()
        assert not b.may_be_lost("lock")
        assert not a.is_registered("lock")

    play(scene())


def test_a_hub_that_has_just_begun_is_met_and_one_that_left_is_not() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b, c = (hub(name, disk) for name in "abc")
        await live(1, a)
        await b.refresh()
        await c.refresh()
        await c.leave()
        await a.meet(["b", "c"])
        assert a.living == {"a", "b"}
        assert await live(2 * LAPSE, a) == []
        assert a.living == {"a"}, "it is as mortal as the others"

    play(scene())


def test_of_two_registrations_at_the_same_time_one_holds() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        assert sorted(await asyncio.gather(a.register("lock"), b.register("lock"))) == [False, True]
        assert sorted([await a.confirm("lock"), await b.confirm("lock")]) == [False, True]

    play(scene())


def test_a_hub_whose_heartbeat_stands_still_is_dead_and_one_of_the_others_says_so() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b, c = (hub(name, disk) for name in "abc")
        await live(1, a, b, c)
        await a.register("lock")
        assert await live(LAPSE - 1, b, c) == []
        assert b.is_held("lock")
        assert await live(3, b, c) == ["lock"]
        assert b.living == {"b", "c"}
        assert not await c.look_up("lock")
        assert set(disk.buckets[HUBS]) == {"b", "c"}

    play(scene())


def test_while_the_ledger_could_not_be_read_no_hub_has_died() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.register("lock")
        await asyncio.sleep(60)  # the ledger is away
        assert await b.refresh() == []
        assert b.living == {"a", "b"}
        assert await live(LAPSE + 1, b) == ["lock"]

    play(scene())


def test_a_hub_that_stops_is_not_waited_for() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.leave()
        await b.refresh()
        assert b.living == {"b"}

    play(scene())


def test_a_hub_that_was_taken_for_dead_holds_the_device_again_if_no_other_does() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.register("lock")
        await live(LAPSE + 2, b)
        await a.refresh()
        assert a.may_be_lost("lock")
        assert await a.confirm("lock")
        await b.refresh()
        assert b.is_held("lock")

    play(scene())


def test_of_several_that_want_a_device_one_gets_it_and_the_next_when_that_is_dead() -> None:
    async def scene() -> None:
        disk = Disk()
        hubs = [hub(name, disk) for name in "abc"]
        await live(1, *hubs)
        won = await asyncio.gather(*(one.claim("lock") for one in hubs))
        assert won == [True, False, False]
        assert await hubs[0].register("lock")
        await live(LAPSE + 2, *hubs[1:])
        assert await asyncio.gather(*(one.claim("lock") for one in hubs[1:])) == [True, False]

    play(scene())


def test_what_is_ours_without_a_session_is_cleared() -> None:
    async def scene() -> None:
        disk = Disk()
        a = hub("a", disk)
        await a.refresh()
        for device in ("lock", "lamp"):
            await a.register(device)
        await a.drop_absent({"lamp"})
        assert set(disk.buckets[REGISTRY]) == {"lamp"}

    play(scene())


@pytest.mark.parametrize("dropped", [True, False])
def test_a_home_that_is_gone_from_the_ledger_is_asked_for_there(dropped: bool) -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.register("lock")
        await b.refresh()
        if dropped:
            await b._ledger.write(DropItem(REGISTRY, "lock"))
        assert await b.look_up("lock") is not dropped

    play(scene())


@pytest.mark.parametrize("back", [False, True])
def test_a_device_may_leave_or_come_again_while_it_is_asked_whether_it_stays(back: bool) -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.register("lock")
        await b.register("lock")
        await a.refresh()
        a._ledger = SlowLedger(disk=disk)
        asking = asyncio.ensure_future(a.confirm("lock"))
        await asyncio.sleep(0.5)  # it is asking
        await a.unregister("lock")
        if back:
            await a.register("lock")
        assert await asking, "the session is not closed"
        assert await b.look_up("lock")
        assert a.may_be_lost("lock") is False

    play(scene())


def test_a_device_is_not_taken_from_a_hub_that_has_just_begun() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await a.refresh()
        await b.refresh()  # and a has not looked since
        assert await b.claim("lock")
        assert not await a.claim("lock")
        assert b.is_held("lock")

    play(scene())


class RefusingLedger(MemoryLedger):
    """A ledger that is away while `away` is set."""

    away = False

    async def commit(self, groups: Sequence[Group]) -> list[Results]:
        if self.away:
            await asyncio.sleep(1)
            raise LedgerUnavailable("it is away")
        return await super().commit(groups)


def test_a_device_that_registers_twice_at_once_is_held_though_the_first_time_fails() -> None:
    async def scene() -> None:
        disk = Disk()
        ledger = RefusingLedger(disk=disk)
        ledger.worker = "a"
        a, b = HubRegistry(ledger, LocalNotifier("a", LocalBus())), hub("b", disk)
        await live(1, a, b)
        ledger.away = True
        first = asyncio.create_task(a.register("lock"))
        await asyncio.sleep(0.5)
        ledger.away = False
        await a.register("lock")
        with pytest.raises(LedgerUnavailable):
            await first
        assert await b.look_up("lock")
        assert await a.confirm("lock")

    play(scene())


def test_a_claimed_device_that_could_not_be_connected_is_free_again() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        assert await a.claim("lamp")
        await a.drop_absent([])
        assert await b.look_up("lamp"), "it is about to be connected"
        a.end_claim("lamp")
        assert await a.claim("lamp"), "it may try again before anything else"
        a.end_claim("lamp")
        await a.drop_absent([])
        assert await b.claim("lamp")
        assert await a.look_up("lamp")
        assert a.is_at_another("lamp")
        assert not await a.claim("lamp")

    play(scene())


def test_a_device_that_is_here_and_not_registered_is_registered_unless_another_hub_has_it() -> None:
    async def scene() -> None:
        disk = Disk()
        a, b = hub("a", disk), hub("b", disk)
        await live(1, a, b)
        await a.register("lock")
        await a.unregister("lock")  # of a session that has ended, after the next one had begun
        assert not a.is_registered("lock")
        assert await a.confirm("lock")
        assert await b.look_up("lock")
        await a.unregister("lock")
        await b.register("lock")
        assert not await a.confirm("lock")

    play(scene())
