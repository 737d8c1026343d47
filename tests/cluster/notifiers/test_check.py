"""Whether a notifier works: who rings hears it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import pytest

from duly.cluster.notifier import Notifier
from duly.cluster.notifiers import open_notifier
from tests import servers
from tests.cluster.notifiers.conftest import House


async def test_who_rings_for_himself_hears_it_and_the_others_do_not(house: House) -> None:
    one, other = await house.pair()
    assert 0 <= await one.bell.check(10) < 10
    one.bell.ring("device", "after")
    await other.hears("after")
    assert one.heard.count("after") == 0


async def test_a_redis_that_died_is_not_heard_and_says_why(redis_server: servers.Redis) -> None:
    bell = open_notifier(redis_server.url, "one")
    await bell.start()
    try:
        await _until_heard(bell)
        await asyncio.to_thread(redis_server.stop, signal.SIGKILL)
        try:
            with pytest.raises(TimeoutError):
                await bell.check(1)
            async with asyncio.timeout(20):
                while not bell.problem:
                    await asyncio.sleep(0.02)
        finally:
            await asyncio.to_thread(redis_server.start)
        await _until_heard(bell)
        assert bell.problem == ""
    finally:
        await bell.stop()


async def _until_heard(bell: Notifier) -> None:
    """A bell that has just begun, or lost its server, is tried again by itself."""
    async with asyncio.timeout(30):
        while True:
            with suppress(TimeoutError):
                await bell.check(0.5)
                return
