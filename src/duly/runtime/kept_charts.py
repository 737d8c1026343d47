"""Stores the points of a hub's charts in the ledger, so that charts of hours and days continue after a
restart.

The laws. One point of a minute or an hour is one item; it replaces the point that has become too old, so
there are never more items than points shown. Points that cannot be decoded, or that have the columns of
another version, are left out. The points of a hub that has been gone for longer than its charts reach are
dropped by the next hub that starts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from duly.core.operations import DropItem, PutItem
from duly.core.units import MS
from duly.runtime.time_series import ChartPoint, ChartStep, TimeSeries
from duly.storage.ledger import Ledger

BUCKET: Final = "charts"
KEPT_STEPS: Final = (ChartStep.MINUTE, ChartStep.HOUR)
"""The steps that are stored. Points of a second are dropped after ten minutes."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(ChartPoint).decode


class KeptCharts:
    """Stores the charts of the hub with this name."""

    def __init__(self, ledger: Ledger, series: TimeSeries, hub: str) -> None:
        self._ledger, self._series, self._hub = ledger, series, hub
        self._stored = dict.fromkeys(KEPT_STEPS, 0)
        """the time of the newest stored point"""

    async def load(self) -> None:
        """Continue from the points in the ledger."""
        now = self._ledger.clock.now() // MS
        found: dict[ChartStep, list[ChartPoint]] = {step: [] for step in KEPT_STEPS}
        past: list[DropItem] = []
        for name, body in (await self._ledger.bucket(BUCKET)).items():
            hub, step, point = _read(name, body)
            if step is None or point is None or point.time <= now - step.seconds * step.kept * 1_000:
                past.append(DropItem(BUCKET, name))
            elif hub == self._hub and point.time <= now:
                found[step].append(point)
        for step, points in found.items():
            points.sort(key=lambda point: point.time)
            self._series.restore(step, points)
            self._stored[step] = points[-1].time if points else 0
        if past:
            await self._ledger.write(*past)

    async def store(self) -> None:
        """Store the new points."""
        fresh = {
            step: [point for point in self._series.points(step) if point.time > self._stored[step]]
            for step in KEPT_STEPS
        }
        puts = [
            PutItem(BUCKET, _name(self._hub, step, point), _encode(point))
            for step, points in fresh.items()
            for point in points
        ]
        if puts:
            await self._ledger.write(*puts)
            self._stored |= {step: points[-1].time for step, points in fresh.items() if points}


def _name(hub: str, step: ChartStep, point: ChartPoint) -> str:
    return f"{hub}/{step}/{point.time // (step.seconds * 1_000) % step.kept}"


def _read(name: str, body: bytes) -> tuple[str, ChartStep | None, ChartPoint | None]:
    """Return the hub, the length and the point of an item, or None if it cannot be decoded."""
    hub, _, rest = name.rpartition("/")[0].rpartition("/")
    step = ChartStep(rest) if rest in KEPT_STEPS else None
    with suppress(msgspec.DecodeError):
        return hub, step, _decode(body)
    return hub, step, None
