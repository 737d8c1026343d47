"""Recent metrics for charts: seconds for ten minutes, minutes for a day, hours for two weeks.

Totals of counters become rates, and totals of histogram buckets become the observations between two points,
so that the percentiles of an hour cover all its observations. Memory is bounded; `kept_charts` stores the
minutes and hours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from duly.core.units import MS

_SECOND: Final = 1_000
_EARLY: Final = 100


class ChartStep(StrEnum):
    """The length of a chart's points."""

    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"

    @property
    def seconds(self) -> int:
        """The length in seconds."""
        return _SECONDS[self]

    @property
    def kept(self) -> int:
        """How many points are remembered."""
        return _KEPT[self]


_SECONDS: Final = {ChartStep.SECOND: 1, ChartStep.MINUTE: 60, ChartStep.HOUR: 3_600}
_KEPT: Final = {ChartStep.SECOND: 600, ChartStep.MINUTE: 1_440, ChartStep.HOUR: 336}


class ChartPoint(Struct, frozen=True):
    """The metrics of one period, which ends at `time` (milliseconds)."""

    time: int
    rates: list[float]
    gauges: list[float]
    totals: list[int]
    commits: list[int]


class _CounterReading(Struct, frozen=True):
    """The values of the counters at one moment."""

    time: int
    counts: list[int]
    totals: list[int]
    commits: list[int]


class TimeSeries:
    """Points of three lengths; `columns` names the rates, then the gauges."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._points: dict[ChartStep, deque[ChartPoint]] = {
            step: deque(maxlen=step.kept) for step in ChartStep
        }
        self._last: dict[ChartStep, _CounterReading] = {}
        self._readings: deque[_CounterReading] = deque(maxlen=61)
        self._gauges: list[float] = []

    def add(
        self,
        time: int,
        counts: Sequence[int],
        gauges: Sequence[float],
        totals: Sequence[int],
        commits: Sequence[int],
    ) -> None:
        """Add a reading; it becomes a point of every length whose period is over."""
        reading = _CounterReading(time, list(counts), list(totals), list(commits))
        self._readings.append(reading)
        self._gauges = list(gauges)
        for step in (ChartStep.SECOND, ChartStep.MINUTE):
            points, last = self._points[step], self._last.setdefault(step, reading)
            # A reading that is a little early still ends its period.
            if time - last.time >= step.seconds * _SECOND - _EARLY:
                points.append(_between(last, reading, self._gauges))
                self._last[step] = reading
                if step is ChartStep.MINUTE:
                    self._add_hour(time)
            elif time < last.time:  # the clock was set back
                self._last[step] = reading

    def _add_hour(self, time: int) -> None:
        """Make the point of an hour from its minutes, including those from before a restart."""
        minutes, hours = self._points[ChartStep.MINUTE], self._points[ChartStep.HOUR]
        since = [one for one in minutes if one.time > (hours[-1].time if hours else 0)]
        began = hours[-1].time if hours else since[0].time - 60 * _SECOND
        if time - began >= 3_600 * _SECOND - _EARLY:
            hours.append(_combined(since))

    def restore(self, step: ChartStep, points: Sequence[ChartPoint]) -> None:
        """Insert points from before a restart, oldest first, before the present ones. Points with other
        columns are left out."""
        fit = [point for point in points if len(point.rates) + len(point.gauges) == len(self.columns)]
        self._points[step] = deque([*fit, *self._points[step]], step.kept)

    def points(self, step: ChartStep) -> list[ChartPoint]:
        """Return the points of one length, oldest first."""
        return list(self._points[step])

    def recent(self, seconds: int) -> ChartPoint | None:
        """Return one point for the last seconds, or None before the second reading."""
        if len(self._readings) < 2:
            return None
        last = self._readings[-1]
        first = self._readings[max(0, len(self._readings) - 1 - seconds)]
        return _between(first, last, self._gauges)


def _between(first: _CounterReading, last: _CounterReading, gauges: list[float]) -> ChartPoint:
    seconds = max(last.time - first.time, 1) / MS
    rates = [(new - old) / seconds for old, new in zip(first.counts, last.counts, strict=True)]
    return ChartPoint(
        last.time,
        rates,
        gauges,
        [new - old for old, new in zip(first.totals, last.totals, strict=True)],
        [new - old for old, new in zip(first.commits, last.commits, strict=True)],
    )


def _combined(points: list[ChartPoint]) -> ChartPoint:
    """Combine consecutive points into one: mean rates, the last gauges, and all observations."""
    last = points[-1]
    return ChartPoint(
        last.time,
        [sum(rates) / len(points) for rates in zip(*(one.rates for one in points), strict=True)],
        last.gauges,
        [sum(counts) for counts in zip(*(one.totals for one in points), strict=True)],
        [sum(counts) for counts in zip(*(one.commits for one in points), strict=True)],
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float:
    """Return the value below which this part of the observations lies, with linear interpolation within
    buckets; 0 if there are none.

    >>> quantile((1.0, 2.0), [0, 10, 0], 0.5)
    1.5
    """
    wanted = sum(counts) * part
    if not wanted:
        return 0.0
    below = 0.0
    for at, count in enumerate(counts):
        if count and below + count >= wanted:
            if at >= len(bounds):
                return bounds[-1]
            low = bounds[at - 1] if at else 0.0
            return low + (bounds[at] - low) * (wanted - below) / count
        below += count
    return bounds[-1]
