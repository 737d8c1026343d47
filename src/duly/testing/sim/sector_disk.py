"""A simulated disk beneath SQLite: what was written and not flushed may be lost, sector by sector.

SQLite reads and writes real files, through a VFS that remembers the content of every sector at the last
flush. When the power fails, each sector that was written since has either its new or its old content. A flush
may fail: then some sectors are never written, though they can be read and later flushes succeed, as on Linux.
A write may fail, or be the last one before the process dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from shutil import copy, rmtree
from typing import Final

import apsw

from duly.storage.sqlite.file import LedgerFile, checksum_vfs
from duly.storage.sqlite.lock_file import LockFile
from duly.storage.sqlite.write_ahead_log import WriteAheadLog

SECTOR: Final = 512
NAME: Final = "store.db"
MOMENT: Final = 0.0005
SLOW: Final = 0.15
"""How often a disk is slow."""
SLOWEST: Final = 0.3
"""Seconds."""
VFS: Final = "duly-sim"

_disks: Final[dict[str, SectorDisk]] = {}
"""The disks that are in use, by their folders."""


class _Written:
    """The flushed sectors of one file, where they differ from what can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.flushed: dict[int, bytes] = {}
        self.stuck: set[int] = set()
        """the sectors that a flush failed to write: no later flush writes them"""
        self.size = path.stat().st_size
        """when it was last flushed"""

    def keep(self, start: int, length: int) -> None:
        """Remember these bytes before they change."""
        first, last = start // SECTOR, (start + length - 1) // SECTOR
        for sector in range(first, last + 1):
            self.stuck.discard(sector)
            if sector not in self.flushed:
                self.flushed[sector] = os.pread(self._fd, SECTOR, sector * SECTOR).ljust(SECTOR, b"\0")

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)

    def flush(self) -> None:
        """Put everything on the disk, except the sectors that a flush failed to write."""
        self.flushed = {sector: self.flushed[sector] for sector in self.stuck}
        self.size = self.path.stat().st_size

    def fail(self, rng: Random) -> None:
        """Put some of it on the disk; the rest is never written."""
        for sector in sorted(self.flushed):
            if rng.random() < 0.5:
                del self.flushed[sector]
                self.stuck.discard(sector)
            else:
                self.stuck.add(sector)

    def leave(self, to: Path, rng: Random, lost: float, *, power: bool) -> None:
        """Write what a power failure leaves of the file; a sector that was not flushed is lost by chance.
        Without a power failure all of it can still be read."""
        copy(self.path, to)
        if not power:
            return
        with to.open("r+b") as file:
            size = self.path.stat().st_size
            for sector in sorted(self.flushed):
                if sector in self.stuck or rng.random() < lost:
                    file.seek(sector * SECTOR)
                    file.write(self.flushed[sector])
            file.truncate(self.size if size != self.size and rng.random() < lost else size)


class SectorDisk:
    """The files of one process. `fault(moment)` is called at every write and flush, and returns 'crash',
    'fail' or ''; `died` is called after a crash."""

    def __init__(self, root: Path, seed: str, fault: Callable[[str], str], died: Callable[[], None]) -> None:
        self._root = root
        self._rng = Random(f"disk {seed}")
        self._fault = fault
        self._died = died
        self._life = 0
        self._files: dict[str, _Written] = {}
        self._left: dict[str, _Written] = {}
        """what the life before had not flushed of each file, if it ended without a loss of power"""
        self._noted = b""
        """the note beside the file, as it was last written back"""
        self.dead = True
        self._folder = root / "0"
        self._folder.mkdir(parents=True)

    @property
    def path(self) -> Path:
        """The file of the ledger, as the living or the next process finds it."""
        return self._folder / NAME

    @property
    def _note(self) -> Path:
        return self._folder / f"{NAME}.lock"

    def begin(self) -> None:
        """Begin a life of the process with what the last one has left."""
        self.dead = False
        self._files.clear()
        for name, before in self._left.items():
            if (self._folder / name).exists():
                written = self._of(self._folder / name)
                written.flushed, written.stuck, written.size = before.flushed, before.stuck, before.size
        _disks[str(self._folder)] = self

    def die(self, *, power: bool = True) -> None:
        """End a life: the next one finds what the disk kept. Without a loss of power that is all of it, and
        what was not flushed may be lost later."""
        if self.dead:
            return
        self.dead = True
        del _disks[str(self._folder)]
        rng, lost = self._rng, self._rng.choice([0.0, 0.5, 0.5, 1.0]) if power else 0.0
        self._left = {} if power else dict(self._files)
        self._life += 1
        left = self._root / str(self._life)
        left.mkdir()
        for name, written in sorted(self._files.items()):
            if not name.endswith("-shm") and written.path.exists():
                written.leave(left / name, rng, lost, power=power)
        for name in (NAME, f"{NAME}-wal"):
            if name not in self._files and (self._folder / name).exists():
                copy(self._folder / name, left / name)
        if self._note.exists():
            stale = self._noted and rng.random() < lost
            copy(self._note, left)
            if stale:
                (left / self._note.name).write_bytes(self._noted)
        for written in self._files.values():
            written.close()
        self._files.clear()
        before, self._folder = self._folder, left
        rmtree(before)

    def takes(self) -> float:
        """Return how many seconds the next job takes: some are slow, so that others queue up."""
        return self._rng.uniform(0, SLOWEST) if self._rng.random() < SLOW else MOMENT

    def erase(self) -> None:
        """Lose everything: the next life begins with nothing."""
        for name in self._folder.iterdir():
            name.unlink()
        self._noted, self._left = b"", {}

    # ── asked by the VFS ─────────────────────────────────────────────────────────────────────────

    def _of(self, path: Path) -> _Written:
        if path.name not in self._files:
            self._files[path.name] = _Written(path)
        return self._files[path.name]

    def writing(self, path: Path, start: int, length: int, write: Callable[[], None]) -> None:
        """Carry out a write."""
        if self.dead:
            return
        what = self._fault("write")
        if what == "fail":
            raise apsw.IOError("the disk failed at a write")
        self._of(path).keep(start, length)
        write()
        if what == "crash":
            self._lose()

    def flushing(self, path: Path, flush: Callable[[], None]) -> None:
        """Carry out a flush."""
        if self.dead:
            return
        what = self._fault("flush")
        if what == "fail":
            self._of(path).fail(self._rng)
            raise apsw.IOError("the disk failed at a flush")
        if what == "crash" and self._rng.random() < 0.5:
            self._lose()
        self._of(path).flush()
        if self._rng.random() < 0.2 and self._note.exists():
            self.flush_note()
        if what == "crash":
            self._lose()

    def flush_note(self) -> None:
        """Put the note beside the file on the disk."""
        self._noted = self._note.read_bytes()

    def _lose(self) -> None:
        self.die()
        self._died()
        raise apsw.IOError("the process died")


