"""A disk of a few megabytes, for tests that fill one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import unable


@contextmanager
def small_disk(folder: Path, size: str = "6m") -> Iterator[Path]:
    """A disk of six megabytes at this folder, or of another size, where this machine lets us have one."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False
    ).returncode:
        unable("only root can have a disk of its own")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
