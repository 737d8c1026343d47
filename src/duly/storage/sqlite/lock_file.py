"""The lock file of a ledger, `<ledger>.lock`: one process holds it, and it keeps a note for later starts.

The law: the operating system releases the lock when its process ends, however it ends. The note is read only
by a process that holds the lock, or while no process does.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct, json

from duly.errors import LedgerInUse
from duly.runtime.files import PRIVATE_FILE

NOTE_SIZE: Final = 200
LOOKS: Final = (0.001, 0.005, 0.02)
"""How many seconds to wait, try by try, for a process that only checks whether the file is locked."""


class LockNote(Struct, frozen=True, omit_defaults=True):
    """The content of `<ledger>.lock`: which process holds the ledger, and what a later start must find."""

    pid: int
    made: bool = False
    """the ledger exists, with its schema"""
    salt: str = ""
    """the salt of the write-ahead log that was last written; empty: all of it is in the database"""
    frames: int = 0
    """how many frames of that log are on the disk"""
    converting: bool = False
    """the file is being rewritten with checksums: some pages may have none yet"""
    begun: bool = False
    """the ledger is being made: it may lack its schema yet"""


class LockFile:
    """The lock and the note of the ledger at `ledger`."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self.path = ledger.with_name(ledger.name + ".lock")
        self.note = LockNote(0)
        self.frames = 0
        """how many frames of the write-ahead log were noted last"""
        self._fd: int | None = None
        self._lead = b""

    @property
    def held_here(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd is not None

    def open(self) -> None:
        """Create the file if there is none, lock it for this process, and read its note."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        self.lock(self._fd)
        self.note = _read_note(self._fd)

    def lock(self, fd: int) -> None:
        """Lock an open file for this process; raise `LedgerInUse` if another process holds it."""
        for wait in (*LOOKS, None):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if wait is None:
                    assert self._fd is not None
                    raise self.in_use(str(_read_note(self._fd).pid or "unknown")) from None
                time.sleep(wait)

    def in_use(self, owner: str) -> LedgerInUse:
        """Return the error for a ledger that the process `owner` holds."""
        if owner == str(os.getpid()):
            return LedgerInUse(
                f"{self._ledger} is open in this process already; use that ledger here too, or open it with "
                "?mode=shared in both places"
            )
        return LedgerInUse(
            f"{self._ledger} is being written by another process (pid {owner}); stop that one, send through "
            "it, open the ledger with ?mode=ro to read, or use postgresql:// to share a ledger"
        )

    def peek(self) -> bool:
        """Read the note if no process holds the lock; return whether it was read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False  # a copy without a note, or a note that this process may not read
        try:
            if _is_held(fd):
                return False
            self.note = _read_note(fd)
            return True
        finally:
            os.close(fd)

    def is_held(self) -> bool:
        """Return whether a process holds the lock, or has since the note was read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return _is_held(fd) or _read_note(fd) != self.note
        finally:
            os.close(fd)

    def write(self, note: LockNote) -> None:
        """Replace the note, if this process holds the lock."""
        if self._fd is not None:
            self.note = note
            raw = json.encode(note)
            self._lead = raw[:-1]
            os.pwrite(self._fd, raw.ljust(NOTE_SIZE), 0)

    def write_frames(self, frames: int) -> None:
        """Replace the number of frames in the note; `note` in memory keeps the number 0."""
        self.frames = frames
        if self._fd is not None:  # for every flush: less than half the time of json.encode
            os.pwrite(self._fd, (b'%b,"frames":%d}' % (self._lead, frames)).ljust(NOTE_SIZE), 0)

    def flush(self) -> None:
        """Flush the note to the disk."""
        assert self._fd is not None
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def _is_held(fd: int) -> bool:
    """Return whether a process holds the ledger of this note."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _read_note(fd: int) -> LockNote:
    raw = os.pread(fd, 1_000, 0).rstrip(b"\0\n ")
    if raw.isdigit():  # an older duly wrote its process id, and always had a ledger
        return LockNote(int(raw), made=True)
    with suppress(ValueError):
        return json.decode(raw, type=LockNote)
    return LockNote(0)