class _SimFile(apsw.VFSFile):
    """A file of SQLite on a sector disk."""

    def __init__(self, base: str, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(base, name, flags)
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "")
        self._disk = _disks.get(str(self._path.parent))

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's name
        """Write, unless the disk fails."""
        if self._disk is not None:
            self._disk.writing(
                self._path, offset, len(data), lambda: super(_SimFile, self).xWrite(data, offset)
            )

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        """Truncate the file, unless the disk fails."""
        beyond = -newsize if self._disk is None or self._disk.dead else self._path.stat().st_size - newsize
        if self._disk is not None and beyond > 0:
            self._disk.writing(self._path, newsize, beyond, lambda: super(_SimFile, self).xTruncate(newsize))

    def xSync(self, flags: int) -> None:  # noqa: N802
        """Flush, unless the disk fails; the real file need not be flushed."""
        if self._disk is not None:
            self._disk.flushing(self._path, lambda: None)

    def xUnlock(self, level: int) -> None:  # noqa: N802
        """Close the file; a connection that only reads cannot do everything that SQLite tries at the
        close."""
        with suppress(apsw.IOError):
            super().xUnlock(level)

    def xLock(self, level: int) -> None:  # noqa: N802
        """Lock the file; a connection that only reads may not take every lock."""
        try:
            super().xLock(level)
        except apsw.IOError:
            raise apsw.BusyError("a reader cannot lock it") from None


class _SimVfs(apsw.VFS):
    """Opens files on sector disks; beneath it are SQLite's checksums and the real files."""

    def __init__(self) -> None:
        self._base = checksum_vfs() or ""
        super().__init__(VFS, base=self._base)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        """Open a file."""
        return _SimFile(self._base, name, flags)


@cache
def sector_vfs() -> str:
    """Return the name of the VFS, registered once in a process."""
    global _vfs  # noqa: PLW0603 - SQLite uses it as long as the process lives
    _vfs = _SimVfs()
    return VFS


_vfs: _SimVfs | None = None


class SectorLog(WriteAheadLog):
    """A write-ahead log on a sector disk."""

    def _write(self, fd: int, part: bytes, at: int) -> None:
        disk = _disks.get(str(self.path.parent))
        if disk is not None:
            disk.writing(self.path, at, len(part), lambda: super(SectorLog, self)._write(fd, part, at))

    def _flush(self, fd: int) -> None:
        disk = _disks.get(str(self.path.parent))
        if disk is not None:
            disk.flushing(self.path, lambda: None)


class SectorLockFile(LockFile):
    """A lock file on a sector disk."""

    def flush(self) -> None:
        """Put the note on the disk."""
        disk = _disks.get(str(self.path.parent))
        if disk is not None:
            disk.flush_note()


class SectorFile(LedgerFile):
    """A ledger's file on a sector disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.log = SectorLog(self.log.path)
        self._lock = SectorLockFile(self.path)

    def connect(self, *, readonly: bool = False) -> apsw.Connection:
        """Open a connection through the disk."""
        flags = apsw.SQLITE_OPEN_READONLY if readonly else apsw.SQLITE_OPEN_READWRITE
        return apsw.Connection(os.fspath(self.path), flags=flags, vfs=sector_vfs())
