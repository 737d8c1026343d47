"""Files and folders that only their owner may read: ledgers, keys, tokens, passwords.

The laws. A private file is written whole or not at all, also through a power cut. What is private is so from
its first byte, whatever the process's umask; what an older version or another program has left open is closed
before it is used, and a line in the log says so.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LOG: Final = logging.getLogger("duly.runtime.files")

PRIVATE_FILE: Final = 0o600
PRIVATE_FOLDER: Final = 0o700


def write_private(path: Path, text: bytes) -> None:
    """Put this file there, in place of what was there before."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def private_folder(path: Path) -> None:
    """Make this folder, readable by its owner alone; an existing one is closed to others.

    The current folder and those above it are left as they are: other programs may live there.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    if not Path.cwd().is_relative_to(path.resolve()):
        close_to_others((path,))


def close_to_others(paths: Iterable[Path]) -> None:
    """Take these files and folders away from everybody but their owner. Those that are not there are skipped;
    what cannot be closed, because it belongs to another user, is said."""
    for path in paths:
        try:
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) or not mode & 0o077:
                continue
            path.chmod(stat.S_IMODE(mode) & 0o700)
        except FileNotFoundError:
            continue
        except OSError as problem:
            LOG.warning("others may read %s, and it cannot be closed: %s", path, problem.strerror)
        else:
            LOG.warning("closed %s to other users; it was open (mode %04o)", path, stat.S_IMODE(mode))


def close_tree(folder: Path) -> None:
    """The same for a folder with everything in it."""
    if folder.is_dir():
        close_to_others((folder, *sorted(folder.rglob("*"))))
