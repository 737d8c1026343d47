"""What does admission cost beyond the disk?

Against the durable floor: a bare apsw loop that inserts the same prebuilt rows into the same table with the
same statement, WAL and synchronous=FULL, in groups as large as the concurrency gives the ledger. It has no
event loop, no threads, no verdicts and nobody waiting for an answer. And against one commit per call, which
is what one writes first.

Each contender gets a new file every round, and its clock starts when the WAL has been filled once and is
written over, as for the rest of its life: a commit that makes the file longer takes several times as long,
which would flatter us most where commits are many. How far we stay behind the floor depends on the disk: the
faster it flushes, the more our own work counts.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import apsw

import duly
from bench.measure import Figure, Report, batches, folder, messages, rounds, spread
from duly.core import horizon
from duly.core.operations import Admit
from duly.storage import sql
from duly.storage.sql import rows

WARM = 16_000
"""Messages that fill the WAL once, in groups; one by one 3,000 do."""


def bare(path: Path, count: int, group: int, warm: int) -> float:
    """Messages a second of the floor."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -65536")
    db.execute("PRAGMA wal_autocheckpoint = 2000")
    for migration in sql.pending("sqlite", 0):
        db.execute(migration.sql)
    insert = sql.queries("sqlite")["admit"]
    now = time.time_ns() // 1_000
    prebuilt = [
        rows.admission_row(Admit(m, horizon.remember_until(m, horizon.DEFAULT), now))
        for m in messages(warm + count)
    ]

    def insert_all(work: list[Any]) -> None:
        for some in batches(work, group):
            db.execute("BEGIN IMMEDIATE")
            db.executemany(insert, some)
            db.execute("COMMIT")

    insert_all(prebuilt[:warm])
    began = time.perf_counter()
    insert_all(prebuilt[warm:])
    took = time.perf_counter() - began
    db.close()
    return count / took


async def run(quick: bool) -> Report:
    count = 16_000 if quick else 48_000
    with folder() as place:
        files = (place / f"{n}.db" for n in itertools.count())

        async def one_by_one() -> float:
            async with await duly.open_ledger(f"sqlite:///{next(files)}") as ledger:
                await spread(messages(WARM), 200, ledger.admit)
                return await spread(messages(count), 200, ledger.admit)

        async def in_batches() -> float:
            async with await duly.open_ledger(f"sqlite:///{next(files)}") as ledger:
                await spread(batches(messages(WARM), 16), 100, ledger.admit_many)
                return 16 * await spread(batches(messages(count), 16), 100, ledger.admit_many)

        async def floor_200() -> float:
            return bare(next(files), count, 200, WARM)

        async def floor_1600() -> float:
            return bare(next(files), count, 1600, WARM)

        async def commit_each() -> float:
            return bare(next(files), 2_000, 1, 3_000)

        rate = await rounds(
            {
                "admit": one_by_one,
                "floor_200": floor_200,
                "admit_many": in_batches,
                "floor_1600": floor_1600,
                "commit_each": commit_each,
            },
            5 if quick else 9,
        )
    single, many = rate["admit"], rate["admit_many"]
    return Report(
        "Admission on SQLite, a flush before every answer",
        [
            Figure("bare apsw, groups of 200", rate["floor_200"], "msg/s"),
            Figure("bare apsw, groups of 1600", rate["floor_1600"], "msg/s"),
            Figure("bare apsw, a commit each", rate["commit_each"], "msg/s"),
            Figure("admit, 200 callers", single, "msg/s", single / rate["floor_200"], "bare groups", 0.6),
            Figure("admit, 200 callers", single, "msg/s", single / rate["commit_each"], "a commit each", 10),
            Figure(
                "admit_many, 100 callers × 16", many, "msg/s", many / rate["floor_1600"], "bare groups", 0.6
            ),
            Figure(
                "admit_many, 100 callers × 16", many, "msg/s", many / rate["commit_each"], "a commit each", 10
            ),
        ],
        {"rates": rate},
    )
