"""Whether a notifier works: a hub hears the hint that it sends to itself."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import pytest

from duly.cluster.notifier import Notifier
from duly.cluster.notifiers import open_notifier
from tests import servers
from tests.cluster.notifiers.conftest import NotifierBus
from tests.guard import GUARD


async def test_a_hub_that_checks_hears_itself_and_the_others_do_not(bus: NotifierBus) -> None:
    one, other = await bus.pair()
    assert 0 <= await one.notifier.check(10) < 10
    one.notifier.hint("device", "after")
    await other.hears("after")
    assert one.heard.count("after") == 0


async def test_a_redis_that_died_is_not_heard_and_says_why(redis_server: servers.Redis) -> None:
    notifier = open_notifier(redis_server.url, "one")
    await notifier.start()
    try:
        await _until_heard(notifier)
        await asyncio.to_thread(redis_server.stop, signal.SIGKILL)
        try:
            with pytest.raises(TimeoutError):
                await notifier.check(1)
            async with asyncio.timeout(GUARD):
                while not notifier.problem:
                    await asyncio.sleep(0.02)
        finally:
            await asyncio.to_thread(redis_server.start)
        await _until_heard(notifier)
        assert notifier.problem == ""
    finally:
        await notifier.stop()


async def _until_heard(notifier: Notifier) -> None:
    """A notifier that has just begun, or lost its server, is tried again by itself."""
    async with asyncio.timeout(GUARD):
        while True:
            with suppress(TimeoutError):
                await notifier.check(0.5)
                return
