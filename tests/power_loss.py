"""Power fails under a real process: what it had not flushed is gone, by chance, sector by sector.

`tests/power_loss.c` is loaded into the process and notes what it writes and flushes. After a kill -9 `lose`
turns its files into what a disk may hold then: of a sector that was not flushed the old or the new content,
or one in between; a file that was made without a flush of its folder may be gone, and one that was removed
may be back.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_suffix(".c")
SECTOR: Final = 512
WRITTEN_BACK: Final = 0.05
"""How often the operating system has written a sector back by itself before it is written again."""
_HEAD: Final = struct.Struct("<cQQII")


def build(folder: Path) -> Path:
    """Compile the library."""
    library = folder / "power_loss.so"
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-O2",
            "-Wall",
            "-Werror",
            "-Wno-format-truncation",
            "-o",
            library,
            SOURCE,
            "-ldl",
            "-lpthread",
        ],
        check=True,
    )
    return library


class _Entry(NamedTuple):
    kind: str
    path: Path
    offset: int
    size: int
    data: bytes


class _Unflushed:
    """A file, as far as it is not flushed."""

    def __init__(self, size: int) -> None:
        self.sectors: dict[int, bytes] = {}
        self.size = size


class PowerLoss:
    """The disk under one folder of a process."""

    def __init__(self, library: Path, folder: Path, log: Path) -> None:
        self._folder, self._log = folder, log
        log.mkdir()
        self.env = {
            "LD_PRELOAD": str(library), "DULY_POWER_FOLDER": str(folder), "DULY_POWER_LOG": str(log),
        }  # fmt: skip
        self.losses = 0
        self.sectors_lost = 0

    def lose(self, rng: Random) -> None:
        """Leave what a loss of power leaves, now that the process is dead, and begin anew."""
        chance = rng.choice([0.1, 0.5, 0.5, 0.9, 1.0])
        unflushed, made, removed = self._read(rng)
        for path, kept in removed.items():
            if not path.exists() and kept.exists() and rng.random() < chance:
                shutil.copyfile(kept, path)
        for path, file in sorted(unflushed.items()):
            if path.exists():
                self._put_back(path, file, rng, chance)
        for path in sorted(made):
            if path.exists() and rng.random() < chance / 2:
                path.unlink()
        for shared in self._folder.rglob("*-shm"):
            shared.unlink()
        shutil.rmtree(self._log)
        self._log.mkdir()
        self.losses += 1

    def _put_back(self, path: Path, file: _Unflushed, rng: Random, chance: float) -> None:
        with path.open("r+b") as disk:
            size = os.fstat(disk.fileno()).st_size
            for sector, old in sorted(file.sectors.items()):
                if rng.random() < chance:
                    disk.seek(sector * SECTOR)
                    disk.write(old)
                    self.sectors_lost += 1
            disk.truncate(file.size if rng.random() < chance else size)

    def _read(self, rng: Random) -> tuple[dict[Path, _Unflushed], set[Path], dict[Path, Path]]:
        """What is not flushed, made and not in a flushed folder, and removed from one."""
        files: dict[Path, _Unflushed] = {}
        made: set[Path] = set()
        removed: dict[Path, Path] = {}
        for entry in self._entries():
            path = entry.path
            match entry.kind:
                case "W":
                    file = files.setdefault(path, _Unflushed(entry.size))
                    for at in range(0, len(entry.data), SECTOR):
                        sector, old = (entry.offset + at) // SECTOR, entry.data[at : at + SECTOR]
                        if sector not in file.sectors or rng.random() < WRITTEN_BACK:
                            file.sectors[sector] = old
                case "S":
                    files.pop(path, None)
                case "D":
                    made = {one for one in made if one.parent != path}
                    removed = {one: kept for one, kept in removed.items() if one.parent != path}
                case "C":
                    made.add(path)
                case "U":
                    made.discard(path)
                    removed[path] = self._log / f"removed-{entry.data.decode()}"
                case "R":
                    target = Path(entry.data.decode())
                    files.pop(target, None)
                    if path in files:
                        files[target] = files.pop(path)
                    made.discard(path)
        return files, made, removed

    def _entries(self) -> Iterator[_Entry]:
        log = self._log / "log"
        raw = log.read_bytes() if log.exists() else b""
        at = 0
        while at + _HEAD.size <= len(raw):
            kind, offset, size, path_length, length = _HEAD.unpack_from(raw, at)
            at += _HEAD.size
            path, data = raw[at : at + path_length], raw[at + path_length : at + path_length + length]
            at += path_length + length
            if at <= len(raw):  # else it was killed while it noted this
                yield _Entry(kind.decode(), Path(os.fsdecode(path)), offset, size, data)
