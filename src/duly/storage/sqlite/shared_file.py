"""The file of a SQLite ledger that several processes write.

The laws. Processes that share a file hold shared locks on it and on the note beside it; a process that owns
the file (`duly.storage.sqlite.file`) holds exclusive locks on both, so the two kinds exclude each other. The
first process to share a file lets the owner's code prepare it: create it, inspect it, bring its schema up to
date. A note with the field `shared` tells the others that this was done; an owner's note does not have it.

Closing any descriptor of the database would release SQLite's own POSIX locks in this process. So the process
has one descriptor for each file, which is closed with the last ledger that uses it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Final

from msgspec import DecodeError, Struct, json

from duly.errors import LedgerDamaged, LedgerInUse
from duly.runtime.files import PRIVATE_FILE
from duly.storage.sqlite import presence_lock

NOTE_SIZE: Final = 200


class SharedNote(Struct, frozen=True):
    """The content of `<ledger>.lock` while processes share the ledger."""

    pid: int = 0
    made: bool = False
    shared: bool = False


_descriptors: Final[dict[tuple[int, int], tuple[int, int]]] = {}
"""For each database that this process shares: its descriptor, and how many ledgers use it."""
_opening: Final = threading.Lock()


class SharedFile:
    """A ledger's file that this process shares with others."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._wal = self.path.with_name(self.path.name + "-wal")
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._lock: int | None = None
        self._inode: tuple[int, int] | None = None
        self._wal_inode: tuple[int, int] | None = None

    def enter(self, worker: str) -> str:
        """Take the presence lock of a worker; return the worker's name, by which others find the lock."""
        return worker if self._lock is None else presence_lock.hold(self._lock, worker)

    def is_gone(self, worker: str) -> bool:
        """Return whether a worker that has entered has certainly ended."""
        return self._lock is not None and presence_lock.is_gone(self._lock, worker)

    def leave_to_parent(self) -> None:
        """Close the descriptors that a forked child inherited: otherwise the parent would seem alive as long
        as the child is. The parent keeps its locks."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def join(self, *, prepared: bool) -> bool:
        """Take the shared locks; return False if that is not possible now, because another process owns the
        file or the file has to be prepared first. `prepared`: this process has just prepared it."""
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        if not _shared(lock) or not (prepared or _read(lock).shared) or not self._hold_database():
            os.close(lock)
            return False
        if prepared:
            os.pwrite(lock, json.encode(SharedNote(os.getpid(), True, True)).ljust(NOTE_SIZE), 0)
        self._lock = lock
        return True

    def _hold_database(self) -> bool:
        with _opening:
            try:
                self._inode = _inode_of(self.path)
            except FileNotFoundError:
                return False
            fd, users = _descriptors.get(self._inode, (-1, 0))
            if not users:
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                if not _shared(fd):
                    os.close(fd)
                    return False
            _descriptors[self._inode] = (fd, users + 1)
        return True

    def in_use(self) -> LedgerInUse:
        """Return the error that says that another process owns the file."""
        try:
            pid = str(json.decode(self._lock_path.read_bytes().rstrip(b"\0\n "), type=SharedNote).pid)
        except (OSError, DecodeError):
            pid = "unknown"
        if pid == str(os.getpid()):
            return LedgerInUse(
                f"{self.path} is open in this process without ?mode=shared; open it with ?mode=shared there, "
                "or pass that ledger instead of its URL"
            )
        return LedgerInUse(
            f"{self.path} is owned by another process (pid {pid}), which opened it without ?mode=shared; "
            "let that one open it with ?mode=shared too, or choose another file"
        )

    def release(self) -> None:
        """Release the file, after every connection of this ledger is closed."""
        if self._lock is None or self._inode is None:
            return
        os.close(self._lock)
        self._lock = None
        with _opening:
            fd, users = _descriptors.pop(self._inode)
            if users > 1:
                _descriptors[self._inode] = (fd, users - 1)
            else:
                os.close(fd)

    def check_in_place(self) -> None:
        """Raise if the file was moved or removed, so that other processes would not find what is written."""
        try:
            found = _inode_of(self.path)
            wal = _inode_of(self._wal)
        except FileNotFoundError as problem:
            raise LedgerDamaged(
                f"{problem.filename} was removed while the ledger was in use: what is written now would be "
                "lost. Stop the processes that use it, put the files back or restore a backup"
            ) from None
        if found != self._inode or wal != (self._wal_inode or wal):
            raise LedgerDamaged(
                f"{self.path} was replaced while the ledger was in use: what is written now would be lost. "
                "Stop the processes that use it, and start them again"
            )
        self._wal_inode = wal

    def reopened(self) -> None:
        """Record that all connections were closed and opened again: the log may be a new file."""
        self._wal_inode = None


def _shared(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(lock: int) -> SharedNote:
    try:
        return json.decode(os.pread(lock, 1_000, 0).rstrip(b"\0\n "), type=SharedNote)
    except DecodeError:
        return SharedNote()


def _inode_of(path: Path) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - runs for every flush
    return found.st_dev, found.st_ino
