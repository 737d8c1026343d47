"""The file of a SQLite ledger: locks it for one process, and checks that it stays in place and is sound.

The laws. One process writes a file: the lock is on the database's own inode, so it holds under every name of
the file, and removing a file does not circumvent it. A ledger that existed once is never silently replaced by
an empty one: a new file gets its name only when it has a header, so an empty file is a lost ledger, and a
note beside the file records that the ledger was made, and how much of its write-ahead log is on the disk.
Every page has a checksum (SQLite's checksum VFS), which is verified whenever the page is read:
damage is an error, never other content. If the files are moved or removed while a ledger is open, the ledger
raises an error instead of writing where no restart would look. A process that only reads refuses an unlocked
file that the next owner would refuse: a part of a ledger is never shown as the whole.

Closing any descriptor of the database would release SQLite's own POSIX locks in this process. So the file is
opened here once, before SQLite opens it, and closed after SQLite has closed it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import apsw
from msgspec.structs import replace

from duly.errors import LedgerDamaged, LedgerError, LedgerUnavailable
from duly.runtime.files import PRIVATE_FILE, close_to_others
from duly.storage import sql
from duly.storage.sqlite.lock_file import LockFile, LockNote
from duly.storage.sqlite.write_ahead_log import WriteAheadLog

LOG: Final = logging.getLogger("duly.storage.ledger")

APPLICATION_ID: Final = 0x64756C79  # "duly": tells our files from other people's databases
CHECKED_SIZE: Final = 64 << 20
"""Files up to this size are read and checked before they are used, larger ones while they are in use."""
BUSY_MS: Final = 10_000
"""How long to wait for another program that reads the file and locks it for a moment."""
CHECKSUM_BYTES: Final = 8
"""How many bytes the checksum VFS needs at the end of each page."""
HEADER: Final = 100
WAL_HEADER: Final = 32
RACY_NS: Final = 100_000_000
"""The resolution of a folder's modification time: a second change within it would not be seen."""
CHECKPOINT_NOOP: Final = -1
"""The checkpoint mode that returns the length of the write-ahead log and moves nothing (SQLite 3.51)."""

_Inode = tuple[int, int]

_held: set[_Inode] = set()
"""The databases that this process writes."""
_holding: Final = threading.Lock()


@cache
def checksum_vfs() -> str | None:
    """Return the name of SQLite's checksum VFS, loaded once; None if this apsw does not include it."""
    try:
        from apsw import sqlite_extra
    except ImportError:
        return None
    db = apsw.Connection(":memory:")
    try:
        sqlite_extra.load(db, "cksumvfs")
    except (sqlite_extra.NotAvailable, apsw.Error, OSError):
        return None
    finally:
        db.close()
    return "cksmvfs" if "cksmvfs" in apsw.vfs_names() else None


def connect(path: Path, *, readonly: bool = False) -> apsw.Connection:
    """Return a connection that verifies the checksum of each page it reads, and writes one to each page."""
    flags = apsw.SQLITE_OPEN_READONLY if readonly else apsw.SQLITE_OPEN_READWRITE
    db = apsw.Connection(str(path), flags=flags, vfs=checksum_vfs())
    db.set_busy_timeout(BUSY_MS)
    return db


