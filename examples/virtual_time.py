"""A test of hours of asyncio code, in milliseconds: time jumps to the next timer instead of passing.

Run it: python examples/virtual_time.py
"""

import asyncio
import time

import duly
from duly.testing import ManualClock
from duly.testing.loops import VirtualLoop

HOUR = 3_600
MICROSECONDS = 1_000_000


async def poll_for_a_day() -> int:
    """Code of your own that sleeps."""
    polls = 0
    for _ in range(24):
        await asyncio.sleep(HOUR)
        polls += 1
    return polls


async def refuse_what_is_too_old() -> None:
    """What is older than ids are remembered is stale: it might be a repeat of something forgotten."""
    clock = ManualClock()
    async with await duly.open_ledger("memory:", clock=clock) as ledger:
        day = duly.Horizon(keep=24 * HOUR * MICROSECONDS)
        minted = clock.now() // 1_000
        first = duly.Message("app-1", f"{minted}_1", "unlock", "lock-1", b"{}", time=clock.now())
        late = duly.Message("app-1", f"{minted}_2", "unlock", "lock-1", b"{}", time=clock.now())
        print("first time:", (await ledger.admit(first, horizon=day)).kind.value)
        print("a repeat:", (await ledger.admit(first, horizon=day)).kind.value)
        clock.advance(25 * HOUR)
        print("a day late:", (await ledger.admit(late, horizon=day)).kind.value)


began = time.perf_counter()
print("polls:", VirtualLoop().play(poll_for_a_day()))
assert time.perf_counter() - began < 5
asyncio.run(refuse_what_is_too_old())
