"""What a device pushes while it is cut off arrives later: all of it, once, in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from duly.clients import push_outbox
from duly.clients.device import Device
from duly.core.backlog import BacklogPolicy
from duly.errors import RateLimited, Refused, TooLarge
from duly.wire import frames
from tests.guard import GUARD
from tests.local_hub import LocalHub


async def told(local: LocalHub, device: str = "lock") -> list[object]:
    """What the hub has stored of a device, without its comings and goings."""
    entries = await local.hub.ledger.entries(f"push/{device}", 0, 10_000)
    said = [frames.decode(entry.body) for entry in entries]
    return [frames.load(frame.data) for frame in said if frame.type == "event_report"]


async def test_a_push_can_be_awaited(local: LocalHub) -> None:
    async with Device(local.url, local.tokens["lock"]) as device:
        push = device.push("event_report", 1)
        async with asyncio.timeout(GUARD):
            await push
        assert push.stored
        assert await told(local) == [1]
        assert device._pushes.waiting == 0


async def test_what_is_pushed_during_a_disconnect_arrives_in_order(local: LocalHub) -> None:
    async with Device(local.url, local.tokens["lock"]) as device:
        await device.push("event_report", 0)
        await local.stop()
        sent = [device.push("event_report", n) for n in range(1, 301)]
        await asyncio.sleep(0.1)
        assert not any(push.stored for push in sent)
        await local.start()
        async with asyncio.timeout(GUARD):
            for push in sent:
                await push
        assert await told(local) == list(range(301))


async def test_connections_that_break_lose_and_repeat_nothing(local: LocalHub) -> None:
    async with Device(local.url, local.tokens["lock"]) as device:
        sent = []
        for n in range(200):
            sent.append(device.push("event_report", n))
            if n % 40 == 20:
                async with asyncio.timeout(GUARD):
                    while "lock" not in local.hub.gateway.sessions.devices:
                        await asyncio.sleep(0.01)
                local.hub.gateway.sessions.devices["lock"].close("a cut")
            await asyncio.sleep(0)
        async with asyncio.timeout(GUARD):
            for push in sent:
                await push
        assert await told(local) == list(range(200))


async def test_with_a_file_it_survives_the_device_too(local: LocalHub, tmp_path: Path) -> None:
    file = str(tmp_path / "lock.db")
    device = Device(local.url, local.tokens["lock"], store=file)
    async with device:
        await device.push("event_report", "before")
        await local.stop()
        for n in range(100):
            device.push("event_report", n)
        await asyncio.sleep(0.3)
    await local.start()
    async with Device(local.url, local.tokens["lock"], store=file) as again:
        async with asyncio.timeout(GUARD):
            await again.push("event_report", "after")
        assert await told(local) == ["before", *range(100), "after"]


async def test_what_is_kept_is_bounded_and_the_device_is_told(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_outbox, "KEPT", BacklogPolicy(messages=10))
    async with Device(local.url, local.tokens["lock"]) as device:
        await local.stop()
        await asyncio.sleep(0.3)
        for n in range(10):
            device.push("event_report", n)
        await asyncio.sleep(0.1)
        with pytest.raises(RateLimited):
            device.push("event_report", "one too many")
        await local.start()


async def test_a_push_that_the_hub_refuses_is_told(local: LocalHub) -> None:
    async with Device(local.url, local.tokens["lock"]) as device:
        with pytest.raises(Refused):
            await device.push("no such type!", 1)
        with pytest.raises(TooLarge):
            device.push("event_report", "x" * 300_000)
        await device.push("event_report", "goes on")
        assert await told(local) == ["goes on"]
