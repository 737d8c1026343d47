"""Redis at its worst: it stands still. No hub waits for it."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.cluster.notifiers.conftest import NotifierBus
from tests.servers import Redis
from tests.stopwatch import MachineStopwatch


async def test_while_redis_stands_still_ringing_costs_nothing(redis_server: Redis) -> None:
    bus = NotifierBus(redis_server.url, redis_server)
    one, other = await bus.pair()
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        took = MachineStopwatch()
        for n in range(50):
            one.notifier.hint("device", f"{n}")
            await asyncio.sleep(0)
        assert took.seconds < 0.2
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await other.hears("awake", lambda: one.notifier.hint("device", "awake"))
    await bus.close()
