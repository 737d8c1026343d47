"""Stores the totals of a hub's counters in the ledger, so that they continue after a restart.

The laws. Each hub has one row, named by its data folder, and adds its new counts to it; a row that another
process has changed meanwhile is read again, never overwritten. `/metrics` shows what is stored: a hub that is
killed loses a few seconds of counts, and no counter ever goes backwards. The rows of hubs that have been gone
for long are merged into one row, so that the sum over all rows is the total of the cluster.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.operations import CheckItem, DropItem, PutItem, PutNewItem
from duly.core.units import DAY
from duly.runtime.telemetry import CounterCell, Telemetry
from duly.storage.ledger import Ledger

BUCKET: Final = "totals"
PAST: Final = "(past)"
"""The row of hubs that are gone."""
GONE_AFTER: Final = 30 * DAY
TRIES: Final = 5
"""How often a row that others change at the same time is read again."""


class TotalRow(Struct, frozen=True, array_like=True):
    """The stored counters of one hub: when they were stored (µs), and the values by name and labels."""

    at: int
    totals: list[tuple[str, tuple[str, ...], int]]

    def as_dict(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Return the counters as a dictionary."""
        return {(name, labels): value for name, labels, value in self.totals}


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(TotalRow).decode


class DurableTotals:
    """Stores the durable counters of one hub."""

    def __init__(self, ledger: Ledger, telemetry: Telemetry) -> None:
        self._ledger = ledger
        self._telemetry = telemetry
        self._body: bytes | None = None
        """the row as it was last read or written"""
        self._storing = asyncio.Lock()

    async def load(self) -> None:
        """Continue from the stored totals."""
        await self._read()
        await self._add_up()

    async def store(self) -> None:
        """Store what was counted since the last time, if anything."""
        async with self._storing:
            for _ in range(TRIES):
                taken = [
                    (metric.name, labels, cell, cell.total)
                    for metric, labels, cell in self._telemetry.cells()
                    if metric.durable
                ]
                if all(total == cell.stored for _, _, cell, total in taken):
                    return
                row = TotalRow(
                    self._ledger.clock.now(),
                    [(name, labels, total) for name, labels, _, total in taken if total],
                )
                body = _encode(row)
                if await self._replace(body):
                    self._body = body
                    for _, _, cell, total in taken:
                        cell.stored = total
                    return
                await self._read()

    async def _replace(self, body: bytes) -> bool:
        name = self._telemetry.hub
        if self._body is None:
            return await self._ledger.apply(PutNewItem(BUCKET, name, body))
        put = PutItem(BUCKET, name, body)
        return await self._ledger.apply(CheckItem(BUCKET, name, self._body, then=(put,)))

    async def _read(self) -> None:
        """Take over the stored totals; counts that are not stored yet are kept."""
        self._body = await self._ledger.item(BUCKET, self._telemetry.hub)
        if self._body is None:
            return
        for (name, labels), value in _decode(self._body).as_dict().items():
            if name in self._telemetry.metrics:
                if name == "duly_messages_total":
                    self._telemetry.bounded_kind(labels[0])
                _go_on(self._telemetry.counter(name, *labels), value)

    async def summed(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Return the stored totals of all hubs on this ledger, by name and labels."""
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        for body in (await self._ledger.bucket(BUCKET)).values():
            for place, value in _decode(body).as_dict().items():
                found[place] = found.get(place, 0) + value
        return found

    async def _add_up(self) -> None:
        """Merge the rows of hubs that have been gone for long."""
        rows = await self._ledger.bucket(BUCKET)
        now = self._ledger.clock.now()
        past = rows.get(PAST)
        for name, body in rows.items():
            row = _decode(body)
            if name in (PAST, self._telemetry.hub) or row.at > now - GONE_AFTER:
                continue
            totals = {} if past is None else _decode(past).as_dict()
            for place, value in row.as_dict().items():
                totals[place] = totals.get(place, 0) + value
            merged = _encode(TotalRow(now, [(*place, value) for place, value in totals.items()]))
            move = (DropItem(BUCKET, name), PutItem(BUCKET, PAST, merged))
            same = (
                PutNewItem(BUCKET, PAST, merged, then=move)
                if past is None
                else CheckItem(BUCKET, PAST, past, then=move)
            )
            if not await self._ledger.apply(CheckItem(BUCKET, name, body, then=(same,))):
                return  # another hub does the same at this moment
            past = await self._ledger.item(BUCKET, PAST)


def _go_on(cell: CounterCell, value: int) -> None:
    unsaved = cell.total - cell.stored
    cell.base = value + unsaved - cell.value
    cell.stored = value
