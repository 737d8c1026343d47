"""What apps believe of a device is what was noted, also if the ledger fails when it comes or goes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from duly.apps.gateway.presence import GRACE, PRESENT, RETRY_SECONDS, DevicePresence
from duly.apps.gateway.pushes import PushService, stream_of
from duly.core import operations as w
from duly.errors import LedgerUnavailable
from duly.runtime.activity_log import ActivityLog
from duly.storage.memory import MemoryLedger
from duly.testing.loops import VirtualLoop


class FailingLedger(MemoryLedger):
    """A memory ledger that can be switched off."""

    off = False

    async def commit(self, groups: Sequence[w.Group]) -> list[w.Results]:
        if self.off:
            raise LedgerUnavailable("the disk is full")
        return await super().commit(groups)


def presence_on(ledger: MemoryLedger) -> DevicePresence:
    return DevicePresence(ledger, PushService(ledger, ActivityLog(ledger), lambda _: (), lambda _: None))


async def told(ledger: MemoryLedger) -> list[bool]:
    """What apps were told of the lock, in order."""
    entries = await ledger.entries(stream_of("lock"))
    return [msgspec.json.decode(entry.body)["data"]["online"] for entry in entries]


def virtual(program: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(program)


def test_a_device_that_goes_while_the_ledger_fails_is_reported_when_it_works_again() -> None:
    async def program() -> None:
        ledger = FailingLedger()
        presence = presence_on(ledger)
        await presence.came_online("lock")
        ledger.off = True
        await presence.went_offline("lock")
        await asyncio.sleep(3 * RETRY_SECONDS)
        assert await told(ledger) == [True]
        ledger.off = False
        await asyncio.sleep(2 * RETRY_SECONDS)
        assert await told(ledger) == [True, False]
        assert await ledger.bucket(PRESENT) == {}
        await presence.stop()

    virtual(program())


def test_one_that_is_back_by_then_is_not_reported() -> None:
    async def program() -> None:
        ledger = FailingLedger()
        presence = presence_on(ledger)
        await presence.came_online("lock")
        ledger.off = True
        await presence.went_offline("lock")
        ledger.off = False
        await presence.came_online("lock")
        await asyncio.sleep(3 * RETRY_SECONDS)
        assert await told(ledger) == [True]
        await presence.stop()

    virtual(program())


def test_a_device_that_does_not_come_back_after_the_hubs_death_is_reported() -> None:
    async def program() -> None:
        ledger = FailingLedger()
        await presence_on(ledger).came_online("lock")
        presence = presence_on(ledger)
        await presence.start()
        await asyncio.sleep(GRACE - 1)
        assert await told(ledger) == [True]
        await asyncio.sleep(2)
        assert await told(ledger) == [True, False]
        await presence.stop()

    virtual(program())
