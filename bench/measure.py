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
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from duly import Message

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"

BODY = b'{"type":"lock_control","data":{"note":"%b"}}' % (b"x" * 172)
assert len(BODY) == 214

Item = TypeVar("Item")


class Options(Struct):
    """How much is asked for."""

    quick: bool = False
    """less of everything"""
    long: bool = False
    """also what takes an hour"""
    before: str = ""
    """the revision that the program is compared with"""

    def pick(self, quick: Item, usual: Item) -> Item:
        """The first in a quick run, the second in any other."""
        return quick if self.quick else usual


class Figure(Struct, omit_defaults=True):
    """One figure: a value, and its ratio to another one of the same run."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    to: str = ""
    rounds: list[float] = []
    """what the value is the median of: how far they lie apart says how much to trust it"""


class Report(Struct):
    """The answer to one question. `series` is what the plots are drawn from."""

    title: str
    figures: list[Figure] = []
    rates: dict[str, float] = {}
    sizes: dict[str, list[float]] = {}
    """by how many ids: `ids`, `cost` in µs and `memory` in bytes"""
    notes: list[str] = []


class Median(float):
    """The median of the rounds, which it keeps."""

    rounds: list[float]

    def __new__(cls, values: list[float]) -> Median:
        self = super().__new__(cls, statistics.median(values))
        self.rounds = values
        return self


def figure(name: str, value: float, unit: str, base: float | None = None, to: str = "") -> Figure:
    """A figure, beside the one it is compared with."""
    rounds = [float(f"{each:.5g}") for each in value.rounds] if isinstance(value, Median) else []
    ratio = None if base is None else value / base
    return Figure(name, float(value), unit, ratio, to, rounds)


class Progress:
    """Tells the run how far a question has come: one line of JSON after each step.

    A question that says nothing for a long time is taken for stuck.
    """

    def __init__(self) -> None:
        self._done = self._planned = 0

    def plan(self, steps: int) -> None:
        """So many more steps are to come."""
        self._planned += steps
        self._tell("")

    def step(self, label: str) -> None:
        """One of them is done."""
        self._done += 1
        self._planned = max(self._done, self._planned)
        self._tell(label)

    def _tell(self, label: str) -> None:
        line = msgspec.json.encode({"done": self._done, "of": self._planned, "label": label})
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()


progress = Progress()

Contender = Callable[[], Awaitable[float]]


async def rounds(contenders: Mapping[str, Contender], count: int) -> dict[str, Median]:
    """What each contender returns, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    progress.plan(count * len(contenders))
    for _ in range(count):
        for name, contender in contenders.items():
            gc.collect()
            found[name].append(await contender())
            progress.step(name)
    return {name: Median(values) for name, values in found.items()}


@contextmanager
def folder() -> Iterator[Path]:
    """A folder on the repository's disk, gone afterwards; `/tmp` may be memory, where flushes are free."""
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


async def spread(work: Sequence[Item], workers: int, do: Callable[[Item], Awaitable[object]]) -> float:
    """Items a second when so many tasks share the work, each doing one at a time."""

    async def worker(share: Sequence[Item]) -> None:
        for item in share:
            await do(item)

    shares = [work[i::workers] for i in range(workers)]
    began = time.perf_counter()
    await asyncio.gather(*map(worker, shares))
    return len(work) / (time.perf_counter() - began)


def batches(work: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The work in parts of this size."""
    return [work[i : i + size] for i in range(0, len(work), size)]
