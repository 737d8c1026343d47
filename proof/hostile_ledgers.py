"""Damages ledger files and reads them: `python -m proof.hostile_ledgers CASES [SEED]`.

A backup, and the files of a ledger whose hub was killed (the database and its write-ahead log), have bits
flipped, bytes replaced or their end cut off. The law: such a file is refused with an error of duly's, or
every table reads as it did before; soon, and without memory or a descriptor that stays. What was tried is
counted.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Final

from duly.core.messages import Message
from duly.core.operations import Admit, AppendEntry, PutItem
from duly.core.units import DAY, MS
from duly.errors import LedgerError
from duly.storage import file_url, open_ledger, open_snapshot
from duly.storage.backup import write_backup
from duly.storage.snapshot import Summaries, summarize
from duly.testing import ManualClock
from proof.counts import count
from proof.hostile import FRAMES
from proof.leaks import held, leaked

ROWS: Final = 60
BETWEEN: Final = 7
"""Rows between two backups."""
SLOW: Final = 10.0
"""Seconds of processor time that no case may take."""
WATCHED: Final = 200
"""Cases after which the process holds what it needs."""
BYTES: Final = 16 * 1024 * 1024
"""Resident bytes by which it may grow: SQLite keeps pages of every file that it has open."""


async def make(folder: Path) -> list[tuple[Path, str]]:
    """Make the sound files; return a folder for each shape, and the name of the file to damage in it."""
    clock, source = ManualClock(), folder / "ledger.db"
    now, shapes, killed = clock.now(), [], folder / "killed"
    async with await open_ledger(file_url(source), clock=clock) as ledger:
        for n in range(ROWS):
            text = FRAMES[n % len(FRAMES)]
            entry, item = AppendEntry("conv", text * (n % 5), now), PutItem("some", f"item-{n}", text)
            command = Message("phone", f"{now // MS}_{n}", "lock_control", "lock", text)
            await ledger.write(Admit(command, now + DAY, now), entry, item)
            if n % BETWEEN == 0:  # what lies in the last page differs
                backup = folder / f"backup-{n}"
                backup.mkdir()
                async with await open_snapshot(file_url(source)) as snapshot:
                    await write_backup(snapshot, backup / "ledger.db", now)
                shapes.append((backup, "ledger.db"))
        killed.mkdir()
        for end in ("", "-wal", ".lock"):
            shutil.copy(f"{source}{end}", killed / f"ledger.db{end}")
    return [*shapes, (killed, "ledger.db"), (killed, "ledger.db-wal")]


def damage(rng: Random, sound: bytes) -> bytes:
    """Return the content of a file that is no longer what it was, or only by chance."""
    raw = bytearray(sound)
    for _ in range(rng.choice((1, 1, 1, 3))):
        at = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                some = rng.randbytes(rng.randrange(1, 64))
                raw[at : at + len(some)] = some
            case 2:
                raw[at : at + rng.randrange(1, 5_000)] = bytes(rng.randrange(1, 5_000))
            case _:
                del raw[-rng.randrange(1, rng.choice((64, 512, len(raw) + 1))) :]
        if not raw:
            break
    return bytes(raw)


async def read(path: Path) -> Summaries:
    """Return what the tables hold: their rows and digests."""
    async with await open_snapshot(file_url(path)) as snapshot:
        return await summarize(snapshot)


async def attack(cases: int, seed: int) -> None:
    """Try so many damaged files."""
    before = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = await make(folder)
        right = {shape: await read(_laid(folder, shape)) for shape, _ in shapes}
        rng = Random(f"ledgers {seed}")
        for n in range(cases):
            if n == WATCHED:
                before = held()
            shape, file = shapes[n % len(shapes)]
            path = _laid(folder, shape)
            bad = path.with_name(file)
            bad.write_bytes(damage(rng, bad.read_bytes()))
            began = time.process_time()
            try:
                found = await read(path)
                assert found == right[shape], f"case {n}: a damaged {shape.name} ({file}) reads as another"
            except LedgerError:
                pass
            assert time.process_time() - began < SLOW, f"case {n}: {file} took more than {SLOW} s"
    if before is not None:
        more = leaked(before, resident=BYTES)
        assert not more, f"{more} after {cases:,} cases"
    replay = f"python -m proof.hostile_ledgers {cases} {seed}"
    count("hostile input", cases, replay)
    count("watched for leaks", max(0, cases - WATCHED), replay)


def _laid(folder: Path, shape: Path) -> Path:
    """Return the ledger of a fresh copy of a shape."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(shape, copy)
    return copy / "ledger.db"


if __name__ == "__main__":
    try:
        asyncio.run(attack(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
    except Exception as problem:
        sys.exit(f"{problem!r}; replay: python -m proof.hostile_ledgers {' '.join(sys.argv[1:])}")
