"""Presence locks: by which processes that share a file know which of them are alive.

The law: a worker holds a lock on one byte of the ledger's lock file for as long as it has the file; the place
of the byte is in the worker's name. The kernel frees it when the process ends, however it ends. Where there
are no such locks (they are Linux's, and belong to the open file, so that no other descriptor of the process
lets go of them), a worker has no such name, and its leases alone say when it is dead.
"""

from __future__ import annotations

import fcntl
import struct
from typing import Final

_SET: Final = getattr(fcntl, "F_OFD_SETLK", None)
_ASK: Final = getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK: Final = struct.Struct("hhqqi0q")
"""The kernel's `struct flock`: type, whence, start, length, pid."""
_MARK: Final = "+"
"""What ends the name of a worker that holds a lock; the digits before it are the place."""


def hold(fd: int, worker: str) -> str:
    """Hold the lock of a worker with this descriptor; returns the name that tells others where it is."""
    if _SET is None:
        return worker
    try:
        fcntl.fcntl(fd, _SET, _FLOCK.pack(fcntl.F_WRLCK, 0, _place(worker), 1, 0))
    except OSError:  # a file system without such locks
        return worker
    return worker + _MARK


def is_gone(fd: int, worker: str) -> bool:
    """Whether a worker has certainly ended; False if that cannot be told."""
    if _ASK is None or not worker.endswith(_MARK):
        return False
    asked = _FLOCK.pack(fcntl.F_WRLCK, 0, _place(worker[:-1]), 1, 0)
    try:
        found: bytes = fcntl.fcntl(fd, _ASK, asked)
    except OSError:
        return False
    return bool(_FLOCK.unpack(found)[0] == fcntl.F_UNLCK)


def _place(worker: str) -> int:
    """The place of a worker's byte: behind everything that is written in the file."""
    return (1 << 40) + int(worker.rpartition("-")[2], 16)
