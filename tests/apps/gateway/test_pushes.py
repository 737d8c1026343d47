"""Pushes that other hubs have stored: read together, sent once to everybody who listens, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pytest

from duly.apps.gateway.pushes import NEWS, NEWS_DEVICES, PushService, stream_of
from duly.core.operations import AppendEntry
from duly.runtime.activity_log import ActivityLog
from duly.storage.ledger import StreamEntry
from duly.storage.memory import MemoryLedger
from duly.wire.outgoing import GapFrame, OutgoingFrame, PushFrame, encode
from duly.wire.session import UncongestedSession


class App(UncongestedSession):
    """A connection that remembers what was pushed to it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        """(device, number) of every push; a gap has a negative number"""

    def push(self, frame: OutgoingFrame) -> None:
        said = msgspec.json.decode(encode(frame))
        at = -1 if isinstance(frame, GapFrame) else said["cursor"]
        self.told.append((said["from"], at))

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


class CountedLedger(MemoryLedger):
    """A memory ledger that counts the queries of streams."""

    queries = 0

    async def entries_after(
        self, places: Sequence[tuple[str, int]], limit: int = 100
    ) -> list[list[StreamEntry]]:
        self.queries += 1
        return [await super(CountedLedger, self).entries(stream, after, limit) for stream, after in places]

    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        self.queries += 1
        return await super().entries(stream, after, limit)


class Hub:
    """A hub whose apps listen to all devices."""

    def __init__(self) -> None:
        self.ledger = CountedLedger()
        self.apps = [App(), App()]
        self.pushes = PushService(
            self.ledger, ActivityLog(self.ledger), self._listeners, lambda _: None, lambda _: self.born
        )
        self.born = 0
        """pushes before this time are of earlier devices"""

    def _listeners(self, device: str) -> Iterable[App]:
        return self.apps

    async def pushed_elsewhere(self, device: str, count: int = 1) -> None:
        """Store pushes as another hub does."""
        body = encode(PushFrame("report", device, msgspec.Raw(b"1"), 1))
        now = self.ledger.clock.now()
        await self.ledger.write(*(AppendEntry(stream_of(device), body, now) for _ in range(count)))

    async def refresh(self, *devices: str) -> None:
        await self.pushes.refresh_all(devices)
        await self.pushes.tasks.finish()


@pytest.fixture
def hub() -> Hub:
    return Hub()


async def test_pushes_of_many_devices_share_a_query(hub: Hub) -> None:
    devices = [f"d{n}" for n in range(3 * NEWS_DEVICES)]
    for app in hub.apps:
        hub.pushes.enter(app, dict.fromkeys(devices, 0))
    await hub.pushes.tasks.finish()
    for device in devices:
        await hub.pushed_elsewhere(device)
    hub.ledger.queries = 0
    await hub.refresh(*devices)
    assert hub.ledger.queries == 3
    for app in hub.apps:
        assert sorted(app.told) == sorted((device, 1) for device in devices)


async def test_many_new_pushes_of_a_device_are_all_sent_in_order(hub: Hub) -> None:
    hub.pushes.enter(hub.apps[0], {"d": 0})
    await hub.pushes.tasks.finish()
    await hub.pushed_elsewhere("d", 3 * NEWS)
    await hub.refresh("d")
    assert hub.apps[0].told == [("d", n + 1) for n in range(3 * NEWS)]
    assert hub.apps[1].told == []  # a connection that gets no pushes


async def test_a_connection_that_has_fewer_gets_what_it_lacks(hub: Hub) -> None:
    await hub.pushed_elsewhere("d", 2)
    first, second = hub.apps
    hub.pushes.enter(first, {"d": 2})
    hub.pushes.enter(second, {"d": 2})
    await hub.pushes.tasks.finish()
    hub.pushes._told[second]["d"] = 0
    await hub.refresh("d")
    assert (first.told, second.told) == ([], [("d", 1), ("d", 2)])
    hub.pushes._told[second]["d"] = 1
    second.told.clear()
    await hub.pushed_elsewhere("d")
    await hub.refresh("d")
    assert (first.told, second.told) == ([("d", 3)], [("d", 2), ("d", 3)])


async def test_a_connection_that_does_not_know_a_device_gets_nothing_old_of_it(hub: Hub) -> None:
    await hub.pushed_elsewhere("d", 2)
    hub.pushes.enter(hub.apps[0], {})
    await hub.refresh("d")
    assert hub.apps[0].told == []
    await hub.pushed_elsewhere("d")
    await hub.refresh("d")
    assert hub.apps[0].told == [("d", 3)]


async def test_pushes_of_an_earlier_device_of_that_name_are_not_sent(hub: Hub) -> None:
    hub.pushes.enter(hub.apps[0], {"d": 0})
    await hub.pushes.tasks.finish()
    await hub.pushed_elsewhere("d")
    hub.born = hub.ledger.clock.now() + 1_000_000
    await hub.refresh("d")
    assert hub.apps[0].told == []
    hub.born = 0
    await hub.pushed_elsewhere("d")
    await hub.refresh("d")
    assert hub.apps[0].told == [("d", 2)]


async def test_pushes_that_were_trimmed_before_they_were_read_are_told_as_a_gap(hub: Hub) -> None:
    hub.pushes.enter(hub.apps[0], {"d": 0})
    await hub.pushes.tasks.finish()
    await hub.pushed_elsewhere("d", 3)
    await hub.ledger.trim(stream_of("d"), 2)
    await hub.refresh("d")
    assert hub.apps[0].told == [("d", -1), ("d", 3)]
