"""Files that are ours alone: keys, tokens, passwords.

The law: written whole or not at all, also through a power cut, and readable by their owner only.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: bytes) -> None:
    """Put this file there, in place of what was there before."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
