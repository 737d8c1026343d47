"""What every question here needs: figures, interleaved rounds, a folder on the real disk, messages.

The law: machines are noisy, so a figure is a ratio within one run. Contenders take turns (A, B, A, B, …), a
slow minute hits them all, and the median of the rounds counts.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duly import Message

OUT = Path(__file__).parent / "out"

BODY = b'{"type":"lock_control","data":{"note":"%b"}}' % (b"x" * 172)
assert len(BODY) == 214


@dataclass
class Figure:
    """One line of the table. Without a bound it is for information."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    to: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g} × {self.to}"
        return f"≤ {self.at_most:g} × {self.to}" if self.at_most is not None else ""

    @property
    def holds(self) -> bool | None:
        if self.ratio is None or not self.target:
            return None
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.at_most is not None and self.ratio <= self.at_most


@dataclass
class Report:
    """The answer to one question. `series` is what the plots are drawn from."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Median(float):
    """The median of the rounds, which it keeps: how far they lie apart says how much to trust it."""

    rounds: list[float]

    def __new__(cls, values: list[float]) -> Median:
        self = super().__new__(cls, statistics.median(values))
        self.rounds = values
        return self


Contender = Callable[[], Awaitable[float]]


async def rounds(contenders: Mapping[str, Contender], count: int) -> dict[str, Median]:
    """What each contender returns, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(count):
        for name, contender in contenders.items():
            gc.collect()
            found[name].append(await contender())
    return {name: Median(values) for name, values in found.items()}


@contextmanager
def folder() -> Iterator[Path]:
    OUT.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=OUT))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


_numbers = itertools.count()


def messages(count: int, body: bytes = BODY) -> list[Message]:
    """Made now, as an app makes them: ids that carry the time and count up."""
    ms = time.time_ns() // 1_000_000
    return [
        Message("app-1", f"{ms + i // 100}_{next(_numbers)}", "lock_control", "lock-1", body)
        for i in range(count)
    ]


async def spread(work: Sequence[Any], workers: int, do: Callable[[Any], Awaitable[object]]) -> float:
    """Items a second when so many tasks share the work, each doing one at a time."""

    async def worker(share: Sequence[Any]) -> None:
        for item in share:
            await do(item)

    shares = [work[i::workers] for i in range(workers)]
    began = time.perf_counter()
    await asyncio.gather(*map(worker, shares))
    return len(work) / (time.perf_counter() - began)


def batches(work: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [work[i : i + size] for i in range(0, len(work), size)]
