"""Servers that hang delay neither each other nor the hub."""

from __future__ import annotations

import asyncio
import threading

import pytest

from duly.apps.alerts.channels.threads import AT_ONCE, ChannelThreads
from duly.errors import NotSent
from tests.guard import GUARD


async def test_a_call_returns_or_raises_as_it_does_without_a_thread() -> None:
    threads = ChannelThreads()
    assert await threads.run("mail", GUARD, lambda: threading.current_thread().daemon)
    with pytest.raises(ZeroDivisionError):
        await threads.run("mail", GUARD, lambda: 1 / 0)


async def test_a_server_that_hangs_keeps_only_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.apps.alerts.channels.threads.TURN_SECONDS", 0.05)
    threads, released = ChannelThreads(), threading.Event()
    try:
        for _ in range(AT_ONCE):
            with pytest.raises(TimeoutError):
                await threads.run("dead", 0.01, released.wait)
        with pytest.raises(NotSent, match="still wait"):
            await threads.run("dead", GUARD, released.wait)
        assert await threads.run("alive", GUARD, lambda: 7) == 7
        assert await asyncio.to_thread(lambda: 8) == 8
    finally:
        released.set()
    async with asyncio.timeout(GUARD):
        while True:  # the threads that had been given up end now
            try:
                assert await threads.run("dead", GUARD, lambda: 9) == 9
                break
            except NotSent:
                pass


async def test_a_call_that_waits_for_its_turn_is_made_when_another_ends() -> None:
    threads, released = ChannelThreads(), threading.Event()
    calls = [asyncio.create_task(threads.run("slow", GUARD, released.wait)) for _ in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    released.set()
    assert all(await asyncio.gather(*calls))
