"""The run file: `hub.json` in the data folder, which says how to reach a running hub.

It exists while the hub runs. Only its owner may read it, since its token gives the command line of this
machine admin rights. After a kill -9 it is left behind, so it does not prove that a hub will answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from duly.runtime.files import write_private

NAME: Final = "hub.json"


class RunFile(Struct, frozen=True):
    """The address of a hub, the token for its owner, and its process id."""

    url: str
    token: str
    pid: int


def write(folder: Path, content: RunFile) -> None:
    """Write the run file atomically."""
    write_private(folder / NAME, msgspec.json.encode(content))


def remove(folder: Path) -> None:
    """Remove the run file of a hub that stops."""
    (folder / NAME).unlink(missing_ok=True)


def read(folder: Path) -> RunFile | None:
    """Return the run file in this data folder, if its process exists."""
    try:
        content = msgspec.json.decode((folder / NAME).read_bytes(), type=RunFile)
        os.kill(content.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return content