class LedgerFile:
    """The file of one ledger, by its real path, with the files beside it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._wal = self.path.with_name(self.path.name + "-wal")
        self.log = WriteAheadLog(self._wal)
        self._shm = self.path.with_name(self.path.name + "-shm")
        self._lock = LockFile(self.path)
        self._fd: int | None = None
        self._inode: _Inode | None = None
        self._folder = str(self.path.parent)
        self._names = (str(self.path), str(self._wal))
        """as text: asking for the length of a `Path` takes longer, and every flush asks"""
        self._seen: tuple[int, int, int] | None = None
        """the folder, and when a file in it was last created, renamed or removed"""
        self._places: list[tuple[Path, _Inode]] = []
        self._sizes = (0, 0)
        """how long the database and its write-ahead log were when they were last measured"""
        self.problem: LedgerError | None = None
        """the reason why this file must not be used any more"""

    def connect(self, *, readonly: bool = False) -> apsw.Connection:
        """Open a connection to this file."""
        return connect(self.path, readonly=readonly)

    # ── holding ──────────────────────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """Lock the file for this process; the operating system releases the lock when the process ends."""
        with _holding:
            self._refuse_own()
            self._lock.open()
            self._refuse_missing()
            if not self.path.exists():
                self._make()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            self._lock.lock(self._fd)
            self._inode = _inode(os.fstat(self._fd))
            _held.add(self._inode)
        self._lock.write(replace(self._lock.note, pid=os.getpid()))

    def _make(self) -> None:
        """Create the database: a header without tables, under a temporary name, then flushed and renamed. The
        schema follows in the log. A crash leaves either no file of this name, or one with a header and a note
        that says that it was begun; a header without tables and without that note has lost its log."""
        self._lock.write(LockNote(os.getpid(), begun=True))
        self._lock.flush()
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.unlink(missing_ok=True)  # of a process that was killed here; this one holds the lock
        try:
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                _write_header(fresh)
                os.fsync(fd)
                fresh.rename(self.path)
            finally:
                os.close(fd)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        _flush_folder(self.path.parent)

    def close_to_others(self) -> None:
        """Make the file and those beside it readable by their owner alone. The file was inspected before: a
        file that is not a ledger keeps its mode."""
        close_to_others((self.path, self._wal, self._shm, self._lock.path))

    def read_note(self) -> None:
        """Read the note, in a process that only reads. The note of a file that another process holds is
        ignored: that process is writing the log, and has inspected the file."""
        if _inode_at(self.path) in _held:
            return
        if self._lock.peek() or (self.path.exists() and not _size(self.path)):
            self._refuse_missing()

    def _refuse_own(self) -> None:
        # Checked first: opening and closing the file once more would release SQLite's locks.
        if _inode_at(self.path) in _held:
            raise self._lock.in_use(str(os.getpid()))

    def release(self) -> None:
        """Release the file, after every connection to it is closed."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._lock.close()
        with _holding:
            _held.discard(self._inode or (0, 0))
        self._inode = None

    # ── what a later start must find ─────────────────────────────────────────────────────────────

    def made(self) -> None:
        """Record that a sound ledger exists, and where its files are."""
        stats = [(path, path.stat()) for path in (self.path, self._wal, self._shm) if path.exists()]
        self._places = [(path, _inode(found)) for path, found in stats]
        self.measure()
        if not self._lock.note.made:
            self._lock.write(LockNote(os.getpid(), made=True))
            self._lock.flush()

    def committed(self, frames: int) -> None:
        """Record how many frames of the write-ahead log are on the disk. Raises if the files were moved."""
        self.check_in_place()
        self._sizes = (self._sizes[0], _size(self._names[1]))  # only a move of the log changes the other file
        if frames < self._lock.frames or not self._lock.note.salt:  # a restarted log has a new salt
            self._lock.write(LockNote(os.getpid(), True, _wal_salt(self._wal), 0))
        self._lock.write_frames(frames)

    def settled(self) -> None:
        """Record that the write-ahead log is empty: all of it is in the database.

        The note is flushed: the log restarts now, and after a loss of power an older note would demand frames
        that are no longer in the log.
        """
        if self.problem is None and self._lock.note.salt:
            self._lock.write(LockNote(os.getpid(), self._lock.note.made))
            with suppress(OSError):  # the disk fails: the next flush reports it
                self._lock.flush()

    # ── in its place ─────────────────────────────────────────────────────────────────────────────

    def check_in_place(self) -> None:
        """Raise if a restart would not find the files that are written; once raised, it always raises.

        Removing or renaming a file changes the modification time of its folder. If that time is unchanged and
        not too recent (`RACY_NS`), the files need not be checked one by one.
        """
        if self.problem is None:
            try:
                found = os.stat(self._folder)  # noqa: PTH116 - runs for every flush
                seen = (found.st_dev, found.st_ino, found.st_mtime_ns)
            except OSError:
                seen = None
            if seen is None or seen != self._seen:
                self._check_files()
                past = seen is not None and time.time_ns() - seen[2] > RACY_NS
                self._seen = seen if past else None
        if self.problem is not None:
            raise self.problem

    def measure(self) -> None:
        """Note how long the files are, after a commit or a move of the log into the database."""
        self._sizes = (_size(self._names[0]), _size(self._names[1]))

    def check_sizes(self) -> None:
        """Raise if a file is shorter than it was: the next write would restore its length, but not what was
        cut off."""
        for path, before in zip(self._names, self._sizes, strict=True):
            if _size(path) < before:
                self._check_files()  # it may be gone altogether
                self._condemn(
                    f"{path} was truncated while the ledger was in use: what was cut off is lost. Nothing "
                    "more is stored; stop this process, restore a backup, and start again"
                )
        if self.problem is not None:
            raise self.problem

    def _condemn(self, why: str) -> None:
        """Mark this file as unusable: every later use raises the error, which is logged once."""
        if self.problem is None:
            LOG.error("%s", why)
            self.problem = LedgerDamaged(why)

    def _check_files(self) -> None:
        for path, inode in self._places:
            try:
                found: _Inode | None = _inode(path.stat())
            except OSError:
                found = None
            if found != inode:
                how = "removed" if found is None else "replaced"
                self._condemn(
                    f"{path} was {how} while the ledger was in use: what is written now would be lost. "
                    "Nothing more is stored; stop this process, put the ledger's files back or restore "
                    "a backup, and start again"
                )
                return

    # ── sound ────────────────────────────────────────────────────────────────────────────────────

    def _refuse_missing(self) -> None:
        """Raise if the ledger existed once and is missing now: it is not replaced by an empty one."""
        exists = self.path.exists()
        existed = self._lock.note.made or _size(self._wal) > 0
        if self.path.stat().st_size if exists else not existed:
            return
        beside = f"{self._lock.path.name} and {self._wal.name}" if existed else ""
        named = " and ".join(name for name in ("the empty file" if exists else "", beside) if name)
        raise LedgerDamaged(
            f"there was a ledger at {self.path}, and now the file {'is empty' if exists else 'is gone'}. Put "
            f"it back or restore a backup; to begin anew, remove {named} as well"
        )

    def add_checksums(self) -> None:
        """Rewrite a database of an older version with checksums. This also erases deleted data.

        The database is rewritten twice: the VFS writes checksums only after it has seen a header that asks
        for them, and some pages may be written before that. After a crash the next start finishes the work.
        """
        self._lock.write(replace(self._lock.note, converting=True))
        self._lock.flush()
        for reserve in (True, False):
            db = self.connect()
            try:
                db.execute("PRAGMA checksum_verification = OFF")
                set_journal_mode(db, "delete")
                if reserve:
                    reserve_checksums(db)
                db.execute("VACUUM")
            finally:
                db.close()
        self._lock.write(replace(self._lock.note, converting=False, salt="", frames=0))

    def finish(self) -> None:
        """Finish a rewrite that a crash interrupted."""
        if self._lock.note.converting and checksum_vfs() is not None:
            self.add_checksums()

    def inspect(self) -> None:
        """Inspect an existing file without changing it; raise if it is not a sound duly ledger."""
        self._roll_back()
        self._refuse_lost_log()
        had_log = self._wal.exists()
        db = self.connect(readonly=True)
        try:
            try:
                empty = not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
            except apsw.NotADBError:
                raise LedgerDamaged(
                    f"{self.path} is not a ledger: it does not start like a SQLite file. It was not touched"
                ) from None
            if empty and not self._lock.note.begun and self._is_note_current():
                raise LedgerDamaged(
                    f"there was a ledger at {self.path}, and now the file is empty, as after a crash whose "
                    f"log is gone. Put {self._wal.name} back or restore a backup; to begin anew, remove the "
                    "file as well"
                )
            if not empty and db.pragma("application_id") != APPLICATION_ID:
                raise LedgerError(
                    f"{self.path} is a database of another program, not a duly ledger; choose another file"
                )
            sql.pending("sqlite", int(db.pragma("user_version")))
            self._inspect_wal(db)
            self._inspect_length(db)
            if not empty and _made_with_checksums(db) and _reserved(db) != CHECKSUM_BYTES:
                raise self._damaged("its header does not say that its pages have checksums")
            if self.path.stat().st_size <= CHECKED_SIZE:
                self._read_through(db)
        except BaseException:
            db.close()
            if self._fd is not None and not had_log and not _size(self._wal):
                self._wal.unlink(missing_ok=True)  # SQLite created it to read the file
            raise
        finally:
            db.close()

    def _roll_back(self) -> None:
        """Undo a rewrite of the whole file that a crash interrupted; a reader cannot do this."""
        if self._fd is not None and _size(self.path.with_name(self.path.name + "-journal")):
            db = self.connect()
            try:
                db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
            finally:
                db.close()

    def _inspect_length(self, db: apsw.Connection) -> None:
        """Raise if the file is shorter than its header says and no log could hold the rest. SQLite reads a
        page that is cut as if zeros followed, and then no checksum is verified."""
        pages, size = int(db.pragma("page_count")), int(db.pragma("page_size"))
        # The log is looked at afterwards: if it is empty now, all those pages are in the file.
        if _size(self._wal) > WAL_HEADER or not self._is_note_current():
            return
        if self._fd is not None:
            pages = max(pages, int.from_bytes(os.pread(self._fd, HEADER, 0)[28:32], "big"))
        if pages * size > _size(self.path):
            raise self._damaged("it is shorter than it was")

    def _inspect_wal(self, db: apsw.Connection) -> None:
        """Raise if the write-ahead log lacks frames that were flushed to it. SQLite treats a damaged log as a
        shorter one, and would silently drop the frames after the damage."""
        salt, frames = self._lock.note.salt, self._lock.note.frames
        if not salt:
            return
        sound, _ = db.wal_checkpoint(mode=CHECKPOINT_NOOP)
        short = sound < frames and (sound <= 0 or _wal_salt(self._wal) == salt)
        if short and self._is_note_current():
            raise self._damaged(
                f"its log {self._wal.name} held {frames} pages, and {max(sound, 0)} of them are sound"
            )

    def _refuse_lost_log(self) -> None:
        """Raise if the write-ahead log is missing and held changes that are not in the database yet."""
        if self._lock.note.salt and not _size(self._wal) and self._is_note_current():
            raise LedgerDamaged(
                f"{self._wal} is gone, and {self.path} was not closed properly: what was stored last may be "
                "lost. Put it back or restore a backup; if another program has opened the ledger since and "
                f"taken the log over (sqlite3 does), remove {self._lock.path.name} and start again"
            )

    def _is_note_current(self) -> bool:
        """Return whether no other process can have changed the files since the note was read."""
        return self._lock.held_here or not self._lock.is_held()

    def _read_through(self, db: apsw.Connection) -> None:
        found = db.execute("PRAGMA quick_check(1)").fetchall()
        if found != [("ok",)]:
            raise self._damaged(str(found[0][0]))

    def _damaged(self, why: str) -> LedgerDamaged:
        return LedgerDamaged(f"{self.path} is damaged ({why}). It was not touched; restore a backup")

    def read_through(self, stop: threading.Event) -> None:
        """Read a large file while it is in use, to verify its pages; damage becomes this file's `problem`."""
        db = self.connect(readonly=True)
        try:
            db.set_progress_handler(stop.is_set, 10_000)
            self._read_through(db)
        except (LedgerDamaged, apsw.CorruptError, apsw.IOError) as problem:
            if not stop.is_set():
                self._condemn(f"{self.path} is damaged ({problem}); nothing more is stored. Restore a backup")
        except apsw.Error:
            pass  # interrupted or busy: pages are also verified when they are used
        finally:
            db.close()


