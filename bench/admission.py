"""What does admission cost beyond the disk?

Against the durable floor: a bare apsw loop that inserts rows of the same content into one table, WAL and
synchronous=FULL, in groups as large as the concurrency gives the ledger. It has no event loop, no threads, no
verdicts and no caller that waits. And against one commit per call, which is what one writes first.

Each contender gets a new file every round, and its clock starts when the WAL has been filled once and is
written over, as for the rest of its life: a commit that makes the file longer takes several times as long,
which would flatter us most where commits are many. How far we stay behind the floor depends on the disk: the
faster it flushes, the more our own work counts.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import apsw

import duly
from bench.measure import Options, Report, batches, figure, folder, messages, rounds, spread

WARM = 16_000
"""Messages that fill the WAL once, in groups; one by one 3,000 do."""
TABLE = (
    "CREATE TABLE messages (key BLOB PRIMARY KEY, scope TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, "
    "recipient TEXT NOT NULL, body BLOB NOT NULL, state INT NOT NULL, accepted_at INT NOT NULL, "
    "expires INT NOT NULL) WITHOUT ROWID"
)
INSERT = "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"

Row = tuple[bytes, str, str, str, str, bytes, int, int, int]


def prebuilt(count: int) -> list[Row]:
    """The rows of so many messages."""
    now = time.time_ns() // 1_000
    return [
        (
            f"{m.scope}\0{m.id}".encode(),
            m.scope,
            m.id,
            m.kind,
            m.recipient,
            m.body,
            0,
            now,
            now + 86_400_000_000,
        )
        for m in messages(count)
    ]


def bare(path: Path, count: int, group: int, warm: int) -> float:
    """Messages a second of the floor."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -65536")
    db.execute("PRAGMA wal_autocheckpoint = 2000")
    db.execute(TABLE)
    rows = prebuilt(warm + count)

    def insert_all(work: list[Row]) -> None:
        for some in batches(work, group):
            db.execute("BEGIN IMMEDIATE")
            db.executemany(INSERT, some)
            db.execute("COMMIT")

    insert_all(rows[:warm])
    began = time.perf_counter()
    insert_all(rows[warm:])
    took = time.perf_counter() - began
    db.close()
    return count / took


async def run(options: Options) -> Report:
    count = options.pick(16_000, 48_000)
    with folder() as root:
        files = (root / f"{n}.db" for n in itertools.count())

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
            options.pick(3, 9),
        )
    single, many = rate["admit"], rate["admit_many"]
    return Report(
        "Admission on SQLite, a flush before every answer",
        [
            figure("bare apsw, groups of 200", rate["floor_200"], "msg/s"),
            figure("bare apsw, groups of 1600", rate["floor_1600"], "msg/s"),
            figure("bare apsw, a commit each", rate["commit_each"], "msg/s"),
            figure("admit, 200 callers", single, "msg/s", rate["floor_200"], "bare groups"),
            figure("admit, 200 callers", single, "msg/s", rate["commit_each"], "a commit each"),
            figure("admit_many, 100 callers × 16", many, "msg/s", rate["floor_1600"], "bare groups"),
            figure("admit_many, 100 callers × 16", many, "msg/s", rate["commit_each"], "a commit each"),
        ],
        dict(rate),
    )
