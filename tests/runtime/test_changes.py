"""A change wakes every task that waits for one, and no task that comes later."""

from __future__ import annotations

import asyncio

from duly.runtime.changes import Changes
from duly.testing.loops import VirtualLoop


def test_a_change_wakes_all_that_wait_and_none_that_comes_later() -> None:
    async def run() -> tuple[list[str], bool]:
        changes, woken = Changes(), list[str]()

        async def watch(name: str) -> None:
            await changes.wait()
            woken.append(name)

        first, second = asyncio.create_task(watch("first")), asyncio.create_task(watch("second"))
        await asyncio.sleep(0)
        changes.tell()
        late = asyncio.create_task(watch("late"))
        await asyncio.gather(first, second)
        await asyncio.sleep(60)
        waits = not late.done()
        late.cancel()
        return sorted(woken), waits

    assert VirtualLoop().play(run()) == (["first", "second"], True)
