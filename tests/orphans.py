"""Ends what a test run leaves behind: a pytest that is killed ends no fixture, and so no server.

A process of its own watches the run. When the run's first process has gone, however that came, it ends every
process that has the name of the run's folder in its environment (servers, hubs, workers, browsers, and what
those have started), and removes the folder. Only Linux shows the environments of processes; elsewhere the
folder alone is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RUN_FOLDER = "TEST_RUN_FOLDER"
"""The variable that names a folder of the test run, which all its processes know."""
PATIENCE = 3.0
"""Seconds after which PostgreSQL is asked no longer."""


class OrphanWatch:
    """Watches the process that makes it; `close` says that the run has ended by itself."""

    def __init__(self, folder: str) -> None:
        env = {name: value for name, value in os.environ.items() if name != RUN_FOLDER}
        # In a session of its own, where a Ctrl-C for the run does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder],
            stdin=subprocess.PIPE, env=env, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """Return when nothing of the run is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def orphans(folder: str) -> Iterator[int]:
    """The processes of the run that has this folder."""
    wanted = f"{RUN_FOLDER}={folder}".encode()
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in each.read_bytes().split(b"\0"):
                yield int(each.parent.name)
        except OSError:
            continue  # it has ended meanwhile, or is another user's


def _end(folder: str) -> None:
    """End them. PostgreSQL is asked first: it removes the memory that its processes share."""
    for pid in orphans(folder):
        _signal(pid, signal.SIGQUIT if _name(pid) == "postgres" else signal.SIGKILL)
    asked = time.monotonic()
    while left := list(orphans(folder)):  # again, for what those have started meanwhile
        for pid in left:
            if _name(pid) != "postgres" or time.monotonic() > asked + PATIENCE:
                _signal(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.stdin.read()  # it ends when the run does
    _end(sys.argv[1])
