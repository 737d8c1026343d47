"""Files and folders that only their owner may read: ledgers, keys, tokens, passwords.

A private file is written whole or not at all, also through a power cut. It is private from its first byte,
whatever the umask of the process. If an older version or another program has left it readable, it is made
private before use, and that is logged.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LOG: Final = logging.getLogger("duly.runtime.files")

PRIVATE_FILE: Final = 0o600
PRIVATE_FOLDER: Final = 0o700


def write_private(path: Path, text: bytes) -> None:
    """Write a private file, replacing the one that was there before."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def private_folder(path: Path) -> None:
    """Create a folder that only its owner may read; an existing one is made private.

    The current folder and those above it are left alone: other programs may use them.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    if not Path.cwd().is_relative_to(path.resolve()):
        close_to_others((path,))


@contextmanager
def new_private_folder(path: Path | None) -> Iterator[None]:
    """Create a private folder if one is given, and remove it again if the block fails and leaves it empty."""
    missing = [] if path is None else [one for one in (path, *path.parents) if not one.exists()]
    if path is not None:
        private_folder(path)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # something is in it
            for folder in missing:
                folder.rmdir()
        raise


def close_to_others(paths: Iterable[Path]) -> None:
    """Make files and folders private to their owner. Missing ones are skipped, and so are links, devices and
    pipes, such as /dev/null; one that belongs to another user, and so cannot be changed, is logged."""
    for path in paths:
        try:
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or not mode & 0o077:
                continue
            path.chmod(stat.S_IMODE(mode) & 0o700)
        except FileNotFoundError:
            continue
        except OSError as problem:
            LOG.warning("other users may read %s, and that cannot be changed: %s", path, problem.strerror)
        else:
            LOG.warning("closed %s to other users; it was open (mode %04o)", path, stat.S_IMODE(mode))


def close_tree(folder: Path) -> None:
    """Make a folder with everything in it private to its owner."""
    if folder.is_dir():
        close_to_others((folder, *sorted(folder.rglob("*"))))
