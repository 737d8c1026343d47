"""What the gateway remembers of a command's way, besides the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

from duly.apps.gateway import trace as trails
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
    trail = local.hub.gateway.trail(key_of("phone", command.id))
    assert [(hop.what, hop.attempt) for hop in trail] == [("fresh", 0), ("sent", 1), ("done", 0)]
    assert [hop.time for hop in trail] == sorted(hop.time for hop in trail)


def test_trails_are_bounded(local: LocalHub, tmp_path: Path) -> None:
    hub = local.hub.gateway
    for n in range(trails.HOPS_KEPT + 10):
        hub._traces.note(b"%d" % n, "sent", 1)
    assert len(hub._traces._hops) == trails.HOPS_KEPT
    assert [hop.what for hop in hub.trail(b"10")] == ["sent"]
    assert hub.trail(b"0") == []
