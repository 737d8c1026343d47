"""Creates a new SQLite ledger under a temporary name, and renames it when it is complete.

After an error, a full disk or an interrupt no file is left behind. Only the file's owner can read it, from
the first byte on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from duly.errors import LedgerError, LedgerUnavailable
from duly.storage import file_url, open_ledger
from duly.storage.ledger import Ledger


@asynccontextmanager
async def new_ledger_file(path: Path) -> AsyncIterator[Ledger]:
    """Yield an empty ledger; when the block ends, it is closed, flushed and renamed to `path`. It is a single
    file, even while it is read: SQLite creates no log beside it until something writes."""
    refuse_existing(path)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    beside = [fresh.with_name(fresh.name + end) for end in ("-wal", "-shm", "-journal", ".lock")]
    try:
        try:
            async with await open_ledger(file_url(fresh)) as ledger:
                yield ledger
            _leave_log(fresh)
            _flush(fresh)
            refuse_existing(path)
            fresh.rename(path)
            _flush(path.parent)
        except OSError as problem:
            raise LedgerUnavailable(
                f"{path} cannot be written ({problem.strerror}); nothing was left"
            ) from None
    finally:
        for each in (fresh, *beside):
            each.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raise if a file exists at this path, or if a ledger once did: SQLite would apply the log that it left
    to the new one."""
    if path.exists():
        raise LedgerError(f"there is a file at {path} already; name another one. It was not touched")
    beside = [path.with_name(path.name + end) for end in (".lock", "-wal", "-journal")]
    left = [each.name for each in beside if each.exists()]
    if left:
        raise LedgerError(
            f"there was a ledger at {path}, and {' and '.join(left)} of it "
            f"{'are' if len(left) > 1 else 'is'} left; remove {'them' if len(left) > 1 else 'it'} first"
        )


def _leave_log(path: Path) -> None:
    """Move what is left of the log into the database: closing tries that, but is silent when it fails."""
    from duly.storage.sqlite.file import connect, set_journal_mode, translated

    with translated(path):
        db = connect(path)
        try:
            set_journal_mode(db, "delete")
        finally:
            db.close()


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
