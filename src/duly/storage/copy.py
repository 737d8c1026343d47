"""Copies a whole ledger from one database to another, or nothing, and compares the two at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from duly.errors import LedgerDamaged, LedgerUnavailable
from duly.storage import open_ledger, open_snapshot
from duly.storage.bulk_load import fill
from duly.storage.ledger import Ledger
from duly.storage.new_file import new_ledger_file
from duly.storage.snapshot import Snapshot, Summaries, summarize


@asynccontextmanager
async def held_snapshot(url: str) -> AsyncIterator[Snapshot]:
    """Yield a snapshot of a ledger that no process writes until the block ends. Raises if a hub runs."""
    if urlsplit(url).scheme == "sqlite":
        own = url.partition("?")[0]  # opening the ledger locks the file and applies its journal to its tables
        if not _path(own).exists() or not _path(own).stat().st_size:  # opening would make a ledger of it
            raise LedgerUnavailable(f"there is no ledger at {_path(own)}; check the path")
        async with await open_ledger(own), await open_snapshot(own) as snapshot:
            yield snapshot
        return
    from duly.storage.postgres.snapshot import PostgresSnapshot

    async with await PostgresSnapshot.open(url, locked=True) as held:
        yield held


@asynccontextmanager
async def empty_ledger(url: str) -> AsyncIterator[Ledger]:
    """Yield an empty ledger at this URL. A file gets its name when the block ends without an error."""
    if urlsplit(url).scheme == "sqlite":
        async with new_ledger_file(_path(url)) as made:
            yield made
        return
    async with await open_ledger(url) as ledger:
        yield ledger


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path[1:]))


async def copy_ledger(
    source: str, target: str, progress: Callable[[int], None] = lambda rows: None
) -> Summaries:
    """Copy all rows from one ledger to an empty one; return row counts and digests by table. Raises if a hub
    runs on either, if the target is not empty, or if the two differ in the end."""
    async with held_snapshot(source) as snapshot:
        async with empty_ledger(target) as ledger:
            written = await fill(ledger, snapshot.rows, progress)
        async with await open_snapshot(target) as copied:
            found = await summarize(copied)
    different = [name for name, digest in written.items() if found[name] != digest]
    if different:
        raise LedgerDamaged(
            f"the copy differs from the ledger in {', '.join(different)}; remove it and try again"
        )
    return found
