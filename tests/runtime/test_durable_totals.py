"""Totals go on after a restart, never go backwards, and add up over hubs."""

from __future__ import annotations

from duly.core.units import DAY
from duly.runtime.durable_totals import GONE_AFTER, PAST, DurableTotals
from duly.runtime.telemetry import Telemetry
from duly.storage.ledger import Ledger
from duly.storage.memory import MemoryLedger


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 1_700_000_000_000_000

    def now(self) -> int:
        return self.time

    def steady(self) -> int:
        return self.time


async def begin(ledger: Ledger, hub: str) -> tuple[Telemetry, DurableTotals]:
    telemetry = Telemetry(hub)
    totals = DurableTotals(ledger, telemetry)
    await totals.load()
    return telemetry, totals


async def test_a_restart_goes_on_where_the_last_run_stored() -> None:
    ledger = MemoryLedger()
    telemetry, totals = await begin(ledger, "a")
    telemetry.count("query", "done", 5)
    await totals.store()
    telemetry.count("query", "done", 2)  # and killed before the next time
    again, totals = await begin(ledger, "a")
    cell = again.counter("duly_messages_total", "query", "done")
    assert (cell.total, cell.stored) == (5, 5)
    again.count("query", "done")
    assert (cell.total, cell.stored) == (6, 5)
    await totals.store()
    assert (cell.total, cell.stored) == (6, 6)


async def test_what_did_not_change_is_not_written() -> None:
    ledger = MemoryLedger()
    telemetry, totals = await begin(ledger, "a")
    await totals.store()
    assert await ledger.bucket("totals") == {}
    telemetry.retried()
    await totals.store()
    before = await ledger.bucket("totals")
    await totals.store()
    assert await ledger.bucket("totals") == before


async def test_the_sum_is_that_of_all_hubs() -> None:
    ledger = MemoryLedger()
    for hub, times in (("a", 3), ("b", 4)):
        telemetry, totals = await begin(ledger, hub)
        telemetry.retried(times)
        await totals.store()
    assert (await totals.summed())["duly_retries_total", ()] == 7


async def test_two_processes_of_one_name_lose_nothing() -> None:
    ledger = MemoryLedger()
    one, totals_one = await begin(ledger, "a")
    two, totals_two = await begin(ledger, "a")
    one.retried(3)
    two.retried(4)
    await totals_one.store()
    await totals_two.store()
    one.retried(1)
    await totals_one.store()
    assert (await totals_one.summed())["duly_retries_total", ()] == 8
    assert one.retries.total == one.retries.stored == 8


async def test_hubs_that_are_gone_for_long_are_added_up_in_one_row() -> None:
    clock = SetClock()
    ledger = MemoryLedger(clock)
    for hub in ("a", "b"):
        telemetry, totals = await begin(ledger, hub)
        telemetry.retried(2)
        await totals.store()
    clock.time += GONE_AFTER + DAY
    telemetry, totals = await begin(ledger, "c")
    telemetry.retried(1)
    await totals.store()
    assert set(await ledger.bucket("totals")) == {PAST, "c"}
    assert (await totals.summed())["duly_retries_total", ()] == 5
