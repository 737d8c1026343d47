"""The archive: stores what the ledger forgets about alerts as compressed JSON lines, one file a month.

A line is on the disk before the ledger forgets what it is about; after a crash in between the line may be
there twice, but is never missing. Files are only appended to (a gzip file may have many parts), and `zcat`
reads them. An incomplete part would make what follows it unreadable. So while a part is being written, a note
beside the file says how long the file was before, and the next process cuts off the rest. A file is removed
when its whole month is older than the archive is kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import os
import re
import time
from calendar import timegm
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from duly.core.units import DAY, SECOND
from duly.errors import LedgerUnavailable
from duly.runtime.files import private_folder, write_private

ALERTS: Final = "alerts"
DELIVERIES: Final = "deliveries"

MONTH: Final = 31 * DAY
NOTE: Final = ".sound"
_NAME: Final = re.compile(rf"(?:{ALERTS}|{DELIVERIES})-(\d{{4}})-(\d{{2}})\.jsonl\.gz")


class Archive:
    """The archive in one folder. Its files are kept for `keep` microseconds; 0 archives nothing."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def add(self, kind: str, things: Iterable[object], now: int) -> None:
        """Append things, one line each, to this month's file of their kind; returns when they are on the
        disk."""
        lines = b"".join(msgspec.json.encode(thing) + b"\n" for thing in things)
        if lines and self._keep:
            month = time.strftime("%Y-%m", time.gmtime(now / SECOND))
            path = self._folder / f"{kind}-{month}.jsonl.gz"
            try:
                await asyncio.to_thread(self._append, path, lines)
            except OSError as problem:
                raise LedgerUnavailable(
                    f"the archive {path} cannot be written ({problem.strerror}); nothing was forgotten. "
                    "Make room for it, or set archives_kept = 0 to archive nothing"
                ) from problem

    def _append(self, path: Path, lines: bytes) -> None:
        private_folder(self._folder)
        with _locked(path) as fd:
            note = _note_of(path)
            write_private(note, b"%d" % os.fstat(fd).st_size)
            _flush(self._folder)
            left = memoryview(gzip.compress(lines))
            try:
                while left:
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
            except OSError:
                _repair(fd, note)
                raise
            note.unlink()
            _flush(self._folder)  # a note that came back after a power cut would cut off a complete part

    def old(self, now: int) -> list[Path]:
        """Return the files that have been kept for long enough."""
        found: list[Path] = []
        for path in sorted(self._folder.glob("*.jsonl.gz")) if self._folder.is_dir() else []:
            named = _NAME.fullmatch(path.name)
            if named is not None:
                begin = timegm((int(named[1]), int(named[2]), 1, 0, 0, 0)) * SECOND
                if begin + MONTH + self._keep < now:
                    found.append(path)
        return found

    async def sweep(self, now: int) -> list[str]:
        """Repair files after a crash and remove old files; returns the names of the removed ones."""
        return await asyncio.to_thread(self._sweep, now)

    def _sweep(self, now: int) -> list[str]:
        for note in self._folder.glob(f"*{NOTE}*"):  # also incomplete notes
            path = self._folder / note.name.partition(NOTE)[0]
            with suppress(BlockingIOError), _locked(path, wait=False):
                note.unlink(missing_ok=True)
        old = self.old(now)
        for path in old:
            path.unlink(missing_ok=True)
        return [path.name for path in old]


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Open a file for appending, locked and complete. The lock of a process ends with it, so a note that
    is found here belongs to a process that has ended."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        _repair(fd, _note_of(path))
        yield fd
    finally:
        os.close(fd)


def _repair(fd: int, note: Path) -> None:
    """Cut off a part that was never completed; the ledger has forgotten nothing of it yet."""
    with suppress(FileNotFoundError):
        os.ftruncate(fd, int(note.read_bytes()))
        os.fsync(fd)
        note.unlink()


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + NOTE)


def _flush(folder: Path) -> None:
    """Flush the names in a folder, so that they survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
