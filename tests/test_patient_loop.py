"""The clock of the tests' event loop leaves out the time for which there was no processor."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from tests.patient_loop import BRIEF, PatientClock, PatientLoop


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread had no processor")
async def test_a_timer_waits_as_long_as_its_thread_has_waited_for_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PatientLoop)
    waits = 0.2
    waited = iter([loop._read(loop._schedstat or 0), *[loop._waited + waits] * 1_000_000])
    monkeypatch.setattr(PatientLoop, "_read", staticmethod(lambda _: next(waited)))
    clock, began, by_clock = time.monotonic(), loop.time(), PatientClock()
    before = by_clock.now()
    await asyncio.sleep(0.1)
    assert time.monotonic() - clock >= 0.1 + waits - 2 * BRIEF - 0.05
    assert loop.time() - began >= 0.1
    assert by_clock.now() - before >= 100_000 - 2_000


async def test_its_time_never_goes_back() -> None:
    loop = asyncio.get_running_loop()
    times = [loop.time() for _ in range(1_000)]
    for _ in range(20):
        await asyncio.sleep(BRIEF)
        times.append(loop.time())
    assert times == sorted(times)