# ── what SQLite says, in our words ──────────────────────────────────────────────────────────────────


class translated:  # noqa: N801 - reads as a word
    """Translates SQLite's errors into duly's, which say what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case None:
                pass
            case apsw.CorruptError() | apsw.NotADBError():
                raise LedgerDamaged(f"{self._path} is damaged ({error}); restore a backup") from error
            case apsw.IOError() if _is_checksum(error):
                raise LedgerDamaged(
                    f"{self._path} is damaged (a page does not match its checksum); restore a backup. If it "
                    "is a copy that sqlite3 has made (.backup, VACUUM INTO), its checksums can be written "
                    "again: see 'Backups' in docs/ledger.md"
                ) from error
            case apsw.FullError():
                raise LedgerUnavailable(
                    f"the disk of {self._path} is full; nothing was stored. Free some room, then try again"
                ) from error
            case (
                apsw.IOError()
                | apsw.CantOpenError()
                | apsw.ReadOnlyError()
                | apsw.BusyError()
                | apsw.LockedError()
                | OSError()
            ):
                raise LedgerUnavailable(
                    f"{self._path} cannot be used now ({error}); nothing was stored"
                ) from error


def _is_checksum(error: BaseException) -> bool:
    """Return whether an error reports a page with a wrong checksum."""
    return getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA


# ── checksums on pages ───────────────────────────────────────────────────────────────────────────


def set_journal_mode(db: apsw.Connection, mode: str) -> None:
    """Set the journal mode of a database: `wal`, or `delete` for a database without a log beside it. If the
    disk fails, SQLite keeps the old mode and only reports that, so this function raises."""
    found = str(db.execute(f"PRAGMA journal_mode = {mode}").get)
    if found != mode:
        raise apsw.IOError(f"the disk failed while the journal mode was set to {mode}; it is still {found}")


def reserve_checksums(db: apsw.Connection) -> bool:
    """Reserve room for checksums in a database before it is created or vacuumed; return whether it did."""
    if checksum_vfs() is None:
        return False
    room = ctypes.c_int(CHECKSUM_BYTES)
    return bool(db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(room)))


def _reserved(db: apsw.Connection) -> int:
    room = ctypes.c_int(-1)
    db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(room))
    return room.value


def has_checksums(db: apsw.Connection) -> bool:
    """Return whether the header of this database says that its pages have checksums."""
    return _reserved(db) == CHECKSUM_BYTES


def _made_with_checksums(db: apsw.Connection) -> bool:
    """Return whether this ledger records that it was made with checksums."""
    try:
        return bool(db.execute("SELECT checksums FROM file").get)
    except apsw.SQLError:
        return False  # an older schema


# ── the write-ahead log ──────────────────────────────────────────────────────────────────────────


def _write_header(path: Path) -> None:
    """Write the header of a new database into an empty file."""
    db = connect(path)
    try:
        db.execute("PRAGMA journal_mode = MEMORY")
        reserve_checksums(db)
        db.pragma("application_id", APPLICATION_ID)
    finally:
        db.close()


def _flush_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _wal_salt(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(WAL_HEADER)[16:24].hex()
    except OSError:
        return ""


def _inode_at(path: Path) -> _Inode | None:
    try:
        return _inode(path.stat())
    except OSError:
        return None


def _inode(found: os.stat_result) -> _Inode:
    return found.st_dev, found.st_ino


def _size(path: Path | str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - runs for every flush
    except OSError:
        return 0
