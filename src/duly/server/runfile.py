"""The notice: `hub.json` in the data folder, where a running hub says how to reach it.

The law: it is there while the hub runs, readable by its owner alone, since its token lets the command line
of this machine ask the hub anything. After a kill -9 it is left behind: it says where to ask, never that
somebody will answer.
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
    """Where a hub listens, the token to ask it with, and which process it is."""

    url: str
    token: str
    pid: int


def post(data: Path, notice: RunFile) -> None:
    """Put it up, whole or not at all."""
    write_private(data / NAME, msgspec.json.encode(notice))


def remove(data: Path) -> None:
    (data / NAME).unlink(missing_ok=True)


def read(data: Path) -> RunFile | None:
    """Where the hub of this data folder runs, if it seems to."""
    try:
        notice = msgspec.json.decode((data / NAME).read_bytes(), type=RunFile)
        os.kill(notice.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return notice
