"""Repairs the write-ahead log of a SQLite ledger after a flush that failed: it is written over itself.

SQLite itself writes and flushes the log (`writer`). A flush that failed may leave parts of it in the memory
of the operating system alone, where no later flush looks for them: the log can be read, and has a gap on the
disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PART: Final = 64 * 1024
"""Bytes that are written again at a time."""


class WriteAheadLog:
    """The log beside one ledger's file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_there(self) -> bool:
        """Return whether a process has left a log, which it does only by dying."""
        try:
            return self.path.stat().st_size > 0
        except OSError:
            return False

    def write_again(self) -> None:
        """Write the log over itself and flush it, so that all that can be read of it is on the disk.

        Each write makes its part due for the disk again. A crash in between leaves parts that are old or new,
        as the failed flush did.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            at = 0
            while part := os.pread(fd, PART, at):
                self._write(fd, part, at)
                at += len(part)
            self._flush(fd)
        finally:
            os.close(fd)

    def _write(self, fd: int, part: bytes, at: int) -> None:
        written = 0
        while written < len(part):
            written += os.pwrite(fd, part[written:], at + written)

    def _flush(self, fd: int) -> None:
        os.fsync(fd)
