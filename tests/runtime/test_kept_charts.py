"""Charts go on after a restart, each hub with its own, and take no more room than they show."""

from __future__ import annotations

from duly.core.operations import PutItem
from duly.core.units import DAY, MINUTE, MS, SECOND
from duly.runtime.kept_charts import BUCKET, KeptCharts
from duly.runtime.time_series import ChartStep, TimeSeries
from duly.storage.ledger import Ledger
from duly.storage.memory import MemoryLedger
from tests.runtime.test_durable_totals import SetClock


class ChartedHub:
    """A hub that counts three messages a second, with its charts."""

    def __init__(self, ledger: Ledger, clock: SetClock, name: str = "a") -> None:
        self._clock, self._count = clock, 0
        self.series = TimeSeries(("done", "pending"))
        self.charts = KeptCharts(ledger, self.series, name)

    def run(self, time: int, step: int = SECOND) -> None:
        for _ in range(time // step):
            self.series.add(self._clock.now() // MS, [self._count], [7.0], [self._count], [0])
            self._count += 3 * step // SECOND
            self._clock.time += step

    def rates(self, step: ChartStep) -> list[float]:
        return [point.rates[0] for point in self.series.points(step)]


async def restarted(ledger: Ledger, clock: SetClock, name: str = "a") -> ChartedHub:
    hub = ChartedHub(ledger, clock, name)
    await hub.charts.load()
    return hub


async def test_minutes_and_hours_go_on_and_seconds_begin_anew() -> None:
    clock = SetClock()
    ledger = MemoryLedger(clock)
    hub = await restarted(ledger, clock)
    hub.run(2 * 60 * MINUTE + 2 * MINUTE)
    await hub.charts.store()
    minutes, hours = hub.series.points(ChartStep.MINUTE), hub.series.points(ChartStep.HOUR)
    assert (len(minutes), len(hours)) == (121, 2)
    clock.time += 10 * MINUTE
    again = await restarted(ledger, clock)
    assert again.series.points(ChartStep.MINUTE) == minutes
    assert again.series.points(ChartStep.HOUR) == hours
    assert again.series.points(ChartStep.SECOND) == []
    again.run(2 * MINUTE)
    await again.charts.store()
    assert (await restarted(ledger, clock)).rates(ChartStep.MINUTE) == [3.0] * 122


async def test_an_hour_is_complete_though_the_hub_was_restarted_in_it() -> None:
    clock = SetClock()
    ledger = MemoryLedger(clock)
    for _ in range(6):
        hub = await restarted(ledger, clock)
        hub.run(25 * MINUTE)
        await hub.charts.store()
    assert hub.rates(ChartStep.HOUR) == [3.0, 3.0]


async def test_what_is_stored_is_bounded_and_what_is_too_old_is_dropped() -> None:
    clock = SetClock()
    ledger = MemoryLedger(clock)
    hub = await restarted(ledger, clock)
    for _ in range(3):
        hub.run(DAY, MINUTE)
        await hub.charts.store()
    stored = await ledger.bucket(BUCKET)
    assert len(stored) == ChartStep.MINUTE.kept + 71
    clock.time += 15 * DAY
    assert (await restarted(ledger, clock, "another hub")).series.points(ChartStep.HOUR) == []
    assert await ledger.bucket(BUCKET) == {}


async def test_each_hub_has_its_own_and_what_cannot_be_read_is_dropped() -> None:
    clock = SetClock()
    ledger = MemoryLedger(clock)
    hub = await restarted(ledger, clock)
    hub.run(5 * MINUTE)
    await hub.charts.store()
    await ledger.write(PutItem(BUCKET, "a/minute/9", b"garbage"), PutItem(BUCKET, "a/week/1", b""))
    assert (await restarted(ledger, clock, "b")).series.points(ChartStep.MINUTE) == []
    assert len((await restarted(ledger, clock)).series.points(ChartStep.MINUTE)) == 4
    assert len(await ledger.bucket(BUCKET)) == 4


async def test_points_of_other_columns_are_left_out() -> None:
    series = TimeSeries(("done", "failed", "pending"))
    other = ChartedHub(MemoryLedger(), SetClock())
    other.run(3 * MINUTE)
    series.restore(ChartStep.MINUTE, other.series.points(ChartStep.MINUTE))
    assert series.points(ChartStep.MINUTE) == []
