"""Presence locks: processes that share a file use them to see which of them are alive.

The law: a worker holds a lock on one byte of the ledger's lock file as long as it has the file open; the
position of the byte is part of the worker's name. The kernel releases the lock when the process ends, however
it ends. The locks are Linux's open file description locks, so closing another descriptor in the process does
not release them. On systems without them a worker's name has no position, and only its leases show that it
has ended.
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
"""The last character of the name of a worker that holds a lock; the digits before it are the position."""


def hold(fd: int, worker: str) -> str:
    """Lock a byte for a worker with this descriptor; return the worker's name with the byte's position."""
    if _SET is None:
        return worker
    try:
        fcntl.fcntl(fd, _SET, _FLOCK.pack(fcntl.F_WRLCK, 0, _place(worker), 1, 0))
    except OSError:  # a file system without such locks
        return worker
    return worker + _MARK


def is_gone(fd: int, worker: str) -> bool:
    """Return whether a worker has certainly ended; False if it is not known."""
    if _ASK is None or not worker.endswith(_MARK):
        return False
    asked = _FLOCK.pack(fcntl.F_WRLCK, 0, _place(worker[:-1]), 1, 0)
    try:
        found: bytes = fcntl.fcntl(fd, _ASK, asked)
    except OSError:
        return False
    return bool(_FLOCK.unpack(found)[0] == fcntl.F_UNLCK)


def _place(worker: str) -> int:
    """Return the position of a worker's byte, which is beyond the content of the file."""
    return (1 << 40) + int(worker.rpartition("-")[2], 16)
