"""What the gateway notes of a command's way, besides the ledger's state."""

from __future__ import annotations

import asyncio

from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.core.messages import key_of
from tests.local_hub import LocalHub


async def test_every_hop_of_a_command_is_kept_with_its_time_and_attempt(local: LocalHub) -> None:
    device = Device(local.url, local.tokens["lock"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> None:
        await asyncio.sleep(0)

    async with device, App(local.url, local.tokens["phone"]) as app:
        command = await app.post("lock", "lock_control", {"open": True})
        await command.ended()
    hops = await local.hub.metrics.trail.of(key_of("phone", command.id), 0)
    assert [(hop.what, hop.attempt) for hop in hops] == [("fresh", 0), ("sent", 1), ("done", 0)]
    assert [hop.time for hop in hops] == sorted(hop.time for hop in hops)
